"""What a search reads from a GPU, and when, counted on `meta`: each option of each search, and text generation."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launches import Launches, as_on_cuda, reads
from torch import Tensor

from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.decoding.generation import Generation
from manyheads.decoding.greedy_and_sampling import filtered
from manyheads.decoding.model_runner import pack
from manyheads.decoding.search import search_steps
from manyheads.decoding.search_problem import SearchProblem
from manyheads.decoding.settings import DecodingSettings, GenerationSettings, drawing_options
from manyheads.models.transformer.config import TransformerConfig
from manyheads.nn.kernels import modes, policy
from manyheads.text.vocabulary import ByteVocabulary

IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
DRAWING: dict[str, Any] = {
    "temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9, "eta_cutoff": 0.01,
}  # fmt: skip
SAMPLING: list[dict[str, Any]] = [{}, *({name: value} for name, value in DRAWING.items()), DRAWING]
OF_ALL: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 40}, {"banned_ids": (7, 9)},
]  # fmt: skip
OF_SEARCHES = [*OF_ALL, {"forced_prefix_ids": (5, 6)}, {"forced_eos": True}, {"renormalize_logits": True}]
OF_BEAMS: list[dict[str, Any]] = [
    {}, {"length_penalty": 0.0}, {"length_penalty_kind": "power"}, {"length_penalty_kind": "none"},
    {"early_stopping": True}, {"early_stopping": "never"}, {"rules": "marian"}, {"rules": "marian-5"},
    {"num_return_sequences": 3},
]  # fmt: skip
SEARCHES = [
    *({"num_beams": 1, **options} for options in OF_SEARCHES),
    *({"num_beams": 1, "do_sample": True, **options} for options in SAMPLING),
    {"num_beams": 1, "do_sample": True, "num_return_sequences": 2, "repetition_penalty": 1.3},
    *({"num_beams": 3, **options} for options in [*OF_BEAMS, *OF_SEARCHES]),
]


def _name(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items() if len(options) < 4) or "all or none"


def test_every_option_of_sampling_is_here() -> None:
    assert DRAWING.keys() == drawing_options(DecodingSettings).keys() == drawing_options(GenerationSettings).keys()


class Grammar:
    """Permits all tokens, and reads the tokens so far, as grammars of patterns do."""

    def of(self, source: Tensor, lengths: Tensor) -> Grammar:
        return self

    def allowed(self, history: Tensor, sentence: Tensor, room: Tensor) -> Tensor:
        history.tolist()
        return policy.sent(torch.ones(len(history), 300, dtype=torch.bool), history.device)


@pytest.mark.parametrize(
    ("options", "has_grammar"),
    [*((one, False) for one in SEARCHES), ({"num_beams": 1}, True), ({"num_beams": 3}, True)],
    ids=lambda one: _name(one) if isinstance(one, dict) else "grammar" * one,
)
def test_a_search_reads_every_eighth_step(
    options: dict[str, Any], has_grammar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a grammar twice in each step: the tokens, which it needs on the host, and at once after them who ended."""
    config = TransformerConfig(
        source_vocab_size=300, target_vocab_size=300, d_model=16, num_heads=2, d_ff=32, num_encoder_layers=1,
        num_decoder_layers=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = build_model(config).eval()
        source, lengths = torch.ones(6, 9, dtype=torch.int64), torch.ones(6, dtype=torch.int64)
    monkeypatch.setattr(SearchProblem, "range_of", staticmethod(lambda limits: (1, 100)))
    pack(model)
    settings = DecodingSettings(max_new_tokens=100, **options)
    grammar: Any = Grammar() if has_grammar else None
    size = 4 if settings.num_beams > 1 else 100  # tokens so far, or the longest output, for which numbers are drawn
    with torch.inference_mode(), as_on_cuda(), reads(0, size) as waits, modes.fast():
        steps = search_steps(model, source, lengths, settings, **IDS, grammar=grammar)
        for _ in range(8 - len(settings.forced_prefix_ids)):
            next(steps)
        waits.clear()
        with Launches() as launches:
            for _ in range(8):
                next(steps)
    assert launches.count > 8 * 20
    if settings.num_beams > 1:
        assert waits.pop("int", 0) <= 1  # where the table of the beams' past is full, and doubles
    assert +waits == ({"tolist": 16} if has_grammar else {"tolist": 1})


TEXTS = [name for name, entry in ARCHITECTURES.items() if entry.task == "language-modelling"]
GENERATIONS: list[dict[str, Any]] = [
    *({"do_sample": False, **options} for options in [{}, *OF_ALL]),
    *SAMPLING,
    {"num_return_sequences": 2, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"regex": "[a-z]*"},
]


@pytest.mark.parametrize(
    ("architecture", "options"),
    [*((name, one) for name in TEXTS for one in GENERATIONS)],
    ids=lambda one: one if isinstance(one, str) else _name(one),
)
def test_a_generation_reads_only_its_tokens(
    architecture: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and their log-probabilities, in one place of each step; copies to the device are from pinned memory."""
    if "regex" in options:
        pytest.importorskip("llguidance", reason="the extra constrained is not installed")
    presets = import_module(f"manyheads.models.{architecture.replace('-', '_')}.config").PRESETS
    vocabulary = ByteVocabulary("lines")
    with torch.device("meta"):
        model = build_model(replace(presets["debug"], vocab_size=300)).eval()
    pack(model)
    meta, to = torch.device("meta"), Tensor.to
    pinned: list[torch.Size] = []
    monkeypatch.setattr(Tensor, "to", lambda x, *how, **more: x if how[:1] == ("cpu",) else to(x, *how, **more))
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: pinned.append(x.shape) or x)
    monkeypatch.setattr(policy, "pinning", lambda device: nullcontext() if device.type == "meta" else None)
    runner: Any = SimpleNamespace(model=model, steps=model, device=meta, inference=lambda: modes.fast())
    settings = GenerationSettings(max_new_tokens=90, **options)
    prompts = [[256, *b"ab"], [256, *b"abcab"]]
    with torch.inference_mode(), as_on_cuda(), reads(98) as waits, modes.fast():
        generation = Generation(
            runner, vocabulary, prompts, settings, numbers=None, each=None, num_top=2, cache=None, stop_asked=None
        )
        steps = generation.steps()
        for _ in range(2):
            next(steps)
        waits.clear()
        pinned.clear()
        with Launches() as launches:
            for _ in range(6):
                next(steps)
    assert launches.count > 6 * 10
    assert +waits == {"tolist": 6 * 4}  # a token, its log-probability, the best ones and theirs
    sent = 6 * bool(options.keys() & {"no_repeat_ngram_size", "regex"})
    assert len(pinned) <= sent


@pytest.mark.parametrize("top_k", [0, 300])
def test_a_nucleus_without_a_look_is_the_same(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU sorts all tokens, because to find out whether 128 are enough it would be waited for."""
    torch.manual_seed(0)
    scores = torch.randn(5, 1000) * torch.tensor([[0.1], [1], [2], [4], [9]])
    for top_p in (0.1, 0.9, 0.999):
        found = []
        for looks in (True, False):
            monkeypatch.setattr(policy, "can_look", lambda x, looks=looks: looks)
            probs, ids = filtered(scores, top_k=top_k, top_p=top_p)
            assert ids is not None
            found.append(torch.zeros_like(scores).scatter(1, ids, probs))
        assert torch.equal(*found)
        assert probs.shape[1] == (top_k or 1000)
