"""The child process of `legacy_pickle`: reads a pickle from stdin and writes its bytes and an index. Stdlib only.

`legacy_pickle_machine` interprets the pickle and calls nothing for it. If this fails, an audit hook and process limits
still protect the system.
"""

from __future__ import annotations

import codecs
import io
import json
import mmap
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from typing import IO, Any, NoReturn

from manyheads.extras.peers.legacy_pickle_machine import (
    ALLOWED_IN_CORPUS,
    MOST_PICKLE_BYTES,
    Machine,
    RefusedError,
    Stub,
    View,
)

_MOST_SYMBOLS = 4_000_000
_MOST_OPCODES = 64_000_000


def read_corpus(data: mmap.mmap) -> dict[str, Any]:
    """Read the vocabulary and the held-out text in a `cache.pkl` of Transformer-XL, of Python 2 or 3.

    Its `Corpus` holds a `Vocab` and the splits as arrays of ids. Python 2 wrote words as UTF-8 byte strings.

    Returns: `dataset`, `symbols` by id, `lower_case`, `unk_idx`, and the ids of `valid` and `test`; a missing one is
    None.

    Raises: RefusedError: it is not such a file, or its content is not of the expected types.
    """
    if data[:1] != b"\x80":
        raise RefusedError("it is not a pickle of protocol 2 or later, as the original code writes")
    machine = Machine(ALLOWED_IN_CORPUS, keeps_bytes=True, most_opcodes=_MOST_OPCODES, most_bytes=len(data))
    root = machine.run(data)
    corpus = _attributes(root, "a corpus")
    vocabulary = _attributes(corpus.get("vocab"), "a vocabulary")
    symbols = vocabulary.get("idx2sym")
    if type(symbols) is not list or not 0 < len(symbols) <= _MOST_SYMBOLS:
        raise RefusedError(f"its idx2sym is not a list of 1 to {_MOST_SYMBOLS:,} words")
    unknown = vocabulary.get("unk_idx")
    return {
        "dataset": _text(corpus.get("dataset")),
        "symbols": [_text(symbol) for symbol in symbols],
        "lower_case": vocabulary.get("lower_case") is True,
        "unk_idx": unknown if type(unknown) is int else None,
        **{name: _ids(corpus.get(name), name, len(symbols)) for name in ("valid", "test")},
    }


def _attributes(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, Stub):
        raise RefusedError(f"it holds no {what.removeprefix('a ')} of Transformer-XL")
    return {_text(name): item for name, item in value.attributes.items()}


def _text(value: Any) -> str:
    """Return text; the byte strings of Python 2 hold UTF-8."""
    if type(value) is bytes:
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise RefusedError(f"{value[:40]!a} is not UTF-8") from None
    if type(value) is not str:
        raise RefusedError(f"a name or a word in it is a {type(value).__name__}, not text")
    return value


