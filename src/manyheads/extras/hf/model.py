"""The common part of both classes of models: making and loading, the cache, padding, and refusals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.utils import logging

from manyheads.catalogue import build_model
from manyheads.errors import ConfigError, RequestError, ShapeError
from manyheads.extras.hf.loading import TASKS, ManyHeadsConfig, config_of, load_own
from manyheads.nn.attention.observing import Attentions, by_stack, observe
from manyheads.nn.kernels import modes, policy

IGNORED_LABEL = -100
"""A label that does not count, as in all of transformers."""

_log = logging.get_logger(__name__)


class StateCache(Cache):  # type: ignore[misc]
    """The state of a model of this package as `past_key_values`; make an empty one, and give it to `forward`.

    Attributes: state: of the model; None: nothing is read yet. num_read: columns read so far, padding included. beams:
        rows of each sentence, which are reordered among themselves.
    """

    def __init__(self, beams: int = 1) -> None:
        super().__init__(layers=[])
        self.state: Any = None
        self.num_read = 0
        self.beams = beams

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns read so far."""
        return self.num_read

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: the state grows."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue the rows with these ids, as a beam search selects them."""
        if self.state is not None:
            self.state = self.state.reorder(beam_idx.view(-1, self.beams) if self.beams > 1 else beam_idx)

    def reset(self) -> None:
        """Forget all."""
        self.state, self.num_read = None, 0

    def __len__(self) -> int:
        return 0 if self.state is None else 1

    def __repr__(self) -> str:
        return f"StateCache({self.num_read} columns)"

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RequestError(
            "the cache of a manyheads model is its state, which can be reordered but not cut, extended or selected from"
            " outside; use copy.deepcopy to continue one beginning in several ways."
        )

    update = crop = batch_select_indices = batch_repeat_interleave = early_initialization = _refuse


class Rows(NamedTuple):
    """Rows of ids whose real tokens stand in front, in order, because memory and distances do not skip padding.

    Shape: ids, order (column of the input of each column here), place (column here of each column of the input; of
        padding that of the last real token before it), all (rows, len); lengths (rows,). Without padding all but ids
        are None.
    """

    ids: Tensor
    lengths: Tensor | None = None
    order: Tensor | None = None
    place: Tensor | None = None

    @classmethod
    def of(cls, ids: Tensor, mask: Tensor | None) -> Self:
        """Args: mask: of the same shape, 1 = real, 0 = padding, at any place; None: all are real."""
        if mask is None or bool(mask.all()):
            return cls(ids)
        real = mask.to(torch.bool)
        order = (~real).to(torch.uint8).argsort(dim=1, stable=True)
        place = (real.cumsum(1) - 1).clamp(min=0)
        return cls(ids.masked_fill(~real, 0).gather(1, order), real.sum(1), order, place)

    def all_lengths(self) -> Tensor:
        """Return the number of real tokens of each row. (rows,)"""
        rows, columns = self.ids.shape
        return torch.full((rows,), columns, device=self.ids.device) if self.lengths is None else self.lengths

    def ordered(self, values: Tensor) -> Tensor:
        """Return the columns of values of the input, in the order of `ids`. values: (rows, len, ...)"""
        return values if self.order is None else values.gather(1, _over(self.order, values))

    def restored(self, values: Tensor) -> Tensor:
        """Return values of `ids` at the columns of the input; padding has those of the last real token before it."""
        return values if self.place is None else values.gather(1, _over(self.place, values))

    def restored_weights(self, weights: Tensor, dim: int) -> Tensor:
        """Return attention weights (rows, heads, queries, keys) with the last columns of an axis as in the input."""
        if self.order is None:
            return weights
        back = self.order.argsort(dim=1)
        first = weights.shape[dim] - back.shape[1]  # memory comes before
        memory = torch.arange(first, device=back.device).expand(len(back), -1)
        index = torch.cat([memory, back + first], dim=1)
        index = index[:, None, :, None] if dim == 2 else index[:, None, None, :]
        return torch.take_along_dim(weights, index, dim=dim)


def _over(index: Tensor, values: Tensor) -> Tensor:
    """Return an index of columns for `gather` on values with further axes."""
    return index.view(*index.shape, *[1] * (values.dim() - 2)).expand_as(values)


class ManyHeadsModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The base of both classes.

    Attributes: model: the composite of this package, a `LanguageModel` or `Seq2Seq`, with all parameters.
    """

    config_class = ManyHeadsConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    accepts_loss_kwargs = True
    _is_stateful = True  # a state cannot be cut, as assisted generation needs
    _supports_attention_backend = False
    task: ClassVar[str]

    def __init__(self, config: ManyHeadsConfig, *_: Any, **__: Any) -> None:
        super().__init__(config)
        if config.settings is None:
            raise ConfigError('settings are missing; give settings={"architecture": "transformer-xl", ...}.')
        own = config_of(config.settings)
        if own.task != self.task:
            raise ConfigError(
                f"a {own.architecture} is a model for {own.task}; load it with {TASKS[own.task]}, not with"
                f" {TASKS[self.task]}."
            )
        if not getattr(own, "reads_forwards", True):
            raise ConfigError(
                f"this {own.architecture} attends to later tokens (causal is false), so it cannot predict the next one;"
                " use it with manyheads.load."
            )
        self.model: Any = build_model(own)
        self._tied_weights_keys = _tied_names(self)
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *arguments: Any, **options: Any) -> Any:
        """Load a folder of `save_pretrained`, or of this package, local or on the hub; see `PreTrainedModel`."""
        config = options.get("config")
        if config is None and options.get("state_dict") is None:
            known = {name: options[name] for name in ("revision", "token", "cache_dir") if name in options}
            config, _ = ManyHeadsConfig.from_pretrained(
                pretrained_model_name_or_path, return_unused_kwargs=True, **known
            )
        if not getattr(config, "is_own_folder", False):
            return super().from_pretrained(pretrained_model_name_or_path, *arguments, **options)
        return load_own(cls, pretrained_model_name_or_path, **options)

    def save_pretrained(self, save_directory: Any, *arguments: Any, **options: Any) -> None:
        """Write a folder for `from_pretrained`; its README.md says that it needs `import manyheads.hf`."""
        super().save_pretrained(save_directory, *arguments, **options)
        readme = Path(save_directory) / "README.md"
        if not readme.exists():
            readme.write_text(_README.format(auto=TASKS[self.task]), encoding="utf-8")

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the initial values that the model's own modules have."""

    def tie_weights(self, *arguments: Any, **named: Any) -> None:
        """Tie the parameters that the settings share; transformers calls this after loading."""
        super().tie_weights(*arguments, **named)
        self.model.tie_weights()

    def resize_token_embeddings(self, *_: Any, **__: Any) -> nn.Module:
        """Raises: RequestError: always."""
        raise RequestError(
            f"the vocabulary of a manyheads model has {self.config.vocab_size:,} ids and cannot be resized here; make a"
            " model with another vocab_size in its settings."
        )

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # a `StateCache` instead

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any, **__: Any
    ) -> None:
        """Give `generate` an empty `StateCache`, or check the user's."""
        if generation_config.cache_implementation is not None:
            raise RequestError(
                f"cache_implementation is {generation_config.cache_implementation!r}, but a manyheads model has its own"
                " cache; leave it out, or set use_cache to false."
            )
        given = model_kwargs.get("past_key_values")
        if given is None and generation_config.use_cache is False:
            return
        if given is not None and generation_config.num_beams > 1 and self.config.is_encoder_decoder:
            raise RequestError("a beam search begins with an empty cache; leave past_key_values out.")
        cache = StateCache() if given is None else check_cache(given)
        if self.config.is_encoder_decoder:
            cache.beams = max(generation_config.num_beams, generation_config.num_return_sequences)
        model_kwargs["past_key_values"] = cache

    def _prepare_generated_length(self, *arguments: Any, **named: Any) -> Any:
        """End at the model's last position, as the search of this package does; refuse a prompt that is too long."""
        made = super()._prepare_generated_length(*arguments, **named)
        limit, length = self.model.max_len, named["input_ids_length"]
        if limit is None:
            return made
        if length > limit:
            raise RequestError(
                f"the prompt has {length:,} tokens with its beginning, but the model has {limit:,} positions; shorten"
                " it."
            )
        if made.max_length > limit + 1:  # the last generated token is not read again
            _log.warning_once(
                f"The model has {limit:,} positions: generation ends at {limit + 1:,} tokens, prompt included."
            )
            made.max_length = limit + 1
        return made

    def generate(self, *arguments: Any, **named: Any) -> Any:
        """Return token ids, as `GenerationMixin.generate`, with the fast implementations of this package."""
        with modes.fast():
            return super().generate(*arguments, **named)


_README = """---
library_name: transformers
---

A model of the Python package manyheads, for transformers. Install both, then:

```python
import manyheads.hf  # makes the model type known to transformers
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")  # if the tokenizer was saved, too
```
"""


def check_cache(given: Any) -> StateCache:
    """Return past_key_values. Raises: RequestError: it is another library's cache."""
    if isinstance(given, StateCache):
        return given
    raise RequestError(
        f"past_key_values is a {type(given).__name__}; give what the model returned with use_cache=True, or an empty"
        " manyheads.hf.StateCache()."
    )


