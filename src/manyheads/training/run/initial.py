"""The beginning of a run from a model: its weights, rows for new ids, and parameters that are not trained."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.config.checks import did_you_mean
from manyheads.errors import ConfigError, DataError
from manyheads.files.verify import file_sha256
from manyheads.models.hub import resolve_model_path
from manyheads.models.pretrained import data_notice, load_portable_state, load_weights, portable_state, read_config
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabularies import load_vocabulary
from manyheads.text.vocabulary import Vocabulary
from manyheads.text.vocabulary_extension import old_ids_of
from manyheads.training.run.state import named_parameters
from manyheads.training.settings import InitialSettings

_VOCABULARIES = ("source_vocab_size", "target_vocab_size", "vocab_size")


def begin_from(model: Any, settings: InitialSettings, tokenizer: Any) -> list[str]:
    """Give a new composite the weights of another model.

    Where the data's tokenizer has more ids than the model's and begins with them, a row for a new id is the mean of the
    rows of the ids that the old tokenizer has in its place, if they are known, otherwise of all old rows (Hewitt 2021).

    Args:
        model: of the run, with as many ids as the data.
        settings: where the weights are.
        tokenizer: of the data.

    Returns: sentences for the user.
    Raises: ModelFileError: the model cannot be read, or its weights do not fit. ConfigError: its ids are not those of
        the data, or its weights are not those that config.yaml records.
    """
    folder = resolve_model_path(settings.model)
    tensors = load_weights(folder)
    digest = file_sha256(folder / "model.safetensors")
    if settings.sha256 and digest != settings.sha256:
        raise ConfigError(
            f"The weights of {settings.model} have changed: SHA-256 {digest[:12]}..., but initial.sha256 is"
            f" {settings.sha256[:12]}.... Give --init {settings.model} and --resume none to begin from the new ones."
        )
    old_size = _check_ids(settings.model, folder, tokenizer)
    replaced = old_ids_of(tokenizer, old_size)
    before, now = read_config(folder), model.config
    growths = {getattr(now, name) - getattr(before, name) for name in _VOCABULARIES if hasattr(now, name)}
    grown = _with_new_rows(tensors, portable_state(model), growths - {0}, replaced, old_size)
    load_portable_state(model, grown, where=f"the weights of {settings.model}")
    model.data_notice = data_notice(folder)
    lines = [f"begins from {settings.model} (SHA-256 {digest[:12]}...), with a new optimiser"]
    names = [name for name, tensor in grown.items() if tensor is not tensors[name]]
    if names:
        more = max(growths)
        whose = "of the pieces they replace" if replaced and all(replaced) else "of the old rows"
        lines.append(f"{more:,} new ids: their rows in {', '.join(names)} are the means {whose}")
    return lines


def _check_ids(name: str, folder: Path, tokenizer: Any) -> int:
    """Returns: the number of ids of the model. Raises: ConfigError: one of them has another meaning in the data."""
    file = folder / "tokenizer.json"
    remedy = f"prepare the data with the model's ids: `manyheads prepare --tokenizer {name} ...`"
    if not file.is_file():
        raise ConfigError(
            f"{name} has no tokenizer.json, so its ids cannot be compared with those of the data; only a model with one"
            " can be trained further."
        )
    try:
        known = load_vocabulary(file) if isinstance(tokenizer, Vocabulary) else Tokenizer.load(file)
    except DataError as error:
        raise ConfigError(f"The tokenizer of {name} is of another kind than the data's ({error}); {remedy}.") from error
    old, new = known.vocab_size, tokenizer.vocab_size
    if old > new:
        raise ConfigError(f"{name} has {old:,} ids, but the data only {new:,}; {remedy}.")
    if (known.kind, _special(known)) != (tokenizer.kind, _special(tokenizer)):
        raise ConfigError(f"The tokenizer of {name} treats text in another way than the data's; {remedy}.")
    ids = list(range(old))
    if old == new and known.to_json() == tokenizer.to_json():
        return old
    for index, (mine, other) in enumerate(zip(known.tokens(ids), tokenizer.tokens(ids), strict=True)):
        if mine != other:
            raise ConfigError(f"Id {index} is {mine!r} in {name}, but {other!r} in the data; {remedy}.")
    if old == new:
        raise ConfigError(f"The tokenizer of {name} divides text into its {old:,} ids in another way; {remedy}.")
    return old


def _special(tokenizer: Any) -> tuple[Any, ...]:
    return tuple(getattr(tokenizer, name, None) for name in ("lowercase", "documents", "end_id", "unk_id", "symbols"))


def _with_new_rows(
    tensors: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    growths: Collection[int],
    replaced: Sequence[Sequence[int]],
    old_size: int,
) -> dict[str, Tensor]:
    """Add mean rows to each tensor that has as many rows too few as there are new ids.

    Args: replaced: for each new id the old ids in its place; an empty list stands for all of them. old_size: number of
        old ids.
    """
    found = dict(tensors)
    for name, tensor in tensors.items():
        wanted = own[name].shape if name in own else tensor.shape
        fits = tensor.dim() == len(wanted) and tensor.dim() > 0 and tensor.shape[1:] == wanted[1:]
        count = wanted[0] - tensor.shape[0] if fits else 0
        if count in growths:
            mean = tensor.mean(0)
            first = old_size - tensor.shape[0]  # above 0 in the last cluster of an adaptive softmax
            own_rows = [[one - first for one in ids if one >= first] for ids in replaced]
            ids_of = own_rows if len(replaced) == count else [[]] * count
            rows = [tensor[ids].mean(0) if ids else mean for ids in ids_of]
            found[name] = torch.cat([tensor, torch.stack(rows)])
    return found


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Exclude parameters from training.

    Args: patterns: see `TrainingSettings.freeze`.

    Returns: one sentence for the user; none without patterns.
    Raises: ConfigError: a pattern matches no parameter, or nothing is left to train.
    """
    named = named_parameters(model)
    for pattern in patterns:
        matched = [name for name in named if _matches(name, pattern)]
        if not matched:
            near = did_you_mean(pattern.removesuffix(".*"), _names_in(named))
            raise ConfigError(
                f"training.freeze: no parameter matches {pattern!r}.{near} `train --dry-run` lists all parameters."
            )
        for name in matched:
            named[name].requires_grad_(False)
    if not patterns:
        return []
    frozen = [parameter for parameter in named.values() if not parameter.requires_grad]
    if len(frozen) == len(named):
        raise ConfigError(
            f"training.freeze {' '.join(patterns)} matches all {len(named)} tensors of the model, so nothing is left to"
            " train; freeze fewer."
        )
    count, total = (sum(one.numel() for one in group) for group in (frozen, named.values()))
    return [f"frozen: {count:,} of {total:,} parameters, {len(frozen)} of {len(named)} tensors"]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def _names_in(named: Collection[str]) -> list[str]:
    """Return the names of all parameters and of the modules that contain them."""
    parts = (name.split(".") for name in named)
    return list(dict.fromkeys(".".join(part[:count]) for part in parts for count in range(1, len(part) + 1)))
