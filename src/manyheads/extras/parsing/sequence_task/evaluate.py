"""Evaluation of a parser or a baseline: bracket scores by evalb's rules, likelihood of the trees, the protocol."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from manyheads.data.lines import Progress, ReadReport, describe, phase_progress, read_lines
from manyheads.data.translation.prepared import PreparedData
from manyheads.decoding.inputs_and_results import counted_truncations
from manyheads.distributed.process import refuse_ranks
from manyheads.errors import ConfigError, DataError
from manyheads.extras.parsing.brackets import SIGNATURE, BracketScore, ParseReport, judge_trees, judge_written
from manyheads.extras.parsing.parser import Parser
from manyheads.extras.parsing.tokenizer import ParsingTask, read_sentences, read_tree_file, task_of
from manyheads.extras.parsing.trees import (
    OUTER_LABELS,
    SLOT,
    Leaf,
    Node,
    category,
    escape,
    format_tree,
    leaves_of,
    normal_form,
    parse_tree,
    repairs_line,
)
from manyheads.tasks.held_out import chosen_split, own_data
from manyheads.tasks.report import NoPictures, machine_lines, model_line, search_line, search_record
from manyheads.tasks.translation.score import likelihood_lines, likelihood_of, likelihood_record
from manyheads.text.words import words_of

if TYPE_CHECKING:
    from manyheads.evaluation.likelihood import Likelihood
    from manyheads.extras.parsing.sequence_task.options import EvaluateOptions

BaselineKind = Literal["flat", "right"]
DEEPEST = 150  # constituents inside one another


class Baseline:
    """Majority labels on trees of a fixed shape.

    `flat`: one constituent over the sentence, with the most frequent label there (counted separately for sentences that
    end in a sign, such as a full stop). `right`: below it, a constituent from each word to the end (without a sign
    there), with the most frequent label of a constituent of that length at the end of a sentence.

    Args:
        kind: the shape.
        trees: training trees whose labels are counted.

    Raises: DataError: there are none.
    """

    def __init__(self, kind: BaselineKind, trees: Iterable[Node]) -> None:
        self._kind = kind
        whole: dict[bool, Counter[str]] = {}
        by_length: dict[int, Counter[str]] = {}
        for tree in trees:
            signed = _is_sign(leaves_of(tree)[-1].word)
            whole.setdefault(signed, Counter())[_top(tree)] += 1
            for label, length in _last_constituents(tree):
                by_length.setdefault(length, Counter())[label] += 1
        if not whole:
            raise DataError("The training data has no trees, from which a baseline is made; give some.")
        usual = _most(sum(whole.values(), Counter()))
        self._whole = {signed: _most(whole[signed]) if signed in whole else usual for signed in (True, False)}
        everywhere: Counter[str] = sum(by_length.values(), Counter())
        self._usual = _most(everywhere) if everywhere else usual
        self._by_length = {length: _most(labels) for length, labels in by_length.items()}

    def describe(self) -> str:
        """Return a description for the report."""
        whole = f"{self._whole[True]} over sentences that end in a sign, {self._whole[False]} over others"
        if self._kind == "flat":
            return f"flat: {whole}"
        return f"right-branching: {whole}, inside them the usual label of each length"

    def tree(self, sentence: str) -> Node | None:
        """Return the tree of a sentence; None without words."""
        leaves: list[Node | Leaf] = [Leaf(SLOT, escape(word)) for word in words_of(sentence)]
        if not leaves:
            return None
        signed = _is_sign(words_of(sentence)[-1])
        inside = leaves
        if self._kind == "right":
            inside = self._branching(leaves[:-1]) + leaves[-1:] if signed else self._branching(leaves)
        return Node(OUTER_LABELS[1], (Node(self._whole[signed], tuple(inside)),))

    def _branching(self, leaves: list[Node | Leaf]) -> list[Node | Leaf]:
        """Return the first word and a constituent of all others; in long sentences only the last DEEPEST words."""
        part: list[Node | Leaf] = leaves[-1:]
        for place in range(len(leaves) - 2, -1, -1):
            length = len(leaves) - 1 - place
            if 2 <= length < DEEPEST:
                part = [Node(self._by_length.get(length, self._usual), tuple(part))]
            part = [leaves[place], *part]
        return part


def _is_sign(word: str) -> bool:
    return not any(char.isalnum() for char in word)


def _top(tree: Node) -> str:
    """Return the label over the whole sentence, below the root."""
    while tree.label in OUTER_LABELS and len(tree.children) == 1 and isinstance(tree.children[0], Node):
        tree = tree.children[0]
    return category(tree.label)


def _last_constituents(tree: Node) -> list[tuple[str, int]]:
    """Return label and length of each constituent that ends at the sentence's end, or a word before it, and begins
    later.
    """
    num_words = len(leaves_of(tree))
    found = []
    waiting: list[tuple[Node | Leaf, int]] = [(tree, 0)]
    while waiting:
        part, start = waiting.pop()
        if isinstance(part, Leaf):
            continue
        length = len(leaves_of(part))
        if start > 0 and length > 1 and num_words - (start + length) <= 1:
            found.append((category(part.label), length))
        for child in part.children:
            waiting.append((child, start))
            start += len(leaves_of(child))
    return found


def _most(labels: Counter[str]) -> str:
    """Return the most frequent label; of equal ones the first in the alphabet."""
    return min(labels, key=lambda label: (-labels[label], label))


@dataclass(frozen=True)
class ParsingReport(NoPictures):
    """See `tasks.report.Report`. likelihood: None where no model was judged."""

    parses: ParseReport
    likelihood: Likelihood | None
    protocol: dict[str, Any]
    read: ReadReport = dataclasses.field(default_factory=ReadReport)

    @property
    def output(self) -> list[str]:
        """The trees, one per line."""
        return ["" if tree is None else format_tree(tree) for tree in self.parses.trees]

    def to_json(self) -> dict[str, Any]:
        report = self.parses
        record: dict[str, Any] = {
            "brackets": {**_figures(report.all), "signature": SIGNATURE},
            "brackets_40": {**_figures(report.short), "signature": f"{SIGNATURE}|words<=40"},
            "ill_formed": report.ill_formed,
            "repairs": dict(report.repairs),
        }
        if self.likelihood is not None:
            record["likelihood"] = likelihood_record(self.likelihood)
        return {**record, "protocol": self.protocol}

    def to_lines(self) -> list[str]:
        report, protocol = self.parses, self.protocol
        lines = [f"F1 = {report.all.f1:.2f}", f"  {SIGNATURE}"]
        for name, score in (("all", report.all), ("<= 40 words", report.short)):
            lines.append(
                f"  {name:<12} P {score.precision:.2f}  R {score.recall:.2f}  F1 {score.f1:.2f}"
                f"  exact {score.exact_match:.2f}%  crossing {score.average_crossing:.2f}"
                f"  ({score.sentences:,} sentences, {score.gold:,} brackets)"
            )
        if report.all.tagging_accuracy is not None:
            lines.append(f"  tags         {report.all.tagging_accuracy:.2f}%")
        if report.all.errors:
            lines.append(
                f"  errors       {report.all.errors:,} sentences left out: no tree, or other words than the gold tree"
            )
        if report.ill_formed is not None:
            lines.append(f"  ill-formed   {report.ill_formed:,} trees mended: {repairs_line(report.repairs)}")
        if self.likelihood is not None:
            lines += likelihood_lines(self.likelihood)
        lines += ["protocol", f"  data       {protocol['data']}", f"  sentences  {protocol['sentences']:,}"]
        return [*lines, *self.protocol_lines()]

    def protocol_lines(self) -> list[str]:
        """Return the rest of the protocol: the data and the settings."""
        protocol = self.protocol
        if "model" not in protocol:
            counted = [f"  counted on {protocol['counted_on']}"] if "counted_on" in protocol else []
            return [f"  judged     {protocol['judged']}", *counted]
        task = ", ".join(f"{key} {value}" for key, value in protocol["task"].items() if key != "name")
        return [
            model_line(protocol),
            f"  task       {protocol['task']['name']}: {task}",
            f"  search     {search_line(protocol)}",
            f"  truncated  {protocol['truncated_sources']} sources, {protocol['truncated_trees']} trees",
            *machine_lines(protocol),
        ]


def evaluate(options: EvaluateOptions, progress: Progress) -> ParsingReport:
    """Judge a model, trees made elsewhere, or trees that need no model.

    Raises: DataError: trees cannot be read, or differ in number. ConfigError: nothing says where trees are.
    """
    refuse_ranks("evaluate of trees")
    read = ReadReport()
    gold, name, data = _gold(options, read)
    if not gold:
        raise DataError(f"{name} has no trees; there is nothing to evaluate.")
    likelihood, protocol = None, {"data": name, "sentences": len(gold)}
    if options.hypotheses is not None:
        parses, more = _judge_file(options.hypotheses, gold, options, data, read)
    elif options.baseline is not None:
        parses, more = _judge_baseline(gold, options, data)
    else:
        parses, likelihood, more = _judge_model(gold, options, progress)
    return ParsingReport(parses, likelihood, {**protocol, **more}, read)


def _gold(options: EvaluateOptions, read: ReadReport) -> tuple[list[tuple[str, str]], str, PreparedData | None]:
    """Return sentences with their trees, their name, and the prepared data that contains them, if there is any."""
    if options.trees is not None:
        found = read_sentences(options.trees, ParsingTask(), options.on_bad_utf8, read)
        return found, describe(options.trees), None
    if options.data is None and not options.model:
        raise ConfigError("Say which trees are right: --trees FILE, or --data DATA.")
    path = options.data if options.data is not None else own_data(options.model, "--trees FILE")[0]
    data = PreparedData.open(path)
    if task_of(data.tokenizer) is None:
        raise DataError(f"{path} holds no trees; give --trees FILE.")
    texts = {"test": data.test_text, "valid": data.valid_text}
    if split := chosen_split(texts, options.split):
        return texts[split], f"{path} {split}", data
    raise DataError(f"{path} has no {options.split or 'test or valid'} trees; give --trees FILE.")


def _judge_file(
    path: str, gold: list[tuple[str, str]], options: EvaluateOptions, data: PreparedData | None, read: ReadReport
) -> tuple[ParseReport, dict[str, Any]]:
    """Trees made elsewhere, one per line; an empty line is a sentence without a tree."""
    lines = list(read_lines(path, on_bad_utf8=options.on_bad_utf8, report=read))
    name = describe(path)
    if len(lines) != len(gold):
        raise DataError(f"{name} has {len(lines)} lines, one tree each, but there are {len(gold)} gold trees.")
    trees: list[Node | None] = [
        parse_tree(line, f"{name}: line {number}") if line.strip() else None for number, line in enumerate(lines, 1)
    ]
    return judge_trees(trees, [tree for _, tree in gold], root=_root_of(data)), {"judged": name}


def _judge_baseline(
    gold: list[tuple[str, str]], options: EvaluateOptions, data: PreparedData | None
) -> tuple[ParseReport, dict[str, Any]]:
    """Trees that need no model, from the labels of training trees."""
    assert options.baseline is not None
    if options.train_trees is not None:
        task = ParsingTask()
        found = read_tree_file(options.train_trees, options.on_bad_utf8, ReadReport(), task)
        trees = [normal_form(tree, task.settings) for tree in found]  # without traces, which are no words
        name = describe(options.train_trees)
    elif data is not None:
        trees, name = _training_trees(data), f"{data.path} train"
    else:
        raise ConfigError("A baseline counts the labels of training trees: give --train-trees FILE.")
    baseline = Baseline(options.baseline, trees)
    made = [baseline.tree(sentence) for sentence, _ in gold]
    report = judge_trees(made, [tree for _, tree in gold], root=_root_of(data))
    return report, {"judged": baseline.describe(), "counted_on": name}


def _root_of(data: PreparedData | None) -> str | None:
    """The label on top of the trees of prepared data, which is no constituent."""
    task = None if data is None else task_of(data.tokenizer)
    return None if task is None else task.settings.root


def _training_trees(data: PreparedData) -> list[Node]:
    """The training trees of prepared data, which keeps them as ids, under `ROOT`."""
    task = task_of(data.tokenizer)
    assert task is not None
    sides = [
        data.tokenizer.decode_batch([data.train[place][side].tolist() for place in range(len(data.train))])
        for side in (0, 1)
    ]
    trees = [task.restore(sentence, written).tree for sentence, written in zip(*sides, strict=True)]
    return [Node(OUTER_LABELS[1], tree.children) if tree.label == _root_of(data) else tree for tree in trees]


def _judge_model(
    gold: list[tuple[str, str]], options: EvaluateOptions, progress: Progress
) -> tuple[ParseReport, Likelihood, dict[str, Any]]:
    """The trees of a model, and how likely it finds the right ones."""
    sentences, trees = [sentence for sentence, _ in gold], [tree for _, tree in gold]
    parser = options.run_on.load(Parser.from_pretrained, options.models.all(options.model), progress)
    translator = parser.translator
    overrides = {**options.decoding.overrides(translator.tokenizer), "num_return_sequences": 1}
    settings = translator.options(**overrides)
    cutting = dataclasses.replace(settings, too_long="truncate")
    # A tree that is too long for training is still used for evaluation: it is truncated and counted, never refused.
    with counted_truncations() as long_trees:
        on_progress = phase_progress(progress, "likelihood", len(gold))
        likelihood = likelihood_of(translator, gold, cutting, "tree", on_progress=on_progress)
    with counted_truncations() as long_sources:
        written = translator.translate(
            sentences, on_progress=phase_progress(progress, "parsing", len(gold)), **overrides
        )
    progress("judging the trees", 0, 0)
    report = judge_written(parser.task, sentences, written, trees)
    truncated = {"truncated_sources": long_sources.count, "truncated_trees": long_trees.count}
    protocol = search_record(translator, settings, options, task=parser.task.to_json(), **truncated)
    return report, likelihood, protocol


def _figures(score: BracketScore) -> dict[str, Any]:
    ratios = ("f1", "precision", "recall", "exact_match", "average_crossing", "tagging_accuracy")
    return {**{name: getattr(score, name) for name in ratios}, **dataclasses.asdict(score)}
