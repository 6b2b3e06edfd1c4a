"""The pictures that are asked for by name, through `catalogue.HOOKS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyheads.extras.inspect.attending import translation_views
from manyheads.extras.inspect.drawings.attention import attention_figure
from manyheads.extras.inspect.drawings.curves import compared_curves_figure, confusion_figure, memory_figure
from manyheads.extras.inspect.drawings.figure import picture_paths, save_figure
from manyheads.extras.inspect.drawings.pages import attention_page, save_page

if TYPE_CHECKING:
    from manyheads.decoding.translator import Translator


@dataclass(frozen=True)
class Picture:
    """A figure or an HTML page, and the files that it is for."""

    content: Any
    paths: tuple[Path, ...]

    def save(self) -> tuple[Path, ...]:
        """Write the files. Returns: their paths. Raises: SaveError: one cannot be written."""
        if isinstance(self.content, str):
            return (save_page(self.content, self.paths[0]),)
        return save_figure(self.content, self.paths[0], [path.suffix[1:].lower() for path in self.paths])


def picture_of(kind: str, path: Path | str, *data: Any, kinds: Sequence[str] = (), **options: Any) -> Picture:
    """Return a picture of these data.

    Args:
        kind: `attention`, `attention page`, `confusion`, `curves of runs` or `loss by memory`.
        path: of the file; its suffix selects the format, unless `kinds` are given, which replace it.
        data, options: those of the kind's function.

    Raises: MissingExtraError: no matplotlib. Others as the kind's function.
    """
    content = _KINDS[kind](*data, **options)
    if isinstance(content, str):
        return Picture(content, (Path(path),))
    return Picture(content, picture_paths(path, kinds or [Path(path).suffix[1:].lower()]))


def _attention(translator: Translator, source: str, translation: str) -> Any:
    """The last decoder layer's attention to the source: the mean of its heads, and each of them."""
    [cross] = [view for view in translation_views(translator, source, translation) if view.name == "cross"]
    return attention_figure(
        cross.layers[-1],
        query_tokens=cross.query_tokens,
        key_tokens=cross.key_tokens,
        title="Attention to the source at each generated word",
        query_name="next generated word",
        key_name="source",
    )


def _attention_page(translator: Translator, source: str) -> str:
    return attention_page(translation_views(translator, source), title=source)


_KINDS: Mapping[str, Callable[..., Any]] = {
    "attention": _attention,
    "attention page": _attention_page,
    "confusion": confusion_figure,
    "curves of runs": compared_curves_figure,
    "loss by memory": memory_figure,
}
