"""The tokenizers of this package as AutoTokenizer of transformers; a pipeline and a Trainer with them."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import LANGUAGE

import manyheads
from manyheads.catalogue import build_model
from manyheads.decoding.settings import GenerationSettings
from manyheads.errors import ManyHeadsError
from manyheads.models.pretrained import save_pretrained
from manyheads.text.of_folder import learn_vocabulary
from manyheads.text.settings import TokenizerSettings, VocabularySettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabulary import ByteVocabulary, Vocabulary
from manyheads.text.word_sides import WordSides

transformers = pytest.importorskip("transformers")

TEXT = "It was the best of times,\nit was the worst of times. </s> é"
MARKS = ["<pad>", "<s>", "</s>", "<unk>"]
SIDES = WordSides([*MARKS, "a", "b"], [*MARKS, "x", "y", "z"], {"pad": 0, "bos": 1, "eos": 2})
VOCABULARIES: dict[str, Callable[[], Vocabulary]] = {
    "bytes": ByteVocabulary,
    "byte documents": lambda: ByteVocabulary("files"),
    "byte lines": lambda: ByteVocabulary("lines"),
    "bpe": lambda: learn_vocabulary(TEXT.split("\n"), VocabularySettings(level="bpe", vocab_size=300)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a folder with a tokenizer, as `save_pretrained` of transformers writes it; the text is read again."""

    def folder(tokenizer: Any) -> Path:
        from manyheads.extras.hf.tokenizer import ManyHeadsTokenizer

        path = tmp_path_factory.mktemp("tokenizer")
        ManyHeadsTokenizer(tokenizer, model_max_length=99).save_pretrained(path)
        return path

    return folder


def loaded(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_a_language_model(kind: str, saved: Callable[..., Path]) -> None:
    vocabulary = VOCABULARIES[kind]()
    tokenizer = loaded(saved(vocabulary))
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == [vocabulary.start_id, *vocabulary.encode(TEXT)]
    assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == vocabulary.encode(TEXT)
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    assert tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(ids)) == ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (vocabulary.start_id, vocabulary.end_id)
    assert (tokenizer.model_max_length, len(tokenizer)) == (99, vocabulary.vocab_size)
    batch = tokenizer([TEXT, "It"], padding=True, return_tensors="pt")
    assert batch["attention_mask"].sum(1).tolist() == [len(ids), len(vocabulary.encode("It")) + 1]
    assert (batch["input_ids"][1] == tokenizer.pad_token_id).sum() == (batch["attention_mask"][1] == 0).sum()
    assert tokenizer.decode(batch["input_ids"][1], skip_special_tokens=True) == "It"
    assert copy.deepcopy(tokenizer)(TEXT)["input_ids"] == ids
    with pytest.raises(ManyHeadsError, match="text_target is for translators"):
        tokenizer(TEXT, text_target=TEXT)
    with pytest.raises(ManyHeadsError, match="a pair of texts is not supported"):
        tokenizer(TEXT, TEXT)


def test_two_vocabularies(saved: Callable[..., Path]) -> None:
    tokenizer = loaded(saved(SIDES))
    found = tokenizer(["a b", "b"], text_target=["z y x", "x"], padding=True)
    assert found["input_ids"] == [[1, 4, 5, 2], [1, 5, 2, 0]]
    assert found["labels"] == [[6, 5, 4, 2], [4, 2, 0, 0]]
    assert tokenizer(text_target="z")["input_ids"] == [6, 2]
    assert tokenizer("a")["input_ids"] == [1, 4, 2]  # the side of sources again
    assert tokenizer.batch_decode([[1, 6, 5, 2, 0]], skip_special_tokens=True) == ["z y"]
    assert tokenizer.decode([1, 6, 5, 2]) == "<s> z y </s>"
    assert tokenizer.decode([1, 4, 5, 2], skip_special_tokens=True, use_source_tokenizer=True) == "a b"
    assert tokenizer.num_special_tokens_to_add() == 1


def test_tags(saved: Callable[..., Path]) -> None:
    whole = Tokenizer.train(["two words"], TokenizerSettings(vocab_size=300), languages=["de", "fr"])
    tokenizer = loaded(saved(whole))
    ids = tokenizer(">>de<< two words")["input_ids"]
    assert ids == [*whole.source.encode(">>de<< two words"), whole.eos_id]
    with pytest.raises(ManyHeadsError, match="text 1 has no target language"):
        tokenizer("two words")


def test_without_the_class_nothing_is_read_in_another_way(saved: Callable[..., Path]) -> None:
    """transformers without `import manyheads.hf` would take tokenizer.json for a tokenizer without EOS."""
    folder = saved(Tokenizer.train(["two words"], TokenizerSettings(vocab_size=300)))
    assert not (folder / "tokenizer.json").exists()


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Transformer-XL of bytes with random weights."""
    torch.manual_seed(0)
    model = build_model(replace(LANGUAGE["transformer-xl"], vocab_size=256))
    folder = tmp_path_factory.mktemp("bytes") / "model"
    save_pretrained(model, folder, tokenizer=ByteVocabulary(), generation=GenerationSettings(do_sample=False))
    return folder


def test_pipeline(bytes_model: Path) -> None:
    pipe = transformers.pipeline("text-generation", model=str(bytes_model))
    prompts = ["It was ", "A longer prompt "]
    found = pipe(prompts, max_new_tokens=6, batch_size=2)
    with torch.inference_mode():
        wanted = manyheads.Generator.from_pretrained(bytes_model, device="cpu").generate(prompts, max_new_tokens=6)
    assert [one[0]["generated_text"] for one in found] == [a + b for a, b in zip(prompts, wanted, strict=True)]
    [alone] = pipe("It was ", max_new_tokens=6, return_full_text=False)
    assert alone["generated_text"] == wanted[0]


def test_trainer(bytes_model: Path, tmp_path: Path) -> None:
    """Texts of unlike lengths; a checkpoint, and going on from it."""
    pytest.importorskip("accelerate")
    tokenizer = loaded(bytes_model)
    texts = [{"input_ids": tokenizer(text)["input_ids"]} for text in ["abcabcabc\n", "abcab"] * 8]

    def trained(steps: int, resume: bool) -> Any:
        transformers.set_seed(1)
        model = transformers.AutoModelForCausalLM.from_pretrained(bytes_model)
        options = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=steps,
            save_steps=6,
            learning_rate=0.01,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            eval_strategy="steps",
            eval_steps=6,
        )
        collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
        trainer = transformers.Trainer(model, options, collate, texts, texts[:2], processing_class=tokenizer)
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer

    trainer = trained(12, False)
    losses = [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]
    assert losses[1] < losses[0] < 5.6
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-12")
    ids = torch.tensor([texts[0]["input_ids"]])
    assert torch.equal(again(ids).logits, trainer.model.eval()(ids).logits)
    assert loaded(tmp_path / "checkpoint-12")("abc")["input_ids"] == tokenizer("abc")["input_ids"]
    longer = trained(18, True)
    assert longer.state.global_step == 18
    assert longer.evaluate()["eval_loss"] < losses[1]