def _ids(array: Any, name: str, vocab_size: int) -> list[int] | None:
    """Return the ids of a split. Its array's state is (version, shape, dtype, is column-major, bytes)."""
    if array is None:
        return None
    state = array.state if isinstance(array, Stub) else None
    if type(state) is not tuple or len(state) != 5 or type(state[4]) is not bytes or not isinstance(state[2], Stub):
        raise RefusedError(f"its {name} is not an array of ids")
    dtype = state[2]
    code = dtype.arguments[0] if dtype.arguments else None
    code = _text(code) if type(code) in (str, bytes) else ""
    order = dtype.state[1] if type(dtype.state) is tuple and len(dtype.state) > 1 else None
    if code not in ("i8", "i4") or order not in ("<", b"<"):
        raise RefusedError(f"its {name} is not an array of little-endian whole numbers")
    if len(state[4]) % int(code[1]) or state[1] != (len(state[4]) // int(code[1]),):
        raise RefusedError(f"its {name} has not the length that it states")
    items = memoryview(state[4])
    ids = (items.cast("q") if code == "i8" else items.cast("i")).tolist()
    if any(not 0 <= index < vocab_size for index in ids):
        raise RefusedError(f"its {name} has an id outside the vocabulary of {vocab_size:,} words")
    return ids


INDEX = "index.json"
BYTES = "storages.safetensors"
REFUSED = 3
VIOLATION = 4
_MOST_TENSORS = 200_000
_MOST_NODES = 1_000_000
_MOST_DEPTH = 64
_MOST_NAME = 1_000
_CHUNK_BYTES = 1 << 20
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001

_MOST_SETTINGS = 50_000
_MOST_ITEMS = 1_000

Contents = tuple[
    dict[str, View], dict[str, dict[str, Any]], dict[str, tuple[int, int]], Callable[[str], Iterator[bytes]]
]
"""Tensors, settings and options, (items, bytes) of each storage, and how to read one in chunks."""


def find_tensors(root: Any) -> dict[str, View]:
    """Return the state dict: under a usual key, of a whole module, or of all nested tensors with dotted names."""
    if isinstance(root, dict):
        for key in ("state_dict", "model_state_dict", "model_state", "model"):
            inner = root.get(key)
            found = _tensors(inner) if isinstance(inner, dict | Stub) else {}
            if found and isinstance(root.get("generator"), dict):  # OpenNMT-py stores the output layer beside the model
                found |= _tensors({"generator": root["generator"]})
            if found:
                return found
    return _tensors(root)


def _tensors(root: Any) -> dict[str, View]:
    found: dict[str, View] = {}
    for path, value in _walk(root):
        if isinstance(value, View):
            name = _name(path)
            if name in found or len(found) >= _MOST_TENSORS:
                raise RefusedError(f"it holds two tensors named {name[:100]!a}, or more than {_MOST_TENSORS:,} tensors")
            found[name] = value
    return found


def find_settings(root: Any) -> dict[str, Any]:
    """Return numbers, booleans, None and flat lists of them from a module that was saved whole, and from its
    submodules.

    They describe how the module was built, which such a file does not record anywhere else.
    """
    found: dict[str, Any] = {}
    for path, value in _walk(root) if isinstance(root, Stub) else ():
        for name, item in value.attributes.items() if isinstance(value, Stub) else ():
            if type(name) is str and not name.startswith("_") and _is_plain(item):
                found[_name((*path, name))] = item
        if len(found) > _MOST_SETTINGS:
            raise RefusedError(f"its modules have more than {_MOST_SETTINGS:,} settings")
    return found


def _facts(root: Any) -> dict[str, dict[str, Any]]:
    return {"settings": find_settings(root), "options": find_options(root)}


def find_options(root: Any) -> dict[str, Any]:
    """Return numbers, booleans, None, short texts and flat lists of them from the options that a training script saved
    under `args`, `cfg`, `opt` or `model_args`, by dotted names.
    """
    found: dict[str, Any] = {}
    for key in ("args", "cfg", "opt", "model_args") if isinstance(root, dict) else ():
        waiting: list[tuple[tuple[Any, ...], Any]] = [((key,), root.get(key))]
        while waiting and len(found) <= _MOST_SETTINGS:
            path, value = waiting.pop()
            inner = value.attributes if isinstance(value, Stub) else value
            if isinstance(inner, dict) and len(path) <= _MOST_DEPTH:
                waiting += [((*path, name), item) for name, item in inner.items() if type(name) is str]
            elif len(path) > 1 and (_is_plain(value) or (type(value) is str and len(value) <= _MOST_NAME)):
                found[_name(path)] = value
    if len(found) > _MOST_SETTINGS:
        raise RefusedError(f"it has more than {_MOST_SETTINGS:,} options")
    return found


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return len(value) <= _MOST_ITEMS and all(_is_scalar(item) for item in value)
    return _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    if type(value) is int:
        return abs(value) < 1 << 63
    return type(value) in (bool, type(None)) or (type(value) is float and abs(value) < 1e300)


def _walk(root: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield everything that `_children` reaches, with the keys that lead to it."""
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), root)]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        path, value = waiting.pop()
        yield path, value
        if isinstance(value, View):
            continue
        if len(path) > _MOST_DEPTH:
            raise RefusedError(f"its contents are nested more than {_MOST_DEPTH} deep")
        if len(waiting) > _MOST_NODES:
            break
        waiting += [((*path, key), item) for key, item in reversed(_children(value))]
    raise RefusedError(f"it holds more than {_MOST_NODES:,} objects")


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if not isinstance(value, Stub):
        return []
    parts = [value.attributes.get(name) for name in ("_parameters", "_buffers", "_modules")]
    left_out = value.attributes.get("_non_persistent_buffers_set")
    hidden = left_out if isinstance(left_out, list) else []
    return [
        (key, item)
        for part in parts
        if isinstance(part, dict)
        for key, item in part.items()
        if not (part is parts[1] and key in hidden)
    ]


def _name(path: tuple[Any, ...]) -> str:
    if not all(type(part) in (str, int) for part in path):
        raise RefusedError("a tensor lies under a key that is neither text nor a whole number")
    name = ".".join(map(str, path)) or "tensor"
    if len(name) > _MOST_NAME or not name.isprintable():
        raise RefusedError(f"a tensor's name is longer than {_MOST_NAME} characters, or not printable: {name[:100]!a}")
    return name


def read_zip(file: IO[bytes], size: int) -> Contents:
    """Read the format of torch 1.6 and later."""
    archive = zipfile.ZipFile(file)
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
        raise RefusedError(
            "it is a compressed zip file; torch never compresses, and such a file may unpack without end"
        )
    if sum(entry.file_size for entry in entries) > size:
        raise RefusedError("the parts of the zip file overlap")
    found = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
    if len(found) != 1:
        raise RefusedError(f"it is a zip file with {len(found)} files data.pkl, where a file of torch has one")
    prefix = found[0].removesuffix("data.pkl")
    if prefix + "constants.pkl" in archive.NameToInfo:
        raise RefusedError("it is TorchScript, which is a program; only weights are read")
    if prefix + "byteorder" in archive.NameToInfo and archive.read(prefix + "byteorder") != b"little":
        raise RefusedError("its numbers are big-endian")
    if archive.getinfo(found[0]).file_size > MOST_PICKLE_BYTES:
        raise RefusedError(f"its pickle has more than {MOST_PICKLE_BYTES:,} bytes")
    machine = Machine()
    root = machine.run(io.BytesIO(archive.read(found[0])))
    for key, (_, num_bytes) in machine.storages.items():
        entry = archive.NameToInfo.get(f"{prefix}data/{key}")
        if entry is None or entry.file_size != num_bytes:
            raise RefusedError(f"storage {key} is missing, or not {num_bytes:,} bytes long as its tensors need")

    def chunks(key: str) -> Iterator[bytes]:
        with archive.open(f"{prefix}data/{key}") as part:
            while chunk := part.read(_CHUNK_BYTES):
                yield chunk

    return find_tensors(root), _facts(root), machine.storages, chunks


def read_legacy(data: mmap.mmap) -> Contents:
    """Read the format before torch 1.6: magic, version, machine, the pickle, the storages' keys, then count and bytes
    of each.
    """
    machine = Machine()
    if machine.run(data) != _LEGACY_MAGIC or machine.run(data) != _LEGACY_PROTOCOL:
        raise RefusedError("it is a pickle, but not one that torch.save wrote")
    system = machine.run(data)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise RefusedError("its numbers are big-endian")
    root, keys = machine.run(data), machine.run(data)
    places: dict[str, int] = {}
    for key in map(str, keys if isinstance(keys, list) else []):
        numel, num_bytes = machine.storages.get(key, (-1, 0))
        count = int.from_bytes(data.read(8), "little")
        place = data.tell()
        if count != numel:
            raise RefusedError(f"storage {key} has {count:,} items, but its tensors need {numel:,}")
        if place + num_bytes > len(data):
            raise RefusedError(f"it ends within storage {key}")
        places[key] = place
        data.seek(place + num_bytes)
    if places.keys() != machine.storages.keys():
        raise RefusedError("storages are missing")

    def chunks(key: str) -> Iterator[bytes]:
        start, end = places[key], places[key] + machine.storages[key][1]
        for begin in range(start, end, _CHUNK_BYTES):
            yield data[begin : min(begin + _CHUNK_BYTES, end)]

    return find_tensors(root), _facts(root), machine.storages, chunks


def write(
    folder: str,
    tensors: dict[str, View],
    facts: dict[str, dict[str, Any]],
    storages: dict[str, tuple[int, int]],
    chunks: Callable[[str], Iterator[bytes]],
) -> None:
    """Write every storage that a tensor needs as a row of bytes in a safetensors file; views and facts as JSON."""
    header, end = {}, 0
    for key in dict.fromkeys(view.key for view in tensors.values()):
        begin, end = end, end + storages[key][1]
        header[key] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, BYTES), "wb") as out:  # noqa: PTH118, PTH123 - the audit hook knows this very text
        out.write(len(text).to_bytes(8, "little") + text)
        for key in header:
            for chunk in chunks(key):
                out.write(chunk)
    views = [[name, v.key, v.dtype, v.offset, v.size, v.stride] for name, v in tensors.items()]
    write_index(folder, {"tensors": views, **facts})


def write_index(folder: str, index: dict[str, Any]) -> None:
    """Write the index as JSON."""
    with open(os.path.join(folder, INDEX), "wb") as out:  # noqa: PTH118, PTH123 - the same
        out.write(json.dumps(index).encode("ascii"))


def limit_process(size: int, *, is_corpus: bool = False) -> None:
    """Limit memory, time, files and processes if the platform supports it.

    A corpus is one pickle with large strings, each of which is copied three times when it is decoded.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    limits = {
        "RLIMIT_AS": (4 << 30) + 5 * size if is_corpus else (1 << 30) + 2 * size,
        "RLIMIT_CPU": (600 if is_corpus else 60) + size // (20 << 20),
        "RLIMIT_FSIZE": size + (64 << 20),
        "RLIMIT_NOFILE": 16,
        "RLIMIT_NPROC": 0,
        "RLIMIT_CORE": 0,
    }
    for name, value in limits.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            try:
                resource.setrlimit(kind, (value, value))
            except (ValueError, OSError):
                continue  # the existing limit is lower, or the platform does not have this limit


def forbid(folder: str) -> None:
    """After this call the process ends at once if it imports, executes, connects or opens anything except its two
    files.
    """
    mine = {os.path.join(folder, name) for name in (BYTES, INDEX)}  # noqa: PTH118 - text, as open gets it
    harmless = frozenset(("mmap.__new__", "cpython._PySys_ClearAuditHooks"))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in harmless or (event == "open" and arguments[0] in mine):
            return
        _end(VIOLATION, f"it made its reader try {event} {ascii(arguments)[:200]}")

    sys.addaudithook(hook)


def _end(code: int, message: str) -> NoReturn:
    os.write(2, message.encode("ascii", "backslashreplace")[:2000])
    os._exit(code)


def main(folder: str, kind: str = "tensors") -> NoReturn:
    """Read stdin and write into `folder`; exit code 0, REFUSED or VIOLATION, with the reason on stderr.

    Args: kind: `tensors`, a file of torch.save; or `corpus`, the cache.pkl of Transformer-XL.
    """
    for encoding in ("latin-1", "raw-unicode-escape", "cp437"):
        codecs.lookup(encoding)  # imports the codec now, because later imports are forbidden
    file = sys.stdin.buffer
    size = os.fstat(0).st_size
    limit_process(size, is_corpus=kind == "corpus")
    forbid(folder)
    try:
        data = mmap.mmap(0, size, access=mmap.ACCESS_READ)
        if kind == "corpus":
            write_index(folder, read_corpus(data))
            os._exit(0)
        if data[:4] == b"PK\x03\x04":
            read = read_zip(file, size)
        elif data[257:262] == b"ustar":
            raise RefusedError("it is in the format before torch 0.1.10; load and save it again with torch 1.x")
        elif data[:1] != b"\x80":
            raise RefusedError("torch.save did not write it")
        else:
            read = read_legacy(data)
        if not read[0]:
            raise RefusedError("it holds no tensor")
        write(folder, *read)
    except RefusedError as reason:
        _end(REFUSED, str(reason))
    except MemoryError:
        _end(REFUSED, "reading it takes more memory than a file of its size should need")
    except Exception as error:
        _end(REFUSED, f"it is damaged ({type(error).__name__}: {error})")
    os._exit(0)
