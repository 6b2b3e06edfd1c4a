"""The engines of a `Translator`: this package's own search, or another runtime on an export of the model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol, cast

from manyheads.decoding.hypothesis import Hypothesis
from manyheads.decoding.settings import DecodingSettings

__all__ = ["EngineName", "SearchEngine", "open_engine"]

EngineName = Literal["torch", "ctranslate2", "auto"]

# An engine lies above this package, as it needs an export; it is imported only when it is asked for.
_CTRANSLATE2 = "manyheads.interop.exports.ctranslate2_engine"

Search = Callable[[Sequence[list[int]], DecodingSettings], list[list[Hypothesis]]]


class SearchEngine(Protocol):
    """Another runtime.

    choice: a sentence that says which engine was taken and why; "" before the first call of `takes`.
    """

    choice: str

    def takes(self, settings: DecodingSettings, own_search: Search) -> bool:
        """Return whether this engine does searches with these settings; otherwise `own_search` does.

        Raises: RequestError: this engine was asked for by name, and it has no such option.
        """
        ...

    def search(
        self,
        sources: Sequence[list[int]],
        settings: DecodingSettings,
        *,
        stop: Callable[[], bool] | None = None,
        told: Callable[[int], None] | None = None,
    ) -> list[list[Hypothesis]]:
        """Do what `search.search_all` does; the hypotheses have no token_log_probs."""
        ...


def open_engine(name: EngineName, folder: Path, *, runs_plainly: str) -> SearchEngine | None:
    """Return an engine for a model folder; None for `torch`.

    Args: runs_plainly: "" if the translator computes in float32 on the CPU, uncompiled; otherwise what it does instead.

    Raises: RequestError: no engine of this name; or the model is to run in a way that ctranslate2 does not have.
        ConfigError: CTranslate2 cannot hold the model. MissingExtraError: it is not installed.
    """
    if name == "torch":
        return None
    module = importlib.import_module(_CTRANSLATE2)
    return cast("SearchEngine", module.open_for(name, folder, runs_plainly))
