"""The documentation runs: every block of code of a page, in order, and what it prints is what the page shows.

Python blocks of a page share one namespace and a folder; commands run there too. Budgets are cut to what a test can
afford (`CUTS`); a block that cannot run here says why in a comment above it, and `NOT_RUN` lists those.
"""

import contextlib
import doctest
import gzip
import io
import re
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_names import found_in, is_setting
from doc_pages import REPOSITORY, Block, blocks_of, differing, headings_of, links_of, notebook_path
from marian_models import write_peer_folder
from official_xl import Official
from page_kernel import run_cells
from page_shell import run_line
from PIL import Image
from safetensors.torch import load_file

from manyheads.catalogue import build_model
from manyheads.data.corpora import load_novel, load_tatoeba
from manyheads.extras.peers import PEERS
from manyheads.extras.sample_model.command import copy_model
from manyheads.models.transformer_xl.config import TransformerXLConfig

TUTORIALS = ["attention", "transformer", "transformer-xl", "reformer"]
SOURCES = ["annotated-transformer", "transformer-xl", "reformer", "d2l", "labml", "fused-qkv"]
PAGES = [
    "docs/attention.md",
    "docs/callbacks.md",
    "docs/classification.md",
    "docs/converting.md",
    "docs/ensembles.md",
    "docs/exporting.md",
    "docs/heads.md",
    "docs/inspecting.md",
    "docs/language-models.md",
    "docs/which-language-model.md",
    "docs/long-sequences.md",
    "docs/adapters.md",
    "docs/own-training.md",
    "docs/parsing.md",
    "docs/serving.md",
    "docs/transformers.md",
    *(f"docs/sources/{name}.md" for name in SOURCES),
    *(f"docs/tutorials/{name}.md" for name in TUTORIALS),
]

