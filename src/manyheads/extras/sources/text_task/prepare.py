"""Preparation for language models: of files as the task does it, or of data by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.config.options import given_options, refuse_given
from manyheads.errors import ConfigError, DataError
from manyheads.extras.sources.running import BOTH, PLAN, SourceTexts, plan_text, preparing
from manyheads.tasks.language_modelling import prepare as task
from manyheads.tasks.preparation import check_holdout

if TYPE_CHECKING:
    from manyheads.extras.sources.finding import Found
    from manyheads.extras.sources.text_task.options import PrepareOptions

_FIELDS = {"train": "corpus", "valid": "valid_corpus", "test": "test_corpus"}
_OPTIONS = {"train": "--from", "valid": "--valid-from", "test": "--test-from"}


def preparation(options: PrepareOptions) -> Callable[..., dict[str, Any]]:
    """See `catalogue.Task`. Raises: ConfigError: files and sources of a split are both given; see the task."""
    sources = options.sources
    refuse_given(
        {"--processes": sources.processes > 1 and options.is_of_ids},
        "{} has no use with ids or pictures, which are not encoded.",
    )
    if not sources.is_given:
        made = task.preparation(options)
        return made if options.is_of_ids else partial(made, in_order=sources.in_order)
    given = given_options(options)
    for split, name in _FIELDS.items():
        if getattr(sources, split):
            refuse_given(
                {f"--{name.replace('_', '-')}": getattr(options, name)}, f"{{}} cannot be used with {_OPTIONS[split]}."
            )
    refuse_given({"--format": "--format" in given}, "{} cannot be used with --from; fetch files of ids yourself.")
    if options.layout is not None and (sources.valid or sources.test or len(sources.train) != 1):
        raise ConfigError("--layout names all splits of one corpus: give one SOURCE to --from, and no other.")
    sources.wanted()  # a name that is unknown, or has terms, comes before what else is missing
    if sources.valid:
        refuse_given({"--valid-bytes": "--valid-bytes" in given}, BOTH)
    elif options.layout is None and not sources.dry_run:
        check_holdout(options, ["--valid-corpus", "--valid-from"], "--valid-bytes", "200000")
    if options.layout is None and not sources.dry_run:  # an error of an option comes before fetching
        held = options.valid_corpus or ((options.output,) if sources.valid else ())
        task.preparation(replace(options, corpus=options.corpus or (options.output,), valid_corpus=held))

    def prepare(found: dict[str, list[Found]]) -> Callable[..., dict[str, Any]]:
        paths = {
            _FIELDS[split]: tuple(str(path) for one in each for path in one.files) for split, each in found.items()
        }
        if options.layout is not None:
            [one] = found["train"]
            if one.folder is None:
                raise DataError(f"{one.origin} is no folder or archive, and --layout {options.layout} needs its files.")
            paths["corpus"] = (str(one.folder),)
        chosen: dict[str, Any] = {**paths}
        made: Any = task.preparation(replace(options, **chosen))
        names = {split: " + ".join(one.origin for one in each) for split, each in found.items()}
        if options.layout is not None:
            names = dict.fromkeys((split for split in _FIELDS if split in made.keywords), names["train"])
        texts = {
            split: SourceTexts(
                paths=made.keywords[split].paths,
                on_bad_utf8=options.on_bad_utf8,
                name=name,
                processes=sources.processes if split == "train" else 1,
            )
            for split, name in names.items()
            if hasattr(made.keywords[split], "on_bad_utf8")
        }
        return made if options.is_of_ids else partial(made, **texts, in_order=sources.in_order)

    return preparing(sources, (None, None), prepare, is_pairs=False)


def summary(folder: Path, manifest: dict[str, Any]) -> str:
    """See `catalogue.Task`."""
    if PLAN in manifest:
        return plan_text(manifest[PLAN])
    return "\n".join([*manifest.get("fetched", []), task.summary(folder, manifest)])
