"""Random command lines, drawn from the options' own tables, with values that are right, odd or hostile."""

import types
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Union, get_args, get_origin

from fuzz.mutations import ODD_FLOATS, ODD_NUMBERS, ODD_TEXTS
from manyheads.catalogue import COMMANDS, PRESETS
from manyheads.cli.command_line.parsing import _Option, _options
from manyheads.cli.main import module_of
from manyheads.config.options import describe
from manyheads.extras.inspect.commands import kind_of

__all__ = ["CommandLines", "is_training"]

LEFT_OUT = ("serve", "push", "doctor", "export")
"""A server that runs, uploads, measurements of time, and other runtimes, whose import alone takes seconds."""
INSPECT = ("attention", "shapes", "buckets", "positions", "schedule", "smoothing")
LONG_WORK = (
    "max-new-tokens",
    "beam",
    "nbest",
    "count",
    "return-sequences",
    "min-new",
    "max-rows",
    "memory-len",
    "steps",
)
"""Parts of names of options for which a large number is right, and means hours."""
TRAINING = (
    "--training.max-steps",
    "2",
    "--training.plots",
    "false",
    "--training.tensorboard",
    "false",
    "--device",
    "cpu",
)


def is_training(arguments: list[str]) -> bool:
    """Whether the command line may train, or compile a step; both are exempt from the limits of memory and time."""
    return arguments[:1] == ["train"] or "--compile" in arguments


def _argument(text: str) -> str:
    """As an argument of a process: the system has neither NUL nor half surrogates in them."""
    return text.replace("\0", "?").replace("\ud800", "\udcff")


@dataclass(frozen=True)
class CommandLines:
    """Draws command lines.

    Args: honest: the folder of honest files. samples: of single files.
    """

    honest: Path
    samples: Path

    def draw(self, random: Random) -> list[str]:
        """Return the arguments of one call."""
        command = random.choice([name for name in COMMANDS if name not in LEFT_OUT])
        if random.random() < 0.02:
            return [_argument(random.choice((*ODD_TEXTS, "trian", "--version", "--help", "-x")))[:60]]
        first = [command]
        if command == "inspect":
            first.append(random.choice(INSPECT))
            page = kind_of(first[1]).PAGE
        else:
            module = module_of(command)
            page = (
                random.choice(module.PAGES)
                if hasattr(module, "PAGES")
                else module.PAGE
                if hasattr(module, "PAGE")
                else None
            )
        if command == "train":
            return self._clean([*first, *self._train(random)], random)
        if page is None:
            return [*first, "--help"]
        return self._clean([*first, *self._of_page(page.options, random)], random)

    def _clean(self, arguments: list[str], random: Random) -> list[str]:
        if random.random() < 0.1:
            arguments.insert(
                random.randrange(1, len(arguments) + 1), random.choice(("--", "-", "--help", "extra", "--x=1", "-v"))
            )
        return [_argument(argument)[:4000] for argument in arguments]

    def _of_page(self, cls: type, random: Random) -> list[str]:
        options = list(_options(cls))
        needed = [one for one in options if one.is_positional or repr(one.default).startswith("<dataclasses._MISSING")]
        others = [one for one in options if one not in needed]
        chosen = [one for one in needed if random.random() < 0.95]
        chosen += random.sample(others, min(len(others), random.choice((0, 1, 1, 2, 3, 6))))
        return [word for one in chosen for word in self._words(one, random)]

    def _words(self, one: _Option, random: Random) -> list[str]:
        name = random.choice(one.names)
        if one.is_flag:
            return [name if random.random() < 0.9 else f"{name}=x"]
        count = random.choice((1, 1, 2, 0)) if one.takes_several else 1
        values = [self._value(one, random) for _ in range(count)]
        if one.is_positional:
            return values
        if random.random() < 0.2 and values:
            return [f"{name}={values[0]}"]
        return [name, *values] if random.random() < 0.98 else [name]

    def _value(self, one: _Option, random: Random) -> str:
        metavar = one.metavar.partition(" ")[0]
        if one.choices and random.random() < 0.85:
            return random.choice(one.choices)
        if metavar in ("FILE", "DIR", "MODEL", "INPUT", "RUN", "DATA", "PATH", "SOURCE"):
            return self._path("output" in one.path or metavar == "DIR", random)
        kinds = _kinds(one.annotation)
        is_long = any(part in name for name in one.names for part in LONG_WORK)
        if int in kinds and random.random() < 0.9:
            return str(random.choice((0, 1, 2, 3, 8, -1, 2**63, 10**30) if is_long else (*ODD_NUMBERS, 1, 2, 3, 8)))
        if float in kinds and random.random() < 0.9:
            return str(random.choice((*ODD_FLOATS, 0.0, 0.1, 0.5, 1.0, 2.0, -1.0)))
        return random.choice(ODD_TEXTS)

    def _path(self, is_output: bool, random: Random) -> str:
        if is_output and random.random() < 0.8:
            return random.choice(
                ("out", "out.png", "out.svg", "out/deep/er", ".", "a\x1b[31mb", "\udcff", "", "/", "x" * 300)
            )
        kinds = [
            *("run", "run/model", "data", "language", "marian", "config.yaml", "source.txt", "target.txt", "."),
            *("run/checkpoints", "run/checkpoints/latest", "run/metrics.jsonl", "run/model/tokenizer.json"),
        ]
        if random.random() < 0.7:
            return str(self.honest / random.choice(kinds))
        if random.random() < 0.7:
            return str(random.choice(sorted(self.samples.iterdir())))
        return random.choice(
            ("missing", "missing/deep", "", "/dev/null", "/dev/zero", "/dev/full", "..", "owner/name\x1b", "-")
        )

    def _train(self, random: Random) -> list[str]:
        preset = random.choice(("debug", "debug", "xl-debug", *PRESETS))
        settings = {one.path: one for one in describe(type(PRESETS[preset]()), PRESETS[preset]())}
        arguments = ["--preset", preset] if random.random() < 0.95 else []
        for path in random.sample(sorted(settings), random.choice((1, 1, 2, 4))):
            words = [word for word in settings[path].kind.split("|") if word.islower() and word.isidentifier()]
            value: Any = random.choice((*ODD_NUMBERS, *ODD_FLOATS, *ODD_TEXTS, *words, 2, 3))
            arguments += [f"--{path}", str(value)]
        if random.random() < 0.8 or preset not in ("debug", "xl-debug"):
            return [*arguments, "--print-config"]
        return [*arguments, *TRAINING, "--run-dir", "trained"]


def _kinds(annotation: Any) -> set[Any]:
    """The plain types in an annotation such as `int | None` or `tuple[int, ...]`."""
    if get_origin(annotation) in (Union, types.UnionType, tuple, list):
        return {kind for part in get_args(annotation) for kind in _kinds(part)}
    return {annotation}
