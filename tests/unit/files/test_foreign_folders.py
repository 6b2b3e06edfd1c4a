"""Each small file of a run, a model or a data folder: a pipe or a device in its place ends in one error at once."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
import torch

from manyheads.catalogue import TASKS, build_model
from manyheads.checkpoint.format import (
    apply_retention,
    find_latest,
    read_pointer,
    read_scalars,
    save_checkpoint,
    write_pointer,
)
from manyheads.cli.commands.task_commands import EVALUATE, parse_for_task
from manyheads.cli.lines.output import lines_of
from manyheads.cli.records import describe_folder
from manyheads.config.files import MAX_BYTES
from manyheads.data.preparing import read_manifest
from manyheads.decoding.settings import DecodingSettings, load_settings
from manyheads.errors import CheckpointError, ConfigError, DataError, ManyHeadsError, ModelFileError
from manyheads.extras.demo import __main__ as demo
from manyheads.extras.inspect.drawings.pages import save_page
from manyheads.extras.peers.convert import _read_object
from manyheads.extras.peers.marian_tokenizer import read_bytes
from manyheads.files.commit import temporary_name
from manyheads.files.safe_open import RefusedFileError
from manyheads.files.verify import verify_folder
from manyheads.models.pretrained import load, save_pretrained
from manyheads.models.transformer.config import TransformerConfig
from manyheads.tasks.held_out import task_of_folder
from manyheads.tasks.language_modelling.evaluate import held_text
from manyheads.text.of_folder import load_tokenizer
from manyheads.text.pipeline import read_tokenizer_file
from manyheads.text.settings import TokenizerSettings
from manyheads.text.sides import TranslationTokenizer
from manyheads.text.tokenizer import Tokenizer
from manyheads.training.record.log import MOST_LINE_BYTES, Metrics

needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
needs_zero = pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no /dev/zero")


def huge(path: Path) -> None:
    """A sparse file of 64 GiB, which no test could read."""
    path.touch()
    os.truncate(path, 64 << 30)


def read_task(folder: Path) -> TranslationTokenizer:
    """The tokenizer of a folder, whose task is read with it."""
    Tokenizer.train(["a b"], TokenizerSettings(kind="word", vocab_size=8)).save(folder / "tokenizer.json")
    return load_tokenizer(folder)


PUTS = [
    pytest.param(lambda path: os.mkfifo(path), "named pipe", id="pipe", marks=needs_pipes),
    pytest.param(lambda path: path.symlink_to("/dev/zero"), "device", id="device", marks=needs_zero),
    pytest.param(huge, "it has 68,719,476,736 bytes, and at most", id="huge"),
]
Put = Callable[[Path], object]

READERS: dict[str, tuple[str, Callable[[Path], object], type[ManyHeadsError]]] = {
    "a checkpoint's manifest": ("manifest.json", lambda folder: verify_folder(folder, strict=False), CheckpointError),
    "scalars": ("scalars.json", read_scalars, CheckpointError),
    "a model's config": ("config.json", lambda folder: load(folder, verify=False), ModelFileError),
    "a peer's config": ("config.json", lambda folder: _read_object(folder / "config.json"), ModelFileError),
    "decoding options": ("generation_config.json", load_settings, ModelFileError),
    "a tokenizer": ("tokenizer.json", lambda folder: read_tokenizer_file(folder / "tokenizer.json"), DataError),
    "Marian's vocabulary": ("vocab.json", lambda folder: read_bytes(folder / "vocab.json"), DataError),
    "a task": ("task.json", read_task, ModelFileError),
    "a data folder's manifest": ("manifest.json", lambda it: read_manifest(it, kind="a", version=1), DataError),
    "metrics": ("metrics.jsonl", lambda folder: Metrics(folder / "metrics.jsonl").read(), DataError),
}


@pytest.mark.parametrize(("put", "reason"), PUTS)
@pytest.mark.parametrize("what", READERS)
def test_none_is_waited_for_or_read_for_ever(tmp_path: Path, what: str, put: Put, reason: str) -> None:
    name, read, kind = READERS[what]
    put(tmp_path / name)
    said = rf"{name}.* {reason}.*; replace it by the right file\."
    if put is huge and name == "metrics.jsonl":  # read in lines, so a long run's may be large
        said = "line 1 is not JSON"
    with pytest.raises(kind, match=said) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_files_that_may_be_missing_may_be_missing(tmp_path: Path) -> None:
    assert load_settings(tmp_path) == DecodingSettings()
    assert read_task(tmp_path).model_kind == "translator"


@pytest.mark.parametrize(("put", "reason"), PUTS)
def test_what_only_asks_is_answered_no(tmp_path: Path, put: Put, reason: str) -> None:
    put(tmp_path / "manifest.json")
    put(tmp_path / "config.json")
    assert task_of_folder(str(tmp_path)) is None


def test_a_model_beside_others_is_found_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architecture": "reformer"}', encoding="utf-8")
    (tmp_path / "text.en").touch()
    task, _ = parse_for_task("evaluate", [str(tmp_path), "--text", str(tmp_path / "text.en")])
    assert task is TASKS["text"]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2, 3, 4):
        save_checkpoint(folder, step, {"model": {"w": torch.zeros(1)}}, {})
    for pointer in ("latest", "best"):
        write_pointer(folder, pointer, folder / "step-00000001")
    return folder


@pytest.mark.parametrize(("put", "reason"), PUTS)
def test_pointers_that_are_no_files_point_nowhere(checkpoints: Path, put: Put, reason: str) -> None:
    assert read_pointer(checkpoints, "best") == checkpoints / "step-00000001"
    for pointer in ("latest", "best"):
        (checkpoints / pointer).unlink()
        put(checkpoints / pointer)
        assert read_pointer(checkpoints, pointer) is None
    assert find_latest(checkpoints) == (checkpoints / "step-00000004", [])
    assert apply_retention(checkpoints, 2) == []  # the best one could be any
    write_pointer(checkpoints, "best", checkpoints / "step-00000002")
    assert read_pointer(checkpoints, "best") == checkpoints / "step-00000002"


@pytest.fixture
def run(checkpoints: Path) -> Path:
    """As much of a run as `info` looks at."""
    folder = checkpoints.parent
    (folder / "config.yaml").write_text("seed: 7\n", encoding="utf-8")
    (folder / "environment.json").write_text("{}\n", encoding="utf-8")
    records = [{"step": 1}, {"step": 2, "valid_nll": 2.5, "best": True}, {"step": 3, "valid_nll": 3.0, "best": False}]
    text = "".join(f"{json.dumps(record)}\n" for record in records)
    (folder / "metrics.jsonl").write_text(text + '{"step": 4, "val', encoding="utf-8")
    sizes = {"source_vocab_size": 12, "target_vocab_size": 12, "d_model": 8, "num_heads": 2, "d_ff": 16}
    config = TransformerConfig(num_encoder_layers=1, num_decoder_layers=1, **sizes)
    save_pretrained(build_model(config), folder / "model")
    return folder


def test_what_info_says_of_a_run(run: Path) -> None:
    for path in (run / "checkpoints").glob("step-*"):
        shutil.rmtree(path)
    record = describe_folder(run)
    assert (record["step"], record["best"]["step"], record["last_validation"]["step"]) == (3, 2, 3)
    assert record["latest_checkpoint"] is None
    assert record["model"]["parameters"] > 0


@pytest.mark.parametrize(("put", "reason"), PUTS)
def test_info_of_a_run_whose_pointers_are_no_files(run: Path, put: Put, reason: str) -> None:
    for pointer in ("latest", "best"):
        (run / "checkpoints" / pointer).unlink()
        put(run / "checkpoints" / pointer)
    record = describe_folder(run)
    assert (record["latest_checkpoint"], record["best_checkpoint"]) == (None, None)
    assert record["checkpoints"] == [1, 2, 3, 4]


@pytest.mark.parametrize(("put", "reason"), PUTS)
@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "checkpoints/step-00000004/scalars.json", "model/model.safetensors", "model/manifest.json"],
)
def test_info_of_a_run_with_something_else_in_it(run: Path, name: str, put: Put, reason: str) -> None:
    (run / name).unlink()
    put(run / name)
    if put is huge and name.endswith(".safetensors"):
        reason = "model.safetensors cannot be read"  # its own reader maps the file into memory, however large
    elif put is huge and name.endswith(".jsonl"):
        reason = "line 1 is not JSON"
    elif put is not huge and name == "model/manifest.json":
        assert describe_folder(run)["model"]["weights_sha256"] is None  # as if there were none
        return
    with pytest.raises(ManyHeadsError, match=reason):
        describe_folder(run)


def test_info_of_settings_that_are_too_large(run: Path) -> None:
    huge(run / "config.yaml")
    with pytest.raises(ConfigError, match=f"at most {MAX_BYTES:,} bytes are read"):
        describe_folder(run)


def test_lines_of_metrics_are_limited_not_their_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + "[" * 100_000 + "\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 2 is not JSON"):
        Metrics(path).read()
    path.write_text('{"step": 1}\n\n' + "[" * 100_000, encoding="utf-8")
    assert Metrics(path).read() == [{"step": 1}]
    path.write_text('{"step": 1}\n{"step": ' + "1" * MOST_LINE_BYTES + "}\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 2 is not JSON"):
        Metrics(path).read()


@pytest.fixture
def thesis(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "thesis.txt"
    path.write_text("a thesis", encoding="utf-8")
    yield path
    assert path.read_text(encoding="utf-8") == "a thesis"


def test_pictures_are_not_drawn_through_links(tmp_path: Path, thesis: Path) -> None:
    pytest.importorskip("matplotlib")
    from manyheads.extras.inspect.drawings.figure import new_figure, save_figure

    for name in (
        "curve.png",
        temporary_name(Path("curve.png")).name,
        "page.html",
        temporary_name(Path("page.html")).name,
    ):
        (tmp_path / name).symlink_to(thesis)
    save_figure(new_figure(2.0, 2.0), tmp_path / "curve", ["png"])
    save_page("a page", tmp_path / "page.html")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "a page"
    assert not (tmp_path / "page.html").is_symlink()


def test_evaluate_writes_no_picture_and_no_data_through_a_link(tmp_path: Path, thesis: Path) -> None:
    for name in ("plots", "data"):
        (tmp_path / "home").mkdir(exist_ok=True)
        (tmp_path / name).symlink_to("home")
    (tmp_path / "config.json").write_text('{"architecture": "transformer-xl"}', encoding="utf-8")
    with pytest.raises(RefusedFileError) as caught:
        EVALUATE.run([str(tmp_path), "--text", str(thesis)])
    assert caught.value.filename == str(tmp_path / "plots")
    with pytest.raises(RefusedFileError) as caught:
        held_text(None, str(tmp_path), data="embedded:crime-and-punishment")  # type: ignore[arg-type]
    assert caught.value.filename == str(tmp_path / "data")


def test_the_demo_draws_nothing_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n", encoding="utf-8")
    (tmp_path / "home").mkdir()
    (tmp_path / "plots").symlink_to("home")
    with pytest.raises(ConfigError, match="plots is refused, since a run writes to it: it is a symbolic link"):
        demo.run(tmp_path)


ODD = [
    "{}",
    "[]",
    "null",
    "1e999",
    '"\\ud800"',
    "[" * 100_000,
    '{"a": {"b": []}}',
    '{"files": 1, "best": 2}',
    '{"step": "x"}',
    '{"scalars": []}',
    '{"scalars": {"counters": 3}}',
    '{"scalars": {"counters": {"step": [], "epoch": {}, "elapsed_seconds": "x"}}}',
    '{"step": 1, "valid_nll": [], "best": true}',
]


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_info_of_a_run_with_json_of_another_shape(run: Path, text: str) -> None:
    """It is described or refused, never a bug of ours."""
    names = ("model/config.json", "model/manifest.json", "model/generation_config.json", "metrics.jsonl")
    for name in (*names, "environment.json", "config.yaml", "checkpoints/step-00000004/scalars.json"):
        file = run / name
        before = file.read_bytes() if file.exists() else None
        file.write_text(text, encoding="utf-8")
        with suppress(ManyHeadsError):
            assert lines_of(describe_folder(run))
        file.unlink() if before is None else file.write_bytes(before)
    assert describe_folder(run)["model"]["parameters"] > 0


@pytest.mark.parametrize(
    ("module", "name", "step"),
    [("manyheads.files.verify", "read_limited", 4), ("manyheads.files.verify", "list_files", 2)],
)
def test_info_of_a_run_that_deletes_a_checkpoint_meanwhile(run, module, name, step, monkeypatch):
    """Retention deletes one between the listing and the reading."""
    gone = run / f"checkpoints/step-{step:08}"
    read = getattr(import_module(module), name)

    def delete_and_read(path: Path, *more: int) -> object:
        if gone in (path, path.parent):
            shutil.rmtree(gone, ignore_errors=True)
        return read(path, *more)

    monkeypatch.setattr(f"{module}.{name}", delete_and_read)
    assert describe_folder(run, verify=True)["damaged"] == []
    assert not gone.exists()
