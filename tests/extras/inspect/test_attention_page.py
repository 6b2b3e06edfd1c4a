"""The page of attention: what stands in it, what may run in it, and that it is made of what it was given."""

import base64
import hashlib
import math
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from offline_pages import record_of

from manyheads.errors import SaveError, ShapeError
from manyheads.extras.inspect.drawings.attention import attention_view, head_figures, shown_token, thinned
from manyheads.extras.inspect.drawings.pages import attention_page, save_page

HOSTILE = ["</script><script>alert(1)</script>", "<!--", "{{script}}", "\u202eabc", "a\x00b", "", "\u2028"]


def weights(*shape: int, seed: int = 0) -> Any:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).log().mul(-3).softmax(-1).numpy()


def unpacked(packed: str, *shape: int) -> Any:
    return (np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8).reshape(shape) / 255.0) ** 2


def test_the_page_holds_the_weights_to_four_thousandths() -> None:
    layers = [weights(2, 5, 7, seed=1), weights(2, 5, 7, seed=2)]
    view = attention_view("cross", layers, query_tokens=list("abcde"), key_tokens=list("fghijkl"))
    record = record_of(attention_page([view], title="t"))["views"][0]
    assert record["queries"] == list("abcde")
    assert record["keys"] == list("fghijkl")
    for packed, layer in zip(record["layers"], layers, strict=True):
        assert np.abs(unpacked(packed, 2, 5, 7) - layer).max() < 0.004
    assert record["figures"][1][0] == [pytest.approx(head_figures(layers[1][0], None)[0], abs=1e-3), None]


def test_nothing_but_its_own_script_may_run_and_nothing_may_be_fetched() -> None:
    page = attention_page([attention_view("encoder", [weights(1, 2, 2)], query_tokens=["a", "b"])], title="t")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    assert rules["default-src"] == "'none'"
    for tag in ("script", "style"):
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)  # the name of SVG's elements is no address
    assert not re.search(r"\son\w+=|\sstyle=(?!\"image-rendering)", page.partition("<body>")[2].partition("<script")[0])


def test_tokens_and_titles_are_text() -> None:
    view = attention_view("encoder", [weights(1, len(HOSTILE), len(HOSTILE))], query_tokens=HOSTILE)
    page = attention_page([view], title="</title><script>alert(1)</script>", note="{{data}}")
    assert page.count("<script") == 2
    assert page.count("</title>") == 1
    record = record_of(page)
    assert record["title"] == "</title><script>alert(1)</script>"
    assert record["note"] == "{{data}}"
    assert record["views"][0]["queries"] == [shown_token(token) for token in HOSTILE]
    assert record["views"][0]["queries"][3:] == ["⟨202E⟩abc", "a⟨0000⟩b", "⟨⟩", "⟨2028⟩"]


def test_no_control_character_is_raw_in_the_page() -> None:
    """The title is the name of a folder, and the note has texts of users."""
    hostile = "a\0\x1b[2J\u202e\x9b"
    view = attention_view("encoder", [weights(1, 2, 2)], query_tokens=[hostile, "b"])
    page = attention_page([view], title=hostile, note=hostile)
    assert not set("\0\x1b\u202e\x9b") & set(page)


def test_joined_emoji_stay_one() -> None:
    family = "👨\u200d👩\u200d👧"
    assert shown_token(family) == family
    assert shown_token("\u200d") == "⟨200D⟩"
    assert [shown_token(f"\u200d{place}") for place in "₁₂₃"] == ["⟨200D⟩₁", "⟨200D⟩₂", "⟨200D⟩₃"]  # its bytes


def test_twelve_layers_of_twelve_heads_are_small() -> None:
    tokens = [f"token{place}" for place in range(64)]
    stack = [weights(12, 64, 64, seed=layer) for layer in range(12)]
    views = [attention_view(name, stack, query_tokens=tokens) for name in ("encoder", "decoder", "cross")]
    assert len(attention_page(views, title="t")) < 5e6


def test_entropy_and_distance_by_hand() -> None:
    even = np.full((2, 4), 0.25)
    assert head_figures(even, 2) == (pytest.approx(2.0), pytest.approx(((2 + 1 + 0 + 1) + (3 + 2 + 1 + 0)) / 4 / 2))
    assert head_figures(np.eye(3), 0) == (0.0, 0.0)
    behind = np.array([[1.0, 0.0, 0.0, 0.0]])  # stands at 3, behind three of memory, and looks at the first of them
    assert head_figures(behind, 3) == (0.0, 3.0)
    assert head_figures(np.eye(3), None) == (0.0, None)
    assert head_figures(np.zeros((2, 2)), 0) == (None, None)
    half = np.array([[0.0, 0.0], [0.5, 0.5]])  # the row that looks nowhere does not count
    assert head_figures(half, 0) == (pytest.approx(1.0), pytest.approx(0.5))


@pytest.mark.parametrize(
    ("q_len", "k_len", "memory", "most"), [(10, 10, 0, 4), (7, 19, 12, 5), (3, 3, 0, 8), (5, 9, 4, 1)]
)
def test_thinning_against_a_slow_sum(q_len: int, k_len: int, memory: int, most: int) -> None:
    layer = weights(2, q_len, k_len)
    names = [str(place) for place in range(k_len)]
    view = attention_view(
        "decoder", [layer], query_tokens=names[k_len - q_len :], key_tokens=names, num_memory=memory, is_self=True
    )
    small = thinned(view, most)
    rows, columns = math.ceil(q_len / most), math.ceil(k_len / most)
    assert small.block == (rows, columns)
    places = [list(range(start, min(start + rows, q_len))) for start in range(0, q_len, rows)]
    spans = [range(start, min(start + columns, memory)) for start in range(0, memory, columns)]
    spans += [range(start, min(start + columns, k_len)) for start in range(memory, k_len, columns)]
    for head in range(2):
        for i, some in enumerate(places):
            for j, span in enumerate(spans):
                expected = sum(layer[head, row, column] for row in some for column in span) / len(some)
                assert small.layers[0][head, i, j] == pytest.approx(expected)
    np.testing.assert_allclose(small.layers[0].sum(-1), 1.0)
    assert len(small.query_tokens) == len(places)
    assert len(small.key_tokens) == len(spans)
    assert small.key_tokens[small.num_memory] == " ".join(names[place] for place in spans[small.num_memory])
    assert small.figures == view.figures  # of the weights as they were


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    view = attention_view("encoder", [weights(1, 2, 2)], query_tokens=["a", "b"])
    for layers, tokens in (([], ["a"]), ([weights(2, 2)], ["a", "b"]), ([weights(2, 1, 2, 2)], ["a", "b"])):
        with pytest.raises(ShapeError):
            attention_view("encoder", layers, query_tokens=tokens)
    with pytest.raises(ShapeError, match="3 query tokens and 3 key tokens"):
        attention_view("encoder", [weights(1, 2, 2)], query_tokens=["a", "b", "c"])
    with pytest.raises(ShapeError, match="use different names"):
        attention_page([view, view], title="t")
    with pytest.raises(ShapeError):
        attention_page([], title="t")
    with pytest.raises(ShapeError, match="at least 1"):
        attention_page([view], title="t", most=0)
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(SaveError, match="Cannot save"):
        save_page("page", tmp_path / "file" / "page.html")
