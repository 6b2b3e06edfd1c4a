"""The plan of a run: what the rule chooses, what the command line keeps, and what it is for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manyheads.cli.commands.train import read_arguments
from manyheads.config.files import Source, to_yaml
from manyheads.data.language.preparing import prepare_ids, prepare_text
from manyheads.data.language.texts import RawFiles, TextBlock
from manyheads.data.translation.prepared import prepare_corpus
from manyheads.data.translation.preparing import PairList
from manyheads.errors import ConfigError
from manyheads.extras.planning.plan import Facts, Plan, PlannedRun, plan_layer, plan_run
from manyheads.tasks.language_modelling.settings import TextConfig
from manyheads.tasks.translation.settings import TrainConfig, demo
from manyheads.text.settings import IdSettings, TokenizerSettings, VocabularySettings


def plan(**facts: Any) -> tuple[Plan, dict[str, Any]]:
    usual: dict[str, Any] = {
        "kind": "pairs", "num_samples": 20_000, "tokens": 330_000, "longest_source": 40, "longest_target": 45,
        "minutes": 10.0, "tokens_per_second": 3000.0, "given": {},
    }  # fmt: skip
    made = plan_run(Facts(**{**usual, **facts}))
    return made, made.settings()


def test_a_faster_machine_or_more_minutes_give_a_wider_model() -> None:
    widths = [plan(tokens_per_second=rate)[1]["model.d_model"] for rate in (300, 1200, 8000, 80_000)]
    assert widths == [128, 192, 256, 256]  # wider ones need more data
    assert plan(tokens_per_second=80_000, tokens=5_000_000)[1]["model.d_model"] == 384
    assert plan(tokens_per_second=80_000, tokens=50_000_000, minutes=120)[1]["model.d_model"] == 512
    assert plan(tokens_per_second=1200, minutes=60)[1]["model.d_model"] == 256


def test_more_passes_over_the_data_give_more_dropout() -> None:
    found = [plan(tokens=tokens)[1]["model.dropout"] for tokens in (3_000_000, 450_000, 250_000, 40_000)]
    assert found == [0.0, 0.1, 0.2, 0.3]


def test_many_passes_are_segmented_anew_and_need_less_dropout() -> None:
    names = ("data.bpe_dropout", "model.dropout")
    for tokens, given, found in (
        (90_000, {}, [None, 0.2]),
        (70_000, {}, [0.1, 0.1]),
        (30_000, {}, [0.1, 0.2]),
        (15_000, {}, [0.1, 0.3]),
        (40_000, {"data.bpe_dropout": 0.0}, [None, 0.3]),
        (90_000, {"data.bpe_dropout": 0.05}, [None, 0.1]),
    ):
        made, values = plan(tokens=tokens, steps=800, has_merges=True, given=given)
        assert [values.get(name) for name in names] == found, made.num_epochs
    assert plan(tokens=40_000, steps=800)[1].get("data.bpe_dropout") is None  # no merges
    assert plan(kind="text", tokens=4000, steps=800)[1].get("data.bpe_dropout") is None


def test_little_data_gets_a_narrow_model() -> None:
    for kind, least in (("pairs", 100_000), ("text", 500_000)):
        found = [plan(kind=kind, tokens=tokens, steps=800)[1]["model.d_model"] for tokens in (least - 1, least)]
        assert found == [128, 192]


def test_the_plan_states_steps_and_passes() -> None:
    made, values = plan(tokens_per_second=8000.0)
    assert made.num_steps == pytest.approx(600 * 0.85 * 8000 / 2048, rel=0.01)
    assert made.num_epochs == pytest.approx(made.num_steps * 2048 / 330_000)
    assert (values["training.max_minutes"], values["training.max_steps"]) == (10.0, 0)
    assert values["schedule.warmup_steps"] == made.num_steps // 20
    assert 2 <= made.num_steps / values["validation.every_steps"] <= 12


def test_few_steps_are_made_smaller_and_many_larger() -> None:
    assert plan(minutes=1.0, tokens_per_second=500)[1]["data.max_tokens"] == 1024
    assert plan(minutes=600.0, tokens_per_second=20_000)[1]["data.max_tokens"] == 8192


def test_short_runs_begin_and_search_as_the_demo_does() -> None:
    own = ("initial.embeddings", "decoding.length_penalty")
    found = [{name: plan(kind=kind, steps=steps)[1].get(name) for name in own} for kind, steps in
             (("pairs", 3999), ("pairs", 4000), ("text", 100))]  # fmt: skip
    config = demo()
    assert list(found[0].values()) == [config.initial.embeddings, config.decoding.length_penalty]
    assert found[1:] == [dict.fromkeys(own)] * 2


def test_only_matrices_of_pairs_that_muon_trains_decay() -> None:
    """Adam's decay is part of the gradient; and a text gains nothing within its first passes (experiments)."""
    assert plan()[1]["optimiser.weight_decay"] == demo().optimiser.weight_decay > 0
    assert "optimiser.weight_decay" not in plan(kind="text")[1]
    assert "optimiser.weight_decay" not in plan(given={"optimiser.name": "adam"})[1]


