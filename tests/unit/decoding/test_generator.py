"""Generating: what is written does not depend on batches, memory keeps its size, stops and characters stay whole."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.catalogue import build_model
from manyheads.decoding.generation import Ending
from manyheads.decoding.generator import Generator
from manyheads.decoding.greedy_and_sampling import Repetition, draw
from manyheads.decoding.inputs_and_results import SearchStopped
from manyheads.decoding.settings import GenerationSettings
from manyheads.errors import ConfigError, NonFiniteError, RequestError
from manyheads.models.composites import LanguageModel
from manyheads.models.decoder.config import DecoderConfig
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.nn.kernels import policy
from manyheads.text.of_folder import PieceVocabulary
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabulary import ByteVocabulary
from manyheads.text.word_vocabulary import SymbolVocabulary, WordVocabulary

PROMPTS = ["", "a", "It is a truth", "x" * 9, "Zürich, ein längerer Anfang"]


def make(documents: Any = "none", **changes: Any) -> Generator:
    vocabulary = ByteVocabulary(documents)
    config = TransformerXLConfig(
        vocab_size=vocabulary.vocab_size, d_model=16, num_heads=2, d_ff=24, num_layers=2, memory_len=12, **changes
    )
    torch.manual_seed(3)
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)  # a model of strong opinions
    return Generator(model, vocabulary, GenerationSettings(max_new_tokens=24), "cpu")


@pytest.fixture(scope="module")
def generator() -> Generator:
    return make()


@pytest.fixture(scope="module")
def ending() -> Generator:
    return make("files")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [{}, {"do_sample": False}, {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}])
def test_a_batch_writes_what_each_prompt_alone_does(generator: Generator, options: dict[str, Any]) -> None:
    together = generator.continuations(PROMPTS, **options)
    for number, prompt in enumerate(PROMPTS):
        [alone] = generator.continuations([prompt], first=number, **options)
        assert [found.ids for found in alone] == [found.ids for found in together[number]]
        assert alone[0].log_probs == pytest.approx(together[number][0].log_probs, abs=1e-4)
        pieces = list(generator.stream(prompt, number=number, **options))
        assert "".join(pieces) == together[number][0].text
    few = generator.continuations(PROMPTS, max_rows=2, **options)
    assert [[found.ids for found in row] for row in few] == [[found.ids for found in row] for row in together]


def test_log_probabilities_are_those_of_one_pass(generator: Generator) -> None:
    """With a memory that covers everything, writing token by token says what reading all at once does."""
    [[found]] = generator.continuations(["The prompt"], memory_len=100, temperature=2.0)
    tokens = torch.tensor([[*b"\nThe prompt", *found.ids]])
    with torch.no_grad():
        log_probs = generator.model.log_probs(tokens)[0]
    expected = log_probs[len(b"The prompt") : -1].gather(1, tokens[0, 1 + len(b"The prompt") :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.log_probs), expected, atol=1e-4, rtol=1e-4)


def test_many_continuations_differ_and_repeat_by_seed(generator: Generator) -> None:
    [found] = generator.continuations(["Once"], num_return_sequences=5)
    assert len({tuple(one.ids) for one in found}) == 5
    assert [one.ids for one in generator.continuations(["Once"], num_return_sequences=5)[0]] == [
        one.ids for one in found
    ]
    assert generator.continuations(["Once"], seed=1)[0][0].ids != found[0].ids


def test_a_long_prompt_is_read_in_parts(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["long " * 30, "short", "middle " * 5]
    whole = generator.continuations(prompts, memory_len=200)
    monkeypatch.setattr("manyheads.decoding.generation.READ_AT_ONCE", 7)
    parts = generator.continuations(prompts, memory_len=200)
    assert [found[0].ids for found in parts] == [found[0].ids for found in whole]


def test_the_cost_of_a_token_does_not_grow(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor in a step is larger after 200 tokens than after 50, and no call sees more columns."""
    seen: list[int] = []
    inner = generator.model.step

    def watched(tokens: Any, state: Any, lengths: Any = None) -> Any:
        found = inner(tokens, state, lengths)
        seen.append(max(leaf.numel() for leaf in torch.utils._pytree.tree_leaves(found[1])))
        return found

    monkeypatch.setattr(generator.model, "step", watched)
    for _ in generator.stream("It", max_new_tokens=200):
        pass
    assert len(seen) == 200
    assert max(seen[50:]) <= max(seen[:50])


