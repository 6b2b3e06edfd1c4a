"""The smallest proof that training, saving and translating fit together: unseen sequences are copied exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from manyheads.data.prepared import open_data
from manyheads.decoding.translator import Translator
from manyheads.tasks.presets import copy
from manyheads.tasks.runs import train


def test_unseen_sequences_are_copied_exactly(tmp_path: Path) -> None:
    config = replace(copy(), run_dir=str(tmp_path / "copy"))
    config = replace(config, training=replace(config.training, plots=False, tensorboard=False))
    result = train(config)
    assert result.model_dir is not None
    data = open_data(config.data, config.tokenizer, config.seed, tmp_path / "copy" / "data")
    seen = {tuple(data.train[index][0].tolist()) for index in range(len(data.train))}
    assert not any(tuple(data.tokenizer.encode(source)) in seen for source, _ in data.test_text)
    translations = Translator.from_pretrained(result.model_dir).translate([source for source, _ in data.test_text])
    wrong = [(out, want) for out, (_, want) in zip(translations, data.test_text, strict=True) if out != want]
    assert wrong == []