def test_long_sentences_fit_into_a_step() -> None:
    values = plan(longest_source=5000, longest_target=130, minutes=1.0, tokens_per_second=500)[1]
    assert (values["data.max_source_len"], values["data.max_target_len"]) == (256, 144)
    assert values["data.max_tokens"] >= 256


def test_what_is_given_is_left_out_and_the_rest_follows_from_it() -> None:
    _, values = plan(given={"model.d_model": 512, "optimiser.name": "adam"}, minutes=3.0)
    assert "model.d_model" not in values
    assert "optimiser.name" not in values
    assert values["model.d_ff"] == 2048
    steps = plan(given={"model.d_model": 512}, minutes=3.0)[0].num_steps
    assert steps < plan(minutes=3.0)[0].num_steps
    deep = {"model.num_encoder_layers": 6, "model.num_decoder_layers": 6}
    fewer, values = plan(given=deep, minutes=3.0)
    assert fewer.num_steps < plan(minutes=3.0)[0].num_steps
    assert not deep.keys() & values.keys()
    by_steps = plan(minutes=0.0, steps=700)[1]
    assert "training.max_minutes" not in by_steps


def test_a_given_width_has_its_own_number_of_layers() -> None:
    """Of a width that is in no row, those of the next narrower one."""
    for width, layers in ((512, 6), (400, 4), (256, 3), (192, 2), (64, 2)):
        _, values = plan(given={"model.d_model": width}, minutes=3.0)
        assert values["model.num_encoder_layers"] == values["model.num_decoder_layers"] == layers
    assert plan(kind="text", given={"model.d_model": 384})[1]["model.num_layers"] == 6


def test_steps_of_a_text_are_counted_by_its_lanes_and_segments() -> None:
    text: dict[str, Any] = {"kind": "text", "tokens": 2_000_000, "given": {"data.lanes": 64, "data.segment_len": 512}}
    made, values = plan(**text)
    assert made.num_steps <= 600 * 0.85 * 3000 * 4 / (64 * 512)  # narrower models are faster
    assert 2 <= made.num_steps / values["validation.every_steps"] <= 12
    names = ("model.memory_len", "reading.segment_len", "reading.memory_len")
    assert [values[name] for name in names] == [512, 512, 1024]
    assert plan(kind="text", given={"model.memory_len": 64})[1]["reading.memory_len"] == 128
    tiny = plan(kind="text", tokens=4000, minutes=0.0, steps=100)[0]
    assert tiny.num_epochs == pytest.approx(100 * 3 * 128 / 4000)


