"""Config and model classes for transformers; see `extras.peers.hf`, which imports this file only when it is needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from manyheads.catalogue import ARCHITECTURES, build_model, configs_of
from manyheads.config.build import build
from manyheads.config.files import to_plain
from manyheads.errors import ConfigError, RequestError
from manyheads.models.language_model import LanguageModel
from manyheads.models.pretrained import load

IGNORED_LABEL = -100
"""A label that does not count, as in all of transformers."""


class ManyHeadsConfig(PretrainedConfig):  # type: ignore[misc]
    """A config of transformers that contains one of this package.

    Args: settings: `architecture` (`transformer-xl` or `reformer`) and the fields of its config class; `vocab_size` is
        required. None: no model, as transformers makes for comparisons.

    Raises: ConfigError: an unknown architecture or setting, or a value out of range.
    """

    model_type = "manyheads"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["state"]

    def __init__(self, settings: dict[str, Any] | None = None, **others: Any) -> None:
        self.settings = None if settings is None else to_plain(_config_of(settings))
        # `settings` determines which parameters are shared. transformers shares them only if this option is true.
        super().__init__(**{**others, "tie_word_embeddings": True})

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return int((self.settings or {}).get("vocab_size", 0))

    @property
    def hidden_size(self) -> int:
        """Width of the model, by the name that transformers uses."""
        return int((self.settings or {}).get("d_model", 0))

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers, by the name that transformers uses."""
        return int((self.settings or {}).get("num_layers", 0))


@dataclass
class CausalLMOutput(ModelOutput):  # type: ignore[misc]
    """Result of `ManyHeadsForCausalLM`.

    loss: nats per label, if labels were given. logits: log-probabilities of the token after each (batch, len,
    vocab_size); None in training with labels, where the loss is computed without them. state: for the next segment.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    state: Any = None


class ManyHeadsForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A Transformer-XL or Reformer language model as a model of transformers.

    Without `state`, every call begins with an empty memory. `generate` reads the whole text again for each token; for
    fast generation use `manyheads.Generator`.
    """

    config_class = ManyHeadsConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    accepts_loss_kwargs = True

    def __init__(self, config: ManyHeadsConfig) -> None:
        super().__init__(config)
        if config.settings is None:
            raise ConfigError('settings are missing; give settings={"architecture": "transformer-xl", ...}.')
        self.model: LanguageModel = build_model(_config_of(config.settings))
        self._tied_weights_keys = _tied_names(self)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the initial values that the model's own modules have."""

    def tie_weights(self, *arguments: Any, **named: Any) -> None:
        """Tie the parameters that the settings share; transformers calls this after loading."""
        super().tie_weights(*arguments, **named)
        self.model.tie_weights()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        embedding: nn.Module = self.model.body.embedding  # type: ignore[attr-defined]
        return embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        state: Any = None,
        num_items_in_batch: Tensor | int | None = None,
        **ignored: Any,
    ) -> CausalLMOutput:
        """Read a segment of every row.

        Args:
            input_ids: (batch, len).
            attention_mask: (batch, len), 1 = real, 0 = padding, at either side; None: all are real.
            labels: (batch, len), the input ids again; they are shifted here. -100 does not count.
            state: of the previous call; it is consumed. Memory carries no gradient.
            num_items_in_batch: the loss is divided by this number instead of the number of labels that count.
        """
        targets = None if labels is None else F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        lengths = order = None
        if attention_mask is not None and not bool(attention_mask.all()):
            # Real tokens go to the front, in order, because memory and distances do not skip padding.
            order = attention_mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
            lengths = attention_mask.to(torch.bool).sum(dim=1)
            input_ids = input_ids.gather(1, order)
            targets = None if targets is None else targets.gather(1, order)
        hidden, state = self.model.body(input_ids, lengths, state)
        loss = None
        if targets is not None:
            keep = targets != IGNORED_LABEL
            loss_sum, _ = self.model.head.loss(hidden, targets.masked_fill(~keep, 0), keep)
            loss = loss_sum / (keep.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        if loss is not None and self.training:
            return CausalLMOutput(loss=loss, state=state)
        if order is not None:
            hidden = hidden.gather(1, order.argsort(dim=1)[:, :, None].expand_as(hidden))
        return CausalLMOutput(loss=loss, logits=self.model.head.log_probs(hidden), state=state)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> dict[str, Any]:
        """Return the arguments of `forward` for one token of `generate`."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}


def wrap(path: str | Path) -> ManyHeadsForCausalLM:
    """See `hf.from_folder`."""
    model = load(path)
    if not isinstance(model, LanguageModel):
        raise RequestError(f"{path} holds a model that translates; only language models can be wrapped.")
    wrapped = ManyHeadsForCausalLM(ManyHeadsConfig(settings=to_plain(model.config)))
    wrapped.model.load_state_dict(model.state_dict())
    wrapped.eval()
    return wrapped


def _config_of(settings: dict[str, Any]) -> Any:
    """Return the config class's instance. Raises: ConfigError: see `ManyHeadsConfig`."""
    name = settings.get("architecture")
    known = [key for key, entry in ARCHITECTURES.items() if entry.config in configs_of("language-modelling")]
    if name not in known:
        raise ConfigError(f"settings.architecture is {name!r}; there are: {', '.join(known)}.")
    return build(ARCHITECTURES[str(name)].config, settings, "settings")


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return each further name of a tied parameter, and its first name; transformers saves it once."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied
