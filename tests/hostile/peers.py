"""Other implementations' models, hostile: what `convert` may be given."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.base import Base, Call, edit_json
from hostile.pickles import PICKLES, as_zip

__all__ = ["PEERS"]

Make = Callable[[Base, Path, Path], list[Call]]


def _converted(model: Path, *options: str) -> list[Call]:
    return [["convert", str(model), *options, "--output", str(model.parent / "converted")]]


def _marian(change: Callable[[Path], object]) -> Make:
    """A Marian model with a change."""

    def make(base: Base, folder: Path, canary: Path) -> list[Call]:
        model = base.copy_marian(folder)
        change(model)
        return _converted(model)

    return make


def _config(**changes: Any) -> Make:
    return _marian(lambda model: edit_json(model / "config.json", **changes))


def _generation(**changes: Any) -> Make:
    text = json.dumps(changes)
    return _marian(lambda model: (model / "generation_config.json").write_text(text, encoding="utf-8"))


def _pickled(payload: str) -> Make:
    def make(base: Base, folder: Path, canary: Path) -> list[Call]:
        model = base.copy_marian(folder)
        (model / "model.safetensors").unlink()
        (model / "pytorch_model.bin").write_bytes(as_zip(PICKLES[payload](canary)))
        return [*_converted(model, "--from-pickle"), *_converted(model)]

    return make


def _annotated(**changes: Any) -> Make:
    """The Annotated Transformer's options with a change, over weights of another model."""

    def make(base: Base, folder: Path, canary: Path) -> list[Call]:
        model = base.copy_marian(folder)
        options = {
            "src_vocab": 20,
            "tgt_vocab": 20,
            "N": 1,
            "d_model": 16,
            "d_ff": 32,
            "h": 2,
            "dropout": 0.1,
        } | changes
        (model / "config.json").write_text(json.dumps({"model": options, "pad": 0}), encoding="utf-8")
        return _converted(model)

    return make


def _replaced(name: str, put: Callable[[Path], object]) -> Make:
    def change(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        put(model / name)

    return _marian(change)


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


PEERS: list[tuple[str, str, Make]] = [
    *(
        ("Marian", f"pickle: {name}", _pickled(name))
        for name in ("global-os-system", "opcode-NEWOBJ_EX", "dotted-name")
    ),
    ("Marian", "10^12 layers", _config(decoder_layers=10**12)),
    ("Marian", "d_model 10^9", _config(d_model=10**9)),
    ("Marian", "10^12 words", _config(vocab_size=10**12)),
    ("Marian", "a negative width", _config(encoder_ffn_dim=-1)),
    ("Marian", "text for a number", _config(d_model="16; import os")),
    ("Marian", "a list for a number", _config(encoder_layers=[1])),
    ("Marian", "a list for a name", _config(activation_function=["gelu"])),
    ("Marian", "NaN", _config(dropout=float("nan"))),
    ("Marian", "an id that is an object", _config(pad_token_id={"a": 1})),
    ("Marian", "an id of 10^30", _config(eos_token_id=10**30)),
    ("Marian", "nested config", _marian(lambda model: (model / "config.json").write_text("[" * 10**5))),
    ("Marian", "a config of 100 MB", _marian(lambda model: os.truncate(model / "config.json", 100 << 20))),
    ("Marian", "config as a FIFO", _replaced("config.json", os.mkfifo)),
    ("Marian", "config as /dev/zero", _replaced("config.json", _zeros)),
    ("Marian", "weights as a FIFO", _replaced("model.safetensors", os.mkfifo)),
    ("Marian", "weights as /dev/zero", _replaced("model.safetensors", _zeros)),
    ("Marian", "a code path", _config(auto_map={"AutoModel": "x.Y"}, model_type="evil")),
    ("Marian", "10^9 beams", _generation(num_beams=10**9)),
    ("Marian", "text for beams", _generation(num_beams="four")),
    ("Marian", "10^15 new tokens", _generation(max_length=10**15)),
    ("Marian", "nested generation", _replaced("generation_config.json", lambda path: path.write_text("[" * 10**5))),
    ("Annotated Transformer", "10^12 layers", _annotated(N=10**12)),
    ("Annotated Transformer", "d_model 10^9", _annotated(d_model=10**9)),
    ("Annotated Transformer", "text for a number", _annotated(h="two")),
]
