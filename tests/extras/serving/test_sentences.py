"""Splitting into sentences, and metrics that Prometheus can read."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.errors import ConfigError
from manyheads.extras.serving.engine import Metrics
from manyheads.extras.serving.served import ServedTranslator, _pairs
from manyheads.extras.serving.settings import ServingSettings, names_of_models
from manyheads.extras.serving.texts import rejoin, split


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Dr. Smith met Mr. Jones at 3 p.m. yesterday.", ["Dr. Smith met Mr. Jones at 3 p.m. yesterday."]),
        ("Am 3. Mai kam sie. Er ging.", ["Am 3. Mai kam sie.", "Er ging."]),
        ('He said: "No." She left.', ['He said: "No."', "She left."]),
        ("It costs 3.50 euros. Really...", ["It costs 3.50 euros.", "Really..."]),
        ("一。二？三", ["一。", "二？", "三"]),
        ("One\nTwo\r\n\n  Three  ", ["One", "Two", "Three"]),
        ("J. S. Bach wrote it. Yes.", ["J. S. Bach wrote it.", "Yes."]),
        ("The U.S. Army was in Washington, D.C. The end.", ["The U.S. Army was in Washington, D.C.", "The end."]),
        ("He came at 5 p.m. She left.", ["He came at 5 p.m.", "She left."]),
        ("It was on Jan. 5 that he came. Then No. 7 left.", ["It was on Jan. 5 that he came.", "Then No. 7 left."]),
        ("Am 5. Dez. kam er. See Fig. 3 and Sec. 4 now.", ["Am 5. Dez. kam er.", "See Fig. 3 and Sec. 4 now."]),
        ("It was in 2020. The 100. Tag. Er ging.", ["It was in 2020.", "The 100. Tag.", "Er ging."]),
        (
            "He came in Jan. She left long ago. 5 men saw it.",
            ["He came in Jan.", "She left long ago.", "5 men saw it."],
        ),
        ("", []),
        (" \n\t", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert [one.text for one in split(text)] == expected
    assert all(text[one.start : one.end] == one.text for one in split(text))


def test_the_language_of_the_sources_decides() -> None:
    assert [one.text for one in split("Τι; Ναι.", "el")] == ["Τι;", "Ναι."]
    assert [one.text for one in split("Tom is 30. Mary is 40.", "en")] == ["Tom is 30.", "Mary is 40."]
    assert [one.text for one in split("Am 30. Mai kam sie.", "de")] == ["Am 30. Mai kam sie."]
    source_lang = cast(Any, ServedTranslator.source_lang).fget
    assert source_lang(SimpleNamespace(pairs=(("en", "de"), ("en", "fr")))) == "en"
    assert source_lang(SimpleNamespace(pairs=(("en", "de"), ("fr", "de")))) is None
    assert source_lang(SimpleNamespace(pairs=())) is None


def test_wrapped_lines_can_be_one_sentence() -> None:
    text = "One\nand a half. Two\n three."
    assert [one.text for one in split(text, at_line_ends=False)] == ["One\nand a half.", "Two\n three."]
    assert [one.text for one in split(text, at_line_ends=False, at_sentence_ends=False)] == [text]


@given(st.text(st.sampled_from('ab. !?\n\t"。') | st.characters()))
def test_rejoining_restores_every_text(text: str) -> None:
    for at_ends, at_lines in ((True, True), (False, True), (True, False), (False, False)):
        found = split(text, at_sentence_ends=at_ends, at_line_ends=at_lines)
        assert rejoin(text, found, [one.text for one in found]) == text
        assert all(one.text == one.text.strip() != "" for one in found)
        assert "".join("".join(one.text.split()) for one in found) == "".join(text.split())


def test_metrics_are_cumulative() -> None:
    metrics = Metrics()
    for value in (0.0005, 0.3, 1000):
        metrics.latency.observe(value)
    metrics.requests["completed"].inc()
    metrics.gauge("num_requests_waiting", "Waiting.", lambda: 3)
    lines = metrics.render().split("\n")
    assert 'manyheads_e2e_request_latency_seconds_bucket{le="0.001"} 1.0' in lines
    assert 'manyheads_e2e_request_latency_seconds_bucket{le="+Inf"} 3.0' in lines
    assert "manyheads_num_requests_waiting 3.0" in lines
    assert 'manyheads_request_success_total{finished_reason="completed"} 1.0' in lines
    with pytest.raises(KeyError):
        metrics.requests["chosen by a client"].inc()


def test_names_of_models() -> None:
    assert names_of_models(["a=b/c", "runs/demo/model", "owner/name"]) == {
        "a": "b/c", "demo": "runs/demo/model", "name": "owner/name",
    }  # fmt: skip
    for given_names in ([], ["a=x", "a=y"], ["=x"], ["a="], ["a/b=c"], ["a\n=c"]):
        with pytest.raises(ConfigError):
            names_of_models(given_names)


def test_settings_of_the_environment() -> None:
    environment = {"MANYHEADS_MODELS": "runs/a, b=runs/c", "MANYHEADS_DEADLINE_SECONDS": "2.5",
                   "MANYHEADS_JSON_LOGS": "1", "MANYHEADS_MAX_REQUESTS": "7"}  # fmt: skip
    found = ServingSettings.from_environment(environment)
    assert found == ServingSettings(models=("runs/a", "b=runs/c"), deadline_seconds=2.5, json_logs=True, max_requests=7)
    unset = dict.fromkeys(("MANYHEADS_ALLOWED_HOSTS", "MANYHEADS_DEVICE", "MANYHEADS_MAX_REQUESTS"), "")
    assert ServingSettings.from_environment(unset) == ServingSettings(), "as compose files give what is not set"
    for name, value in (("DEADLINE_SECONDS", "soon"), ("DEADLINE_SECONDS", "0"), ("JSON_LOGS", "maybe")):
        with pytest.raises(ConfigError, match=r"(?i)deadline_seconds|json_logs"):
            ServingSettings.from_environment({f"MANYHEADS_{name}": value})


@pytest.mark.parametrize(
    ("target", "codes", "expected"),
    [("de", (), ("de",)), ("roa", ("fr", "pt_BR"), ("fr", "pt_BR")), ("PT-br", ("fr", "pt_BR"), ("PT-br",))],
)
def test_a_group_of_languages_is_no_target(target, codes, expected, tmp_path):
    """As of opus-mt-en-roa, whose tokenizer names the group, and has a code for each of its languages."""
    (tmp_path / "config.json").write_text("{}")
    described = {"source_lang": "en", "target_lang": target}
    tokenizer = SimpleNamespace(describe=lambda: described, target_languages=codes)
    pairs = _pairs(tmp_path, cast(Any, SimpleNamespace(tokenizer=tokenizer)), ServingSettings())
    assert pairs == tuple(("en", one) for one in expected)


@pytest.mark.parametrize(
    ("given_languages", "expected"),
    [
        ({"source_lang": "en"}, (("en", "de"), ("en", "fr"))),
        ({"source_lang": "en", "target_lang": "fr"}, (("en", "fr"),)),
        ({"target_lang": "fr"}, ()),
    ],
)
def test_the_targets_of_a_model_with_tags_are_known(given_languages, expected, tmp_path):
    """As of a converted model, whose folder does not record the languages of its sources."""
    (tmp_path / "config.json").write_text("{}")
    tokenizer = SimpleNamespace(describe=lambda: {}, target_languages=("de", "fr"))
    settings = ServingSettings(**given_languages)  # type: ignore[arg-type]
    assert _pairs(tmp_path, cast(Any, SimpleNamespace(tokenizer=tokenizer)), settings) == expected
