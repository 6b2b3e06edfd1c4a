"""A model folder that another process replaces while it is read gives the old model or the new one, whole."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.decoding.translator import Translator
from manyheads.errors import ModelFileError
from manyheads.files import verify
from manyheads.files.commit import swap
from manyheads.models import pretrained
from manyheads.models.pretrained import load
from manyheads.models.transformer.config import TransformerConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

WORDS = TokenizerSettings(kind="word", vocab_size=20)


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Two models with tokenizers of their own; the value of every weight tells which model it is of."""
    paths = tmp_path / "model", tmp_path / "other"
    for number, path in enumerate(paths, 1):
        tokenizer = Tokenizer.train(["cat", "cat dog"][:number], WORDS)
        size = tokenizer.vocab_size
        sizes: dict[str, Any] = {"d_model": 16, "d_ff": 16, "num_heads": 2}
        config = TransformerConfig(
            source_vocab_size=size, target_vocab_size=size, num_encoder_layers=1, num_decoder_layers=1, **sizes
        )
        model = build_model(config)
        with torch.no_grad():
            for one in model.parameters():
                one.fill_(number)
        pretrained.save_pretrained(model, path, tokenizer=tokenizer)
    return paths


def at_moment(monkeypatch: pytest.MonkeyPatch, moment: int, act: Callable[[], None]) -> list[str]:
    """Call `act` before the reading with this number. Returns: the names of the readings, as they happen."""
    readings: list[str] = []

    def before(real: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            readings.append(f"{real.__name__} {args[0]}")
            if len(readings) == moment:
                act()
            return real(*args, **kwargs)

        return read

    for place, name in (
        (verify, "read_manifest"),
        (verify, "file_sha256"),
        (pretrained, "verify_folder"),
        (pretrained, "read_object"),
        (pretrained, "safe_open"),
        (pretrained, "_check_fit"),
    ):
        monkeypatch.setattr(place, name, before(getattr(place, name)))
    return readings


@pytest.mark.one_in(2)
@pytest.mark.parametrize("first", [1, 2])
def test_a_swap_at_any_moment_gives_one_model(models, monkeypatch, first):
    """At every other moment of reading it."""
    model, other = models
    moment, last = first, False
    while not last:
        with monkeypatch.context() as patch:
            readings = at_moment(patch, moment, lambda: swap(model, other) or exchange(model, other))
            found = Translator.from_pretrained(model, "cpu")
            last = len(readings) < moment
        values = {float(value) for one in found.model.parameters() for value in one.detach().flatten()}
        assert len(values) == 1, readings
        sizes = {found.tokenizer.source.vocab_size, found.model.config.source_vocab_size}
        assert len(sizes) == 1, readings
        now = Tokenizer.load(model / "tokenizer.json").digest
        assert found.tokenizer.source.digest == now
        moment += 2
    assert moment > 10


def exchange(one: Path, two: Path) -> None:
    spare = one.with_name("spare")
    one.rename(spare)
    two.rename(one)
    spare.rename(two)


def test_a_folder_that_disappears_is_no_bare_error(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = models
    kept = model.with_name("kept")
    shutil.copytree(model, kept)
    for moment in range(1, 9):
        with monkeypatch.context() as patch:
            at_moment(patch, moment, lambda: shutil.rmtree(model))
            with pytest.raises(ModelFileError):
                Translator.from_pretrained(model, "cpu")
        shutil.copytree(kept, model)


def test_damage_is_still_damage_and_is_read_once(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = models
    os.truncate(model / "model.safetensors", 100)
    readings = at_moment(monkeypatch, 0, lambda: None)
    with pytest.raises(ModelFileError, match=r"model is damaged: model\.safetensors has 100 bytes"):
        load(model)
    assert sum(name.startswith("verify_folder") for name in readings) == 1


def test_a_folder_that_never_stays_is_given_up(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = models
    monkeypatch.setattr(pretrained, "_check_fit", lambda *_: exchange(model, other))
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(ModelFileError, match="was replaced again and again"):
        load(model)
