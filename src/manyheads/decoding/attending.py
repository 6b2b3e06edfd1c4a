"""Where a model looks as it reads and writes a text: views that `visualise` draws."""

from __future__ import annotations

from pathlib import Path

import torch

from manyheads.architectures.attentions import attentions_of
from manyheads.architectures.hub import resolve_model_path
from manyheads.architectures.pretrained import read_config
from manyheads.architectures.seq2seq import Seq2Seq
from manyheads.architectures.table import ARCHITECTURES
from manyheads.decoding.device import Precision, inference
from manyheads.decoding.generator import READ_AT_ONCE, Generator
from manyheads.decoding.translator import Translator
from manyheads.errors import ModelFileError, RequestError
from manyheads.text.labels import legible
from manyheads.visualise.attention_views import AttentionView, attention_view

__all__ = ["open_model", "text_views", "translation_views"]


def open_model(path: str | Path, device: str = "auto", precision: Precision = "fp32") -> Translator | Generator:
    """What reads and writes text with the model of that folder, whatever its kind.

    Raises: as `Translator.from_pretrained`.
    """
    task = ARCHITECTURES[read_config(resolve_model_path(path)).architecture].task
    return (Translator if task == "translation" else Generator).from_pretrained(path, device, precision)


def translation_views(translator: Translator, source: str, target: str | None = None) -> list[AttentionView]:
    """Encoder, decoder and cross-attention as a translation is written.

    Rows of `decoder` and `cross` are named by the token that is written next, not by the one that is read: that is
    whose choice the weights serve.

    Args:
        source: a text.
        target: its translation; None: the model's own.

    Raises: RequestError: the source is empty. ModelFileError: the model has no such attention.
    """
    reader, writer = translator.tokenizer.source, translator.tokenizer.target
    source_ids = reader.encode(source)
    if not source_ids:
        raise RequestError("there is no text to look at; give at least one word.")
    source_ids.append(reader.eos_id)
    target_ids = writer.encode(translator.translate(source) if target is None else target)
    if not isinstance(translator.model, Seq2Seq):
        raise ModelFileError(f"a {type(translator.model).__name__} shows no attention.")
    read, written = legible(reader.tokens(source_ids)), legible(writer.tokens([*target_ids, writer.eos_id]))
    with inference(translator.device, translator.precision):
        found = attentions_of(
            translator.model,
            torch.tensor([source_ids], device=translator.device),
            torch.tensor([len(source_ids)], device=translator.device),
            torch.tensor([[writer.bos_id, *target_ids]], device=translator.device),
        )
    seen = legible(writer.tokens([writer.bos_id, *target_ids]))
    return [
        attention_view("encoder", found.encoder, query_tokens=read),
        attention_view("decoder", found.decoder, query_tokens=written, key_tokens=seen, is_self=True),
        attention_view("cross", found.cross, query_tokens=written, key_tokens=read),
    ]


def text_views(generator: Generator, text: str, memory_len: int | None = None) -> list[AttentionView]:
    """A language model's attention over a text, the first part of which it remembers from a segment before.

    Args:
        text: read from its beginning, after the token that begins a document.
        memory_len: tokens that are memory; None: half of them for models that were trained with memory, none else.

    Raises: RequestError: the text is empty, or all of it would be memory; memory for a model without.
    """
    vocabulary, model = generator.vocabulary, generator.model
    ids = [vocabulary.start_id, *vocabulary.encode(text)]
    if len(ids) == 1:
        raise RequestError("there is no text to look at; give at least one word.")
    if vocabulary.end_id is None:
        ids = ids[1:]  # nothing begins a text where there are no documents
    most = getattr(model.config, "memory_len", 0)
    if memory_len is None:
        memory_len = min(len(ids) // 2, most)
    if memory_len and not most:
        raise RequestError(f"memory of {memory_len} tokens was asked for, but this model has none; leave it out.")
    if not 0 <= memory_len < len(ids):
        raise RequestError(f"memory of {memory_len} of {len(ids)} tokens; it must be at least 0, and leave one to read.")
    labels = legible(vocabulary.tokens(ids))
    tokens = torch.tensor([ids], device=generator.device)
    with inference(generator.device, generator.precision):
        state = model.start(1, projected=False)
        for begin in range(0, memory_len, READ_AT_ONCE):
            state = model.read(tokens[:, begin : min(begin + READ_AT_ONCE, memory_len)], None, state)[1]
        found = attentions_of(model, tokens[:, memory_len:], None, state)
    if not found.decoder:
        raise ModelFileError(f"a {model.config.architecture} shows no attention.")
    columns = found.decoder[0].shape[-1]
    new = len(ids) - memory_len
    return [
        attention_view(
            "decoder",
            found.decoder,
            query_tokens=labels[memory_len:],
            key_tokens=labels[len(labels) - columns :],
            num_memory=columns - new,
            is_self=True,
        )
    ]
