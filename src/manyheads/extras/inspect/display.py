"""Displays models, masks and attention in notebooks: as text, as a picture if matplotlib is installed, and as a page.

    manyheads.show_attention(translator, "I am hungry.")
    manyheads.inspect_model(translator)

A page is in a frame of its own (`srcdoc`), so that its styles and scripts cannot change the notebook.
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from manyheads.errors import ManyHeadsError, RequestError
from manyheads.extras.inspect.attending import text_views, translation_views
from manyheads.extras.inspect.blocks import Block, ModelBlocks, blocks_of, example_inputs
from manyheads.extras.inspect.drawings.architecture import architecture_figure
from manyheads.extras.inspect.drawings.attention import AttentionView, attention_view, layer_figure, thinned
from manyheads.extras.inspect.drawings.figure import save_by_name
from manyheads.extras.inspect.drawings.formulas import masks_figure
from manyheads.extras.inspect.drawings.pages import attention_page, save_page, still_page
from manyheads.extras.inspect.tracing import TracedTensor, folded, runs, table, trace
from manyheads.nn.attention.masks import Bias, Both, Dense, KeyPadding, Lengths, Mask, Window, dense_bias

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from manyheads.decoding.generator import Generator
    from manyheads.decoding.translator import Translator
    from manyheads.nn.attention.observing import Attentions

_DPI = 96
_MOST_DRAWN = 40
"""Rows and columns of a drawn matrix of attention; more are merged."""
_MOST_PANELS = 4
_MOST_CELLS = 48
"""Queries and keys that are shown of a mask."""
_USUAL_CELLS = 8
_NUMBERED_LAYER = re.compile(r"\.?layers\.(\d+)")


@dataclass(frozen=True)
class Display:
    """The forms in which one object is displayed.

    text: for terminals. draw: draws the picture; None: no picture. page: HTML of a whole page; empty: no page.
    height: of the page's frame, in pixels.
    """

    text: str
    draw: Callable[[], Figure] | None = None
    page: str = ""
    height: int = 420

    def bundle(self) -> dict[str, str]:
        """Return the forms by their MIME types. A form that cannot be made is left out, and the text says so."""
        forms = {"text/plain": self.text}
        if self.page:
            forms["text/html"] = (
                f'<iframe srcdoc="{html.escape(self.page)}" sandbox="allow-scripts allow-downloads"'
                f' width="100%" height="{self.height}" style="border: 0"></iframe>'
            )
        if self.draw is not None:
            try:
                content = io.BytesIO()
                self.draw().savefig(content, format="png", dpi=_DPI)
                forms["image/png"] = base64.b64encode(content.getvalue()).decode("ascii")
            except ManyHeadsError as error:
                forms["text/plain"] += f"\n(without a picture: {error})"
        return forms


def bundle_of(kind: str, shown: Any) -> dict[str, str]:
    """Return what a notebook shows of an object, by MIME types; of one that cannot be looked into only its text.

    Args: kind: `attentions`, `mask`, `model` or `observed`.
    """
    try:
        display = _KINDS[kind](shown)
    except ManyHeadsError as error:
        display = Display(f"{shown!r}\n(without a picture: {error})")
    return display.bundle()


def show_attention(model: Translator | Generator, text: str, target: str | None = None) -> ShownAttention:
    """Return the attention weights of a model for a text, as a notebook shows them.

    Args:
        model: a translator or a generator.
        text: what it reads.
        target: for a translator, the translation; None: its own.

    Raises: RequestError: the text is empty, it is no such model, or a target is given for a language model.
    """
    if getattr(model, "task", None) not in ("translation", "language-modelling"):
        raise RequestError(
            f"show_attention needs a Translator or a Generator, not a {type(model).__name__}; load one with"
            " from_pretrained."
        )
    if model.task == "language-modelling":
        if target is not None:
            raise RequestError("a language model reads one text; leave the target out.")
        return ShownAttention(tuple(text_views(model, text)), text, repr(model))
    return ShownAttention(tuple(translation_views(model, text, target)), text, repr(model))


@dataclass(frozen=True, repr=False)
class ShownAttention:
    """The attention of a model for a text. views: one a stack; text: what it read; model: its name."""

    views: tuple[AttentionView, ...]
    text: str
    model: str

    def __repr__(self) -> str:
        sizes = [
            f"  {view.name}: {len(view.layers)} layers of {len(view.layers[0])} heads,"
            f" {len(view.query_tokens)} x {len(view.key_tokens)} tokens"
            for view in self.views
        ]
        return "\n".join([f"attention for {self.text!r}", *sizes])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return _views_display(repr(self), self.views, self.text, self.model).bundle()

    def save(self, path: Path | str) -> Path:
        """Write a page (.html), or a picture of the last layer (.png, .svg, .pdf). Returns: the path.

        Raises: SaveError: it cannot be written. MissingExtraError: a picture needs matplotlib. RequestError: the name
            ends otherwise.
        """
        end = Path(path).suffix.lower()
        if end == ".html":
            return save_page(attention_page(self.views, title=self.text, note=self.model), path)
        if end not in (".png", ".svg", ".pdf"):
            raise RequestError(f"{path}: the name must end in .html, .png, .svg or .pdf.")
        return save_by_name(_last_layer(self.views), path)


def _last_layer(views: Sequence[AttentionView]) -> Figure:
    view = thinned(views[-1], _MOST_DRAWN)
    return layer_figure(view, len(view.layers))


def _views_display(text: str, views: Sequence[AttentionView], title: str, note: str = "") -> Display:
    return Display(text, lambda: _last_layer(views), attention_page(views, title=title, note=note), height=620)


def _attentions(shown: Attentions) -> Display:
    stacks = {name: layers for name, layers in shown._asdict().items() if layers}
    lines = [f"{name}: {len(layers)} layers, each {_shape(layers[0])}" for name, layers in stacks.items()]
    text = "\n".join(["Attentions, (batch, heads, queries, keys)", *(f"  {line}" for line in lines)])
    return _weights_display(text, stacks)


def _observed(shown: Mapping[str, list[Tensor]]) -> Display:
    lines = [f"  {name or '(the module itself)'}: {_calls(tensors)}" for name, tensors in shown.items()]
    text = "\n".join(["observed, a tensor for each call", *lines] if lines else ["observed: nothing yet"])
    stacks: dict[str, list[Tensor]] = {}
    for name, tensors in shown.items():
        stack = _NUMBERED_LAYER.sub("", name).strip(".") or "attention"
        alike = stacks.setdefault(stack, [])
        (alike if not alike or alike[0].shape == tensors[-1].shape else stacks.setdefault(name, [])).append(tensors[-1])
    if any(one.dim() != 4 or not one.is_floating_point() for layers in stacks.values() for one in layers):
        return Display(text)  # buckets
    return _weights_display(text, stacks)


def _calls(tensors: Sequence[Tensor]) -> str:
    shapes = ", ".join(dict.fromkeys(map(_shape, tensors)))
    return shapes if len(tensors) == 1 else f"{len(tensors)} calls, {shapes}"


def _weights_display(text: str, stacks: Mapping[str, Sequence[Tensor]]) -> Display:
    """Show the first sequence of a batch, the positions as numbers."""
    if not stacks:
        return Display(text)
    views = []
    for name, layers in stacks.items():
        q_len, k_len = layers[0].shape[-2:]
        is_self = "cross" not in name
        views.append(
            attention_view(
                name,
                [layer[0] for layer in layers],
                query_tokens=[str(place + (k_len - q_len) * is_self) for place in range(q_len)],
                key_tokens=[str(place) for place in range(k_len)],
                num_memory=max(k_len - q_len, 0) if is_self else 0,
                is_self=is_self and k_len >= q_len,
            )
        )
    batch = max(len(layers[0]) for layers in stacks.values())
    title = "positions are numbers" if batch == 1 else f"the first of {batch} sequences; positions are numbers"
    return _views_display(text, views, title)


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"


def _mask(shown: Mask) -> Display:
    """Show which keys each query may attend to, at the sizes that the mask itself has, or at eight positions."""
    q_len, k_len, first_query, is_part = _sizes(shown)
    allowed, bias = dense_bias(shown, q_len, k_len, _device_of(shown), first_query)
    assert allowed is not None
    allowed = allowed.expand(*allowed.shape[:2], q_len, k_len)
    rows, heads = allowed.shape[:2]
    panels = []
    for row in range(min(rows, _MOST_PANELS)):
        for head in range(min(heads, _MOST_PANELS if rows == 1 else 1)):
            parts = [f"sequence {row + 1} of {rows}"] * (rows > 1) + [f"head {head + 1} of {heads}"] * (heads > 1)
            panels.append((", ".join(parts), allowed[row, head, :_MOST_CELLS, :_MOST_CELLS].cpu()))
    notes = ["the mask also adds numbers to the scores"] if bias is not None else []
    q_shown, k_shown = panels[0][1].shape if panels else (0, 0)
    note = "; ".join([f"{'the first ' * is_part}{q_shown} queries and {k_shown} keys", *notes])
    lines = [repr(shown), note]
    for title, pattern in panels:
        lines += [title] * bool(title) + [
            "  " + " ".join("■" if one else "·" for one in row) for row in pattern.tolist()
        ]
    body = "".join(f"<figure><figcaption>{title}</figcaption>{_grid(pattern)}</figure>" for title, pattern in panels)
    heading = f"<p><b>{_mask_name(shown)}</b>: a query (row) may attend to the coloured keys"
    page = still_page(f'{heading}</p><p class="muted">{note}</p><div class="row">{body}</div>', title="mask")
    return Display(
        "\n".join(lines),
        lambda: masks_figure([(title, "", pattern, 0) for title, pattern in panels], title=_mask_name(shown)),
        page,
        height=120 + 18 * q_shown,
    )


def _mask_name(mask: Mask) -> str:
    if isinstance(mask, Both):
        return f"{_mask_name(mask.first)} and {_mask_name(mask.second)}"
    return type(mask).__name__


def _sizes(mask: Mask) -> tuple[int, int, int, bool]:
    """Return numbers of queries and keys, the position of the first query, and whether the mask has more of them."""
    queries, keys, least = _own_sizes(mask)
    k_len = keys or max(min(least, _MOST_CELLS), queries or _USUAL_CELLS)
    q_len = queries or min(k_len, _MOST_CELLS)
    first_query = max(k_len - q_len, 0) if queries else 0
    return q_len, k_len, first_query, max(queries, keys, least) > _MOST_CELLS


def _own_sizes(mask: Mask) -> tuple[int, int, int]:
    """Return the queries and keys that a mask has, 0 where it fits any number, and the keys that show what it does."""
    match mask:
        case Both():
            first, second = _own_sizes(mask.first), _own_sizes(mask.second)
            return max(first[0], second[0]), max(first[1], second[1]), max(first[2], second[2])
        case Lengths():
            longest = int(mask.lengths.max()) if mask.lengths.numel() else 0
            return (int(mask.lengths.shape[1]) if mask.lengths.dim() == 2 else 0), 0, longest
        case KeyPadding():
            return 0, int(mask.keep.shape[-1]), 0
        case Dense() | Bias():
            tensor = mask.pattern if isinstance(mask, Dense) else mask.values
            queries, keys = (int(size) if size > 1 else 0 for size in tensor.shape[-2:])
            return queries, keys, 0
        case Window():
            return 0, 0, (mask.left or 0) + (mask.right or 0) + 2
        case _:
            return 0, 0, 0


def _device_of(mask: Mask) -> torch.device:
    parts = [mask.first, mask.second] if isinstance(mask, Both) else [mask]
    tensors = [value for part in parts for value in vars(part).values() if isinstance(value, Tensor)]
    inner = [_device_of(part) for part in parts if isinstance(part, Both)]
    return tensors[0].device if tensors else inner[0] if inner else torch.device("cpu")


def _grid(pattern: Tensor) -> str:
    """Draw cells; those of a row that are side by side are one rectangle."""
    q_len, k_len = pattern.shape
    cells = []
    for row, allowed in enumerate(pattern.tolist()):
        begin = None
        for column, one in enumerate([*allowed, False]):
            if one and begin is None:
                begin = column
            elif not one and begin is not None:
                cells.append(f'<rect x="{begin}" y="{row}" width="{column - begin}" height="1"/>')
                begin = None
    size = f'viewBox="0 0 {k_len} {q_len}" width="{16 * k_len}" height="{16 * q_len}"'
    return f'<svg {size} role="img" aria-label="{q_len} queries, {k_len} keys">{"".join(cells)}</svg>'


def inspect_model(model: Any) -> ModelInspection:
    """Return what a model consists of: blocks, tensors with their equations, and numbers of parameters.

    Args: model: a `Translator` or another one of these, a composite as of `manyheads.load`, or any torch module, of
        which only the parameters are listed.

    The model is run once on a few tokens, and is left as it was.
    Raises: RequestError: the object is not a model, or it consists of several models.
    """
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(module, nn.Module):
        what = "an ensemble of several models" if hasattr(module, "models") else f"a {type(model).__name__}"
        raise RequestError(f"inspect_model needs one torch module or a Translator of one, not {what}.")
    name = type(module).__name__ if module is model else repr(model)
    sizes = _parameter_sizes(module)
    if not (hasattr(module, "log_probs") and hasattr(module, "config")):
        return ModelInspection(name, sizes, None, ())
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.random.fork_rng(devices=[]):
            return ModelInspection(name, sizes, blocks_of(module), tuple(folded(trace(module, example_inputs(module)))))
    finally:
        for part, training in modes.items():
            part.training = training


@dataclass(frozen=True, repr=False)
class ModelInspection:
    """The parts of a model.

    parameters: a part's name, kind and number of parameters. blocks: in their order; None for a module that is no
    whole model. tensors: of one forward pass; layers that repeat an earlier one are one line.
    """

    name: str
    parameters: tuple[tuple[str, str, int], ...]
    blocks: ModelBlocks | None
    tensors: tuple[TracedTensor, ...]

    def __repr__(self) -> str:
        width = max((len(name) for name, *_ in self.parameters), default=0)
        lines = [f"{name:<{width}}  {count:>13,}  {kind}" for name, kind, count in self.parameters]
        heading = [self.name] + ([self.blocks.title] if self.blocks is not None else [])
        return "\n".join([*heading, "", "parameters", *lines, *(["", *table([*self.tensors])] if self.tensors else [])])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        rows = [(name, f"{count:,}", kind) for name, kind, count in self.parameters]
        body = _table(("part", "parameters", "kind"), rows)
        if self.tensors:
            shapes = [(one.module, one.name, " x ".join(map(str, one.shape)), one.equation) for one in self.tensors]
            body += "<h2>Tensors</h2>" + _table(("module", "tensor", "shape", "equation"), shapes)
        return _model_display(self.name, self.blocks, repr(self), f"<h2>Parameters</h2>{body}").bundle()


def _parameter_sizes(module: nn.Module) -> tuple[tuple[str, str, int], ...]:
    """Return the parts of a module down to its layers, and their sizes; a shared matrix is counted in each part."""
    found = []
    for name, part in module.named_modules():
        depth = len([piece for piece in name.split(".") if piece and not piece.isdigit()])
        count = sum(tensor.numel() for tensor in part.parameters())
        if count and (not name or depth <= _DEPTH):
            found.append((name or "all", type(part).__name__, count))
    return tuple(found)


_DEPTH = 3
"""Names in the path of a part that is listed, as in `body.encoder.layers.0`."""


def _model(shown: Translator | Generator) -> Display:
    """Show the blocks of a reader's model."""
    module = shown.model
    if not isinstance(module, nn.Module):
        return Display(repr(shown))
    return _model_display(repr(shown), blocks_of(module), repr(shown), "")


