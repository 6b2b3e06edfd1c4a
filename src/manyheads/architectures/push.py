"""Upload of a model folder to the Hugging Face hub: the files that its manifest lists, and a card."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import safe_open

from manyheads.architectures.hub import FETCHED, is_hub_name, resolve_model_path
from manyheads.architectures.model_card import CardFacts, make_card
from manyheads.architectures.pretrained import WEIGHTS, read_config, read_languages, usage_example
from manyheads.catalogue import ARCHITECTURES
from manyheads.config.files import load_yaml
from manyheads.errors import ConfigError, DataError, ModelFileError, SaveError
from manyheads.files.guarded import read_limited
from manyheads.files.verify import MANIFEST, read_manifest, render_manifest, verify_folder

_CARD = "README.md"
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Upload:
    """An upload. files: content or path, by name. left_out: names in the manifest that no reader fetches."""

    name: str
    files: dict[str, bytes | Path]
    left_out: list[str]

    def size(self, file: str) -> int:
        """Return the bytes of a file."""
        content = self.files[file]
        return len(content) if isinstance(content, bytes) else content.stat().st_size

    def describe(self, revision: str | None = None) -> str:
        """Return the files with their sizes, and the card. revision: the branch; None: main."""
        lines = [f"would upload to {self.name}, {revision or 'main'}:"]
        lines += [f"  {self.size(file):>15,} bytes  {file}" for file in self.files]
        card = self.files[_CARD]
        return "\n".join([*lines, card.decode("utf-8") if isinstance(card, bytes) else ""])


def make_upload(model: str, name: str, facts: CardFacts) -> Upload:
    """Check a model folder or a run folder, and return what is sent: its files, a new card, and a manifest of both.

    Raises: ModelFileError: there is no such folder. ConfigError: the name is not owner/name, or the folder is not a
        model. CheckpointError: a file is missing, damaged, or not in the manifest.
    """
    if not Path(model).is_dir():
        raise ModelFileError(f"there is no folder {model}; give a model folder or a run folder.")
    folder = resolve_model_path(model)
    if not is_hub_name(name):
        raise ConfigError(f"{name!r} is not a name on the hub; give owner/name, of letters, digits, '-', '_' and '.'.")
    verify_folder(folder)
    manifest = read_manifest(folder)
    config = read_config(folder)
    if WEIGHTS not in manifest:
        raise ConfigError(f"{folder} is not a model folder: it has no {WEIGHTS}.")
    with safe_open(folder / WEIGHTS, framework="pt") as tensors:
        num_parameters = sum(math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
    languages = read_languages(folder)
    example = usage_example(ARCHITECTURES[config.architecture].task, languages).replace('"."', f'"{name}"')
    card = make_card(name, config, languages, num_parameters, example, facts).encode("utf-8")
    sent = [one for one in manifest if any(fnmatchcase(one, pattern) for pattern in FETCHED)]
    files: dict[str, bytes | Path] = {one: folder / one for one in sent}
    files[_CARD] = card
    entries = {one: manifest[one] for one in sent}
    entries[_CARD] = {"sha256": hashlib.sha256(card).hexdigest(), "size": len(card)}
    files[MANIFEST] = render_manifest(entries).encode()
    return Upload(name, dict(sorted(files.items())), sorted(manifest.keys() - set(sent)))


def terms_of_data(model: str) -> dict[str, str]:
    """Return the terms of a run's training data, which its manifest records; none without a run or its data."""
    from manyheads.data.manifest import read_manifest as read_data_manifest
    from manyheads.data.preparing import FORMAT, FORMAT_VERSION

    try:
        path = load_yaml(Path(model) / "config.yaml").section("data").get("path")
        terms = read_data_manifest(Path(str(path)), kind=FORMAT, version=FORMAT_VERSION).get("terms", {})
    except (ConfigError, DataError):
        return {}
    return {str(name): str(text) for name, text in terms.items()} if isinstance(terms, dict) else {}


def send(upload: Upload, *, revision: str | None = None, private: bool = False) -> str:
    """Create the repository if it does not exist, and upload all files in one commit.

    Args: revision: a branch, created if missing; None: main.
    Returns: the address of the commit.
    Raises: SaveError: the hub cannot be reached or refuses; nothing is half written there, because it is one commit.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    hub = HfApi(library_name="manyheads")
    add = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=content if isinstance(content, bytes) else str(content))
        for name, content in upload.files.items()
    ]
    try:
        hub.create_repo(upload.name, private=private or None, exist_ok=True)
        if revision is not None:
            hub.create_branch(upload.name, branch=revision, exist_ok=True)
        done = hub.create_commit(
            upload.name, operations=add, commit_message="Upload a model of manyheads", revision=revision
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise SaveError(
            f"pushing to {upload.name} failed: {first_line} (a token with write access is needed: `hf auth login`, or"
            " HF_TOKEN)."
        ) from error
    return str(done.commit_url)


def read_evaluation(path: str | None) -> dict[str, Any] | None:
    """Return the output of `manyheads evaluate --json` in a file. Raises: ConfigError: it is not that."""
    if path is None:
        return None
    try:
        content = json.loads(read_limited(Path(path), _MOST_BYTES).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold one JSON object, as `manyheads evaluate MODEL --json` prints.")
    return content
