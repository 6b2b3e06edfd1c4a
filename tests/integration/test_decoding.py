"""Search over the real model: with its key-value state it must find what recomputing everything finds."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from naive_search import naive_beam_search

from manyheads.catalogue import build_model
from manyheads.decoding.search import search_all
from manyheads.decoding.search_problem import length_limits
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.translator import Translator
from manyheads.errors import ModelFileError, RequestError
from manyheads.models.composites import Seq2Seq
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer.config import PRESETS
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

IDS: dict[str, int] = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
SOURCES = [[3 + (7 * i + 5 * j) % 36 for j in range(1 + (3 * i) % 5)] + [2] for i in range(4)]
TEXTS = ["the cat sees a dog", "", "a dog and a cat", "you"]


def lively(vocab_size: int, **changes: object) -> Seq2Seq:
    """An untrained model whose choices are spread: larger weights, so that no two hypotheses tie."""
    torch.manual_seed(1)
    config = replace(PRESETS["debug"], source_vocab_size=vocab_size, target_vocab_size=vocab_size, **changes)  # type: ignore[arg-type]
    model = build_model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    return model


@pytest.mark.parametrize(
    ("options", "positions"),
    [
        (DecodingSettings(num_beams=1, max_len_offset=2), "learned"),
        (DecodingSettings(num_beams=4, num_return_sequences=4, max_len_offset=2), "sinusoidal"),
        (DecodingSettings(num_beams=3, early_stopping=True, length_penalty_kind="power", max_new_tokens=6), "learned"),
        (
            DecodingSettings(num_beams=2, forced_prefix_ids=(7, 9), no_repeat_ngram_size=2, max_new_tokens=6),
            "sinusoidal_halves",
        ),
    ],
)
def test_cached_beam_is_the_oracle_recomputed(options: DecodingSettings, positions: str) -> None:
    model = lively(40, positions=positions, max_len=32)
    found = search_all(model, SOURCES, replace(options, max_tokens=40), **IDS)
    limits = length_limits(torch.tensor([len(ids) for ids in SOURCES]), options, model.max_len).tolist()
    for ids, limit, hypotheses in zip(SOURCES, limits, found, strict=True):

        @torch.no_grad()
        def next_log_probs(target: list[int], ids: list[int] = ids) -> list[float]:
            source, lengths = torch.tensor([ids]), torch.tensor([len(ids)])
            return model.log_probs(source, lengths, torch.tensor([target]))[0, -1].tolist()  # type: ignore[no-any-return]

        expected = naive_beam_search(next_log_probs, replace(options, early_stopping=options.early_stopping
                                     or options.num_beams == 1), limit=limit, **IDS)  # fmt: skip
        assert [h.ids for h in hypotheses] == [h.ids for h in expected]
        assert [h.score for h in hypotheses] == pytest.approx([h.score for h in expected], abs=1e-4)
        assert hypotheses[0].token_log_probs == pytest.approx(expected[0].token_log_probs, abs=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    tokenizer = Tokenizer.train([*TEXTS, "the dog"], TokenizerSettings(vocab_size=300))
    settings = DecodingSettings(num_beams=3, max_new_tokens=8, min_new_tokens=2)
    save_pretrained(lively(tokenizer.vocab_size), path, tokenizer=tokenizer, generation=settings)
    return path


def test_from_pretrained(folder: Path) -> None:
    translator = Translator.from_pretrained(folder, device="cpu")
    assert translator.settings.num_beams == 3
    found = translator.translate(TEXTS)
    assert len(found) == 4
    assert found[1] == ""
    assert translator.translate(TEXTS[0]) == found[0]
    assert list(translator.translate_lines(TEXTS, lines_at_once=2)) == [text.replace("\n", " ") for text in found]
    (scored,) = translator.score(["the cat"], ["you"])
    assert all(value < 0 for value in scored.token_log_probs)


def test_bf16_scores_are_close(folder: Path) -> None:
    exact, rough = (Translator.from_pretrained(folder, "cpu", precision) for precision in ("fp32", "bf16"))  # type: ignore[arg-type]
    one, other = (translator.score(TEXTS, TEXTS) for translator in (exact, rough))
    for a, b in zip(one, other, strict=True):
        assert b.sum_log_prob == pytest.approx(a.sum_log_prob, rel=0.05)
    assert len(rough.translate(TEXTS)) == 4


def test_score_is_what_the_search_reports(folder: Path) -> None:
    translator = Translator.from_pretrained(folder, device="cpu")
    for text, translations in zip(TEXTS, translator.translate_nbest(TEXTS, min_new_tokens=0), strict=True):
        best = translations[0]
        if best.tokens and best.tokens[-1] == "</s>":
            (scored,) = translator.score([text], [best.text])
            if scored.tokens == best.tokens:
                assert scored.token_log_probs == pytest.approx(best.token_log_probs, abs=1e-4)


def test_learned_positions_set_a_limit() -> None:
    tokenizer = Tokenizer.train(TEXTS, TokenizerSettings(kind="word", vocab_size=12))
    model = lively(tokenizer.vocab_size, positions="learned", max_len=5)
    translator = Translator(model, tokenizer, device="cpu")
    translator.translate("the cat sees a")
    assert len(translator.translate_nbest(["the cat sees a"], min_new_tokens=5)[0][0].tokens) <= 5
    with pytest.raises(RequestError, match="at most 5 fit"):
        translator.translate("the cat sees a dog")
    with pytest.raises(RequestError, match=r"at most 5 fit \(the model's positions\)"):
        translator.score(["the"], ["the cat sees a dog"])


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    save_pretrained(lively(40), tmp_path / "model")
    with pytest.raises(ModelFileError, match="no tokenizer"):
        Translator.from_pretrained(tmp_path / "model")
