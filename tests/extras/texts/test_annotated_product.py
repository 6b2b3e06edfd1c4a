"""A model of the Annotated Transformer in the product: converted, it translates ids, and text with its vocabularies."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import Translator
from manyheads.cli.main import main
from manyheads.errors import ConfigError, DataError, RequestError
from manyheads.extras.peers.convert import export_folder, import_folder
from manyheads.extras.texts.annotated_transformer import greedy_decode, make_model

SIZES = {"src_vocab": 17, "tgt_vocab": 19, "N": 1, "d_model": 16, "d_ff": 32, "h": 4}
MARKS = ["<s>", "</s>", "<blank>", "<unk>"]
WORDS = ([*MARKS, *"abcdefghijklm"], [*MARKS, *"ABCDEFGHIJKLMNO"])


def saved(folder: Path, *, words: bool = False, **config: Any) -> Any:
    """A model of the text's with random weights that ends its sentences, in a folder as the page describes."""
    torch.manual_seed(3)
    model = make_model(**SIZES).eval()
    folder.mkdir()
    torch.save(model.state_dict(), folder / "final.pt")
    (folder / "config.json").write_text(json.dumps({"model": SIZES, **config}), "utf-8")
    for name, side in zip(("vocab_src.txt", "vocab_tgt.txt"), WORDS, strict=True) if words else ():
        (folder / name).write_text("".join(f"{word}\n" for word in side), "utf-8")
    return model


def by_the_text(model: Any, ids: list[int], max_len: int) -> list[int]:
    """The text's greedy search until `</s>`, without ids that a search of ours never writes."""
    with torch.no_grad():
        model.generator.proj.bias[[0, 2]] = -1e9  # <s> and <blank>
    found = greedy_decode(model, torch.tensor([ids]), torch.ones(1, 1, len(ids)), max_len + 1, 0)[0, 1:].tolist()
    return found[: found.index(1)] if 1 in found else found


def test_ids_through_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(tmp_path / "theirs")
    done = import_folder(tmp_path / "theirs", tmp_path / "ours", from_pickle=True)
    assert done.next_command == f"manyheads translate {tmp_path / 'ours'} --ids"
    assert any("translates ids" in note for note in done.notes)
    assert any("never writes padding and the start symbol (here 0 and 2)" in note for note in done.notes)
    torch.manual_seed(0)
    sources = [torch.randint(3, 17, (length % 7 + 1,)).tolist() for length in range(60)]
    wanted = [by_the_text(model, ids, 9) for ids in sources]
    translator = Translator.from_pretrained(tmp_path / "ours")
    assert translator.translate_ids(sources, num_beams=1, max_new_tokens=9) == wanted
    assert len({tuple(ids) for ids in wanted}) > 5
    (tmp_path / "ids.txt").write_text("".join(f"{' '.join(map(str, ids))}\n" for ids in sources), "utf-8")
    line = [
        "translate",
        str(tmp_path / "ours"),
        str(tmp_path / "ids.txt"),
        "--ids",
        "--num-beams",
        "1",
        "--max-new-tokens",
        "9",
    ]
    assert main(line) == 0
    assert capsys.readouterr().out.splitlines() == [" ".join(map(str, ids)) for ids in wanted]
    assert translator.translate_ids([[]]) == [[]]
    assert translator.translate_ids(torch.tensor(sources[6:7]), num_beams=1, max_new_tokens=9) == wanted[6:7]
    for one in (sources[6], torch.tensor(sources[6]), None):
        with pytest.raises(RequestError, match=r"several sources, .* \[\[5, 6, 2\]\]"):
            translator.translate_ids(one)
    with pytest.raises(DataError, match="'17' is not an id"):
        translator.translate_ids([[17]])
    assert main(["translate", str(tmp_path / "ours"), "--ids", "--engine", "ctranslate2"]) == 2
    assert "leave out --engine" in capsys.readouterr().err


def test_text_with_vocabularies(tmp_path: Path) -> None:
    model = saved(tmp_path / "theirs", words=True)
    done = import_folder(tmp_path / "theirs", tmp_path / "ours", from_pickle=True)
    assert done.next_command == f"manyheads translate {tmp_path / 'ours'}"
    translator = Translator.from_pretrained(tmp_path / "ours")
    ids = [0, 4, 5, 3, 1]  # <s> a b <unk> </s>
    best = by_the_text(model, ids, 6)
    options = {"num_beams": 1, "max_new_tokens": 6}
    assert translator("a b z", **options) == " ".join(WORDS[1][index] for index in best)
    assert translator.translate_ids([ids], **options) == [best]
    [[found]] = [translator.translate_nbest(["a b z"], **options)]
    scored = translator.score("a b z", found[0].text)
    expected = found[0].token_log_probs
    assert scored.token_log_probs[: len(best)] == pytest.approx(expected[: len(best)], abs=1e-4)
    export_folder(tmp_path / "ours", tmp_path / "again", "annotated-transformer")
    config = json.loads((tmp_path / "again" / "config.json").read_text("utf-8"))
    assert {name: config[name] for name in ("pad", "start_symbol", "end_symbol")} == {
        "pad": 2,
        "start_symbol": 0,
        "end_symbol": 1,
    }
    for name in ("vocab_src.txt", "vocab_tgt.txt"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


@pytest.mark.parametrize(
    ("spoil", "kind", "said"),
    [
        (lambda folder: (folder / "vocab_tgt.txt").unlink(), DataError, "needs both, or none"),
        (lambda folder: (folder / "vocab_tgt.txt").write_text("a\nb\n"), DataError, "has 2 words, but the model 19"),
        (
            lambda folder: (folder / "config.json").write_text(json.dumps({"model": SIZES, "pad": 99})),
            ConfigError,
            "pad, start_symbol and end_symbol are 99, 0, 1.*from 0 to 18",
        ),
    ],
)
def test_files_that_do_not_fit(spoil: Any, kind: type[Exception], said: str, tmp_path: Path) -> None:
    saved(tmp_path / "theirs", words=True)
    spoil(tmp_path / "theirs")
    with pytest.raises(kind, match=said):
        import_folder(tmp_path / "theirs", tmp_path / "ours", from_pickle=True)
