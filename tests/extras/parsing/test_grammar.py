"""The grammar of trees: what it allows is what a plain automaton allows, and what keeps to it needs no mending."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from naive_search import naive_beam_search

from manyheads.decoding.search import search_all
from manyheads.decoding.settings import DecodingSettings
from manyheads.extras.parsing.grammar import TreeGrammar
from manyheads.extras.parsing.tokenizer import ParsingTask, ParsingTokenizer
from manyheads.extras.parsing.trees import MAX_DEPTH, ParsingSettings, format_tree, leaves_of, parse_tree, restore
from manyheads.text.settings import TokenizerSettings
from manyheads.text.words import words_of

TREES = [
    "(ROOT (S (NP (DT The) (NN cat)) (VP (VBZ sees) (NP (NN NN))) (. .)))",
    "(ROOT (FRAG (NN unbelievable) (-LRB- -LRB-) (NN x) (-RRB- -RRB-)))",
    "(ROOT (S (NP (PRP I)) (VP (VBP do))) (NP (UH Yes)))",
]
SENTENCES = ["The cat sees NN .", "x", "  I \t do ( Zürich )  ", "unbelievable unbelievable"]
SETTINGS = [
    ParsingSettings(),
    ParsingSettings(tags="keep"),
    ParsingSettings(words="write"),
    ParsingSettings(tags="keep", words="write", root=None),
]


def make(settings: ParsingSettings, kind: Any = "bpe") -> ParsingTokenizer:
    task = ParsingTask(settings)
    trees = TREES if settings.root else [f"( {tree.removeprefix('(ROOT ')}" for tree in TREES]
    pairs = [(" ".join(leaf.word for leaf in leaves_of(parse_tree(tree))), tree) for tree in trees] * 3
    return ParsingTokenizer(task.learn_tokenizer(pairs, TokenizerSettings(kind=kind, vocab_size=330)), task)


@pytest.fixture(scope="module", params=range(len(SETTINGS) + 1))
def tokenizer(request: pytest.FixtureRequest) -> ParsingTokenizer:
    words_alone = request.param == len(SETTINGS)
    return make(SETTINGS[-2 if words_alone else request.param], "word" if words_alone else "bpe")


def grammar_of(tokenizer: ParsingTokenizer) -> TreeGrammar:
    grammar = tokenizer.grammar(DecodingSettings())
    assert grammar is not None
    return grammar


def batch_of(tokenizer: ParsingTokenizer, sentences: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [torch.tensor([*ids, tokenizer.eos_id]) for ids in tokenizer.encode_batch(list(sentences))]
    lengths = torch.tensor([len(row) for row in rows])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_id), lengths


def naive_tree_tokens(
    tokenizer: ParsingTokenizer, source: Sequence[int], written: Sequence[int], room: int
) -> set[int]:
    """Return the tokens that `TreeGrammar` allows next, computed by reading the output bracket by bracket.

    Args:
        source: pieces of the sentence, without EOS.
        written: target tokens so far, without BOS.
        room: number of tokens that may still be generated, EOS included.
    """
    begins = tokenizer.begins_word()
    words: list[list[int]] = []
    for piece in source:
        if begins[piece]:
            words.append([])
        words[-1].append(piece)
    writes = tokenizer.task.settings.words == "write"
    names = dict(zip(tokenizer.symbol_ids, tokenizer.symbols, strict=True))
    ids = {name: index for index, name in names.items()}
    stack: list[str] = []
    waiting: list[int] = []
    for token in written:
        if token not in names:
            waiting.pop(0)
        elif names[token].startswith("("):
            stack.append(names[token][1:])
        elif names[token].startswith(")"):
            stack.pop()
        else:
            word = words.pop(0)
            waiting = list(word) if writes else []
    if waiting:
        return {waiting[0]}
    if written and not stack:
        return {tokenizer.eos_id}
    allowed: set[int] = set()
    least = sum(1 + len(word) * writes for word in words) + len(stack) + 1
    for name, index in ids.items():
        if name.startswith("("):
            known = f"){name[1:]}" in ids
            labelled = name != "(" or (not stack and tokenizer.task.settings.root is None)
            if words and known and labelled and len(stack) < MAX_DEPTH and (not written or least + 2 <= room):
                allowed.add(index)
        elif name.startswith(")"):
            is_empty = names.get(written[-1], ")").startswith("(") if written else True
            if stack and name[1:] == stack[-1] and not is_empty and (len(stack) > 1 or not words):
                allowed.add(index)
        elif stack and words:
            allowed.add(index)
    return allowed


def test_the_mask_is_the_automaton_s(tokenizer: ParsingTokenizer) -> None:
    """Random walks of several sentences at once, with much room and with little."""
    draw = random.Random(5)
    source, lengths = batch_of(tokenizer, SENTENCES)
    grammar = grammar_of(tokenizer).of(source, lengths)
    for start_room in (4, 16, 40):
        rows = torch.arange(len(SENTENCES)).repeat_interleave(6)
        histories: list[list[int]] = [[] for _ in rows]
        for length in range(start_room):
            room = start_room - length
            allowed = grammar.allowed(
                torch.tensor(histories, dtype=torch.long).view(len(rows), -1), rows, torch.full((len(rows),), room)
            )
            keep = []
            for number, (sentence, history) in enumerate(zip(rows.tolist(), histories, strict=True)):
                pieces = source[sentence, : lengths[sentence] - 1].tolist()
                expected = naive_tree_tokens(tokenizer, pieces, history, room)
                assert set(allowed[number].nonzero()[:, 0].tolist()) == expected
                if expected - {tokenizer.eos_id}:
                    keep.append(number)
                    history.append(draw.choice(sorted(expected)))
            rows, histories = rows[keep], [histories[number] for number in keep]
            if not keep:
                break


def test_nesting_ends_where_trees_would_be_refused(tokenizer: ParsingTokenizer) -> None:
    """A tree as deep as the grammar allows is whole, and can be read again; random walks never go so far down."""
    source, lengths = batch_of(tokenizer, ["x"])
    grammar = grammar_of(tokenizer).of(source, lengths)
    ids = dict(zip(tokenizer.symbols, tokenizer.symbol_ids, strict=True))
    opening, closing, rows = ids["(NP"], ids[")NP"], torch.zeros(1, dtype=torch.long)

    def allowed(history: list[int]) -> set[int]:
        mask = grammar.allowed(torch.tensor([history]), rows, torch.tensor([1000]))[0]
        found = set(mask.nonzero()[:, 0].tolist())
        assert found == naive_tree_tokens(tokenizer, source[0, :-1].tolist(), history, 1000)
        return found

    history = [opening] * (MAX_DEPTH - 1)
    assert opening in allowed(history)
    history.append(opening)
    places = allowed(history)
    assert opening not in places
    place = min(places)
    history += [place, *(source[0, :-1].tolist() if tokenizer.task.settings.words == "write" else [])]
    history += [closing] * MAX_DEPTH
    assert allowed(history) == {tokenizer.eos_id}
    restored = restore(tokenizer.target.decode(history), ["x"], tokenizer.task.settings)
    assert not restored.repairs
    assert parse_tree(format_tree(restored.tree)) == restored.tree


@pytest.mark.one_in(4)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_what_is_found_needs_no_mending(tokenizer, num_beams, hash_model):
    """With a model that writes at random; even where the limit leaves no token to spare."""
    target = tokenizer.target
    ids = {"pad_id": target.pad_id, "bos_id": target.bos_id, "eos_id": target.eos_id}
    sources = [[*row, tokenizer.eos_id] for row in tokenizer.encode_batch(SENTENCES)]
    for seed in range(3):
        model = hash_model(vocab_size=tokenizer.num_target_ids, seed=seed)
        for extra in (0, 30):
            options = DecodingSettings(num_beams=num_beams, max_len_ratio=2 + 1e-6, max_len_offset=2 + extra)
            found = search_all(model, sources, options, grammar=tokenizer.grammar(options), **ids)
            for sentence, hypotheses in zip(SENTENCES, found, strict=True):
                written = target.decode(hypotheses[0].ids)
                restored = restore(written, words_of(sentence), tokenizer.task.settings)
                assert hypotheses[0].ended, (sentence, written)
                assert not restored.repairs, (sentence, written)


def test_sampling_keeps_to_it(hash_model: Callable[..., Any]) -> None:
    tokenizer = make(SETTINGS[2])
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
    sources = [[*row, 2] for row in tokenizer.encode_batch(SENTENCES)]
    options = DecodingSettings(num_beams=1, do_sample=True, num_return_sequences=5, max_len_ratio=4)
    model = hash_model(vocab_size=tokenizer.vocab_size)
    for sentence, found in zip(
        SENTENCES, search_all(model, sources, options, grammar=tokenizer.grammar(options), **ids), strict=True
    ):
        assert len({tuple(hypothesis.ids) for hypothesis in found}) > 1
        for hypothesis in found:
            written = tokenizer.target.decode(hypothesis.ids)
            assert not restore(written, words_of(sentence), tokenizer.task.settings).repairs


@pytest.mark.one_in(3)
def test_beam_search_under_a_grammar_is_the_naive_one(tokenizer, hash_model):
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
    options = DecodingSettings(num_beams=3, num_return_sequences=2, max_new_tokens=24)
    for seed, sentence in enumerate(SENTENCES):
        model = hash_model(vocab_size=tokenizer.num_target_ids, seed=seed)
        source = [*tokenizer.encode(sentence), 2]

        def constrained(history: list[int], model: Any = model, source: list[int] = source) -> list[float]:
            allowed = naive_tree_tokens(tokenizer, source[:-1], history[1:], 24 - len(history) + 1)
            values: list[float] = model.next_log_probs(source)(history)
            if len(allowed) == 1:
                values = [0.0] * len(values)
            return [value if index in allowed else -torch.inf for index, value in enumerate(values)]

        expected = naive_beam_search(constrained, options, limit=24, **ids)
        (found,) = search_all(model, [source], options, grammar=tokenizer.grammar(options), **ids)
        assert [hypothesis.ids for hypothesis in found] == [hypothesis.ids for hypothesis in expected]
        torch.testing.assert_close(
            torch.tensor([hypothesis.score for hypothesis in found]),
            torch.tensor([hypothesis.score for hypothesis in expected]),
        )


def test_without_a_grammar_a_model_writes_what_it_likes(hash_model: Callable[..., Any]) -> None:
    tokenizer = make(SETTINGS[0])
    sources = [[*row, 2] for row in tokenizer.encode_batch(SENTENCES)]
    model = hash_model(vocab_size=tokenizer.num_target_ids)
    found = search_all(model, sources, replace(DecodingSettings(), num_beams=1), pad_id=0, bos_id=1, eos_id=2)
    written = [tokenizer.target.decode(hypotheses[0].ids) for hypotheses in found]
    mended = [
        restore(text, words_of(sentence), tokenizer.task.settings).repairs
        for text, sentence in zip(written, SENTENCES, strict=True)
    ]
    assert any(mended)
