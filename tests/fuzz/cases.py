"""Single cases that once ended with a bug, hung or exhausted the memory. Each says what must become of it now.

All cases that were reported, and where each is tested (below `tests/`; the name of a function alone is of this file):

- links and pipes in run folders: `unit/training/test_foreign_run_folder.py`, `unit/files/test_foreign_folders.py`
- `--config FIFO`, a `*.png` FIFO, /dev/zero as bytes: `_texts`, `unit/files/test_opening.py`
- num_heads, d_model, lanes, layers, d_ff, vocab_size without end, `inspect smoothing` and `positions`, `--nbest 10000`:
  `_sizes`, `unit/test_refusals.py::test_sizes_have_limits`, `unit/config/test_config_checks.py`
- a word of 10^7 letters or combining marks, gzip of many members: `_texts`, `unit/data/test_input_limits.py`
- a run resumed under other arithmetic: `unit/training/test_arithmetic.py`
- escape sequences in folder names, and in JSON and YAML of a folder: `_shown`; in a prompt with `--echo` on a terminal:
  `unit/cli/test_printing.py::test_a_prompt_on_a_terminal`
- NUL, ESC and U+202E in the attention page:
  `extras/inspect/test_attention_page.py::test_no_control_character_is_raw_in_the_page`
- terminals of 1 to 3 columns, YAML tags, 100,000 `[`, half a surrogate: `_settings`
- manifest, config, tokenizer, `model_type: []`, scalars.json and metrics of other shapes: `_folders`
- `--stop` with a byte 0xff: `_texts`
- a run folder whose name is not UTF-8: `unit/training/test_foreign_run_folder.py::test_a_name_that_is_not_utf8`
- an infinite learning rate: `_sizes`,
  `integration/test_nonfinite.py::test_weights_that_an_update_made_bad_are_not_saved`
"""

import gzip
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Case", "make_cases"]

