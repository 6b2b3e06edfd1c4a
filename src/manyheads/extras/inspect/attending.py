"""Attention weights of a model for given texts, as views that `visualise` plots."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyheads.catalogue import ARCHITECTURES
from manyheads.decoding.generation import READ_AT_ONCE
from manyheads.decoding.generator import Generator
from manyheads.decoding.inputs_and_results import encode_texts, with_end
from manyheads.decoding.translator import Translator
from manyheads.errors import ModelFileError, RequestError
from manyheads.extras.inspect.drawings.attention import AttentionView, attention_view
from manyheads.extras.inspect.tracing import TracedTensor, trace
from manyheads.models.ensemble import averaged_models
from manyheads.models.hub import resolve_model_path
from manyheads.models.pretrained import read_config
from manyheads.nn.attention.observing import attentions_of, buckets_of

if TYPE_CHECKING:
    from manyheads.decoding.inputs_and_results import EngineName

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_DIGITS = "₀₁₂₃₄₅₆₇₈₉"


def legible(tokens: Sequence[str]) -> list[str]:
    """Replace bytes that form a character by this character, numbered: `<0xE4> <0xBD> <0xA0>` becomes `你₁ 你₂ 你₃`.

    A visible ASCII character stands for its byte. Bytes that form no visible character stay unchanged.
    """
    labels = list(tokens)
    values = [int(found[1], 16) if (found := _BYTE.fullmatch(token)) else -1 for token in tokens]  # -1: not a byte
    for place, first in enumerate(values):
        if 0x20 < first < 0x7F:
            labels[place] = chr(first)
        run = values[place : place + _length(first)]
        with suppress(ValueError):  # the bytes form no character
            char = bytes(run).decode("utf-8")
            labels[place : place + len(run)] = [char + _DIGITS[number] for number in range(1, len(run) + 1)]
    return labels


def _length(first: int) -> int:
    """Return the number of bytes of a UTF-8 character that begins with this byte; 0 if no multi-byte character does."""
    return 2 if 0xC2 <= first < 0xE0 else 3 if 0xE0 <= first < 0xF0 else 4 if 0xF0 <= first < 0xF5 else 0


def open_model(
    path: str | Path, device: str = "auto", precision: Any = "fp32", engine: EngineName | None = None
) -> Translator | Generator:
    """Load the model folder as a translator or a generator, depending on its kind.

    Args: precision: as in `from_pretrained`. engine: of a translator; generators have none but torch.

    Raises: as `Translator.from_pretrained`.
    """
    if ARCHITECTURES[read_config(resolve_model_path(path)).architecture].task == "translation":
        return Translator.from_pretrained(path, device, precision, engine=engine)
    return Generator.from_pretrained(path, device, precision)


def translation_views(translator: Translator, source: str, target: str | None = None) -> list[AttentionView]:
    """Return encoder, decoder and cross-attention of a translation.

    Rows of `decoder` and `cross` are labelled with the token that is generated next, not with the input token, because
    the weights serve to choose that token.

    Args:
        source: a text.
        target: its translation; None: the model's own.

    Raises: RequestError: the source is empty. ModelFileError: the model has no such attention.
    """
    reader, writer = translator.tokenizer.source, translator.tokenizer.target
    inputs = _translation_inputs(translator, source, target)
    source_ids, seen_ids = inputs["source"][0].tolist(), inputs["target"][0].tolist()
    read, written = legible(reader.tokens(source_ids)), legible(writer.tokens([*seen_ids[1:], writer.eos_id]))
    with translator.runner.inference():
        found = attentions_of(_module(translator), *inputs.values())
        hashed = buckets_of(_module(translator), *inputs.values())
    seen = legible(writer.tokens(seen_ids))
    sides = {side: {name: b for name, b in hashed.items() if name.startswith(side)} for side in ("encoder", "decoder")}
    return [
        attention_view(
            "encoder",
            found.encoder,
            query_tokens=read,
            buckets=_of_layers(sides["encoder"], len(found.encoder)),
        ),
        attention_view(
            "decoder",
            found.decoder,
            query_tokens=written,
            key_tokens=seen,
            is_self=True,
            buckets=_of_layers(sides["decoder"], len(found.decoder)),
        ),
        attention_view("cross", found.cross, query_tokens=written, key_tokens=read),
    ]


def text_views(generator: Generator, text: str, memory_len: int | None = None) -> list[AttentionView]:
    """Return a language model's attention over a text, whose first part is the memory from an earlier segment.

    Args:
        text: read from its beginning, after the token that begins a document.
        memory_len: number of tokens in memory; None: half of them for models trained with memory, otherwise 0.

    Raises: RequestError: the text is empty, the memory covers the whole text, or the model has no memory.
    """
    model = generator.single_model
    ids = _text_ids(generator, text)
    most = getattr(model.config, "memory_len", 0)
    if memory_len is None:
        memory_len = min(len(ids) // 2, most)
    if memory_len and not most:
        raise RequestError(f"memory of {memory_len} tokens was asked for, but this model has none; leave it out.")
    if not 0 <= memory_len < len(ids):
        raise RequestError(
            f"memory of {memory_len} of {len(ids)} tokens; it must be at least 0, and leave one to read."
        )
    labels = legible(generator.vocabulary.tokens(ids))
    with generator.runner.inference():
        found = attentions_of(model, *_text_inputs(generator, ids, memory_len).values())
        hashed = buckets_of(model, *_text_inputs(generator, ids, memory_len).values())
    if not found.decoder:
        raise ModelFileError(f"a {model.config.architecture} has no attention weights to show.")
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
            buckets=_of_layers(hashed, len(found.decoder)),
        )
    ]


def shapes_of(reader: Translator | Generator, text: str, target: str | None = None) -> list[TracedTensor]:
    """Return every tensor of one forward pass; see `extras.inspect.tracing`.

    Args:
        reader: a translator or a language model.
        text: the input, without context before it.
        target: for a translator, the output; None: the model's own translation.

    Raises: RequestError: the text is empty, or a target is given for a language model.
    """
    if reader.task == "language-modelling":
        if target is not None:
            raise RequestError("a language model reads one text; leave the target out.")
        inputs = _text_inputs(reader, _text_ids(reader, text), 0)
    else:
        inputs = _translation_inputs(reader, text, target)
    with reader.runner.inference():
        return trace(_module(reader), inputs)


def text_buckets(reader: Translator | Generator, text: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the buckets of a Reformer's hashed layers, name -> (heads, rounds, length), and a label per position.

    For a translator they are those of its encoder, which reads the text.

    Raises: RequestError: the text is empty. ModelFileError: no layer of the model hashes texts of this length.
    """
    if reader.task == "language-modelling":
        ids = _text_ids(reader, text)
        inputs, labels = _text_inputs(reader, ids, 0), reader.vocabulary.tokens(ids)
    else:
        inputs = _translation_inputs(reader, text, text)
        labels = reader.tokenizer.source.tokens(inputs["source"][0].tolist())
    with reader.runner.inference():
        found = buckets_of(_module(reader), *inputs.values())
    found = {name: buckets[0] for name, buckets in found.items() if not name.startswith("decoder")}
    if not found:
        raise ModelFileError(
            "no layer of this model hashes a text of this length; it takes a Reformer with lsh layers."
        )
    return found, legible(labels)


