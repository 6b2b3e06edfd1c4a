"""The translator that ships with the package: how it is made and copied, and that it is what its card says."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import TINY, changed

from manyheads.catalogue import PRESETS, build_model
from manyheads.config.build import resolve
from manyheads.config.files import load_yaml, to_yaml
from manyheads.data.corpora import NOTICES, load_tatoeba
from manyheads.decoding.translator import Translator
from manyheads.errors import ConfigError, ModelFileError, SaveError
from manyheads.evaluation.bleu import corpus_bleu
from manyheads.extras.sample_model import command, making
from manyheads.models.pretrained import data_notice, save_pretrained
from manyheads.tasks.translation.settings import TrainConfig
from manyheads.text.of_folder import tokenizer_of_folder
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer
from manyheads.training.run.loop import train

REPOSITORY = Path(__file__).parents[3]


def test_the_recipe_is_the_preset() -> None:
    recipe = resolve(TrainConfig, [load_yaml(REPOSITORY / "recipes" / "sample-model.yaml")])
    assert asdict(recipe) == asdict(PRESETS["sample"]())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two steps of the preset with a small part of its data and vocabulary."""
    config = PRESETS["sample"]()
    small = replace(
        config,
        run_dir=str(tmp_path_factory.mktemp("run") / "run"),
        num_threads=1,
        data=replace(config.data, num_train_pairs=500),
        tokenizer=replace(config.tokenizer, vocab_size=400),
        training=replace(config.training, max_steps=2, plots=False, tensorboard=False),
        validation=replace(config.validation, bleu_sentences=0, num_samples=0),
    )
    train(small)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "PRESETS", {"sample": lambda: small})
        yield Path(small.run_dir)


@pytest.fixture
def few_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of the test pairs, because a model of two steps writes long translations."""
    monkeypatch.setattr(making, "load_tatoeba", lambda split: load_tatoeba(split)[:4])


@pytest.mark.usefixtures("few_sentences")
def test_a_run_becomes_the_packaged_model(run_dir, tmp_path, monkeypatch, manyheads, capsys):
    folder, copy = tmp_path / "packaged", tmp_path / "models" / "en-de"
    monkeypatch.setattr(command, "FOLDER", folder)
    assert manyheads("sample-model", copy) == 2
    assert "has no sample model" in (said := capsys.readouterr().err)
    assert "`make sample-model` trains it" in said
    assert making.main([str(run_dir), str(folder)]) == 0
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    card = (folder / "README.md").read_text()
    for part in (
        "English-German sentence pairs of tatoeba.org by way of www.manythings.org/anki, by many authors, CC BY 2.0 FR",
        "license: apache-2.0",
        "2 steps in fp32, num_threads 1, seed 1",
        "keep this notice",
        "4 to 20 words only",
    ):
        assert part in card.replace("\n", " "), part
    assert manyheads("sample-model", copy) == 0
    assert "translate" in capsys.readouterr().out
    translator = Translator.from_pretrained(copy)
    assert translator.languages == (("en", "de"),)
    model = translator.model
    assert isinstance(model, torch.nn.Module)
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in model.state_dict().values())
    assert manyheads("sample-model", copy) == 0
    assert "was there already" in capsys.readouterr().out
    (copy / "config.json").write_text("{}")
    assert manyheads("sample-model", copy) == 2
    assert "is not this model, so it is not replaced" in capsys.readouterr().err
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="Install manyheads again"):
        command.packaged_model()


@pytest.mark.usefixtures("few_sentences")
def test_only_a_run_of_the_preset_becomes_it(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no run folder"):
        making.make(tmp_path, tmp_path / "model")
    other = replace(making.PRESETS["sample"](), seed=2, device="auto")
    (tmp_path / "config.yaml").write_text(to_yaml(other))
    with pytest.raises(ConfigError, match="other settings of seed, device"):
        making.make(tmp_path, tmp_path / "model")


def test_the_card_of_a_run_names_embedded_data(run_dir: Path) -> None:
    card = (run_dir / "model" / "README.md").read_text()
    assert "Its training data: English-German sentence pairs of tatoeba.org" in card
    assert "CC BY 2.0 FR (https://creativecommons.org/licenses/by/2.0/fr/)" in card


NOTICE = "English-German sentence pairs of tatoeba.org by way of www.manythings.org/anki, by many authors, CC BY 2.0 FR"
MADE_FROM_A_MODEL = {
    "prune": "prune {run} --heads encoder.0.self:0 --output {out}",
    "average": "average {run} --last 1 --output {out}",
    "convert": "convert {other} --to transformers/Marian --output {out}",
    "export": "export {other} --to transformers --output {out} --no-check",
    "push": "push {run} owner/name --dry-run",
}


@pytest.mark.parametrize("command", MADE_FROM_A_MODEL.values(), ids=MADE_FROM_A_MODEL)
def test_what_is_made_from_a_model_keeps_its_notice(run_dir, tmp_path, manyheads, capsys, command):
    output, other = tmp_path / "model", tmp_path / "other"
    if "{other}" in command:  # a model that the formats of others hold
        tokenizer = tokenizer_of_folder(run_dir / "model")
        sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), tokenizer.vocab_size)
        model = build_model(replace(PRESETS["debug"]().model, **sizes))
        save_pretrained(model, other, tokenizer=tokenizer, data="embedded:tatoeba-en-de")
    assert manyheads(*command.format(run=run_dir, other=other, out=output).split()) == 0
    out = capsys.readouterr().out
    assert (output / "README.md").read_text().count(NOTICE) == 1 if output.exists() else NOTICE in out


def test_a_notice_goes_through_python_training_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notice of a card is kept as it stands there; a run's own data is added, once, also after a break."""
    own, digits = "Sentences of the harbour office, for use in the harbour only.", "digits, in the public domain"
    monkeypatch.setitem(NOTICES, "copy-task", digits)
    first, second = (changed(TINY, run_dir=str(tmp_path / name), training={"max_steps": 2}) for name in "ab")
    train(first)
    translator = Translator.from_pretrained(first.run_dir)
    card = f"# A model\n\n## Data and licence\n\n{own}\n\n## Limits\n\nMany.\n"
    save_pretrained(translator.model, tmp_path / "own", tokenizer=translator.tokenizer, card=card)
    Translator.from_pretrained(tmp_path / "own").save_pretrained(tmp_path / "model")
    train(changed(second, initial={"model": str(tmp_path / "model")}))
    shutil.rmtree(tmp_path / "model")
    train(changed(second, initial={"model": str(tmp_path / "model")}, training={"max_steps": 4}))
    card = (tmp_path / "b" / "model" / "README.md").read_text()
    assert [card.count(text) for text in (own, digits, "Many.")] == [1, 1, 0]


