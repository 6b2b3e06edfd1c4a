"""What every chart parser of the table must hold: states of words and their neighbours, charts, and a loss."""

import math
from typing import Any

import pytest
import torch

from manyheads.errors import ConfigError
from manyheads.extras.parsing.span_data import SpanBatch
from manyheads.extras.parsing.span_parser import LEAST_PROBABILITY, naive_log_partition

VOCAB, LABELS, TAGS = 23, 3, 3


def make(rows: int = 4, length: int = 6, seed: int = 0) -> SpanBatch:
    """Sentences of falling length, the last of one word, with right-branching trees."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(length, 1, rows).long()
    labels = torch.zeros(rows, length, length, dtype=torch.long)
    for row, last in enumerate(lengths.tolist()):
        for first in range(last):
            labels[row, first, last - 1] = (first + row) % (LABELS + 1)
    padding = torch.arange(length) >= lengths[:, None]
    pieces = torch.randint(1, VOCAB + 1, (rows, length, 3), generator=random).masked_fill(padding[:, :, None], 0)
    affixes = torch.randint(0, 2**16, (rows, length, 4), generator=random).masked_fill(padding[:, :, None], 0)
    tags = torch.randint(0, TAGS, (rows, length), generator=random)
    return SpanBatch(pieces, affixes, lengths, tags, labels, torch.arange(rows))


def built(span_parser: Any, **changes: Any) -> Any:
    """A model that finds constituents in many places, as one that is trained."""
    model = span_parser.build(**changes)
    with torch.no_grad():
        model.head.label_proj.bias.copy_(torch.tensor([0.0, 3.0, 0.0]))
    return model


def test_charts_hold_the_probabilities_of_constituents(span_parser: Any) -> None:
    """Beside sums over all labelled binary trees with and without a span."""
    model, batch = built(span_parser).double(), make(length=4)
    with torch.no_grad():
        charts = model.charts(batch.pieces, batch.affixes, batch.lengths)
        logits = model.head.span_logits(model.body(batch.pieces, batch.affixes, batch.lengths))
    assert charts.scores.shape == charts.labels.shape == (4, 4, 4)
    assert charts.tags.shape == (4, 4)
    assert bool(((charts.scores > 0) == (charts.labels > 0)).all())
    places = [(first, last) for first in range(4) for last in range(first, 4)]
    found = 0
    for row, length in enumerate(batch.lengths.tolist()):
        table = [[0.0] * 4 for _ in range(4)]
        for place, (first, last) in enumerate(places):
            table[first][last] = math.log1p(float(logits[row, place].exp().sum()))
        total = naive_log_partition(table, 0, length - 1)
        for place, (first, last) in enumerate(places):
            if last >= length:
                continue
            value, label = logits[row, place].max(0)
            without = [line.copy() for line in table]
            without[first][last] = -30.0  # as good as never
            none = naive_log_partition(without, 0, length - 1)
            probability = (1.0 - math.exp(none - total)) * math.exp(float(value) - table[first][last])
            assert float(charts.scores[row, first, last]) == pytest.approx(
                max(0.0, probability - LEAST_PROBABILITY), abs=1e-9
            )
            if charts.labels[row, first, last]:
                found += 1
                assert int(charts.labels[row, first, last]) == 1 + int(label)
    assert found > 1


def test_padding_is_never_seen(span_parser: Any) -> None:
    """Neither other features in the padding, nor more of it, nor other rows change what is said about a sentence."""
    model, batch = built(span_parser), make()
    with torch.no_grad():
        before = model.charts(batch.pieces, batch.affixes, batch.lengths)
        padding = (torch.arange(6) >= batch.lengths[:, None])[:, :, None]
        other = batch.pieces.masked_fill(padding, 17), batch.affixes.masked_fill(padding, 999)
        after = model.charts(*other, batch.lengths)
        for row, length in enumerate(batch.lengths.tolist()):
            alone = model.charts(*(some[row : row + 1, :length] for some in other), batch.lengths[row : row + 1])
            right = before.scores[row, :length, :length]
            torch.testing.assert_close(after.scores[row, :length, :length], right, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(alone.scores[0], right, rtol=1e-5, atol=1e-5)
            assert alone.tags[0].tolist() == after.tags[row, :length].tolist() == before.tags[row, :length].tolist()
        losses = [
            model(SpanBatch(*some, batch.lengths, batch.tags, batch.labels, batch.sample_ids))
            for some in ((batch.pieces, batch.affixes), other)
        ]
        torch.testing.assert_close(losses[0].loss_sum, losses[1].loss_sum, rtol=1e-5, atol=1e-5)


def test_the_loss_is_the_likelihood_of_the_trees_and_tags(span_parser: Any) -> None:
    """Beside sums over all labelled binary trees."""
    model, batch = span_parser.build(tag_weight=0.5).double(), make(length=5)
    with torch.no_grad():
        output = model(batch)
        states = model.body(batch.pieces, batch.affixes, batch.lengths)
        logits, tag_logits = model.head.span_logits(states), model.head.tag_logits(states).log_softmax(2)
    expected = 0.0
    for row, length in enumerate(batch.lengths.tolist()):
        table = [[0.0] * 5 for _ in range(5)]
        for place, (first, last) in enumerate((i, j) for i in range(5) for j in range(i, 5)):
            scores = torch.cat([torch.zeros(1, dtype=torch.float64), logits[row, place]])
            table[first][last] = float(scores.logsumexp(0))
            if last < length:
                expected -= float(scores[batch.labels[row, first, last]])
        expected += naive_log_partition(table, 0, length - 1)
        expected -= 0.5 * float(sum(tag_logits[row, word, batch.tags[row, word]] for word in range(length)))
    assert float(output.loss_sum) == pytest.approx(expected, rel=1e-9)
    assert float(output.nll_sum) == pytest.approx(expected, rel=1e-9)
    assert int(output.num_tokens) == batch.num_target_tokens() == int(batch.lengths.sum())


def test_label_smoothing_is_of_tags(span_parser: Any) -> None:
    model, batch = span_parser.build(), make()
    plain, smoothed = model(batch), model(batch, label_smoothing=0.2)
    torch.testing.assert_close(smoothed.nll_sum, plain.nll_sum)
    assert abs((smoothed.loss_sum - plain.loss_sum).item()) > 1e-3
    torch.testing.assert_close(
        span_parser.build(tag_weight=0.0)(batch, label_smoothing=0.2).loss_sum,
        span_parser.build(tag_weight=0.0)(batch).loss_sum,
    )


def test_unknown_tags_do_not_count(span_parser: Any) -> None:
    model, batch = span_parser.build(), make()
    batch.tags[:] = -1
    torch.testing.assert_close(model(batch).loss_sum, span_parser.build(tag_weight=0.0)(batch).loss_sum)


def test_a_word_without_features_is_read(span_parser: Any) -> None:
    model, batch = span_parser.build(), make()
    batch.pieces.zero_()
    batch.affixes.zero_()
    assert bool(model(batch).loss_sum.isfinite())


def test_every_word_sees_every_other(span_parser: Any) -> None:
    model, batch = span_parser.build(), make(rows=1)
    with torch.no_grad():
        before = model.body(batch.pieces, batch.affixes, batch.lengths)
        batch.pieces[0, -1] = batch.pieces[0, -1] % VOCAB + 1
        assert float((model.body(batch.pieces, batch.affixes, batch.lengths) - before)[0, 0].abs().max()) > 1e-5


@pytest.mark.first_variant
def test_one_batch_is_learned_by_heart(span_parser: Any) -> None:
    nothing = dict.fromkeys(("dropout", "feature_dropout", "span_dropout"), 0.0)
    model, batch = span_parser.build(**nothing).train(), make()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        model(batch).loss_sum.backward()
        optimiser.step()
    model.eval()
    with torch.no_grad():
        charts = model.charts(batch.pieces, batch.affixes, batch.lengths)
    real = torch.arange(6) < batch.lengths[:, None]
    assert bool((charts.tags == batch.tags)[real].all())
    on_tree = batch.labels > 0
    assert bool((charts.labels == batch.labels)[on_tree].all())


@pytest.mark.first_variant
def test_features_are_left_out_in_training_alone(span_parser: Any) -> None:
    model = span_parser.build(dropout=0.0, span_dropout=0.0, feature_dropout=0.5)
    batch = make()
    with torch.no_grad():
        assert float(model(batch).loss_sum) == float(model(batch).loss_sum)
        model.train()
        assert float(model(batch).loss_sum) != float(model(batch).loss_sum)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 33, "num_heads": 3}, "d_model is 33; it must be even"),
        ({"window": 4}, "window is 4; it must be odd"),
        ({"constituents": ("NP", "NP")}, "one twice"),
        ({"tags": ("NN", " ")}, "an empty name"),
        ({"constituents": ()}, "constituents is empty"),
        ({"root": ""}, "root is empty"),
        ({"feature_dropout": 1.0}, "feature_dropout"),
        ({"max_len": 100_000}, "max_len"),
    ],
)
@pytest.mark.first_variant
def test_mistakes(span_parser: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        span_parser.build(**changes)
