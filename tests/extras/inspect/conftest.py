"""A language model that the tests of looking inside share."""

from pathlib import Path

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.text.vocabulary import ByteVocabulary


@pytest.fixture(scope="session")
def language_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = TransformerXLConfig(
        vocab_size=256, d_model=16, num_heads=2, head_dim=8, d_ff=32, num_layers=2, memory_len=6
    )
    folder = tmp_path_factory.mktemp("xl") / "model"
    save_pretrained(build_model(config), folder, tokenizer=ByteVocabulary())
    return folder
