"""A model whose heads are judged, the text for it, figures and pictures of every head, and the order of pruning."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from manyheads.catalogue import ARCHITECTURES
from manyheads.config.build import build
from manyheads.config.options import given_options
from manyheads.data.language.segments import eval_segments
from manyheads.data.lines import Progress, phase_progress
from manyheads.data.translation.readers import PairFiles, ReadReport
from manyheads.decoding.generator import Generator
from manyheads.decoding.translator import Translator
from manyheads.errors import DataError, RequestError, ShapeError
from manyheads.evaluation.reading import Reading
from manyheads.extras.inspect.drawings.figure import (
    COLOURS,
    INK,
    MUTED,
    add_colour_bar,
    new_figure,
    plain_text,
    style_axes,
)
from manyheads.extras.inspect.heads.names import Head, all_heads, prunable
from manyheads.extras.inspect.heads.scores import (
    HeadLook,
    head_ablations,
    head_importance,
    head_looks,
    normalised_importance,
)
from manyheads.models.composites import LanguageModel, Seq2Seq
from manyheads.models.hub import resolve_model_path
from manyheads.models.pretrained import read_config
from manyheads.tasks.held_out import copy_settings, own_data, pairs_of_split, run_section, task_of_folder
from manyheads.tasks.language_modelling.evaluate import held_text
from manyheads.tasks.translation.score import reference_batches

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from manyheads.data.batch import PairBatch, SegmentBatch
    from manyheads.extras.inspect.options import HeadTextOptions, Order


_TASKS = ("translation", "text", "ids")
_OF_TRANSLATORS = ("--pairs", "--judge-pairs", "--num-beams", "--tokenize")
Split = Literal["test", "valid"]


@dataclass(frozen=True)
class HeldPairs:
    """Sentence pairs and their batches. name: a description for users."""

    name: str
    pairs: list[tuple[str, str]]
    batches: list[PairBatch]


@dataclass(frozen=True)
class HeldSegments:
    """The segments of a text in order. name: a description for users."""

    name: str
    batches: list[SegmentBatch]


@dataclass(frozen=True)
class NamedModel:
    """A model whose heads are judged. name: as the user wrote it."""

    name: str
    reader: Translator | Generator

    @property
    def model(self) -> Seq2Seq | LanguageModel:
        """The composite."""
        return cast(Seq2Seq | LanguageModel, self.reader.model)

    @property
    def device(self) -> Any:
        """Where it runs."""
        return self.reader.device

    def check_options(self, *options: Any) -> None:
        """Raises: RequestError: an option is for the other kind of model, so it would not be used."""
        translates = self.reader.task == "translation"
        other = ("--max-tokens", "--judge-tokens") if translates else _OF_TRANSLATORS
        if unused := [name for name in given_options(*options) if name in other]:
            kind, others = ("translator", "language models") if translates else ("language model", "translators")
            raise RequestError(f"{', '.join(unused)}: this is for {others}, but {self.name} is a {kind}; leave it out.")

    def text(self, options: HeadTextOptions, split: Split = "valid") -> HeldPairs | HeldSegments:
        """Return the first part of the text that the options name. split: of data, if they name none.

        Raises: DataError, ConfigError: there is no such text. RequestError: an option of the other kind of model.
        """
        if self.reader.task == "translation":
            if options.text is not None:
                raise RequestError(f"{self.name} translates; give --source and --reference instead of --text.")
            return self._pairs(self.reader, options, split)
        if options.source is not None:
            raise RequestError(f"{self.name} is a language model; give --text instead of --source and --reference.")
        return self._segments(self.reader, options, split)

    def _pairs(self, translator: Translator, options: HeadTextOptions, split: Split) -> HeldPairs:
        if options.source is not None and options.reference is not None:
            found = list(PairFiles(source=options.source, target=options.reference).read(ReadReport()))
            name = options.source
        else:
            data, seed = (options.data, 1) if options.data is not None else own_data(self.name)
            read = lambda which: pairs_of_split(data, which, seed, copy_settings(self.name))  # noqa: E731
            found, chosen = _either(read, options.split, split)
            name = f"{data} {chosen}"
        if not found:
            raise DataError(f"{name} has no sentence pairs, so heads cannot be judged; give another text.")
        pairs = found[: options.pairs]
        batches = list(reference_batches(translator, pairs, translator.options(too_long="truncate")))
        return HeldPairs(f"{len(pairs):,} pairs of {name}", pairs, batches)

    def _segments(self, generator: Generator, options: HeadTextOptions, split: Split) -> HeldSegments:
        read = lambda which: held_text(  # noqa: E731
            generator, self.name, text=options.text, data=options.data, split=which
        )
        held = _either(read, options.split, None if options.text is not None else split)
        reading = build(Reading, run_section(self.name, "reading"), "the run's reading", "reading")
        store, vocabulary = held.store.first(options.max_tokens), generator.vocabulary
        # The model keeps the end of a segment out of its memory if it was trained to read it again.
        ext_len = getattr(generator.model.config, "ext_len", 0) if reading.documents == "joined" else 0
        segments = eval_segments(
            store,
            lanes=reading.lanes,
            segment_len=reading.segment_len,
            documents=reading.documents,
            ext_len=ext_len,
            end_id=vocabulary.end_id,
            begin_id=vocabulary.begin_id,
        )
        return HeldSegments(f"{len(store):,} tokens of {held.name}", list(segments))


def _either(read: Callable[[Split | None], Any], asked: Split | None, preferred: Split | None) -> Any:
    """Read the requested part; otherwise the preferred one, or any other that exists."""
    if asked is not None or preferred is None:
        return read(asked)
    try:
        return read(preferred)
    except DataError:
        return read(None)


def open_named_model(name: str, load: Callable[..., Any]) -> NamedModel:
    """Load a model whose heads can be judged.

    Args: load: as of `DeviceOptions.load`.

    Raises: RequestError: heads of this architecture cannot be masked, or its task is another. As
        `Translator.from_pretrained`.
    """
    config = read_config(resolve_model_path(name))
    prunable(config, name)
    task = task_of_folder(name)
    if task is not None and task not in _TASKS:
        raise RequestError(
            f"{name} was trained for the task {task}; heads are judged on translations or on a text. `manyheads prune"
            " --heads` removes heads that you name from every model."
        )
    translates = ARCHITECTURES[config.architecture].task == "translation"
    reader = load((Translator if translates else Generator).from_pretrained, name)
    return NamedModel(name, reader)


@dataclass(frozen=True)
class HeadReport:
    """Figures of every head.

    text: on which they were measured. nats: per token, of the whole model. importance, normalised: see
    `extras.inspect.heads.scores`. ablations: nats per token more without the head.
    """

    text: str
    nats: float
    importance: dict[Head, float]
    normalised: dict[Head, float]
    ablations: dict[Head, float]
    looks: dict[Head, HeadLook]

    def rows(self) -> list[dict[str, Any]]:
        """Return one record per head, for JSON, tables and pictures."""
        return [
            {
                "head": str(head),
                "importance": self.importance[head],
                "normalised": self.normalised[head],
                "ablation": self.ablations[head],
                "entropy": look.entropy,
                "confidence": look.confidence,
                "offset": look.offset,
                "offset_share": look.offset_share,
            }
            for head, look in self.looks.items()
        ]

    def table(self) -> str:
        """Return a table of the heads, the most important first."""
        lines = [
            f"{self.text}: {self.nats:.4f} nats a token with all heads",
            "head               importance  normalised  ablation  entropy  confidence  position",
        ]
        for row in sorted(self.rows(), key=lambda one: -one["normalised"]):
            position = ""
            if row["offset"] is not None:
                position = f"{row['offset']:+d} in {100 * row['offset_share']:.0f}%".replace("+0 ", "0 ")
            lines.append(
                f"{row['head']:<17}  {row['importance']:>10.4f}  {row['normalised']:>10.3f}  {row['ablation']:>+8.4f}"
                f"  {row['entropy']:>7.2f}  {row['confidence']:>10.2f}  {position}".rstrip()
            )
        return "\n".join(lines)


def head_report(named_model: NamedModel, held: HeldPairs | HeldSegments, progress: Progress) -> HeadReport:
    """Judge every head on a text."""
    model, batches, device = named_model.model, held.batches, named_model.device
    progress("importance", 0, 0)
    importance = head_importance(model, batches, device=device)
    progress("weights", 0, 0)
    looks = head_looks(model, batches, device=device)
    on_progress = phase_progress(progress, "ablation", len(looks))
    nats, ablations = head_ablations(model, batches, device=device, on_progress=on_progress)
    return HeadReport(held.name, nats, importance, normalised_importance(importance), ablations, looks)


def pruning_order(
    named_model: NamedModel, held: HeldPairs | HeldSegments | None, by: Order, progress: Progress, *, seed: int = 1
) -> list[Head]:
    """Return the heads in the order in which they are pruned; of equal heads the earlier one comes first.

    They are measured once, on the whole model. The last head of each layer is left out, because a layer keeps one.

    Args:
        held: the text on which heads are judged; the random order reads none, so it may be None.
        seed: of the random order.
    """
    model, device = named_model.model, named_model.device
    heads = all_heads(model.config)
    if by == "random":
        order = [heads[place] for place in np.random.default_rng(seed).permutation(len(heads))]
    else:
        assert held is not None
        batches = held.batches
        progress(by, 0, 0)
        if by == "importance":
            worth = normalised_importance(head_importance(model, batches, device=device))
        elif by == "ablation":
            worth = head_ablations(model, batches, device=device, on_progress=phase_progress(progress, by, len(heads)))[
                1
            ]
        else:
            worth = {head: look.confidence for head, look in head_looks(model, batches, device=device).items()}
        order = sorted(heads, key=lambda head: worth[head])
    last = {head.layer_name: head for head in order}
    return [head for head in order if last[head.layer_name] != head]


def num_removed(share: float, heads: Sequence[Head]) -> int:
    """Return the number of heads that a share of these is, rounded, but at most all but one of each layer."""
    return min(round(share * len(heads)), len(heads) - len({head.layer_name for head in heads}))


_PANELS = (
    ("normalised", "Importance, by gradient", "{:.2f}"),
    ("ablation", "Nats a token more without it", "{:+.3f}"),
    ("entropy", "Entropy of the weights, bits", "{:.1f}"),
    ("offset_share", "Share of the usual distance", "{:.2f}"),
)
_MOST_NUMBERED = 12
"""Heads of a layer whose cells still hold a number that can be read."""


def heads_figure(rows: Sequence[Mapping[str, Any]], *, title: str = "Heads") -> Figure:
    """Draw four maps: layers of all stacks below each other, heads beside each other, counted from 0.

    Args: rows: one record per head: `head` (its name, such as `encoder.0.self:1`) and normalised, ablation, entropy,
        offset and offset_share, which may be None.

    Raises: MissingExtraError: no matplotlib.
    """
    layers = list(dict.fromkeys(row["head"].rpartition(":")[0] for row in rows))
    most = 1 + max(int(row["head"].rpartition(":")[2]) for row in rows)
    figure = new_figure(max(2.2 + 0.75 * most, 4.2) * 2, 1.2 + 2 * (0.9 + 0.3 * len(layers)), title)
    panels = figure.subplots(2, 2)
    for axes, (key, name, shown) in zip(panels.flat, _PANELS, strict=True):
        values = np.full((len(layers), most), np.nan)
        labels: dict[tuple[int, int], str] = {}
        for row in rows:
            layer, _, number = row["head"].rpartition(":")
            place = layers.index(layer), int(number)
            if row[key] is not None:
                values[place] = row[key]
                far = f" at {row['offset']:+d}".replace("+0", "0") if key == "offset_share" else ""
                labels[place] = shown.format(row[key]) + far
        _map(figure, axes, values, labels if most <= _MOST_NUMBERED else {})
        style_axes(axes, title=name, x_label="head", grid=False)
        axes.set_xticks(range(most), [str(number) for number in range(most)])
        axes.set_yticks(range(len(layers)), layers)
        for side in axes.spines.values():
            side.set_visible(False)
    return figure


def _map(figure: Figure, axes: Axes, values: Any, labels: Mapping[tuple[int, int], str]) -> None:
    top = max(float(np.nanmax(values)), 1e-9) if not np.isnan(values).all() else 1.0
    low = min(0.0, float(np.nanmin(values))) if not np.isnan(values).all() else 0.0
    image = axes.imshow(values, cmap="Blues", vmin=low, vmax=top, aspect="auto", interpolation="nearest")
    for (row, column), label in labels.items():
        dark = values[row, column] - low > 0.6 * (top - low)
        axes.text(column, row, label, ha="center", va="center", fontsize=7.5, color="white" if dark else INK)
    add_colour_bar(figure, image, axes, pad=0.02)


def pruning_figure(points: Sequence[Mapping[str, Any]], *, note: str = "") -> Figure:
    """Draw the score by the share of pruned heads, one curve for each order of pruning.

    Args:
        points: `by`, `share` of heads that are pruned, and `bleu` or `perplexity`; an infinite one is left out.
        note: below the title.

    Raises: ShapeError: there is no point. MissingExtraError: no matplotlib.
    """
    if not points:
        raise ShapeError("there is no point to draw.")
    measure, name = ("bleu", "BLEU") if "bleu" in points[0] else ("perplexity", "Perplexity")
    figure = new_figure(7.5, 4.6, f"{name} by the share of pruned heads")
    axes = figure.subplots()
    orders = list(dict.fromkeys(point["by"] for point in points))
    for number, by in enumerate(orders):
        own = sorted((point for point in points if point["by"] == by), key=lambda point: float(point["share"]))
        shown = [(100 * point["share"], point[measure]) for point in own if math.isfinite(point[measure])]
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(
            [share for share, _ in shown],
            [score for _, score in shown],
            color=colour,
            marker="o",
            markersize=4.5,
            linewidth=2.0,
            label="at random" if by == "random" else f"by {by}",
        )
        if len(orders) > 1:
            continue
        for share, score in shown:
            axes.annotate(
                f"{score:.1f}",
                (share, score),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=MUTED,
            )
    style_axes(axes, x_label="heads pruned, in percent", y_label=name)
    plain_text([axes.set_title(note, loc="left", fontsize=9, color=MUTED)])
    axes.legend(frameon=False, fontsize=8.5, loc="best")
    finite = [point[measure] for point in points if math.isfinite(point[measure])] or [0.0]
    highest = max(finite)
    if measure == "bleu":
        axes.set_ylim(bottom=0, top=1.12 * max(1.0, highest))
    elif highest > 10 * min(finite):
        axes.set_yscale("log")
    return figure
