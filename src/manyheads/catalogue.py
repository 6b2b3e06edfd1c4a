"""Every table of names: what there is, and where its code lies.

The code of an entry is a string `module:attribute`, which is imported when it is first needed. Therefore the start is
fast, and the core has entries of `manyheads.extras` without importing them.

Plug-ins, other packages, add entries to the tables "architecture", "score", "task", "preset", "logger", "peer",
"format" and "protocol" by entry points of the group `manyheads`, which are named `TABLE.NAME`:

    [project.entry-points.manyheads]
    "architecture.bag" = "bag_of_words.model:ARCHITECTURE"

A module that is not installed has the same names in a dictionary `MANYHEADS`, and is a plug-in of the commands that get
`--plugin MODULE`. This module imports nothing of the package but errors.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import ModuleType
from typing import Any, Generic, Literal, TypeVar

from manyheads.errors import ConfigError, ManyHeadsError

T = TypeVar("T")
GROUP = "manyheads"
KINDS = ("architecture", "score", "task", "preset", "logger", "peer", "format", "protocol")
PLUGINS = "MANYHEADS_PLUGINS"  # modules with commas between them, so that child processes have them, too
ModelTask = Literal["translation", "language-modelling", "classification", "spans"]
"""The kind of a model; see `MODEL_TASKS`."""


def load(reference: Any) -> Any:
    """Return what `module:attribute` or `module.attribute` names; anything but a string is returned as it is."""
    if not isinstance(reference, str):
        return reference
    module, colon, attribute = reference.partition(":")
    if not colon:
        module, _, attribute = reference.rpartition(".")
    return getattr(importlib.import_module(module or attribute), attribute)


class Table(Mapping[str, T], Generic[T]):
    """Name -> entry. An entry given as `module:attribute` is loaded on first access.

    Args:
        kind: of the entries, as in the names of entry points.
        entries: those of this package.

    Attributes: refused: a name that is not in the list -> why: its plug-in cannot be imported, or several have it.
    """

    def __init__(self, kind: str, entries: Mapping[str, T | str]) -> None:
        self.kind = kind
        self._entries: dict[str, Any] = dict(entries)
        self._own = frozenset(entries)
        self._origins: dict[str, str] = {}  # entry of a plug-in -> the plug-in
        self.refused: dict[str, ConfigError] = {}
        self._has_plugins = False

    def __getitem__(self, name: str) -> T:
        """Raises: ConfigError: the plug-in of this entry cannot be imported, or several entries have this name."""
        self._check_name(name)
        if name not in self._entries:
            self._add_plugins()
            if name in self.refused:
                raise self.refused[name]
        entry: T = load(self._entries[name])
        self._entries[name] = entry
        return entry

    def __contains__(self, name: object) -> bool:
        if name not in self._entries:
            self._add_plugins()
        return name in self._entries or name in self.refused

    def __iter__(self) -> Iterator[str]:
        """Yield all names but those that `self[name]` refuses."""
        self._add_plugins()
        return iter([name for name in self._entries if name not in self.refused])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"{self.kind} table: {', '.join(self)}"

    def origin(self, name: str) -> str | None:
        """The plug-in that has added an entry; None: it is of this package."""
        return self._origins.get(name)

    def _check_name(self, name: str) -> None:
        """Raises: ConfigError: a plug-in has an entry of a name that there is. Imports no plug-in."""
        origins = [origin for given, _, origin in _plugins().get(self.kind, ()) if given == name]
        if len(origins) > (name not in self._own):
            raise ConfigError(
                f"the plug-in {origins[-1]} has the {self.kind} {name}, and there is another of this name; uninstall"
                " it, or give its entry another name."
            )

    def _add_plugins(self) -> None:
        if self._has_plugins:
            return
        self._has_plugins = True
        for name, entry, origin in _plugins().get(self.kind, ()):
            try:
                self._check_name(name)
            except ConfigError as error:
                self.refused[name] = error
                continue
            self._origins[name] = origin
            where = f"the {self.kind} {name} of the plug-in {origin}"
            try:
                loaded = load(entry)
                flaw = _FLAWS[self.kind](name, loaded)
            except (Exception, SystemExit) as error:
                flaw = f"cannot be imported from {entry}: {type(error).__name__}: {error}"
            if flaw:
                self.refused[name] = ConfigError(f"{where} {flaw}")
            else:
                self._entries[name] = loaded


def made_by(table: Table[Callable[..., T]], name: str, *arguments: Any) -> T:
    """Call an entry. Raises: ConfigError: it is a plug-in's and raises another error than a `ManyHeadsError`."""
    try:
        return table[name](*arguments)
    except ManyHeadsError:
        raise
    except Exception as error:
        if (origin := table.origin(name)) is None:
            raise
        raise ConfigError(
            f"the {table.kind} {name} of the plug-in {origin} fails: {type(error).__name__}: {error}"
        ) from error