def refuse_rest(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Raises: RequestError: an argument that these models do not have is given."""
    for name, value in given.items():
        if value is not None:
            why = _WHY.get(name, f"{name} is no argument of {type(model).__name__}; leave it out.")
            raise RequestError(why)


_WHY = {
    "inputs_embeds": "inputs_embeds is not supported: manyheads models read ids; give input_ids.",
    "decoder_inputs_embeds": "decoder_inputs_embeds is not supported; give decoder_input_ids.",
    "head_mask": "head_mask is not supported; see `manyheads inspect --heads` and `manyheads prune`.",
    "position_ids": "position_ids is not supported: positions are counted from the first real token of a row.",
    "token_type_ids": "token_type_ids is not supported: these models have no token types; leave it out.",
    "output_hidden_states": "output_hidden_states is not supported; put a forward hook on the layers of model.model.",
}


def refuse_hidden_states(wanted: bool | None) -> None:
    """Raises: RequestError: hidden states are wanted."""
    if wanted:
        raise RequestError(_WHY["output_hidden_states"])


def check_ids(name: str, ids: Any, vocab_size: int, *, ignored: int | None = None, least: int = 1) -> None:
    """Check a tensor of ids.

    Args: ignored: a further value that it may hold. least: number of columns.

    Raises: RequestError: it is missing or no tensor of whole numbers; an id is outside the vocabulary. ShapeError: it
        is not (batch, len), or has no column.
    """
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
        kind = "missing" if ids is None else f"a {ids.dtype if isinstance(ids, Tensor) else type(ids).__name__}"
        raise RequestError(f"{name} is {kind}; give a tensor of whole numbers, (batch, len).")
    if ids.dim() != 2 or ids.shape[1] < least:
        raise ShapeError(f"{name} has shape {tuple(ids.shape)}; it must be (batch, len) with at least one token.")
    if not policy.can_look(ids):
        return
    wrong = (ids < 0) | (ids >= vocab_size)
    wrong = wrong if ignored is None else wrong & (ids != ignored)
    if wrong.any():
        more = "" if ignored is None else f", and {ignored} for those that do not count"
        raise RequestError(f"{name} holds {int(ids[wrong][0])}; ids are 0 to {vocab_size - 1:,}{more}.")


def check_mask(name: str, mask: Any, ids: Tensor, num_read: int = 0) -> Tensor | None:
    """Return the part of a mask about new columns; None: it is not given.

    Args: num_read: columns in the cache, which the mask may cover.

    Raises: ShapeError: it covers something else.
    """
    if mask is None:
        return None
    rows, columns = ids.shape
    if mask.dim() != 2 or mask.shape[0] != rows or mask.shape[1] not in (columns, columns + num_read):
        cached = f" or {(rows, columns + num_read)} with those in the cache" if num_read else ""
        raise ShapeError(f"{name} has shape {tuple(mask.shape)}; it must be {(rows, columns)}{cached}: 1 = real.")
    last: Tensor = mask[:, -columns:]
    return last


@contextmanager
def watched(model: nn.Module, wanted: bool | None) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the attention weights of a pass if they are wanted; see `weights_of`."""
    if not wanted:
        yield {}
        return
    with observe(model, "weights") as record:
        yield record


def weights_of(model: Any, record: Mapping[str, list[Tensor]], expected: Iterable[str]) -> Attentions:
    """Return the weights of a pass.

    Args: expected: the stacks that took part.

    Raises: RequestError: a layer has no matrix of weights in this pass.
    """
    found = by_stack({name.removeprefix("body."): calls[-1] for name, calls in record.items()})
    for stack in expected:
        weights = getattr(found, stack)
        if len(weights) != _num_layers(model.config, stack):
            raise RequestError(
                f"{_num_layers(model.config, stack) - len(weights)} of the {stack} layers of this"
                f" {model.config.architecture} compute no matrix of attention weights in this pass (hashed and local"
                " layers have none with a cache); leave output_attentions out, or set use_cache to false."
            )
    return found


def _num_layers(config: Any, stack: str) -> int:
    name = "num_encoder_layers" if stack == "encoder" else "num_decoder_layers"
    return int(getattr(config, name, 0) or config.num_layers)


def loss_of(head: Any, hidden: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
    """Return the mean loss over the labels that count, in nats; the sum divided by `num_items` if that is given."""
    keep = labels != IGNORED_LABEL
    loss_sum, _ = head.loss(hidden, labels.masked_fill(~keep, 0), keep)
    mean: Tensor = loss_sum / (keep.sum().clamp(min=1) if num_items is None else num_items)
    return mean


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return each further name of a tied parameter, and its first name; transformers saves it once."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied
