"""README's commands run in the order of the page, in an empty folder, and print what the page promises.

The first is `make demo`'s; every file that a later command reads was written by an earlier one. Only budgets are cut
(`CUTS`): smaller models, fewer steps. What the page translates with is the model of the package.
"""

import contextlib
import io
import re
from pathlib import Path

import pytest
from doc_pages import REPOSITORY
from page_shell import run_line

from manyheads.catalogue import COMMANDS

README = REPOSITORY / "README.md"
CHINESE = README.with_name("README.zh-CN.md")
BLOCKS = re.findall(r"<!-- test -->\n```(\w*)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)

# By steps and not by minutes, in fp32 and without Muon, so that every machine does the same work.
TOKENIZER = " --tokenizer.vocab_size 1000"
FEW_STEPS = (
    "--training.max_minutes 0 --training.max_steps 50 --data.max_tokens 768"
    f"{TOKENIZER} --model.d_model 64 --model.d_ff 128 --model.num_heads 2 --model.num_encoder_layers 1"
    " --model.num_decoder_layers 2 --precision fp32 --optimiser.name adamw --optimiser.learning_rate 0.01"
    " --schedule.warmup_steps 20 --validation.bleu_sentences 4"
)
NO_PICTURES = "--training.plots false --training.tensorboard false"
CUTS = [
    # What the page says, for a reader with minutes -> what the test does, in seconds.
    (r"(?<=--preset demo)(.*) --minutes \d+", rf"\1 {FEW_STEPS}"),
    (r"(train --data.path data/mine.*) --minutes \d+", rf"\1 {FEW_STEPS.replace(TOKENIZER, '')}"),
    (r"(?<=--run-dir runs/demo) --resume none", r"\g<0> --data.num_train_pairs 4000"),
    (r"(?<=manyheads train)", f" {NO_PICTURES}"),
]

pytestmark = pytest.mark.page


def demo_command() -> str:
    """How `make demo` trains."""
    text = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    [minutes] = re.findall(r"^MINUTES \?= (\d+)$", text, re.MULTILINE)
    [command] = re.findall(r"^\t\$\(BIN\)/(manyheads train --preset demo .*)", text, re.MULTILINE)
    return command.replace("$(MINUTES)", minutes)


def cut(line: str) -> str:
    for pattern, replacement in CUTS:
        line = re.sub(pattern, replacement, line)
    return line


def run(line: str, folder: Path) -> tuple[str, str]:
    """Standard output and error of a line of shell."""
    with contextlib.chdir(folder):
        printed = run_line(line)
    return printed.out, printed.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clone")


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[str, tuple[str, str]]:
    """A command as the page has it, or the whole of a block of Python -> its standard output and error."""
    found = {demo_command(): run(cut(demo_command()), folder)}
    for language, block in BLOCKS:
        if language == "python":
            out = io.StringIO()
            with contextlib.chdir(folder), contextlib.redirect_stdout(out):
                exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})  # noqa: S102 - our own page
            found[block] = out.getvalue(), ""
        else:
            found |= {line: run(cut(line), folder) for line in block.strip().split("\n")}
    return found


def of(printed: dict[str, tuple[str, str]], part: str) -> tuple[str, str]:
    """What the one command printed that has this part."""
    [command] = [command for command in printed if part in command]
    return printed[command]


def test_readme_has_blocks_to_run() -> None:
    assert [language for language, _ in BLOCKS] == ["", "", "python"]  # translate, train, look inside
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
    lines = "\n".join([demo_command(), *(block for _, block in BLOCKS)])
    assert all(re.search(pattern, lines) for pattern, _ in CUTS)


def test_make_demo_trains_into_the_folder_that_the_page_uses(printed: dict[str, tuple[str, str]]) -> None:
    out, err = printed[demo_command()]
    assert re.search(r"^next     \S*manyheads translate runs/demo\n\Z", out, re.MULTILINE)
    assert "Only the first 4000 of 60000 pairs are used, because data.num_train_pairs is 4000; 0 uses all" in err


def test_sample_data_writes_every_file_that_a_command_reads(printed: dict[str, tuple[str, str]], folder: Path) -> None:
    out, _ = of(printed, "sample-data")
    written = {line.split()[0] for line in out.split("\n") if " lines" in line}
    commands = "\n".join(command for command in printed if command.startswith(("manyheads", "echo")))
    named = set(re.findall(r"(?<!> )\bsample/[\w.]+", commands))
    assert len(named) == 6
    assert named <= written
    assert all((folder / name).is_file() for name in written)