class Lazy(Mapping[str, T], Generic[T]):
    """Name -> class, imported on access.

    Args:
        names: a function that returns the names.
        get: name -> class.
    """

    def __init__(self, names: Callable[[], Collection[str]], get: Callable[[str], T]) -> None:
        self._names, self._get = names, get

    def __getitem__(self, name: str) -> T:
        if name not in self._names():
            raise KeyError(name)
        return self._get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    __hash__ = object.__hash__  # annotations hold such objects


@cache
def _plugins() -> Mapping[str, list[tuple[str, Any, str]]]:
    """The entries of plug-ins, by kind: name, entry, and the plug-in."""
    from importlib.metadata import entry_points  # takes a hundredth of a second, where names are listed

    found: dict[str, list[tuple[str, Any, str]]] = {}
    given = [(point.name, point.value, point.dist.name if point.dist else "?") for point in entry_points(group=GROUP)]
    for module in filter(None, os.environ.get(PLUGINS, "").split(",")):
        given += [(name, entry, module) for name, entry in entries_of(module).items()]
    for name, entry, origin in given:
        kind, _, short = name.partition(".")
        if kind not in KINDS or not short:
            raise ConfigError(
                f"the plug-in {origin} has the entry {name}, which must be TABLE.NAME, where TABLE is one of"
                f" {', '.join(KINDS)}; uninstall it, or rename this entry."
            )
        found.setdefault(kind, []).append((short, entry, origin))
    return found


def origins() -> set[str]:
    """The names of the plug-ins that are there."""
    return {origin for entries in _plugins().values() for _, _, origin in entries}


def entries_of(module: str) -> Mapping[str, Any]:
    """Return the entries of a plug-in that is not installed: its dictionary `MANYHEADS`, of `TABLE.NAME` -> entry.

    Raises: ConfigError: the module cannot be imported, or has no such dictionary.
    """
    try:
        entries = load(f"{module}:MANYHEADS")
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the plug-in {module} cannot be imported: {type(error).__name__}: {error}. It must be a module on Python's"
            " path (PYTHONPATH) with a dictionary MANYHEADS, such as"
            ' {"architecture.bag": "bag_of_words.model:ARCHITECTURE"}.'
        ) from error
    if not isinstance(entries, Mapping) or not all(isinstance(name, str) and "." in name for name in entries):
        raise ConfigError(f"MANYHEADS of the plug-in {module} must be a dictionary of TABLE.NAME -> entry.")
    return entries


def _flaw_of_architecture(name: str, entry: Any) -> str:
    if not isinstance(entry, Architecture):
        return f"is {entry!r}; it must be a catalogue.Architecture."
    if entry.task not in MODEL_TASKS:
        return f"is for the task {entry.task!r}; it must be one of {', '.join(MODEL_TASKS)}."
    return _flaw_of_config(name, entry.config, "architecture")


def _flaw_of_score(name: str, entry: Any) -> str:
    flaw = _flaw_of_config(name, entry, "kind")
    return flaw or ("" if callable(getattr(entry, "score", None)) else f"is {entry!r}, which has no method score.")


def _flaw_of_config(name: str, config: Any, tag: str) -> str:
    """Return why a class is no config whose field `tag` names it; "" if it is one."""
    named = {}
    if isinstance(config, type) and is_dataclass(config):
        named = {item.name: item.default for item in fields(config)}
    if tag not in named:
        return f"has the config {config!r}; it must be a dataclass with a field {tag}: Literal[{name!r}] = {name!r}."
    if named[tag] != name:
        return f"has the config {config!r}, whose field {tag} is {named[tag]!r}; both names must be the same."
    return ""


def _flaw_of_task(name: str, entry: Any) -> str:
    if not isinstance(entry, Task):
        return f"is {entry!r}; it must be a catalogue.Task."
    if entry.model_task not in MODEL_TASKS:
        return f"is for models of {entry.model_task!r}; they must be of {', '.join(MODEL_TASKS)}."
    return ""


