"""Marian models of `transformers` (MarianMTModel), such as OPUS-MT: computation and generation.

Differs from ours: a query that may attend to nothing attends to all keys equally. Weights: `marian_weights`; rules of
generation: `marian_generation`, `decoding.rules`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.decoding.hypothesis import Hypothesis
from manyheads.decoding.search import search
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import RequestError
from manyheads.interop.marian_generation import MarianIds, settings_from_peer
from manyheads.interop.marian_weights import SPECIAL_IDS, build, to_peer
from manyheads.interop.peer import Peer, require
from manyheads.interop.scores import decode, encode

__all__ = ["Marian"]


class Marian(Peer):
    """The translation model. Sources to translate must be padded on the right.

    A config holds MarianConfig's options under `model`, and generation options beside it if it has `max_length`.
    """

    name = "Marian"
    kinds = ("hf_marian",)
    origin = "transformers[ /]Marian"
    inputs = ("src", "src_mask", "decoder_input_ids", "decoder_mask", "labels")

    @classmethod
    def from_peer(cls, config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> Marian:
        return cls(build(config["model"], state_dict), config, {**SPECIAL_IDS, **config["model"]})

    @classmethod
    def to_peer(cls, module: Seq2Seq) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return to_peer(module)

    @property
    def ids(self) -> MarianIds:
        """The special ids."""
        return MarianIds.of(self.chosen)

    @torch.no_grad()
    def answer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        [source], labels = require(inputs, "src"), inputs.get("in.labels")
        source_mask = inputs.get("in.src_mask", torch.ones_like(source)) != 0
        if "in.decoder_input_ids" not in inputs and labels is not None:
            inputs = {**inputs, "in.decoder_input_ids": self._shifted(labels)}
        [target] = require(inputs, "decoder_input_ids")
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()[None, None]
        memory_allowed = source_mask[:, None, None]
        memory = encode(self.module, source, memory_allowed)
        hidden = decode(self.module, target, memory, causal, memory_allowed)
        logits = self.module.head.logits(hidden)
        answer = {"out.encoder_last_hidden": memory, "out.decoder_last_hidden": hidden, "out.logits": logits}
        if "in.decoder_mask" in inputs:
            allowed = causal & (inputs["in.decoder_mask"] != 0)[:, None, None]
            masked = decode(self.module, target, memory, allowed, memory_allowed)
            answer["out.logits_with_decoder_mask"] = self.module.head.logits(masked)
        if labels is not None:
            answer["out.loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if "max_length" in self.config:
            answer |= self._generate(source, source_mask)
        return answer

    def generate(self, source: Tensor, mask: Tensor, settings: DecodingSettings) -> list[list[Hypothesis]]:
        """Translate with our search.

        Raises: RequestError: a source has padding before its end.
        """
        lengths = mask.sum(dim=1)
        if not torch.equal(mask, torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]):
            raise RequestError("a source has padding before its end; pad on the right to translate.")
        return search(
            self.module,
            source,
            lengths,
            settings,
            pad_id=self.ids.pad,
            bos_id=self.ids.start,
            eos_id=self.ids.eos,
        )

    def _generate(self, source: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the fixtures' results: greedy, and all four beams for each length penalty."""
        generation = {
            "max_length": self.config["max_length"],
            "bad_words_ids": [[self.ids.pad]],
            "early_stopping": self.config.get("early_stopping", False),
            "forced_eos_token_id": self.chosen["forced_eos_token_id"],
        }
        greedy = settings_from_peer({**generation, "num_beams": 1}, self.ids)
        found = self.generate(source, mask, greedy)
        answer = {"out.greedy_ids": self._peer_ids([rows[0] for rows in found])}
        for penalty in self.config.get("length_penalties", ()):
            more = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": penalty}
            found = self.generate(source, mask, settings_from_peer({**generation, **more}, self.ids))
            ids = self._peer_ids([hypothesis for rows in found for hypothesis in rows])
            answer[f"out.beam4_lp{penalty}_ids"] = ids.view(len(found), 4, -1)
            answer[f"out.beam4_lp{penalty}_scores"] = torch.tensor([[one.score for one in rows] for rows in found])
        return answer

    def _peer_ids(self, hypotheses: Sequence[Hypothesis]) -> Tensor:
        """Return the ids in the peer's format: the start token, EOS if generated, padding."""
        rows = [[self.ids.start, *one.ids, *([self.ids.eos] if one.ended else [])] for one in hypotheses]
        width = max(map(len, rows))
        return torch.tensor([row + [self.ids.pad] * (width - len(row)) for row in rows])

    def _shifted(self, labels: Tensor) -> Tensor:
        """Return the decoder inputs of labels, in which -100 is padding."""
        start = labels.new_full((labels.shape[0], 1), self.ids.start)
        return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == -100, self.ids.pad)], dim=1)