def test_documents_end(ending: Generator) -> None:
    found = [one for rows in ending.continuations([""] * 12, max_new_tokens=100) for one in rows]
    ended = [one for one in found if one.ended_by == "end"]
    assert ended
    for one in ended:
        assert one.ids[-1] == ending.vocabulary.end_id
        assert ending.vocabulary.end_id not in one.ids[:-1]
    kept = ending.continuations([""] * 12, max_new_tokens=100, min_new_tokens=100)
    assert all(rows[0].ended_by == "length" and len(rows[0].ids) == 100 for rows in kept)


def test_stop_texts(generator: Generator) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "banned_ids": tuple(range(128, 256))}
    [[whole]] = generator.continuations(["Stop"], **options)
    middle = whole.text[20:23]
    [[cut]] = generator.continuations(["Stop"], stop=("never this", middle), **options)
    assert cut.ended_by == "stop"
    assert cut.text == whole.text[: whole.text.index(middle)]
    assert "".join(generator.stream("Stop", stop=(middle,), **options)) == cut.text


def test_stop_texts_wait_for_the_minimum(generator: Generator, ending: Generator) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "banned_ids": tuple(range(128, 256)), "do_sample": False}
    [[whole]] = generator.continuations(["Stop"], **options)
    letter = whole.text[0]
    for fewest in (0, 1, 30):
        [[cut], [other]] = generator.continuations(["Stop", "a"], stop=(letter,), min_new_tokens=fewest, **options)
        place = whole.text.find(letter, fewest)
        assert cut.text == (whole.text if place < 0 else whole.text[:place])
        assert len(cut.ids) > fewest or cut.ended_by == "length"
        assert len(other.ids) > fewest or other.ended_by == "length"
        pieces = list(generator.stream("Stop", stop=(letter,), min_new_tokens=fewest, **options))
        assert "".join(pieces) == cut.text
    across = whole.text[10:14]  # begins before the minimum, and ends after it
    [[cut]] = generator.continuations(["Stop"], stop=(across,), min_new_tokens=12, **options)
    assert cut.text == whole.text[: whole.text.index(across, 12 - 3)]
    [[written]] = ending.continuations(["Stop"], min_new_tokens=50, stop=("e", "\n", " "), max_new_tokens=60)
    assert len(written.ids) > 50 or written.ended_by == "length"


def test_a_stop_text_before_the_minimum_is_text() -> None:
    """Also where it begins a longer one, which ends after the minimum."""
    ending = Ending(["ab", "abcd", "x"])
    shown = [ending.add(bytes([byte]), may_stop=False) for byte in b"xab"]
    assert "".join(shown) == "x"
    assert ending.add(b"c") == ""
    assert ending.add(b"d") == ""
    assert ending.stopped
    assert ending.text == "x"
    other = Ending(["ab", "abcd", "x"])
    shown = [other.add(b"ab", may_stop=False), other.add(b"c"), other.add(b"ex")]
    assert "".join(shown) == "abce"
    assert other.stopped


def test_a_long_prompt_does_not_pad_the_short_ones() -> None:
    """Prompts of one batch are of similar length, and the results those of each alone."""
    generator = make()
    sizes: list[int] = []
    steps = generator.runner.steps

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(steps, name)

        def step(self, tokens: torch.Tensor, *more: Any, **options: Any) -> Any:
            sizes.append(tokens.numel())
            return steps.step(tokens, *more, **options)

    prompts = ["ab", "x" * 9_000, *(f"{place:02}" for place in range(40))]
    generator.runner.steps = Counting()
    found = generator.continuations(prompts, max_new_tokens=2)
    assert sum(sizes) < 2 * sum(map(len, prompts))
    generator.runner.steps = steps
    for number in (0, 1, 2, 41):
        [[alone]] = generator.continuations([prompts[number]], first=number, max_new_tokens=2)
        assert [one.ids for one in found[number]] == [alone.ids]


@pytest.mark.parametrize("seed", range(4))
def test_after_a_space_a_word_begins(seed: int) -> None:
    """Subwords hold the space before them, so the one at the end of a prompt is no piece of its own."""
    text = "it is an island, and the other one is another island"
    vocabulary = PieceVocabulary(Tokenizer.train([text], TokenizerSettings(vocab_size=300)))
    config = TransformerXLConfig(
        vocab_size=vocabulary.vocab_size, d_model=16, num_heads=2, d_ff=24, num_layers=1, memory_len=32
    )
    torch.manual_seed(seed)
    model = build_model(config)
    assert isinstance(model, LanguageModel)
    generator = Generator(model, vocabulary, GenerationSettings(max_new_tokens=4, seed=seed), "cpu")
    for prompt in ("it is ", "it is  ", "and"):
        [[found]] = generator.continuations([prompt])
        whole = vocabulary.decode([*vocabulary.encode(prompt.rstrip()), *found.ids])
        if prompt.endswith(" "):
            first = vocabulary.tokens(found.ids[:1])[0]
            assert (first[0] == "▁" and first.strip("▁")) or found.ids[0] == vocabulary.line_id
            assert not found.text.startswith(" ")
            assert (prompt.rstrip() + " " + found.text).split() == whole.split()
        else:
            assert prompt + found.text == whole
    together = generator.continuations(["it is ", "and"], do_sample=False)
    [alone] = generator.continuations(["and"], do_sample=False)
    assert [one.ids for one in together[1]] == [one.ids for one in alone], "other rows are free"


