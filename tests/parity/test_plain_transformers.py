"""Random models that fairseq, OpenNMT-py and JoeyNMT made, from their checkpoints (`make_plain_transformers.py`)."""

import shutil
from pathlib import Path

import pytest
import torch
from marian_models import write_peer_folder
from safetensors.torch import load_file

from manyheads.cli.main import main
from manyheads.decoding.translator import Translator
from manyheads.extras.exports import ExportOptions
from manyheads.extras.exports.engine import export_model
from manyheads.models.pretrained import load, read_config
from manyheads.text.of_folder import load_tokenizer

FOLDER = Path(__file__).parent / "fixtures"
PEERS = {"fairseq": "fairseq/Transformer", "opennmt": "opennmt-py/Transformer", "joeynmt": "joeynmt/Transformer"}
CASES = [f"{peer}-{number}" for peer in PEERS for number in range(3)]


@pytest.mark.parametrize("case", CASES)
def test_a_converted_checkpoint_has_the_logits_of_the_peer(case, tmp_path, capsys):
    peer = PEERS[case.partition("-")[0]]
    arguments = ["convert", str(FOLDER / case), "--from", peer, "--from-pickle", "--output", str(tmp_path / "ours")]
    assert main(arguments) == 0, capsys.readouterr().err
    model = load(tmp_path / "ours")
    expected = load_file(FOLDER / case / "expected.safetensors")
    with torch.no_grad():
        lengths = expected["src_mask"].sum(1)
        found = model.log_probs(expected["src"], lengths, expected["decoder_input_ids"])
    wanted = expected["logits"].log_softmax(-1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("case", "start"), [("fairseq-0", 2), ("joeynmt-1", 2)])
def test_vocabularies_and_a_sentencepiece_model_make_a_tokenizer(case, start, tmp_path, capsys):
    """fairseq starts from </s>, JoeyNMT from <s>; both have the id 2."""
    pytest.importorskip("sentencepiece")
    folder = tmp_path / "theirs"
    shutil.copytree(FOLDER / case, folder)
    shutil.copy(write_peer_folder(tmp_path / "marian") / "source.spm", folder / "spm.model")
    arguments = ["convert", str(folder), "--from", PEERS[case.partition("-")[0]], "--from-pickle"]
    assert main([*arguments, "--output", str(tmp_path / "ours")]) == 0
    assert f"next: manyheads translate {tmp_path / 'ours'}" in capsys.readouterr().out
    tokenizer = load_tokenizer(tmp_path / "ours")
    assert (tokenizer.target.bos_id, tokenizer.target.pad_id) == (start, 1)
    assert tokenizer.target.eos_id == {"fairseq-0": 2, "joeynmt-1": 3}[case]
    assert tokenizer.target.decode([4, 5]) == "w0w1"
    texts = ["w0 w1", "w2", "w3 w4 w5"]
    found = [one[0] for one in Translator.from_pretrained(tmp_path / "ours").translate_nbest(texts, num_beams=1)]
    pytest.importorskip("ctranslate2")
    # Where the start is EOS, an export that bans the start would never end.
    peer = Translator.from_pretrained(tmp_path / "ours", engine="ctranslate2")
    others = [one[0] for one in peer.translate_nbest(texts, num_beams=1)]
    assert [one.tokens for one in others] == [one.tokens for one in found]
    assert export_model(tmp_path / "ours", tmp_path / "ct2", ExportOptions(to="ctranslate2")).check is not None


def test_a_flag_of_a_line_is_no_part_of_the_piece(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    folder = tmp_path / "theirs"
    shutil.copytree(FOLDER / "fairseq-0", folder)
    shutil.copy(write_peer_folder(tmp_path / "marian") / "source.spm", folder / "spm.model")
    lines = (folder / "dict.de.txt").read_text("utf-8").splitlines()
    (folder / "dict.de.txt").write_text("\n".join([f"{lines[0]} #fairseq:overwrite", *lines[1:]]) + "\n", "utf-8")
    arguments = ["convert", str(folder), "--from", PEERS["fairseq"], "--from-pickle"]
    assert main([*arguments, "--output", str(tmp_path / "ours")]) == 0
    assert load_tokenizer(tmp_path / "ours").target.decode([4, 5]) == "w0w1"


@pytest.mark.parametrize("is_gated", [False, True])
def test_silu_is_swish_unless_it_is_gated(is_gated: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some versions of OpenNMT-py also multiply by a second product, w_3, where the activation is silu."""
    saved = torch.load(FOLDER / "opennmt-0" / "checkpoint_best.pt", weights_only=False)
    saved["opt"].pos_ffn_activation_fn = "silu"
    if is_gated:
        name = "encoder.transformer.0.feed_forward.w_1.weight"
        saved["model"][name.replace("w_1", "w_3")] = saved["model"][name].clone()
    folder = tmp_path / "theirs"
    shutil.copytree(FOLDER / "opennmt-0", folder)
    torch.save(saved, folder / "checkpoint_best.pt")
    arguments = ["convert", str(folder), "--from", PEERS["opennmt"], "--from-pickle"]
    assert main([*arguments, "--output", str(tmp_path / "ours")]) == (2 if is_gated else 0)
    if is_gated:
        assert "w_3.weight is unknown" in capsys.readouterr().err
    else:
        assert read_config(tmp_path / "ours").activation == "swish"


def test_a_vocabulary_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(FOLDER / "fairseq-0", folder)
    (folder / "spm.model").write_bytes(b"")
    (folder / "dict.en.txt").write_text("".join(f"w{number} 1\n" for number in range(40)))
    arguments = ["convert", str(folder), "--from", PEERS["fairseq"], "--from-pickle", "--output", str(tmp_path / "x")]
    assert main(arguments) == 2
    assert "has 44 pieces, the model 11" in capsys.readouterr().err


def test_a_pickle_is_read_only_if_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", str(FOLDER / "fairseq-0"), "--from", "fairseq/Transformer", "--output", str(tmp_path / "x")]
    assert main(arguments) == 2
    assert "With --from-pickle its tensors are read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "old", "new", "said"),
    [
        ("joeynmt-0", "alpha: 1.0", "alpha: 0.8", "encoder.alpha is 0.8"),
        ("joeynmt-0", "type: transformer", "type: recurrent", "type is 'recurrent'"),
        ("joeynmt-0", "activation: relu", "activation: swiss", "the activation is 'swiss'"),
    ],
)
def test_what_our_model_does_not_have_is_named(case, old, new, said, tmp_path, capsys):
    folder = tmp_path / "theirs"
    shutil.copytree(FOLDER / case, folder)
    text = (folder / "config.yaml").read_text()
    text = text.replace("  encoder:\n", f"  encoder:\n    {new}\n") if old not in text else text.replace(old, new)
    (folder / "config.yaml").write_text(text)
    arguments = ["convert", str(folder), "--from", PEERS["joeynmt"], "--from-pickle", "--output", str(tmp_path / "x")]
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
