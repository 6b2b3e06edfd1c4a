"""Multi-head attention: project, split into heads, attend, merge, project.

Paper: Vaswani et al. 2017, arXiv:1706.03762, sec. 3.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from manyheads.errors import ArgumentError, ConfigError, ShapeError
from manyheads.nn.attention.cache import CacheStep, KeyValueCache
from manyheads.nn.attention.masks import Mask, NeverEmpty, check_rows, refuse_tensor
from manyheads.nn.kernels.attention import dot_product_attention, dot_product_scores, masked_weights
from manyheads.nn.kernels.dropout import dropout
from manyheads.nn.kernels.linear import Packed, linears
from manyheads.nn.layers import Linear, initialise
from manyheads.nn.positions import RotaryPositions, rotate
from manyheads.nn.shapes import Float, check_axes, check_rates, check_sizes, check_vectors, explained

if TYPE_CHECKING:
    from manyheads.nn.attention.relative_bias import RelativeBias

ScoreFunction = Callable[[Tensor, Tensor], Tensor]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def split_heads(
    x: Float[Tensor, "*batch length width"], num_heads: int
) -> Float[Tensor, "*batch heads length head_dim"]:
    """(batch, length, heads x head_dim) -> (batch, heads, length, head_dim), without a copy.

        >>> split_heads(torch.zeros(2, 10, 512), num_heads=8).shape
        torch.Size([2, 8, 10, 64])

    Raises: ShapeError: the width is not divisible by num_heads, or num_heads is below 1.
    """
    check_axes("x", x, "..., length, width")
    if not isinstance(num_heads, int) or num_heads < 1 or x.shape[-1] % num_heads:
        raise ShapeError(
            f"a width of {x.shape[-1]} cannot be split into {num_heads!r} heads; it must be divisible by them."
        )
    return x.view(*x.shape[:-1], num_heads, x.shape[-1] // num_heads).transpose(-3, -2)


def merge_heads(x: Float[Tensor, "*batch heads length head_dim"]) -> Float[Tensor, "*batch length width"]:
    """(batch, heads, length, head_dim) -> (batch, length, heads x head_dim): the inverse of `split_heads`.

    >>> merge_heads(torch.zeros(2, 8, 10, 64)).shape
    torch.Size([2, 10, 512])

    Raises: ShapeError: x has fewer than three axes.
    """
    check_axes("x", x, "..., heads, length, head_dim")
    return x.transpose(-3, -2).flatten(-2)


def width_of_heads(d_model: int, num_heads: int, head_dim: int = 0) -> int:
    """Return head_dim; 0: d_model / num_heads.

    Raises: ArgumentError: one is no whole number of at least 1; or head_dim is 0, and num_heads does not divide
        d_model.
    """
    check_sizes(d_model=d_model, num_heads=num_heads, **({"head_dim": head_dim} if head_dim else {}))
    if not head_dim and d_model % num_heads:
        raise ArgumentError(
            f"d_model {d_model} is not divisible by num_heads {num_heads}; change one of them, or give head_dim."
        )
    return head_dim or d_model // num_heads


def biased_projections(bias: bool | Collection[str]) -> frozenset[str]:
    """Return the names of the projections with a bias: all, none, or the given ones.

    Raises: ConfigError: a name is not one of `PROJECTIONS`.
    """
    names = frozenset(PROJECTIONS if bias is True else () if bias is False else bias)
    if not names <= set(PROJECTIONS):
        raise ConfigError(f"bias is {bias!r}; it must be True, False, or some of {list(PROJECTIONS)}.")
    return names


TensorLine = tuple[str, tuple[int, ...], str]
"""A tensor of a module: name, shape, equation."""
WEIGHING = (("Mask", ""), ("Softmax", "over the keys"), ("MatMul", "A V"))
"""The last operations of a head: see `MultiHeadAttention.operations`."""


def heads_fact(layer: Any) -> str:
    """Return the number and the widths of the heads of an attention layer in words."""
    num_kv_heads = getattr(layer, "num_kv_heads", layer.num_heads)
    value_dim = layer.v_proj.out_features // num_kv_heads
    values = "" if value_dim == layer.head_dim else f", values {value_dim:,}"
    groups = "" if num_kv_heads == layer.num_heads else f", keys and values in {num_kv_heads:,}"
    return f"{layer.num_heads:,} heads of {layer.head_dim:,}{values}{groups}"


def projected_tensors(layer: Any, output: Tensor, seen: Tensor, *, is_cross: bool = False) -> Iterator[TensorLine]:
    """Yield queries, keys and values: see `MultiHeadAttention.tensors`."""
    batch, q_len, k_len = *output.shape[:2], seen.shape[3]
    source = "memory" if is_cross else "[memory; x]" if k_len > q_len else "x"
    for name, projection, x, length in (
        ("queries", layer.q_proj, "x", q_len),
        ("keys", layer.k_proj, source, k_len),
        ("values", layer.v_proj, source, k_len),
    ):
        letter, bias = name[0].upper(), "" if projection.bias is None else " + b"
        heads = layer.num_heads if name == "queries" else getattr(layer, "num_kv_heads", layer.num_heads)
        shape = (batch, heads, length, projection.out_features // heads)
        yield name, shape, f"{letter} = {x} W_{letter}{bias}, in heads"


def output_tensor(layer: Any, output: Tensor, weights: str = "") -> TensorLine:
    """Return the output: see `MultiHeadAttention.tensors`. weights: their equation, if they are no tensor."""
    bias = "" if layer.out_proj.bias is None else " + b"
    return "output", tuple(output.shape), f"concat(A V) W_O{bias}{weights and f'; {weights}'}"


class MultiHeadAttention(nn.Module):
    """Attention of queries to keys and values in several heads at once.

        >>> attention = MultiHeadAttention(d_model=512, num_heads=8)
        >>> hidden, memory = torch.randn(2, 10, 512), torch.randn(2, 7, 512)
        >>> out, _ = attention(hidden)  # self-attention
        >>> out.shape
        torch.Size([2, 10, 512])
        >>> from manyheads.nn import Causal, KeyValueCache, Lengths
        >>> out, _, weights = attention(hidden, memory, mask=Lengths(torch.tensor([7, 3])), need_weights=True)
        >>> out.shape, weights.shape, weights[1, 0, 0, 3:].tolist()
        (torch.Size([2, 10, 512]), torch.Size([2, 8, 10, 7]), [0.0, 0.0, 0.0, 0.0])

    Token by token, with the keys and values of earlier tokens in a state:

        >>> state = KeyValueCache.empty(rows=2, num_heads=8, head_dim=64, like=hidden)
        >>> for token in hidden.split(1, dim=1):
        ...     step, state = attention(token, mask=Causal(), state=state)
        >>> torch.allclose(step, attention(hidden, mask=Causal())[0][:, -1:], atol=1e-5)
        True

    To replace the scaled dot product, give a `score`, or override `get_scores` in a subclass.

    Paper: Vaswani et al. 2017, sec. 3.2.2. Symbols: h = num_heads, d_k = head_dim, d_v = value_head_dim. Differs:
        biases by option.
    Args:
        d_model: width of the output, and of queries, keys and values unless said otherwise.
        num_heads: h.
        head_dim: width of queries and keys in a head; None: d_model / num_heads.
        value_head_dim: width of values in a head; None: head_dim.
        query_dim: width of the queries; None: d_model.
        key_dim: width of the keys; None: d_model.
        value_dim: width of the values before projection; None: key_dim.
        dropout: rate on the attention weights, in training.
        bias: True: all four projections have a bias; False: none; or the names of those that do, such as ("v_proj",
            "out_proj").
        score: module or function (query, key) -> scores (batch, heads, q_len, k_len) that replaces the scaled dot
            product.
        relative_bias: numbers that are added to the scores by distance, for self-attention; layers can share it.
        num_kv_heads: heads of keys and values, each for num_heads / num_kv_heads queries (Ainslie et al. 2023,
            arXiv:2305.13245); None: num_heads.
        rotary: rotates queries and keys by their positions, for self-attention; layers can share it.

    Raises: ConfigError: num_heads is below 1, head_dim is None and num_heads does not divide d_model, bias contains
        another name, score cannot be called, relative_bias is for another number of heads, num_kv_heads does not
        divide num_heads, or rotary is for another head_dim.
    """

    _own_scores: ClassVar[bool] = False
    packed: Packed | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._own_scores = cls.get_scores is not MultiHeadAttention.get_scores

    kind = "multi-head attention"
    inputs = ("Q", "K", "V")
    sees_whole = True
    """Whether the matrix of all weights exists; hashed and local attention compute parts of it."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        query_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        dropout: float = 0.0,
        bias: bool | Collection[str] = True,
        score: nn.Module | ScoreFunction | None = None,
        relative_bias: RelativeBias | None = None,
        num_kv_heads: int | None = None,
        rotary: RotaryPositions | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = width_of_heads(d_model, num_heads, head_dim or 0)
        check_rates(dropout=dropout)
        self.dropout_rate = dropout
        self.value_head_dim = value_head_dim or self.head_dim
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ConfigError(f"num_kv_heads is {num_kv_heads}; it must divide num_heads {num_heads}.")
        if rotary is not None and rotary.d_model != self.head_dim:
            raise ConfigError(
                f"the rotary positions are for heads of width {rotary.d_model}, but those of the attention have"
                f" {self.head_dim}; make them with RotaryPositions({self.head_dim})."
            )
        inner, inner_value = num_heads * self.head_dim, num_heads * self.value_head_dim
        inner_key, inner_kv = self.num_kv_heads * self.head_dim, self.num_kv_heads * self.value_head_dim
        key_dim = key_dim or d_model
        biased = biased_projections(bias)
        self.q_proj = Linear(query_dim or d_model, inner, bias="q_proj" in biased)
        self.k_proj = Linear(key_dim, inner_key, bias="k_proj" in biased)
        self.v_proj = Linear(value_dim or key_dim, inner_kv, bias="v_proj" in biased)
        self.out_proj = Linear(inner_value, d_model, bias="out_proj" in biased)
        if score is not None and not callable(score):
            what = "it must be a module or a function (query, key) -> scores"
            raise ArgumentError(f"score is {score!r}; {what}.", fields=["score"])
        self.score = score
        if relative_bias is not None:
            relative_bias.check_heads(num_heads)
        self.relative_bias = relative_bias
        self.rotary = rotary
        self.weights_hook: Callable[[Tensor], None] | None = None
        self.reset_parameters()

    def packed_maps(self) -> tuple[nn.Module, ...]:
        return self.q_proj, self.k_proj, self.v_proj

    def facts(self) -> tuple[str, ...]:
        """See `TokenEmbedding.facts`."""
        score = [] if self.score is None else [type(self.score).__name__.replace("Score", " score").lower()]
        bias = [] if self.relative_bias is None else ["a trained number for each distance"]
        rotary = [] if self.rotary is None else ["queries and keys rotated by their positions"]
        return self.kind, heads_fact(self), *score, *bias, *rotary

    def tensors(self, output: Tensor, seen: Tensor | None, is_cross: bool = False) -> Iterator[TensorLine]:
        """Yield name, shape and equation of the tensors of one call, for tables of a model's tensors.

        Args:
            output: (batch, q_len, d_model).
            seen: the weights, or the buckets of hashed attention; None: none were computed.
            is_cross: the keys and values are those of the encoder's output.
        """
        assert seen is not None
        yield from projected_tensors(self, output, seen, is_cross=is_cross)
        formula = getattr(self.score, "formula", "")
        if formula:
            yield "scores", tuple(seen.shape), formula
        bias = "" if self.relative_bias is None else " + b(j - i)"
        yield "weights", tuple(seen.shape), f"A = softmax({'Q Kᵀ / √d_k' if self.score is None else 'scores'}{bias})"
        yield output_tensor(self, output)

    def operations(self) -> Iterator[tuple[str, str]]:
        """Yield what a head does with its inputs, as figure 2 of the paper draws it: the operation and its formula.

        The formula of a mask is what it hides beside padding and later positions.
        """
        if self.score is not None:
            name = type(self.score).__name__.replace("Score", " score")
            yield name, getattr(self.score, "formula", "score(Q, K)")
        else:
            if self.rotary is not None:
                yield "Rotate", "Q and K by their positions"
            yield "MatMul", "Q Kᵀ"
            yield "Scale", f"1 / √{self.head_dim}"
        if self.relative_bias is not None:
            yield "Add distances", "+ a trained number for each head and j - i"
        yield from WEIGHING

    def reset_parameters(self) -> None:
        """Xavier-uniform weights, zero biases. A relative bias stays as it is, because other layers may share it."""
        initialise(self.q_proj, self.k_proj, self.v_proj, self.out_proj)

    @explained
    def forward(
        self,
        query: Float[Tensor, "*batch q_len query_dim"],
        key: Float[Tensor, "*batch k_len key_dim"] | None = None,
        value: Float[Tensor, "*batch k_len value_dim"] | None = None,
        *,
        mask: Mask | None = None,
        state: KeyValueCache | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, KeyValueCache | None] | tuple[Tensor, KeyValueCache | None, Tensor]:
        """Attend.

        Args:
            query: (batch, q_len, query_dim), or one sequence without a batch axis, (q_len, query_dim).
            key: (batch, k_len, key_dim); None: the query (self-attention).
            value: (batch, k_len, value_dim); None: the key.
            mask: the keys that may be attended to, cached keys included.
            state: keys and values of earlier positions; the new ones are appended, and the queries come after the old
                ones.
            need_weights: also return the attention weights before dropout.

        Returns: the output (batch, q_len, d_model); the state with the new positions, or None without a state; and with
            `need_weights` the weights (batch, heads, q_len, k_len). Output and weights have no batch axis if the query
            has none.
        Raises: ShapeError: the query has neither two nor three axes, or keys and values have others or another batch
            size; a width is not the one of the projections; keys and values differ in number; the mask is a tensor, or
            has rows for another batch; keys are given to an attention with rotary positions. TensorTypeError: an
            argument is no tensor.
        """
        if key is not None or value is not None:
            given = query if key is None else key
            check_vectors(query, given, given if value is None else value)
        if query.dim() == 2:
            key, value = (None if x is None else x[None] for x in (key, value))
            answer = self.forward(query[None], key, value, mask=mask, state=state, need_weights=need_weights)
            return answer[0][0], answer[1], *(weights[0] for weights in answer[2:])  # type: ignore[return-value]
        if query.dim() != 3:
            raise ShapeError(
                f"a query of shape {tuple(query.shape)} has {query.dim()} axes; give (batch, q_len, query_dim), or"
                " (q_len, query_dim)."
            )
        refuse_tensor(mask)
        self._check_widths(query, key, value)
        if key is None and value is None:
            q, k, v = self._project_together(query)
        else:
            key = query if key is None else key
            q = self.project_query(query)
            k, v = self.project_memory(key, value)
        if self.rotary is not None:
            if key is not None or value is not None:
                raise ShapeError("an attention with rotary positions attends to its queries' sequence; give no keys.")
            first: Tensor | int = 0
            if state is not None:
                first = int(state.length) if state.lengths is None else state.lengths
            q, k = self.rotary(q, first), self.rotary(k, first)
        first_query = 0
        if state is not None:
            check_rows(state.rows, len(query), "the state")
            new_len = k.shape[2]
            (step,), state = state.prepare(new_len, k.dtype)
            first_query, mask = step.length, step.among_real(mask)
            k, v = step.write(k, v).filled()
            state = state.after(new_len)
        if need_weights:
            out, weights = self._attend_openly(q, k, v, mask, first_query)
            return out, state, weights
        return self.attend(q, k, v, mask, first_query), state

    def empty_cache(self, rows: int, like: Tensor) -> KeyValueCache:
        """Return a cache without positions, for `forward`; device and dtype of `like`."""
        return KeyValueCache.empty(rows, self.num_kv_heads, self.head_dim, like, value_dim=self.value_head_dim)

    def step(self, x: Tensor, past: CacheStep, mask: Mask | None = None, rotation: Tensor | None = None) -> Tensor:
        """Self-attention of new positions to all positions so far, whose keys and values are written to `past`.

        Shape: x (rows, new_len, d_model), in and out. Args: mask: None: a query sees all keys of its row. rotation: of
            the new positions, from `rotary.rows`; an attention without rotary positions needs none.
        """
        q, k, v = self._project_together(x)
        if self.rotary is not None:
            assert rotation is not None
            q, k = rotate(q, rotation), rotate(k, rotation)
        past.write(k, v)
        shared, mask = past.shared(), past.among_real(mask)
        if shared is None or x.shape[1] > 1 or mask is not None or self.needs_weights:
            return self.attend(q, *past.filled(), mask, past.length)
        # The rows of a group query all its keys in one product: (rows, heads, 1, d) -> (groups, heads, branches, d).
        keys, values, seen = shared
        queries = q.reshape(seen.shape[0], seen.shape[2], *q.shape[1::2]).transpose(1, 2)
        allowed: Mask = NeverEmpty(seen)  # a query sees its own key
        if self.relative_bias is not None:
            allowed = allowed & self.relative_bias.of_slots(seen, past.length)
        return self._attend_directly(queries, keys, values, allowed).flatten(0, 1)[:, None]

    def step_across(self, x: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
        """Attention of new positions to projected keys and values that several rows share, such as a sentence's source.

        Shape: x (sentences x beams, new_len, d_model), in and out; key (sentences, heads, k_len, head_dim), value
            (sentences, heads, k_len, value_head_dim).
        """
        # The rows of one sentence form one longer query, so that keys are never copied.
        q = self.project_query(x.reshape(key.shape[0], -1, x.shape[2]))
        return self.attend(q, key, value, mask).reshape(*x.shape[:2], -1)

    def project_query(self, query: Tensor) -> Tensor:
        """Project queries: (batch, q_len, query_dim) -> (batch, heads, q_len, head_dim)."""
        return split_heads(self.q_proj(query), self.num_heads)

    def project_memory(self, key: Tensor, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Project keys and values, for example of the encoder's output, which all steps of a decoder attend to.

        Shape: key (batch, k_len, key_dim), value (batch, k_len, value_dim) -> (batch, heads, k_len, head_dim) and
            (batch, heads, k_len, value_head_dim).
        """
        if value is None and self.k_proj.in_features == self.v_proj.in_features:
            k, v = linears(key, self.k_proj, self.v_proj)
        else:
            k, v = self.k_proj(key), self.v_proj(key if value is None else value)
        return split_heads(k, self.num_kv_heads), split_heads(v, self.num_kv_heads)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None = None,
        first_query: int = 0,
    ) -> Tensor:
        """Attend with projected heads, merge the heads and apply the output projection: (batch, q_len, d_model)."""
        if self.needs_weights:
            return self._attend_openly(q, k, v, mask, first_query)[0]
        return self._attend_directly(q, k, v, self._with_relative_bias(mask), first_query)

    @property
    def needs_weights(self) -> bool:
        """Whether `attend` must compute the weights: for another score, or because they are recorded."""
        return self.score is not None or self._own_scores or self.weights_hook is not None

    def get_scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores before mask and softmax; a subclass can override this method.

        Shape: (batch, heads, q_len, head_dim), (batch, heads, k_len, head_dim) -> (batch, heads, q_len, k_len)
        """
        if self.score is not None:
            scores: Tensor = self.score(q, k)
            return scores
        return dot_product_scores(q, k)

    def attention_weights(self, q: Tensor, k: Tensor, mask: Mask | None = None, first_query: int = 0) -> Tensor:
        """Return the weights of projected queries and keys before dropout: (batch, heads, q_len, k_len)."""
        k = self._of_queries(k)
        return masked_weights(self.get_scores(q, k), self._with_relative_bias(mask), first_query)

    def _with_relative_bias(self, mask: Mask | None) -> Mask | None:
        return mask if self.relative_bias is None else self.relative_bias() & mask

    def _check_widths(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
        key = query if key is None else key
        given = {"query": query, "key": key, "value": key if value is None else value}
        for (name, x), linear in zip(given.items(), (self.q_proj, self.k_proj, self.v_proj), strict=True):
            if x.shape[-1] != linear.in_features:
                raise ShapeError(
                    f"the {name} has shape {tuple(x.shape)}, so its width is {x.shape[-1]}, but this attention was made"
                    f" for a width of {linear.in_features}; change the input, or make it with {name}_dim={x.shape[-1]}."
                )
        if value is not None and value.shape[-2] != key.shape[-2]:
            raise ShapeError(
                f"the key has shape {tuple(key.shape)} and the value {tuple(value.shape)}: {key.shape[-2]} keys and"
                f" {value.shape[-2]} values; each key needs one value."
            )

    def _attend_directly(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        first_query: int = 0,
    ) -> Tensor:
        """Return the result of `attend`. mask: with the relative bias."""
        rate = self.dropout_rate if self.training else 0.0
        shape, is_grouped = (*q.shape[:3], v.shape[3]), k.shape[1] != q.shape[1]
        if is_grouped:
            if mask is None and q.shape[2] == 1:  # a group's queries become those of one head, and no key is copied
                q = q.reshape(len(q), k.shape[1], q.shape[1] // k.shape[1], q.shape[3])
            k, v = self._of_queries(k, q.shape[1]), self._of_queries(v, q.shape[1])
        heads = dot_product_attention(q, k, v, mask, rate, first_query=first_query)
        out: Tensor = self.out_proj(merge_heads(heads.reshape(shape) if is_grouped else heads))
        return out

    def _of_queries(self, x: Tensor, num_heads: int | None = None) -> Tensor:
        """Return keys or values for every head of the queries: (batch, num_heads, k_len, width)."""
        copies = (num_heads or self.num_heads) // x.shape[1]
        return x if copies == 1 else x[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2)

    def _attend_openly(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        first_query: int,
    ) -> tuple[Tensor, Tensor]:
        """Return the result of `attend`, and the weights before dropout."""
        weights = self.attention_weights(q, k, mask, first_query)
        if self.weights_hook is not None:
            self.weights_hook(weights)
        rate = self.dropout_rate if self.training else 0.0
        heads = torch.matmul(dropout(weights, rate), self._of_queries(v))
        out: Tensor = self.out_proj(merge_heads(heads))
        return out, weights

    def _project_together(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = linears(x, *self.packed_maps(), packed=self.packed)
        return split_heads(q, self.num_heads), split_heads(k, self.num_kv_heads), split_heads(v, self.num_kv_heads)
