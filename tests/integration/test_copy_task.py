"""The smallest proof that training, saving and translating fit together: unseen sequences are copied exactly."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_run import changed

from manyheads.data.translation.prepared import open_data
from manyheads.decoding.translator import Translator
from manyheads.tasks.translation.settings import copy
from manyheads.training.run.loop import train


@pytest.mark.slow
def test_unseen_sequences_are_copied_exactly(tmp_path: Path) -> None:
    config = replace(copy(), run_dir=str(tmp_path / "copy"))
    config = changed(config, training={"plots": False, "tensorboard": False})
    result = train(config)
    assert result.model_dir is not None
    data = open_data(config.data, config.tokenizer, config.seed, tmp_path / "copy" / "data")
    seen = {tuple(data.train[index][0].tolist()) for index in range(len(data.train))}
    assert not any(tuple(data.tokenizer.encode(source)) in seen for source, _ in data.test_text)
    translations = Translator.from_pretrained(result.model_dir).translate([source for source, _ in data.test_text])
    assert translations == [wanted for _, wanted in data.test_text]
