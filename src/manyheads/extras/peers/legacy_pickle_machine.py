"""The stack machine that executes a pickle program, with an allow-list of opcodes and globals. Stdlib only.

The globals are a literal table to functions and descriptions in this file. None of them imports a module, reads an
attribute or calls a method that a file chooses.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import Any

ITEM_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
    **{"uint64": 8, "uint32": 4, "uint16": 2},
}
_STORAGE_TYPES = {
    **{"DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"},
    **{"LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8"},
    **{"ByteStorage": "uint8", "BoolStorage": "bool"},
}


class RefusedError(Exception):
    """The file contains something that a file of tensors does not need, or is damaged; the message gives the reason."""


class Storage:
    """A storage: `numel` items of `dtype` (None: bytes) from item `offset` of the storage `key`."""

    def __init__(self, key: str, dtype: str | None, offset: int, numel: int) -> None:
        self.key, self.dtype, self.offset, self.numel = key, dtype, offset, numel


class View:
    """A tensor: a strided view of a storage, in items of `dtype`."""

    def __init__(self, key: str, dtype: str, offset: int, size: list[int], stride: list[int]) -> None:
        self.key, self.dtype, self.offset, self.size, self.stride = key, dtype, offset, size, stride


class Stub:
    """An object of a known class; it stores its arguments, its state and its attributes, and does nothing."""

    def __init__(self, arguments: tuple[Any, ...] = ()) -> None:
        self.arguments = arguments
        self.state: Any = None
        self.attributes: dict[Any, Any] = {}


class StubClass:
    """A class whose instances become stubs."""


class StorageType:
    """A class of storages. dtype: type of its items; None for bytes."""

    def __init__(self, dtype: str | None) -> None:
        self.dtype = dtype


class DType:
    """The dtype of a tensor over a storage of bytes."""

    def __init__(self, name: str) -> None:
        self.name = name


class Function:
    """A function of this file that a pickle may call by the peer's name."""

    def __init__(self, make: Any) -> None:
        self.make = make


def _view(storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None) -> View:
    """Check that every element lies within the storage."""
    if not isinstance(storage, Storage) or dtype is None:
        raise RefusedError("a tensor is built from something that is not a storage")
    size, stride = as_ints(size), as_ints(stride)
    if type(offset) is not int or offset < 0 or len(size) != len(stride):
        raise RefusedError("a tensor has an invalid offset, size or stride")
    item = ITEM_BYTES[dtype]
    in_bytes = item if storage.dtype is None else 1
    if storage.offset % in_bytes:
        raise RefusedError("a tensor begins within an item of its storage")
    start, numel = storage.offset // in_bytes, storage.numel // in_bytes
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and last >= numel:
        raise RefusedError(f"a tensor reaches item {last:,} of a storage of {numel:,}")
    return View(storage.key, dtype, start + offset, size, stride)


def as_ints(values: Any) -> list[int]:
    """Return a tuple or list of non-negative integers; refuse anything else."""
    if type(values) not in (tuple, list) or not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise RefusedError("a tensor has a size or stride that is not a tuple of whole numbers")
    return list(values)


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *_flags_and_hooks: Any) -> View:
    return _view(storage, offset, size, stride, getattr(storage, "dtype", None))