def _flaw_of_function(name: str, entry: Any) -> str:
    return "" if callable(entry) else f"is {entry!r}; it must be a function or a class."


def _flaw_of_format(name: str, entry: Any) -> str:
    named = getattr(entry, "name", None)
    if not hasattr(entry, "architectures"):
        return f"is {entry!r}; it must be an extras.exports.Format."
    return "" if named == name else f"is named {named!r}; both names must be the same."


_FLAWS: dict[str, Callable[[str, Any], str]] = {
    "architecture": _flaw_of_architecture,
    "score": _flaw_of_score,
    "task": _flaw_of_task,
    "preset": _flaw_of_function,
    "logger": _flaw_of_function,
    "peer": _flaw_of_function,
    "format": _flaw_of_format,
    "protocol": _flaw_of_function,
}
"""Kind -> a function of the name and the entry of a plug-in, which returns why it is no such entry; "" if it is one."""


@dataclass(frozen=True)
class Command:
    """A command: what it does, and its module, or an object in it as `module:attribute`.

    That has `run(arguments) -> exit code`, and `PAGE` or `PAGES`, its options.
    """

    summary: str
    module: str


_CORE = "manyheads.cli.commands"

COMMANDS: dict[str, Command] = {
    "sample-data": Command(
        "write the text files that the examples in README use", "manyheads.extras.sample_model.sample_data"
    ),
    "sample-model": Command(
        "write the English-German translator of this package", "manyheads.extras.sample_model.command"
    ),
    "prepare": Command("convert text files to a folder of tokens for training", f"{_CORE}.task_commands:PREPARE"),
    "train": Command("train a model: a preset, a config file, or both", f"{_CORE}.train"),
    "evaluate": Command("score a model on held-out data, with the protocol", f"{_CORE}.task_commands:EVALUATE"),
    "translate": Command("translate lines or documents; a prompt in a terminal", f"{_CORE}.translate"),
    "generate": Command("continue a text with a language model", f"{_CORE}.generate"),
    "classify": Command("label lines with a classifier", "manyheads.extras.classification.options"),
    "score": Command("print log-probabilities of given translations or texts", f"{_CORE}.task_commands:SCORE"),
    "serve": Command("run an HTTP server for models, with a web page", "manyheads.extras.serving.command"),
    "inspect": Command("draw and print: attention, shapes, positions, schedules", "manyheads.extras.inspect.commands"),
    "shortlist": Command(
        "learn likely translations of words, for a faster search", "manyheads.extras.shortlists.command"
    ),
    "prune": Command("remove attention heads and write a smaller model", "manyheads.extras.inspect.commands.heads"),
    "average": Command("average the weights of a run's checkpoints into a model", f"{_CORE}.average"),
    "convert": Command("convert models of other implementations, and back", "manyheads.extras.peers.command"),
    "export": Command("write a model in the format of another runtime", "manyheads.extras.exports.command"),
    "push": Command("upload a model to the Hugging Face hub, with a card", "manyheads.extras.push.command"),
    "info": Command("show the contents of a model, a run or prepared data", f"{_CORE}.info"),
    "doctor": Command("check this machine: versions, devices, speed", f"{_CORE}.doctor"),
    "help": Command("show a command's help page, or its options about a word", f"{_CORE}.help"),
    "completion": Command("print tab completion for bash, zsh or fish", f"{_CORE}.completion"),
}


@dataclass(frozen=True)
class ModelTaskEntry:
    """A kind of model.

    run: the settings of a run that trains it. synthetic_run: its training steps without the data, a class that gets the
    config, see `training.run.objective.SyntheticRun`. task: the usual task of such a run. further: a preset whose
    batches and schedule are those for training such a model further. suffix: of the names of its architectures, where a
    name without it is another task's. example: Python code that uses a model of the current folder. use: what it does,
    and how to use it, for messages. pipeline: its kind on the Hugging Face hub. says, limits: sentences of its card
    there, with fields of its config as in `str.format`.
    """

    run: str
    synthetic_run: str
    task: str
    further: str
    suffix: str
    example: str
    use: str
    pipeline: str
    limits: str
    says: str = ""

    @property
    def config(self) -> type[Any]:
        """The class of `run`."""
        kind: type[Any] = load(self.run)
        return kind


