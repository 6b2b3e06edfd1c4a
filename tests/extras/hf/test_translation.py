"""Translators of this package as AutoModelForSeq2SeqLM of transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import SPECIAL, TRANSLATION, VOCAB, until

import manyheads
from manyheads.data.batch import PairBatch
from manyheads.decoding.search import search_steps
from manyheads.decoding.search_problem import run_to_end
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import ManyHeadsError
from manyheads.files.verify import MANIFEST, make_manifest
from manyheads.nn.attention.observing import attentions_of

transformers = pytest.importorskip("transformers")

FolderOf = Callable[[str], Path]
SOURCES = torch.tensor([[9, 5, 20, 21, 7, 2], [4, 3, 2, 0, 0, 0]])
LENGTHS = torch.tensor([6, 3])
MASK = (torch.arange(6) < LENGTHS[:, None]).long()
TARGETS = torch.tensor([[5, 9, 8, 7, 2], [6, 4, 2, -100, -100]])  # labels
RIGHT = {"input_ids": SOURCES, "attention_mask": MASK}
LEFT = {
    "input_ids": torch.stack([SOURCES[0], SOURCES[1].roll(3)]),
    "attention_mask": torch.stack([MASK[0], MASK[1].roll(3)]),
}


def model_of(folder: Path) -> Any:
    return transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)


@pytest.mark.parametrize("inputs", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("kind", TRANSLATION)
def test_loss_and_logits(kind: str, inputs: dict[str, Any], folder_of: FolderOf) -> None:
    model, own = model_of(folder_of(kind)).double(), manyheads.load(folder_of(kind)).double()
    target = torch.cat([torch.ones(2, 1, dtype=torch.int64), TARGETS.clamp(min=0)], 1)
    batch = PairBatch(SOURCES, LENGTHS, target, torch.tensor([6, 4]), 0)
    with torch.no_grad():
        found = model(**inputs, labels=TARGETS)
        wanted, log_probs = own(batch), own.log_probs(SOURCES, LENGTHS, target[:, :-1])
    torch.testing.assert_close(found.loss, wanted.nll_sum / 8)
    torch.testing.assert_close(found.logits.log_softmax(-1)[TARGETS >= 0], log_probs[TARGETS >= 0])
    model.train()(**inputs, labels=TARGETS).loss.backward()
    assert model.model.body.source_embedding.weight.grad.abs().sum() > 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", TRANSLATION)
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 1, "no_repeat_ngram_size": 1}, {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.7}],
    ids=str,
)
def test_generate_is_our_own_search(kind: str, options: dict[str, Any], folder_of: FolderOf) -> None:
    """In float64, with and without a cache, with padding at either side."""
    model, own = model_of(folder_of(kind)).double(), manyheads.load(folder_of(kind)).double()
    options = {**options, "max_new_tokens": 9, "early_stopping": False}
    settings = DecodingSettings(rules="marian-5", length_penalty_kind="power", **{"length_penalty": 1.0, **options})
    ids = {f"{name}_id": index for name, index in SPECIAL.items()}
    with torch.no_grad():
        found = run_to_end(search_steps(own, SOURCES, LENGTHS, settings, **ids))
    wanted = [hypothesis.ids for hypotheses in found for hypothesis in hypotheses]
    assert len({index for row in wanted for index in row}) > 2, wanted
    for inputs, use_cache in ((RIGHT, True), (LEFT, True), (RIGHT, False)):
        rows = model.generate(**inputs, **options, use_cache=use_cache)[:, 1:].tolist()
        assert [until(row, SPECIAL["eos"]) for row in rows] == wanted, use_cache


@pytest.mark.parametrize("kind", TRANSLATION)
def test_saved_and_loaded(kind: str, folder_of: FolderOf, tmp_path: Path) -> None:
    model = model_of(folder_of(kind))
    model.save_pretrained(tmp_path)
    again = model_of(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**RIGHT, labels=TARGETS).logits, model(**RIGHT, labels=TARGETS).logits)
    assert torch.equal(again.generate(**RIGHT, max_new_tokens=5), model.generate(**RIGHT, max_new_tokens=5))
    assert again.config.is_encoder_decoder
    assert "AutoModelForSeq2SeqLM" in (tmp_path / "README.md").read_text("utf-8")


@pytest.mark.parametrize("kind", TRANSLATION)
def test_attentions(kind: str, folder_of: FolderOf) -> None:
    model, own = model_of(folder_of(kind)).double(), manyheads.load(folder_of(kind)).double()
    target = torch.tensor([[1, 5, 9, 8]] * 2)
    wanted = attentions_of(own, SOURCES, LENGTHS, target)
    found = model(**RIGHT, decoder_input_ids=target, output_attentions=True)
    for name in ("encoder", "decoder", "cross"):
        for one, expected in zip(found[f"{name}_attentions"], getattr(wanted, name), strict=True):
            torch.testing.assert_close(one[0], expected[0])
    left = model(**LEFT, decoder_input_ids=target, output_attentions=True)
    torch.testing.assert_close(left.cross_attentions[0][1, :, :, 3:], found.cross_attentions[0][1, :, :, :3])
    torch.testing.assert_close(left.encoder_attentions[0][1, :, 3:, 3:], found.encoder_attentions[0][1, :, :3, :3])
    options = {"max_new_tokens": 3, "output_attentions": True, "return_dict_in_generate": True}
    if "lsh" in str(model.config.settings["attention"]):  # the cache of hashed layers
        with pytest.raises(ManyHeadsError, match="no matrix of attention weights in this pass"):
            model.generate(**RIGHT, **options)
    else:
        steps = model.generate(**RIGHT, **options)
        assert [one[0].shape[2:] for one in steps.cross_attentions][:2] == [(1, 6), (1, 6)]
        assert [one[0].shape[2:] for one in steps.decoder_attentions][:2] == [(1, 1), (1, 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decoder_inputs_embeds": torch.zeros(1, 3, 8)}, "decoder_inputs_embeds is not supported"),
        ({"cross_attn_head_mask": torch.zeros(1)}, "cross_attn_head_mask is no argument"),
        ({"decoder_input_ids": None}, "decoder_input_ids is missing"),
        ({"decoder_input_ids": torch.full((2, 1), VOCAB)}, f"decoder_input_ids holds {VOCAB}"),
        ({"input_ids": SOURCES + 9}, "input_ids holds 29; ids are 0 to 22"),
        ({"decoder_attention_mask": torch.tensor([[0, 1], [1, 1]]), "use_cache": True}, "a cache cannot skip"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str, folder_of: FolderOf) -> None:
    model = model_of(folder_of("transformer"))
    with pytest.raises(ManyHeadsError, match=message):
        model(**{**RIGHT, "decoder_input_ids": torch.ones(2, 2, dtype=torch.int64), **arguments})


def test_targets_with_padding_before_them(folder_of: FolderOf) -> None:
    model = model_of(folder_of("transformer")).double()
    target = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        wanted = model(SOURCES[:1], decoder_input_ids=target).logits
        found = model(
            SOURCES[:1],
            decoder_input_ids=torch.tensor([[0, 0, 1, 5, 9]]),
            decoder_attention_mask=torch.tensor([[0, 0, 1, 1, 1]]),
        )
    torch.testing.assert_close(found.logits[:, 2:], wanted)


def test_from_folder(folder_of: FolderOf, tmp_path: Path) -> None:
    """Also of a folder whose config.json does not name its type."""
    folder = tmp_path / "model"
    shutil.copytree(folder_of("transformer"), folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config.pop("model_type") == "manyheads"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ManyHeadsError, match="damaged"):  # it differs from its manifest
        manyheads.hf.from_folder(folder)
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).write_text(make_manifest(folder), encoding="utf-8")
    assert type(manyheads.hf.from_folder(folder)).__name__ == "ManyHeadsForSeq2SeqLM"
    assert manyheads.hf.tokenizer_from_folder(folder)("w1")["input_ids"]
