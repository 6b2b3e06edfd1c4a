"""`manyheads.train`, `manyheads.prepare` and `manyheads.evaluate`: the commands of these names as functions.

Pairs and texts may be objects in memory: lists, generators, data sets of torch or of the package `datasets`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from manyheads.catalogue import HOOKS, PRESETS, SIZED_BY_PRECISION, load
from manyheads.cli.commands.task_commands import parse_for_named_task, parse_for_task
from manyheads.cli.process import set_up_machine
from manyheads.cli.watching.phases import showing_if_long
from manyheads.config.build import resolve
from manyheads.config.checks import not_among
from manyheads.config.files import Source, to_plain
from manyheads.config.options import refuse_given
from manyheads.data.lines import OnBadUtf8, ReadReport
from manyheads.data.translation.readers import mended, nested_value, preview
from manyheads.distributed.process import this_process
from manyheads.errors import ConfigError, DataError
from manyheads.tasks.preparation import check_output
from manyheads.tasks.settings_resolution import resolve_run
from manyheads.training.settings import RunConfig

if TYPE_CHECKING:
    from manyheads.tasks.report import Report
    from manyheads.training.record.report import TrainResult


def train(
    config: RunConfig | str | PathLike[str] | None = None,
    *,
    callbacks: object = (),
    resume: str = "auto",
    progress: bool = False,
    **settings: Any,
) -> TrainResult:
    """Train a model; all files are in the folder `run_dir`.

        result = manyheads.train("debug", run_dir="runs/mine", training={"max_steps": 20}, callbacks=["csv"])

    Args:
        config: the settings: a preset's name, a YAML file, or an object; None: they are planned for `data.path`.
        callbacks: `manyheads.Callback`s, and names of loggers.
        resume: `auto` continues the run of the folder, if there is one; `none` begins again; see `manyheads train`.
        progress: show on standard error what the command shows; otherwise warnings alone. A notebook then shows one
            line that changes and, at the end, the learning curve.
        settings: single settings, which override others: a section as a dictionary, `run_dir`, `seed` and others.

    Returns: the result. Ctrl-C and other signals end the run with a checkpoint; the result names the signal.
    Raises: ManyHeadsError: settings or data cannot be used, or the run failed.
    """
    set_up_machine()
    chosen = _settings_of_run(config, settings, resume)
    from manyheads.cli.watching.training import train_and_watch

    return train_and_watch(chosen, resume, this_process(), callbacks, quiet=not progress)


def _settings_of_run(config: Any, settings: dict[str, Any], resume: str) -> RunConfig:
    typed = Source(_plain(settings), "the arguments")
    if config is not None and not isinstance(config, str | PathLike):
        return (
            resolve(type(config), [Source(to_plain(config), "the config"), typed])
            if settings
            else cast(RunConfig, config)
        )
    preset = config if isinstance(config, str) and config in PRESETS else None
    files = [] if config is None or preset is not None else [str(config)]
    if files and not Path(files[0]).exists():
        raise ConfigError(f"{not_among('there is no preset', files[0], PRESETS)} There is no file of this name either.")

    def resolved(precision: str = "bf16") -> RunConfig:
        plan = _planned_layer if config is None else None
        return resolve_run(typed, preset=preset, files=files, precision=precision, resume=resume, plan=plan)

    found = resolved()
    if preset in SIZED_BY_PRECISION and this_process().world == 1:
        from manyheads.training.run.device import starting_precision

        found = resolved(starting_precision(found, resume))
    return found


def _planned_layer(typed: Source) -> Source:
    layer: Source = load(HOOKS["plan of a run"])(typed).layer
    return layer


def _plain(value: Any) -> Any:
    """Return settings as they would be in a file: paths as texts, objects as sections."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, PathLike):
        return str(value)
    return to_plain(value) if hasattr(value, "__dataclass_fields__") else value


