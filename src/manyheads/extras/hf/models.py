"""Models of transformers: language models as AutoModelForCausalLM, translators as AutoModelForSeq2SeqLM."""

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


@dataclass
class EncoderOutput(ModelOutput):  # type: ignore[misc]
    """Result of the encoder. last_hidden_state: (batch, source_len, d_model), undefined at padding. attentions: (batch,
    heads, source_len, source_len) of each layer.
    """

    last_hidden_state: Tensor | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class Seq2SeqLMOutput(ModelOutput):  # type: ignore[misc]
    """Result of `ManyHeadsForSeq2SeqLM`.

    loss: nats per label, if labels were given. logits: scores of the token after each of decoder_input_ids, (batch,
    len, vocab_size); None in training with labels. past_key_values: for the next columns, with use_cache.
    decoder_attentions, cross_attentions, encoder_attentions: (batch, heads, queries, keys) of each layer.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: StateCache | None = None
    decoder_attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_attentions: tuple[Tensor, ...] | None = None


class _Encoder(nn.Module):
    """The encoder alone, for `generate`; it owns no parameters."""

    main_input_name = "input_ids"

    def __init__(self, owner: ManyHeadsForSeq2SeqLM) -> None:
        super().__init__()
        self.owner = (owner,)  # not a child of this module

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> EncoderOutput:
        """Encode the sources; see `ManyHeadsForSeq2SeqLM.forward`."""
        refuse_hidden_states(output_hidden_states)
        return self.owner[0].encode(input_ids, attention_mask, output_attentions)


class ManyHeadsForSeq2SeqLM(ManyHeadsModel):
    """A translator of this package as a model of transformers."""

    task = "translation"

    def get_encoder(self, *_: Any, **__: Any) -> _Encoder:
        """Return the encoder."""
        return _Encoder(self)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of sources."""
        embedding: nn.Module = self.model.body.source_embedding
        return embedding

    def encode(
        self, input_ids: Tensor | None, attention_mask: Tensor | None = None, output_attentions: bool | None = None
    ) -> EncoderOutput:
        """Encode the sources; see `forward`."""
        check_ids("input_ids", input_ids, self.model.config.source_vocab_size)
        assert input_ids is not None
        rows = Rows.of(input_ids, check_mask("attention_mask", attention_mask, input_ids))
        with watched(self.model, output_attentions) as record:
            hidden = self.model.body.encode(rows.ids, rows.all_lengths())
        attentions = None
        if output_attentions:
            found = weights_of(self.model, record, ["encoder"]).encoder
            attentions = tuple(rows.restored_weights(rows.restored_weights(one, 2), 3) for one in found)
        return EncoderOutput(last_hidden_state=rows.restored(hidden), attentions=attentions)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **unsupported: Any,
    ) -> Seq2SeqLMOutput | tuple[Any, ...]:
        """Predict the token after each of the targets.

        Args:
            input_ids: (batch, source_len) sources with EOS.
            attention_mask: of the sources, 1 = real, 0 = padding, at any place; None: all are real.
            decoder_input_ids: (batch, len) targets, which begin with BOS; with a cache the next columns. None: `labels`
                after BOS.
            decoder_attention_mask: of the targets; a cache needs all of them to be real.
            encoder_outputs: of the encoder, in place of input_ids.
            past_key_values: of the previous call, which is continued in place.
            labels: (batch, len) targets with EOS and without BOS. -100 does not count.
            use_cache: return `past_key_values`, in evaluation. None: if one is given.
            output_attentions: return the attention weights. None: as in the config.
            return_dict: False: a tuple.
            num_items_in_batch: the loss is divided by this number instead of the number of labels that count.

        Raises: RequestError, ShapeError: bad input, or an argument that these models do not have.
        """
        refuse_rest(self, unsupported)
        refuse_hidden_states(output_hidden_states)
        wanted = self.config.output_attentions if output_attentions is None else output_attentions
        vocab_size = self.config.vocab_size
        if labels is not None:
            check_ids("labels", labels, vocab_size, ignored=IGNORED_LABEL)
            if decoder_input_ids is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        check_ids("decoder_input_ids", decoder_input_ids, vocab_size)
        assert decoder_input_ids is not None
        if encoder_outputs is None:
            encoder_outputs = self.encode(input_ids, attention_mask, wanted)
        elif not isinstance(encoder_outputs, ModelOutput):
            encoder_outputs = EncoderOutput(last_hidden_state=encoder_outputs[0])
        memory = encoder_outputs.last_hidden_state
        source = Rows.of(memory[..., 0], check_mask("attention_mask", attention_mask, memory[..., 0]))
        cache = self._cache(past_key_values, use_cache)
        mask = check_mask("decoder_attention_mask", decoder_attention_mask, decoder_input_ids, _read(cache))
        target = Rows.of(decoder_input_ids, mask)
        with watched(self.model, wanted) as record:
            hidden = self._decode(target, source.ordered(memory), source.all_lengths(), cache)
        loss = None if labels is None else loss_of(self.model.head, hidden, target.ordered(labels), num_items_in_batch)
        logits = None if loss is not None and self.training else self.model.head.logits(target.restored(hidden))
        output = Seq2SeqLMOutput(loss=loss, logits=logits, past_key_values=cache, encoder_last_hidden_state=memory)
        if wanted:
            found = weights_of(self.model, record, ["decoder", "cross"])
            output.decoder_attentions = tuple(
                target.restored_weights(target.restored_weights(one, 2), 3) for one in found.decoder
            )
            output.cross_attentions = tuple(
                source.restored_weights(target.restored_weights(one, 2), 3) for one in found.cross
            )
            output.encoder_attentions = encoder_outputs.get("attentions")
        is_dict = self.config.return_dict if return_dict is None else return_dict
        return output if is_dict else output.to_tuple()

    def _cache(self, given: Any, use_cache: bool | None) -> StateCache | None:
        if given is None and not use_cache:
            return None
        if self.training:
            raise RequestError("a translator has no cache in training; leave use_cache and past_key_values out.")
        return StateCache() if given is None else check_cache(given)

    def _decode(self, target: Rows, memory: Tensor, lengths: Tensor, cache: StateCache | None) -> Tensor:
        """Return the decoder's states. memory: with real positions in front."""
        body = self.model.body
        if cache is None:
            hidden: Tensor = body.decode(target.ids, memory, lengths)
            return hidden
        if target.lengths is not None:
            raise RequestError("decoder_attention_mask has zeros, which a cache cannot skip; set use_cache to false.")
        if cache.state is None:
            # One state for each sentence; its beams share the keys and values of the source.
            cache.state = body.start_after(memory[:: cache.beams], lengths[:: cache.beams])
            if cache.beams > 1:
                sentences = torch.arange(len(memory) // cache.beams, device=memory.device)
                cache.state = cache.state.reorder(sentences[:, None].expand(-1, cache.beams))
        hidden, cache.state = body.step(target.ids, cache.state)
        cache.num_read += target.ids.shape[1]
        return hidden

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return the decoder's input for labels: BOS, and all labels but the last; padding in place of -100."""
        start, padding = self.config.decoder_start_token_id, self.config.pad_token_id
        ids = labels.masked_fill(labels == IGNORED_LABEL, padding)
        return torch.cat([ids.new_full((len(ids), 1), start), ids[:, :-1]], dim=1)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: StateCache | None = None,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        is_first_iteration: bool | None = False,
    ) -> dict[str, Any]:
        """Return the arguments of `forward` for a step of `generate`. input_ids: the decoder's."""
        if next_sequence_length is not None:
            input_ids = input_ids[:, -next_sequence_length:]
        return {
            "decoder_input_ids": input_ids,
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            "decoder_attention_mask": decoder_attention_mask,
            "encoder_outputs": encoder_outputs,
            "use_cache": use_cache,
            "output_attentions": output_attentions,
        }


def _read(cache: StateCache | None) -> int:
    return 0 if cache is None else cache.num_read