def _rebuild_tensor_v3(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> View:
    dtype = rest[2]  # after requires_grad and the hooks
    if not isinstance(dtype, DType):
        raise RefusedError("a tensor has a dtype that is not a dtype")
    return _view(storage, offset, size, stride, dtype.name)


def _keep_tensor(tensor: Any, *_flags_and_hooks: Any) -> View:
    if not isinstance(tensor, View):
        raise RefusedError("a parameter is built from something that is not a tensor")
    return tensor


def _rebuild_from_type(function: Any, _type: Any, arguments: Any, _state: Any) -> View:
    return _keep_tensor(call(function, arguments))


def _ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    return {checked_key(key): value for key, value in pairs}


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise RefusedError("bytes are made in an unknown way")
    return text.encode("latin1")


def _set(values: Any = ()) -> list[Any]:
    return [checked_key(value) for value in values]


_STUBS = {
    "torch": "device Tensor strided per_tensor_affine preserve_format contiguous_format",
    "torch.serialization": "_get_layout",
    "torch.nn.modules.activation": "GELU LogSoftmax MultiheadAttention ReLU Sigmoid Softmax Tanh",
    "torch.nn.modules.container": "ModuleDict ModuleList ParameterDict ParameterList Sequential",
    "torch.nn.modules.dropout": "Dropout",
    "torch.nn.modules.linear": "Identity Linear NonDynamicallyQuantizableLinear",
    "torch.nn.modules.loss": "CrossEntropyLoss KLDivLoss NLLLoss",
    "torch.nn.modules.normalization": "LayerNorm",
    "torch.nn.modules.sparse": "Embedding",
    "torch.nn.modules.transformer": "Transformer TransformerDecoder TransformerDecoderLayer TransformerEncoder"
    " TransformerEncoderLayer",
    "torch.nn.functional": "gelu relu",
    "torch._C._nn": "gelu",
    "torch.nn.parallel.data_parallel": "DataParallel",
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.nn.backends.thnn": "_get_thnn_function_backend",
    # The official Transformer-XL saves whole modules.
    "mem_transformer": "AdaptiveEmbedding DecoderLayer MemTransformerLM MultiHeadAttn PositionalEmbedding"
    " PositionwiseFF RelLearnableDecoderLayer RelLearnableMultiHeadAttn RelMultiHeadAttn"
    " RelPartialLearnableDecoderLayer RelPartialLearnableMultiHeadAttn",
    "utils.adaptive_softmax": "AdaptiveLogSoftmax",
    "utils.data_parallel": "BalancedDataParallel",
    "utils.log_uniform_sampler": "LogUniformSampler",
    "utils.proj_adaptive_softmax": "ProjectedAdaptiveLogSoftmax",
    # Objects that training scripts save beside the weights.
    "argparse": "Namespace",
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
}

ALLOWED: dict[tuple[str, str], Any] = {
    **{(module, name): StubClass() for module, names in _STUBS.items() for name in names.split()},
    **{("torch", name): StorageType(dtype) for name, dtype in _STORAGE_TYPES.items()},
    **{("torch.cuda", name): StorageType(dtype) for name, dtype in _STORAGE_TYPES.items()},
    **{("torch", name): DType(name) for name in ITEM_BYTES},
    ("torch.storage", "UntypedStorage"): StorageType(None),
    ("torch", "UntypedStorage"): StorageType(None),
    ("torch", "Size"): Function(tuple),
    ("torch._utils", "_rebuild_tensor"): Function(_rebuild_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): Function(_rebuild_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): Function(_rebuild_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): Function(_keep_tensor),
    ("torch._utils", "_rebuild_parameter_with_state"): Function(_keep_tensor),
    ("torch._tensor", "_rebuild_from_type_v2"): Function(_rebuild_from_type),
    ("torch.nn.parameter", "Parameter"): Function(_keep_tensor),
    ("torch.autograd.variable", "Variable"): Function(_keep_tensor),
    ("collections", "OrderedDict"): Function(_ordered_dict),
    ("builtins", "set"): Function(_set),
    ("__builtin__", "set"): Function(_set),
    ("_codecs", "encode"): Function(_encode),
}
"""Every global that a file of tensors may name. Whatever is not here is refused by its name."""

ALLOWED_IN_CORPUS: dict[tuple[str, str], Any] = {
    **{(module, "Corpus"): StubClass() for module in ("__main__", "data_utils")},
    ("vocabulary", "Vocab"): StubClass(),
    ("collections", "Counter"): Function(lambda counts=None: {}),  # the counts of words are not needed
    ("collections", "OrderedDict"): Function(_ordered_dict),
    ("_codecs", "encode"): Function(_encode),
    **{("numpy", name): StubClass() for name in ("dtype", "ndarray")},
    **{(f"numpy.{core}.multiarray", "_reconstruct"): StubClass() for core in ("core", "_core")},
}
"""The same for a `cache.pkl` of Transformer-XL: the corpus, its vocabulary, and arrays of ids."""


def checked_key(value: Any) -> Any:
    """Return a valid dict key: scalars or flat tuples of them, because hashing nested tuples could take forever."""
    scalars = (str, bytes, int, float, bool, type(None))
    if type(value) in scalars or (type(value) is tuple and all(type(item) in scalars for item in value)):
        return value
    raise RefusedError(f"a dict has a key that is a {type(value).__name__}")


def call(function: Any, arguments: Any) -> Any:
    """Call a function of this file, or create a stub of a class."""
    if type(arguments) is not tuple:
        raise RefusedError("a call's arguments are not a tuple")
    if isinstance(function, Function):
        return function.make(*arguments)
    if isinstance(function, StubClass):
        return Stub(arguments)
    raise RefusedError(f"it calls a {type(function).__name__}")


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
