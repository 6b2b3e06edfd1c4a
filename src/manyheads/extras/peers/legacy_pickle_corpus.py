"""The vocabulary and the held-out text in a `cache.pkl` of Transformer-XL, of Python 2 or 3. Stdlib only.

Its `Corpus` holds a `Vocab` and the splits as arrays of ids. Python 2 wrote words as UTF-8 byte strings. The child
process of `legacy_pickle` runs this.
"""

from __future__ import annotations

import mmap
from typing import Any

from manyheads.extras.peers.legacy_pickle_globals import ALLOWED_IN_CORPUS, RefusedError, Stub
from manyheads.extras.peers.legacy_pickle_machine import Machine

__all__ = ["read_corpus"]

_MOST_SYMBOLS = 4_000_000
_MOST_OPCODES = 64_000_000


def read_corpus(data: mmap.mmap) -> dict[str, Any]:
    """Return `dataset`, `symbols` by id, `lower_case`, `unk_idx`, and the ids of `valid` and `test`; a missing one is
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
