"""Preparation of sentence pairs: of files as the task does it, or of data by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.config.options import given_options, refuse_given
from manyheads.extras.sources.running import BOTH, PLAN, ChainedPairs, pairs_of, plan_text, preparing
from manyheads.tasks.preparation import check_holdout
from manyheads.tasks.translation import prepare as task

if TYPE_CHECKING:
    from manyheads.extras.sources.finding import Found
    from manyheads.extras.sources.translation_task.options import PrepareOptions

_FORMS = ("source", "target", "tsv", "jsonl", "pairs")


def preparation(options: PrepareOptions) -> Callable[..., dict[str, Any]]:
    """See `catalogue.Task`. Raises: ConfigError: files and sources of a split are both given; see the task."""
    sources = options.sources
    if not sources.is_given:
        return partial(task.preparation(options), in_order=sources.in_order)
    given = given_options(options)
    files = {split: [f"--{prefix}{form}" for form in _FORMS] for split, prefix in _PREFIXES.items()}
    for split, names in files.items():
        if split == "train" or getattr(sources, split):
            refuse_given({name: name in given for name in names}, f"{{}} cannot be used with {_OPTIONS[split]}.")
    refuse_given(
        {"--pair": options.pair}, "{} cannot be used with --from; prepare one direction, or fetch files first."
    )
    sources.wanted()  # a name that is unknown, or has terms, comes before what else is missing
    if sources.valid:
        refuse_given({"--valid-count": "--valid-count" in given}, BOTH)
    elif not sources.dry_run:
        check_holdout(options, [*files["valid"], "--valid-from"], "--valid-count", "500")
    languages = task.languages_of(options)
    task.of_splits({"train": ChainedPairs([], "")}, options, languages)  # an error of an option comes before fetching

    def prepare(found: dict[str, list[Found]]) -> Callable[..., dict[str, Any]]:
        keys = (options.source_key, options.target_key)
        splits = {
            split: pairs_of(
                each,
                keys,
                languages or (None, None),
                on_bad_utf8=options.on_bad_utf8,
                processes=sources.processes if split == "train" else 1,
            )
            for split, each in found.items()
        }
        made = task.of_splits({**task.named_files(options, languages), **splits}, options, languages)
        return partial(made, in_order=sources.in_order)

    return preparing(sources, (options.source_lang, options.target_lang), prepare, is_pairs=True)


def summary(folder: Path, manifest: dict[str, Any]) -> str:
    """See `catalogue.Task`."""
    if PLAN in manifest:
        return plan_text(manifest[PLAN])
    return "\n".join([*manifest.get("fetched", []), task.summary(folder, manifest)])


_PREFIXES = {"train": "", "valid": "valid-", "test": "test-"}
_OPTIONS = {"train": "--from", "valid": "--valid-from", "test": "--test-from"}
