"""Paired bootstrap: what the p-values of very small test sets say."""

import numpy as np

from manyheads.extras.research.comparison import paired_losses, paired_scores


def test_one_part_says_nothing_about_a_difference() -> None:
    """All resamples of one part are the same, which must not look like certainty."""
    one, other = paired_losses([np.array([100.0]), np.array([300.0])], np.array([100]))
    assert (one.value, other.value, other.p_value) == (1.0, 3.0, 1.0)
    scores = paired_scores([["a cat sat on the mat"], ["no"]], ["a cat sat on the mat"])
    assert scores["BLEU"][1].p_value == scores["chrF"][1].p_value == 1.0


def test_clear_differences_are_seen_and_small_ones_are_not() -> None:
    generator = np.random.default_rng(0)
    counts = np.full(200, 50)
    base = generator.normal(100.0, 5.0, 200)
    same, worse = base + generator.normal(0.0, 5.0, 200), base + 10.0 + generator.normal(0.0, 5.0, 200)
    _, alike, apart = paired_losses([base, same, worse], counts)
    assert alike.p_value is not None
    assert apart.p_value is not None
    assert alike.p_value > 0.05 > 0.01 > apart.p_value


def test_unlike_translations_with_equal_scores_do_not_differ() -> None:
    """Models that have hardly learned: sacreBLEU's test calls their equal BLEU a certain difference."""
    references = ["the cat sat on the mat", "two dogs play in the park", "a man walks"]
    scores = paired_scores([["x x x x x"] * 3, ["y y y y y"] * 3], references)["BLEU"]
    assert scores[0].value == scores[1].value
    assert scores[1].p_value == 1.0
