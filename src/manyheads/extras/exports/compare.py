"""Code shared by the exports of translation models: loading, refusals, and the comparison of results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from manyheads.decoding.search import search_all
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.text_ids import with_end
from manyheads.errors import ConfigError
from manyheads.text.of_folder import load_tokenizer
from manyheads.text.pipeline import has_tokenizer

if TYPE_CHECKING:
    from manyheads.models.composites import Seq2Seq
    from manyheads.text.sides import Side, TranslationTokenizer

LIMIT = 1e-3
"""The deviation of a log-probability in float32 above which an export is wrong; rounding gives about 1e-5."""
MOST_TOKENS = 32
"""The length of the greedy outputs that are compared."""


def tokenizer_of(model: Path, name: str) -> TranslationTokenizer:
    """Return the tokenizer of a translation model.

    Raises: ConfigError: the model has no tokenizer, or is a parser. DataError: the tokenizer is damaged.
    """
    if not has_tokenizer(model):
        raise ConfigError(
            f"{model} has no tokenizer, so the ids of padding, start and end, which the format {name} needs, are"
            " unknown; save the model with its tokenizer."
        )
    tokenizer = load_tokenizer(model)
    if (kind := tokenizer.model_kind) != "translator":
        raise ConfigError(
            f"{model} is a {kind}: its grammar (well_formed) restricts each step of the search, which the format {name}"
            " cannot hold; use manyheads translate, which writes trees."
        )
    return tokenizer


def never_produced(writer: Side) -> tuple[int, ...]:
    """Return the target ids that our search never produces: padding, and the start token unless it is EOS (fairseq).

    The search (`search_problem.Constraints`) bans the same ids.
    """
    return tuple(sorted({writer.pad_id, writer.bos_id} - {writer.eos_id}))


@dataclass(frozen=True)
class Reference:
    """The model's own results for some sources.

    sources: ids with EOS. outputs: greedy ids with EOS, if it was produced within MOST_TOKENS. log_probs: for each
    output (tokens, vocab_size), with teacher forcing.
    """

    sources: list[list[int]]
    outputs: list[list[int]]
    log_probs: list[Tensor]

    def of_tokens(self, banned: tuple[int, ...]) -> list[Tensor]:
        """Return the log-probability of each output token if some ids have probability 0."""
        found = []
        for ids, rows in zip(self.outputs, self.log_probs, strict=True):
            rows = rows.clone()
            rows[:, list(banned)] = -torch.inf
            found.append(rows.log_softmax(dim=-1)[torch.arange(len(ids)), torch.tensor(ids)])
        return found


@torch.inference_mode()
def reference(module: Seq2Seq, tokenizer: TranslationTokenizer, sentences: list[list[int]]) -> Reference:
    """Translate ids of sources greedily with our own search."""
    writer = tokenizer.target
    longest = module.max_len or MOST_TOKENS + 1
    sources = [with_end(ids[: longest - 1], tokenizer.source) for ids in sentences]
    settings = DecodingSettings(num_beams=1, max_new_tokens=min(MOST_TOKENS, longest - 1))
    hypotheses = search_all(module, sources, settings, pad_id=writer.pad_id, bos_id=writer.bos_id, eos_id=writer.eos_id)
    found = [rows[0] for rows in hypotheses]
    outputs = [[*one.ids, *([writer.eos_id] if one.ended else [])] for one in found]
    log_probs = [
        module.log_probs(
            torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([[writer.bos_id, *output[:-1]]])
        )[0].float()
        for source, output in zip(sources, outputs, strict=True)
    ]
    return Reference(sources, outputs, log_probs)
