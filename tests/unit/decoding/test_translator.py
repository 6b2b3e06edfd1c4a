"""Text in, text out, over a toy model and a real tokenizer."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints
from unittest import TestCase

import pytest
import torch

import manyheads.decoding.translator
from manyheads.decoding.model_runner import choose_device
from manyheads.decoding.settings import (
    DecodingOverrides,
    DecodingSettings,
    GenerationOverrides,
    GenerationSettings,
    load_settings,
)
from manyheads.decoding.translator import Translator
from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.nn.kernels import policy
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

TEXTS = ["the cat sees a dog", "a dog", "", "the dog sees the cat and the dog", "  ", "cat"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sees a dog and you"], TokenizerSettings(kind="word", vocab_size=11))


@pytest.fixture
def translator(hash_model: Any, tokenizer: Tokenizer) -> Translator:
    model = hash_model(vocab_size=tokenizer.vocab_size, seed=7)
    settings = DecodingSettings(max_new_tokens=6, min_new_tokens=1, banned_ids=(tokenizer.unk_id,))
    return Translator(model, tokenizer, settings, device="cpu")


def test_lists_and_strings(translator: Translator) -> None:
    found = translator.translate(TEXTS)
    assert [bool(text) for text in found] == [True, True, False, True, False, True]
    assert found[2] == found[4] == ""
    assert translator.translate(TEXTS[0]) == found[0]
    assert translator.translate([]) == []
    assert translator.translate("") == ""


def test_nbest(translator: Translator) -> None:
    found = translator.translate_nbest(TEXTS, num_return_sequences=3)
    assert [len(translations) for translations in found] == [3, 3, 1, 3, 1, 3]
    assert [translations[0].text for translations in found] == translator.translate(TEXTS)
    best = found[0][0]
    assert len(best.tokens) == len(best.token_log_probs)
    assert best.tokens[-1] == "</s>" or len(best.tokens) == 6
    assert found[2][0].tokens == []


def test_a_string_gives_what_a_list_of_one_gives(translator: Translator) -> None:
    assert translator("a dog") == translator.translate("a dog") == translator(["a dog"])[0]
    assert (
        translator.translate_nbest("a dog", num_return_sequences=2)
        == (translator.translate_nbest(["a dog"], num_return_sequences=2)[0])
    )


def test_the_lines_of_a_text_stay_lines(translator: Translator) -> None:
    first, second = translator(["a dog", "the cat"])
    assert translator("a dog\n\nthe cat\n") == f"{first}\n\n{second}\n"
    assert translator(["the cat", "a dog\nthe cat"]) == [second, f"{first}\n{second}"]


def test_line_breaks_are_kept_but_not_read(hash_model: Any) -> None:
    pieces = Tokenizer.train(["the cat sees a dog and you"] * 9, TokenizerSettings(vocab_size=300))
    model = hash_model(vocab_size=pieces.vocab_size, seed=7)
    reader = Translator(model, pieces, DecodingSettings(max_new_tokens=6, min_new_tokens=1), device="cpu")
    first, second = reader(["a dog", "the cat"])
    assert reader("a dog\r\nthe cat\r\n\na dog") == f"{first}\r\n{second}\r\n\n{first}"
    assert list(reader.translate_lines(["a dog\n", "the cat\r\n"])) == [first, second]
    assert reader.translate_nbest("the\ncat\r\n") == reader.translate_nbest("the cat")


def test_a_line_that_is_too_long_is_named_by_its_text(hash_model: Any, tokenizer: Tokenizer) -> None:
    translator = Translator(hash_model(max_len=5), tokenizer)
    with pytest.raises(RequestError, match="text 2 has"):
        translator(["a\na", "a\n" + "a " * 9])


def test_options_by_name_are_those_of_the_settings() -> None:
    for overrides, settings in ((DecodingOverrides, DecodingSettings), (GenerationOverrides, GenerationSettings)):
        types = {name: get_type_hints(settings)[name] for name in vars(settings())}
        assert get_type_hints(overrides) == {**types, "json_schema": str | Mapping[str, Any]}


def test_overrides(translator: Translator) -> None:
    sampled = translator.translate(TEXTS, do_sample=True, seed=3)
    assert sampled == translator.translate(TEXTS, do_sample=True, seed=3)
    assert sampled != translator.translate(TEXTS, do_sample=True, seed=4)
    assert translator.translate(TEXTS, num_beams=1) == translator.translate(TEXTS, num_beams=1, max_tokens=10)
    with pytest.raises(ConfigError, match="num_beams"):
        translator.translate("a dog", num_beans=3)
    with pytest.raises(ConfigError, match="num_beams"):
        translator.translate("a dog", num_beams="many")
    with pytest.raises(RequestError, match="banned_ids"):
        translator.translate("a dog", banned_ids=[99])


def test_lines_stream_lazily_and_in_order(translator: Translator) -> None:
    read: list[int] = []

    def lines() -> Iterator[str]:
        for number, text in enumerate(TEXTS * 3):
            read.append(number)
            yield text

    for options in ({}, {"do_sample": True}):
        read.clear()
        stream = translator.translate_lines(lines(), lines_at_once=4, **options)
        assert read == []
        first = next(stream)
        assert read == [0, 1, 2, 3]
        assert [first, *stream] == translator.translate(TEXTS * 3, **options)
    with pytest.raises(ConfigError):
        translator.translate_lines(lines(), num_beams=0)


def test_more_lines_are_sorted_together_on_cuda(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [policy.lines_together(torch.device(name)) for name in ("cpu", "meta", "cuda")] == [256, 256, 4096]
    read: list[str] = []
    asked: list[torch.device] = []

    def lines_together(device: torch.device) -> int:
        asked.append(device)
        return 5

    monkeypatch.setattr(manyheads.decoding.translator, "lines_together", lines_together)
    stream = translator.translate_lines(read.append(text) or text for text in TEXTS * 3)  # type: ignore[func-returns-value]
    assert [next(stream), *stream] == translator.translate(TEXTS * 3)
    assert asked == [torch.device("cpu")]
    next(translator.translate_lines(read.append(text) or text for text in TEXTS * 3))  # type: ignore[func-returns-value]
    assert len(read) == 3 * len(TEXTS) + 5


def test_a_line_break_in_the_output_does_not_split_a_line(translator, monkeypatch):
    monkeypatch.setattr(Tokenizer, "decode_batch", lambda self, batch: ["a\nb" for _ in batch])
    assert list(translator.translate_lines(["a dog"])) == ["a b"]
    assert translator.translate(["a dog"]) == ["a\nb"]


def test_too_long(hash_model: Any, tokenizer: Tokenizer) -> None:
    model = hash_model(vocab_size=tokenizer.vocab_size, max_len=5)
    translator = Translator(model, tokenizer, device="cpu")
    long = "the cat sees a dog"
    short = translator.translate_nbest(["the cat sees a"])
    with pytest.raises(RequestError, match="text 2 has 6 tokens, EOS included, but at most 5 fit"):
        translator.translate(["a dog", long])
    with pytest.raises(RequestError, match="text 3 has 6 tokens"):
        list(translator.translate_lines(["a dog", "", long], lines_at_once=1))
    with pytest.raises(RequestError, match="max_tokens 12 / 4 beams"):
        translator.translate("the cat sees a", max_tokens=12)
    with TestCase().assertLogs("manyheads", logging.WARNING) as logged:
        assert translator.translate_nbest([long], too_long="truncate") == short
    assert "text 1 has 6 tokens; only its first 4 are used" in logged.records[0].getMessage()
    with pytest.raises(RequestError, match="6 target tokens"):
        translator.translate("a", max_new_tokens=6)


@pytest.mark.parametrize("texts", [5, None, b"a dog", {"a": "dog"}, iter(["a dog"])])
def test_what_is_no_list_of_texts_is_named(translator: Translator, texts: Any) -> None:
    """A generator is empty after a first look at its texts."""
    kind = type(texts).__name__
    for call in (translator, translator.translate_nbest):
        with pytest.raises(RequestError, match=f"^a {kind} was given; give one text, a string, or a list of texts"):
            call(texts)
    with pytest.raises(RequestError, match=f"^a {kind} was given; give one source, a string, or a list of sources"):
        translator.score(texts, ["a"])


def test_a_stream_of_lines_is_no_string(translator: Translator) -> None:
    with pytest.raises(RequestError, match="translate_lines takes lines"):
        translator.translate_lines("a dog")


def test_wrong_types(translator: Translator) -> None:
    with pytest.raises(RequestError, match="text 2 is a int"):
        translator.translate(["a", 5])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="gives no log-probabilities"):
        translator.score(["a"], ["b"])
    with pytest.raises(RequestError, match="auto, fp32, bf16"):
        Translator(translator.model, translator.tokenizer, precision="fp8")  # type: ignore[arg-type]


def test_score_agrees_with_the_search(hash_model: Any, tokenizer: Tokenizer) -> None:
    class Scoring(hash_model):  # type: ignore[misc]
        def log_probs(self, source: Any, source_lengths: Any, target: Any) -> torch.Tensor:
            state, rows = self.start(source, source_lengths), []
            for column in target.unbind(1):
                row, state = self.step(column[:, None], state)
                rows.append(row)
            return torch.stack(rows, 1)

    model = Scoring(vocab_size=tokenizer.vocab_size, seed=7, eos_bonus=2.0, max_len=9)
    translator = Translator(model, tokenizer, DecodingSettings(max_new_tokens=9, max_tokens=40), device="cpu")
    texts = [text for text in TEXTS if text.strip()]
    best = [translations[0] for translations in translator.translate_nbest(texts)]
    scored = translator.score(texts, [translation.text for translation in best])
    for one, other in zip(scored, best, strict=True):
        assert one.tokens == other.tokens
        assert one.token_log_probs == pytest.approx(other.token_log_probs, abs=1e-5)
        assert one.sum_log_prob == pytest.approx(sum(other.token_log_probs), abs=1e-4)
    assert translator.score([""], [""])[0].tokens == ["</s>"]
    with pytest.raises(RequestError, match="1 sources but 2 references"):
        translator.score(["a"], ["a", "b"])
    with pytest.raises(RequestError, match="reference 1 has 10 tokens"):
        translator.score(["a"], ["a a a a a a a a a"])


def test_generation_config(tmp_path: Path) -> None:
    assert load_settings(tmp_path) == DecodingSettings()
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"num_beams": 7, "banned_ids": [5, 6]}), encoding="utf-8")
    assert load_settings(tmp_path) == DecodingSettings(num_beams=7, banned_ids=(5, 6))
    for text, kind in (("[1]", ModelFileError), ("{", ModelFileError), ('{"beams": 3}', ConfigError)):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(kind, match="generation_config"):
            load_settings(tmp_path)


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    with pytest.raises(RequestError, match="unknown"):
        choose_device("abacus")
    for name in ("cuda:77", "cpu:1", "meta", "vulkan"):  # torch knows their names
        with pytest.raises(RequestError, match=f"device {name} was requested, but this machine has"):
            choose_device(name)


def test_translators_into_a_language_move_with_the_one_they_came_from(hash_model: Any) -> None:
    settings = TokenizerSettings(kind="word", vocab_size=24)
    tokenizer = Tokenizer.train(["the cat sees a dog and you"], settings, languages=["de", "fr"])
    whole = Translator(hash_model(vocab_size=tokenizer.vocab_size), tokenizer, device="cpu")
    german = whole.into("de")
    whole.to("cpu:0")  # which is another name to torch
    assert german.device == whole.into("fr").device == torch.device("cpu:0")
    german.to("cpu")
    assert whole.device == german.device == torch.device("cpu")
    assert german.runner is whole.runner  # one model, and one set of compiled steps
