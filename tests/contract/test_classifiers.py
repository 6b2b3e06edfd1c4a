"""What every classifier of the table must hold: an encoder in both directions, one vector a text, one label."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from manyheads.catalogue import build_model
from manyheads.errors import ConfigError
from manyheads.extras.classification.classifier import TextPooling
from manyheads.extras.classification.labelled_store import LabelledBatch

VOCAB, LABELS = 23, ("a", "b", "c")


def make(rows: int = 4, length: int = 9, seed: int = 0) -> LabelledBatch:
    """Texts of falling length, the last of one token; padding has the id 0."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB, (rows, length), generator=random)
    lengths = torch.linspace(length, 1, rows).long()
    tokens[torch.arange(length) >= lengths[:, None]] = 0
    return LabelledBatch(tokens, lengths, torch.arange(rows) % len(LABELS), torch.arange(rows))


def test_shapes_and_sums(classifier: Any) -> None:
    model, batch = classifier.build(labels=LABELS), make()
    with torch.no_grad():
        log_probs = model.log_probs(batch.tokens, batch.lengths)
        torch.testing.assert_close(model.log_probs(batch.tokens[:1]), log_probs[:1])  # no lengths: all tokens are real
    assert log_probs.shape == (4, 3)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(4))


def test_padding_is_never_seen(classifier: Any) -> None:
    """Neither other ids in the padding, nor more of it, nor other rows change what is said about a text."""
    model, batch = classifier.build(labels=LABELS), make()
    with torch.no_grad():
        before = model.log_probs(batch.tokens, batch.lengths)
        padding = torch.arange(batch.tokens.shape[1]) >= batch.lengths[:, None]
        other = batch.tokens.masked_fill(padding, 17)
        torch.testing.assert_close(model.log_probs(other, batch.lengths), before, rtol=1e-5, atol=1e-5)
        longer = F.pad(batch.tokens, (0, 5))
        torch.testing.assert_close(model.log_probs(longer, batch.lengths), before, rtol=1e-5, atol=1e-5)
        alone = torch.cat([model.log_probs(row[None, :n]) for row, n in zip(batch.tokens, batch.lengths, strict=True)])
        torch.testing.assert_close(alone, before, rtol=1e-5, atol=1e-5)


def test_the_first_position_sees_the_last_one(classifier: Any) -> None:
    """Encoders read in both directions."""
    model, batch = classifier.build(labels=LABELS, pooling="first"), make(rows=1, length=5)
    other = batch.tokens.clone()
    other[0, -1] = 3 + (other[0, -1] - 2) % (VOCAB - 3)
    with torch.no_grad():
        assert (model.log_probs(other) - model.log_probs(batch.tokens)).abs().max() > 1e-5


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_cross_entropy_over_texts(classifier: Any, smoothing: float) -> None:
    model, batch = classifier.build(labels=LABELS), make()
    output = model(batch, label_smoothing=smoothing)
    logits = model.log_probs(batch.tokens, batch.lengths)
    expected = F.cross_entropy(logits, batch.labels, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(output.loss_sum, expected)
    torch.testing.assert_close(output.nll_sum, F.cross_entropy(logits, batch.labels, reduction="sum").detach())
    assert int(output.num_tokens) == batch.num_target_tokens() == 4


@pytest.mark.one_in(2, "learned by heart")
@pytest.mark.first_variant
def test_one_batch_is_learned_by_heart(classifier: Any) -> None:
    model, batch = classifier.without_dropout().train(), make(rows=6)
    batch = replace(batch, labels=torch.arange(6) % 2)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(25):
        optimiser.zero_grad()
        model(batch).loss_sum.backward()
        optimiser.step()
    model.eval()
    with torch.no_grad():
        assert model.log_probs(batch.tokens, batch.lengths).argmax(1).tolist() == batch.labels.tolist()


@pytest.mark.first_variant
def test_evaluation_is_deterministic(classifier: Any) -> None:
    model, batch = classifier.build(labels=LABELS), make()
    with torch.no_grad():
        assert torch.equal(model.log_probs(batch.tokens, batch.lengths), model.log_probs(batch.tokens, batch.lengths))
        torch.manual_seed(3)
        assert float(model(batch).loss_sum) == float(model(batch).loss_sum)
        model.train()
        assert float(model(batch).loss_sum) != float(model(batch).loss_sum)  # dropout


def test_a_reversible_encoder_has_the_gradients_of_a_plain_one(reversible_classifier: Any) -> None:
    found = []
    for reversible in (True, False):
        model = reversible_classifier.build(dropout=0.0, reversible=reversible).double().train()
        torch.manual_seed(4)  # the hash seed of the call
        model(replace(make(), labels=torch.arange(4) % 2)).loss_sum.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["mean", "first"])
def test_pooling_reads_no_padding(kind: Any) -> None:
    hidden = torch.randn(2, 4, 3)
    hidden[1, 2:] = float("nan")
    vectors = TextPooling(kind)(hidden, torch.tensor([4, 2]))
    expected = hidden[1, :2].mean(0) if kind == "mean" else hidden[1, 0]
    torch.testing.assert_close(vectors[1], expected)
    if kind == "mean":
        assert torch.equal(TextPooling(kind)(hidden, torch.tensor([4, 0]))[1], torch.zeros(3))
    half = TextPooling(kind)(hidden.bfloat16(), torch.tensor([4, 2]))
    assert half.dtype == torch.bfloat16
    assert bool(half.isfinite().all())


def test_a_classifier_needs_its_labels(classifier: Any) -> None:
    with pytest.raises(ConfigError, match=r"model.labels has 1 labels; a classifier chooses among at least 2"):
        build_model(replace(classifier.config, labels=("only",)))
    with pytest.raises(ConfigError, match=r"model.vocab_size is not set"):
        build_model(replace(classifier.config, vocab_size=0))
    with pytest.raises(ConfigError, match=r"model.labels contains 'a' twice"):
        replace(classifier.config, labels=("a", "a"))
    with pytest.raises(ConfigError, match=r"model.labels contains ' '"):
        replace(classifier.config, labels=("a", " "))
