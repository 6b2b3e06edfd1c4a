"""The globals that a pickle may use: a literal table to functions and descriptions in this file. Stdlib only.

None of them imports a module, reads an attribute or calls a method that a file chooses.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ALLOWED",
    "ALLOWED_IN_CORPUS",
    "ITEM_BYTES",
    "RefusedError",
    "Storage",
    "StorageType",
    "Stub",
    "View",
    "as_ints",
    "call",
    "checked_key",
]

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
