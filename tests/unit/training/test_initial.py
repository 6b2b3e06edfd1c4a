"""Training that begins from a model: weights, new ids, frozen parameters, mixes, and resuming without the model."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import TINY, TINY_REFORMER, TINY_TEXT, changed, outcome

from manyheads.data.language.preparing import prepare_text
from manyheads.data.language.texts import TextBlock
from manyheads.data.translation.prepared import prepare_corpus
from manyheads.data.translation.preparing import PairList
from manyheads.errors import ConfigError, ModelFileError
from manyheads.extras.planning.first_step import first_step
from manyheads.files.verify import file_sha256
from manyheads.text.settings import TokenizerSettings, VocabularySettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.training.run.clock import StopFlag
from manyheads.training.run.components import assemble
from manyheads.training.run.loop import train
from manyheads.training.run.resume import _with_new_rows
from manyheads.training.settings import TokenInitialSettings

CPU = torch.device("cpu")
WORDS = ["the", "a", "dog", "cat", "sees", "hears", "man", "tree"]
KINDS = ("transformer", "transformer-xl", "reformer")


def sentences(count: int, words: list[str]) -> list[tuple[str, str]]:
    texts = [" ".join(words[(one * step + one // 3) % len(words)] for step in range(1, 5)) for one in range(count)]
    return [(text, text.upper() if "neu" not in text else text) for text in texts]


class World:
    """Prepared data, and a small trained model of each architecture."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        known = [word for text in (*WORDS, *map(str.upper, WORDS)) for word in [text]]
        self.tokenizer = Tokenizer.train(known, TokenizerSettings(kind="word", vocab_size=64))
        pieces = [*self.tokenizer.pieces, "neu", "newer"]
        self.grown = Tokenizer("word", False, pieces, [])
        self.pairs("old", WORDS, self.tokenizer)
        self.pairs("new", WORDS[2:], self.tokenizer)
        self.pairs("more", [*WORDS, "neu", "newer"], self.grown)
        self.pairs("other", WORDS, TokenizerSettings(kind="word", vocab_size=12))
        for name, text in (("text-old", "one two three. " * 60), ("text-new", "four five six! " * 40)):
            blocks = [TextBlock(name, part.encode()) for part in (text, text[:90])]
            prepare_text(folder / name, train=blocks[0], valid=blocks[1], vocabulary=VocabularySettings(level="bytes"))
        for kind in KINDS:
            train(self.config(kind, f"model-{kind}", "text-old" if kind != "transformer" else "old"))

    def pairs(self, name: str, words: list[str], tokenizer: Any) -> None:
        splits = {"train": sentences(60, words), "valid": sentences(4, words), "test": sentences(5, words[::-1])}
        lists: dict[str, Any] = {split: PairList(name, pairs) for split, pairs in splits.items()}
        prepare_corpus(self.folder / name, **lists, tokenizer=tokenizer)

    def config(self, kind: str, run: str, data: str, /, **sections: Any) -> Any:
        base: Any = {"transformer": TINY, "transformer-xl": TINY_TEXT, "reformer": TINY_REFORMER}[kind]
        own: dict[str, Any] = {"path": str(self.folder / data)}
        own |= {"num_train_pairs": 0} if kind == "transformer" else {"segment_lengths": "fixed"}
        base = changed(base, data=own, schedule={"kind": "constant"}, training={"max_steps": 3})
        return changed(replace(base, run_dir=str(self.folder / run)), **sections)

    def model(self, kind: str) -> Path:
        return self.folder / f"model-{kind}" / "model"

    def initial(self, kind: str, **more: str) -> TokenInitialSettings:
        digest = file_sha256(self.model(kind) / "model.safetensors")
        return TokenInitialSettings(model=str(self.model(kind)), sha256=digest, **more)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def begun(world: World, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes the config of a run that begins from the small model of a kind."""

    def make(kind: str, data: str, run: str = "", /, **sections: Any) -> Any:
        name = run or request.node.name.replace("/", "-")
        return world.config(kind, name, data, **{"initial": world.initial(kind), **sections})

    return make


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_begins_with_the_weights_of_the_model(world: World, begun: Callable[..., Any], kind: str) -> None:
    config = begun(kind, "new" if kind == "transformer" else "text-new", training={"ema_decay": 0.0})
    components = assemble(config, CPU, world.folder / "cache")
    wanted = weights(world.model(kind))
    found = dict(components.model.state_dict())
    for name, tensor in wanted.items():
        mine = found.get(name, found.get(f"body.{name}"))
        assert mine is not None
        assert torch.equal(mine, tensor)
    assert "begins from" in components.notes[0]
    assert not components.optimiser.state


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_goes_on_without_the_model(world, begun, kind, tmp_path):
    """Byte for byte, with a mix of data sets and frozen parameters, in the middle of an epoch."""
    copy = shutil.copytree(world.model(kind), tmp_path / "copy")
    initial = replace(world.initial(kind), model=str(copy))
    old, new = ("old", "new") if kind == "transformer" else ("text-old", "text-new")
    mix = (f"{world.folder / old}=0.4", f"{world.folder / new}=0.6")
    frozen = {"transformer": "encoder", "transformer-xl": "layers.0", "reformer": "layers.1"}[kind]
    sections: dict[str, Any] = {
        "initial": initial, "data": {"mix": mix}, "training": {"freeze": (frozen,), "max_steps": 7},
    }  # fmt: skip
    straight = begun(kind, new, f"straight-{kind}", **sections)
    result = train(straight)
    assert len(result.compared) == 2
    parted = begun(kind, new, f"parted-{kind}", **sections)
    train(changed(parted, training={"max_steps": 2}))
    shutil.rmtree(copy)  # a resumed run does not need it
    train(parted)
    wanted, found = outcome(Path(straight.run_dir)), outcome(Path(parted.run_dir))
    # The first two name the run's folder; the stop at step 2 is validated, which metrics record.
    ignored = {"config.yaml", "scalars", "metrics.jsonl"}
    assert [name for name in wanted if name not in ignored and found[name] != wanted[name]] == []
    before = weights(world.model(kind))
    after = load_file(Path(straight.run_dir) / "checkpoints/step-00000007/model.safetensors")
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if name.startswith(f"{frozen}.")} <= same
    assert len(same) < len(before)
    recorded = (Path(parted.run_dir) / "config.yaml").read_text()
    assert initial.sha256 in recorded


def test_scores_before_and_after_of_old_and_new_data(world: World, begun: Callable[..., Any]) -> None:
    initial = world.initial("transformer", data=str(world.folder / "old"))
    config = begun("transformer", "new", initial=initial, optimiser={"learning_rate": 0.05})
    result = train(config)
    names = [name for name, _, _ in result.compared]
    assert names == [f"{world.folder / 'old'} test", f"{world.folder / 'new'} test"]
    assert all(before != after and "loss" in before for _, before, after in result.compared)
    record = json.loads((Path(config.run_dir) / "comparison.json").read_text())
    assert record["best_step"] == result.best_step
    assert train(config).compared == result.compared  # a finished run reports the same again


def test_data_with_two_names_is_judged_once(world: World, begun: Callable[..., Any]) -> None:
    for name in ("old", "new"):
        shutil.copytree(world.folder / name, world.folder / f"{name}-copy")
    initial = world.initial("transformer", data=str(world.folder / "old-copy"))
    mix = (f"{world.folder / 'old'}=0.5", f"{world.folder / 'new'}=0.3", f"{world.folder / 'new-copy'}=0.2")
    names = [name for name, _, _ in train(begun("transformer", "old", initial=initial, data={"mix": mix})).compared]
    assert names == [f"{world.folder / 'old'} test", f"{world.folder / 'new'} test"]


def test_scores_of_a_run_without_validation_that_was_made_longer(world: World, begun: Callable[..., Any]) -> None:
    """The data has a test set only; what it says after three steps is not what it says after six."""
    splits = {"train": sentences(60, WORDS), "test": sentences(5, WORDS[::-1])}
    lists: dict[str, Any] = {split: PairList("tested", pairs) for split, pairs in splits.items()}
    prepare_corpus(world.folder / "tested", **lists, tokenizer=world.tokenizer)
    config = begun("transformer", "tested")
    first = train(config)
    assert (first.best_step, len(first.compared)) == (None, 1)
    longer = train(changed(config, training={"max_steps": 6}))
    assert longer.compared[0][1] == first.compared[0][1]
    assert longer.compared[0][2] != first.compared[0][2]


def test_new_ids_begin_as_the_mean_of_the_old_ones(world: World, begun: Callable[..., Any]) -> None:
    config = begun("transformer", "more", training={"ema_decay": 0.0})
    size, more = world.tokenizer.vocab_size, world.grown.vocab_size
    model = replace(config.model, source_vocab_size=size, target_vocab_size=size)
    components = assemble(replace(config, model=model), CPU, world.folder / "cache")
    assert components.config.model.source_vocab_size == more == size + 2
    before = weights(world.model("transformer"))
    state = {name.removeprefix("body."): value for name, value in components.model.state_dict().items()}
    tables = [name for name, tensor in before.items() if tensor.shape[0] == size]
    assert tables
    for name in tables:
        assert torch.equal(state[name][:size], before[name])
        assert torch.allclose(state[name][size:], before[name].mean(0, keepdim=True).expand(2, *before[name].shape[1:]))
    assert any("2 new ids" in note for note in components.notes)
    old_data = world.initial("transformer", data=str(world.folder / "old"))
    judged = assemble(replace(config, model=model, initial=old_data), CPU, world.folder / "cache")
    sets = judged.objective.judge_sets(judged.model, CPU, StopFlag())
    assert [judge.data.tokenizer.vocab_size for judge in sets.values()] == [more, more]  # of outputs with new ids
    result = train(replace(config, model=model))
    assert result.step == 3


def test_new_pieces_begin_as_the_mean_of_those_they_replace() -> None:
    table = torch.arange(12.0).reshape(4, 3)
    bias, square = torch.arange(4.0), torch.ones(3, 3)
    own = {"table": torch.empty(6, 3), "bias": torch.empty(6), "square": torch.empty(3, 3)}
    found = _with_new_rows({"table": table, "bias": bias, "square": square}, own, {2}, [[1, 3, 3], []], 4)
    assert torch.equal(found["table"][4], (table[1] + 2 * table[3]) / 3)
    assert torch.equal(found["table"][5], table.mean(0))
    assert found["bias"].tolist() == [0, 1, 2, 3, pytest.approx(7 / 3), 1.5]
    assert found["square"] is square


def test_new_pieces_in_the_last_cluster_begin_as_the_mean_of_those_of_it_that_they_replace() -> None:
    """An adaptive softmax has a table of ids 6 to 9."""
    table = torch.arange(12.0).reshape(4, 3)
    found = _with_new_rows({"tables.1": table}, {"tables.1": torch.empty(6, 3)}, {2}, [[2, 7, 9], [0, 1]], 10)
    assert torch.equal(found["tables.1"][4:], torch.stack([(table[1] + table[3]) / 2, table.mean(0)]))


def test_other_ids_are_refused(world: World, begun: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"has 20 ids, but the data only \d+; .*prepare --tokenizer"):
        assemble(begun("transformer", "other"), CPU, world.folder / "cache")
    config = world.config("transformer", "exchanged", "exchanged", initial=world.initial("transformer"))
    pieces = list(world.tokenizer.pieces)
    pieces[-1], pieces[-2] = pieces[-2], pieces[-1]
    if not (world.folder / "exchanged").exists():
        world.pairs("exchanged", WORDS, Tokenizer("word", False, pieces, []))
    with pytest.raises(ConfigError, match=r"Id 18 is .*prepare --tokenizer"):
        assemble(config, CPU, world.folder / "cache")


def test_data_sets_with_different_ids_are_not_mixed(world: World, begun: Callable[..., Any]) -> None:
    mix = (f"{world.folder / 'other'}=1", f"{world.folder / 'new'}=1")
    with pytest.raises(ConfigError, match=r"other was prepared with another tokenizer .*prepare --tokenizer"):
        assemble(begun("transformer", "new", data={"mix": mix}), CPU, world.folder / "cache")


def test_weights_that_changed_are_refused(world: World, begun: Callable[..., Any]) -> None:
    changed_since = replace(world.initial("transformer"), sha256="0" * 64)
    with pytest.raises(ConfigError, match="have changed"):
        assemble(begun("transformer", "new", initial=changed_since), CPU, world.folder / "cache")


def test_a_model_of_other_sizes_or_damaged_is_refused(world: World, begun: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="do not fit"):
        assemble(begun("transformer", "new", model={"d_ff": 12}), CPU, world.folder / "cache")
    damaged = shutil.copytree(world.model("transformer"), tmp_path / "damaged")
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError):
        assemble(
            begun("transformer", "new", initial=TokenInitialSettings(model=str(damaged))), CPU, world.folder / "cache"
        )
    (damaged / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError):
        assemble(
            begun("transformer", "new", initial=TokenInitialSettings(model=str(damaged))), CPU, world.folder / "cache"
        )


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("encodr.layers.0",), r"no parameter matches 'encodr.layers.0'. Did you mean encoder.layers.0\?"),
        (("*",), "matches all"),
    ],
)
def test_bad_patterns(world: World, begun: Callable[..., Any], patterns: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assemble(begun("transformer", "new", training={"freeze": patterns}), CPU, world.folder / "cache")


@pytest.mark.parametrize("name", ["adam", "adamw", "muon"])
def test_frozen_parameters_with_every_optimiser(world: World, begun: Callable[..., Any], name: str) -> None:
    """Also where one of Muon's two optimisers has nothing to train."""
    for pattern in ("*norm*", "*.weight"):
        config = begun("transformer", "new", training={"freeze": (pattern,)}, optimiser={"name": name})
        first = first_step(config)
        assert first.fault is None
        assert "frozen: " in first.data


def test_a_run_does_not_go_on_with_another_mix_or_other_frozen_parameters(world, begun):
    config = begun("transformer", "new")
    train(config)
    mix = (f"{world.folder / 'old'}=1", f"{world.folder / 'new'}=1")
    longer = changed(config, training={"max_steps": 5})
    for other in (changed(longer, data={"mix": mix}), changed(longer, training={"freeze": ("encoder",)})):
        with pytest.raises(ConfigError, match="belongs to another run"):
            train(other)
    assert train(longer).step == 5
