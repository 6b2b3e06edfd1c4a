"""A text has one beginning: its log-probability is the same where it is generated, scored or echoed."""

from typing import Any

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.decoding.generator import Generator
from manyheads.decoding.settings import GenerationSettings
from manyheads.extras.serving.jobs import TextBatch
from manyheads.models.reformer.config import ReformerConfig
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.tasks.language_modelling.score import score_texts
from manyheads.text.vocabulary import ByteVocabulary, Vocabulary
from manyheads.text.word_vocabulary import WordVocabulary

WORDS = ["<eos>", "<unk>", "<eod>", "It", "is", "a", "test", "of", "words"]
VOCABULARIES: dict[str, Any] = {"bytes": ByteVocabulary, "words": lambda documents: WordVocabulary(WORDS, documents)}


def make(architecture: str, vocabulary: Vocabulary) -> Generator:
    config: Any
    if architecture == "reformer":
        config = ReformerConfig(
            vocab_size=vocabulary.vocab_size, d_model=16, num_heads=2, d_ff=24, layers=("local", "lsh"), max_len=128
        )
    else:
        config = TransformerXLConfig(
            vocab_size=vocabulary.vocab_size, d_model=16, num_heads=2, d_ff=24, num_layers=2, memory_len=64
        )
    torch.manual_seed(3)
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    banned = tuple(index for index in (vocabulary.end_id, vocabulary.line_id, *range(128, 256)) if index is not None)
    banned = tuple(sorted({index for index in banned if index < vocabulary.vocab_size}))
    return Generator(model, vocabulary, GenerationSettings(max_new_tokens=20, banned_ids=banned), "cpu")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("documents", ["none", "files", "lines"])
@pytest.mark.parametrize("level", ["bytes", "words"])
@pytest.mark.parametrize("architecture", ["transformer-xl", "reformer"])
def test_generated_text_is_scored_as_it_was_generated(architecture: str, level: str, documents: Any) -> None:
    generator = make(architecture, VOCABULARIES[level](documents))
    vocabulary = generator.vocabulary
    for prompt in ("It is", ""):
        [[found]] = generator.continuations([prompt])
        text = prompt + found.text
        ids = vocabulary.encode(text)
        assert ids == [*vocabulary.encode(prompt), *found.ids], "the same tokens"
        [scored] = score_texts(generator, [text])
        first = len(ids) - len(found.ids)
        assert scored.token_log_probs[first : len(ids)] == pytest.approx(found.log_probs, abs=1e-3)
        [done] = TextBatch(generator, [(ids, 0)]).advance()
        assert done.content.log_probs == pytest.approx(scored.token_log_probs[: len(ids)], abs=1e-3)


def test_every_prompt_begins_as_a_scored_text() -> None:
    for documents in ("none", "files", "lines"):
        generator = make("transformer-xl", ByteVocabulary(documents))
        start = generator.vocabulary.start_id
        assert generator.encode_prompts(["", "a"]) == [[start], [start, 97]]
        assert generator.begin_ids([[], [97]]) == [[start], [start, 97]]
