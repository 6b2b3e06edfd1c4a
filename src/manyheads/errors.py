"""Errors that a user can cause. Each message names the value, the limit and the remedy.

The command line prints such an error as one paragraph and exits with `exit_code`; any other error is a bug of ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence


class ManyHeadsError(Exception):
    """Base of all errors that a user's input can cause.

    Args:
        message: for every user: of a command, of Python, of a server.
        in_command: what a command adds, with the names of its options.
    """

    exit_code = 2

    def __init__(self, message: str = "", *, in_command: str = "") -> None:
        super().__init__(message)
        self.in_command = in_command

    def for_command(self) -> str:
        """Return the message with what a command adds."""
        return f"{self} {self.in_command}".rstrip()

    @property
    def _render_traceback_(self) -> Callable[[], list[str]]:
        """The one paragraph that IPython and notebooks print instead of a traceback.

        Raises: AttributeError: MANYHEADS_DEBUG is set, so that they print the traceback.
        """
        if wants_traceback():
            raise AttributeError("_render_traceback_")
        text = "\n".join([f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())])
        shown = "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
        return lambda: shown.split("\n")


class ConfigError(ManyHeadsError):
    """A setting or a command-line argument is unknown, out of range, or contradicts another.

    Args:
        message: for the user.
        fields: names of the settings, in their dataclass, that it is about.
        in_command: see `ManyHeadsError`.
    """

    def __init__(self, message: str = "", *, fields: Sequence[str] = (), in_command: str = "") -> None:
        super().__init__(message, in_command=in_command)
        self.fields = tuple(fields)


class ArgumentError(ConfigError, ValueError, TypeError, RuntimeError, AssertionError, ZeroDivisionError):
    """A module's size or rate is out of range. Of the types that torch raises for it, too."""


class DataError(ManyHeadsError):
    """A text or token file cannot be used: bad encoding, unequal line counts, no data left, wrong digest."""


class ShapeError(ManyHeadsError, ValueError, RuntimeError, IndexError):
    """A tensor has a wrong shape; the message names both shapes and their meaning. Of torch's types for it, too."""


class TensorTypeError(ShapeError, TypeError, AttributeError, NotImplementedError):
    """Something else was given where a tensor is needed, or numbers of another type. Of torch's types for it, too."""


class RequestError(ManyHeadsError, ValueError):
    """A request to a loaded model cannot be served: options that contradict each other, input that is too long."""


class CheckpointError(ManyHeadsError):
    """A checkpoint is incomplete, damaged, of another format version, or does not match the model."""


class ModelFileError(ManyHeadsError):
    """A model folder or weights file is missing, damaged, or of a kind that is refused (pickle)."""


class SaveError(ManyHeadsError):
    """Writing failed (disk full, no permission, I/O error); older files are unchanged."""


class NonFiniteError(ManyHeadsError):
    """Loss or gradient is NaN or infinite; raised before the update, with step, samples and module."""


class RankLostError(ManyHeadsError):
    """Another process of a distributed run was lost or has failed; the message names it. Older files are unchanged."""

    exit_code = 3


class MissingExtraError(ManyHeadsError):
    """An optional package is missing; the message gives the pip command.

    Attributes: why: the message without the command.
    """

    why: str = ""


def wants_traceback() -> bool:
    """Return whether the environment asks for the traceback of each error: MANYHEADS_DEBUG=1."""
    return os.environ.get("MANYHEADS_DEBUG", "0") not in ("", "0")


def refuse_nan(is_nan: bool, model: str = "The model") -> None:
    """Raises: NonFiniteError: a figure of a model is NaN. model: its name."""
    if is_nan:
        raise NonFiniteError(
            f"{model} gave NaN log-probabilities for this text; its weights are damaged or overflow in this precision."
            " Check the model, or use precision fp32."
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an allocation failed. On a CPU torch raises a RuntimeError, which only its text tells apart."""
    said = ("out of memory", "allocate memory", "bad_alloc")
    text = str(error)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(words in text for words in said))
