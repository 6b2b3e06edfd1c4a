"""Language models as models of transformers: AutoModelForCausalLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import ModelOutput

from manyheads.decoding.generation import READ_AT_ONCE, context_settings
from manyheads.decoding.settings import GenerationSettings
from manyheads.errors import RequestError
from manyheads.extras.hf.model import (
    IGNORED_LABEL,
    ManyHeadsModel,
    Rows,
    StateCache,
    check_cache,
    check_ids,
    check_mask,
    loss_of,
    refuse_hidden_states,
    refuse_rest,
    watched,
    weights_of,
)


@dataclass
class CausalLMOutput(ModelOutput):  # type: ignore[misc]
    """Result of `ManyHeadsForCausalLM`.

    loss: nats per label, if labels were given. logits: scores of the token after each (batch, len, vocab_size); None in
    training with labels, where the loss is computed without them. past_key_values: for the next columns, with
    use_cache. attentions: (batch, heads, len, keys) of each layer; keys are those in memory, then those of the input.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: StateCache | None = None
    attentions: tuple[Tensor, ...] | None = None


class ManyHeadsForCausalLM(ManyHeadsModel):
    """A language model of this package as a model of transformers.

    Without a cache, a call reads its input as one segment with an empty memory. With `use_cache`, the state of the
    model is returned: in evaluation what generation needs; in training the memory of a Transformer-XL, which has no
    gradient.
    """

    task = "language-modelling"

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        embedding: nn.Module = self.model.body.embedding
        return embedding

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **unsupported: Any,
    ) -> CausalLMOutput | tuple[Any, ...]:
        """Read the next columns of every row.

        Args:
            input_ids: (batch, len). The id vocab_size is padding, too.
            attention_mask: (batch, len), 1 = real, 0 = padding, at any place, or with the columns of the cache before
                them; None: all are real.
            past_key_values: of the previous call, which is continued in place.
            labels: (batch, len), the input ids again; they are shifted here. -100 does not count.
            use_cache: return `past_key_values`. None: if one is given.
            logits_to_keep: only those of so many last columns, or of these columns; 0: all.
            output_attentions: return the attention weights. None: as in the config.
            return_dict: False: a tuple.
            num_items_in_batch: the loss is divided by this number instead of the number of labels that count.

        Raises: RequestError, ShapeError: bad input, or an argument that these models do not have.
        """
        refuse_rest(self, unsupported)
        refuse_hidden_states(output_hidden_states)
        vocab_size = self.config.vocab_size
        check_ids("input_ids", input_ids, vocab_size, ignored=vocab_size)
        assert input_ids is not None
        cache = None if past_key_values is None else check_cache(past_key_values)
        if cache is None and use_cache:
            cache = StateCache()
        mask = check_mask("attention_mask", attention_mask, input_ids, 0 if cache is None else cache.num_read)
        is_padding = input_ids == vocab_size
        if mask is None and (cache is None or not cache.num_read):
            mask = ~is_padding
        rows = Rows.of(input_ids.masked_fill(is_padding, 0), mask)
        wanted = self.config.output_attentions if output_attentions is None else output_attentions
        with watched(self.model, wanted) as record:
            hidden = self._read(rows, cache, bool(wanted))
        loss = None
        if labels is not None:
            check_ids("labels", labels, vocab_size, ignored=IGNORED_LABEL)
            targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
            loss = loss_of(self.model.head, hidden, rows.ordered(targets), num_items_in_batch)
        logits = None
        if loss is None or not self.training:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.model.head.logits(rows.restored(hidden)[:, kept])
        attentions = None
        if wanted:
            found = weights_of(self.model, record, ["decoder"]).decoder
            attentions = tuple(rows.restored_weights(rows.restored_weights(one, 2), 3) for one in found)
        output = CausalLMOutput(loss=loss, logits=logits, past_key_values=cache, attentions=attentions)
        is_dict = self.config.return_dict if return_dict is None else return_dict
        return output if is_dict else output.to_tuple()

    def _read(self, rows: Rows, cache: StateCache | None, is_watched: bool) -> Tensor:
        """Return the hidden states of all columns, and continue the cache."""
        body = self.model.body
        if cache is None:
            hidden: Tensor = body(rows.ids, rows.lengths, None)[0]
            return hidden
        num_rows, columns = rows.ids.shape
        if cache.state is None:
            cache.state = self._start(num_rows)
        if self.training:
            hidden, cache.state = body(rows.ids, rows.lengths, cache.state)
            cache.num_read += columns
            return hidden
        if is_watched and columns > READ_AT_ONCE:
            raise RequestError(
                f"output_attentions of {columns:,} columns with a cache, which reads {READ_AT_ONCE} at once; set"
                " use_cache to false."
            )
        parts = []
        for begin in range(0, columns, READ_AT_ONCE):  # as `manyheads generate` reads a prompt
            part = rows.ids[:, begin : begin + READ_AT_ONCE]
            lengths = None
            if rows.lengths is not None:
                lengths = (rows.lengths - begin).clamp(min=0, max=part.shape[1])
            found, cache.state = body(part, lengths, cache.state)
            parts.append(found)
        cache.num_read += columns
        return torch.cat(parts, dim=1)

    def _start(self, num_rows: int) -> Any:
        """Return the empty state: in evaluation that of `manyheads generate`."""
        if not self.training:
            return self.model.start(num_rows, context_settings(self.model, GenerationSettings()))
        if self.model.config.reads_segments_apart:
            raise RequestError(
                f"in training a {self.model.config.architecture} passes nothing on to the next segment; leave use_cache"
                " out."
            )
        return self.model.start(num_rows, projected=False)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: StateCache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | None = None,
        output_attentions: bool | None = None,
        is_first_iteration: bool | None = False,
    ) -> dict[str, Any]:
        """Return the arguments of `forward` for a step of `generate`."""
        if next_sequence_length is not None:
            input_ids = input_ids[:, -next_sequence_length:]
        return {
            "input_ids": input_ids,
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep or 0,
            "output_attentions": output_attentions,
        }
