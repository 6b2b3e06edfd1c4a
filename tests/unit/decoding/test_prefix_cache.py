"""A prompt that continues an earlier one is read from where it continues, and gives the same text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.decoding.generation import READ_AT_ONCE, Continuation, PrefixCache
from manyheads.decoding.generator import Generator
from manyheads.models.composites import LanguageModel
from manyheads.models.reformer.config import ReformerConfig
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.text.vocabulary import ByteVocabulary

CONFIGS = {
    "transformer_xl": TransformerXLConfig(
        vocab_size=256, d_model=16, num_heads=2, d_ff=24, num_layers=2, memory_len=30
    ),
    "reformer": ReformerConfig(
        vocab_size=256, d_model=16, num_heads=2, d_ff=24, num_layers=2, layers=("local", "lsh"), max_len=4096,
        chunk_len=16, local_chunk_len=16, num_hashes=2,
    ),
}  # fmt: skip


@pytest.fixture(params=list(CONFIGS))
def generator(request: pytest.FixtureRequest) -> Generator:
    torch.manual_seed(3)
    model = build_model(CONFIGS[request.param])
    assert isinstance(model, LanguageModel)
    return Generator(model, ByteVocabulary(), None, "cpu")


class Counted:
    """Counts the tokens that a model reads."""

    def __init__(self, model: Any) -> None:
        self.model, self.tokens = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def step(self, tokens: torch.Tensor, *more: Any, **options: Any) -> Any:
        self.tokens += tokens.numel()
        return self.model.step(tokens, *more, **options)


def written(generator: Generator, text: str, cache: PrefixCache | None, **options: Any) -> Continuation:
    settings = generator.options(max_new_tokens=6, **options)
    steps = generator.steps(generator.encode_prompts([text]), settings, cache=cache)
    [ended] = [token.ended for new in steps for token in new if token.ended]
    return ended


def test_only_what_is_new_is_read(generator: Generator) -> None:
    cache = PrefixCache(1 << 26, READ_AT_ONCE)
    prompt = "".join(chr(97 + place * place % 23) for place in range(1300))
    counted = Counted(generator.runner.steps)
    generator.runner.steps = counted
    first = written(generator, prompt, cache)
    assert counted.tokens == 1 + 1300 + 5
    longer = prompt + first.text + "and more"
    counted.tokens = 0
    again = written(generator, longer, cache)
    assert counted.tokens == 1 + len(longer.encode()) - 1024 + 5
    assert cache.longest(generator.encode_prompts([longer])[0], "another context") == 0
    alone = written(generator, longer, None)
    assert again.ids == alone.ids
    assert again.log_probs == pytest.approx(alone.log_probs, abs=1e-4)
    assert written(generator, prompt, cache).ids == first.ids, "a state that was taken is unchanged"
    exact = prompt[:1024]
    assert written(generator, exact, cache).ids == written(generator, exact, None).ids


def test_settings_of_the_context_are_part_of_the_key() -> None:
    torch.manual_seed(3)
    model = build_model(CONFIGS["transformer_xl"])
    assert isinstance(model, LanguageModel)
    generator = Generator(model, ByteVocabulary(), None, "cpu")
    cache = PrefixCache(1 << 26, READ_AT_ONCE)
    prompt = "ab" * 400
    written(generator, prompt, cache)
    assert written(generator, prompt, cache, memory_len=5).ids == written(generator, prompt, None, memory_len=5).ids


@dataclass
class Sized:
    """A state of a given size; a list is its only leaf that counts."""

    values: list[torch.Tensor]

    def clone(self) -> Sized:
        return replace(self)


def test_the_least_recently_used_states_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyheads.decoding.generation.tree_leaves", lambda state: state.values)
    cache = PrefixCache(100, 2)

    def state(size: int) -> Sized:
        return Sized([torch.zeros(size, dtype=torch.uint8)])

    for first in (1, 2):
        cache.put([first, 0], "", state(40))
    assert cache.take([1, 0, 5], "")[0] == 2
    cache.put([3, 0], "", state(40))
    assert [cache.longest([first, 0, 9], "") for first in (1, 2, 3)] == [2, 0, 2]
    cache.put([4, 0], "", state(101))
    assert cache.longest([4, 0, 9], "") == 0
    assert cache.num_bytes == 80
    assert cache.take([1, 0], "") == (0, None), "the last token must be read"
