"""A vocabulary size below the data's ids is refused before training starts, in every kind of run; the least works."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TINY, TINY_REFORMER, TINY_TEXT

from manyheads.data.settings import DUPLICATION, SegmentSettings
from manyheads.data.translation.prepared import PreparedData, open_data
from manyheads.data.translation.preparing import PairList
from manyheads.errors import ConfigError
from manyheads.evaluation.reading import Reading
from manyheads.extras.parsing.sequence_task.prepare import prepare_trees
from manyheads.extras.parsing.tokenizer import ParsingTask
from manyheads.extras.parsing.trees import ParsingSettings
from manyheads.extras.planning.first_step import first_step
from manyheads.models.reformer.config import ReformerSeq2SeqConfig
from manyheads.models.transformer.config import TransformerConfig
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.text.settings import TokenizerSettings
from manyheads.training.run.loop import train
from manyheads.training.settings import RunConfig

TREES = ["(S (NP (DT the) (NN cat)) (VP (VBZ sleeps)))", "(S (NP (NN rain)) (VP (VBZ falls)))"]
TRANSFORMER = replace(TINY.model, tie_embeddings="none")
REFORMER = ReformerSeq2SeqConfig(
    d_model=8, num_heads=2, d_ff=8, num_encoder_layers=1, num_decoder_layers=1, max_len=32, tie_embeddings="none"
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return open_data(TINY.data, TINY.tokenizer, 1, tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    folder = tmp_path_factory.mktemp("trees") / "data"
    task = ParsingTask(ParsingSettings())
    known = PairList("made up", [("the cat sleeps", TREES[0]), ("rain falls", TREES[1])] * 10)
    prepare_trees(folder, train=known, tokenizer=TokenizerSettings(vocab_size=300), task=task)
    return PreparedData.open(folder)


def config_of(data: PreparedData, model: TransformerConfig | ReformerSeq2SeqConfig, run: Path) -> TrainConfig:
    settings = replace(TINY.data, path=str(data.path), max_source_len=64, max_target_len=64, max_tokens=512)
    return replace(TINY, run_dir=str(run), data=settings, model=model)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model", [TRANSFORMER, REFORMER], ids=["transformer", "reformer"])
@pytest.mark.parametrize("task", ["translation", "parsing"])
def test_of_sentence_pairs(task: str, model: Any, pairs: PreparedData, trees: PreparedData, tmp_path: Path) -> None:
    data = pairs if task == "translation" else trees
    least = {"source_vocab_size": data.tokenizer.vocab_size, "target_vocab_size": data.tokenizer.num_target_ids}
    assert (least["target_vocab_size"] < least["source_vocab_size"]) == (task == "parsing")
    for name, size in least.items():
        config = config_of(data, replace(model, **{name: size - 1}), tmp_path / "run")
        with pytest.raises(ConfigError) as caught:
            train(config)
        assert str(caught.value) == (
            f"model.{name} is {size - 1}, but the tokenizer of {data.path} gives {size} ids on that side; set it to 0,"
            " which uses them all."
        )
        assert not (tmp_path / "run" / "checkpoints").exists()
    taken = first_step(config_of(data, replace(model, **least), tmp_path / "other"))
    assert taken.fault is None
    filled = first_step(config_of(data, model, tmp_path / "other")).config
    assert isinstance(filled, TrainConfig)
    assert {name: getattr(filled.model, name) for name in least} == least


def test_of_one_matrix_for_both_sides(pairs: PreparedData, tmp_path: Path) -> None:
    size = pairs.tokenizer.vocab_size - 1
    model = replace(TINY.model, tie_embeddings="all", source_vocab_size=size, target_vocab_size=size)
    with pytest.raises(ConfigError, match=f"model.source_vocab_size is {size}, but the tokenizer"):
        first_step(config_of(pairs, model, tmp_path / "run"))


LANGUAGE = {
    "transformer-xl": TINY_TEXT,
    "reformer": TINY_REFORMER,
    "duplication": replace(
        TINY_REFORMER,
        data=SegmentSettings(path=DUPLICATION, lanes=2, segment_len=16),
        reading=Reading(segment_len=16, lanes=2, max_tokens=200),
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", LANGUAGE)
def test_of_texts(kind: str, tmp_path: Path) -> None:
    config: RunConfig = replace(LANGUAGE[kind], run_dir=str(tmp_path / "run"))
    filled = first_step(config).config
    least = filled.model.vocab_size  # type: ignore[attr-defined]
    assert least == (129 if kind == "duplication" else 256)

    def sized(size: int) -> RunConfig:
        return replace(config, model=replace(config.model, vocab_size=size))  # type: ignore[attr-defined, call-arg]

    with pytest.raises(ConfigError, match=rf"model\.vocab_size is {least - 1}.* {least} ids.* set it to 0"):
        train(sized(least - 1))
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert first_step(sized(least)).fault is None
