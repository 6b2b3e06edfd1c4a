"""A replacement for `torch.nn.MultiheadAttention` without some of its errors.

torch.jit needs annotations as objects, so this file does not import `annotations`.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import ConfigError, RequestError, ShapeError
from manyheads.nn.attention.masks import Bias, Causal, Dense, KeyPadding, Mask
from manyheads.nn.attention.multi_head import merge_heads, split_heads
from manyheads.nn.kernels.attention import dot_product_attention, dot_product_weights
from manyheads.nn.kernels.dropout import dropout as drop
from manyheads.nn.kernels.linear import is_readable, linear
from manyheads.nn.shapes import check_tensors, explained


class TorchMultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with the same constructor, call, results and state dict, except for these cases.

    - A query without allowed keys: torch returns NaN if `need_weights` is set, and zeros otherwise. This module returns
      zeros before the output projection, and weights of zero.
    - `is_causal` without `need_weights`: torch replaces any `attn_mask` by a causal mask, which also hides the keys of
      `add_bias_kv` and `add_zero_attn`. This module uses the `attn_mask`, and its output does not depend on
      `need_weights` (except for the random numbers of dropout).
    - `is_causal` without an `attn_mask`: torch refuses it. This module uses a causal mask.
    - A boolean mask together with a mask of numbers gives no warning.

    It works in `torch.nn.TransformerEncoder` and its layers, which then call `forward` instead of torch's fused
    function. `torch.fx` keeps it as one node of a larger module. `torch.jit.script` compiles a module that contains it;
    the scripted module calls Python and cannot be saved, so save the state dict.

        >>> attention = TorchMultiheadAttention(embed_dim=16, num_heads=4, batch_first=True)
        >>> x = torch.randn(2, 5, 16)
        >>> padding = torch.tensor([[False] * 5, [True] * 5])  # the second row contains only padding
        >>> out, weights = attention(x, x, x, key_padding_mask=padding)
        >>> out.shape, weights.shape, weights[1].sum().item()
        (torch.Size([2, 5, 16]), torch.Size([2, 5, 5]), 0.0)
        >>> theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        >>> attention.load_state_dict(theirs.state_dict())
        <All keys matched successfully>
        >>> torch.allclose(attention(x, x, x)[0], theirs(x, x, x)[0], atol=1e-5)
        True

    Args: those of `torch.nn.MultiheadAttention`.
    Raises: ConfigError, which is also torch's ValueError and AssertionError: embed_dim is not divisible by num_heads,
        or one of them is below 1.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise _TorchConfigError(
                f"embed_dim {embed_dim} is not divisible by num_heads {num_heads}, or one of them is below 1; change"
                " one of them."
            )
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        # If this is True, torch's encoder layers call a fused function in evaluation, not `forward`.
        self._qkv_same_embed_dim = False

    def _reset_parameters(self) -> None:
        """Initialise as torch does; its own method depends on an attribute that is False here."""
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if getattr(self, name) is not None:
                nn.init.xavier_uniform_(getattr(self, name))
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for pair in (self.bias_k, self.bias_v):
            if pair is not None:
                nn.init.xavier_normal_(pair)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query, key, value: (length, batch, width), with `batch_first` (batch, length, width), or (length, width).
            key_padding_mask: (batch, k_len), or (k_len,) without a batch axis; True = padding, or numbers that are
                added to the scores.
            need_weights: also return the weights after dropout, as torch does.
            attn_mask: (q_len, k_len) or (batch x heads, q_len, k_len); True = blocked, or numbers that are added.
            average_attn_weights: return the mean of the weights over heads, (batch, q_len, k_len); otherwise (batch,
                heads, q_len, k_len). k_len includes the keys that `add_bias_kv` and `add_zero_attn` append.
            is_causal: no query sees a later key; ignored if attn_mask is given.

        Nested tensors are supported for self-attention (query is key is value) without masks; the output is nested too.
        Raises: ShapeError, which is also torch's AssertionError: the shapes of query, key, value and masks do not
            match.
        """
        # One call, so that torch.fx and torch.jit do not trace the rest.
        attended: tuple[Tensor, Tensor | None] = self._forward(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )
        return attended

    @torch.jit.ignore  # type: ignore[untyped-decorator]
    @explained
    def _forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        given = (query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        tracer: Any = getattr(query, "tracer", None)  # set by torch.fx, which passes proxies instead of tensors
        if tracer is not None:
            name = tracer.path_of_module(self)
            if not name:
                raise RequestError("torch.fx traces a module that contains this attention, not the attention alone.")
            return cast("tuple[Tensor, Tensor | None]", tracer.create_proxy("call_module", name, given, {}))
        masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        check_tensors(**{kind: mask for kind, mask in masks.items() if mask is not None})
        if query.is_nested and query is key and key is value and key_padding_mask is None and attn_mask is None:
            return _attend_nested(self, query, need_weights, average_attn_weights, is_causal)
        return _attend(self, *given)


# These are functions, not methods: in a scripted module `self` has the attributes of this class only.


def _attend(
    module: TorchMultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    average_attn_weights: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `TorchMultiheadAttention.forward`."""
    _check(module, query, key, value)
    batched = query.dim() == 3
    same = query is key and key is value
    if not batched:
        query, key, value = query[None], key[None], value[None]
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    elif not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    batch, q_len, k_len = query.shape[0], query.shape[1], key.shape[1]
    q, k, v = _project(module, query, key, value, same)
    k, v = _with_extra_keys(module, k, v)
    mask = mask_of_torch(
        attn_mask, key_padding_mask, batch, module.num_heads, q_len, k_len, more_keys=k.shape[2] - k_len
    )
    if is_causal and attn_mask is None:
        mask = _Causal(k_len) & mask if k.shape[2] > k_len else Causal() & mask
    rate = module.dropout if module.training else 0.0
    weights: Tensor | None = None
    if need_weights:
        weights = drop(dot_product_weights(q, k, mask), rate)
        attended = torch.matmul(weights, v)
        weights = weights.mean(dim=1) if average_attn_weights else weights
    else:
        attended = dot_product_attention(q, k, v, mask, rate)
    merged, last = merge_heads(attended), module.out_proj
    is_read = is_readable(last) or not isinstance(last, nn.Module)  # a scripted one cannot be called
    out = linear(merged, last.weight, last.bias) if is_read else last(merged)
    if not batched:
        return out[0], None if weights is None else weights[0]
    return out if module.batch_first else out.transpose(0, 1), weights


def _attend_nested(
    module: TorchMultiheadAttention, query: Tensor, need_weights: bool, average_attn_weights: bool, is_causal: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend within each sequence of a nested tensor, as torch's encoder does in evaluation."""
    sequences = query.unbind()
    x = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    lengths = torch.tensor([len(one) for one in sequences], device=query.device)
    padding = torch.arange(x.shape[1], device=query.device) >= lengths[:, None]
    if not module.batch_first:
        x = x.transpose(0, 1)
    out, weights = module.forward(x, x, x, padding, need_weights, None, average_attn_weights, is_causal)
    rows = out if module.batch_first else out.transpose(0, 1)
    parts = [row[: len(one)] for row, one in zip(rows, sequences, strict=True)]
    return torch.nested.as_nested_tensor(parts), weights


def _check(module: TorchMultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.is_nested or key.is_nested or value.is_nested:
        raise _TorchShapeError(
            "nested tensors are supported for self-attention without masks only; pad them and give key_padding_mask."
        )
    if not query.dim() == key.dim() == value.dim() or query.dim() not in (2, 3):
        raise _TorchShapeError(
            f"query, key and value of shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)} must"
            " all have three axes, or all have two."
        )
    widths = (query.shape[-1], key.shape[-1], value.shape[-1])
    if widths != (module.embed_dim, module.kdim, module.vdim):
        raise _TorchShapeError(
            f"query, key and value have widths {widths}, but embed_dim, kdim and vdim are"
            f" {(module.embed_dim, module.kdim, module.vdim)}."
        )
    axis = 0 if module.batch_first else 1
    if key.shape[:-1] != value.shape[:-1] or (query.dim() == 3 and query.shape[axis] != key.shape[axis]):
        layout = "(batch, length, width)" if module.batch_first else "(length, batch, width)"
        raise _TorchShapeError(
            f"query, key and value of shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)},"
            f" read as {layout}, must have one batch size, and as many keys as values; batch_first is"
            f" {module.batch_first}."
        )


def _project(
    module: TorchMultiheadAttention, query: Tensor, key: Tensor, value: Tensor, same: bool
) -> tuple[Tensor, ...]:
    """Return projected query, key and value, (batch, heads, length, head_dim) each."""
    # in_proj_weight is None if the widths differ, although torch annotates it as a tensor.
    if cast("Tensor | None", module.in_proj_weight) is not None:
        if same:
            joined = linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, dim=-1)
            return tuple(split_heads(x, module.num_heads) for x in joined)
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    given = zip((query, key, value), weights, biases, strict=True)
    return tuple(split_heads(linear(x, weight, bias), module.num_heads) for x, weight, bias in given)


def _with_extra_keys(module: TorchMultiheadAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Append a trained pair (`add_bias_kv`) and a pair of zeros (`add_zero_attn`) to keys and values."""
    if module.bias_k is not None and module.bias_v is not None:
        rows = (x.expand(k.shape[0], 1, -1).to(k.dtype) for x in (module.bias_k, module.bias_v))
        more_k, more_v = (split_heads(x, module.num_heads) for x in rows)
        k, v = torch.cat([k, more_k], dim=2), torch.cat([v, more_v], dim=2)
    if module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    return k, v


class _TorchConfigError(ConfigError, ValueError, AssertionError):
    """Sizes that do not fit; torch raises a ValueError or an AssertionError for them."""


class _TorchShapeError(ShapeError, AssertionError):
    """Shapes that do not fit; torch raises an AssertionError for them."""


class _Causal(Mask):
    """Causal among the first `keys` keys; all queries see the keys after them."""

    def __init__(self, keys: int) -> None:
        self.keys = keys

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return ((keys[None] <= queries[:, None]) | (keys[None] >= self.keys))[None, None]


def mask_of_torch(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    batch: int,
    num_heads: int,
    q_len: int,
    k_len: int,
    more_keys: int = 0,
) -> Mask | None:
    """Convert torch's two masks to one `Mask`.

    Args:
        attn_mask: (q_len, k_len) or (batch x heads, q_len, k_len); True = blocked, or numbers that are added.
        key_padding_mask: (batch, k_len); True = padding, or numbers that are added.
        more_keys: number of keys after these, which all queries may attend to.

    Raises: ShapeError: a mask has another shape, or contains integers.
    """
    mask: Mask | None = None
    if key_padding_mask is not None and key_padding_mask.shape != (batch, k_len):
        raise _TorchShapeError(
            f"key_padding_mask has shape {tuple(key_padding_mask.shape)}; it must be (batch, k_len), here"
            f" {(batch, k_len)}, or (k_len,) for inputs without a batch."
        )
    if attn_mask is not None:
        if attn_mask.shape not in ((q_len, k_len), (batch * num_heads, q_len, k_len)):
            raise _TorchShapeError(
                f"attn_mask has shape {tuple(attn_mask.shape)}; it must be (q_len, k_len), here {(q_len, k_len)}, or"
                f" (batch x heads, q_len, k_len), here {(batch * num_heads, q_len, k_len)}."
            )
        pattern = attn_mask if attn_mask.dim() == 2 else attn_mask.view(batch, num_heads, q_len, k_len)
        if key_padding_mask is not None and pattern.is_floating_point() and key_padding_mask.is_floating_point():
            # One sum, as in torch: two lowest numbers give -inf, which forbids.
            pattern, key_padding_mask = pattern + key_padding_mask.view(batch, 1, 1, k_len), None
        mask = _blocked_or_added(F.pad(pattern, (0, more_keys)), "attn_mask")
    if key_padding_mask is not None:
        padding = F.pad(key_padding_mask, (0, more_keys))
        if padding.dtype == torch.bool:
            return KeyPadding(~padding) & mask
        return _blocked_or_added(padding[:, None, None], "key_padding_mask") & mask
    return mask


def _blocked_or_added(pattern: Tensor, name: str) -> Mask:
    if pattern.dtype == torch.bool:
        return Dense(~pattern)
    if pattern.is_floating_point():
        return Bias(pattern)
    raise _TorchShapeError(
        f"{name} is of type {pattern.dtype}; it must be bool (True = blocked), or numbers that are added."
    )
