"""The config of transformers that contains one of this package."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig

from manyheads.catalogue import ARCHITECTURES
from manyheads.config.build import build
from manyheads.config.files import to_plain
from manyheads.errors import ConfigError
from manyheads.models.pretrained import config_of as own_config_of
from manyheads.text.tokenizer import Tokenizer

TASKS = {"language-modelling": "AutoModelForCausalLM", "translation": "AutoModelForSeq2SeqLM"}
"""The tasks of models that have a class there; every architecture of the catalogue for one of them has it."""


class ManyHeadsConfig(PretrainedConfig):  # type: ignore[misc]
    """A config of transformers that contains one of this package.

    Args: settings: `architecture`, any of the catalogue for language models or translation, and the fields of its
        config class; vocabulary sizes are required. None: no model, as transformers makes for comparisons. others:
        options of every config of transformers, such as `pad_token_id`.

    Attributes: is_own_folder: whether it is the config of a folder that manyheads wrote, not `save_pretrained` here.

    Raises: ConfigError: an unknown architecture or setting, or a value out of range.
    """

    model_type = "manyheads"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "encoder_last_hidden_state"]
    is_own_folder = False

    def __init__(self, settings: dict[str, Any] | None = None, **others: Any) -> None:
        self.settings: dict[str, Any] | None = None
        if settings is not None:
            config = config_of(settings)
            self.settings = to_plain(config)
            if config.task == "translation":  # the ids of every tokenizer of this package
                ids = {"pad": Tokenizer.pad_id, "decoder_start": Tokenizer.bos_id, "eos": Tokenizer.eos_id}
                others = {**{f"{name}_token_id": index for name, index in ids.items()}, **others}
            others["is_encoder_decoder"] = config.task == "translation"
        # `settings` determines which parameters are shared. transformers shares them only if this option is true.
        super().__init__(**{**others, "tie_word_embeddings": True})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the config of a config.json, also of one that manyheads wrote; see `PretrainedConfig.from_dict`."""
        if "format_version" not in config_dict:
            return super().from_dict(config_dict, **kwargs)
        config = own_config_of(dict(config_dict), "config.json")
        found = super().from_dict({"settings": to_plain(config)}, **kwargs)
        (found[0] if isinstance(found, tuple) else found).is_own_folder = True
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {name: value for name, value in super().to_dict().items() if name != "is_own_folder"}

    @property
    def vocab_size(self) -> int:
        """Number of ids; of a translator, of target ids."""
        settings = self.settings or {}
        return int(settings.get("vocab_size", settings.get("target_vocab_size", 0)))

    @property
    def hidden_size(self) -> int:
        """Width of the model, by the name that transformers uses."""
        return int((self.settings or {}).get("d_model", 0))

    @property
    def num_attention_heads(self) -> int:
        """Heads of a layer, by the name that transformers uses."""
        return int((self.settings or {}).get("num_heads", 0))

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers, of a translator in the decoder, by the name that transformers uses."""
        settings = self.settings or {}
        return int(settings.get("num_layers", settings.get("num_decoder_layers", 0)))

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence. Raises: AttributeError: there is no limit; then transformers takes it as not known."""
        longest: int | None = None if self.settings is None else config_of(self.settings).longest_input
        if longest is None:
            raise AttributeError("max_position_embeddings")
        return longest


def config_of(settings: dict[str, Any]) -> Any:
    """Return the config class's instance. Raises: ConfigError: see `ManyHeadsConfig`."""
    name = settings.get("architecture")
    known = [one for one, entry in ARCHITECTURES.items() if entry.task in TASKS]
    if name not in known:
        raise ConfigError(f"settings.architecture is {name!r}; there are: {', '.join(known)}.")
    return build(ARCHITECTURES[str(name)].config, settings, "settings")
