"""Signs that no font has are told by their code points; others are drawn."""

import pytest

pytest.importorskip("matplotlib")

from manyheads.extras.inspect.drawings.figure import legible_texts


def test_a_sign_that_no_font_has_shows_its_code_point() -> None:
    shown, families = legible_texts(["a\U000f1234", "plain"])
    assert shown == ["a⟨F1234⟩", "plain"]
    assert families[0] == "DejaVu Sans"


def test_what_the_first_font_has_needs_no_other() -> None:
    texts = ["naïve", "Ελλάδα", "мир", "שלום", "مرحبا", "😀", "▁"]
    assert legible_texts(texts) == (texts, ["DejaVu Sans"])


def test_other_signs_are_drawn_where_a_font_has_them() -> None:
    [shown], families = legible_texts(["你"])
    assert (shown == "你") == (len(families) > 1)
