"""torch's default device and type do not matter: every tensor has a device by name, or is made on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

import manyheads
from manyheads.catalogue import build_model
from manyheads.decoding.generator import Generator
from manyheads.decoding.settings import DecodingSettings, GenerationSettings
from manyheads.decoding.translator import Translator
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer.config import TransformerConfig
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.tasks.language_modelling.score import score_texts
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabulary import ByteVocabulary

SIZES: dict[str, Any] = {"d_model": 16, "num_heads": 2, "d_ff": 24}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.manual_seed(1)
    where = tmp_path_factory.mktemp("models")
    tokenizer = Tokenizer.train(["the dog sees the cat"], TokenizerSettings(vocab_size=300))
    size = tokenizer.vocab_size
    sizes = {"source_vocab_size": size, "target_vocab_size": size, "num_encoder_layers": 1, "num_decoder_layers": 1}
    save_pretrained(
        build_model(TransformerConfig(**SIZES, **sizes)),
        where / "translator",
        tokenizer=tokenizer,
        generation=DecodingSettings(max_new_tokens=5),
    )
    save_pretrained(
        build_model(TransformerXLConfig(**SIZES, vocab_size=256, num_layers=1, memory_len=16)),
        where / "generator",
        tokenizer=ByteVocabulary(),
        generation=GenerationSettings(max_new_tokens=5),
    )
    return where / "translator", where / "generator"


def used(translator: Translator, generator: Generator) -> list[Any]:
    """What models give."""
    options: dict[str, Any] = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "banned_ids": (9,)}
    return [
        translator.translate(["the dog", "the cat sees"]),
        translator.translate(["the dog"], num_beams=1, **options),
        translator.translate(["the dog"], do_sample=True, top_k=5, top_p=0.9),
        round(sum(translator.score(["the dog"], ["the cat"])[0].token_log_probs), 2),
        generator.generate(["the", ""], num_return_sequences=2, top_p=0.9, min_p=0.01, **options),
        generator.generate("the", do_sample=False),
        round(sum(score_texts(generator, ["the dog", "a"])[0].token_log_probs), 2),
    ]


def loaded(folders: tuple[Path, Path]) -> list[Any]:
    return used(Translator.from_pretrained(folders[0], "cpu"), Generator.from_pretrained(folders[1], "cpu"))


@pytest.mark.parametrize("default", ["meta", torch.float64])
def test_models_give_the_same(folders: tuple[Path, Path], default: Any) -> None:
    expected = loaded(folders)
    before = Translator.from_pretrained(folders[0], "cpu"), Generator.from_pretrained(folders[1], "cpu")
    try:
        (torch.set_default_device if default == "meta" else torch.set_default_dtype)(default)
        assert loaded(folders) == expected
        assert used(*before) == expected
        assert all(tensor.device.type == "cpu" for tensor in manyheads.load(folders[0]).state_dict().values())
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
