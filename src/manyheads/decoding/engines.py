"""The engines of a `Translator`: this package's own search, or another runtime on an export of the model.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from manyheads.catalogue import HOOKS, load
from manyheads.errors import RequestError

if TYPE_CHECKING:
    from pathlib import Path

    from manyheads.decoding.settings import DecodingSettings
    from manyheads.decoding.text_ids import Hypothesis

    Search: TypeAlias = Callable[[Sequence[list[int]], DecodingSettings], list[list[Hypothesis]]]

EngineName = Literal["torch", "ctranslate2", "auto"]


class SearchEngine(Protocol):
    """Another runtime.

    choice: a sentence that says which engine was taken and why; "" before the first call of `takes`.
    longest_source: tokens of the longest source that it takes, EOS included.
    is_int8: it computes in 8 bits.
    """

    choice: str
    longest_source: int
    is_int8: bool

    def takes(self, settings: DecodingSettings, own_search: Search) -> bool:
        """Return whether this engine does searches with these settings; otherwise `own_search` does.

        Raises: RequestError: this engine was asked for by name, and it has no such option.
        """

    def search(
        self,
        sources: Sequence[list[int]],
        settings: DecodingSettings,
        *,
        stop: Callable[[], bool] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[list[Hypothesis]]:
        """Do what `search.search_all` does; the hypotheses have no token_log_probs."""


_OTHERS = ("ctranslate2", "auto")


def engine_named(name: EngineName | None, precision: str) -> EngineName:
    """Return the engine that searches; if none is named, ctranslate2 for precision int8, otherwise torch.

    Raises: RequestError: another engine than ctranslate2 is named for int8.
    """
    if precision == "int8" and name not in (None, "ctranslate2"):
        raise RequestError(
            f"precision is int8, in which only the engine ctranslate2 computes, but the engine is {name}; name"
            " ctranslate2 or none, or use precision fp32 or bf16."
        )
    return name or ("ctranslate2" if precision == "int8" else "torch")


def open_engine(name: EngineName, folder: Path, *, runs_plainly: str, is_int8: bool = False) -> SearchEngine | None:
    """Return an engine for a model folder; None for `torch`.

    Args:
        runs_plainly: "" if the translator computes in float32 on the CPU, uncompiled; otherwise a description of how
            it runs.
        is_int8: the engine computes in 8 bits.

    Raises: RequestError: there is no engine of this name; or ctranslate2 cannot run the model in this way.
        ConfigError: CTranslate2 cannot hold the model. MissingExtraError: it is not installed.
    """
    if name == "torch":
        return None
    if name not in _OTHERS:
        raise RequestError(f"engine is {name!r}; it must be one of {', '.join(('torch', *_OTHERS))}.")
    engine: SearchEngine = load(HOOKS["ctranslate2"])(name, folder, runs_plainly, is_int8)
    return engine
