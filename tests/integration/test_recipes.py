"""Every recipe is what its first lines say: its commands run, in order, on a little of the data.

`make test` reads them all; the long check runs the commands.
"""

import gzip
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from manyheads.catalogue import RUNS
from manyheads.config.build import resolve
from manyheads.config.files import load_yaml
from manyheads.extras.classification.settings import ClassificationConfig
from manyheads.extras.parsing.span_task.settings import SpanConfig
from manyheads.models.reformer.config import PRESETS as REFORMERS
from manyheads.tasks.language_modelling.settings import TextConfig
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.training.optim.schedule import learning_rate

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
MADE_HERE = ("embedded:", "copy-task", "duplication-task")
SHORT = {
    "train": "--training.max-steps 2 --training.max-minutes 0 --training.save-every 1 --data.max-tokens 1024"
    " --data.accumulate 1 --validation.every-steps 2 --validation.bleu-sentences 4 --device cpu --training.plots False",
    "evaluate": "--max-new-tokens 8 --device cpu",
    "generate": "--max-new-tokens 8 --device cpu",
}
SHORT_TEXT = {
    "train": "--training.max-steps 2 --training.max-minutes 0 --training.save-every 1 --data.lanes 4"
    " --data.segment-len 16 --model.memory-len 8 --validation.every-steps 2 --validation.sample-tokens 4"
    " --reading.max-tokens 300 --device cpu --training.plots False",
    "evaluate": "--max-tokens 300 --device cpu",
    "generate": "--max-new-tokens 8 --device cpu",
}
SHORT_REFORMER = {
    "train": "--training.max-steps 2 --training.max-minutes 0 --training.save-every 1 --data.lanes 1"
    " --data.accumulate 1 --data.segment-len 64 --reading.segment-len 64 --reading.lanes 1"
    " --validation.every-steps 2 --validation.sample-tokens 4 --reading.max-tokens 300 --device cpu"
    " --training.plots False",
    "evaluate": "--max-tokens 300 --device cpu",
    "generate": "--max-new-tokens 8 --device cpu",
}
SHORT_CLASSES = {
    "train": "--training.max-steps 2 --training.max-minutes 0 --training.save-every 1 --data.max-tokens 1024"
    " --validation.every-steps 2 --device cpu --training.plots False",
    "evaluate": "--device cpu",
}
SHORT_SPANS = {**SHORT_CLASSES, "evaluate": "--device cpu --precision fp32"}
NEWSTEST_TRAINING = ("2009", "2010", "2011", "2012")


def commands(recipe: Path) -> list[list[str]]:
    lines = recipe.read_text(encoding="utf-8").split("\n")
    return [shlex.split(line[1:])[1:] for line in lines if re.match(r"#   manyheads ", line)]


def config_of(recipe: Path) -> TrainConfig | TextConfig | ClassificationConfig | SpanConfig:
    source = load_yaml(recipe)
    config = resolve(RUNS[source.values.get("model", {}).get("architecture", "transformer")], [source])
    assert isinstance(config, TrainConfig | TextConfig | ClassificationConfig | SpanConfig)
    return config


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_and_its_commands_agree(recipe: Path) -> None:
    config = config_of(recipe)
    by_name = {command[0]: command for command in commands(recipe)}
    if config.data.path.startswith(MADE_HERE):
        return
    prepare, train = by_name["prepare"], by_name["train"]
    assert prepare[prepare.index("-o") + 1] == config.data.path
    assert train == ["train", "--config", f"recipes/{recipe.name}"]
    if "--vocab-size" in prepare and isinstance(config, TrainConfig | ClassificationConfig):
        assert prepare[prepare.index("--vocab-size") + 1] == str(config.tokenizer.vocab_size)
    if "average" in by_name:
        average = by_name["average"]
        assert average[1] == config.run_dir
        assert int(average[average.index("--last") + 1]) <= config.training.keep
    for command in commands(recipe):
        if command[0] == "evaluate":
            assert command[1].startswith(config.run_dir)


