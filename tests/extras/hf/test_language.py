"""Language models of this package as AutoModelForCausalLM of transformers."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import END, LANGUAGE, VOCAB, until
from torch import Tensor

import manyheads
from manyheads.decoding.generation import context_settings
from manyheads.decoding.generator import Generator
from manyheads.decoding.greedy_and_sampling import draw
from manyheads.decoding.search import search_steps
from manyheads.decoding.search_problem import run_to_end
from manyheads.decoding.settings import DecodingSettings, GenerationSettings
from manyheads.errors import ManyHeadsError
from manyheads.nn.attention.observing import attentions_of
from manyheads.seeding import derive_seed
from manyheads.text.of_folder import load_vocabulary

transformers = pytest.importorskip("transformers")

FolderOf = Callable[[str], Path]
LAST = 7  # of every prompt
PROMPTS = [[END, 3, 4, 5, 9, 11, 2, LAST], [END, 8, LAST], [END, 12, 1, 0, LAST]]


def model_of(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def padded(rows: list[list[int]], side: str = "left") -> dict[str, Tensor]:
    """The rows, with padding that the mask alone marks."""
    longest = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        fill = [5] * (longest - len(row))
        ids.append([*fill, *row] if side == "left" else [*row, *fill])
        real, none = [1] * len(row), [0] * len(fill)
        mask.append([*none, *real] if side == "left" else [*real, *none])
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", LANGUAGE)
def test_loss_is_the_mean_over_labels_and_training_lowers_it(kind: str, folder_of: FolderOf) -> None:
    model = model_of(folder_of(kind))
    ids = torch.arange(32).view(2, 16) % 7
    labels = ids.clone()
    labels[1, 8:] = -100
    with torch.no_grad():
        before = model(ids, labels=labels)
        halved = model(ids, labels=labels, num_items_in_batch=2 * 22).loss
    gained = before.logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0][labels[:, 1:] != -100]
    torch.testing.assert_close(before.loss, -gained.mean())
    torch.testing.assert_close(halved, before.loss / 2)
    model.train()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(10):
        optimiser.zero_grad()
        output = model(ids, labels=labels)
        output.loss.backward()
        optimiser.step()
    assert output.logits is None
    assert output.loss < 0.8 * before.loss


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", LANGUAGE)
def test_greedy_generation_is_our_own(kind: str, folder_of: FolderOf) -> None:
    """In float64, prompts of three lengths: padded at either side, and one by one."""
    model = model_of(folder_of(kind)).double()
    generator = _generator(folder_of(kind))
    wanted = [
        until(found[0].ids, END)
        for found in generator.continue_ids([row[1:] for row in PROMPTS], do_sample=False, max_new_tokens=10)
    ]
    assert len({*wanted[0], *wanted[1], *wanted[2]}) > 2, wanted
    for side in ("left", "right"):
        inputs = padded(PROMPTS, side)
        found = model.generate(**inputs, max_new_tokens=10)[:, inputs["input_ids"].shape[1] :]
        assert [until(row, END) for row in found.tolist()] == wanted, side
    for prompt, expected in zip(PROMPTS, wanted, strict=True):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=10)[0, len(prompt) :].tolist()
        assert until(alone, END) == expected


def _generator(folder: Path) -> Generator:
    own = manyheads.load(folder).double()
    return Generator(own, load_vocabulary(folder), device="cpu")


@pytest.mark.parametrize("kind", LANGUAGE)
def test_beams_are_our_own_and_a_cache_changes_nothing(kind: str, folder_of: FolderOf) -> None:
    model = model_of(folder_of(kind)).double()
    rules = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.8, "max_new_tokens": 5}
    settings = DecodingSettings(rules="marian-5", length_penalty_kind="power", **rules)
    inputs = padded(PROMPTS)
    rest = {"suppress_tokens": [0, LAST]}  # as our search: it never writes padding and its first token again
    found = model.generate(**inputs, **rules, **rest)[:, inputs["input_ids"].shape[1] :].tolist()
    source = padded([row[:-1] for row in PROMPTS], "right")
    lengths = source["attention_mask"].sum(1)
    steps = search_steps(
        _Continues(manyheads.load(folder_of(kind)).double()),
        source["input_ids"],
        lengths,
        settings,
        pad_id=0,
        bos_id=LAST,
        eos_id=END,
    )
    wanted = [hypothesis.ids for hypotheses in run_to_end(steps) for hypothesis in hypotheses]
    assert [until(row, END) for row in found] == wanted
    if model.config.settings.get("memory_len", 64) >= 64:  # otherwise the cache forgets what one segment attends to
        again = model.generate(**inputs, **rules, **rest, use_cache=False)[:, inputs["input_ids"].shape[1] :].tolist()
        assert again == found


class _Continues:
    """A language model as a model for search: sources are beginnings of texts."""

    def __init__(self, model: Any) -> None:
        self.model, self.max_len = model, model.max_len

    def start(self, source: Tensor, lengths: Tensor) -> Any:
        context = context_settings(self.model, GenerationSettings())
        return self.model.step(source, self.model.start(len(source), context), lengths)[1]

    def step(self, tokens: Tensor, state: Any, *, logits: bool = False) -> tuple[Tensor, Any]:
        with torch.no_grad():
            scores, state = self.model.step(tokens, state, logits=logits)
        return scores, state


class _OurDraws(transformers.LogitsProcessor):
    """Leaves the one token that our sampling draws: of row r, from the stream of prompt r // 2 and path r % 2."""

    def __init__(self, seed: int, num_rows: int) -> None:
        self.streams = [
            np.random.default_rng(derive_seed(seed, "sample", row // 2, row % 2)) for row in range(num_rows)
        ]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        numbers = torch.tensor([float(stream.random()) for stream in self.streams])
        chosen = draw(scores.log_softmax(-1), numbers, 0.9, 7, 0.95)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen[:, None], 0.0)


def test_sampling_with_our_seed(folder_of: FolderOf) -> None:
    """transformers draws with torch's generator; with our draws in its place its samples are ours."""
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 9}
    inputs = padded(PROMPTS)
    model = model_of(folder_of("transformer-xl")).double()
    draws = transformers.LogitsProcessorList([_OurDraws(4, 2 * len(PROMPTS))])
    found = model.generate(**inputs, **options, top_k=0, logits_processor=draws)[:, inputs["input_ids"].shape[1] :]
    ours = _generator(folder_of("transformer-xl")).continue_ids(
        [row[1:] for row in PROMPTS], **options, seed=4, temperature=0.9, top_k=7, top_p=0.95
    )
    assert [until(row, END) for row in found.tolist()] == [until(one.ids, END) for paths in ours for one in paths]


