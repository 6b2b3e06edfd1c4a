"""Blocks of an input on several ranks: merged in order, resumed, refused."""

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from manyheads.cli.lines.output import LineWriter, run_lines
from manyheads.cli.main import main
from manyheads.data.lines import GivenItems, ReadReport, blocks_of
from manyheads.distributed import sharded_lines
from manyheads.errors import ConfigError, RequestError

WORDS = ("a", "house", "is", "here", "now")


def test_blocks() -> None:
    assert list(blocks_of(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(blocks_of([], 2)) == []


def test_what_is_done_is_not_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One process takes up what was begun, and leaves nothing beside the output."""
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("a\nb\nc\nd\ne\n", encoding="utf-8")
    worked: list[int] = []
    breaks = [True]

    def work(first: int, block: list[str]) -> list[str]:
        if first == 4 and breaks:
            breaks.pop()
            raise RuntimeError("interrupted")
        worked.append(first)
        return [f"{first}:{text}" for text in block]

    def run(**identity: object) -> bool:
        items = GivenItems("abcde", 2, [str(source)], ReadReport())
        return run_lines(items, work, output=str(output), identity=identity)

    with pytest.raises(RuntimeError, match="interrupted"):
        run(beam=4)
    assert not output.exists()
    with pytest.raises(ConfigError, match=r"holds blocks of another command"):
        run(beam=5)
    assert capsys.readouterr().err == ""
    assert run(beam=4)
    assert capsys.readouterr().err == f"manyheads: continued after line 4, from {output}.shards\n"
    assert worked == [0, 2, 4]
    assert output.read_text(encoding="utf-8") == "0:a\n0:b\n2:c\n2:d\n4:e\n"
    assert {path.name for path in tmp_path.iterdir()} == {"in.txt", "out.txt"}


def test_blocks_of_an_input_that_must_be_changed_are_removed(tmp_path: Path) -> None:
    """Otherwise the corrected input would be refused, as that of another command."""
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("a\nb\n", encoding="utf-8")

    def work(first: int, block: list[str]) -> list[str]:
        if first == 1:
            raise RequestError("this line does not fit")
        return block

    with pytest.raises(RequestError):
        run_lines(GivenItems("ab", 1, [str(source)], ReadReport()), work, output=str(output), identity={})
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def test_two_commands_cannot_write_one_output(tmp_path: Path) -> None:
    """The second is refused at once; otherwise each would delete blocks of the other, and leave some behind."""
    source, output = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("a\nb\nc\n", encoding="utf-8")
    refusals = []

    def run(work: Callable[[int, list[str]], list[str]]) -> bool:
        items, lines = GivenItems("abc", 1, [str(source)], ReadReport()), LineWriter(str(output))
        with lines:
            return sharded_lines.run_lines(items, work, lines.write, output=str(output), identity={}, resumable=True)

    def echo(first: int, block: list[str]) -> list[str]:
        return block

    def echo_twice(first: int, block: list[str]) -> list[str]:
        if first == 1:
            with pytest.raises(ConfigError) as refused:
                run(echo)
            refusals.append(str(refused.value))
        return block

    assert run(echo_twice)
    assert refusals == [
        f"process {os.getpid()} writes {output} at the moment (its blocks are in {output}.shards); wait for it, or"
        " choose another output."
    ]
    assert output.read_text(encoding="utf-8") == "a\nb\nc\n"
    assert {path.name for path in tmp_path.iterdir()} == {"in.txt", "out.txt"}


def test_blocks_of_an_unknown_command_are_not_used(tmp_path: Path) -> None:
    output = tmp_path / "out.txt"
    blocks = tmp_path / "out.txt.shards"
    blocks.mkdir()
    (blocks / "00000001").write_text("of something else\n", encoding="utf-8")
    items = GivenItems("abc", 1, [], ReadReport())
    with pytest.raises(ConfigError, match=r"out.txt.shards holds blocks, but not of what command.*Remove the folder"):
        run_lines(items, lambda first, block: block, output=str(output), identity={})
    assert (blocks / "00000001").exists()
    assert not output.exists()


def test_a_command_that_begins_nothing_leaves_no_folder(tmp_path: Path) -> None:
    class Unreadable(GivenItems[str]):
        files = property(lambda self: [object()], lambda self, files: None)

    with pytest.raises(TypeError):
        sharded_lines.run_lines(
            Unreadable("abc", 1, [], ReadReport()),
            lambda first, block: block,
            lambda lines: None,
            output=str(tmp_path / "out.txt"),
            identity={},
            resumable=True,
        )
    assert not list(tmp_path.iterdir())


def test_ranks_cannot_share_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for output, inputs, what in (("-", [], "standard output"), (str(tmp_path / "o"), ["-"], "standard input")):
        items: GivenItems[str] = GivenItems([], 1, inputs, ReadReport())
        with pytest.raises(ConfigError, match=what):
            run_lines(items, lambda first, block: [], output=output, identity={})


def test_work_may_show_its_progress(tmp_path: Path) -> None:
    """A display that is hidden while lines are written waits for its lock if the work still calls it."""

    class Locked:
        """Fails where the bars of a terminal would wait forever."""

        def __init__(self) -> None:
            self.is_hidden = False

        def __call__(self, what: str, done: int, total: int, /) -> None:
            assert not self.is_hidden

        def rest(self) -> None: ...

        @contextmanager
        def hidden(self, when: bool) -> Iterator[None]:
            self.is_hidden = True
            yield
            self.is_hidden = False

    show = Locked()

    def work(first: int, block: list[str]) -> Iterator[str]:
        show("working", first, 0)
        yield from block

    items = GivenItems("abc", 2, [], ReadReport())
    output = tmp_path / "out.txt"
    assert run_lines(items, work, output=str(output), identity={}, show=show)
    assert output.read_text(encoding="utf-8") == "a\nb\nc\n"


def on_ranks(world: int, program: list[str], arguments: list[str]) -> list[str]:
    """What each of several processes of a command prints on standard output."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(world):
        environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [*program, *arguments]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    texts = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * world
    return texts


def test_two_ranks_translate_as_one(model_folder: Path, tmp_path: Path, warm_program: list[str]) -> None:
    source = tmp_path / "in.txt"
    source.write_text("".join(f"{WORDS[number % 5]} {WORDS[number % 3]}.\n" for number in range(23)), encoding="utf-8")
    form = ["--lines-at-once", "4", "--json", "--max-new-tokens", "5"]
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    assert main(["translate", str(model_folder), str(source), "-o", str(one), *form]) == 0
    on_ranks(2, warm_program, ["translate", str(model_folder), str(source), "-o", str(two), *form])
    assert two.read_bytes() == one.read_bytes()
    assert len(one.read_bytes().splitlines()) == 23
    assert not two.with_name("two.jsonl.shards").exists()


@pytest.mark.slow
def test_two_ranks_score_and_evaluate_as_one(model_folder, tmp_path, warm_program, capsys):
    source = tmp_path / "in.txt"
    source.write_text("".join(f"{WORDS[number % 5]} {WORDS[number % 3]}.\n" for number in range(600)), encoding="utf-8")
    one, two, out = tmp_path / "one.tsv", tmp_path / "two.tsv", tmp_path / "out.txt"
    score = ["score", str(model_folder), "--source", str(source), "--target", str(source)]
    assert main([*score, "-o", str(one)]) == 0
    on_ranks(2, warm_program, [*score, "-o", str(two)])
    assert two.read_bytes() == one.read_bytes()
    evaluate = ["evaluate", str(model_folder), "--source", str(source), "--reference", str(source), "--json"]
    capsys.readouterr()
    assert main([*evaluate, "--max-new-tokens", "5"]) == 0
    alone = json.loads(capsys.readouterr().out)
    texts = on_ranks(2, warm_program, [*evaluate, "--max-new-tokens", "5", "--output", str(out)])
    assert texts[1] == ""
    several = json.loads(texts[0])
    assert several["bleu"] == alone["bleu"]
    assert several["likelihood"]["nats_per_token"] == pytest.approx(alone["likelihood"]["nats_per_token"], rel=1e-6)
    assert len(out.read_bytes().splitlines()) == 600


@pytest.mark.slow
def test_two_ranks_evaluate_and_continue_a_text_as_one(tmp_path, warm_program, capsys):
    run, prompts = tmp_path / "run", tmp_path / "prompts.txt"
    assert main(["train", "--preset", "xl-debug", "--run-dir", str(run), "-q", "--training.max-steps", "2"]) == 0
    capsys.readouterr()
    evaluate = ["evaluate", str(run), "--json", "--max-tokens", "4000", "--lanes", "3"]
    assert main(evaluate) == 0
    alone = json.loads(capsys.readouterr().out)
    texts = on_ranks(2, warm_program, evaluate)
    assert texts[1] == ""
    [one], [two] = alone["results"], json.loads(texts[0])["results"]
    assert two["tokens"] == one["tokens"]
    assert two["nats_per_token"] == pytest.approx(one["nats_per_token"], rel=1e-6)
    prompts.write_text("".join(f"It was {number} \n" for number in range(9)), encoding="utf-8")
    generate = ["generate", str(run), "--lines", "--input", str(prompts), "-n", "6", "--max-rows", "2", "--count", "2"]
    assert main([*generate, "-o", str(tmp_path / "one")]) == 0
    on_ranks(2, warm_program, [*generate, "-o", str(tmp_path / "two")])
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
