"""The text on which the heads of a language model are judged."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.evaluation.likelihood import evaluate_text
from manyheads.evaluation.reading import Reading
from manyheads.extras.inspect.heads.judging import HeldSegments, NamedModel
from manyheads.extras.inspect.heads.scores import nats_per_token
from manyheads.extras.inspect.options import HeadTextOptions
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.tasks.language_modelling.evaluate import held_text
from manyheads.text.vocabulary import ByteVocabulary


@pytest.mark.parametrize("ext_len", [0, 40])
def test_a_model_that_reads_the_end_of_a_segment_again_does_so_here(tmp_path: Path, ext_len: int) -> None:
    """Without it, as many tokens would be missing between its memory and each segment."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "num_heads": 2, "d_ff": 16, "num_layers": 2, "dropout": 0.0}
    model = build_model(TransformerXLConfig(vocab_size=256, memory_len=100, ext_len=ext_len, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)  # so that the loss depends on what is seen
    text = tmp_path / "text.txt"
    text.write_text("one two three " * 300, encoding="utf-8")
    reader: Any = SimpleNamespace(vocabulary=ByteVocabulary(), model=model)
    held = NamedModel(str(tmp_path), reader)._segments(reader, HeadTextOptions(text=str(text)), "valid")
    assert isinstance(held, HeldSegments)
    wanted = evaluate_text(
        model, held_text(reader, "", text=str(text)).store, Reading(ext_len=ext_len), reader.vocabulary
    )
    assert nats_per_token(model, held.batches) == pytest.approx(wanted.nats_per_token, rel=1e-5)