MODEL_TASKS: dict[str, ModelTaskEntry] = {
    "translation": ModelTaskEntry(
        "manyheads.tasks.translation.settings:TrainConfig",
        "manyheads.tasks.translation.objective:SyntheticRun",
        "translation",
        "demo",
        "-seq2seq",
        """import manyheads
translator = manyheads.Translator.from_pretrained(".")
print(translator.translate(["..."]))""",
        "translates; use `manyheads translate`, or a Translator",
        "translation",
        "Each line is translated by itself, without the lines before it.",
    ),
    "language-modelling": ModelTaskEntry(
        "manyheads.tasks.language_modelling.settings:TextConfig",
        "manyheads.tasks.language_modelling.objective:SyntheticRun",
        "text",
        "xl-demo",
        "",
        """import manyheads
model = manyheads.load(".")
log_probs = model.log_probs(ids)  # of the token after each""",
        "is a language model; use `manyheads generate`, or a Generator",
        "text-generation",
        "It continues text by likelihood; what it writes may be wrong, offensive or copied from its data.",
    ),
    "classification": ModelTaskEntry(
        "manyheads.extras.classification.settings:ClassificationConfig",
        "manyheads.extras.classification.objective:SyntheticRun",
        "classification",
        "classifier-demo",
        "-classifier",
        """import manyheads
classifier = manyheads.Classifier.from_pretrained(".")
print(classifier(["..."]))""",
        "gives texts labels; use `manyheads classify`, or a Classifier",
        "text-classification",
        "It knows no other labels, and gives one of them to any text, also to one that fits none.",
        says="It gives a text one of the labels {labels}. ",
    ),
    "spans": ModelTaskEntry(
        "manyheads.extras.parsing.span_task.settings:SpanConfig",
        "manyheads.extras.parsing.span_task.objective:SyntheticRun",
        "spans",
        "chart-parser",
        "-spans",
        """import manyheads
parser = manyheads.Parser.from_pretrained(".")
print(parser.parse(["She sleeps ."]))""",
        "parses by a chart; use `manyheads translate`, or a Parser",
        "token-classification",  # the hub has no kind for trees
        "Sentences have at most {longest_input:,} words, with spaces between them. Any words get a tree, also words"
        " that are no sentence.",
        says="It gives a sentence its constituent tree. ",
    ),
}


class Architecture:
    """One kind of model.

    Args:
        task: which composite it is.
        config: its config class, which declares all other facts (`protocols.ModelConfig`).
        presets: name -> config.
        builder: a function that turns a config into a composite.
        further: as in `ModelTaskEntry`, where its own differs.

    Config, presets and builder are the objects or `module:attribute`.
    """

    def __init__(
        self,
        task: ModelTask,
        config: str | type[Any],
        presets: str | Mapping[str, Any],
        builder: str | Callable[[Any], Any],
        further: str = "",
    ) -> None:
        self.task: ModelTask = task
        self.further = further
        self._config, self._presets, self._builder = config, presets, builder

    @property
    def config(self) -> type[Any]:
        """The config class."""
        kind: type[Any] = load(self._config)
        return kind

    @property
    def presets(self) -> Mapping[str, Any]:
        """Name -> config."""
        presets: Mapping[str, Any] = load(self._presets)
        return presets

    def build(self, config: Any) -> Any:
        """Return a new composite with random weights (from torch's global generator)."""
        return load(self._builder)(config)


_MODELS = "manyheads.models"
_CLASSIFICATION, _PARSING = "manyheads.extras.classification", "manyheads.extras.parsing"