def test_the_paper_s_pictures_have_the_sizes_of_its_preset() -> None:
    [recipe] = [path for path in RECIPES if path.stem == "reformer-imagenet64"]
    config = config_of(recipe)
    assert isinstance(config, TextConfig)
    assert config.model == REFORMERS["imagenet64"]
    assert config.data.segment_len == config.reading.segment_len == config.model.max_len == 64 * 64 * 3
    # trax: 0.03125 x step / 8000 up to there, over the root of the larger of the two.
    for step in (1, 8000, 32_000):
        rate = learning_rate(config.schedule, peak=config.optimiser.learning_rate, d_model=1024, step=step)
        assert rate == pytest.approx(0.03125 * min(1, step / 8000) * max(step, 8000) ** -0.5)


def lay_out(folder: Path, shared: Path) -> None:
    """The files that the recipes name, with few lines in the tests' parts."""
    for corpus in ("multi30k", "multi30k-tok"):
        (folder / corpus).mkdir()
        for path in (shared / "data" / corpus).glob("*.gz"):
            if path.name.startswith("train"):
                (folder / corpus / path.name).symlink_to(path)
            else:
                lines = gzip.decompress(path.read_bytes()).split(b"\n")[:12]
                (folder / corpus / path.name).write_bytes(gzip.compress(b"\n".join(lines) + b"\n"))
    wmt, newstest = folder / "wmt14", shared / "data" / "wmt-newstest"
    wmt.mkdir()
    for language in ("en", "de", "fr"):
        parts = (newstest / f"newstest{year}.{language}.gz" for year in NEWSTEST_TRAINING)
        (wmt / f"train.{language}").write_bytes(b"".join(gzip.decompress(part.read_bytes()) for part in parts))
    for path in newstest.glob("newstest201[34]*.gz"):
        lines = gzip.decompress(path.read_bytes()).split(b"\n")[:12]
        (wmt / path.name.removesuffix(".gz")).write_bytes(b"\n".join(lines) + b"\n")
    gum, wsj = shared / "data" / "gum-constituency", folder / "wsj"
    (folder / "gum-constituency").symlink_to(gum)
    wsj.mkdir()
    for name, split in (("02-21.mrg", "train"), ("semi.trees.gz", "train"), ("22.mrg", "dev"), ("23.mrg", "test")):
        lines = gzip.decompress((gum / f"gum.{split}.ptb.gz").read_bytes()).split(b"\n")[:12]
        (wsj / name).write_bytes(b"\n".join(lines) + b"\n")
    (folder / "recipes").symlink_to(RECIPES[0].parent)