def test_endings_hold_back_what_may_be_a_stop_or_half_a_character() -> None:
    ending = Ending(["END", "é!"])
    shown = [ending.add(bytes([byte])) for byte in "aEéENxé?EN".encode()]
    assert "".join(shown) == "aEéENxé?"
    assert ending.add(b"D and more") == ""
    assert ending.stopped
    assert ending.text == "aEéENxé?"
    half = Ending([])
    assert half.add("é".encode()[:1]) == ""
    assert half.finish() == "\ufffd"
    assert half.text == "\ufffd"


def test_min_p_leaves_the_likely() -> None:
    log_probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(200, 1)
    numbers = torch.linspace(0, 1, 200)
    assert set(draw(log_probs, numbers, min_p=0.4).tolist()) == {0, 1}
    assert set(draw(log_probs, numbers, min_p=0.2).tolist()) == {0, 1, 2}
    assert set(draw(log_probs, numbers).tolist()) == {0, 1, 2, 3}


def test_no_ngram_twice(generator: Generator) -> None:
    [[found]] = generator.continuations(["abab"], no_repeat_ngram_size=2, max_new_tokens=120, do_sample=False)
    ids = [*b"abab", *found.ids]
    pairs = list(pairwise(ids[3:]))
    assert len(set(pairs)) == len(pairs)
    [[free]] = generator.continuations(["abab"], max_new_tokens=120, do_sample=False)
    again = list(pairwise(free.ids))
    assert len(set(again)) < len(again)


def test_the_penalty_is_on_what_was_said() -> None:
    """Prompts count; rows that are dropped take their past along."""
    device = torch.device("cpu")
    repetition = Repetition([[1, 2], [], [3]], 5, penalty=2.0, ngram_size=0, device=device)
    repetition.add(torch.tensor([4, 0, 3]), [4, 0, 3])
    said = [{1, 2, 4}, {0}, {3}]
    for rows in ([0, 1, 2], [1, 2]):
        repetition.select(rows)
        log_probs = torch.full((len(rows), 5), -1.0)
        expected = torch.tensor([[-2.0 if token in said[row] else -1.0 for token in range(5)] for row in rows])
        torch.testing.assert_close(repetition.apply(log_probs), expected)


def test_stopping_and_mistakes(generator: Generator) -> None:
    with pytest.raises(SearchStopped):
        generator.generate("a", stop_asked=lambda: True)
    with pytest.raises(RequestError, match="prompt 2 is a int"):
        generator.generate(["a", 3])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="a int was given; give one prompt, a string, or a list of prompts"):
        generator(5)  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="banned_ids holds 256"):
        generator.generate("a", banned_ids=[256])
    with pytest.raises(ConfigError, match="temprature"):
        generator.generate("a", temprature=2)
    assert generator.generate([]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"min_p": 1.0}, "min_p is 1.0"),
        ({"num_return_sequences": 2, "do_sample": False}, "would be the same"),
        ({"min_new_tokens": 300}, "above max_new_tokens"),
        ({"stop": ("",)}, "empty text"),
        ({"stop": ("a", "\udcff")}, r"'\\udcff', which is not UTF-8"),
        ({"memory_len": 0}, "memory_len is 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GenerationSettings(**options)


def test_options_of_drawing_need_drawing(generator: Generator) -> None:
    assert generator.options(do_sample=False, temperature=1.0, top_k=0).temperature == 1
    for options in ({"min_p": 0.1}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}):
        [name] = options
        with pytest.raises(ConfigError, match=f"{name} is .*, but do_sample is false, so it has no effect"):
            generator.options(do_sample=False, **options)  # type: ignore[arg-type]


def test_nan_is_named(generator: Generator) -> None:
    broken = make()
    with torch.no_grad():
        next(broken.model.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="token 1"):
        broken.generate("a")


