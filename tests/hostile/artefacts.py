"""Every hostile artefact: how it is made, and the calls that it is offered to."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hostile import files, folders, peers
from hostile.base import Base, Call, reseal
from hostile.pickles import PICKLES, as_legacy, as_zip

__all__ = ["ARTEFACTS", "Artefact"]

Make = Callable[[Base, Path, Path], list[Call]]


@dataclass(frozen=True)
class Artefact:
    """make: writes it into a folder and gives the calls it is offered to; the third argument is the canary's path.

    slow: it takes seconds to make, and is left to the long check.
    """

    name: str
    make: Make
    slow: bool = False


NAMES = ("pytorch_model.bin", "model.pt", "model.ckpt", "model.pth")


def _pickled(number: int, payload: str) -> Make:
    """One payload, under a name and in a format that change from payload to payload, wherever such a file is taken."""

    def make(base: Base, folder: Path, canary: Path) -> list[Call]:
        pack = (bytes, as_zip, as_legacy)[number % 3]
        content = pack(PICKLES[payload](canary))
        model = base.copy_model(folder)
        (model / "model.safetensors").unlink()
        reseal(model)
        name = model / NAMES[number % len(NAMES)]
        name.write_bytes(content)
        disguised = base.copy_model(folder / "disguised")
        (disguised / "model.safetensors").write_bytes(content)
        reseal(disguised)
        return [
            ["python", "read_tensors", str(name)],
            *base.uses_of_model(model),
            *base.uses_of_model(disguised),
            ["translate", str(name), str(base.source)],
            ["info", str(name)],
            ["train", "--config", str(name)],
            ["train", "--config", str(base.config), "--resume", str(name), "--run-dir", str(folder / "fresh")],
            ["convert", "--from-pickle", str(name), "--output", str(folder / "converted")],
        ]

    return make


ARTEFACTS: list[Artefact] = [
    *(Artefact(f"pickle: {name}", _pickled(number, name)) for number, name in enumerate(PICKLES)),
    *(Artefact(f"{kind}: {name}", make, "1,100,000" in name) for kind, name, make in folders.FOLDERS),
    *(Artefact(f"{kind}: {name}", make) for kind, name, make in files.FILES),
    *(Artefact(f"{kind}: {name}", make) for kind, name, make in peers.PEERS),
]
