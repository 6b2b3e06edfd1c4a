"""Single hostile files: settings in YAML, texts, archives."""

import gzip
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from hostile.base import Base, Call

__all__ = ["FILES"]

Make = Callable[[Base, Path, Path], list[Call]]


def _yaml(text: str) -> Make:
    """Settings; `CANARY` in the text becomes its path."""

    def make(base: Base, folder: Path, canary: Path) -> list[Call]:
        path = folder / "config.yaml"
        path.write_text(text.replace("CANARY", str(canary)), encoding="utf-8")
        run = base.copy_run(folder)
        (run / "config.yaml").write_bytes(path.read_bytes())
        return [
            ["train", "--config", str(path), "--run-dir", str(folder / "fresh")],
            ["info", str(run)],
            ["evaluate", str(run), "--device", "cpu"],
        ]

    return make


def _laughs() -> str:
    """Each line is ten times the one before it."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    return "\n".join(lines)


def _text(write: Callable[[Path], object]) -> Make:
    """A text that bursts; wherever text is read."""

    def make(base: Base, folder: Path, canary: Path) -> list[Call]:
        path = folder / "text.en"
        write(path)
        model, prepared = str(base.model), str(folder / "prepared")
        pairs = ["--target", str(base.target), "--tokenizer", model, "--valid-count", "0", "--output", prepared]
        return [
            ["translate", model, str(path), "--device", "cpu"],
            ["score", model, "--source", str(path), "--target", str(base.target), "--device", "cpu"],
            ["evaluate", model, "--source", str(path), "--reference", str(base.target), "--device", "cpu"],
            ["prepare", "--source", str(path), *pairs],
        ]

    return make


def _gzip_bomb(path: Path) -> None:
    """One line of 200 MB in 200 kB, and such a file once more within."""
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(200):
            file.write(bytes(1 << 20))


def _archive(write: Callable[[Path], object]) -> Make:
    """A zip file that pretends to be weights."""

    def make(base: Base, folder: Path, canary: Path) -> list[Call]:
        path = folder / "model.pt"
        write(path)
        return [
            ["python", "read_tensors", str(path)],
            ["translate", str(path), str(base.source)],
            ["translate", str(base.model), str(path), "--device", "cpu"],
            ["convert", "--from-pickle", str(path), "--output", str(folder / "converted")],
        ]

    return make


def _zip_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        with archive.open("archive/data/0", "w", force_zip64=True) as file:
            for _ in range(300):
                file.write(bytes(1 << 20))


def _overlapping_zip(path: Path) -> None:
    """Fifield's bomb: many names for the same bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.writestr("archive/data/0", bytes(1 << 20))
        first = archive.getinfo("archive/data/0")
        for number in range(1, 2000):
            copy = zipfile.ZipInfo(f"archive/data/{number}")
            copy.header_offset, copy.file_size = first.header_offset, first.file_size
            copy.compress_size, copy.CRC = first.compress_size, first.CRC
            archive.filelist.append(copy)
            archive.NameToInfo[copy.filename] = copy


def _climbing_zip(path: Path) -> None:
    """Names that lead out of the folder that they would be unpacked into."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../../../tmp/climbed/data.pkl", b"\x80\x02}.")
        archive.writestr("/etc/cron.d/climbed", b"* * * * * root true\n")


def _torch_script(path: Path) -> None:
    content = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, content)
    with zipfile.ZipFile(io.BytesIO(content.getvalue())) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
        prefix = source.namelist()[0].partition("/")[0]
        target.writestr(f"{prefix}/constants.pkl", b"\x80\x02).")
        target.writestr(f"{prefix}/code/__torch__.py", b"class Evil(Module):\n  pass\n")


FILES: list[tuple[str, str, Make]] = [
    ("YAML", "object/apply:os.system", _yaml("seed: !!python/object/apply:os.system ['echo run >> CANARY']\n")),
    ("YAML", "object/new:subprocess.Popen", _yaml("data: !!python/object/new:subprocess.Popen [[touch, CANARY]]\n")),
    ("YAML", "a name and a module", _yaml("seed: !!python/name:os.system\nmodel: !!python/module:pty\n")),
    ("YAML", "a billion laughs", _yaml(_laughs())),
    ("YAML", "laughs under a setting", _yaml(_laughs().replace("a0:", "seed: 1\na0:") + "\nmodel: *a11\n")),
    ("YAML", "nested 100,000 deep", _yaml("seed: " + "[" * 100_000)),
    ("YAML", "a number of 10,000 digits", _yaml("seed: " + "9" * 10_000)),
    ("YAML", "merge keys", _yaml("a: &a {x: 1}\n" + "".join(f"b{n}: &b{n} {{<<: [*a]}}\n" for n in range(2000)))),
    ("YAML", "an alias to itself", _yaml("model: &m\n  attention: *m\n")),
    ("text", "a gzip bomb of one line", _text(_gzip_bomb)),
    ("text", "zeros without end, as a link to /dev/zero", _text(lambda path: path.symlink_to("/dev/zero"))),
    ("archive", "zip bomb", _archive(_zip_bomb)),
    ("archive", "overlapping zip", _archive(_overlapping_zip)),
    ("archive", "names that climb", _archive(_climbing_zip)),
    ("archive", "TorchScript", _archive(_torch_script)),
]
