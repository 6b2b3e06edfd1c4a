"""Mistakes that users made, each of which gets one message with the value and the remedy."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from manyheads.catalogue import build_model
from manyheads.cli.lines.output import LineWriter, converse
from manyheads.cli.records import describe_folder
from manyheads.errors import ConfigError, ModelFileError, SaveError
from manyheads.installation import install_command
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.tasks.preparation import vocabulary_lines
from manyheads.text.vocabulary import IdVocabulary

Cli = Callable[..., int]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("I am hungry.\n")
    return path


def test_more_translations_than_beams(refused, model_folder, lines):
    said = refused("translate", model_folder, lines, "--nbest", 9)
    assert "num_return_sequences is 9 but num_beams is 2" in said
    assert "Lower num_return_sequences, raise num_beams" in said


def test_one_of_several_outputs_is_the_input(manyheads, refused, tmp_path, monkeypatch):
    config = TransformerXLConfig(vocab_size=8, d_model=8, num_heads=2, d_ff=8, num_layers=1, memory_len=4)
    save_pretrained(build_model(config), tmp_path / "ids", tokenizer=IdVocabulary(8), task="ids")
    monkeypatch.chdir(tmp_path)
    events = Path("events-2.bin")
    events.write_bytes(b"\1\2\3")
    given = ("generate", "ids", "--input", events, "--output", "events.bin", "-n", 5)
    assert "--output events-2.bin is the file events-2.bin that is read" in refused(*given, "--count", 2)
    assert events.read_bytes() == b"\1\2\3"
    assert not Path("events-1.bin").exists()
    assert manyheads(*given) == 0


def test_a_missing_argument_is_named(refused):
    assert "Missing: SHELL." in refused("completion")


def test_a_preset_in_a_file_of_settings(refused, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("seed: 1\npreset: debug\n")
    assert f"{path}, line 2: preset is not a setting of a file" in (said := refused("train", "--config", path))
    assert "--preset debug" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_names_the_file() -> None:
    with pytest.raises(SaveError, match="Cannot write /dev/full: No space left"), LineWriter("/dev/full") as writer:
        writer.write(["a line"])


def test_a_file_in_place_of_a_run_folder(refused, lines):
    assert f"run_dir is {lines}, which is a file" in refused("train", "--preset", "debug", "--run-dir", lines)
    assert lines.read_text() == "I am hungry.\n"


def test_a_mistake_in_a_local_name_does_not_go_to_the_hub(refused, lines, monkeypatch):
    monkeypatch.chdir(lines.parent)
    Path("runs/demo").mkdir(parents=True)
    assert "there is no folder runs/dmeo. Did you mean runs/demo?" in refused("translate", "runs/dmeo", lines)


def test_a_replaced_output_is_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.txt"
    for said in ("", f"manyheads: {path} existed already and is replaced.\n"):
        with LineWriter(str(path)) as writer:
            writer.write(["a line"])
        assert capsys.readouterr().err == said


def test_a_vocabulary_is_not_asked_of_prepared_data(manyheads, printed, tmp_path, capsys):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"the cat sees {n} dogs\tdie Katze sieht {n} Hunde\n" for n in range(20)))
    folder = tmp_path / "mine"
    options = ("--tsv", pairs, "--valid-count", 5, "--vocab-size", 5000, "--output", folder)
    assert "5,000 were requested, but the training text has no more" in printed("prepare", *options)
    assert manyheads("train", "--preset", "debug", "--data.path", folder, "--tokenizer.vocab_size", 400) == 2
    assert "--tokenizer.vocab_size has no effect on" in (said := capsys.readouterr().err)
    assert "prepare the data again with --tokenizer.vocab-size" in said
    again = [*options[:-1], tmp_path / "again", "--replace", "--tokenizer.kind", "bpe", "--tokenizer.lowercase"]
    assert manyheads("prepare", *again) == 0  # the names that the message uses


@pytest.mark.parametrize(
    "command", ["inspect heads NONE", "inspect pruning NONE", "info NONE --curves c.png", "evaluate LM --plot p"]
)
def test_a_missing_matplotlib_is_told_before_the_work(manyheads, tmp_path, capsys, monkeypatch, command):
    (tmp_path / "config.json").write_text('{"architecture": "transformer-xl"}')
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    more = ["--memory-len", "1", "2"] if "--plot" in command else []
    assert manyheads(*(str(tmp_path) if word == "LM" else word for word in command.split()), *more) == 2
    assert f"plots need matplotlib, which is not installed: {install_command('plot')}" in capsys.readouterr().err


def test_only_a_smaller_vocabulary_is_mentioned() -> None:
    for made, asked, is_told in ((300, 400, True), (400, 400, False), (300, 0, False)):
        manifest = {"tokenizer": {"vocab_size": made, "settings": {"vocab_size": asked}}}
        assert bool(vocabulary_lines(manifest)) == is_told
    assert vocabulary_lines({"tokenizer": {"vocab_size": 3, "settings": None}}) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_messages_that_cannot_be_written_fail_no_command(warm_program: list[str], tmp_path: Path) -> None:
    """A log on a full disk: what the command does, and its exit code, stay the same."""
    with Path("/dev/full").open("wb") as full:
        made = subprocess.run([*warm_program, "sample-data", str(tmp_path / "sample")], stderr=full, check=False)
        failed = subprocess.run([*warm_program, "info", str(tmp_path / "missing")], stderr=full, check=False)
    assert (made.returncode, failed.returncode) == (0, 2)
    assert (tmp_path / "sample" / "sentences.en").exists()


def test_two_commands_do_not_write_one_file(tmp_path: Path) -> None:
    """Their lines would be mixed."""
    path = tmp_path / "out.txt"
    with LineWriter(str(path)) as first:
        first.write(["a line"])
        with pytest.raises(ConfigError, match=r"another command writes .*out.txt at the moment"):
            LineWriter(str(path)).write(["another line"])
        first.write(["a second line"])
        assert path.read_text() == "a line\na second line\n"
    with LineWriter(str(path)) as later:
        later.write(["new"])
    assert path.read_text() == "new\n"


def test_typed_bytes_of_another_encoding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As in the locale C, in which Python passes them on as halves of surrogate pairs."""
    typed = iter(["caf\udce9", ":quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    converse("a sentence", lambda number, line: pytest.fail(line))
    assert "what was typed is not in the terminal's encoding: it is not UTF-8." in capsys.readouterr().err


def test_messages_that_nobody_reads_stop_no_command(warm_program, model_folder, lines, tmp_path):
    """As in `2>&1 | head`: the work that was begun is finished, and an error keeps its exit code."""
    output = tmp_path / "output.txt"
    output.write_text("an earlier result, so that there is a message before the first line\n")

    def code_of(*arguments: str | Path) -> int:
        reader, writer = os.pipe()
        os.close(reader)
        try:
            return subprocess.run([*warm_program, *map(str, arguments)], stderr=writer, check=False).returncode
        finally:
            os.close(writer)

    assert code_of("translate", model_folder, lines, "--output", output) == 0
    assert "earlier" not in output.read_text()
    assert code_of("translate", tmp_path / "nothing", lines) == 2
    data = tmp_path / "data"
    assert code_of("prepare", "--source", lines, "--target", lines, "--valid-count", "0", "-o", data) == 0
    assert (data / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("translate", "", "x"), "MODEL"),
        (("translate", "x", ""), "INPUT"),
        (("translate", "x", "y", "--output", ""), "--output"),
        (("average", "x", "--last", "1", "-o", ""), "--output"),
        (("prepare", "--source", "", "--target", "x", "--output", "y"), "--source"),
        (("evaluate", "x", "--data", ""), "--data"),
        (("train", "--init", ""), "--init"),
        (("train", "--preset", "debug", "--run-dir", ""), "run_dir"),
        (("serve", ""), "MODEL"),
    ],
)
def test_an_empty_name_is_not_the_working_directory(refused, arguments, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"{name} is empty, perhaps from an unset shell variable; name a" in refused(*arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("port", ["99999", "-1", "65536"])
def test_a_port_that_cannot_be_is_no_other_one(refused, port):
    """Sockets of Python take 99999 for 34463."""
    assert f"--port is {port}; it must be from 0 to 65,535" in refused("serve", "x", "--port", port)


def test_info_of_a_preset_names_the_command_that_shows_it() -> None:
    with pytest.raises(ModelFileError, match=r"no folder xl-demo; .*manyheads train --preset xl-demo --print-config\."):
        describe_folder(Path("xl-demo"))


def test_no_output_destroys_a_model(manyheads, model_folder, lines, tmp_path, capsys):
    """Each of these commands succeeded, and the model could not be loaded after it."""
    before = sorted(model_folder.rglob("*"))
    inside = model_folder / "new"
    tsv = tmp_path / "pairs.tsv"
    tsv.write_text("a\tb\n" * 3)
    for arguments in (
        ("translate", model_folder, lines, "-o", model_folder / "config.json"),
        ("translate", model_folder, lines, "-o", model_folder / "new.md"),
        ("translate", model_folder, lines, "--format", "text", "-o", model_folder / "new.txt"),
        ("evaluate", model_folder, "--source", lines, "--reference", lines, "-o", model_folder / "tokenizer.json"),
        ("export", model_folder, "--to", "ctranslate2", "-o", inside),
        ("prune", model_folder, "--heads", "encoder.0.self:0", "-o", inside),
        ("prepare", "--tsv", tsv, "--valid-count", "0", "-o", inside),
        ("train", "--preset", "debug", "--run-dir", inside),
        ("train", "--preset", "debug", "--run-dir", model_folder),
    ):
        assert manyheads(*arguments) == 2, arguments
        assert "choose another place" in capsys.readouterr().err, arguments
    assert sorted(model_folder.rglob("*")) == before


def test_terms_are_an_input(manyheads: Cli, model_folder: Path, lines: Path, tmp_path: Path) -> None:
    terms = tmp_path / "terms.tsv"
    terms.write_text("hungry\thungrig\n")
    assert manyheads("translate", model_folder, lines, "--terms", terms, "-o", terms) == 2
    assert terms.read_text() == "hungry\thungrig\n"


def test_replacing_deletes_no_other_files(manyheads, refused, model_folder, tmp_path, capsys):
    tsv, data, model = tmp_path / "pairs.tsv", tmp_path / "data", tmp_path / "model"
    tsv.write_text("".join(f"{word}\t{word}\n" for word in ("one", "two", "three")))
    prepare = ("prepare", "--tsv", tsv, "--valid-count", "0", "-o", data)
    assert manyheads(*prepare) == 0
    shutil.copytree(model_folder, model)
    prune = ("prune", model_folder, "--heads", "encoder.0.self:0", "-o", model)
    for folder, arguments in ((data, prepare), (model, prune)):
        (folder / "mine").mkdir()
        (folder / "mine" / "notes.txt").touch()
        capsys.readouterr()
        assert f"{folder} also holds mine" in refused(*arguments, "--replace")
        shutil.rmtree(folder / "mine")
        assert manyheads(*arguments, "--replace") == 0
