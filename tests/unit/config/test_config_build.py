"""Plain data becomes dataclasses, and every mistake is told at once."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from manyheads.config.build import build, resolve
from manyheads.config.checks import BELOW_ONE, at_least, check
from manyheads.config.files import Source, from_dotted, parse_yaml, tag_of
from manyheads.config.options import describe
from manyheads.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Plain:
    kind: Literal["plain"] = "plain"


@dataclass(frozen=True, kw_only=True)
class Hashed:
    kind: Literal["hashed"] = "hashed"
    num_hashes: int = 4


@dataclass(frozen=True, kw_only=True)
class Model:
    width: int = 8
    heads: int = 2
    rate: float = 0.1
    extra: bool | None = None
    banned: tuple[int, ...] = ()
    limit: int | None = None
    norm: Literal["layer", "rms"] = "layer"
    attention: Plain | Hashed = field(default_factory=Plain)

    def __post_init__(self) -> None:
        check(self, "model.", at_least(1), "heads")
        check(self, "model.", BELOW_ONE, "rate")
        if self.width % self.heads:
            raise ConfigError(
                f"model.width {self.width} is not divisible by model.heads {self.heads}.", fields=("width", "heads")
            )


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str = "run"
    seed: int = 1
    model: Model = field(default_factory=Model)


def mistakes(*sources: Source) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(Run, list(sources))
    return [line.strip() for line in str(caught.value).split("\n")]


def test_nothing_given_is_the_defaults() -> None:
    assert build(Run, {}) == Run()


def test_values_are_converted_to_the_declared_types() -> None:
    run = build(Run, {"model": {"rate": "1e-2", "width": "16", "extra": None, "banned": [1, 2], "attention": "hashed"}})
    assert run.model == Model(rate=0.01, width=16, banned=(1, 2), attention=Hashed())


def test_all_mistakes_of_a_file_at_once_with_their_lines() -> None:
    text = "sead: 3\nmodel:\n  widht: 4\n  heads: 0\n  rate: 2\n  norm: layr\n  width: wide\n"
    lines = mistakes(parse_yaml(text, "f.yaml"))
    assert lines[0] == "6 mistakes in the settings:"
    assert "f.yaml, line 1: there is no setting sead. Did you mean seed?" in lines
    assert "f.yaml, line 3: there is no setting model.widht. Did you mean model.width?" in lines
    assert "f.yaml, line 4: model.heads is 0; it must be at least 1." in lines
    assert "f.yaml, line 5: model.rate is 2.0; it must be in [0, 1)." in lines
    assert "f.yaml, line 6: model.norm is 'layr'; choose one of: layer, rms. Did you mean layer?" in lines
    assert any(line.startswith("f.yaml, line 7: model.width is 'wide'; ") for line in lines)


def test_a_complaint_about_fields_already_doubted_is_not_invented() -> None:
    """heads falls back to 2 after its own complaint; 9 % 2 must not be held against the user."""
    assert mistakes(Source({"model": {"width": 9, "heads": -3}}, "f")) == [
        "f: model.heads is -3; it must be at least 1."
    ]


def test_a_mistake_across_fields_is_told() -> None:
    assert mistakes(Source({"model": {"width": 9}}, "f")) == ["f: model.width 9 is not divisible by model.heads 2."]


def test_true_is_no_number() -> None:
    assert mistakes(Source({"seed": True}, "f")) == ["f: seed is True; it must be a number."]
    assert mistakes(Source({"model": {"limit": True}}, "f")) == ["f: model.limit is True; it must be a number."]
    told = mistakes(Source({"model": {"banned": [3, False]}}, "f"))
    assert told == ["f: model.banned is [3, False]; False must be a number."]
    assert resolve(Run, [Source({"model": {"extra": True, "limit": None}}, "f")]).model.extra is True


@pytest.mark.parametrize("value", [None, 3, "x", [1]])
def test_a_section_must_hold_settings(value: object) -> None:
    assert "it is a section with these settings: model.width, model.heads" in mistakes(Source({"model": value}, "f"))[0]


@pytest.mark.parametrize("value", ["hashd", {"kind": "hashd"}])
def test_unknown_kind_names_the_choices(value: object) -> None:
    told = mistakes(Source({"model": {"attention": value}}, "f"))
    assert told == ["f: model.attention.kind is 'hashd'; choose one of: plain, hashed. Did you mean hashed?"]


def test_a_kind_refuses_another_kinds_settings() -> None:
    told = mistakes(Source({"model": {"attention": {"kind": "plain", "num_hashes": 2}}}, "f"))
    assert told == ["f: there is no setting model.attention.num_hashes."]


def test_a_missing_required_setting_is_named():
    @dataclass(frozen=True, kw_only=True)
    class Needs:
        size: int

    with pytest.raises(ConfigError, match=r"f: size is missing\."):
        build(Needs, {}, "f")


def test_later_sources_win_and_are_blamed() -> None:
    preset = Source({"seed": 1, "model": {"width": 32, "heads": 4}}, "preset p")
    text = parse_yaml("model:\n  heads: 8\n", "f.yaml")
    assert resolve(Run, [preset, text]).model == Model(width=32, heads=8)
    assert mistakes(preset, text, from_dotted([Run], {"model.rate": "7"})) == [
        "the command line: model.rate is 7.0; it must be in [0, 1)."
    ]


def test_another_kind_drops_the_first_kinds_settings() -> None:
    first = Source({"model": {"attention": {"kind": "hashed", "num_hashes": 2}}}, "a")
    assert resolve(Run, [first, Source({"model": {"attention": {"num_hashes": 3}}}, "b")]).model.attention == Hashed(
        num_hashes=3
    )
    assert resolve(Run, [first, Source({"model": {"attention": "plain"}}, "b")]).model.attention == Plain()


@dataclass(frozen=True, kw_only=True)
class Words:
    architecture: Literal["words"] = "words"
    width: int = 8
    attention: Plain | Hashed = field(default_factory=Plain)


@dataclass(frozen=True, kw_only=True)
class Bytes:
    architecture: Literal["bytes"] = "bytes"
    width: int = 8
    lanes: int = 2


@dataclass(frozen=True, kw_only=True)
class Either:
    """A run of one of two models.

    Args: model: which.
    """

    model: Words | Bytes = field(default_factory=Words)


def test_a_choice_is_told_apart_by_the_literal_that_its_classes_share() -> None:
    assert tag_of((Words, Bytes)) == ("architecture", {"words": Words, "bytes": Bytes})
    assert resolve(Either, [from_dotted([Either], {"model": "bytes", "model.lanes": "3"})]).model == Bytes(lanes=3)
    chosen = from_dotted([Either], {"model.attention": "hashed", "model.attention.num_hashes": "2"})
    assert resolve(Either, [chosen]).model == Words(attention=Hashed(num_hashes=2))
    preset = Source({"model": {"architecture": "bytes", "lanes": 5}}, "preset")
    assert resolve(Either, [preset, Source({"model": {"width": 4}}, "file")]).model == Bytes(width=4, lanes=5)
    assert resolve(Either, [preset, Source({"model": {"architecture": "words"}}, "file")]).model == Words()
    with pytest.raises(
        ConfigError, match=r"model.architecture is 'byts'; choose one of: words, bytes. Did you mean bytes\?"
    ):
        build(Either, {"model": {"architecture": "byts"}})
    shown = [(setting.path, setting.kind, setting.help[:8]) for setting in describe(Either, Either(model=Bytes()))]
    assert shown[:4] == [
        ("model.architecture", "words|bytes", ""), ("model.width", "INT", ""), ("model.lanes", "INT", ""),
        ("model.attention", "plain|hashed", "(words) "),
    ]  # fmt: skip
    with pytest.raises(TypeError, match="tells Plain, Words apart"):
        tag_of((Plain, Words))
