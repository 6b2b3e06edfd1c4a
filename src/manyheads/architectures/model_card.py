"""The card of a model on the Hugging Face hub: README.md with the metadata that the hub reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from manyheads.catalogue import MODEL_TASKS
from manyheads.errors import ConfigError
from manyheads.installation import NAME, address

_BLEU = {"bleu": "BLEU", "chrf": "chrF"}
_OF_CLASSIFIERS = {"accuracy": "Accuracy", "macro_f1": "Macro F1"}
_OF_LANGUAGE_MODELS = {"perplexity": "Perplexity", "bits_per_byte": "Bits per byte"}


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Facts about a model that its folder does not record.

    licence: its identifier on the hub. datasets: names of the training data. evaluation: the output of
    `manyheads evaluate --json`.
    """

    licence: str | None = None
    datasets: Sequence[str] = ()
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
    return "\n".join([*lines, "## Limits", "", *_limits(config, facts), ""])


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
    return f"`{result['args']['signature']}`" if "args" in result else ""


def _limits(config: Any, facts: CardFacts) -> list[str]:
    most = config.longest_input if config.task == "translation" else None
    longest = f"Sources and translations have at most {most:,} tokens. " if most else ""
    lines = [f"- {longest}{MODEL_TASKS[config.task].limits.format(**_fields(config))}"]
    lines += [] if facts.datasets else ["- The training data is not stated."]
    lines += [] if facts.licence else ["- No licence is stated; ask the owner before you use it."]
    return lines