def test_a_run_of_0_1_0_has_its_notice_from_its_settings(run_dir: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(run_dir, old)
    assert NOTICE in data_notice(old / "model")
    (old / "model" / "README.md").write_text("# A transformer trained with manyheads\n")
    assert NOTICE in data_notice(old / "model")
    (old / "config.yaml").write_text("data: {path: data/mine}\n")
    assert data_notice(old / "model") == ""


has_model = pytest.mark.skipif(
    not (command.FOLDER / "manifest.json").is_file(),
    reason=f"the package has no sample model yet; `{command.HOW_TO_TRAIN}` trains it, in about 30 minutes",
)


@pytest.mark.slow
@has_model
def test_the_packaged_model_has_the_bleu_of_its_card() -> None:
    assert sum(path.stat().st_size for path in command.FOLDER.iterdir()) < 9_000_000
    translator = Translator.from_pretrained(command.packaged_model(), "cpu")
    pairs = load_tatoeba("test")
    found = corpus_bleu(
        translator.translate([source for source, _ in pairs]), [reference for _, reference in pairs], languages={"de"}
    )
    stated = re.search(r"\| BLEU \| ([0-9.]+) \| `(.*)` \|", (command.FOLDER / "README.md").read_text())
    assert found.value == pytest.approx(float(stated[1]), abs=0.3)
    assert found.signature == stated[2].replace("\\|", "|")


@has_model
def test_an_empty_folder_becomes_the_model_if_it_can_be_replaced(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    assert command.copy_model(tmp_path / "empty")
    assert not command.copy_model(tmp_path / "empty")
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    for place in (Path(), tmp_path / "here", tmp_path / "link"):
        with pytest.raises(SaveError, match=r"is empty and cannot be replaced .*; name a new folder in it"):
            command.copy_model(place)
    assert Path.cwd() == tmp_path / "here"
    (tmp_path / "nowhere").symlink_to("gone")
    with pytest.raises(SaveError, match="is a link to nothing"):
        command.copy_model(tmp_path / "nowhere")
    (tmp_path / "nowhere").unlink()
    with pytest.raises(SaveError, match=r"File name too long .* choose another"):
        command.copy_model(tmp_path / ("x" * 300))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "here", "link"]


@has_model
def test_the_packaged_model_normalises_text_as_the_package_does_now() -> None:
    new = Tokenizer.train(["a b", "c"], TokenizerSettings(vocab_size=300, normalize_spaces=True))
    stored = json.loads((command.FOLDER / "tokenizer.json").read_text())
    assert stored["normalizer"] == json.loads(new.files()["tokenizer.json"])["normalizer"]
