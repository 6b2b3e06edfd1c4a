"""Output that matches a pattern, for vocabularies of bytes and of subwords."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads import Generator
from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.errors import ConfigError
from manyheads.extras.constrained.grammar import Matcher
from manyheads.text.of_folder import learn_vocabulary
from manyheads.text.settings import VocabularySettings
from manyheads.text.vocabulary import ByteVocabulary

pytest.importorskip("llguidance", reason="the extra constrained is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

LINES = ['{"name": "Anna", "age": 30} is a person.', "It was a dark and stormy night.", "Call 555-1234."] * 20
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
        "child": {"$ref": "#"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


KINDS = ("bytes", "documents", "bpe", "bpe lines")
SCHEMAS: dict[str, Any] = {"person": PERSON, "any": {"type": "object"}, "enum": {"enum": ["x", 1]}}
WAYS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"seed": 1},
    {"seed": 2, "temperature": 3.0, "num_return_sequences": 2},
]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def generator(kind: str) -> Generator:
    vocabulary: Any
    if kind in ("bytes", "documents"):
        vocabulary = ByteVocabulary("none" if kind == "bytes" else "files")
    else:
        documents: Any = "none" if kind == "bpe" else "lines"
        vocabulary = learn_vocabulary(LINES, VocabularySettings(level="bpe", vocab_size=330, documents=documents))
    torch.manual_seed(0)
    config = replace(ARCHITECTURES["transformer-xl"].presets["debug"], vocab_size=vocabulary.vocab_size)
    return Generator(build_model(config), vocabulary, device="cpu")


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_is_complete_and_valid(generator: Generator, kind: str, name: str) -> None:
    """All pairs of a vocabulary, a schema and a way to search."""
    prompts, schema = ["", "It was ", "x\n"], SCHEMAS[name]
    options = WAYS[(KINDS.index(kind) + list(SCHEMAS).index(name)) % len(WAYS)]
    found = generator.continuations(prompts, max_new_tokens=70, json_schema=schema, **options)
    for one in (one for each in found for one in each):
        jsonschema.validate(json.loads(one.text), schema)


@pytest.mark.parametrize("regex", [r"\d{3}-\d{4}", r"[a-z]*END", "(yes|no) indeed"])
def test_text_matches_a_regex(generator: Generator, regex: str) -> None:
    for text in generator.generate(["", "Call "], regex=regex, max_new_tokens=40, seed=3):
        assert re.fullmatch(regex, text)


def test_a_way_to_the_end_is_looked_for_again_only_where_the_text_leaves_it(generator, monkeypatch):
    """Each look computes a mask for every token of the way, and a text is mostly the inside of a string."""
    looks, search = [], Matcher.way_to_end
    monkeypatch.setattr(Matcher, "way_to_end", lambda *given, **how: looks.append(1) or search(*given, **how))
    [text] = generator.generate(["Call "], regex='"[a-z ]{20,}!"', max_new_tokens=40, seed=3)
    assert re.fullmatch('"[a-z ]{20,}!"', text)
    assert len(looks) <= 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "(a"}, "regex cannot be used: unclosed group"),
        ({"regex": "(" * 5000 + ")" * 5000}, "regex cannot be used"),
        ({"regex": "a" * 10_001}, "at most 10,000 are allowed"),
        ({"regex": "a{300}"}, "max_new_tokens is 50; raise it"),
        ({"regex": "((a{1000}){1000}){1000}"}, "no text of at most 50 tokens was found"),
        ({"regex": r"[^\x00-\U0010FFFF]"}, "no sequence of this model's tokens matches it; write another"),
        ({"json_schema": {"type": "string", "pattern": "^(a{1000}){1000}$"}}, "no text of at most 50 tokens was found"),
        ({"json_schema": '{"$ref": "#"}'}, "no sequence of this model's tokens matches it; write another"),
        ({"json_schema": '{"type": "strin"}'}, "json_schema cannot be used: Invalid type: strin."),
        ({"json_schema": "{"}, "not a JSON schema"),
        ({"json_schema": {"enum": {1}}}, "json_schema is not a JSON schema: Object of type set"),
        ({"json_schema": "false"}, "permits no value"),
        ({"json_schema": '{"enum": []}'}, "json_schema cannot be used: Unsatisfiable"),
        ({"json_schema": '{"x-guidance": {"lenient": true}}'}, "x-guidance"),
        ({"json_schema": '{"items":' * 2000 + "{}" + "}" * 2000}, "not a JSON schema"),
        ({"json_schema": json.dumps({**PERSON, "required": ["child"]})}, "json_schema"),
        ({"regex": "a", "json_schema": "{}"}, "cannot be used together"),
        ({"regex": "a", "min_new_tokens": 2}, "cannot be used together"),
    ],
)
def test_patterns_that_cannot_be(options: dict[str, Any], message: str) -> None:
    torch.manual_seed(0)
    config = replace(ARCHITECTURES["transformer-xl"].presets["debug"], vocab_size=256)
    model = Generator(build_model(config), ByteVocabulary(), device="cpu")
    with pytest.raises(ConfigError, match=re.escape(message)):
        model.generate("x", max_new_tokens=50, **options)
