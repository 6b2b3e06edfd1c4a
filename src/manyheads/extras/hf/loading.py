"""The config of transformers, which contains one of ours, and folders of ours as models of transformers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import logging

from manyheads.catalogue import ARCHITECTURES
from manyheads.config.build import build
from manyheads.config.files import to_plain
from manyheads.decoding.settings import DecodingSettings, GenerationSettings, read_settings
from manyheads.errors import ConfigError, RequestError
from manyheads.extras.hf.tokenizer import folder_of, padding_id
from manyheads.extras.peers.marian_generation import MarianIds, generation_to_peer
from manyheads.models.hub import resolve_model_path
from manyheads.models.pretrained import config_of as own_config_of
from manyheads.models.pretrained import load
from manyheads.text.of_folder import tokenizer_of_folder
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabulary import Vocabulary

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


_log = logging.get_logger(__name__)
_LONGEST = 1024  # tokens of a translation by a model without positions
# Options of from_pretrained that have no meaning for such a folder, or their only possible value.
_HARMLESS = {
    *("config", "_from_auto", "_from_pipeline", "_commit_hash", "adapter_kwargs", "name_or_path", "trust_remote_code"),
    *("cache_dir", "force_download", "local_files_only", "proxies", "token"),
    *("low_cpu_mem_usage", "use_safetensors", "weights_only"),
}


def from_folder(path: str | Path, classes: Iterable[type[Any]]) -> Any:
    """See `extras.hf.from_folder`. Args: classes: one for each task."""
    folder = resolve_model_path(path)
    module = load(folder)
    kinds = {kind.task: kind for kind in classes}
    if module.config.task not in kinds:
        raise RequestError(
            f"{path} is a model for {module.config.task}; transformers can have models for {' and '.join(TASKS)} of"
            " this package."
        )
    return _wrapped(kinds[module.config.task], module, folder)


def load_own(kind: type[Any], path: Any, **options: Any) -> Any:
    """Return the model of a folder that manyheads wrote, for `from_pretrained`.

    Args: options: `revision`, `dtype`, `device_map` for one device, `generation_config`, `output_loading_info`.

    Raises: RequestError: another option is given. ModelFileError, ConfigError: as `manyheads.load`.
    """
    folder = folder_of(path, options.pop("revision", None))
    dtype = options.pop("dtype", options.pop("torch_dtype", None))
    dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    device, generation = _device(options.pop("device_map", None)), options.pop("generation_config", None)
    informs = options.pop("output_loading_info", False)
    for name, value in options.items():
        if value not in (None, False, "", {}) and name not in _HARMLESS:
            raise RequestError(
                f"{name} is no option for a folder that manyheads wrote; leave it out, or write the model again with"
                " save_pretrained of its class in transformers."
            )
    model = _wrapped(kind, load(folder), folder)
    if generation is not None:
        model.generation_config = generation
    model = model.to(device) if dtype in (None, "auto") else model.to(device, dtype)
    # Nothing is missing or left over: `load` refuses such a folder.
    return (model, {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}) if informs else model


def _device(device_map: Any) -> torch.device:
    """Raises: RequestError: the map is not for one device."""
    device = device_map
    if isinstance(device_map, dict) and len(device_map) == 1 and "" in device_map:
        device = device_map[""]
    if device is None:
        return torch.device("cpu")
    if device == "auto":
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    if not isinstance(device, str | int | torch.device):
        raise RequestError(f"device_map is {device_map!r}; a manyheads model lies on one device, such as 'cuda'.")
    return torch.device(device)


def _wrapped(kind: type[Any], module: Any, folder: Path) -> Any:
    with torch.device("meta"):
        model = kind(ManyHeadsConfig(settings=to_plain(module.config)))
    model.model = module
    tokenizer = tokenizer_of_folder(folder)
    if isinstance(tokenizer, Vocabulary):
        _set_generation(model, _of_language_model(read_settings(folder, GenerationSettings), tokenizer, model))
    elif tokenizer is not None:
        side = tokenizer.target
        ids = MarianIds(pad=side.pad_id, eos=side.eos_id, start=side.bos_id)
        settings = read_settings(folder, DecodingSettings)
        if settings.num_beams == 1:
            settings = replace(settings, length_penalty=0.0, rules="marian-5")  # of beams
        options, differs = generation_to_peer(settings, ids, module.max_len or _LONGEST)
        if settings.num_beams == 1:  # transformers saves no options without effect
            del options["length_penalty"], options["early_stopping"]
        if differs:
            _log.warning_once(f"{folder}: generate of transformers differs from manyheads: {'; '.join(differs)}.")
        banned = [index for [index] in options.pop("bad_words_ids")]
        _set_generation(model, {**options, "suppress_tokens": banned, "bos_token_id": side.bos_id})
    model.name_or_path = str(folder)
    model.eval()
    return model


def _set_generation(model: Any, options: dict[str, Any]) -> None:
    """Set the options of `generate`, and the special ids also in the config."""
    model.generation_config = GenerationConfig(**{name: value for name, value in options.items() if value is not None})
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        value = options.get(name)
        if value is not None and value < model.config.vocab_size:
            setattr(model.config, name, value)


def _of_language_model(settings: GenerationSettings, vocabulary: Vocabulary, model: Any) -> dict[str, Any]:
    """Return the options of `generate` for our settings; texts that end a continuation are given to `generate`."""
    banned = {*settings.banned_ids, *range(vocabulary.vocab_size, model.config.vocab_size)}
    if vocabulary.begin_id is not None and vocabulary.begin_id != vocabulary.end_id:
        banned.add(vocabulary.begin_id)  # the model only reads this token
    if settings.stop:
        _log.warning_once(
            f"{model.name_or_path}: the settings stop at {', '.join(map(repr, settings.stop))}; give generate"
            " stop_strings and tokenizer to have that."
        )
    sampling = ("temperature", "top_k", "top_p", "min_p") if settings.do_sample else ()
    same = ("do_sample", "max_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "num_return_sequences")
    return {
        **{name: getattr(settings, name) for name in (*same, *sampling)},
        "min_new_tokens": settings.min_new_tokens or None,
        "bos_token_id": vocabulary.start_id,
        "eos_token_id": vocabulary.end_id,
        "pad_token_id": padding_id(vocabulary),
        "suppress_tokens": sorted(banned) or None,
    }
