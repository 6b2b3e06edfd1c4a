"""torch.nn.Transformer: two stacks on vectors, without embeddings, positions or an output layer.

Differs from ours: masks are True = blocked or are added to the scores; the query, key and value projections of an
attention layer are one matrix; both stacks end with a norm, also with post-norm; sequences may be length-first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.architectures.transformer.config import TransformerConfig
from manyheads.architectures.transformer.model import Decoder, Encoder
from manyheads.errors import ConfigError, RequestError
from manyheads.interop.names import Pair, export_weights, import_weights, pick, require
from manyheads.interop.scores import PeerMask, additive, scored_as

__all__ = ["EncoderDecoder", "TorchTransformer", "from_peer", "matches", "to_peer"]

_OPTIONS: dict[str, Any] = {
    "d_model": 512,
    "nhead": 8,
    "num_encoder_layers": 6,
    "num_decoder_layers": 6,
    "dim_feedforward": 2048,
    "dropout": 0.1,
    "activation": "relu",
    "layer_norm_eps": 1e-5,
    "batch_first": False,
    "norm_first": False,
    "bias": True,
}
_INPUTS = frozenset(
    f"in.{name}"
    for name in (
        *("src", "tgt", "src_mask", "tgt_mask", "memory_mask"),
        *("src_key_padding", "tgt_key_padding", "memory_key_padding"),
    )
)


class EncoderDecoder(nn.Module):
    """Our two stacks, on vectors. Shape: source (batch, source_len, d_model), target (batch, target_len, d_model)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: PeerMask = PeerMask(),  # noqa: B008 - frozen
        target_mask: PeerMask = PeerMask(),  # noqa: B008 - frozen
        memory_mask: PeerMask = PeerMask(),  # noqa: B008 - frozen
    ) -> tuple[Tensor, Tensor]:
        """Return (memory, output)."""
        with scored_as(self.encoder, "self_attn", source_mask) as mask:
            memory = self.encoder(source, mask)
        with (
            scored_as(self.decoder, "self_attn", target_mask) as mask,
            scored_as(self.decoder, "cross_attn", memory_mask) as cross_mask,
        ):
            return memory, self.decoder(target, memory, mask, cross_mask)


class TorchTransformer:
    """See `protocols.Wrapper`. config: the fixture's."""

    def __init__(self, module: EncoderDecoder, config: Mapping[str, Any]) -> None:
        self.module = module
        self.config = config
        self.batch_first = bool(config["model"].get("batch_first", _OPTIONS["batch_first"]))

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `protocols.Wrapper.run`. Memory's padding is the source's, unless in.memory_key_padding is given.

        Gradients, if the config asks for them, are those of the mean over real target positions of mean_d(out^2) x
        sum_d(sin(out)).
        """
        unknown = sorted(name for name in inputs if name.startswith(("in.", "rot.")) and name not in _INPUTS)
        if unknown:
            raise RequestError(f"torch.nn.Transformer has no input {unknown[0]}; it has {sorted(_INPUTS)}.")
        wants_grad = bool(self.config.get("grads"))
        with torch.set_grad_enabled(wants_grad):
            memory, out = self.module(
                self._batch_first(require(inputs, "in.src")),
                self._batch_first(require(inputs, "in.tgt")),
                self._mask(inputs, "src_mask", "src_key_padding"),
                self._mask(inputs, "tgt_mask", "tgt_key_padding"),
                self._mask(inputs, "memory_mask", "memory_key_padding", "src_key_padding"),
            )
            batched = inputs["in.src"].dim() == 3
            answer = {"out.memory": self._peer_layout(memory, batched), "out.out": self._peer_layout(out, batched)}
            if wants_grad:
                answer |= self._gradients(out, inputs.get("in.tgt_key_padding"))
        return answer

    def _gradients(self, out: Tensor, padding: Tensor | None) -> dict[str, Tensor]:
        real = torch.ones(out.shape[:2], dtype=torch.bool)
        if padding is not None:
            real = (~padding if padding.dtype == torch.bool else ~torch.isneginf(padding)).view(out.shape[:2])
        loss = (out.square().mean(dim=-1) * out.sin().sum(dim=-1))[real].mean()
        names, parameters = zip(*self.module.named_parameters(), strict=True)
        gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
        return {f"grad.{name}": grad for name, grad in export_weights(gradients, _pairs(self.module.config)).items()}

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x[None]  # torch also accepts one sequence without a batch axis
        if x.dim() != 3:
            raise RequestError(f"a sequence of vectors has 2 or 3 axes, this one has shape {tuple(x.shape)}.")
        return x if self.batch_first else x.transpose(0, 1)

    def _peer_layout(self, x: Tensor, batched: bool) -> Tensor:
        x = x.detach()
        if not batched:
            return x[0]
        return x if self.batch_first else x.transpose(0, 1).contiguous()

    def _mask(self, inputs: Mapping[str, Tensor], pattern: str, *paddings: str) -> PeerMask:
        """Return one attention's mask from torch's two: a pattern (q_len, k_len) and a key padding, bool or float."""
        blocked: Tensor | None = None
        bias: Tensor | None = None
        padding = next((name for name in paddings if f"in.{name}" in inputs), None)
        for name in (pattern, padding):
            if name is None or f"in.{name}" not in inputs:
                continue
            given = inputs[f"in.{name}"]
            part = self._pattern(given, name) if name == pattern else given.view(-1, 1, 1, given.shape[-1])
            if part.dtype == torch.bool:
                blocked = part if blocked is None else blocked | part
            elif part.is_floating_point():
                bias = part if bias is None else bias + part
            else:
                raise RequestError(f"in.{name} is of type {part.dtype}; a mask is bool (True = blocked) or float.")
        return additive(blocked, bias)

    def _pattern(self, given: Tensor, name: str) -> Tensor:
        if given.dim() == 2:
            return given[None, None]
        heads = self.module.config.num_heads
        if given.dim() == 3 and given.shape[0] % heads == 0:
            return given.view(-1, heads, *given.shape[1:])
        raise RequestError(
            f"in.{name} has shape {tuple(given.shape)}; it must be (q_len, k_len), or (batch x {heads}, q_len, k_len)."
        )


def matches(meta: Mapping[str, Any]) -> bool:
    """See `protocols.Loader.matches`."""
    if "kind" in meta:
        return bool(meta["kind"] == "torch_nn_transformer")
    return str(meta.get("peer", "")).split(" ")[0] == "torch.nn.Transformer"


def from_peer(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> TorchTransformer:
    """See `protocols.Loader.from_peer`. config: `model` holds torch.nn.Transformer's arguments."""
    options = pick(config.get("model", {}), _OPTIONS, "torch.nn.Transformer")
    if options["activation"] not in ("relu", "gelu"):
        raise ConfigError(f"activation is {options['activation']!r}; torch.nn.Transformer knows 'relu' and 'gelu'.")
    module = EncoderDecoder(
        TransformerConfig(
            d_model=options["d_model"],
            num_heads=options["nhead"],
            d_ff=options["dim_feedforward"],
            num_encoder_layers=options["num_encoder_layers"],
            num_decoder_layers=options["num_decoder_layers"],
            dropout=float(options["dropout"]),
            attention_dropout=float(options["dropout"]),
            feed_forward_dropout=float(options["dropout"]),
            activation=options["activation"],
            norm_position="pre" if options["norm_first"] else "post",
            norm_eps=float(options["layer_norm_eps"]),
            final_norm=True,
            bias=options["bias"],
        )
    )
    import_weights(module, state_dict, _pairs(module.config))
    return TorchTransformer(module.eval(), {**config, "model": options})


