"""The language models of this package as models of transformers, for its Trainer and for comparisons.

    from manyheads.extras.peers import hf
    from transformers import AutoConfig, AutoModelForCausalLM

    hf.register()
    settings = {"architecture": "transformer-xl", "vocab_size": 256, "d_model": 128, "num_heads": 4, "num_layers": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("manyheads", settings=settings))

Needs the extra hf. Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from manyheads.errors import MissingExtraError
from manyheads.installation import install_command


def register() -> None:
    """Register the model type `manyheads` with AutoConfig and AutoModelForCausalLM of transformers.

    Call it before a model is made or loaded; a second call changes nothing.

    Raises: MissingExtraError: transformers is not installed.
    """
    _check_installed()
    from transformers import AutoConfig, AutoModelForCausalLM

    from manyheads.extras.peers.hf_models import ManyHeadsConfig, ManyHeadsForCausalLM

    AutoConfig.register(ManyHeadsConfig.model_type, ManyHeadsConfig, exist_ok=True)
    AutoModelForCausalLM.register(ManyHeadsConfig, ManyHeadsForCausalLM, exist_ok=True)


def from_folder(path: str | Path) -> Any:
    """Return a trained language model of this package as a model of transformers, in evaluation mode.

    Args: path: as for `manyheads.load`.

    Raises: MissingExtraError: transformers is not installed. ModelFileError, ConfigError: as `manyheads.load`.
        RequestError: the model translates.
    """
    _check_installed()
    from manyheads.extras.peers.hf_models import wrap

    return wrap(path)


def _check_installed() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError(f"transformers is not installed; install it with: {install_command('hf')}")