def prepare(
    data: Iterable[object] | None = None,
    output: str | PathLike[str] = "",
    *,
    valid: Iterable[object] | None = None,
    test: Iterable[object] | None = None,
    progress: bool = False,
    **options: Any,
) -> Any:
    """Convert pairs or texts to a folder of tokens, which `train` reads as `data.path`.

        data = manyheads.prepare([("a dog", "ein Hund"), ...], "data/mine", valid_count=100, vocab_size=4000)
        manyheads.train("demo", data={"path": data.path})

    Args:
        data: the training data: (source, target) pairs or texts, from a list, a generator, a data set of torch or of
            `datasets` (records with `source` and `target`, `translation`, or `text`). It is read once. None: files, as
            the command's options name them.
        output: the folder to create; it appears when it is complete.
        valid: validation data; without it `valid_count` (pairs) or `valid_bytes` (text) hold some of `data` back.
        test: test data, if any.
        progress: show it on standard error.
        options: those of `manyheads prepare`, such as `task`, `vocab_size`, `source_lang`, `replace=True`,
            `tokenizer={"kind": "word"}`.

    Returns: the opened data, with `path`, `manifest`, `tokenizer` and the stores of its splits.
    Raises: ManyHeadsError: an item is neither a pair nor a text, the data ends early, an option is wrong, or the folder
        cannot be made. An exception of the iterable itself passes.
    """
    if not str(output):
        raise ConfigError("prepare needs output, the folder to create.")
    splits = {"train": data, "valid": valid, "test": test}
    items = {split: Items(one, f"the {split} data") for split, one in splits.items() if one is not None}
    if items and "train" not in items:
        raise ConfigError("valid and test are data beside other data; give data, too.")
    if items and "task" not in options:
        options["task"] = "translation" if items["train"].has_pairs else "lm"
    if items and options["task"] == "lm":
        options |= {name: "data" for name, split in _CORPORA.items() if split in items}
    task, chosen = parse_for_named_task("prepare", _arguments({"output": output, **options}))
    folder = Path(chosen.output)
    check_output(folder, chosen.replace)
    module = task.module("prepare")
    if not items:
        make = module.preparation(chosen)
    elif task.prepared_as == "lm":
        apart = getattr(chosen.vocabulary, "documents", None) == "files"
        texts = {split: ItemTexts(one, chosen.on_bad_utf8, apart) for split, one in items.items()}
        refuse_given({name: getattr(chosen, name) for name in ("layout", "format")}, "{} is for files; leave it out.")
        make = partial(module.preparation(chosen), **texts)
    elif task.prepared_as == "translation":
        make = _of_pairs(chosen, items)
    else:
        raise ConfigError(
            f"prepare takes pairs or texts; for task {options['task']!r} give files, as the command does."
        )
    with showing_if_long() if progress else nullcontext(_silent) as show:
        make(folder, replace=chosen.replace, progress=show)
    return load(task.data).open(folder)


_CORPORA = {"corpus": "train", "valid_corpus": "valid", "test_corpus": "test"}


def _of_pairs(options: Any, items: Mapping[str, Items]) -> Any:
    from manyheads.tasks.translation import prepare as task

    languages = task.languages_of(options)
    shared = (options.source_key, options.target_key), languages or (None, None), options.on_bad_utf8
    return task.of_items(options, {split: ItemPairs(one, *shared) for split, one in items.items()}, languages)


def evaluate(model: str | PathLike[str], *, progress: bool = False, **options: Any) -> Report | None:
    """Score a model on held-out data, by default that of its run.

        report = manyheads.evaluate("runs/mine", split="test")
        report.to_json()["bleu"]["score"]

    Args:
        model: a model folder, a run folder, or owner/name on the hub.
        progress: show it on standard error.
        options: those of `manyheads evaluate` for the model's task, such as `data`, `split`, `num_beams`.

    Returns: the report: `to_json()` has figures and protocol, `to_lines()` the same for people. None on all ranks but
        the main one. Pages and pictures that are asked for are written.
    Raises: ManyHeadsError: there is no such model, or an option or the data cannot be used.
    """
    set_up_machine()
    task, chosen = parse_for_task("evaluate", [str(model), *_arguments(options)])
    refuse_given(
        {"json": chosen.json, "output": chosen.output is not None},
        "{} is for the command; the report has to_json(), to_lines() and output.",
    )
    with showing_if_long() if progress else nullcontext(_silent) as show:
        report: Report | None = task.module("evaluate").evaluate(chosen, show)
    if report is not None:
        report.save()
    return report


def _silent(phase: str, done: int, total: int, /) -> None: ...


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """Return options as a command line has them; `tokenizer={"kind": "word"}` is `--tokenizer.kind=word`."""
    found: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, Mapping):
            found += _arguments({f"{name}.{inner}": one for inner, one in value.items()})
        elif isinstance(value, tuple | list):
            found += [option, *map(str, value)] if value else []
        elif value is True:
            found.append(option)
        elif value is not None and value is not False:
            found.append(f"{option}={value}")
    return found


_SIDES = ("source", "target")
_TEXT = "text"