def test_text_has_no_more_lanes_than_it_can_fill() -> None:
    assert plan(kind="text", tokens=200_000)[1]["data.lanes"] == 16
    assert plan(kind="text", tokens=4000)[1]["data.lanes"] == 3
    assert plan(kind="text", tokens=50)[1]["data.lanes"] == 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    lines = [(f"a b c {number}", f"x y {number} z w") for number in range(50)]
    splits: dict[str, Any] = {"train": PairList("t", lines), "valid": PairList("v", lines[:3])}
    prepare_corpus(folder / "pairs", **splits, tokenizer=TokenizerSettings(kind="word", vocab_size=40))
    prepare_corpus(folder / "bpe", **splits, tokenizer=TokenizerSettings(vocab_size=300))
    blocks = [TextBlock("t", b"one two three. " * 300), TextBlock("v", b"four five. " * 9)]
    prepare_text(folder / "text", train=blocks[0], valid=blocks[1], vocabulary=VocabularySettings(level="bytes"))
    long = TextBlock("t", b"one two three. " * 40_000)
    prepare_text(folder / "long", train=long, valid=blocks[1], vocabulary=VocabularySettings(level="bytes"))
    (folder / "ids.bin").write_bytes(bytes(range(250)) * 4)
    ids = RawFiles(paths=[folder / "ids.bin"], form="bytes")
    prepare_ids(folder / "ids", train=ids, settings=IdSettings(form="bytes"))
    return folder