# A config file that names no architecture means the first one for its task.
ARCHITECTURES: Table[Architecture] = Table(
    "architecture",
    {
        "transformer": Architecture(
            "translation",
            f"{_MODELS}.transformer.config:TransformerConfig",
            f"{_MODELS}.transformer.config:PRESETS",
            f"{_MODELS}.transformer.model:build",
        ),
        "transformer-xl": Architecture(
            "language-modelling",
            f"{_MODELS}.transformer_xl.config:TransformerXLConfig",
            f"{_MODELS}.transformer_xl.config:PRESETS",
            f"{_MODELS}.transformer_xl.model:build",
        ),
        "reformer": Architecture(
            "language-modelling",
            f"{_MODELS}.reformer.config:ReformerConfig",
            f"{_MODELS}.reformer.config:PRESETS",
            f"{_MODELS}.reformer.model:build",
            further="reformer-demo",
        ),
        "decoder": Architecture(
            "language-modelling",
            f"{_MODELS}.decoder.config:DecoderConfig",
            f"{_MODELS}.decoder.config:PRESETS",
            f"{_MODELS}.decoder.model:build",
            further="lm-demo",
        ),
        "reformer-seq2seq": Architecture(
            "translation",
            f"{_MODELS}.reformer.config:ReformerSeq2SeqConfig",
            f"{_MODELS}.reformer.config:SEQ2SEQ_PRESETS",
            f"{_MODELS}.reformer.translator:build_seq2seq",
        ),
        "transformer-classifier": Architecture(
            "classification",
            f"{_CLASSIFICATION}.settings:TransformerClassifierConfig",
            f"{_CLASSIFICATION}.settings:TRANSFORMERS",
            f"{_CLASSIFICATION}.classifier:build_transformer",
        ),
        "reformer-classifier": Architecture(
            "classification",
            f"{_CLASSIFICATION}.settings:ReformerClassifierConfig",
            f"{_CLASSIFICATION}.settings:REFORMERS",
            f"{_CLASSIFICATION}.classifier:build_reformer",
        ),
        "transformer-spans": Architecture(
            "spans",
            f"{_PARSING}.span_task.settings:TransformerSpanParserConfig",
            f"{_PARSING}.span_task.settings:TRANSFORMERS",
            f"{_PARSING}.span_parser:build_span_parser",
        ),
    },
)


def refusal(name: str) -> ConfigError | None:
    """Return why no architecture or score of this name can be used; None: one can be, or nothing has this name."""
    return ARCHITECTURES.refused.get(name) or ATTENTIONS.refused.get(name)


def configs_of(task: ModelTask) -> Lazy[type[Any]]:
    """Return the architectures for a task, each with its config class."""

    def names() -> list[str]:
        return [name for name, entry in ARCHITECTURES.items() if entry.task == task]

    return Lazy(names, lambda name: ARCHITECTURES[name].config)


def first_config(task: ModelTask) -> Any:
    """Return the config of a run that names no architecture: of the first one for the task, with its defaults."""
    configs = configs_of(task)
    return configs[next(iter(configs))]()


RUNS: Lazy[type[Any]] = Lazy(lambda: ARCHITECTURES, lambda name: MODEL_TASKS[ARCHITECTURES[name].task].config)
"""model.architecture -> the settings of a run that trains it."""


def build_model(config: Any) -> Any:
    """Return a new composite (see `ModelTask`) with random weights (from torch's global generator).

    Raises: ConfigError: the architecture is unknown, or the config cannot be built.
    """
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(f"architecture {config.architecture!r} is unknown; there are {known}.")
    return ARCHITECTURES[config.architecture].build(config)


ATTENTIONS: Table[type] = Table(
    "score",
    {
        "dot_product": "manyheads.nn.attention.settings:DotProductAttentionConfig",
        "additive": "manyheads.nn.attention.settings:AdditiveAttentionConfig",
    },
)
"""How a head scores a query and a key: name -> dataclass of its settings (`nn.attention.settings.AttentionConfig`)."""


def foreign_entries(config: Any) -> list[str]:
    """The plug-ins without which a model's config cannot be read."""
    kind = getattr(getattr(config, "attention", None), "kind", "")
    origins = ARCHITECTURES.origin(config.architecture), ATTENTIONS.origin(kind)
    return sorted({origin for origin in origins if origin is not None})


