"""Several classifiers, or several chart parsers, as one: averages of probabilities by hand, in float64."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.errors import ConfigError, RequestError
from manyheads.extras.classification.classifier import Classifier, ClassifierEnsemble
from manyheads.extras.parsing.parser import Parser
from manyheads.extras.parsing.span_data import SpanBatch
from manyheads.extras.parsing.span_parser import LEAST_PROBABILITY, SpanParserEnsemble
from manyheads.models.pretrained import save_pretrained
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

VOCAB = 11
NUM_WORDS = 4


def model_of(name: str, seed: int, **changes: Any) -> Any:
    """A model of debug size in float64, sure enough of itself that models disagree."""
    torch.manual_seed(seed)
    config = replace(cast(Any, ARCHITECTURES[name].presets["debug"]), **{"vocab_size": VOCAB, **changes})
    model = cast(Any, build_model(config)).double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(2.0)
    return model


def classifiers() -> list[Any]:
    return [
        model_of("transformer-classifier", 1),
        model_of("transformer-classifier", 2, d_ff=24, positions="none", relative_bias=4),
        model_of("reformer-classifier", 3),
    ]


def parsers() -> list[Any]:
    made = [model_of("transformer-spans", seed, num_layers=seed) for seed in (1, 2)]
    for model in made:
        model.head.label_proj.bias.data.copy_(torch.tensor([0.0, 1.5, 0.0]))  # so that some spans are constituents
    return made


def sentences() -> tuple[Tensor, Tensor, Tensor]:
    """Two, of NUM_WORDS words and of one fewer."""
    torch.manual_seed(5)
    pieces, affixes = torch.randint(1, VOCAB + 1, (2, NUM_WORDS, 2)), torch.randint(1, 99, (2, NUM_WORDS, 3))
    lengths = torch.tensor([NUM_WORDS, NUM_WORDS - 1])
    pieces[1, -1], affixes[1, -1] = 0, 0
    return pieces, affixes, lengths


def binary_trees(first: int, last: int) -> Iterator[set[tuple[int, int]]]:
    """The spans of each binary tree over words first to last."""
    if first == last:
        yield {(first, last)}
    for middle in range(first, last):
        for left, right in itertools.product(binary_trees(first, middle), binary_trees(middle + 1, last)):
            yield {(first, last), *left, *right}


def of_constituents(model: Any, row: int) -> dict[tuple[int, int], Tensor]:
    """Probabilities of the labels of each span of a sentence, as sums over all labelled binary trees."""
    pieces, affixes, lengths = (one[row : row + 1] for one in sentences())
    num_words = int(lengths)
    with torch.no_grad():
        logits = model.head.span_logits(model.body(pieces[:, :num_words], affixes[:, :num_words], lengths))[0]
    places = [(first, last) for first in range(num_words) for last in range(first, num_words)]
    weights = {place: torch.cat([torch.ones(1), score.exp()]) for place, score in zip(places, logits, strict=True)}
    found, total = (
        {place: torch.zeros(len(logits[0]), dtype=torch.float64) for place in places},
        torch.zeros((), dtype=torch.float64),
    )
    for tree in binary_trees(0, num_words - 1):
        value = torch.stack([weights[place].sum() for place in tree]).prod()
        total = total + value
        for place in tree:
            found[place] += value * weights[place][1:] / weights[place].sum()
    return {place: values / total for place, values in found.items()}


@torch.no_grad()
def test_probabilities_of_constituents_are_averaged() -> None:
    models = parsers()
    charts = SpanParserEnsemble(models).charts(*sentences())
    decided = 0
    for row, length in enumerate(sentences()[2].tolist()):
        each = [of_constituents(model, row) for model in models]
        for first, last in each[0]:
            mean = torch.stack([one[first, last] for one in each]).mean(0)
            expected = max(0.0, float(mean.max()) - LEAST_PROBABILITY)
            assert float(charts.scores[row, first, last]) == pytest.approx(expected, abs=1e-12)
            assert int(charts.labels[row, first, last]) == (int(mean.argmax()) + 1 if expected else 0)
            decided += expected > 0
        states = [model.body(*sentences()) for model in models]
        tags = sum(model.head.tag_logits(x).softmax(-1) for model, x in zip(models, states, strict=True))
        assert charts.tags[row, :length].equal(cast(Tensor, tags)[row, :length].argmax(-1))
    assert decided


@torch.no_grad()
def test_probabilities_of_a_tree_are_averaged() -> None:
    models = parsers()
    pieces, affixes, lengths = (one[:1] for one in sentences())
    labels = torch.zeros(1, NUM_WORDS, NUM_WORDS, dtype=torch.long)
    labels[0, 0, NUM_WORDS - 1], labels[0, 1, 2] = 2, 1
    tags = torch.tensor([[0, 1, 2, 1]])
    batch = SpanBatch(pieces, affixes, lengths, tags, labels, torch.zeros(1, dtype=torch.long))
    each = [float(model.tree_log_prob(batch).exp()) for model in models]
    assert each[0] != pytest.approx(each[1], rel=0.1)
    averaged = float(SpanParserEnsemble(models).tree_log_prob(batch).exp())
    assert averaged == pytest.approx(sum(each) / len(each), rel=1e-12)


@torch.no_grad()
def test_probabilities_of_labels_are_averaged() -> None:
    models, tokens, lengths = classifiers(), torch.randint(1, VOCAB, (3, 6)), torch.tensor([6, 4, 1])
    averaged = ClassifierEnsemble(models).log_probs(tokens, lengths).exp()
    by_hand = torch.stack([model.log_probs(tokens, lengths).exp() for model in models]).mean(0)
    torch.testing.assert_close(averaged, by_hand)
    assert not averaged.isclose(models[0].log_probs(tokens, lengths).exp(), rtol=0.01).all()


@torch.no_grad()
def test_a_model_twice_is_the_model() -> None:
    [parser, _], [classifier, *_] = parsers(), classifiers()
    for one, two in zip(
        parser.charts(*sentences()), SpanParserEnsemble([parser] * 2).charts(*sentences()), strict=True
    ):
        assert one.equal(two)
    tokens = torch.randint(1, VOCAB, (3, 6))
    assert ClassifierEnsemble([classifier] * 2).log_probs(tokens).equal(classifier.log_probs(tokens))


def test_the_longest_text_is_that_of_all_models() -> None:
    limits = [model_of("transformer-classifier", 1, positions="learned", max_len=length) for length in (9, 7)]
    assert ClassifierEnsemble([*limits, classifiers()[0]]).max_len == 7
    assert SpanParserEnsemble([model_of("transformer-spans", 1, max_len=length) for length in (9, 7)]).max_len == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"constituents": ("NP", "S", "PP")}, "the constituents 'PP', but model 1 has the constituents 'S VP'"),
        ({"constituents": ("NP", "S")}, "has 2 constituents, but model 1 has the constituents 'S VP'"),
        ({"constituents": ("S", "NP", "S VP")}, "the constituents in another order"),
        ({"tags": ("DT", "NN", "VBZ")}, "has the tags 'VBZ', but model 1 has the tags 'VB'"),
        ({"root": "TOP"}, "has root 'TOP', but model 1 has root 'ROOT'"),
    ],
)
def test_parsers_of_unlike_labels_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpanParserEnsemble([model_of("transformer-spans", 1), model_of("transformer-spans", 2, **changes)])


def test_classifiers_of_unlike_labels_are_refused() -> None:
    models = [model_of("transformer-classifier", 1, labels=labels) for labels in (("a", "b"), ("a", "c"))]
    with pytest.raises(ConfigError, match="model 2 of the ensemble has the labels 'c', but model 1 has the labels 'b'"):
        ClassifierEnsemble(models)
    with pytest.raises(ConfigError, match="at least one model"):
        ClassifierEnsemble([])


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Classifiers A and B, parsers P and Q of one vocabulary, and C and R of another one."""
    for names, line in (("ABPQ", "a man sleeps"), ("CR", "two dogs run")):
        tokenizer = Tokenizer.train([line], TokenizerSettings(vocab_size=300))
        for name in names:
            architecture = "transformer-classifier" if name in "ABC" else "transformer-spans"
            model = model_of(architecture, ord(name), vocab_size=tokenizer.vocab_size).float()
            save_pretrained(model, tmp_path / name, tokenizer=tokenizer, task=ARCHITECTURES[architecture].task)
    return {name: tmp_path / name for name in "ABCPQR"}


