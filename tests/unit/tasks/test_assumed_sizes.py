"""The size of a vocabulary for predictions of memory: of the settings, of the prepared data, or assumed and told."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyheads.catalogue import PRESETS
from manyheads.config.build import resolve
from manyheads.config.files import load_yaml
from manyheads.data.language.preparing import prepare_text
from manyheads.data.language.texts import TextBlock
from manyheads.errors import ConfigError
from manyheads.extras.planning.planner import Planner
from manyheads.tasks.language_modelling.settings import TextConfig
from manyheads.text.settings import VocabularySettings

RECIPE = Path(__file__).parents[3] / "recipes" / "wikitext-103-base.yaml"


def recipe(path: str, **model: Any) -> TextConfig:
    config = resolve(TextConfig, [load_yaml(RECIPE)])
    return replace(config, data=replace(config.data, path=path), model=replace(config.model, **model))


def sizes(config: Any) -> tuple[int, str]:
    synthetic_run = Planner(config).synthetic_run.at(4)
    model = synthetic_run.config.model
    return getattr(model, "vocab_size", 0) or model.source_vocab_size, synthetic_run.vocabulary


def test_prepared_data_gives_the_size(tmp_path: Path) -> None:
    folder = tmp_path / "words"
    content = " ".join(f"word{number}" for number in range(40)).encode()
    made = prepare_text(folder, train=TextBlock("x", content), vocabulary=VocabularySettings(level="words"))
    size = made["tokenizer"]["vocab_size"]
    assert sizes(recipe(str(folder), cutoffs=(10, 20))) == (size, f"vocabulary: the {size} ids of {folder}")
    demo = PRESETS["demo"]()
    assert sizes(replace(demo, data=replace(demo.data, path=str(folder))))[0] == size


def test_without_data_the_cutoffs_or_the_settings_give_it() -> None:
    size, told = sizes(recipe("data/none"))
    assert size > 200_000  # the last cutoff
    assert told.endswith("a third more than the last of model.cutoffs, because data/none is no folder of prepared data")
    assert sizes(recipe("data/none", vocab_size=267_735)) == (267_735, "")
    assert sizes(recipe("data/none", cutoffs=()))[1].startswith("vocabulary: 257 ids are assumed, as usual for bytes")
    words = replace(recipe("data/none", cutoffs=()), vocabulary=VocabularySettings(level="words", vocab_size=5000))
    assert sizes(words)[0] == 5000


def test_words_that_nobody_has_counted_are_named_with_the_command() -> None:
    words = replace(recipe("data/none", cutoffs=()), vocabulary=VocabularySettings(level="words"))
    with pytest.raises(ConfigError, match=r"data/none is no folder.*prepare --task lm .*--output data/none"):
        sizes(words)