class Items:
    """The items of an object, which is read once.

    Args: given: an iterable, or an object with a length and numbered items. name: for messages.

    Raises: DataError: it is no such object, is one text, or has no items.
    """

    def __init__(self, given: Any, name: str) -> None:
        is_numbered = hasattr(given, "__getitem__") and hasattr(given, "__len__") and not hasattr(given, "__iter__")
        if isinstance(given, str | bytes | Mapping) or not (is_numbered or isinstance(given, Iterable)):
            raise DataError(
                f"{name} is {preview(str(given))}, a {type(given).__name__}; give an iterable of texts, or of pairs of"
                " texts."
            )
        self.name = name
        self._num = len(given) if hasattr(given, "__len__") else None
        items = iter(given) if not is_numbered else (given[place] for place in range(len(given)))
        self.first = next(items, None)
        if self.first is None:
            raise DataError(f"{name} has no items; give texts, or pairs of texts.")
        self._items = chain([self.first], items)

    @property
    def has_pairs(self) -> bool:
        """Whether the first item is a pair of texts."""
        keys = self.first if isinstance(self.first, Mapping) else ()
        return isinstance(self.first, tuple | list) or "translation" in keys or set(_SIDES) <= set(keys)

    def __iter__(self) -> Iterator[tuple[Any, str]]:
        """Yield each item, and what messages call it. Raises: DataError: there are fewer than the object's length."""
        number = 0
        for number, item in enumerate(self._items, 1):
            yield item, f"{self.name}: item {number:,}"
        if self._num is not None and number < self._num:
            raise DataError(f"{self.name} has ended after {number:,} of its {self._num:,} items.")

    def describe(self) -> str:
        """See `data.translation.preparing.Pairs`."""
        return self.name


def _checked(value: Any, where: str, expected: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where} is {preview(str(value))}, a {type(value).__name__}; give {expected}.")
    return str(value)


@dataclass(frozen=True)
class ItemPairs:
    """Pairs of texts: (source, target), or records with keys.

    Args: keys: of both sides; None: `source` and `target`, or those of the languages in `translation`.
    """

    items: Items
    keys: tuple[str | None, str | None] = (None, None)
    languages: tuple[str | None, str | None] = (None, None)
    on_bad_utf8: OnBadUtf8 = "fail"

    def read(self, report: ReadReport | None = None) -> Iterator[tuple[str, str]]:
        """Yield them as lines. Raises: DataError: an item is no pair of texts."""
        report = report or ReadReport()
        for item, where in self.items:
            report.lines += 1
            pair = mended(self._sides(item, where), where, self.on_bad_utf8, report)
            if pair is None:
                report.bad_utf8_skipped += 1
            else:
                yield pair

    def _sides(self, item: Any, where: str) -> list[str]:
        if isinstance(item, Mapping):
            inside = "translation" in item and all(self.languages)
            usual = [f"translation.{one}" for one in self.languages] if inside else _SIDES
            return [nested_value(item, key or other, where) for key, other in zip(self.keys, usual, strict=True)]
        if not isinstance(item, tuple | list) or len(item) != len(_SIDES):
            raise DataError(f"{where} is {preview(str(item))}, no pair; give pairs of texts, (source, target).")
        return [_checked(side, f"{where}, {name}", "a text") for side, name in zip(item, _SIDES, strict=True)]

    def describe(self) -> str:
        """See `data.translation.preparing.Pairs`."""
        return self.items.name


@dataclass(frozen=True)
class ItemTexts:
    """Texts, or records with a `text`; each ends with a line break. apart: each is a document, as a file is."""

    items: Items
    on_bad_utf8: OnBadUtf8 = "fail"
    apart: bool = False

    def read(self, *, as_bytes: bool, report: ReadReport | None = None) -> Iterator[tuple[bytes, bool]]:
        """See `data.language.texts.Text`. Raises: DataError: an item is no text."""
        report = report or ReadReport()
        for item, where in self.items:
            text = nested_value(item, _TEXT, where) if isinstance(item, Mapping) else _checked(item, where, "a text")
            try:
                content = text.encode()
            except UnicodeEncodeError:
                if mended([text, ""], where, self.on_bad_utf8, report) is None:
                    report.bad_utf8_skipped += 1
                    continue
                content = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
            yield content + b"\n" * (not content.endswith(b"\n")), self.apart
        if not self.apart:
            yield b"", True

    def describe(self) -> str:
        """See `data.language.texts.Text`."""
        return self.items.name
