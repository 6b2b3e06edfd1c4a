"""The tokenizer of Marian models, on SentencePiece models trained here."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from marian_models import ENGLISH, GERMAN, joint_vocab, pieces_of, tokenizer_files, train_spm

from manyheads.errors import DataError, MissingExtraError
from manyheads.extras.peers.marian_tokenizer import MarianOptions, MarianTokenizer
from manyheads.text.of_folder import load_tokenizer
from manyheads.text.pipeline import has_tokenizer
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

VOCAB = joint_vocab(train_spm(ENGLISH), train_spm(GERMAN))


@pytest.fixture(scope="module")
def tokenizer() -> MarianTokenizer:
    return MarianTokenizer(tokenizer_files(), MarianOptions(source_lang="en", target_lang="de"))


def cut(model: bytes, text: str) -> list[str]:
    import sentencepiece

    return list(sentencepiece.SentencePieceProcessor(model_proto=model).encode(text, out_type=str))


def save(tokenizer: MarianTokenizer, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content)
    return folder


def test_each_side_cuts_by_its_own_model(tokenizer: MarianTokenizer) -> None:
    for text in (*ENGLISH, *GERMAN):
        for side, model in ((tokenizer.source, train_spm(ENGLISH)), (tokenizer.target, train_spm(GERMAN))):
            expected = [VOCAB.get(piece, 1) for piece in cut(model, text)]
            assert side.encode(text) == expected
    assert tokenizer.source.encode(GERMAN[0]) != tokenizer.target.encode(GERMAN[0])
    assert tokenizer.source.encode_batch([]) == []
    assert tokenizer.source.encode_batch(["", ENGLISH[0], ""]) == [[], tokenizer.source.encode(ENGLISH[0]), []]


def test_special_ids(tokenizer: MarianTokenizer) -> None:
    for side in (tokenizer.source, tokenizer.target):
        pad = len(VOCAB) - 1
        assert (side.eos_id, side.unk_id, side.pad_id, side.bos_id, side.vocab_size) == (0, 1, pad, pad, len(VOCAB))
    started = MarianTokenizer(tokenizer_files(), MarianOptions(start_id=0))
    assert (started.target.bos_id, started.target.pad_id) == (0, pad)


def test_language_codes_and_special_pieces_in_a_text(tokenizer: MarianTokenizer) -> None:
    model = train_spm(ENGLISH)

    def ids(text: str) -> list[int]:
        return [VOCAB.get(piece, 1) for piece in cut(model, text)]

    deu = VOCAB[">>deu<<"]
    source = tokenizer.source
    assert source.encode(">>deu<< A man.") == [deu, *ids(" A man.")]
    assert source.encode(">>deu<<A man.") == [deu, *ids("A man.")]
    assert source.encode(">>xyz<< A man.") == [1, *ids(" A man.")]
    assert source.encode("A >>deu<< man.") == ids("A >>deu<< man.")
    assert source.encode(" >>deu<< man.") == ids(" >>deu<< man.")
    assert source.encode(">>deu A man.") == ids(">>deu A man.")
    assert source.encode("A </s>man") == [*ids("A "), 0, *ids("man")]
    assert source.encode("<pad></s><unk>") == [len(VOCAB) - 1, 0, 1]
    assert source.encode("</s>>>deu<< A") == [0, deu, *ids(" A")]
    assert source.encode("<s> A") == ids("<s> A")


def test_unknown_pieces() -> None:
    model = train_spm(ENGLISH)
    lost = next(piece for piece in cut(model, ENGLISH[0]) if len(piece) > 1)
    poorer = MarianTokenizer(tokenizer_files(left_out=[lost]), MarianOptions())
    place = cut(model, ENGLISH[0]).index(lost)
    assert poorer.source.encode(ENGLISH[0])[place] == 1
    assert poorer.source.encode("日本") == poorer.source.encode("本日")  # characters of no piece at all
    assert poorer.source.tokens([1, 0]) == ["<unk>", "</s>"]


def test_decoding(tokenizer: MarianTokenizer) -> None:
    target = tokenizer.target
    for text in GERMAN:
        ids = target.encode(text)
        assert target.decode(ids) == text
        assert target.decode([target.bos_id, *ids, 0, target.pad_id]) == text
        assert target.tokens(ids) == cut(train_spm(GERMAN), text)
    assert target.decode_batch([[], [0], [1]]) == ["", "", ""]
    assert target.decode([10**6]) == ""
    assert target.decode([VOCAB[">>deu<<"], *target.encode("Ein Mann")]).endswith("Ein Mann")
    with pytest.raises(DataError, match="-1"):
        target.decode([-1])


def test_cleaning_up_only_if_asked(tokenizer: MarianTokenizer) -> None:
    text = "Der Tee ist heiß , nicht ? Zwei ! Drei ."
    ids = tokenizer.target.encode(text)
    assert tokenizer.target.decode(ids) == text
    tidy = MarianTokenizer(tokenizer_files(), MarianOptions(clean_up_spaces=True))
    assert tidy.target.decode(ids) == "Der Tee ist heiß, nicht? Zwei! Drei."


def test_separate_vocabularies() -> None:
    files = tokenizer_files()
    special = {"</s>": 0, "<unk>": 1, "<pad>": 2}

    def vocab(model: bytes) -> dict[str, int]:
        own = [piece for piece in pieces_of(model) if piece not in ("<s>", *special)]
        return special | {piece: number for number, piece in enumerate(own, 3)}

    files["vocab.json"] = json.dumps(vocab(files["source.spm"])).encode()
    files["target_vocab.json"] = json.dumps(vocab(files["target.spm"])).encode()
    both = MarianTokenizer(files, MarianOptions(separate_vocabs=True))
    assert both.source.vocab_size == len(vocab(files["source.spm"]))
    assert both.target.vocab_size == len(vocab(files["target.spm"]))
    assert both.target.encode("Mann") == [
        vocab(files["target.spm"]).get(p, 1) for p in cut(files["target.spm"], "Mann")
    ]
    assert both.target.decode(both.target.encode(GERMAN[1])) == GERMAN[1]


def test_half_a_surrogate_pair_is_refused(tokenizer: MarianTokenizer) -> None:
    with pytest.raises(DataError, match="surrogate"):
        tokenizer.source.encode("a\ud800b")


def test_saved_and_loaded(tokenizer: MarianTokenizer, tmp_path: Path) -> None:
    folder = save(tokenizer, tmp_path / "model")
    assert has_tokenizer(folder)
    again = load_tokenizer(folder)
    assert isinstance(again, MarianTokenizer)
    assert again.digest == tokenizer.digest
    assert again.files() == tokenizer.files()
    assert again.source.encode_batch(ENGLISH) == tokenizer.source.encode_batch(ENGLISH)
    assert again.describe()["target_lang"] == "de"
    with pytest.raises(DataError, match="no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["source.spm", "target.spm", "vocab.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_damage_is_named(tokenizer: MarianTokenizer, tmp_path: Path, name: str, harm: str) -> None:
    path = save(tokenizer, tmp_path / "model") / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(content if harm == "flip" else content[: len(content) // 2])
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        MarianTokenizer.load(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("source.spm", b"", "SentencePiece"),
        ("source.spm", b"\x0a\xff\xff\xff\xff\x0f", "SentencePiece"),
        ("vocab.json", b"[1]", "JSON object"),
        ("vocab.json", b"\xff", "JSON"),
        ("vocab.json", b"{}", "0 pieces"),
        ("vocab.json", b'{"</s>": 0, "<unk>": 1}', "'<pad>'"),
        ("vocab.json", b'{"</s>": 0, "<unk>": 0, "<pad>": 1}', "same id"),
        ("vocab.json", b'{"</s>": "0"}', "id '0'"),
        ("vocab.json", b'{"</s>": -1}', "id -1"),
        ("vocab.json", b'{"</s>": true}', "id True"),
    ],
)
def test_files_that_are_no_such_thing(name: str, content: bytes, named: str) -> None:
    with pytest.raises(DataError, match=named):
        MarianTokenizer({**tokenizer_files(), name: content}, MarianOptions())


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"unk_token": 3}, "unk_token"),
        ({"separate_vocabs": "yes"}, "separate_vocabs"),
        ({"target_lang": 5}, "target_lang"),
        ({"additional_special_tokens": ["<eop>"]}, "<eop>"),
        ({"added_tokens_decoder": {"0": {"content": "</s>", "lstrip": True}}}, "lstrip"),
        ({"added_tokens_decoder": {"7": {"content": "<x>"}}}, "<x>"),
        ({"sp_model_kwargs": {"enable_sampling": True}}, "sp_model_kwargs"),
    ],
)
def test_options_that_are_not_known(values: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError, match=named):
        MarianOptions.from_peer(values, "tokenizer_config.json")


def test_options_keep_the_peers_words() -> None:
    values = {"eos_token": {"content": "</s>", "lstrip": False}, "model_max_length": 512, "target_lang": None}
    options = MarianOptions.from_peer({**values, "manyheads": {}}, "file")
    assert options.to_peer() == values
    assert MarianOptions.from_peer(MarianOptions(source_lang="en").to_peer(), "file").source_lang == "en"


def test_a_folder_of_others_is_not_taken_for_ours(tokenizer: MarianTokenizer, tmp_path: Path) -> None:
    folder = save(tokenizer, tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    own = config.pop("manyheads")
    for changed, named in (
        (config, "manyheads convert"),
        ({**config, "manyheads": {**own, "format_version": 9}}, "format_version"),
        ({**config, "manyheads": {**own, "decoder_start_token_id": None}}, "decoder_start_token_id"),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(changed), encoding="utf-8")
        with pytest.raises(DataError, match=named):
            MarianTokenizer.load(folder)


def test_without_sentencepiece(monkeypatch: pytest.MonkeyPatch) -> None:
    files = tokenizer_files()
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[spm\]"):
        MarianTokenizer(files, MarianOptions())


def test_our_tokenizer_has_two_sides_with_one_vocabulary() -> None:
    ours = Tokenizer.train([*ENGLISH, *GERMAN], TokenizerSettings(vocab_size=320))
    assert ours.source is ours
    assert ours.target is ours.target
    assert ours.target.pieces == ours.pieces
    assert ours.files() == {"tokenizer.json": ours.to_json().encode("utf-8")}


def test_with_symbols_the_target_side_is_another() -> None:
    parser = Tokenizer.train([*ENGLISH], TokenizerSettings(vocab_size=320), symbols=["(S", ")"])
    assert parser.source.encode("(S )") != parser.target.encode("(S )")
    assert parser.target.encode_batch(["(S )"]) == parser.encode_targets(["(S )"])
    assert parser.target.decode(parser.target.encode("(S )")) == "(S )"