def test_folders_as_one_model(folders: dict[str, Path]) -> None:
    texts = ["a man sleeps", "two men run"]
    both = Classifier.from_pretrained([folders["A"], folders["B"]], "cpu")
    alone = [Classifier.from_pretrained(folders[name], "cpu").log_probs(texts) for name in "AB"]
    torch.testing.assert_close(both.log_probs(texts).exp(), (alone[0].exp() + alone[1].exp()) / 2)
    tree = "(ROOT (S (NP (DT a) (NN man)) (VB sleeps)))"
    parser = Parser.from_pretrained([folders["P"], folders["Q"]], "cpu").chart
    of_trees = [Parser.from_pretrained(folders[name], "cpu").chart.log_probs([tree]).exp() for name in "PQ"]
    torch.testing.assert_close(parser.log_probs([tree]).exp(), (of_trees[0] + of_trees[1]) / 2)
    assert len(parser.parse(texts)) == 2
    for one in (both, parser):
        with pytest.raises(RequestError, match="save each of its models"):
            one.save_pretrained(folders["A"].parent / "saved")


def test_folders_that_cannot_be_averaged(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"C has another vocabulary .* with the same tokenizer"):
        Classifier.from_pretrained([folders["A"], folders["C"]], "cpu")
    with pytest.raises(ConfigError, match="R has another vocabulary"):
        Parser.from_pretrained([folders["P"], folders["R"]], "cpu")
    for kind in (Classifier, Parser):
        with pytest.raises(ConfigError, match="the list of paths is empty"):
            kind.from_pretrained([], "cpu")