def _model_display(name: str, blocks: ModelBlocks | None, text: str, more: str) -> Display:
    """Show the blocks, if there are any, and HTML below them."""
    shown = f"<p><b>{html.escape(name)}</b></p>"
    if blocks is None:
        return Display(text, None, still_page(shown + more, title=name))
    shown += (
        f'<p class="muted">{html.escape(blocks.title)}; from bottom to top</p><div class="row">{_stacks(blocks)}</div>'
    )
    page = still_page(shown + more, title=name)
    return Display(text, lambda: architecture_figure(blocks, name), page, height=620)


def _stacks(blocks: ModelBlocks) -> str:
    columns = []
    for stack in blocks.stacks:
        is_last = stack is blocks.stacks[-1]
        parts = [f'<p class="muted">{html.escape(stack.reads)}</p>', *map(_block, (*stack.sides, *stack.before))]
        for kind in stack.kinds:
            count = len(kind.layers)
            label = f"layer {kind.layers[0]}" if count == 1 else f"{count} layers: {runs(kind.layers)}"
            inner = "".join(map(_block, reversed(kind.blocks)))
            parts.append(f'<div class="layers"><span>{label}</span>{inner}</div>')
        parts += map(_block, (*stack.after, *(blocks.output if is_last else ())))
        parts += [f'<p class="muted">{html.escape(blocks.result)}</p>'] if is_last else []
        columns.append(f'<div class="stack"><h2>{html.escape(stack.name)}</h2>{"".join(reversed(parts))}</div>')
    return "".join(columns)


def _block(block: Block) -> str:
    lines = "<br>".join(map(html.escape, (*block.lines, block.shape)))
    return f'<div class="block"><b>{html.escape(block.name)}</b>{lines}</div>'


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


_KINDS: Mapping[str, Callable[[Any], Display]] = {
    "attentions": _attentions,
    "mask": _mask,
    "model": _model,
    "observed": _observed,
}