@pytest.mark.parametrize("paths", [1, 3])
def test_dropped_prompts_leave_at_once_and_change_no_others(generator: Generator, paths: int) -> None:
    settings = generator.options(num_return_sequences=paths, max_new_tokens=12)
    prompts = generator.encode_prompts(PROMPTS)
    whole = generator.continuations(PROMPTS, num_return_sequences=paths, max_new_tokens=12)
    steps = generator.steps(prompts, settings, num_top=2)
    new = [next(steps), next(steps), steps.send({1, 3})]
    assert {token.prompt for token in new[-1]} == {0, 2, 4}
    assert all(len(token.top) == 2 for tokens in new for token in tokens)
    new += list(steps)
    ended = {(token.prompt, token.path): token.ended for tokens in new for token in tokens if token.ended}
    assert ended.keys() == {(prompt, path) for prompt in (0, 2, 4) for path in range(paths)}
    for (prompt, path), found in ended.items():
        assert found.ids == whole[prompt][path].ids
        assert found.log_probs == pytest.approx(whole[prompt][path].log_probs, abs=1e-4)


def test_a_prompt_can_be_dropped_while_long_ones_are_read(generator: Generator) -> None:
    texts = ["a", "b" * 1200, "c"]
    settings = generator.options(max_new_tokens=5)
    steps = generator.steps(generator.encode_prompts(texts), settings)
    assert (next(steps), next(steps)) == ([], [])
    new = [steps.send([0]), *steps]
    assert {token.prompt for tokens in new for token in tokens} == {1, 2}
    expected = generator.continuations(texts, max_new_tokens=5)
    ended = {token.prompt: token.ended for tokens in new for token in tokens if token.ended}
    assert [ended[prompt].ids for prompt in (1, 2)] == [expected[prompt][0].ids for prompt in (1, 2)]
    with pytest.raises(RequestError, match="prompt 2 holds the id 999"):
        generator.begin_ids([[5], [999]])


def test_settings_of_each_prompt(generator: Generator) -> None:
    """Requests that differ in seed, length and stop texts share a batch."""
    each = [generator.options(seed=seed, max_new_tokens=4 + seed) for seed in range(3)]
    prompts = generator.encode_prompts(["It"] * 3)
    new = list(generator.steps(prompts, generator.options(), numbers=[0, 0, 0], each=each))
    ended = {token.prompt: token.ended for tokens in new for token in tokens if token.ended}
    for seed in range(3):
        [[expected]] = generator.continuations(["It"], seed=seed, max_new_tokens=4 + seed)
        assert ended[seed].ids == expected.ids


def test_a_string_gives_what_a_list_of_one_gives(generator: Generator) -> None:
    assert generator("a") == generator.generate("a") == generator(["a"])[0]
    assert generator.continuations("a") == generator.continuations(["a"])[0]


def test_saved_moved_and_shown(generator: Generator, tmp_path: Path) -> None:
    generator.save_pretrained(tmp_path / "model")
    again = Generator.from_pretrained(tmp_path / "model")
    assert again.settings == generator.settings
    assert again.to("cpu") is again
    assert again("It is") == generator("It is")
    assert repr(again) == "Generator(transformer-xl, bytes, 256 ids, cpu, fp32)"
    with pytest.raises(RequestError, match="cuda:99"):
        again.to("cuda:99")
    assert again.device == torch.device("cpu")


@pytest.mark.parametrize("temperature", [1e-3, 1e-38, 1e-320])
def test_the_lowest_temperatures_take_the_likeliest(temperature: float) -> None:
    log_probs = torch.tensor([[0.1, 0.7, 0.2], [0.0, 0.0, 1.0]]).log()
    assert draw(log_probs, torch.tensor([0.95, 0.05]), temperature).tolist() == [1, 2]


@pytest.mark.parametrize("lines", ["end", "around"])
def test_lines_of_symbols_are_broken_once(lines: Any) -> None:
    vocabulary = SymbolVocabulary(["<S>", "a", "b"], form="words", lines=lines, line="<S>")
    torch.manual_seed(3)
    config = TransformerXLConfig(vocab_size=3, d_model=16, num_heads=2, d_ff=24, num_layers=1, memory_len=12)
    generator = Generator(build_model(config), vocabulary, GenerationSettings(max_new_tokens=60), "cpu")  # type: ignore[arg-type]
    for prompt in ("", "a b\na\n", "a"):
        [found] = generator.continuations(prompt)
        [ids] = generator.encode_prompts([prompt])
        assert ids.count(0) + found.ids.count(0) > 8
        assert found.text == vocabulary.decode([*ids, *found.ids])[len(vocabulary.decode(ids)) :]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 3}, {"do_sample": False}])