@dataclass(frozen=True)
class Task:
    """A task: a run can learn it.

    summary: one line for people. folders: packages with the task's modules; a module that the first lacks is the next
    one's. model_task: of its models. prepared_as: the word of `prepare --task`; empty if another task's word covers it,
    or it needs no prepared data. recorded_as: its name in the manifest of prepared data, if it has its own data; data:
    the class of this data, as `module:class`. tokenizer: the class of its tokenizer, if folders of translators record
    this task: `of_record(tokenizer, record, where)` makes it of a translator's. validator: of a task of sentence pairs,
    see `tasks.translation.objective.Validator`. config: the settings of a run; None: those of `model_task`. inside: a
    module -> the one that has its functions, too.

    The modules:

    - `objective.py`: `open_objective(config, data_dir, progress)` opens the data of a run.
    - `options.py`: `PREPARE`, `EVALUATE` and `SCORE`, the options of these commands.
    - `prepare.py`: `preparation(options)` returns a function that takes `folder`, `replace` and `progress`, makes the
      folder and returns its manifest; `summary(folder, manifest)` returns the text to be printed then.
    - `evaluate.py`: `evaluate(options, progress)` returns a `tasks.report.Report`.
    - `score.py`: `score(options, progress)` returns a `tasks.report.LineWork`.
    """

    summary: str
    folders: tuple[str, ...]
    model_task: ModelTask
    prepared_as: str = ""
    recorded_as: str = ""
    data: str = ""
    tokenizer: str = ""
    run: str | type[Any] | None = field(default=None)
    validator: str = "manyheads.tasks.translation.objective:Validator"
    inside: Mapping[str, str] = field(default_factory=dict)

    @property
    def config(self) -> type[Any]:
        """The settings of a run."""
        if self.run is None:
            return MODEL_TASKS[self.model_task].config
        kind: type[Any] = load(self.run)
        return kind

    def module(self, name: str) -> ModuleType:
        """A module of the task, imported."""
        names = [f"{folder}.{self.inside.get(name, name)}" for folder in self.folders]
        return importlib.import_module(next((one for one in names if importlib.util.find_spec(one)), names[-1]))


_TEXT, _TRANSLATION = "manyheads.tasks.language_modelling", "manyheads.tasks.translation"
_RESEARCH, _SOURCES = "manyheads.extras.research", "manyheads.extras.sources"

TASKS: Table[Task] = Table(
    "task",
    {
        "translation": Task(
            "sentences of one language to another",
            (f"{_SOURCES}.translation_task", f"{_RESEARCH}.translation_task", _TRANSLATION),
            "translation",
            prepared_as="translation",
            recorded_as="translation",
            data="manyheads.data.translation.prepared:PreparedData",
        ),
        "parsing": Task(
            "sentences to constituent trees",
            (f"{_PARSING}.sequence_task", _TRANSLATION),
            "translation",
            prepared_as="parsing",
            recorded_as="parsing",
            data="manyheads.data.translation.prepared:PreparedData",
            tokenizer=f"{_PARSING}.tokenizer:ParsingTokenizer",
            validator=f"{_PARSING}.sequence_task.validator:Validator",
        ),
        "text": Task(
            "the next token of a text",
            (f"{_SOURCES}.text_task", f"{_RESEARCH}.text_task", _TEXT),
            "language-modelling",
            prepared_as="lm",
            recorded_as="language-modelling",
            data="manyheads.data.language.prepared:TextData",
        ),
        "ids": Task("the next id of images, sound or events", (f"{_RESEARCH}.text_task", _TEXT), "language-modelling"),
        "duplication": Task(
            "the second half of 0w0w (Kitaev et al. 2020, sec. 2.1)",
            (f"{_RESEARCH}.duplication_task", f"{_RESEARCH}.text_task", _TEXT),
            "language-modelling",
        ),
        "classification": Task(
            "texts to labels",
            (_CLASSIFICATION,),
            "classification",
            prepared_as="classification",
            recorded_as="classification",
            data=f"{_CLASSIFICATION}.prepare:LabelledData",
            inside={"score": "evaluate"},
        ),
        "spans": Task(
            "sentences to constituent trees, by a chart",
            (f"{_PARSING}.span_task",),
            "spans",
            prepared_as="spans",
            recorded_as="spans",
            data=f"{_PARSING}.span_data:SpanData",
            inside={"score": "evaluate"},
        ),
    },
)