def to_peer(module: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The inverse of `from_peer`: torch.nn.Transformer's arguments (under `model`) and its state dict.

    Args: module: has `config`, `encoder` and `decoder`: an `EncoderDecoder`, or the body of a translation model, whose
        embeddings the peer does not have.

    Raises: ConfigError: torch.nn.Transformer does not support one of the options.
    """
    config: Any = module.config
    rates = {config.dropout, config.attention_dropout, config.feed_forward_dropout}
    refused = {
        "norm": config.norm != "layer",
        "final_norm": not config.has_final_norm,
        "activation": config.activation not in ("relu", "gelu"),
        "attention": config.attention.kind != "dot_product",
        "decoder_d_ff": config.d_ff_of("decoder") != config.d_ff,
        "num_decoder_heads": config.heads_of("decoder") != config.num_heads,
    }
    for name, bad in refused.items():
        if bad:
            value = getattr(config, name)
            raise ConfigError(f"torch.nn.Transformer cannot hold a model with {name} {value!r}.")
    options = {
        "d_model": config.d_model,
        "nhead": config.num_heads,
        "num_encoder_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "dim_feedforward": config.d_ff,
        # The peer has one dropout rate; if ours differ, results in evaluation are still the same.
        "dropout": max(rates),
        "activation": config.activation,
        "layer_norm_eps": config.norm_eps,
        "batch_first": True,
        "norm_first": config.norm_position == "pre",
        "bias": config.bias,
    }
    return {"model": options}, export_weights(dict(module.named_parameters()), _pairs(config))


def _pairs(config: TransformerConfig) -> list[Pair]:
    kinds = ("weight", "bias") if config.bias else ("weight",)
    pairs: list[Pair] = []

    def attention(peer: str, ours: str) -> None:
        for kind in kinds:
            pairs.append(Pair(f"{peer}.in_proj_{kind}", tuple(f"{ours}.{part}_proj.{kind}" for part in "qkv")))
            pairs.append(Pair(f"{peer}.out_proj.{kind}", (f"{ours}.out_proj.{kind}",)))

    def plain(peer: str, ours: str) -> None:
        pairs.extend(Pair(f"{peer}.{kind}", (f"{ours}.{kind}",)) for kind in kinds)

    for stack, count in (("encoder", config.num_encoder_layers), ("decoder", config.num_decoder_layers)):
        sublayers = ["self_attn", "cross_attn", "feed_forward"] if stack == "decoder" else ["self_attn", "feed_forward"]
        for layer in (f"{stack}.layers.{i}" for i in range(count)):
            attention(f"{layer}.self_attn", f"{layer}.self_attn")
            if stack == "decoder":
                attention(f"{layer}.multihead_attn", f"{layer}.cross_attn")
            plain(f"{layer}.linear1", f"{layer}.feed_forward.in_proj")
            plain(f"{layer}.linear2", f"{layer}.feed_forward.out_proj")
            for number, sublayer in enumerate(sublayers, start=1):
                plain(f"{layer}.norm{number}", f"{layer}.{sublayer}_residual.norm")
        plain(f"{stack}.norm", f"{stack}.norm")
    return pairs