QUICKLY = (
    "--training.max_steps 4 --validation.every_steps 4 --training.save_every 4"
    " --training.plots false --training.tensorboard false"
)
CUTS = [
    # What a page says, for a reader with minutes -> what a test does, in seconds.
    (r"--preset demo --minutes \d+", "--preset debug --data.path {pairs}"),
    (r"--preset demo --data.path data/(mine|exchanged)", "--preset debug --data.path {pairs}"),
    (r"--preset demo --data.mix data/mine", "--preset debug --data.mix {pairs}"),
    (r"--preset xl-demo --minutes \d+", "--preset xl-debug"),
    (r"--preset xl-demo(?!.*--run-dir)", "--preset xl-debug --run-dir runs/xl-demo"),
    (r"--preset xl-demo", "--preset xl-debug"),
    (r"--preset lm-demo(?!.*--run-dir)", "--preset xl-debug --architecture decoder --run-dir runs/lm-demo"),
    (r"--preset lm-demo", "--preset xl-debug --architecture decoder"),
    (r"--preset reformer-demo --minutes \d+", "--preset reformer-debug"),
    (r"--preset reformer-demo(?!.*--run-dir)", "--preset reformer-debug --run-dir runs/reformer-demo"),
    (r"--preset reformer-demo", "--preset reformer-debug"),
    (r"1024=0.3 4096=0.6 16384=1", "8=0.3 24=0.6 48=1"),
    (
        r"(?<=train )--config recipes/wikitext-2.yaml",
        r"\g<0> --data.path data/wikitext-2 --model.cutoffs '[3, 6]' --dry-run",
    ),
    (r"train --preset classifier-demo(?!.*--run-dir)", r"\g<0> --data.path labelled --run-dir runs/classifier-demo"),
    (r"--preset classifier-demo", "--preset classifier-debug"),
    (r"--valid-count 500 --test-tsv", "--valid-count 5 --vocab-size 300 --test-tsv"),
    (r"info reformer-demo --length \d+", "info reformer-debug --length 64"),
    (r"info my.yaml --length \d+", "info my.yaml --length 256"),
    (r"info runs/(\S+) --length \d+", r"info runs/\1 --length 64"),
    (r"--valid-bytes 50000 --test-bytes 50000", "--valid-bytes 5000 --test-bytes 5000"),
    (r"--vocab-size 8000", "--vocab-size 300"),
    (r"--memory-len 0 64 128 256( 512)?", "--memory-len 0 8"),
    (r"--segment-len 64 --memory-len 640 --clamp-len 400", "--segment-len 16 --memory-len 32 --clamp-len 20"),
    (r"(?<!--min-new-tokens 9 )--max-new-tokens \d+|-n 400", "--max-new-tokens 5"),  # outputs of 9 ids are compared
    (r"(?<=translate models/en-de train.en) --engine", r" --max-new-tokens 5\g<0>"),
    (r"(?<=translate runs/a train.en) --ensemble", r" --max-new-tokens 5\g<0>"),
    (r"the cat sat on the mat and [^\"]*", "the cat sat on the mat"),  # a debug Reformer has 64 positions
    (r"head -c 6144", "head -c 24"),  # half of a picture of 4 x 4
    (r"--num-hashes 1 2 4 full", "--num-hashes 1 full"),
    (r"convert opus-mt-en-de --from-pickle --output models/en-de", "convert opus-mt-pickled --from-pickle -o models/2"),
    (r"prepare --task (parsing|spans)", r"\g<0> --vocab-size 320"),
    (r"--preset chart-parser", "--preset chart-debug"),
    (r"--preset demo --data.path data/my-(trees|words)", r"--preset debug --data.path data/my-\1"),
    (r"inspect pruning models/en-de --data \S+", r"\g<0> --share 0 0.5 --num-beams 1 --judge-pairs 4 --pairs 8"),
    (r"inspect heads models/en-de --data \S+", r"\g<0> --pairs 8"),
    (r"--beam 21", "--beam 2"),
    (r"(?<=train )--preset", f"{QUICKLY} --preset"),
    (r"evaluate runs/(xl-demo|lm-demo|reformer-demo|novel|long)(?!.*--(max-tokens|text))", r"\g<0> --max-tokens 2000"),
]
OPTIONAL = ("lightning", "optuna")
"""Packages of some blocks, which are left out where they are not installed."""
PYTHON_CUTS = [(r"max_new_tokens=\d+", "max_new_tokens=5")]
RUNS = {
    # What a page supposes to have been trained before, or written by `sample-model`.
    "docs/exporting.md": ["sample"],
    "docs/heads.md": ["sample"],
    "docs/inspecting.md": ["sample", "reformer"],
    "docs/long-sequences.md": ["pictures"],
    "docs/transformers.md": ["demo"],
    "docs/tutorials/attention.md": ["small"],
}
NOT_RUN: dict[str, str] = {
    "docs/converting.md:72": "it needs a model that Marian trained",
    "docs/converting.md:116": "it needs the published models, gigabytes",
    "docs/converting.md:152": "it needs the peers' models",
    "docs/converting.md:173": "it needs an account on the hub",
    "docs/converting.md:207": "its inputs are the reader's",
    "docs/exporting.md:91": "its model is not in this page",
    "docs/exporting.md:106": "tracing and the checks of shapes exclude each other",
    "docs/exporting.md:120": "it needs the package optimum-onnx",
    "docs/exporting.md:146": "it needs npm, a network, and serves until it is stopped",
    "docs/exporting.md:162": "it installs two environments of more than a gigabyte",
    "docs/heads.md:10": "it needs a trained model, and minutes",
    "docs/serving.md:12": "it serves until it is stopped",
    "docs/serving.md:20": "it serves until it is stopped",
    "docs/serving.md:65": "it needs the package openai and a running server",
    "docs/sources/reformer.md:229": "it needs the reader's model",
    "docs/transformers.md:98": "it needs the package lm-eval",
    "docs/sources/transformer-xl.md:297": "it needs the published models, gigabytes",
    "docs/which-language-model.md:33": "it takes an hour and a half",
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that pages name as the reader's own, all small, and prepared pairs."""
    place = tmp_path_factory.mktemp("docs")
    pairs = load_tatoeba("train")[:300]
    for name, side in (("train.en", 0), ("train.de", 1), ("valid.en", 0), ("valid.de", 1)):
        (place / name).write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8", newline="\n")
    sides = ["--source", "train.en", "--target", "train.de", "--valid-source", "train.en", "--valid-target", "train.de"]
    with contextlib.chdir(place):
        run_line(shlex.join(["manyheads", "prepare", *sides, "--vocab-size", "300", "--output", "pairs"]))
    novel = load_novel()["train"]
    for name, piece in (("a.txt", novel[:9000]), ("c.txt", novel[:3000])):
        (place / name).write_bytes(piece)
    (place / "b.txt.gz").write_bytes(gzip.compress(novel[9000:18_000]))
    (place / "other.txt").write_bytes(novel[20_000:21_000])
    (place / "input.en").write_text("I am hungry.\nWhere is the cat?\n", encoding="utf-8")
    (place / "prompts.txt").write_text("He \nShe \n", encoding="utf-8")
    rows = "".join(
        f"{language}\t{text}\n" for pair in pairs[:50] for language, text in zip(("en", "de"), pair, strict=True)
    )
    for name in ("train.tsv", "test.tsv"):
        (place / name).write_text(rows, encoding="utf-8", newline="\n")
    (place / "input.txt").write_text("Guten Tag!\n\nGood day!\n", encoding="utf-8")
    labelled = "--tsv train.tsv --valid-tsv test.tsv --test-tsv test.tsv --vocab-size 300 --output labelled"
    with contextlib.chdir(place):
        run_line(f"manyheads prepare --task classification {labelled}")
    (place / "wikitext-2").mkdir()
    for split in ("train", "valid", "test"):
        (place / "wikitext-2" / f"wiki.{split}.tokens").write_text(" = A title = \n \n the cat sat . \n" * 50, "utf-8")
    (place / "png").mkdir()
    for number in range(8):
        Image.new("RGB", (4, 4), (30 * number, 90, 200)).save(place / "png" / f"{number}.png")
    (place / "picture.raw").write_bytes(bytes(48))
    with contextlib.chdir(place):
        images = ["--layout", "images", "--image-size", "4", "--corpus", "png", "--valid-corpus", "png"]
        run_line(shlex.join(["manyheads", "prepare", "--task", "lm", *images, "--output", "pixels"]))
    (place / "recipes").symlink_to(REPOSITORY / "recipes")
    (place / "my.yaml").write_text(
        "model: {architecture: reformer, d_model: 32, num_heads: 2, d_ff: 64, num_layers: 2, max_len: 256}\n",
        encoding="utf-8",
    )
    trees = "".join(
        f"(ROOT (S (NP (PRP {who})) (VP (VBZ {what})) (. .)))\n"
        for who in ("She", "He", "It", "One")
        for what in ("sleeps", "sings", "reads")
    )
    for name in ("train", "dev", "test"):
        (place / f"{name}.ptb").write_text(trees, encoding="utf-8")
    write_peer_folder(place / "opus-mt-en-de")
    shutil.copytree(place / "opus-mt-en-de", place / "opus-mt-pickled")
    weights = load_file(place / "opus-mt-pickled" / "model.safetensors")
    (place / "opus-mt-pickled" / "model.safetensors").unlink()
    torch.save(weights, place / "opus-mt-pickled" / "pytorch_model.bin")
    work = place / "LM-TFM-wt103" / "20190101-000000"
    work.mkdir(parents=True)
    sizes = {"vocab_size": 31, "d_model": 12, "num_heads": 2, "d_ff": 20, "num_layers": 2, "memory_len": 6}
    peer, weights = PEERS["kimiyoung/TransformerXL"].to_peer(build_model(TransformerXLConfig(**sizes)))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class that was made here has no source to be kept
        torch.save(Official(patch).model(peer["model"], weights), work / "model.pt")
    return place


@pytest.fixture(scope="module")
def trained(texts: Path) -> Callable[[list[str]], Path]:
    """Options of a preset -> a run folder, trained when it is first asked for."""
    found: dict[str, Path] = {}

    def train(preset: list[str]) -> Path:
        key = shlex.join(preset)
        if key not in found:
            run = texts.parent / f"{texts.name}-run-{len(found)}"
            line = ["manyheads", "train", *QUICKLY.split(), "--preset", *preset, "--run-dir", str(run)]
            with contextlib.chdir(texts):
                run_line(shlex.join(line))
            found[key] = run
        return found[key]

    return train


@pytest.fixture
def folder(texts: Path, trained: Callable[[list[str]], Path], tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Where a page's blocks run: the texts, and the runs that it supposes."""
    for file in texts.iterdir():
        (tmp_path / file.name).symlink_to(file, target_is_directory=file.is_dir())
    presets = {
        "reformer": ["reformer-debug"],
        "pictures": ["reformer-debug", "--data.path", str(texts / "pixels"), "--data.documents", "separate"],
    }
    for name in RUNS.get(request.node.callspec.params["page"], []):
        if name == "sample":
            (tmp_path / "models").mkdir()
            copy_model(tmp_path / "models" / "en-de")
            continue
        run = trained(presets.get(name, ["debug", "--data.path", str(texts / "pairs")]))
        shutil.copytree(run, tmp_path / "runs" / name)
        if name == "pictures":
            (tmp_path / "data").mkdir()
            (tmp_path / "data" / "pixels").symlink_to(texts / "pixels", target_is_directory=True)
    return tmp_path


def cut(text: str, cuts: list[tuple[str, str]], texts: Path) -> str:
    for pattern, replacement in cuts:
        text = re.sub(pattern, replacement.replace("{pairs}", str(texts / "pairs")), text)
    return text


def shell(block: Block, texts: Path) -> str:
    lines = cut(block.text, CUTS, texts).strip().split("\n")
    return "".join(run_line(line).out for line in lines)


def python(block: Block, namespace: dict[str, Any], texts: Path) -> str:
    out = io.StringIO()
    # As many lines before it as on the page, so that a traceback names the page's line.
    code = "\n" * (block.line - 1) + cut(block.text, PYTHON_CUTS, texts)
    with contextlib.redirect_stdout(out):
        exec(compile(code, block.page, "exec"), namespace)  # noqa: S102 - our own pages
    return out.getvalue()


def run_doctest(block: Block, namespace: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, namespace, block.place, block.page, block.line - 1)
    report = io.StringIO()
    failed = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.write, clear_globs=False).failed
    assert not failed, report.getvalue()
    namespace.update(test.globs)


def in_kernel(blocks: list[Block], folder: Path, texts: Path) -> list[tuple[Block, str]]:
    """Run the blocks as cells of a notebook."""
    cells = [
        cut(block.text, PYTHON_CUTS, texts)
        if block.language == "python"
        else f"%%sh\n{cut(block.text, CUTS, texts).strip()}"
        for block in blocks
    ]
    return list(zip(blocks, run_cells(cells, folder), strict=True))


def in_process(blocks: list[Block], folder: Path, texts: Path) -> Iterator[tuple[Block, str]]:
    """Run the blocks here, in one namespace."""
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(folder):
        for block in blocks:
            if block.text.startswith(">>>"):
                run_doctest(block, namespace)
            else:
                yield block, python(block, namespace, texts) if block.language == "python" else shell(block, texts)


@pytest.mark.page
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs(page: str, folder: Path, texts: Path) -> None:
    """All its blocks, in order; outputs are compared where the page has them and does not say why not.

    A page that has a notebook runs in a kernel.
    """
    blocks, left_out = [], []
    for block in blocks_of(page):
        if block.not_run:
            continue
        used = re.findall(r"^(?:import|from) (\w+)", block.text, re.MULTILINE)
        if lacks := [name for name in used if name in OPTIONAL and find_spec(name) is None]:
            left_out.append(f"{block.place} needs {lacks[0]}, which is not installed")
            continue
        assert block.text.startswith(">>>") or block.language in ("python", "sh", ""), (
            f"{block.place}: who runs {block.language}?"
        )
        blocks.append(block)
    runs = in_kernel if notebook_path(page).is_file() else in_process
    mistakes = []
    for block, printed in runs(blocks, folder, texts):
        if block.output is not None and not block.not_compared:
            difference = differing(block.output, printed)
            mistakes += [f"{block.place} prints something else. {difference}"] if difference else []
        elif block.output is None and block.language == "python" and page.startswith("docs/tutorials/"):
            mistakes += [f"{block.place} prints what the page does not show:\n{printed}"] if printed else []
    assert not mistakes, "\n\n".join(mistakes)
    if left_out:
        pytest.skip("all other blocks ran; " + "; ".join(left_out))


def test_what_is_not_run_is_known() -> None:
    """A new block that is not run, or not compared, is seen here."""
    found = {block.place: block.not_run for page in PAGES for block in blocks_of(page) if block.not_run}
    assert found == NOT_RUN


NOT_COMPARED = {"measured on this machine", "what a few minutes teach depends on the machine"}
"""Times and sizes, and what a run limited by minutes prints: nothing else may differ from what a page shows."""


def test_only_measurements_are_not_compared() -> None:
    found = {(page, block.not_compared) for page in PAGES for block in blocks_of(page) if block.not_compared}
    assert not {(page, why) for page, why in found if why not in NOT_COMPARED}


def test_no_page_with_python_is_forgotten() -> None:
    """Those in Chinese have the blocks of the English ones; see test_chinese_pages."""
    pages = [page for page in sorted((REPOSITORY / "docs").rglob("*.md")) if "zh" not in page.parts]
    names = [str(page.relative_to(REPOSITORY)) for page in pages if "```python" in page.read_text(encoding="utf-8")]
    assert set(names) <= set(PAGES)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("loss 0.50", "loss 0.52", True),
        ("loss 0.50", "loss 0.53", False),
        ("(2, 10) True", "(2,  10)\nTrue", True),
        ("(2, 10)", "(2, 11)", False),
        ("equal: True", "equal: False", False),
        ("a ... z 1.0", "a b c z 1.1", True),
        ("1.7e-07", "1.9e-07", True),
        ("1.7e-07", "1.7e-06", False),
        ("tensor([0.1, -0.2])", "tensor([ 0.1, -0.2])", True),
        ("a", "a b", False),
    ],
)
def test_outputs_are_told_apart(shown: str, printed: str, same: bool) -> None:
    assert (differing(shown, printed) == "") == same