PRESETS: Table[Callable[..., Any]] = Table(
    "preset",
    {
        "debug": f"{_TRANSLATION}.settings:debug",
        "copy": f"{_TRANSLATION}.settings:copy",
        "demo": f"{_TRANSLATION}.settings:demo",
        "sample": f"{_TRANSLATION}.settings:sample",
        "tiny": f"{_TRANSLATION}.settings:tiny",
        "base": f"{_TRANSLATION}.settings:base",
        "big": f"{_TRANSLATION}.settings:big",
        "xl-debug": f"{_TEXT}.settings:xl_debug",
        "xl-demo": f"{_TEXT}.settings:xl_demo",
        "lm-demo": f"{_TEXT}.settings:lm_demo",
        "reformer-debug": f"{_TEXT}.settings:reformer_debug",
        "reformer-demo": f"{_TEXT}.settings:reformer_demo",
        "duplication": f"{_RESEARCH}.presets:duplication",
        "classifier-debug": f"{_CLASSIFICATION}.settings:classifier_debug",
        "classifier-demo": f"{_CLASSIFICATION}.settings:classifier_demo",
        "reformer-classifier-demo": f"{_CLASSIFICATION}.settings:reformer_classifier_demo",
        "chart-debug": f"{_PARSING}.span_task.settings:chart_debug",
        "chart-parser": f"{_PARSING}.span_task.settings:chart_parser",
        "vanilla-lm": f"{_RESEARCH}.presets:vanilla_lm",
        "vanilla-lm-64": f"{_RESEARCH}.presets:vanilla_lm_64",
        "million": f"{_TEXT}.settings:million",
        "enwik8": f"{_TEXT}.settings:enwik8",
        "imagenet64": f"{_TEXT}.settings:imagenet64",
    },
)
"""Complete runs by name: a function -> the settings of the run."""

SIZED_BY_PRECISION = frozenset({"demo", "reformer-demo"})
"""Presets whose functions take the precision of the run: how much can be learned in some minutes depends on it."""

_RECORD, _LOGGERS = "manyheads.training.record", "manyheads.extras.loggers"

LOGGERS: Table[Callable[[], Any]] = Table(
    "logger",
    {
        "csv": f"{_RECORD}.log:CsvLogger",
        "tensorboard": f"{_RECORD}.log:TensorBoardLogger",
        "wandb": f"{_LOGGERS}.services:WandbLogger",
        "mlflow": f"{_LOGGERS}.services:MlflowLogger",
        "trackio": f"{_LOGGERS}.services:TrackioLogger",
    },
)
"""Loggers of a run by name: called without arguments, an entry returns a `training.record.log.Logger`."""

_PEERS = "manyheads.extras.peers"

PEERS: Table[type[Any]] = Table(
    "peer",
    {
        "annotated-transformer": f"{_PEERS}.annotated_transformer:AnnotatedTransformer",
        "d2l/AdditiveAttention": f"{_PEERS}.d2l:AdditivePeer",
        "d2l/DotProductAttention": f"{_PEERS}.d2l:DotProductPeer",
        "d2l/MultiHeadAttention": f"{_PEERS}.d2l:MultiHeadPeer",
        "d2l/TransformerEncoderBlock": f"{_PEERS}.d2l:BlockPeer",
        "d2l/attention": f"{_PEERS}.d2l:AllOfD2l",
        "d2l/masked_softmax": f"{_PEERS}.d2l:SoftmaxPeer",
        "fairseq/Transformer": f"{_PEERS}.toolkits:Fairseq",
        "fused-qkv/MultiheadAttention": f"{_PEERS}.fused_qkv:FusedQkv",
        "joeynmt/Transformer": f"{_PEERS}.toolkits:JoeyNMT",
        "karpathy/nanoGPT": f"{_PEERS}.gpt2:NanoGPT",
        "kimiyoung/TransformerXL": f"{_PEERS}.kimiyoung_transformer_xl:OfficialTransformerXL",
        "kimiyoung/sample_logits": f"{_PEERS}.kimiyoung_transformer_xl:SampleLogits",
        "labml/MultiHeadAttention": f"{_PEERS}.labml:MultiHeadPeer",
        "labml/RelativeMultiHeadAttention": f"{_PEERS}.labml:RelativePeer",
        "labml/attention": f"{_PEERS}.labml:AllOfLabml",
        "marian-nmt": f"{_PEERS}.marian_nmt:MarianNmt",
        "opennmt-py/Transformer": f"{_PEERS}.toolkits:OpenNMT",
        "reformer-pytorch/LSHAttention": f"{_PEERS}.reformer_pytorch:BareAttentionPeer",
        "reformer-pytorch/LSHSelfAttention": f"{_PEERS}.reformer_pytorch:SelfAttentionPeer",
        "tf/Transformer-XL": f"{_PEERS}.tf_transformer_xl:TensorFlowXL",
        "torch/MultiheadAttention": f"{_PEERS}.torch_modules:TorchAttention",
        "torch/Transformer": f"{_PEERS}.torch_modules:TorchTransformer",
        "transformers/GPT2": f"{_PEERS}.gpt2:GPT2",
        "transformers/Marian": f"{_PEERS}.marian:Marian",
        "transformers/Pegasus": f"{_PEERS}.marian:Pegasus",
        "transformers/Reformer": f"{_PEERS}.reformer:HFReformer",
        "transformers/TransfoXL": f"{_PEERS}.transfo_xl:TransfoXL",
    },
)
"""Other implementations: id -> subclass of `manyheads.extras.peers.peer.Peer`."""

