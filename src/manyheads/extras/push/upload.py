"""Upload of a model folder to the Hugging Face hub: the files that its manifest lists, and a card.

The card is README.md with the metadata that the hub reads. Of a folder the files that its manifest lists are sent.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open

from manyheads.catalogue import ARCHITECTURES, MODEL_TASKS
from manyheads.config.files import load_yaml
from manyheads.errors import ConfigError, DataError, ModelFileError, SaveError
from manyheads.files.safe_open import read_limited
from manyheads.files.verify import MANIFEST, read_manifest, render_manifest, verify_folder
from manyheads.installation import NAME, address
from manyheads.models.hub import FETCHED, is_hub_name, resolve_model_path
from manyheads.models.pretrained import (
    WEIGHTS,
    data_notice,
    notice_section,
    read_config,
    read_languages,
    table_cell,
    usage_example,
)

_BLEU = {"bleu": "BLEU", "chrf": "chrF"}
_OF_CLASSIFIERS = {"accuracy": "Accuracy", "macro_f1": "Macro F1"}
_OF_LANGUAGE_MODELS = {"perplexity": "Perplexity", "bits_per_byte": "Bits per byte"}


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Facts about a model that its folder does not record.

    licence: its identifier on the hub. datasets: names of the training data. terms: of data that was fetched, which its
    manifest records. notice: of embedded data, from the model's card. evaluation: the output of `manyheads evaluate
    --json`.
    """

    licence: str | None = None
    datasets: Sequence[str] = ()
    terms: Mapping[str, str] = field(default_factory=dict)
    notice: str = ""
    evaluation: Mapping[str, Any] | None = None


def make_card(
    name: str,
    config: Any,
    languages: Sequence[tuple[str, str]],
    num_parameters: int,
    example: str,
    facts: CardFacts,
) -> str:
    """Return README.md.

    Args:
        name: owner/name.
        config: the model's config.
        languages: source and target of each direction that it translates.
        example: Python code that uses the model.

    Raises: ConfigError: the evaluation is not of `manyheads evaluate --json`, or not of this model as it is.
    """
    architecture = config.architecture
    kind, fields = MODEL_TASKS[config.task], _fields(config)
    pipeline = kind.pipeline
    spoken = list(dict.fromkeys(language for pair in languages for language in pair))
    known = {"language": spoken, "license": facts.licence, "datasets": list(facts.datasets)}
    head: dict[str, Any] = {
        "library_name": "manyheads",
        "pipeline_tag": pipeline,
        "tags": [architecture],
        **{name: value for name, value in known.items() if value},
    }
    results = [] if facts.evaluation is None else _results(facts.evaluation)
    if results:
        data = {"name": facts.evaluation["protocol"].get("data", "unknown"), "type": "text"}  # type: ignore[index]
        one = {"task": {"type": pipeline}, "dataset": data, "metrics": results}
        head |= {"metrics": sorted({result["type"] for result in results})}
        head |= {"model-index": [{"name": name.rpartition("/")[2], "results": [one]}]}
    directions = ", ".join(f"{source} to {target}" for source, target in languages)
    what = f"It translates from {directions}. " if directions else ""
    what = kind.says.format(**fields) or what
    lines = [
        *("---", yaml.safe_dump(head, sort_keys=False, allow_unicode=True).rstrip(), "---", f"# {name}", ""),
        *(f"A {architecture} of manyheads with {num_parameters:,} parameters. {what}".rstrip(), ""),
        *("## Usage", "", *_installation(), "", "```python", example, "```", ""),
    ]
    if results:
        rows = (f"| {one['name']} | {one['value']:.4g} | {_signature(one)} |" for one in results)
        lines += ["## Evaluation", "", "| metric | value | signature |", "|---|---|---|", *rows, ""]
    return "\n".join([*lines, "## Limits", "", *_limits(config, facts), ""]) + notice_section(facts.notice)


def _installation() -> list[str]:
    """Return how a reader gets manyheads: by its name once it is on the index, otherwise from a clone."""
    if address("Index") is not None:
        return ["```", f"pip install {NAME}", "```"]
    repository = address("Repository")
    return [f"Install {NAME} from a clone of {repository or 'its repository'}:", "", "```", "pip install .", "```"]


def _results(evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the metrics of a model-index, with the signature of sacreBLEU among the arguments."""
    if not isinstance(evaluation.get("protocol"), Mapping):
        raise ConfigError("the evaluation has no 'protocol'; give the output of `manyheads evaluate MODEL --json`.")
    if evaluation["protocol"].get("ensemble"):
        raise ConfigError("the evaluation is of several models; evaluate this one alone.")
    results: list[dict[str, Any]] = []
    for key, title in _BLEU.items():
        if isinstance(found := evaluation.get(key), Mapping):
            arguments = {"signature": str(found.get("signature"))}
            results.append({"type": key, "name": title, "value": float(found["score"]), "args": arguments})
    if isinstance(found := evaluation.get("brackets"), Mapping):
        arguments = {"signature": str(found.get("signature"))}
        results.append({"type": "f1", "name": "F1 of brackets", "value": float(found["f1"]), "args": arguments})
    for key, title in _OF_CLASSIFIERS.items():
        if isinstance(evaluation.get(key), float):
            results.append({"type": key, "name": title, "value": evaluation[key]})
    records = evaluation.get("results")
    first = records[0] if isinstance(records, list) and records and isinstance(records[0], Mapping) else {}
    if isinstance(records, list) and len(records) > 1:
        raise ConfigError(
            f"the evaluation has {len(records)} results; evaluate one model with one memory length, then push it."
        )
    if "dynamic" in first:
        raise ConfigError("the evaluation changed the weights of the model; evaluate the model without --dynamic.")
    for key, title in _OF_LANGUAGE_MODELS.items():
        if isinstance(first.get(key), int | float):  # --recl gives lists, and an infinite figure is null
            results.append({"type": key, "name": title, "value": float(first[key])})
    if not results:
        raise ConfigError(
            "the evaluation has neither BLEU and chrF, nor F1, nor a finite perplexity, nor accuracy; evaluate a model,"
            " then push it."
        )
    return results


def _fields(config: Any) -> dict[str, Any]:
    """Return the values of a config for texts of `ModelTaskEntry`."""
    return {"longest_input": config.longest_input, "labels": ", ".join(getattr(config, "labels", ()))}


def _signature(result: Mapping[str, Any]) -> str:
    return table_cell(f"`{result['args']['signature']}`") if "args" in result else ""


def _limits(config: Any, facts: CardFacts) -> list[str]:
    most = config.longest_input if config.task == "translation" else None
    longest = f"Sources and translations have at most {most:,} tokens. " if most else ""
    lines = [f"- {longest}{MODEL_TASKS[config.task].limits.format(**_fields(config))}"]
    lines += [f"- Terms of the training data {name}: {terms}." for name, terms in facts.terms.items()]
    lines += [] if facts.datasets or facts.terms or facts.notice else ["- The training data is not stated."]
    lines += [] if facts.licence else ["- No licence is stated; ask the owner before you use it."]
    return lines


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
    facts = replace(facts, notice=data_notice(folder))
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
    from manyheads.data.preparing import FORMAT, FORMAT_VERSION
    from manyheads.data.preparing import read_manifest as read_data_manifest

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
