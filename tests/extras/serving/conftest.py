"""Tiny models of both kinds in folders, and a server in the test's process."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient

from manyheads.catalogue import build_model
from manyheads.decoding.settings import DecodingSettings, GenerationSettings
from manyheads.extras.serving.app import build_app
from manyheads.extras.serving.settings import ServingSettings
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer import config as presets
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabulary import ByteVocabulary

TEXTS = [
    "Hello, how are you?", "Hallo, wie geht es dir?", "I am hungry.", "Ich habe Hunger.", "The cat sees the dog.",
    "Die Katze sieht den Hund.", "Where is the station?", "Wo ist der Bahnhof?", "She reads a book.",
] * 2  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def translator_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained Transformer: what it says is nonsense, but always the same."""
    tokenizer = Tokenizer.train(TEXTS, TokenizerSettings(vocab_size=320))
    size = tokenizer.vocab_size
    config = dataclasses.replace(presets.PRESETS["debug"], source_vocab_size=size, target_vocab_size=size)
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("served") / "en-de"
    settings = DecodingSettings(num_beams=2, max_len_offset=4, min_new_tokens=3, banned_ids=(tokenizer.unk_id,))
    save_pretrained(build_model(config), folder, tokenizer=tokenizer, generation=settings)
    return folder


@pytest.fixture(scope="session")
def novel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Transformer-XL over bytes with large weights, so that it has strong opinions."""
    vocabulary = ByteVocabulary()
    config = TransformerXLConfig(
        vocab_size=vocabulary.vocab_size, d_model=16, num_heads=2, d_ff=24, num_layers=2, memory_len=12
    )
    torch.manual_seed(3)
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
    folder = tmp_path_factory.mktemp("served") / "novel"
    save_pretrained(model, folder, tokenizer=vocabulary, generation=GenerationSettings(max_new_tokens=24))
    return folder


@pytest.fixture(scope="session")
def settings(translator_folder: Path, novel_folder: Path) -> ServingSettings:
    return ServingSettings(
        models=(str(translator_folder), str(novel_folder)), source_lang="en", target_lang="de", device="cpu",
        allowed_hosts=("testserver", "127.0.0.1"),
    )  # fmt: skip


@pytest.fixture(scope="session")
def client(settings: ServingSettings) -> Iterator[TestClient]:
    """A client of a server with both models."""
    with TestClient(build_app(settings)) as running:
        yield running
