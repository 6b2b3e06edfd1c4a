"""`plain=True`: the searches compute with torch's own operations; otherwise with the fast implementations."""

from pathlib import Path
from typing import Any

import pytest
from export_models import write_transformer
from torch import nn

from manyheads.catalogue import build_model
from manyheads.decoding.generator import Generator
from manyheads.decoding.settings import GenerationSettings
from manyheads.decoding.translator import Translator
from manyheads.errors import RequestError
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.nn.kernels.modes import is_fast
from manyheads.text.vocabulary import ByteVocabulary

TEXTS = ["I am hungry.", "the cat sees a dog"]


def modes(model: Any) -> list[bool]:
    """What is seen in each step."""
    seen: list[bool] = []
    next(one for one in model.modules() if isinstance(one, nn.LayerNorm)).register_forward_hook(
        lambda *_: seen.append(is_fast())
    )
    return seen


@pytest.mark.parametrize("plain", [False, True])
def test_translators(plain: bool, tmp_path: Path) -> None:
    folder = write_transformer(tmp_path / "model", norm_position="pre")
    translator = Translator.from_pretrained(folder, "cpu", plain=plain)
    seen = modes(translator.model)
    found = translator.translate(TEXTS, max_new_tokens=6)
    assert set(seen) == {not plain}
    assert not is_fast()
    assert plain <= all(getattr(one, "packed", None) is None for one in translator.model.modules())  # type: ignore[attr-defined]
    assert found == Translator.from_pretrained(folder, "cpu").translate(TEXTS, max_new_tokens=6)
    translator.to("cpu")
    assert plain <= all(getattr(one, "packed", None) is None for one in translator.model.modules())  # type: ignore[attr-defined]


@pytest.mark.parametrize("plain", [False, True])
def test_generators(plain: bool) -> None:
    """A caller who reads a text piece by piece is in its own mode between two pieces."""
    vocabulary = ByteVocabulary()
    config = TransformerXLConfig(vocab_size=vocabulary.vocab_size, d_model=16, num_heads=2, d_ff=24, num_layers=2)
    model = build_model(config)
    generator = Generator(model, vocabulary, GenerationSettings(max_new_tokens=8), "cpu", plain=plain)
    seen = modes(generator.model)
    generator.generate(TEXTS)
    assert set(seen) == {not plain}
    for _ in generator.stream("It is"):
        assert not is_fast()


def test_it_excludes_what_is_not_plain(tmp_path: Path) -> None:
    folder = write_transformer(tmp_path / "model")
    with pytest.raises(RequestError, match="not with compile_steps; leave one out"):
        Translator.from_pretrained(folder, "cpu", compile_steps=True, plain=True)