def translations(text: str) -> list[str]:
    """A translation a line; nearly all must say something, even after so few steps."""
    lines = text.removesuffix("\n").split("\n")
    assert len([line for line in lines if line.strip()]) >= 0.9 * len(lines), text
    return lines


def test_the_model_of_the_package_translates_and_is_scored(printed: dict[str, tuple[str, str]], folder: Path) -> None:
    assert len(translations(of(printed, 'echo "I am very hungry." | manyheads translate')[0])) == 1
    assert len(translations((folder / "sample/sentences.de").read_text(encoding="utf-8"))) == 100
    assert (folder / "models/en-de/model.safetensors").is_file()
    out, _ = of(printed, "evaluate models/en-de")
    for measure in ("BLEU", "chrF", "likelihood"):
        assert re.search(rf"^{measure} = \d+\.\d\d", out, re.MULTILINE), out
    assert "sentences  100" in out
    assert float(re.findall(r"^BLEU = ([\d.]+)", out, re.MULTILINE)[0]) > 20


def test_python_translates(printed: dict[str, tuple[str, str]]) -> None:
    best, names, *nbest = of(printed, "translate_nbest")[0].rstrip("\n").split("\n")
    assert translations(best)
    assert "cross_attn" in names
    assert [bool(re.fullmatch(r"-?\d+\.\d{3}  .+", line)) for line in nbest] == [True, True]


def test_a_model_of_ones_own(printed: dict[str, tuple[str, str]]) -> None:
    """Every pair is used, each command names the next one, and no line stays empty."""
    out, _ = of(printed, "prepare --source")
    assert "train: 20,000 pairs kept of 20,000 read" in out
    [train] = [command for command in printed if "--run-dir runs/mine" in command]
    assert train.startswith(out.rstrip().split("\n")[-1].removeprefix("next: "))
    out, err = printed[train]
    assert "20000 of 20000 training pairs kept, 0 too long" in err
    assert re.search(r"^best     step \d+, validation loss \d+\.\d+$", out, re.MULTILINE)
    assert re.search(r"^next     \S*manyheads translate runs/mine\n\Z", out, re.MULTILINE)
    assert len(translations(of(printed, "translate runs/mine")[0])) == 100


def test_the_tree_and_the_files_to_read_are_there() -> None:
    text = README.read_text(encoding="utf-8")
    [tree] = re.findall(r"^```\n(src/manyheads/\n.*?)^```$", text, re.DOTALL | re.M)
    root, *rows, others = tree.splitlines()
    for row in rows:
        named = row.strip() if "  " not in row.strip() else row.strip().partition("  ")[0]
        assert all((REPOSITORY / root / name).exists() for name in named.split()), row
    assert all((REPOSITORY / name).is_dir() for name in others.split())
    described = {name for row in rows for name in row.strip().partition("  ")[0].split()}
    folders = {f"{path.name}/" for path in (REPOSITORY / root).iterdir() if (path / "__init__.py").is_file()}
    assert folders <= described
    assert len(set(re.findall(r"\]\((src/[^)]+\.py)\)", text))) == 5


def test_the_chinese_readme_has_the_same_commands() -> None:
    """Its blocks of code are blocks of README.md, and each README links to the other."""
    blocks = {
        path: re.findall(r"^```\w*\n(.*?)^```$", path.read_text("utf-8"), re.DOTALL | re.M)
        for path in (README, CHINESE)
    }
    assert len(blocks[CHINESE]) == 5
    assert set(blocks[CHINESE]) == set(blocks[README])
    texts = {path: path.read_text(encoding="utf-8") for path in (README, CHINESE)}
    sections = {path: re.findall(r"^## ", text, re.M) for path, text in texts.items()}
    assert len(sections[CHINESE]) == len(sections[README])
    commands = rf"\bmanyheads (?:{'|'.join(COMMANDS)})\b"
    for words in (commands, r"\binspect [a-z]+\b", r"--[a-z][\w.-]+"):
        found = {path: set(re.findall(words, " ".join(text.split()))) for path, text in texts.items()}
        assert found[README] <= found[CHINESE]
    assert f"({CHINESE.name})" in texts[README]
    assert f"({README.name})" in texts[CHINESE]