SYMBOLS = [
    (name, code)
    for name in TUTORIALS
    for row in re.findall(
        r"^\|.*", (REPOSITORY / f"docs/tutorials/{name}.md").read_text("utf-8").split("## Symbols")[-1], re.MULTILINE
    )[2:]
    for code in re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", row)[2])
]
ARCHITECTURES = "manyheads.models"
ROOMS = [
    "manyheads",
    "manyheads.nn",
    "manyheads.nn.positions",
    "manyheads.nn.attention.lsh_hash",
    "manyheads.nn.attention.relative",
    "manyheads.nn.kernels.relative",
    f"{ARCHITECTURES}.reformer.config",
    f"{ARCHITECTURES}.reformer.model",
    f"{ARCHITECTURES}.transformer.config",
    f"{ARCHITECTURES}.transformer.model",
    "manyheads.nn.attention.cache",
    "manyheads.extras.peers",
    f"{ARCHITECTURES}.transformer_xl.config",
    f"{ARCHITECTURES}.transformer_xl.state",
    f"{ARCHITECTURES}.transformer_xl.model",
    "manyheads.data.settings",
    "manyheads.decoding.settings",
    "manyheads.training.settings",
]


def test_there_are_symbols() -> None:
    assert {name for name, _ in SYMBOLS} == set(TUTORIALS)
    assert len(SYMBOLS) > 60


