"""The models and tokenizers of this package in transformers: AutoConfig, AutoModelForCausalLM, AutoTokenizer ...

    import manyheads.hf  # makes the type `manyheads` known to transformers
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("runs/demo/model")
    model = AutoModelForSeq2SeqLM.from_pretrained("runs/demo/model")

Needs the extra hf. Importing this package imports neither torch nor transformers; `import manyheads.hf` does, because
it calls `register`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from manyheads.errors import MissingExtraError
from manyheads.installation import install_command


def registered() -> ModuleType:
    """Return this module after `register`: what `import manyheads.hf` gives."""
    register()
    return sys.modules[__name__]


def register() -> None:
    """Register the model type `manyheads` with the Auto classes of transformers; a second call changes nothing.

    Raises: MissingExtraError: transformers is not installed.
    """
    _check_installed()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    from manyheads.extras.hf.loading import ManyHeadsConfig
    from manyheads.extras.hf.models import ManyHeadsForCausalLM, ManyHeadsForSeq2SeqLM
    from manyheads.extras.hf.tokenizer import ManyHeadsTokenizer

    AutoConfig.register(ManyHeadsConfig.model_type, ManyHeadsConfig, exist_ok=True)
    AutoModelForCausalLM.register(ManyHeadsConfig, ManyHeadsForCausalLM, exist_ok=True)
    AutoModelForSeq2SeqLM.register(ManyHeadsConfig, ManyHeadsForSeq2SeqLM, exist_ok=True)
    AutoTokenizer.register(ManyHeadsConfig, ManyHeadsTokenizer, exist_ok=True)


def from_folder(path: str | Path) -> Any:
    """Return a trained model of this package as a model of transformers, in evaluation mode.

    Args: path: as for `manyheads.load`.

    Raises: MissingExtraError: transformers is not installed. ModelFileError, ConfigError: as `manyheads.load`.
        RequestError: it is neither a language model nor a translator.
    """
    _check_installed()
    from manyheads.extras.hf.loading import from_folder as load
    from manyheads.extras.hf.models import ManyHeadsForCausalLM, ManyHeadsForSeq2SeqLM

    return load(path, (ManyHeadsForCausalLM, ManyHeadsForSeq2SeqLM))


def tokenizer_from_folder(path: str | Path) -> Any:
    """Return the tokenizer of a model folder as a tokenizer of transformers.

    Args: path: as for `manyheads.load`.

    Raises: MissingExtraError: transformers is not installed. ModelFileError: the folder has no tokenizer. DataError: it
        is damaged.
    """
    _check_installed()
    from manyheads.extras.hf.tokenizer import ManyHeadsTokenizer

    return ManyHeadsTokenizer.from_pretrained(path)


def __getattr__(name: str) -> Any:
    modules = {"ManyHeadsConfig": "config", "ManyHeadsTokenizer": "tokenizer", "StateCache": "model"}
    modules |= {"ManyHeadsForCausalLM": "language", "ManyHeadsForSeq2SeqLM": "translation"}
    if name not in modules:
        raise AttributeError(f"module 'manyheads.hf' has no attribute {name!r}")
    _check_installed()
    return getattr(importlib.import_module(f"{__name__}.{modules[name]}"), name)


def _check_installed() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError(f"transformers is not installed; install it with: {install_command('hf')}")