def _of_layers(hashed: dict[str, Tensor], num_layers: int) -> list[Tensor | None]:
    """Return the buckets in the order of a stack's layers; None for layers without hashing."""
    if not hashed:
        return []
    by_layer = {int(name.split("layers.")[1].split(".")[0]): buckets[0] for name, buckets in hashed.items()}
    return [by_layer.get(index) for index in range(num_layers)]


def _module(reader: Translator | Generator) -> nn.Module:
    """Raises: RequestError: the model is an ensemble. ModelFileError: it is no module."""
    [model, *others] = averaged_models(reader.model)
    if others:
        raise RequestError("an ensemble has the attention of several models; name one of them.")
    if not isinstance(model, nn.Module):
        raise ModelFileError(f"a {type(model).__name__} cannot be looked into; it is no torch module.")
    return model


def _translation_inputs(translator: Translator, source: str, target: str | None) -> dict[str, Any]:
    """Return the arguments of `log_probs`: a batch of one pair."""
    reader, writer = translator.tokenizer.source, translator.tokenizer.target
    [source_ids] = encode_texts([source], reader)
    if not source_ids:
        raise RequestError("there is no text to look at; give at least one word.")
    source_ids = with_end(source_ids, reader)
    [target_ids] = encode_texts([translator.translate(source) if target is None else target], writer)
    return {
        "source": torch.tensor([source_ids], device=translator.device),
        "source_lengths": torch.tensor([len(source_ids)], device=translator.device),
        "target": torch.tensor([[writer.bos_id, *target_ids]], device=translator.device),
    }


def _text_ids(generator: Generator, text: str) -> list[int]:
    vocabulary = generator.vocabulary
    ids = vocabulary.encode(text)
    if not ids:
        raise RequestError("there is no text to look at; give at least one word.")
    # Without documents there is no token that begins a text.
    return ids if vocabulary.end_id is None else [vocabulary.start_id, *ids]


def _text_inputs(generator: Generator, ids: list[int], memory_len: int) -> dict[str, Any]:
    """Return the arguments of `log_probs` after the first tokens were read into memory."""
    tokens = torch.tensor([ids], device=generator.device)
    model = generator.single_model
    state = model.start(1, projected=False)
    for begin in range(0, memory_len, READ_AT_ONCE):
        state = model.read(tokens[:, begin : min(begin + READ_AT_ONCE, memory_len)], None, state)[1]
    return {"tokens": tokens[:, memory_len:], "lengths": None, "state": state}