def lay_out_texts(folder: Path, data: Path) -> None:
    """Texts under the names of the corpora: what is checked by its size is repeated until it has that size."""
    (folder / "enwik8-prefix").symlink_to(data / "enwik8-prefix")
    (folder / "books").symlink_to(data / "text")
    for corpus in ("wikitext-2", "ptb"):  # ptb has the same form: a sentence per line, <unk>
        (folder / corpus).symlink_to(data / "wikitext-2")
    (folder / "wikitext-103").mkdir()
    for name in ("train", "valid", "test"):
        content = gzip.decompress((data / "wikitext-2" / f"{name}.txt.gz").read_bytes())
        # As many words as the cutoffs of the paper's vocabulary need.
        made = b" ".join(b"w%d" % number for number in range(270_000)) if name == "train" else b""
        (folder / "wikitext-103" / f"wiki.{name}.tokens").write_bytes(made + b"\n" + content[:100_000])
    prefix = gzip.decompress((data / "enwik8-prefix" / "enwik8.first4154399.gz").read_bytes())
    whole = (prefix * (10**8 // len(prefix) + 1))[: 10**8]
    for name in ("enwik8", "text8"):
        (folder / name).write_bytes(whole)
    benchmark = folder / "1-billion-word-language-modeling-benchmark-r13output"
    for part, names in (
        ("training-monolingual.tokenized.shuffled", ["news.en-00001-of-00100"]),
        (
            "heldout-monolingual.tokenized.shuffled",
            ["news.en.heldout-00000-of-00050", "news.en.heldout-00001-of-00050"],
        ),
    ):
        (benchmark / part).mkdir(parents=True)
        for name in names:
            seen = b"\n".join(b"w%d w%d w%d" % (number, number, number) for number in range(650_000))
            (benchmark / part / name).write_bytes(seen if part.startswith("train") else b"w1 w2 w3\n" * 300)
    for split, count in (("train", 3), ("valid", 1)):
        pictures = folder / "imagenet64" / split
        pictures.mkdir(parents=True)
        for number in range(count):
            rows, columns = np.mgrid[0:64, 0:64]
            pixels = np.stack([rows * 4, columns * 4, (rows * columns + 50 * number) % 256], 2).astype(np.uint8)
            Image.fromarray(pixels).save(pictures / f"{number}.png")


def lay_out_labelled(folder: Path, data: Path, recipe: Path) -> None:
    """Run the script that a recipe's first lines name, and keep a few texts of each label, for it is all of Tatoeba."""
    (folder / "tatoeba").symlink_to(data / "tatoeba")
    [line] = re.findall(r"^#   python (recipes/labelled_texts.py .*)", recipe.read_text(encoding="utf-8"), re.MULTILINE)
    arguments = shlex.split(line)
    subprocess.run([sys.executable, *arguments], cwd=folder, check=True, capture_output=True)
    for file in (folder / arguments[-1]).glob("*.tsv"):
        lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        file.write_text("".join(f"{line}\n" for line in lines[:: max(1, len(lines) // 300)]), encoding="utf-8")


TOO_LARGE = ("lm1b-large",)  # 838 million parameters and their moments, and both checkpoints: 30 GB


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_commands_of_a_recipe_run(recipe: Path, shared: Path, tmp_path: Path, figure: Callable[..., None]) -> None:
    is_text = isinstance(config_of(recipe), TextConfig)
    lay_out(tmp_path, shared)
    if is_text:
        lay_out_texts(tmp_path, shared / "data")
    is_labelled = isinstance(config_of(recipe), ClassificationConfig)
    if is_labelled:
        lay_out_labelled(tmp_path, shared / "data", recipe)
    given = commands(recipe) or [["train", "--config", f"recipes/{recipe.name}"]]
    short = SHORT_CLASSES if is_labelled else SHORT_TEXT if is_text else SHORT
    if isinstance(config_of(recipe), SpanConfig):
        short = SHORT_SPANS
    if config_of(recipe).model.architecture == "reformer":
        short = SHORT_REFORMER
    if recipe.stem.startswith("duplication"):  # its sequences are counted, not its tokens
        short = {**short, "evaluate": "--device cpu"}
    program = [sys.executable, "-m", "manyheads.cli.main"]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    for command in given:
        whole = [*command, *shlex.split(short.get(command[0], ""))]
        if command[0] == "train" and recipe.stem in TOO_LARGE:
            whole += ["--model.num-layers", "2"]
        if command[0] == "train" and getattr(config_of(recipe).data, "length_schedule", ()):
            whole += ["--data.length-schedule", "64=1"]  # the segments of `short` have 64 tokens, as many as a chunk
        if "--last" in whole:
            whole[whole.index("--last") + 1] = "2"
        done = subprocess.run(
            [*program, *whole], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, f"{shlex.join(whole)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    figure("recipes", recipe.stem, commands=len(given), settings=yaml.safe_load(recipe.read_text())["model"])
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)  # gigabytes, which pytest would keep


@pytest.mark.slow
def test_four_language_models_side_by_side(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "recipes" / "language_models.py"
    command = [sys.executable, str(script), "--updates", "1", "--seeds", "1", "--work", str(tmp_path)]
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert re.findall(r"^\| (.*?) \| [78]\.\d{3} \| [78]\.\d{3} \|$", table, re.MULTILINE) == [
        "decoder", "Transformer-XL without memory", "Transformer-XL", "Reformer, local and hashed",
    ]  # fmt: skip