PUBLIC: dict[str, str] = {
    "Callback": f"{_RECORD}.log:Callback",
    "Classifier": f"{_CLASSIFICATION}.classifier:Classifier",
    "Generator": "manyheads.decoding.generator:Generator",
    "Logger": f"{_RECORD}.log:Logger",
    "Parser": f"{_PARSING}.parser:Parser",
    "Translator": "manyheads.decoding.translator:Translator",
    "evaluate": "manyheads.api:evaluate",
    "inspect_model": "manyheads.extras.inspect.display:inspect_model",
    "load": f"{_MODELS}.pretrained:load",
    "prepare": "manyheads.api:prepare",
    "show_attention": "manyheads.extras.inspect.display:show_attention",
    "train": "manyheads.api:train",
}
"""The names of the package itself."""

HOOKS: dict[str, str] = {
    "bpe dropout": "manyheads.extras.bpe_dropout.segmenting:BpeDropout",
    "additive attention": "manyheads.extras.peers.one_head:AdditiveAttention",
    "attention of torch": "manyheads.extras.peers.torch_compatible:TorchMultiheadAttention",
    "check pictures": "manyheads.extras.inspect.options:check_kinds",
    "cleaning": "manyheads.extras.cleaning.cleaner:Cleaning",
    "cleaning in lines": "manyheads.extras.cleaning.cleaner:describe_cleaning",
    "constrained": "manyheads.extras.constrained.grammar:grammar_of",
    "ctranslate2": "manyheads.extras.exports.ctranslate2:open_for",
    "display": "manyheads.extras.inspect.display:bundle_of",
    "dot-product attention": "manyheads.extras.peers.one_head:DotProductAttention",
    "documents": "manyheads.extras.documents.files:DocumentOptions",
    "embeddings of a text": "manyheads.extras.cooccurrence.embeddings:neighbour_embeddings",
    "embeddings of pairs": "manyheads.extras.cooccurrence.embeddings:cooccurrence_embeddings",
    "forced phrases": "manyheads.extras.constrained.forced:translate_forced",
    "learning curve": "manyheads.extras.inspect.drawings.curves:CurvePainter",
    "hf": "manyheads.extras.hf:registered",
    "older ids": "manyheads.extras.vocabulary_extension.growth:old_ids_of",
    "pairs in parquet": "manyheads.extras.tables.pairs:parquet_pairs",
    "pairs in a table": "manyheads.extras.tables.pairs:table_pairs",
    "picture": "manyheads.extras.inspect.pictures:picture_of",
    "first step": "manyheads.extras.planning.first_step:first_step",
    "plan of a run": "manyheads.extras.planning.plan:plan_layer",
    "reranking": "manyheads.extras.reranking.reranker:reranker_of",
    "planner": "manyheads.extras.planning.planner:Planner",
    "schema": "manyheads.extras.constrained.grammar:read_schema",
    "tokenizer of Marian models": "manyheads.extras.peers.marian_tokenizer:MarianTokenizer",
    "segments": "manyheads.extras.sgm.segments:sgm_segments",
    "shortlist": "manyheads.extras.shortlists.shortlist:Shortlist",
    "tmx": "manyheads.extras.tmx.reader:tmx_pairs",
    "translate.parsing": f"{_PARSING}.translate:translate_by_text",
    "translate.spans": f"{_PARSING}.translate:translate_by_chart",
    "vocabulary extension": "manyheads.extras.vocabulary_extension.growth:Growth",
}
"""Functions and classes of extras that the core uses, by neutral names; `load(HOOKS[name])` returns one."""


def shown_as(kind: str) -> Callable[..., dict[str, str]]:
    """Return the method `_repr_mimebundle_` of a class: what notebooks show of its objects.

    Args: kind: as of `HOOKS["display"]`.
    """

    def _repr_mimebundle_(shown: Any, include: Any = None, exclude: Any = None) -> dict[str, str]:
        bundle: dict[str, str] = load(HOOKS["display"])(kind, shown)
        return bundle

    return _repr_mimebundle_
