"""The Annotated Transformer (harvardnlp): its model, its label smoothing, its learning rates.

Differs from ours: a layer norm with the unbiased standard deviation and eps outside the root
(`nn.layers.UnbiasedLayerNorm`); masks filled with a large negative number, so that a query that may attend to nothing
attends to all keys equally; label smoothing without the padding column, as a divergence that includes the entropy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.errors import ConfigError, ModelFileError, RequestError
from manyheads.extras.peers.peer import TRANSFORMER, Holds, Options, Peer, decode, encode, require, uniform_when_empty
from manyheads.models.transformer.config import TransformerConfig
from manyheads.nn.attention.settings import DotProductAttentionConfig
from manyheads.nn.positions import sinusoidal_table
from manyheads.training.optim.schedule import noam

if TYPE_CHECKING:
    from manyheads.extras.peers.peer import Layout
    from manyheads.models.composites import Seq2Seq


class LabelSmoothing(nn.Module):
    """Divergence of log-probabilities from smoothed targets, summed: sum t (log t - log p).

    Paper: Szegedy et al. 2016, arXiv:1512.00567, sec. 7. Differs: the padding column gets nothing, so vocab_size - 2
        tokens share the smoothing; rows with padding as the target have no loss; the entropy of t is included.
    Raises: ConfigError: smoothing with fewer than 3 tokens, where no token can share it (the peer divides by zero).
    """

    def __init__(self, vocab_size: int, pad_id: int, smoothing: float) -> None:
        super().__init__()
        if smoothing and vocab_size < 3:
            raise ConfigError(
                f"smoothing {smoothing} over a vocabulary of {vocab_size} has no token to go to besides the target and"
                " padding; use at least 3 tokens, or smoothing 0."
            )
        self.vocab_size, self.pad_id, self.smoothing = vocab_size, pad_id, smoothing

    def targets(self, target: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the target distribution. target (tokens,) -> (tokens, vocab_size)"""
        share = self.smoothing / max(1, self.vocab_size - 2)
        dist = torch.full((target.shape[0], self.vocab_size), share, dtype=dtype, device=target.device)
        dist.scatter_(1, target[:, None], 1.0 - self.smoothing)
        dist[:, self.pad_id] = 0.0
        return dist.masked_fill(target[:, None] == self.pad_id, 0.0)

    def forward(self, log_probs: Tensor, target: Tensor) -> Tensor:
        """log_probs (tokens, vocab_size), target (tokens,) -> scalar"""
        return F.kl_div(log_probs, self.targets(target, log_probs.dtype), reduction="sum")