@pytest.mark.parametrize(("page", "code"), SYMBOLS)
def test_a_symbols_name_is_in_the_code(page: str, code: str) -> None:
    """A module's name, a class's attribute or field, or an argument of its constructor or call."""
    assert any(found_in(room, code.split(".")) for room in ROOMS), f"{page}: `{code}` is nowhere"


TEXTS = [
    "README.md",
    "README.zh-CN.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "recipes/README.md",
    "benchmarks/README.md",
]
FOLDERS = [REPOSITORY / "docs", REPOSITORY / "experiments"]
LINKING = sorted({*TEXTS, *(str(p.relative_to(REPOSITORY)) for folder in FOLDERS for p in folder.rglob("*.md"))})


def test_a_setting_with_a_value_is_a_setting() -> None:
    """Not the name of a module, which looks alike: `data.lanes 1` is one, `data.language.segments 1` is not."""
    named = {
        (page, name)
        for page in LINKING
        if page.startswith("docs/") and "decisions" not in page
        for name in re.findall(
            r"`(?:--)?((?:data|model|training|decoding|schedule|optimiser|validation)\.[a-z_.]+) [\w.-]+`",
            (REPOSITORY / page).read_text("utf-8"),
        )
    }
    assert len(named) > 20
    assert not {(page, name) for page, name in named if not is_setting(name)}


@pytest.mark.parametrize("page", LINKING)
def test_links_hold(page: str) -> None:
    """Files that relative links name are there, and so are headings."""
    for link in links_of(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (REPOSITORY / page).parent / path if path else REPOSITORY / page
        assert target.exists(), f"{page} links to {link}, which is not there"
        if anchor and target.suffix == ".md":
            assert anchor in headings_of(str(target.resolve().relative_to(REPOSITORY))), f"{page}: no heading {link}"


def test_pictures_are_small() -> None:
    for picture in (REPOSITORY / "docs" / "pictures").iterdir():
        assert picture.stat().st_size < 150_000, picture.name
