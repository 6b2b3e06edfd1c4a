"""Conversion of a user's model name to a folder: a model folder, a run folder, or a name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from manyheads.config.checks import did_you_mean
from manyheads.errors import ModelFileError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Never pickles or scripts: other files of a repository are not downloaded.
FETCHED = ["*.safetensors", "*.json", "*.spm", "*.md"]


def is_hub_name(text: str) -> bool:
    """Return whether a text has the form owner/name."""
    return _HUB_NAME.fullmatch(text) is not None


def resolve_model_path(path: str | Path, *, revision: str | None = None) -> Path:
    """Return the folder that contains config.json.

    Args:
        path: a model folder; a run folder (its model/ is used); or `owner/name`, downloaded from the hub.
        revision: branch, tag or commit of a hub model.

    Raises: ModelFileError: there is no such folder, it is a local one with a revision, or the hub cannot be reached or
        refuses.
    """
    folder = Path(path)
    if revision is not None and folder.exists():
        raise ModelFileError(
            f"{folder} is on this machine, where models have no revisions; leave out the revision {revision}."
        )
    if folder.is_dir():
        if not (folder / "config.json").exists() and (folder / "model" / "config.json").exists():
            return folder / "model"
        return folder
    if folder.exists():
        raise ModelFileError(f"{folder} is a file; a model is a folder with config.json and model.safetensors.")
    if not is_hub_name(str(path)):
        raise ModelFileError(
            f"there is no folder {folder}; give a model folder, a run folder, or owner/name on the hub."
        )
    if folder.parent.is_dir():  # for example `runs/dmeo`: a mistyped local name is not sent to the network
        names = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()]
        near = did_you_mean(folder.name, names, prefix=f"{folder.parent}/")
        raise ModelFileError(
            f"there is no folder {folder}.{near} The hub was not asked, because there is a folder {folder.parent} here."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), revision=revision, allow_patterns=FETCHED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelFileError(
            f"there is no folder {folder}, and fetching {path} from the Hugging Face hub failed: {first_line}"
        ) from error