@pytest.fixture
def read(folders: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Any, list[PlannedRun]]]:
    """The config of a command line on some data, and the plans that were made for it; in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(data: str, *more: str, rate: float = 3000.0) -> tuple[Any, list[PlannedRun]]:
        made: list[PlannedRun] = []

        def layer(typed: Source) -> Source:
            made.append(plan_layer(typed, lambda config, length, rows: (rate, "a machine")))
            return made[-1].layer

        return read_arguments(["--data.path", str(folders / data), *more], plan=layer)[1], made

    return call


def test_a_plan_becomes_the_settings(read: Callable[..., tuple[Any, list[PlannedRun]]]) -> None:
    config, [made] = read("pairs")
    assert isinstance(config, TrainConfig)
    assert (config.run_dir, config.training.max_minutes, config.optimiser.name) == ("runs/pairs", 20.0, "muon")
    assert "plan for 50 pairs" in made.table
    assert "passes over the data; more passes need more" in made.table
    assert "tokens and 1 minute: about" in read("pairs", "--minutes", "1")[1][0].table
    config, [made] = read("text", "--minutes", "3")
    assert isinstance(config, TextConfig)
    assert (config.model.architecture, config.training.max_minutes, config.data.lanes) == ("transformer-xl", 3.0, 3)


def test_merges_are_left_out_if_the_tokenizer_has_some(read: Callable[..., tuple[Any, list[PlannedRun]]]) -> None:
    config, [made] = read("bpe")
    assert config.data.bpe_dropout == 0.1
    assert "each with other pieces" in made.table
    assert read("pairs")[0].data.bpe_dropout == 0.0
    assert read("bpe", "--data.bpe_dropout", "0.2")[0].data.bpe_dropout == 0.2
    with pytest.raises(ConfigError, match=r"data\.bpe_dropout"):
        read("bpe", "--data.bpe_dropout", "much")


def test_the_command_line_wins(read: Callable[..., tuple[Any, list[PlannedRun]]]) -> None:
    config, [made] = read("pairs", "--model.d_model", "96", "--optimiser.learning_rate", "0.5", "--run-dir", "runs/x")
    assert (config.model.d_model, config.model.d_ff, config.optimiser.learning_rate) == (96, 384, 0.5)
    assert config.run_dir == "runs/x"
    assert "given on the command line" in made.table
    config, [made] = read("pairs", "--training.max_steps", "40")
    assert "measured" not in made.table
    assert (config.training.max_steps, config.training.max_minutes) == (40, 0.0)


def test_a_mix_is_planned_for_its_largest_part(folders: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    made: list[PlannedRun] = []

    def layer(typed: Source) -> Source:
        made.append(plan_layer(typed, lambda config, length, rows: (3000.0, "a machine")))
        return made[-1].layer

    mix = ["--data.mix", "other=0.3", f"{folders / 'pairs'}=0.7"]
    config = read_arguments(mix, plan=layer)[1]
    assert "plan for 50 pairs" in made[0].table
    assert config.optimiser.name == "muon"


@pytest.mark.parametrize("more", [("--preset", "debug"), ("--architecture", "reformer")])
def test_no_plan_is_made_where_something_else_is_asked_for(read, more):
    assert read("pairs", *more)[1] == []


@pytest.mark.parametrize(
    ("data", "more", "message"),
    [
        ("ids", (), "holds ids. Name --preset reformer-demo"),
        ("pairs", ("--model.architecture", "reformer-seq2seq"), "--preset demo --architecture reformer"),
        ("text", ("--model.architecture", "reformer"), "--preset reformer-demo"),
        ("pairs", ("--minutes", "0"), "needs a time above 0"),
        ("pairs", ("--minutes", "-3"), "-3"),
        ("pairs", ("--minutes", "inf"), "--minutes is inf"),
        ("text", ("--minutes", "nan"), "--minutes is nan"),
        ("text", ("--data.lanes", "0"), "data.lanes is 0"),
        ("text", ("--data.segment_len", "x"), "data.segment_len is 'x'"),
        ("pairs", ("--training.max_steps", "many"), "training.max_steps is 'many'"),
        ("pairs", ("--model.d_model", "0"), "model.d_model is 0"),
    ],
)
def test_what_cannot_be_planned(read, data, more, message):
    with pytest.raises(ConfigError) as caught:
        read(data, *more)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("data", "more", "message"),
    [
        ("text", ("--data.lanes", "0"), "data.lanes is 0"),
        ("pairs", ("--model.d_model", "-2"), "model.d_model is -2"),
        ("pairs", ("--model.num_heads", "0"), "model.num_heads is 0"),
        ("pairs", ("--model.num_heads", "7"), "num_heads"),
        ("text", ("--model.dropout", "2"), "dropout is 2"),
        ("pairs", ("--decoding.num_beams", "many"), "decoding.num_beams is 'many'"),
    ],
)
def test_mistakes_are_told_before_the_measurement(folders, data, more, message):
    def measure(config: Any, length: int, rows: int) -> tuple[float, str]:
        raise AssertionError("it takes seconds")

    with pytest.raises(ConfigError) as caught:
        read_arguments(["--data.path", str(folders / data), *more], plan=lambda typed: plan_layer(typed, measure).layer)
    assert message in str(caught.value)


def test_a_number_of_heads_that_fits_some_machines_is_measured(read):
    config, _ = read("long", "--model.num_heads", "6")
    assert (config.model.d_model, config.model.num_heads) == (192, 6)


def test_the_same_command_goes_on_with_the_plan_of_the_run(read, folders):
    first, _ = read("pairs")
    run = Path("runs/pairs")
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(first))
    again, made = read("pairs", rate=90_000.0)
    assert again == first
    assert made == []
    assert read("text/../pairs")[1] == []
    assert read("pairs", "--resume", "none")[1] != []
    (run / "config.yaml").write_text(to_yaml(first).replace(str(folders / "pairs"), "elsewhere"))
    with pytest.raises(ConfigError, match="holds a run on other data"):
        read("pairs")


def test_the_rate_is_measured(folders: Path) -> None:
    """With few tokens a step, since a real measurement takes seconds."""
    import torch

    from manyheads.extras.planning.planner import tokens_per_second
    from manyheads.tasks.translation.objective import SyntheticRun
    from manyheads.tasks.translation.settings import debug

    synthetic_run = SyntheticRun(debug()).at(8)
    assert tokens_per_second(synthetic_run, 8, 2, torch.device("cpu")) > 0
