"""`nn/` and the models need torch and nothing else: machines with GPUs often have nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manyheads.data.sampler import mix
from manyheads.nn.kernels import dropout

ROOT = Path(__file__).resolve().parents[2]

TORCH_ALONE = """
import importlib.machinery
import importlib.metadata
import re
import sys


def normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def required(name, found):
    '''The distributions that torch needs, with those that they need; what an extra needs is left out.'''
    for line in importlib.metadata.requires(name) or []:
        other = normalized(re.match(r"[\\w.-]+", line).group())
        if "extra ==" in line or other in found:
            continue
        try:
            importlib.metadata.distribution(other)
        except importlib.metadata.PackageNotFoundError:
            continue  # for other systems or devices
        found.add(other)
        required(other, found)
    return found


distributions = {"torch", "manyheads", *required("torch", set())}
installed = importlib.metadata.packages_distributions()
blocked = {name for name, owners in installed.items() if not distributions & {normalized(owner) for owner in owners}}


class NotBlocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in blocked:
            return importlib.machinery.PathFinder.find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = NotBlocked()
"""

TRAINING = """
import pkgutil
import importlib
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch works without it
import torch
import manyheads.nn
from manyheads.models.reformer.model import build as build_reformer
from manyheads.models.reformer.translator import build_seq2seq
from manyheads.models.reformer import config as reformers
from manyheads.models.transformer.model import build as build_transformer
from manyheads.models.transformer import config as transformers
from manyheads.models.transformer_xl.model import build as build_xl
from manyheads.models.transformer_xl import config as xls
from manyheads.data.batch import PairBatch, SegmentBatch
from dataclasses import replace

for module in pkgutil.walk_packages(manyheads.nn.__path__, "manyheads.nn."):
    if ".triton." not in module.name:  # which torch brings along where there is a GPU
        importlib.import_module(module.name)
for name in ("jaxtyping", "numpy", "pydantic", "safetensors"):
    assert name not in sys.modules, name


def step(model, batch):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    output = model(batch)
    (output.loss_sum / output.num_tokens).backward()
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert any(not torch.equal(one, two) for one, two in zip(before, model.parameters()))
    print(type(model.body).__name__)


torch.manual_seed(1)
ids, lengths, rows = torch.randint(4, 20, (2, 16)), torch.tensor([16, 12]), torch.arange(2)
pairs = PairBatch(ids, lengths, ids, lengths, rows)
segments = SegmentBatch(ids, ids, lengths, torch.zeros(2, dtype=torch.bool), rows)
vocabularies = {"source_vocab_size": 20, "target_vocab_size": 20}
step(build_transformer(replace(transformers.PRESETS["debug"], **vocabularies)), pairs)
step(build_seq2seq(replace(reformers.SEQ2SEQ_PRESETS["debug"], **vocabularies)), pairs)
step(build_xl(replace(xls.PRESETS["debug"], vocab_size=20, dropout=0.1)), segments)
step(build_reformer(replace(reformers.PRESETS["debug"], vocab_size=20)), segments)
"""


def test_nn_and_the_models_train_with_torch_alone(tmp_path: Path) -> None:
    """No jaxtyping, numpy, pydantic or safetensors: all third-party modules that torch does not require are blocked."""
    script = tmp_path / "train.py"
    script.write_text(TORCH_ALONE + TRAINING, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Transformer", "ReformerTranslator", "TransformerXL", "Reformer"]


TRYING = """
for name in ("jaxtyping", "numpy", "pydantic", "safetensors"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(error.name)
"""


def test_the_blocked_modules_cannot_be_imported(tmp_path: Path) -> None:
    script = tmp_path / "blocked.py"
    script.write_text(f"{TORCH_ALONE}\nimport importlib\n{TRYING}", encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.split() == ["jaxtyping", "numpy", "pydantic", "safetensors"], done.stderr


def test_row_keys_are_the_hash_that_the_sampler_uses() -> None:
    """Dropout computes it with torch alone, as int64; the bits are those of numpy's uint64."""
    numpy = pytest.importorskip("numpy")
    numbers = numpy.arange(3000, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    wanted = torch.from_numpy(mix(mix(numbers)).view(numpy.int64) | 1)
    assert torch.equal(dropout._first_keys(3000), wanted)
