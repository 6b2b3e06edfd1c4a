"""Evaluation with other context than in training: tokens that are read again count once, and are seen by the next."""

import dataclasses

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.data.store import TokenStore
from manyheads.errors import ConfigError
from manyheads.evaluation.likelihood import evaluate_text
from manyheads.evaluation.reading import Reading
from manyheads.models.transformer_xl.config import PRESETS
from manyheads.text.vocabulary import ByteVocabulary
from tests.segment_batches import ids


@pytest.mark.parametrize("attention", ["relative", "absolute"])
def test_ext_len_is_a_window_that_moves(attention: str) -> None:
    """Without memory, the loss of a token is that of the segment and the ext_len tokens before it, read at once."""
    torch.manual_seed(0)
    vocabulary = ByteVocabulary()
    config = dataclasses.replace(PRESETS["debug"], vocab_size=vocabulary.vocab_size, dropout=0.0, attention=attention)
    model, tokens = build_model(config).eval(), ids(1, 30)[0]
    store = TokenStore.from_lists([tokens.tolist()], vocabulary.vocab_size)
    expected = 0.0
    for begin in range(1, 30, 4):
        first, last = max(0, begin - 6 - 1), min(begin + 4, 30)
        with torch.no_grad():
            log_probs = model.log_probs(tokens[None, first : last - 1])[0]
        expected -= sum(float(log_probs[place - first - 1, tokens[place]]) for place in range(begin, last))
    reading = Reading(segment_len=4, memory_len=0, ext_len=6, lanes=1)
    found = evaluate_text(model, store, reading, vocabulary)
    assert found.num_tokens == 29
    assert found.nll_sum == pytest.approx(expected, abs=1e-4)
    plain = evaluate_text(model, store, dataclasses.replace(reading, ext_len=0), vocabulary)
    assert abs(plain.nll_sum - expected) > 1e-3


def test_ext_len_needs_joined_documents() -> None:
    with pytest.raises(ConfigError, match="ext_len is 2, and documents are separate"):
        Reading(ext_len=2, documents="separate")