ESCAPE = "a\x1b[31m\x1b]0;x\x07b"


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        name: of the case.
        arguments: of the program.
        says: what its message must contain; None: it must succeed.
        trains: it is exempt from the limits of memory and processor time.
        slow: it takes seconds.
        environment: variables.
        silent: texts that must not be in its output.
    """

    name: str
    arguments: list[str]
    says: str | None
    trains: bool = False
    slow: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    silent: tuple[str, ...] = ("\x1b", "\u202e")


def make_cases(honest: Path, folder: Path) -> list[Case]:
    """Make the files of all cases. honest: see `base.make_all`. folder: a new one."""
    folder.mkdir()
    makers: list[Callable[[Path, Path], Iterator[Case]]] = [_sizes, _texts, _settings, _folders, _shown]
    return [case for make in makers for case in make(honest, folder)]


def _sizes(honest: Path, folder: Path) -> Iterator[Case]:
    """Numbers that would take all memory."""
    train = ["train", "--run-dir", str(folder / "run"), "--device", "cpu", "--preset"]
    fits = "it must be from"
    for preset, setting, value, says, is_slow in (
        ("debug", "model.num_heads", 10**6, "is not divisible by model.num_heads 1000000", False),
        ("debug", "model.d_model", 10**6, "GiB are free on cpu", True),
        ("xl-debug", "model.num_heads", 10**6, "GiB are free on cpu", True),
        ("xl-debug", "data.lanes", 10**6, fits, False),
        ("debug", "model.num_encoder_layers", 10**5, fits, False),
        ("xl-debug", "model.num_layers", 10**5, fits, False),
        ("debug", "model.d_ff", 10**9, fits, False),
        ("debug", "model.source_vocab_size", 2**63, fits, False),
        ("demo", "tokenizer.vocab_size", 2**63, fits, False),
        ("debug", "optimiser.learning_rate", "inf", "it must be a finite number above 0", False),
    ):
        yield Case(f"{setting}={value}", [*train, preset, f"--{setting}", str(value)], says, slow=is_slow)
    drawn = str(folder / "drawn.png")
    for what, option, number in (
        ("smoothing", "--vocab-size", 60_000),
        ("positions", "--length", 10**8),
        ("positions", "--d-model", 10**8),
    ):
        yield Case(f"inspect {what} {option}", ["inspect", what, option, str(number), "--output", drawn], fits)
    model, source = str(honest / "run" / "model"), str(honest / "source.txt")
    for option in ("--nbest", "--beam"):
        says = "max_tokens 8192 / 10000 beams" if option == "--nbest" else fits
        sampling = ["--do-sample"] if option == "--nbest" else []
        yield Case(f"translate {option} 10000", ["translate", model, source, option, "10000", *sampling], says)


def _texts(honest: Path, folder: Path) -> Iterator[Case]:
    """Texts without end, and pipes that nobody writes."""
    model, language = str(honest / "run" / "model"), str(honest / "language")
    prepare = ["prepare", "--valid-count", "0", "--vocab-size", "300"]
    for name, text in (("letters", "a" * 10**7), ("marks", "e" + "\u0301" * 10**7)):
        path = folder / f"{name}.txt"
        path.write_text(f"{text}\n", encoding="utf-8")
        yield Case(f"a word of 10^7 {name}", ["translate", model, str(path)], None)
        for kind in ("bpe", "word", "unigram"):
            both = ["--source", str(path), "--target", str(path), "--tokenizer.kind", kind]
            both += ["--output", str(folder / f"data-{name}-{kind}")]
            yield Case(f"a word of 10^7 {name}, {kind}", [*prepare, *both], None, trains=True, slow=True)
    member = gzip.compress(b"a line of text\n" * 2**16)
    (folder / "members.gz").write_bytes(member * 40)
    (folder / "zeros.gz").write_bytes(gzip.compress(bytes(10**6)) * 100)
    most = ["--max-input-bytes", "1000000"]
    says = "unpacks to more than 1,000,000 bytes. If that is right, allow more by --max-input-bytes"
    members, zeros = str(folder / "members.gz"), str(folder / "zeros.gz")
    both = ["--source", members, "--target", members, "--output", str(folder / "data")]
    yield Case("gzip of many members, pairs", [*most, *prepare, *both], says)
    corpus = ["prepare", "--task", "lm", "--output", str(folder / "text"), "--valid-bytes", "0", "--level", "bytes"]
    yield Case("gzip of many members, bytes", [*corpus, "--corpus", members, "--max-input-bytes=1000000"], says)
    yield Case("gzip of one endless line", ["translate", model, zeros], "is longer than 67108864 bytes", slow=True)
    for name, arguments in {
        "bytes": [*corpus, "--corpus", "/dev/zero"],
        "lines": ["translate", model, "/dev/zero"],
        "a document": ["translate", model, "/dev/zero", "--format", "html"],
        "a prompt": ["generate", language, "--input", "/dev/zero"],
        "settings": ["train", "--config", "/dev/zero"],
    }.items():
        yield Case(f"/dev/zero as {name}", arguments, "it is a device, which may never end; name a file or a pipe")
    os.mkfifo(folder / "pipe.yaml")
    yield Case("--config FIFO", ["train", "--config", str(folder / "pipe.yaml")], "nobody writes into this pipe")
    pictures = folder / "pictures"
    pictures.mkdir()
    os.mkfifo(pictures / "a.png")
    images = ["--layout", "images", "--image-size", "4", "--valid-corpus", str(pictures), "--output", str(folder / "p")]
    drawn = ["prepare", "--task", "lm", "--corpus", str(pictures), *images]
    yield Case("a *.png FIFO", drawn, "a named pipe, not a regular file")
    stop = os.fsdecode(b"\xff")
    yield Case("--stop of bad UTF-8", ["generate", language, "a", "--stop", stop], "which is not UTF-8")


def _settings(honest: Path, folder: Path) -> Iterator[Case]:
    """YAML and JSON of other types and shapes."""
    train = ["train", "--preset", "debug", "--run-dir", str(folder / "run"), "--config"]
    tags = ("!!timestamp 1", "!!bool x", '!!int ""', "!!float x", "!!binary x", "!!set 1", "!!omap 1")
    texts = {tag: f"seed: {tag}\n" for tag in tags}
    texts |= {"100,000 [": "[" * 100_000, "half a surrogate": 'run_dir: "\\ud800"\n'}
    texts |= {"a list": "model: {architecture: []}\n"}
    for number, (name, text) in enumerate(texts.items()):
        path = folder / f"{number}.yaml"
        path.write_text(text, encoding="utf-8")
        yield Case(f"YAML with {name}", [*train, str(path)], str(path))
    for columns in ("1", "2", "3"):
        for command in ([], ["train"], ["translate"]):
            name = f"{' '.join(command)} --help in {columns} columns"
            yield Case(name, [*command, "--help"], None, environment={"COLUMNS": columns})


def _folders(honest: Path, folder: Path) -> Iterator[Case]:
    """Files of models and runs that hold other JSON than ours."""
    import shutil

    source = str(honest / "source.txt")
    odd = {
        "manifest.json": ("{}", "[]", "[" * 100_000, "null", '{"files": []}'),
        "config.json": ("[" * 100_000, '{"model_type": []}', '{"architecture": []}', '{"a": "\\ud800"}', "3"),
        "tokenizer.json": ("[" * 100_000, '{"model": {"type": []}}', '"\\ud800"'),
        "generation_config.json": ("[]", '{"num_beams": []}', '{"num_beams": 1e999}'),
    }
    for name, contents in odd.items():
        for number, content in enumerate(contents):
            model = folder / f"model-{name}-{number}"
            shutil.copytree(honest / "run" / "model", model)
            (model / name).write_text(content, encoding="utf-8")
            yield Case(f"translate with {name} {content[:30]}", ["translate", str(model), source], "")
    checkpoint = "checkpoints/step-00000004/scalars.json"
    odd_records = ("{}", "[]", "1", '{"scalars": []}', '{"scalars": {"counters": 3}}', "[" * 100_000)
    odd_lines = (
        "[1]",
        '"x"',
        '{"step": "a"}',
        '{"step": 1, "valid_nll": []}',
        '{"step": 1e999, "valid_nll": 1, "best": 1}',
    )
    for name, contents in {
        checkpoint: odd_records,
        "metrics.jsonl": odd_lines,
        "environment.json": odd_records,
    }.items():
        for number, content in enumerate(contents):
            run = folder / f"run-{Path(name).name}-{number}"
            shutil.copytree(honest / "run", run)
            (run / name).write_text(f"{content}\n", encoding="utf-8")
            yield Case(f"info with {Path(name).name} {content[:40]}", ["info", str(run)], "either")


def _shown(honest: Path, folder: Path) -> Iterator[Case]:
    """Escape sequences in names and values do not reach the terminal."""
    import shutil

    run, source, target = folder / ESCAPE, str(honest / "source.txt"), str(honest / "target.txt")
    shutil.copytree(honest / "run", run)
    config = (run / "config.yaml").read_text(encoding="utf-8")
    (run / "config.yaml").write_text(f'{config}extra: "\\e[31m\\u202e"\n', encoding="utf-8")
    for name, arguments in {
        "info": ["info", str(run)],
        "average": ["average", str(run), "--last", "2", "--output", str(folder / "averaged")],
        "average, missing": ["average", str(folder / f"{ESCAPE}-missing"), "--output", str(folder / "averaged-2")],
        "evaluate": ["evaluate", str(run), "--source", source, "--reference", target],
        "train": ["train", "--config", str(folder / f"{ESCAPE}.yaml")],
    }.items():
        yield Case(f"escapes: {name}", arguments, "either")
    prompt = ["generate", str(honest / "language"), f"{ESCAPE}\u202e", "--echo", "-n", "1", "--seed", "1"]
    yield Case("escapes: a prompt, into a pipe", prompt, None, silent=())
