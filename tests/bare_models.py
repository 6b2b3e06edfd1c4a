"""Models as small as torch's own operations allow, with the layers of ours: their operations are a floor.

They check nothing, know no padding, and have no options. `launches.Launches` counts them as it counts ours. A training
step is that of a run (`TrainStep`): weights cast once, checks, clipping and update.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from manyheads.data.batch import SegmentBatch
from manyheads.models.protocols import Output


class BareLayer(nn.Module):
    """Maps and norms of a layer. in_maps: widths of the maps of x, which are one product."""

    def __init__(self, width: int, d_ff: int, *in_maps: int, inner: int, bias: bool = True) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(width, one, bias=bias) for one in in_maps)
        self.out = nn.Linear(inner, width, bias=bias)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inner, self.outer = nn.Linear(width, d_ff), nn.Linear(d_ff, width)


class Bare(nn.Module):
    """Embedding, layers and head of one of the three, by the config of ours."""

    def __init__(self, config: Any, *in_maps: int, inner: int, bias: bool = True, head_width: int = 1) -> None:
        super().__init__()
        self.config, self.heads, self.rate = config, config.num_heads, config.dropout
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(
            BareLayer(config.d_model, config.d_ff, *in_maps, inner=inner, bias=bias) for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(head_width * config.d_model)
        self.head = nn.Linear(head_width * config.d_model, config.vocab_size)

    def in_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.rate, self.training) if self.rate else x

    def embed(self, tokens: Tensor) -> Tensor:
        return self.drop(self.embedding(tokens).to(self.layers[0].inner.weight.dtype))  # type: ignore[union-attr]

    def caches(self, rows: int, capacity: int) -> Tensor:
        """Return room for keys, values and projected distances: (layers, 3, rows, heads, capacity, width)."""
        width = self.layers[0].out.in_features // self.heads  # type: ignore[union-attr, operator]
        return self.head.weight.new_empty(len(self.layers), 3, rows, self.heads, capacity, width)

    def feed_forward(self, layer: Any, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        return self.drop(layer.outer(self.drop(activation(layer.inner(x)))))

    def loss(self, hidden: Tensor, targets: Tensor, smoothing: float) -> Output:
        logits = self.head(hidden).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum", label_smoothing=smoothing)
        return Output(loss, loss.detach(), torch.ones(()))


class BareDecoder(Bare):
    """Pre-norm, learned positions, GELU."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, 3 * config.d_model, inner=config.d_model)
        self.positions = nn.Parameter(torch.empty(config.max_len, config.d_model))

    def forward(self, batch: SegmentBatch, state: Any = None, *, label_smoothing: float = 0.0, **_: Any) -> Output:
        tokens = batch.tokens
        x = self.drop(self.embedding(tokens) + self.positions[: tokens.shape[1]]).bfloat16()
        for layer in self.layers:
            parts: Any = layer
            q, k, v = map(self.in_heads, parts.maps[0](parts.norms[0](x)).chunk(3, dim=-1))
            attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate, is_causal=True)
            x = x + self.drop(parts.out(attended.transpose(1, 2).flatten(2)))
            x = x + self.drop(parts.outer(F.gelu(parts.inner(parts.norms[1](x)), approximate="tanh")))
        return self.loss(self.norm(x), batch.targets, label_smoothing)

    def step(self, tokens: Tensor, caches: Tensor, place: int) -> Tensor:
        x, caches = self.embedding(tokens) + self.positions[place], caches[:, :2]
        for layer, cache in zip(self.layers, caches, strict=True):
            parts: Any = layer
            q, *kv = parts.maps[0](parts.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            cache[..., place : place + 1, :] = kv[0].as_strided((2, *kv[0].shape), (kv[0].stride(-1), *kv[0].stride()))
            attended = F.scaled_dot_product_attention(q, *cache[..., : place + 1, :].unbind(0))
            x = x + parts.out(attended.transpose(1, 2).flatten(2))
            x = x + parts.outer(F.gelu(parts.inner(parts.norms[1](x)), approximate="tanh"))
        return self.head(self.norm(x)[:, -1]).float().log_softmax(-1)


class BareXL(Bare):
    """Post-norm, memory, content and distance."""

    def __init__(self, config: Any) -> None:
        inner = config.num_heads * config.width_of_heads
        super().__init__(config, inner, 2 * inner, inner=inner, bias=False)
        self.distance_maps = nn.ModuleList(nn.Linear(config.d_model, inner, bias=False) for _ in self.layers)
        shape = (config.num_heads, 1, config.width_of_heads)
        self.content_biases = nn.ParameterList(torch.empty(shape) for _ in self.layers)
        self.position_biases = nn.ParameterList(torch.empty(shape) for _ in self.layers)
        keys = 2 * config.memory_len
        self.register_buffer("encoded", torch.empty(keys + 1, config.d_model, dtype=torch.bfloat16))
        self.register_buffer("hidden", torch.empty(config.memory_len, keys, dtype=torch.bool))

    def forward(self, batch: SegmentBatch, state: Any = None, *, label_smoothing: float = 0.0, **_: Any) -> Output:
        x = self.embed(batch.tokens)
        encoded, hidden = self.drop(self.get_buffer("encoded")), self.get_buffer("hidden")
        memory, scale = [], self.config.width_of_heads**-0.5
        rows, q_len, _ = x.shape
        for number, layer in enumerate(self.layers):
            parts: Any = layer
            memory.append(x.detach())  # as long as the memory
            past = x.detach() if state is None else state[number]
            q = self.in_heads(parts.maps[0](x))
            k, v = map(self.in_heads, parts.maps[1](torch.cat([past, x], dim=1)).chunk(2, dim=-1))
            r = self.distance_maps[number](encoded).unflatten(-1, (self.heads, -1)).transpose(0, 1)
            by_distance = (q + self.position_biases[number]).transpose(0, 1).flatten(1, 2)
            scores = torch.baddbmm(by_distance.detach()[:, :, :1], by_distance, r.transpose(1, 2), beta=0, alpha=scale)
            scores = scores.view(self.heads, rows, -1)[..., q_len:].view(self.heads, rows, q_len, -1).transpose(0, 1)
            bias = scores.masked_fill(hidden, -torch.inf)
            attended = F.scaled_dot_product_attention(
                q + self.content_biases[number], k, v, attn_mask=bias, dropout_p=self.config.attention_dropout
            )
            x = parts.norms[0](x + self.drop(parts.out(attended.transpose(1, 2).flatten(2))))
            x = parts.norms[1](x + self.feed_forward(parts, x, F.relu))
        return self.loss(self.drop(x), batch.targets, label_smoothing)._replace(state=memory)

    def step(self, tokens: Tensor, caches: Tensor, place: int) -> Tensor:
        x, caches, distances = self.embedding(tokens), caches[:, :2], caches[:, 2, 0]
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            parts: Any = layer
            q, *kv = F.linear(x, self.packed).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            cache[..., place : place + 1, :] = kv[0].as_strided((2, *kv[0].shape), (kv[0].stride(-1), *kv[0].stride()))
            r, space = distances[number, :, : place + 1], x.new_empty(self.heads, len(x), -(-(place + 1) // 8) * 8)
            by_distance, scores = (q + self.position_biases[number])[:, :, 0].transpose(0, 1), space[..., : place + 1]
            torch.baddbmm(scores, by_distance, r.transpose(1, 2), beta=0, alpha=0.125, out=scores)
            bias = scores.as_strided(
                (len(x), self.heads, 1, place + 1), (space.stride(1), space.stride(0), space.stride(1), 1)
            )
            keys, values = cache[..., : place + 1, :].unbind(0)
            attended = F.scaled_dot_product_attention(q + self.content_biases[number], keys, values, attn_mask=bias)
            x = parts.norms[0](x + parts.out(attended.transpose(1, 2).flatten(2)))
            inner = torch._addmm_activation(parts.inner.bias, x.flatten(0, 1), parts.inner.weight.t())
            x = parts.norms[1](x + parts.outer(inner.view(*x.shape[:2], -1)))
        return self.head(x[:, -1]).float().log_softmax(-1)

    @property
    def packed(self) -> Tensor:
        """Weights of the three maps in one memory."""
        width, inner = self.config.d_model, self.config.num_heads * self.config.width_of_heads
        return self.head.weight.new_empty(3 * inner, width)


class BareReformer(Bare):
    """Hashed attention with `visible="bucket"` of both chunks, every sublayer computed again in the backward pass."""

    def __init__(self, config: Any) -> None:
        inner = config.num_heads * config.width_of_heads
        super().__init__(config, inner, inner, inner=inner, bias=False, head_width=2)
        self.rounds, self.chunk_len = config.lsh.num_hashes, config.lsh.chunk_len
        length = config.max_len
        self.num_buckets = 2 * length // self.chunk_len
        shape = (self.heads, config.width_of_heads, self.rounds * self.num_buckets // 2)
        self.register_buffer("rotations", torch.empty(shape))
        self.register_buffer("positions", torch.empty(length, config.d_model))
        self.register_buffer("numbers", torch.empty(length, dtype=torch.int64))

    def forward(self, batch: SegmentBatch, state: Any = None, *, label_smoothing: float = 0.0, **_: Any) -> Output:
        x1 = x2 = self.drop(self.embedding(batch.tokens) + self.get_buffer("positions"))
        for layer in self.layers:
            x1 = x1 + checkpoint(self._attention, layer, x2, use_reentrant=False, preserve_rng_state=False)
            x2 = x2 + checkpoint(self._feed_forward, layer, x1, use_reentrant=False, preserve_rng_state=False)
        hidden = self.norm(torch.cat([x1, x2], dim=-1)).bfloat16()
        return self.loss(hidden, batch.targets, label_smoothing)

    def step(self, tokens: Tensor, caches: Tensor, place: int) -> Tensor:
        """Keys and values of the newest positions of a bucket are looked up in rings of chunk_len places."""
        rows, heads, chunk_len = len(tokens), self.heads, self.chunk_len
        rings = caches.new_empty(rows, heads, self.rounds, self.num_buckets, chunk_len, dtype=torch.int64)
        caught = rings.new_empty(rings.shape[:-1])
        x1 = x2 = self.embedding(tokens) + self.get_buffer("positions")[place]
        for layer, cache in zip(self.layers, caches[:, :2], strict=True):
            parts: Any = layer
            h = parts.norms[0](x2)
            qk, v = (self.in_heads(one(h)) for one in parts.maps)
            bucket = self._buckets(qk.flatten(0, 1)).view(rows, heads, self.rounds, 1)
            cache[0, ..., place : place + 1, :], cache[1, ..., place : place + 1, :] = F.normalize(qk, dim=-1), v
            number = caught.gather(-1, bucket)
            ring = rings.gather(3, bucket[..., None].expand(-1, -1, -1, -1, chunk_len)).flatten(2)
            seen = (number > self.get_buffer("numbers")[:chunk_len]).flatten(2)
            rings.flatten(3).scatter_(-1, bucket * chunk_len + number % chunk_len, place)
            caught.scatter_add_(-1, bucket, torch.ones_like(bucket))
            at = ring[..., None].expand(-1, -1, -1, qk.shape[-1])
            keys, values = (cache[side].gather(2, at) for side in range(2))
            scores = (qk @ keys.transpose(-1, -2)).masked_fill(~seen[:, :, None], -1e9)
            attended = torch.softmax(scores, dim=-1) @ values
            x1 = x1 + parts.out(attended.transpose(1, 2).flatten(2))
            x2 = x2 + parts.outer(F.relu(parts.inner(parts.norms[1](x1))))
        return self.head(self.norm(torch.cat([x1, x2], dim=-1))[:, -1]).float().log_softmax(-1)

    def _feed_forward(self, layer: Any, x: Tensor) -> Tensor:
        return self.feed_forward(layer, layer.norms[1](x).bfloat16(), F.relu)

    def _attention(self, layer: Any, x: Tensor) -> Tensor:
        h = layer.norms[0](x).bfloat16()
        qk, v = (self.in_heads(one(h)).flatten(0, 1) for one in layer.maps)
        with torch.no_grad():
            keys = self._buckets(qk) * qk.shape[1] + self.get_buffer("numbers")  # bucket and position in one number
            order = keys.sort(dim=-1).values
            places = order % qk.shape[1]
            where = places.argsort(dim=-1)
        chunks = (-1, self.chunk_len)
        flat = places.flatten(1)[..., None]
        q, values = (one.gather(1, flat.expand(-1, -1, one.shape[2])).unflatten(1, chunks) for one in (qk, v))
        k = F.normalize(q, dim=-1)
        both_keys, both_values, both = (
            torch.cat([one.roll(1, 1), one], dim=2) for one in (k, values, keys_of_chunks(order, self.chunk_len))
        )
        own = keys_of_chunks(order, self.chunk_len)
        scores = (q @ both_keys.transpose(-1, -2)).float()
        length = qk.shape[1]
        together = (own[..., None] // length == both[..., None, :] // length) & (own[..., None] > both[..., None, :])
        scores = scores.masked_fill(~together, -1e9)
        sums = scores.logsumexp(dim=-1, keepdim=True)
        out = ((scores - sums).exp().bfloat16() @ both_values).flatten(1, 2).unflatten(1, (self.rounds, -1))
        at = where[..., None]
        out = out.gather(2, at.expand(-1, -1, -1, out.shape[3]))
        shares = sums.flatten(1).unflatten(1, (self.rounds, -1)).gather(2, at[..., 0]).softmax(dim=1)
        mixed = (out * shares[..., None]).sum(dim=1).to(h.dtype)
        return self.drop(layer.out(mixed.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2)))

    def _buckets(self, qk: Tensor) -> Tensor:
        rows = qk.float().unflatten(0, (-1, self.heads)).transpose(0, 1).flatten(1, 2)
        rotated = (rows @ self.get_buffer("rotations")).unflatten(-1, (self.rounds, -1))
        found = torch.cat([rotated, -rotated], dim=-1).argmax(dim=-1)
        return found.view(self.heads, -1, qk.shape[1], self.rounds).permute(1, 0, 3, 2).flatten(0, 1)


class BareSeq2Seq(nn.Module):
    """Encoder and decoder, post-norm (`config.norm_position`), sinusoidal positions, a head of its own.

    packed: its batches are packed, and attention is torch's for segments.
    """

    def __init__(self, config: Any, packed: bool = False) -> None:
        super().__init__()
        self.config, self.heads, self.rate, self.packed = config, config.num_heads, config.dropout, packed
        width, counts = config.d_model, (config.num_encoder_layers, config.num_decoder_layers)
        self.embedding = nn.Embedding(config.target_vocab_size, width)
        of_encoder, of_decoder = (3 * width,), (3 * width, width, 2 * width)
        self.encoder = nn.ModuleList(BareLayer(width, config.d_ff, *of_encoder, inner=width) for _ in range(counts[0]))
        self.layers = nn.ModuleList(BareLayer(width, config.d_ff, *of_decoder, inner=width) for _ in range(counts[1]))
        self.out_across = nn.ModuleList(nn.Linear(width, width) for _ in self.layers)
        self.norm_across = nn.ModuleList(nn.LayerNorm(width) for _ in self.layers)
        self.head = nn.Linear(width, config.target_vocab_size, bias=False)
        self.register_buffer("positions", torch.empty(256, width))

    def forward(self, batch: Any, state: Any = None, *, label_smoothing: float = 0.0, **_: Any) -> Output:
        starts = (batch.source_starts, batch.target_starts) if self.packed else (None, None)
        places = (batch.source_places, batch.target_places) if self.packed else (None, None)
        memory = self._embed(batch.source, places[0])
        for layer in self.encoder:
            parts: Any = layer
            q, k, v = self._split(parts.maps[0](memory), 3)
            memory = self._added(parts.norms[0], memory, parts.out(self._attend(q, k, v, starts[0], starts[0])))
            memory = self._fed(parts, memory)
        x = self._embed(batch.target_input, places[1])
        for number, layer in enumerate(self.layers):
            parts = layer
            q, k, v = self._split(parts.maps[0](x), 3)
            attended = self._attend(q, k, v, starts[1], starts[1], is_causal=True)
            x = self._added(parts.norms[0], x, parts.out(attended))
            (q,), (k, v) = self._split(parts.maps[1](x), 1), self._split(parts.maps[2](memory), 2)
            attended = self._attend(q, k, v, starts[1], starts[0])
            x = self._added(self.norm_across[number], x, self.out_across[number](attended))
            x = self._fed(parts, x)
        logits, targets = self.head(x).flatten(0, 1), batch.target_labels.flatten()
        loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)
        return Output(loss, loss.detach(), torch.ones(()))

    def caches(self, rows: int, capacity: int) -> Tensor:
        """Return room for keys and values: (layers, 2, rows, heads, capacity, width)."""
        width = self.config.d_model // self.heads
        return self.head.weight.new_empty(len(self.layers), 2, rows, self.heads, capacity, width)

    def step(self, tokens: Tensor, caches: Tensor, place: int, sources: Tensor, bias: Tensor) -> Tensor:
        """Args: sources: keys and values of the source, as `caches`. bias: -inf for padding, (rows, 1, 1, keys)."""
        x = self.embedding(tokens) * 22.6 + self.get_buffer("positions")[place]
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            parts: Any = layer
            q, *kv = parts.maps[0](x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            cache[..., place : place + 1, :] = kv[0].as_strided((2, *kv[0].shape), (kv[0].stride(-1), *kv[0].stride()))
            attended = F.scaled_dot_product_attention(q, *cache[..., : place + 1, :].unbind(0))
            x = self._added(parts.norms[0], x, parts.out(attended.transpose(1, 2).flatten(2)))
            (q,) = self._split(parts.maps[1](x), 1)
            attended = F.scaled_dot_product_attention(q, *sources[number].unbind(0), attn_mask=bias)
            attended = self.out_across[number](attended.transpose(1, 2).flatten(2))
            x = self._added(self.norm_across[number], x, attended)
            inner = torch._addmm_activation(parts.inner.bias, x.flatten(0, 1), parts.inner.weight.t())
            x = self._added(parts.norms[1], x, parts.outer(inner.view(*x.shape[:2], -1)))
        return self.head(x[:, -1]).float().log_softmax(-1)

    def _embed(self, ids: Tensor, places: Tensor | None) -> Tensor:
        table = self.get_buffer("positions")
        positions = table[: ids.shape[1]] if places is None else table[places]
        return self._drop((self.embedding(ids) * 22.6 + positions).bfloat16())

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.rate, self.training) if self.rate and self.training else x

    def _split(self, x: Tensor, count: int) -> list[Tensor]:
        parts = x.chunk(count, dim=-1) if count > 1 else (x,)
        return [one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts]

    def _added(self, norm: Any, x: Tensor, more: Tensor) -> Tensor:
        out: Tensor = norm(x + self._drop(more))
        return out

    def _fed(self, parts: Any, x: Tensor) -> Tensor:
        return self._added(parts.norms[1], x, parts.outer(F.relu(parts.inner(x))))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, queries: Any, keys: Any, is_causal: bool = False) -> Tensor:
        if queries is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2)
        window = (-1, 0) if is_causal else (-1, -1)
        rows = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
        out: Any = varlen_attn(*rows, queries, keys, 64, 64, window_size=window)
        return out.flatten(1).unsqueeze(0)


def keys_of_chunks(order: Tensor, chunk_len: int) -> Tensor:
    """(rows, rounds, length) -> (rows, chunks, chunk_len)"""
    return order.flatten(1).unflatten(1, (-1, chunk_len))