@pytest.mark.parametrize("kind", LANGUAGE)
def test_saved_and_loaded(kind: str, folder_of: FolderOf, tmp_path: Path) -> None:
    model = model_of(folder_of(kind))
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits.log_softmax(-1), manyheads.load(folder_of(kind)).log_probs(ids))
        model.save_pretrained(tmp_path)
        again = model_of(tmp_path)
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.config.settings == model.config.settings
    assert again.generation_config.to_diff_dict() == model.generation_config.to_diff_dict()
    assert len(list(again.parameters())) == len(list(model.parameters()))  # tied ones are still one
    assert "import manyheads.hf" in (tmp_path / "README.md").read_text("utf-8")


@pytest.mark.parametrize("kind", LANGUAGE)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(kind: str, side: str, folder_of: FolderOf) -> None:
    model = model_of(folder_of(kind)).double()
    inputs = padded([PROMPTS[0], PROMPTS[0][:5]], side)
    real = slice(-5, None) if side == "left" else slice(5)
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPTS[0][:5]]), output_attentions=True)
        found = model(**inputs, output_attentions=True)
        by_id = model(inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, VOCAB))
    torch.testing.assert_close(found.logits[1, real], wanted.logits[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(by_id.logits, found.logits)
    for one, expected in zip(found.attentions, wanted.attentions, strict=True):
        torch.testing.assert_close(one[1, :, real, real], expected[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", LANGUAGE)
def test_attentions_are_those_of_the_model(kind: str, folder_of: FolderOf) -> None:
    model, ids = model_of(folder_of(kind)), torch.tensor([PROMPTS[0]])
    wanted = attentions_of(manyheads.load(folder_of(kind)), ids).decoder
    found = model(ids, output_attentions=True).attentions
    assert len(found) == model.config.num_hidden_layers
    for one, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, expected)
    assert model(ids).attentions is None


def test_attentions_of_generation_have_memory_before_them(folder_of: FolderOf) -> None:
    model = model_of(folder_of("adaptive"))
    ids = torch.tensor([PROMPTS[0]])
    found = model.generate(ids, max_new_tokens=3, output_attentions=True, return_dict_in_generate=True)
    assert [step[0].shape[2:] for step in found.attentions] == [(8, 8), (1, 9), (1, 10)]
    with torch.no_grad():
        whole = model(found.sequences[:, :-1], output_attentions=True).attentions
    torch.testing.assert_close(found.attentions[-1][1], whole[1][:, :, -1:])


@pytest.mark.parametrize("kind", LANGUAGE)
def test_a_cache_goes_on(kind: str, folder_of: FolderOf) -> None:
    """By hand; from one beginning in two ways; and through the result of `generate`."""
    model = model_of(folder_of(kind)).double()
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        first = model(ids[:, :5], use_cache=True)
        branch = copy.deepcopy(first.past_key_values)
        second = model(ids[:, 5:], past_key_values=first.past_key_values)
        tokens = [model(ids[:, place : place + 1], past_key_values=branch).logits for place in range(5, 8)]
    assert second.past_key_values.get_seq_length() == branch.get_seq_length() == 8
    if kind != "vanilla":  # it reads again from another beginning
        torch.testing.assert_close(torch.cat(tokens, 1), second.logits, rtol=1e-9, atol=1e-9)
    whole = model.generate(ids, max_new_tokens=8, eos_token_id=-1)
    part = model.generate(ids, max_new_tokens=4, eos_token_id=-1, return_dict_in_generate=True)
    rest = model.generate(part.sequences, past_key_values=part.past_key_values, max_new_tokens=4, eos_token_id=-1)
    assert torch.equal(rest, whole)
    with pytest.raises(ManyHeadsError, match=r"copy\.deepcopy"):
        branch.crop(1)


def test_memory_in_training(folder_of: FolderOf) -> None:
    model = model_of(folder_of("transformer-xl")).train()
    ids = torch.arange(12)[None] % 7
    alone = model(ids[:, 6:], labels=ids[:, 6:]).loss
    memory = model(ids[:, :6], use_cache=True).past_key_values
    loss = model(ids[:, 6:], labels=ids[:, 6:], past_key_values=memory).loss
    loss.backward()
    assert loss != alone
    with pytest.raises(ManyHeadsError, match="passes nothing on"):
        model_of(folder_of("reformer")).train()(ids, use_cache=True)


def test_generation_ends_at_the_last_position(folder_of: FolderOf) -> None:
    model = model_of(folder_of("reformer"))
    found = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=500, eos_token_id=-1)
    assert found.shape[1] == model.config.max_position_embeddings + 1
    with pytest.raises(ManyHeadsError, match="the model has 64 positions; shorten"):
        model.generate(torch.ones(1, 65, dtype=torch.int64))


IDS = torch.tensor([[END, 1, 2]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds is not supported"),
        ({"head_mask": torch.ones(2, 2)}, "head_mask is not supported"),
        ({"position_ids": IDS}, "position_ids is not supported"),
        ({"token_type_ids": IDS}, "no token types"),
        ({"output_hidden_states": True}, "put a forward hook"),
        ({"mems": ()}, "mems is no argument of ManyHeadsForCausalLM"),
        ({"past_key_values": transformers.DynamicCache()}, "past_key_values is a DynamicCache"),
        ({"input_ids": IDS + 2}, "input_ids holds 21; ids are 0 to 19"),
        ({"input_ids": None}, "input_ids is missing"),
        ({"input_ids": IDS.float()}, "input_ids is a torch.float32"),
        ({"input_ids": IDS[0]}, r"input_ids has shape \(3,\)"),
        ({"input_ids": IDS[:, :0]}, "at least one token"),
        ({"labels": IDS - 3}, "labels holds -2; ids are 0 to 19, and -100"),
        ({"attention_mask": torch.ones(1, 4)}, r"attention_mask has shape \(1, 4\); it must be \(1, 3\)"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str, folder_of: FolderOf) -> None:
    with pytest.raises(ManyHeadsError, match=message):
        model_of(folder_of("transformer-xl"))(**{"input_ids": IDS, **arguments})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_implementation": "static"}, "cache_implementation is 'static'"),
        ({"prompt_lookup_num_tokens": 2}, "stateful models"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds"),
        ({"head_mask": torch.ones(2, 2)}, "head_mask"),
    ],
)
def test_refusals_of_generation(options: dict[str, Any], message: str, folder_of: FolderOf) -> None:
    with pytest.raises((ManyHeadsError, ValueError), match=message):
        model_of(folder_of("transformer-xl")).generate(IDS, max_new_tokens=2, **options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "transformer"}, "load it with AutoModelForSeq2SeqLM"),
        ({"architecture": "bag"}, "there are: transformer, transformer-xl, reformer"),
        ({"architecture": "reformer", "vocab_size": 9, "num_hash": 3}, "num_hashes"),
        ({"architecture": "reformer", "vocab_size": 9, "causal": False, "visible": "chunk"}, "attends to later tokens"),
        (None, "settings are missing"),
    ],
)
def test_wrong_settings(settings: Any, message: str) -> None:
    with pytest.raises(ManyHeadsError, match=message):
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("manyheads", settings=settings))


def test_a_revision_of_a_local_folder_is_that_of_transformers(folder_of: FolderOf) -> None:
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        assert auto.from_pretrained(folder_of("reformer"), revision="main") is not None


def test_each_class_names_the_other(folder_of: FolderOf) -> None:
    with pytest.raises(ManyHeadsError, match="load it with AutoModelForCausalLM"):
        transformers.AutoModelForSeq2SeqLM.from_pretrained(folder_of("transformer-xl"))
    with pytest.raises(ManyHeadsError, match="load it with AutoModelForSeq2SeqLM"):
        model_of(folder_of("transformer"))
    with pytest.raises(ManyHeadsError, match="quantization_config is no option"):
        transformers.AutoModelForCausalLM.from_pretrained(
            folder_of("reformer"), quantization_config={"load_in_8bit": 1}
        )
