"""Beams that a reverse model ranks again, against the formula with scores from `Translator.score`."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import TestCase

import pytest
import torch

from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.decoding.search_problem import RULES
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.translator import Translator
from manyheads.errors import ConfigError, RequestError
from manyheads.extras.parsing.tokenizer import ParsingTask, ParsingTokenizer
from manyheads.models.pretrained import save_pretrained
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

TEXTS = ["the cat sees a dog", "", "a dog", "the dog sees you and you", "you"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sees a dog and you"], TokenizerSettings(kind="word", vocab_size=11))


def translator_of(
    tokenizer: Tokenizer, seed: int, languages: tuple[tuple[str, str], ...] = (), **changes: Any
) -> Translator:
    torch.manual_seed(seed)
    sizes = {"source_vocab_size": tokenizer.vocab_size, "target_vocab_size": tokenizer.vocab_size}
    config = replace(cast(Any, ARCHITECTURES["transformer"].presets["debug"]), **sizes, **changes)
    model = cast(Any, build_model(config))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(2.0)
    settings = DecodingSettings(num_beams=5, max_new_tokens=6, min_new_tokens=1, banned_ids=(tokenizer.unk_id,))
    made = Translator(model, tokenizer, settings, "cpu")
    made.languages = languages
    return made


@pytest.fixture
def forward(hash_model: Any, tokenizer: Tokenizer) -> Translator:
    """Its choices depend on every token before."""
    return _of_hashes(hash_model, tokenizer, 7)


@pytest.fixture
def reverse(hash_model: Any, tokenizer: Tokenizer) -> Translator:
    return _of_hashes(hash_model, tokenizer, 8)


def _of_hashes(hash_model: Any, tokenizer: Tokenizer, seed: int) -> Translator:
    class Scoring(hash_model):  # type: ignore[misc]
        def log_probs(self, source: Any, source_lengths: Any, target: Any) -> torch.Tensor:
            state, rows = self.start(source, source_lengths), []
            for column in target.unbind(1):
                row, state = self.step(column[:, None], state)
                rows.append(row)
            return torch.stack(rows, 1)

    settings = DecodingSettings(num_beams=5, max_new_tokens=6, min_new_tokens=1, banned_ids=(tokenizer.unk_id,))
    return Translator(Scoring(vocab_size=tokenizer.vocab_size, seed=seed), tokenizer, settings, "cpu")


@pytest.mark.parametrize(
    "options", [{}, {"length_penalty": 1.0, "length_penalty_kind": "power"}, {"rules": "marian"}], ids=str
)
def test_the_best_by_the_formula(forward: Translator, reverse: Translator, options: dict[str, Any]) -> None:
    weight = 0.7
    rules = RULES[options.get("rules", "manyheads")](forward.options(**options))
    found = forward.reranked_by(reverse, weight).translate_nbest(TEXTS, num_return_sequences=3, **options)
    beams = forward.translate_nbest(TEXTS, num_return_sequences=5, **options)
    assert found[1] == beams[1]
    moved = 0
    for text, best, beam in zip(TEXTS, found, beams, strict=True):
        if not text:
            continue
        back = reverse.score([one.text for one in beam], [text] * len(beam))
        totals = [float(rules.score(torch.tensor(one.sum_log_prob), len(one.tokens))) for one in back]
        wanted = [replace(one, score=one.score + weight * total) for one, total in zip(beam, totals, strict=True)]
        wanted.sort(key=lambda one: -one.score)
        assert [one.text for one in best] == [one.text for one in wanted[:3]]
        assert [one.tokens for one in best] == [one.tokens for one in wanted[:3]]
        assert [one.score for one in best] == pytest.approx([one.score for one in wanted[:3]], abs=1e-4)
        moved += best[0].text != beam[0].text
    assert moved  # otherwise the order of the search would pass


def test_it_is_in_all_translations(forward: Translator, reverse: Translator) -> None:
    made = forward.reranked_by(reverse)
    best = [found[0].text for found in made.translate_nbest(TEXTS)]
    assert made.translate(TEXTS) == list(made.translate_lines(TEXTS)) == best != forward.translate(TEXTS)
    assert made.model is forward.model
    assert forward.reranked_by(reverse, 0).translate_nbest(TEXTS) == forward.translate_nbest(TEXTS)
    assert made.score(["a dog"], ["you"]) == forward.score(["a dog"], ["you"])


def test_a_model_without_a_beam(forward: Translator, reverse: Translator) -> None:
    made = forward.reranked_by(reverse)
    with pytest.raises(ConfigError, match="num_beams is 1; search with num_beams of 2 or more"):
        made.translate("a dog", num_beams=1)
    with pytest.raises(ConfigError, match="do_sample is set"):
        made.translate("a dog", do_sample=True)


def test_other_languages_are_refused(tokenizer: Tokenizer) -> None:
    forward = translator_of(tokenizer, 0, (("en", "de"),))
    for languages in ((), (("DE", "en"),), (("fr", "en"), ("de", "en"))):
        forward.reranked_by(translator_of(tokenizer, 1, languages))
    for languages, shown in (((("en", "de"),), "en to de"), ((("de", "fr"),), "de to fr")):
        with pytest.raises(ConfigError, match=f"translates {shown}; reranking needs one that translates de to en"):
            forward.reranked_by(translator_of(tokenizer, 1, languages))


@pytest.mark.parametrize(
    ("languages", "others", "warning"),
    [
        ((), (), "Neither model records its languages, so it is not known whether the reverse model translates back"),
        ((), (("de", "en"),), "The first model does not record its languages"),
        ((("en", "de"),), (), "The reverse model does not record its languages"),
    ],
)
def test_unknown_languages_are_warned_of(languages, others, warning, tokenizer):
    with TestCase().assertLogs("manyheads", logging.WARNING) as logged:
        translator_of(tokenizer, 0, languages).reranked_by(translator_of(tokenizer, 1, others))
    assert [warning in record.getMessage() for record in logged.records] == [True]


def test_known_languages_are_not_warned_of(tokenizer: Tokenizer) -> None:
    with TestCase().assertNoLogs("manyheads", logging.WARNING):
        translator_of(tokenizer, 0, (("en", "de"),)).reranked_by(translator_of(tokenizer, 1, (("de", "en"),)))


def test_bad_arguments(forward: Translator, reverse: Translator, tokenizer: Tokenizer) -> None:
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="the weight of the reverse model is"):
            forward.reranked_by(reverse, weight)
    trees = Tokenizer.train(["the cat"], TokenizerSettings(kind="word", vocab_size=15), symbols=("(S", ")S", "XX"))
    reverse.tokenizer = ParsingTokenizer(trees, ParsingTask())
    with pytest.raises(ConfigError, match="one of the models is a parser"):
        forward.reranked_by(reverse)


def test_languages_by_tags(tmp_path: Path) -> None:
    """The source of a model of several languages has a tag, which a reverse model does not give back."""
    languages = ("de", "fr")
    words = ["the cat sees a dog and you"]
    many = Tokenizer.train(words, TokenizerSettings(kind="word", vocab_size=15), languages=languages)
    forward = translator_of(many, 0, (("en", "de"), ("en", "fr")))
    back = translator_of(many, 1, (("de", "en"), ("fr", "en")))
    back.tokenizer = Tokenizer.train(words, TokenizerSettings(kind="word", vocab_size=15), languages=("en",))
    with pytest.raises(ConfigError, match="choose one before reranking, by --target-lang"):
        forward.reranked_by(back)
    made = forward.into("de").reranked_by(back)
    assert made.target_lang == "de"
    beam = forward.into("de").translate_nbest("a dog", num_return_sequences=5)
    scores = back.into("en").score([one.text for one in beam], ["a dog"] * 5)
    rules = RULES["manyheads"](made.settings)
    wanted = [
        one.score + float(rules.score(torch.tensor(other.sum_log_prob), len(other.tokens)))
        for one, other in zip(beam, scores, strict=True)
    ]
    assert made.translate_nbest("a dog")[0].score == pytest.approx(max(wanted), abs=1e-4)
    assert made.into("fr").translate_nbest("a dog") == forward.into("fr").translate_nbest("a dog")


def test_texts_that_are_too_long_for_the_reverse_model(forward: Translator, tokenizer: Tokenizer) -> None:
    short = translator_of(tokenizer, 1, positions="learned", max_len=4)
    made = forward.reranked_by(short)
    with pytest.raises(RequestError, match=r"text 2 has 6 tokens.* at most 4 fit \(the model's .*in the reverse model"):
        made.translate(["a dog", "the cat sees a dog"])
    cut = made.translate_nbest("the cat sees a dog", too_long="truncate", num_return_sequences=5)
    beam = forward.translate_nbest("the cat sees a dog", num_return_sequences=5)
    assert sorted(one.text for one in cut) == sorted(one.text for one in beam)
    three = [" ".join(one.text.split()[:3]) for one in beam]
    scores = short.score(three, ["the cat sees"] * 5)
    rules = RULES["manyheads"](made.settings)
    wanted = [
        one.score + float(rules.score(torch.tensor(other.sum_log_prob), 4))
        for one, other in zip(beam, scores, strict=True)
    ]
    assert [one.score for one in cut] == pytest.approx(sorted(wanted, reverse=True), abs=1e-4)


def test_an_ensemble_is_reranked(tmp_path: Path, tokenizer: Tokenizer, reverse: Translator) -> None:
    folders = []
    for seed in (0, 2):
        one = translator_of(tokenizer, seed, tie_embeddings="none")
        save_pretrained(cast(Any, one.model), tmp_path / str(seed), tokenizer=tokenizer, generation=one.settings)
        folders.append(tmp_path / str(seed))
    ensemble = Translator.from_pretrained(folders, "cpu")
    best = ensemble.reranked_by(reverse).translate_nbest(TEXTS[0])[0]
    beam = ensemble.translate_nbest(TEXTS[0], num_return_sequences=5)
    assert best.token_log_probs in [one.token_log_probs for one in beam]
    assert best.score < beam[0].score