def test_where_every_token_would_repeat_one_of_the_vocabulary_is_taken(options: dict[str, Any]) -> None:
    vocabulary = WordVocabulary(["<eos>", "<unk>", "a", "b", "c", "d"])
    config = TransformerXLConfig(vocab_size=9, d_model=16, num_heads=2, d_ff=24, num_layers=1, memory_len=12)
    torch.manual_seed(3)
    generator = Generator(build_model(config), vocabulary, GenerationSettings(max_new_tokens=12), "cpu")  # type: ignore[arg-type]
    for banned in ((), (1,)):
        ids = generator.continuations("a", no_repeat_ngram_size=1, banned_ids=banned, **options)[0].ids
        assert len(ids) == 12
        assert sorted([2, *ids[: 5 - len(banned)]]) == sorted({*range(6)} - {*banned})  # each once, then again
        assert not {*banned} & {*ids}


def test_alternatives_are_tokens_of_the_vocabulary() -> None:
    """The model has more rows than its vocabulary has tokens."""
    vocabulary = WordVocabulary(["<eos>", "<unk>", "a", "b", "c", "d"])
    config = TransformerXLConfig(vocab_size=9, d_model=16, num_heads=2, d_ff=24, num_layers=1, memory_len=12)
    torch.manual_seed(3)
    generator = Generator(build_model(config), vocabulary, GenerationSettings(max_new_tokens=2), "cpu")  # type: ignore[arg-type]
    found = [token for new in generator.steps([[2]], generator.settings, num_top=20) for token in new]
    assert [sorted(index for index, _ in token.top) for token in found] == [[*range(6)]] * 2


LATE = [
    {},
    {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    {"num_return_sequences": 3, "stop": ("e", "ab"), "min_new_tokens": 5},
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", LATE)
def test_reading_a_step_late_writes_the_same(ending, options, monkeypatch):
    """Tokens, stops, alternatives and pieces; but each step begins before its predecessor's tokens are read."""
    happened: list[str] = []
    step = ending.model.step

    def stepped(*given: Any, **more: Any) -> Any:
        happened.append("step")
        return step(*given, **more)

    def waits(device: torch.device) -> Callable[[], object]:
        return lambda: happened.append("read")

    def written() -> Any:
        happened.clear()
        settings = ending.options(max_new_tokens=40, **options)
        prompts = ending.encode_prompts(PROMPTS)
        steps = [[(one.prompt, one.path, one.id, one.text, one.ended) for one in new]
                 for new in ending.steps(prompts, settings, num_top=2)]  # fmt: skip
        return steps, list(ending.stream("It is", max_new_tokens=40, **options))

    monkeypatch.setattr(ending.model, "step", stepped)
    monkeypatch.setattr(policy, "waiting_for", waits)
    steps, pieces = written()
    number = happened.count("read")
    assert happened == ["step", "read"] * number
    endings = [(place, one[4].ended_by) for place, new in enumerate(steps) for one in new if one[4] is not None]
    assert len({place for place, _ in endings}) > 1, "all end at once"
    monkeypatch.setattr(policy, "reads_late", lambda device: True)
    mine, my_pieces = written()
    assert happened.count("read") == number
    assert happened.count("step") <= number + 2  # one in vain for each of the two batches, after a stop
    assert happened[:5] == ["step", "step", "read", "step", "read"]
    assert my_pieces == pieces
    for new, wanted in zip(mine, steps, strict=True):
        for one, other in zip(new, wanted, strict=True):
            assert one[:4] == other[:4]
            assert (one[4] and (one[4].ids, one[4].text, one[4].ended_by)) == (
                other[4] and (other[4].ids, other[4].text, other[4].ended_by)
            )


def test_a_late_reader_takes_no_step_beyond_the_table_of_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it tell of NaN, or stop, later than before."""
    vocabulary = ByteVocabulary("none")
    torch.manual_seed(0)
    model: Any = build_model(DecoderConfig(vocab_size=256, d_model=16, num_heads=2, d_ff=24, num_layers=1, max_len=12))
    generator = Generator(model, vocabulary, GenerationSettings(max_new_tokens=50), "cpu")
    wanted = [[one.ids for one in row] for row in generator.continuations(["a", "abcdef"])]
    monkeypatch.setattr(policy, "reads_late", lambda device: True)
    assert [[one.ids for one in row] for row in generator.continuations(["a", "abcdef"])] == wanted
    assert [len(ids) for [ids] in wanted] == [11, 6]
    asked = iter([False] * 4 + [True])
    told: list[Any] = []
    with pytest.raises(SearchStopped):
        told += generator.stream("a", stop_asked=lambda: next(asked))
    with torch.no_grad():
        model.get_parameter(next(name for name, _ in model.named_parameters())).fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="token 1"):
        generator.generate("a")
