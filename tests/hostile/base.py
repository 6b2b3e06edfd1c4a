"""The honest things that artefacts are made of: a small run, its model, its data, two texts."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyheads.files.verify import make_manifest

__all__ = ["Base", "Call", "edit_json", "make_base", "reseal", "reseal_data"]

Call = list[str]
"""The arguments of `manyheads`; or `python`, a function of `child`, and its argument."""

CONFIG = """
seed: 1
num_threads: 1
device: cpu
data: {path: copy-task, num_train_pairs: 60, max_tokens: 256, max_source_len: 16, max_target_len: 16}
tokenizer: {kind: word, vocab_size: 32}
model: {d_model: 16, num_heads: 2, d_ff: 32, num_encoder_layers: 1, num_decoder_layers: 1}
schedule: {kind: constant, warmup_steps: 1}
training: {max_steps: 4, log_every: 2, save_every: 2, keep: 2, plots: false, tensorboard: false, ema_decay: 0.0}
validation: {every_steps: 4, bleu_sentences: 0}
decoding: {num_beams: 1, max_len_offset: 5}
"""


@dataclass(frozen=True)
class Base:
    """Paths. Artefacts copy what they change.

    run: a finished run; model: its model; data: its prepared data; config: its settings as YAML; source, target: texts;
    marian: a model as transformers saves it.
    """

    run: Path
    model: Path
    data: Path
    config: Path
    source: Path
    target: Path
    marian: Path

    def copy_model(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.model, folder / "model"))

    def copy_run(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.run, folder / "run", symlinks=True))

    def copy_marian(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.marian, folder / "marian"))

    def copy_data(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.data, folder / "data"))

    def uses_of_model(self, model: Path) -> list[Call]:
        """Every way to read a model's folder."""
        path, source, target = str(model), str(self.source), str(self.target)
        return [
            ["translate", path, source, "--device", "cpu"],
            ["python", "load", path],
            ["python", "from_pretrained", path],
            ["score", path, "--source", source, "--target", target, "--device", "cpu"],
            ["evaluate", path, "--source", source, "--reference", target, "--device", "cpu"],
        ]

    def uses_of_run(self, run: Path) -> list[Call]:
        """Every way to read a run's checkpoints."""
        newest = run / "checkpoints" / "step-00000004"
        averaged = str(run.parent / "averaged")
        train = ["train", "--config", str(self.config), "--training.max-steps", "6", "--data.path", str(self.data)]
        return [
            [*train, "--resume", str(newest), "--run-dir", str(run.parent / "fresh")],
            ["average", str(run), "--last", "2", "--output", averaged],
        ]

    def uses_of_data(self, data: Path) -> list[Call]:
        """Every way to read prepared data."""
        fresh = str(data.parent / "fresh")
        return [
            ["train", "--config", str(self.config), "--data.path", str(data), "--run-dir", fresh],
            ["evaluate", str(self.model), "--data", str(data), "--device", "cpu"],
            ["info", str(data), "--verify"],
        ]


def make_base(folder: Path, run: Callable[[Call], int]) -> Base:
    """Train for four steps. run: calls the program."""
    folder.mkdir(parents=True)
    config, source, target = folder / "config.yaml", folder / "source.txt", folder / "target.txt"
    config.write_text(CONFIG, encoding="utf-8")
    code = run(["train", "--config", str(config), "--run-dir", str(folder / "run"), "-q"])
    if code != 0:
        raise RuntimeError(f"the honest run ended with {code}")
    (data,) = (folder / "run" / "data").iterdir()
    pairs = (data / "valid.source.txt").read_text(encoding="utf-8").split("\n")[:2]
    source.write_text("\n".join(pairs) + "\n", encoding="utf-8")
    target.write_text("\n".join(pairs) + "\n", encoding="utf-8")
    marian = make_marian(folder / "marian")
    base = Base(folder / "run", folder / "run" / "model", folder / "data", config, source, target, marian)
    data.rename(base.data)
    return base


def make_marian(folder: Path) -> Path:
    """A small MarianMTModel's folder, without a tokenizer."""
    from safetensors.torch import save_file

    from manyheads.catalogue import build_model
    from manyheads.extras.peers import PEERS
    from manyheads.models.transformer.config import TransformerConfig

    sizes = {"source_vocab_size": 20, "target_vocab_size": 20, "d_model": 16, "num_heads": 2, "d_ff": 32}
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    described, weights = PEERS["transformers/Marian"].to_peer(
        build_model(TransformerConfig(**sizes, **layers, positions="sinusoidal_halves", head_bias=True))
    )
    folder.mkdir()
    ids = {"pad_token_id": 19, "eos_token_id": 0, "decoder_start_token_id": 19, "forced_eos_token_id": 0}
    config = {"model_type": "marian", **described["model"], **ids}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors")
    return folder


def reseal(folder: Path, **entries: Any) -> Path:
    """Write the manifest anew, as an attacker would; `entries` are added as they are. Returns: the folder."""
    manifest = folder / "manifest.json"
    manifest.unlink(missing_ok=True)
    content = json.loads(make_manifest(folder))
    content["files"].update(entries)
    manifest.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return folder


def reseal_data(data: Path) -> Path:
    """The same for prepared data: the stores' manifests, then the whole's."""
    from manyheads.data.preparing import file_record, write_manifest

    for place in (*(path for path in data.iterdir() if path.is_dir()), data):
        manifest = json.loads((place / "manifest.json").read_text(encoding="utf-8"))
        manifest["files"] = {name: file_record(place / name) for name in manifest["files"]}
        write_manifest(place, manifest)
    return data


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; numbers that JSON has no word for are written as Python does."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content.update(changes)
    path.write_text(json.dumps(content), encoding="utf-8")
