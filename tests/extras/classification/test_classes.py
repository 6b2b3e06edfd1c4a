"""Accuracy, F1 and the confusion matrix, by hand."""

import math

import pytest

from manyheads.extras.classification.classes import Confusion

LABELS = ("a", "b", "c", "d")
# Right label, predicted one: a is right 3 of 4 times, b 1 of 2, c never, and d neither occurs nor is predicted.
PAIRS = [(0, 0), (0, 0), (0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1)]


def test_scores_by_hand() -> None:
    found = Confusion.of(LABELS, PAIRS)
    assert found.counts.tolist() == [[3, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert found.accuracy == 4 / 8
    a, b, c, d = found.scores()
    assert (a.precision, a.recall, a.support, a.predicted) == (3 / 5, 3 / 4, 4, 5)
    assert a.f1 == pytest.approx(2 / (5 / 3 + 4 / 3))
    assert (b.precision, b.recall) == (1 / 3, 1 / 2)
    assert (c.precision, c.recall, c.f1, c.support) == (0, 0, 0, 2)
    assert (d.support, d.predicted) == (0, 0)
    assert found.macro_f1 == pytest.approx((a.f1 + b.f1 + 0) / 3)  # c counts, d does not
    assert found.most_frequent == ("a", 1 / 2)


def test_the_interval_is_wilson_s() -> None:
    """Brown, Cai and DasGupta 2001: 95% of 4 of 8, and the ends of the scale."""
    low, high = Confusion.of(LABELS, PAIRS).interval
    assert (low, high) == (pytest.approx(0.2152, abs=1e-4), pytest.approx(0.7848, abs=1e-4))
    low, high = Confusion.of(LABELS, [(0, 0)] * 10).interval
    assert high == pytest.approx(1.0)
    assert low == pytest.approx(0.7225, abs=1e-4)
    assert not math.isclose(low, 1.0)


def test_lines_and_json() -> None:
    found = Confusion.of(LABELS, PAIRS)
    lines = found.to_lines()
    assert lines[0].startswith("accuracy = 50.00% (4 of 8 texts, 95% interval 21.5 to 78.5)")
    assert "  always answering a would give 50.00%" in lines
    assert [line.split() for line in lines[-5:-3]] == [["right", "a", "b", "c", "d"], ["a", "3", "1", "0", "0"]]
    record = found.to_json()
    assert record["confusion"]["counts"][0] == [3, 1, 0, 0]
    assert record["labels"][1]["label"] == "b"
    assert record["texts"] == 8
