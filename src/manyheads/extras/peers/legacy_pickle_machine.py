"""The stack machine that executes a pickle program, with an allow-list of opcodes and globals. Stdlib only."""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import Any

from manyheads.extras.peers.legacy_pickle_globals import (
    ALLOWED,
    ITEM_BYTES,
    RefusedError,
    Storage,
    StorageType,
    Stub,
    View,
    as_ints,
    call,
    checked_key,
)

__all__ = ["MOST_PICKLE_BYTES", "Machine"]

MOST_PICKLE_BYTES = 64 << 20
_MOST_OPCODES = 5_000_000


class Machine:
    """Executes one pickle.

    Args:
        allowed: every global that the pickle may name.
        keeps_bytes: whether the strings of Python 2 stay bytes; otherwise they are decoded as Latin-1.
        most_opcodes, most_bytes: limits of its length.

    Attributes:
        storages: the storages named so far: key -> (items, bytes).
    """

    def __init__(
        self,
        allowed: Mapping[tuple[str, str], Any] = ALLOWED,
        *,
        keeps_bytes: bool = False,
        most_opcodes: int = _MOST_OPCODES,
        most_bytes: int = MOST_PICKLE_BYTES,
    ) -> None:
        self.storages: dict[str, tuple[int, int]] = {}
        self._allowed, self._keeps_bytes = allowed, keeps_bytes
        self._most_opcodes, self._most_bytes = most_opcodes, most_bytes

    def run(self, file: Any) -> Any:
        """Return the value of a pickle. file: with read, readline and tell; its position is then directly after the
        pickle.

        Raises: RefusedError: an opcode or a global is not allowed, or values are invalid.
        """
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        start = file.tell()
        for count, (opcode, argument, position) in enumerate(pickletools.genops(file)):
            if count > self._most_opcodes or (position or 0) - start > self._most_bytes:
                raise RefusedError(
                    f"its pickle has more than {self._most_opcodes:,} opcodes or {self._most_bytes:,} bytes"
                )
            if opcode.name == "STOP":
                return self._stack.pop()
            self._step(opcode.name, argument)
        raise RefusedError("its pickle does not end")

    def _step(self, name: str, argument: Any) -> None:
        operation = _OPERATIONS.get(name)
        if operation is None:
            raise RefusedError(f"its pickle uses the opcode {name}, which no file of tensors needs")
        operation(self, argument)

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _push_string(self, value: str) -> None:
        """Push a string of Python 2, which pickletools decoded as Latin-1."""
        self._stack.append(value.encode("latin-1") if self._keeps_bytes else value)

    def _put(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _mark(self, _: Any) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _pop(self, _: Any) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._since_mark()

    def _take(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise RefusedError("its pickle takes more from the stack than there is")
        items = self._stack[-count:]
        del self._stack[-count:]
        return items

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise RefusedError("it appends to something that is not a list")
        self._stack[-1].extend(items)

    def _pop_mark(self, _: Any) -> None:
        self._since_mark()

    def _dict(self, _: Any) -> None:
        items = self._since_mark()
        self._stack.append({})
        self._set_items(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict:
            raise RefusedError("it sets items of something that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[checked_key(key)] = value

    def _find(self, module: Any, name: Any) -> None:
        found = self._allowed.get((module, name)) if type(module) is str and type(name) is str else None
        if found is None:
            raise RefusedError(f"it asks for the global {module}.{name}, which no file of tensors needs")
        self._stack.append(found)

    def _build(self, _: Any) -> None:
        (state,) = self._take(1)
        target = self._stack[-1]
        if isinstance(target, Stub):
            target.state = state
            for part in state if type(state) is tuple else (state,):
                target.attributes |= part if type(part) is dict else {}
        elif not isinstance(target, dict | View):  # attributes of a dict or a tensor are not needed
            raise RefusedError(f"it sets the state of a {type(target).__name__}")

    def _persistent(self, _: Any) -> None:
        (wanted,) = self._take(1)
        if type(wanted) is not tuple or len(wanted) < 2:
            raise RefusedError("it refers to something that is not a storage")
        if wanted[0] == "module":  # the old format wraps a class, to keep its source text
            self._stack.append(wanted[1])
            return
        if wanted[0] != "storage" or len(wanted) not in (5, 6):
            raise RefusedError("it refers to something that is not a storage")
        kind, key, _device, numel = wanted[1:5]
        if not isinstance(kind, StorageType) or type(key) not in (str, int) or type(numel) is not int or numel < 0:
            raise RefusedError("it refers to an invalid storage")
        size = (numel, numel * ITEM_BYTES[kind.dtype or "uint8"])
        if self.storages.setdefault(str(key), size) != size:
            raise RefusedError(f"storage {key} has two sizes")
        part = wanted[5] if len(wanted) == 6 and wanted[5] is not None else (None, 0, numel)
        _, offset, part_numel = part if type(part) is tuple and len(part) == 3 else (None, -1, -1)
        if min(as_ints((offset, part_numel))) < 0 or offset + part_numel > numel:
            raise RefusedError(f"a part of storage {key} reaches beyond it")
        self._stack.append(Storage(str(key), kind.dtype, offset, part_numel))


_SCALARS = (
    *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
)
_OPERATIONS: dict[str, Callable[[Machine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    **dict.fromkeys(_SCALARS, Machine._push),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), Machine._push_string),
    "NONE": lambda machine, _: machine._push(None),
    "NEWTRUE": lambda machine, _: machine._push(True),
    "NEWFALSE": lambda machine, _: machine._push(False),
    "EMPTY_DICT": lambda machine, _: machine._push({}),
    "EMPTY_LIST": lambda machine, _: machine._push([]),
    "EMPTY_SET": lambda machine, _: machine._push([]),
    "EMPTY_TUPLE": lambda machine, _: machine._push(()),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), Machine._put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda machine, index: machine._push(machine._memo[index])),
    "MARK": Machine._mark,
    "POP": Machine._pop,
    "POP_MARK": Machine._pop_mark,
    "LIST": lambda machine, _: machine._push(machine._since_mark()),
    "FROZENSET": lambda machine, _: machine._push(machine._since_mark()),
    "TUPLE": lambda machine, _: machine._push(tuple(machine._since_mark())),
    "TUPLE1": lambda machine, _: machine._push(tuple(machine._take(1))),
    "TUPLE2": lambda machine, _: machine._push(tuple(machine._take(2))),
    "TUPLE3": lambda machine, _: machine._push(tuple(machine._take(3))),
    "APPEND": lambda machine, _: machine._extend(machine._take(1)),
    "APPENDS": lambda machine, _: machine._extend(machine._since_mark()),
    "ADDITEMS": lambda machine, _: machine._extend(machine._since_mark()),
    "DICT": Machine._dict,
    "SETITEM": lambda machine, _: machine._set_items(machine._take(2)),
    "SETITEMS": lambda machine, _: machine._set_items(machine._since_mark()),
    "GLOBAL": lambda machine, names: machine._find(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine._find(*machine._take(2)),
    "REDUCE": lambda machine, _: machine._push(call(*machine._take(2))),
    "NEWOBJ": lambda machine, _: machine._push(call(*machine._take(2))),
    "BUILD": Machine._build,
    "BINPERSID": Machine._persistent,
}
"""Every opcode that a file may use, and what it does. Whatever is not here is refused by its name."""
