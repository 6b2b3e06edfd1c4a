"""An alignment of words from attention weights, without further training: the source token of each target token.

Paper: Garg et al. 2019, arXiv:1909.02074, sec. 3.1, average the heads of one layer, the last but one. Differs: the
heads of the upper half of the layers are averaged, because small models have few layers, and because this aligned the
equal words of both sides best in a model of three layers (107 of 171 words; single layers 90 to 105).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from manyheads.architectures.attentions import attentions_of
from manyheads.architectures.ensemble import Ensemble
from manyheads.decoding.translator import Translator
from manyheads.text.sides import Side

__all__ = ["align"]


def align(translator: Translator, source: str, target: str) -> list[tuple[int, int, int, int]]:
    """Return (target begin, target end, source begin, source end) of each target token, in characters.

    Each target token is aligned to the source token to which it gives most weight; target tokens that attend to EOS
    are left out. A source token that no target token is aligned to is aligned to the target token that gives it most
    weight. Of an ensemble, the first model's weights are taken.

    Returns: an empty list for a model without cross-attention weights.
    """
    model = translator.model.models[0] if isinstance(translator.model, Ensemble) else translator.model
    if not isinstance(model, nn.Module):
        return []
    reader, writer = translator.tokenizer.source, translator.tokenizer.target
    source_ids, target_ids = reader.encode(source), writer.encode(target)
    if not source_ids or not target_ids:
        return []
    inputs = (
        torch.tensor([[*source_ids, reader.eos_id]], device=translator.device),
        torch.tensor([len(source_ids) + 1], device=translator.device),
        torch.tensor([[writer.bos_id, *target_ids]], device=translator.device),
    )
    with translator.runner.inference():
        cross = attentions_of(model, *inputs).cross
    # A layer of which 0.1.0 pruned all heads attends evenly, and says nothing.
    layers = [layer[0].float().mean(0) for layer in cross if layer.amax() > layer.amin()]
    if not layers:
        return []
    upper = torch.stack(layers[len(layers) // 2 :])
    weights = upper.mean(0)[: len(target_ids)]  # (target_len, source_len + EOS); row i chooses target token i
    pairs = [(index, place) for index, place in enumerate(weights.argmax(1).tolist()) if place < len(source_ids)]
    aligned = {place for _, place in pairs}
    pairs += [(index, place) for place, index in enumerate(weights.argmax(0).tolist()) if place not in aligned]
    source_places = _places(reader, source_ids, source)
    target_places = _places(writer, target_ids, target)
    return [(*target_places[index], *source_places[place]) for index, place in pairs if place < len(source_ids)]


def _places(side: Side, ids: Sequence[int], text: str) -> list[tuple[int, int]]:
    """Return begin and end of each token in the text: the length of the text before the token, and with it."""
    found = []
    done = 0
    for count in range(1, len(ids) + 1):
        end = min(max(len(side.decode(ids[:count]).rstrip()), done), len(text))
        shown = text[done:end]
        found.append((done + len(shown) - len(shown.lstrip()), end))
        done = end
    return found