class AnnotatedSmoothing(Peer):
    """Label smoothing, and learning rates if the config has (d_model, factor, warmup) under `noam`."""

    name = "LabelSmoothing"
    section = None
    ignores_others = True
    options: ClassVar[Options] = {"V": int, "pad": int, "smoothing": float}

    @classmethod
    def build(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> LabelSmoothing:
        return LabelSmoothing(options["V"], options["pad"], options["smoothing"])

    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given, target = require(inputs, "log_probs", "target")
        log_probs = given.detach().requires_grad_()
        with torch.enable_grad():
            loss = self.module(log_probs, target)
            (grad,) = torch.autograd.grad(loss, log_probs)
        answer = {
            "out.loss": loss.detach(),
            "out.loss_row": torch.stack(
                [self.module(row[None], t[None]) for row, t in zip(log_probs.detach(), target, strict=True)]
            ),
            "out.true_dist": self.module.targets(target, log_probs.dtype),
            "grad.log_probs": grad,
        }
        if "in.noam_steps" in inputs:
            steps = [int(step) for step in inputs["in.noam_steps"]]
            answer["out.noam_rate"] = torch.tensor(
                [
                    [noam(step, factor=float(factor), d_model=int(d_model), warmup_steps=int(warmup)) for step in steps]
                    for d_model, factor, warmup in self.config.get("noam", [])
                ],
                dtype=torch.float32,
            )
        return answer


class AnnotatedTransformer(Peer):
    """The translation model; without `model` in the config, `AnnotatedSmoothing`.

    The loss per token and greedy ids are included if the config describes them (`smoothing`, `greedy_len`). Greedy
    search reads the first sentence and starts with `start_symbol`, by default 1.
    """

    name = "the Annotated Transformer (make_model)"
    kinds = ("annotated_transformer", "annotated_label_smoothing")
    origin = "harvardnlp/annotated-transformer"
    options: ClassVar[Options] = {
        "src_vocab": int,
        "tgt_vocab": int,
        "N": 6,
        "d_model": 512,
        "d_ff": 2048,
        "h": 8,
        "dropout": 0.1,
        "eps": 1e-6,
    }
    inputs = ("src", "src_mask", "tgt", "tgt_mask", "tgt_y", "tgt_full")
    same: ClassVar[Mapping[str, str]] = {
        "src_vocab": "source_vocab_size",
        "tgt_vocab": "target_vocab_size",
        "N": "num_encoder_layers",
        "d_model": "d_model",
        "d_ff": "d_ff",
        "h": "num_heads",
        "dropout": "dropout",
    }
    layout: ClassVar[Layout] = {
        "src_embed.0.lut.weight": "body.source_embedding.weight",
        "tgt_embed.0.lut.weight": "body.target_embedding.weight",
        "generator.proj.*": "head.*",
        "*.layers.*.self_attn.linears.{0,1,2,3}.*": "body.*.layers.*.self_attn.{q,k,v,out}_proj.*",
        "*.layers.*.src_attn.linears.{0,1,2,3}.*": "body.*.layers.*.cross_attn.{q,k,v,out}_proj.*",
        "*.layers.*.feed_forward.w_{1,2}.*": "body.*.layers.*.feed_forward.{in,out}_proj.*",
        "*.layers.*.sublayer.0.norm.{a_2,b_2}": "body.*.layers.*.self_attn_residual.norm.{weight,bias}",
        "encoder.layers.*.sublayer.1.norm.{a_2,b_2}": "body.encoder.layers.*.feed_forward_residual.norm.{weight,bias}",
        "decoder.layers.*.sublayer.1.norm.{a_2,b_2}": "body.decoder.layers.*.cross_attn_residual.norm.{weight,bias}",
        "decoder.layers.*.sublayer.2.norm.{a_2,b_2}": "body.decoder.layers.*.feed_forward_residual.norm.{weight,bias}",
        "*.norm.{a_2,b_2}": "body.*.norm.{weight,bias}",
    }
    holds: ClassVar[Holds] = {
        **TRANSFORMER,
        "activation": ("relu",),
        "attention": (DotProductAttentionConfig(),),
        "bias": (True,),
        "head_bias": (True,),
        "norm": ("unbiased",),
        "norm_position": ("pre",),
        "positions": ("sinusoidal",),
        "scale_embedding": (True,),
    }
    # `pe[:64]` contains the first rows of a table of positions; a complete checkpoint has one table per side.
    unused = r"(.*\.)?pe(\[.*)?"

    @classmethod
    def from_peer(cls, config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> Peer:
        if "model" not in config:
            return AnnotatedSmoothing.from_peer(config, state_dict)
        return super().from_peer(config, state_dict)

    @classmethod
    def config_of(cls, options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> TransformerConfig:
        for name in weights:
            if re.fullmatch(cls.unused, name):
                _check_positions(name, weights[name], options["d_model"])
        return TransformerConfig(
            **cls.fields_of(options),
            num_decoder_layers=options["N"],
            # The peer always uses an attention dropout of 0.1, whatever its options say. Not reproduced here.
            attention_dropout=options["dropout"],
            feed_forward_dropout=options["dropout"],
            norm_position="pre",
            norm="unbiased",
            norm_eps=options["eps"],
            tie_embeddings="none",
            head_bias=True,
        )

    @classmethod
    def describe(cls, module: Seq2Seq) -> dict[str, Any]:
        config = module.config
        cls.check(config)
        cls.demand(
            config,
            {
                "has_final_norm": True,
                "num_decoder_layers": config.num_encoder_layers,
                "decoder_d_ff": config.decoder_d_ff and config.d_ff,
                "num_decoder_heads": config.num_decoder_heads and config.num_heads,
            },
        )
        options = cls.options_of(config)
        return options if config.norm_eps == cls.options["eps"] else {**options, "eps": config.norm_eps}

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        source, target = require(inputs, "src", "tgt")
        source_mask = self._mask(inputs.get("in.src_mask"), source)
        target_mask = self._mask(inputs.get("in.tgt_mask"), target, causal=True)
        memory = encode(self.module, source, source_mask)
        hidden = decode(self.module, target, memory, target_mask, source_mask)
        log_probs = self.module.head.log_probs(hidden)
        answer = {"out.memory": memory, "out.decoder": hidden, "out.logprobs": log_probs}
        if "smoothing" in self.config:
            labels = inputs["in.tgt_y"] if "in.tgt_y" in inputs else require(inputs, "tgt_full")[0][:, 1:]
            pad = self._pad()
            smoothing = LabelSmoothing(log_probs.shape[-1], pad, float(self.config["smoothing"]))
            loss = smoothing(log_probs.flatten(0, 1), labels.flatten())
            answer["out.smoothed_loss_per_token"] = loss / (labels != pad).sum()
        if "greedy_len" in self.config:
            answer["out.greedy_ids"] = self.greedy(source[:1], source_mask, int(self.config["greedy_len"]))
        return answer

    def greedy(self, source: Tensor, source_mask: Tensor, length: int) -> Tensor:
        """Return the most probable token at each step, also after EOS, computed with our cache: (1, length), start
        included.
        """
        body = self.module.body
        state = body.decoder.start(encode(self.module, source, source_mask[:1]))
        ids = [torch.full((1, 1), int(self.config.get("start_symbol", 1)))]
        with uniform_when_empty(body.decoder, "cross_attn", source_mask[:1]) as allowed:
            for first in range(length - 1):
                x = body.target_positions(body.target_embedding(ids[-1]), first)
                layers, state = state.prepare(1)
                hidden = body.decoder.step(x, layers, None, allowed)
                ids.append(self.module.head.logits(hidden[:, -1]).argmax(dim=-1, keepdim=True))
        return torch.cat(ids, dim=1)

    def _pad(self) -> int:
        if "pad" not in self.config:
            raise ConfigError("the config has no 'pad', the id that padding has.")
        return int(self.config["pad"])

    def _mask(self, given: Tensor | None, ids: Tensor, causal: bool = False) -> Tensor:
        """Return (batch, 1, q_len or 1, k_len), True = may attend; computed from the ids if the peer would do so."""
        if given is None:
            given = (ids != self._pad())[:, None]
            if causal:
                length = ids.shape[1]
                given = given & torch.ones(length, length, dtype=torch.bool).tril()
        if given.dim() == 2:
            given = given[None]
        if given.dim() != 3 or given.is_floating_point():
            raise RequestError(
                f"a mask of shape {tuple(given.shape)} and type {given.dtype} is not supported; it must be bool or"
                " int, (batch, 1 or q_len, k_len), non-zero = may attend."
            )
        return (given != 0)[:, None]


def _check_positions(name: str, table: Tensor, d_model: int) -> None:
    """Check that a table equals our positions, which are computed for any length and need no copy."""
    rows = table.reshape(-1, table.shape[-1])
    if rows.shape[-1] != d_model:
        raise ModelFileError(f"{name} is {rows.shape[-1]} wide, d_model is {d_model}.")
    own = sinusoidal_table(torch.arange(float(rows.shape[0])), d_model)
    # The peer computes its angles in float32, with an error of about 3e-4 at position 5,000.
    if not torch.allclose(rows.float(), own, rtol=0.0, atol=2e-3):
        raise ModelFileError(f"{name} does not contain sinusoidal positions; a changed table is not supported.")
