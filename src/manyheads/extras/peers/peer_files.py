"""The folders of fairseq, OpenNMT-py and JoeyNMT: options, weights and vocabularies.

    fairseq     checkpoint_best.pt  dict.en.txt  dict.de.txt  [sentencepiece.bpe.model]
    OpenNMT-py  model_step_N.pt
    JoeyNMT     config.yaml  best.ckpt  [src_vocab.txt  trg_vocab.txt  sentencepiece.model]

Text is read with a sentencepiece model only; other segmentations are programs of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manyheads.errors import DataError, ModelFileError
from manyheads.extras.peers import joeynmt
from manyheads.extras.peers.legacy_pickle import Saved
from manyheads.files.guarded import read_limited
from manyheads.text.marian import MarianTokenizer
from manyheads.text.marian_files import MarianOptions
from manyheads.text.tokenizer_file import MAX_FILE_BYTES

__all__ = ["TRAINED_BY", "read_options", "read_tokenizer"]

TRAINED_BY = ("fairseq/Transformer", "opennmt-py/Transformer", "joeynmt/Transformer")
_FAIRSEQ, _OPENNMT, _JOEYNMT = TRAINED_BY
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_WHERE = {_FAIRSEQ: ("cfg.model.", "args."), _OPENNMT: ("opt.",)}


def read_options(peer: str, folder: Path, saved: Saved) -> dict[str, Any]:
    """Return the options of the peer's model, from its checkpoint or config.yaml.

    Raises: ModelFileError, ConfigError: the folder has none.
    """
    if peer == _JOEYNMT:
        return joeynmt.options_of_folder(folder)
    for prefix in _WHERE[peer]:
        found = {name.removeprefix(prefix): value for name, value in saved.options.items() if name.startswith(prefix)}
        if found:
            return found
    raise ModelFileError(f"the checkpoint in {folder} has no options of {peer}; is it from another program?")


def read_tokenizer(
    peer: str, folder: Path, options: Mapping[str, Any], sizes: tuple[int, int], notes: list[str]
) -> MarianTokenizer | None:
    """Return a tokenizer of the peer's vocabularies and its sentencepiece model; None: see the notes.

    Args: sizes: numbers of source and target ids.
    Raises: ModelFileError, DataError: a file is damaged, or does not belong to the model.
    """
    if peer == _OPENNMT:
        notes.append("OpenNMT-py reads sources without an end token, which our translation adds.")
        return None
    found = _VOCABULARIES[peer](folder, options)
    spms = sorted(path for path in folder.glob("*.model") if path.is_file())
    if found is None or len(spms) != 1:
        notes.append("A tokenizer needs the two vocabularies and one sentencepiece model (*.model) in the folder.")
        return None
    source, target = found
    for side, vocabulary, size in zip(("source", "target"), found, sizes, strict=True):
        if len(vocabulary) > size:
            raise ModelFileError(
                f"the {side} vocabulary in {folder} has {len(vocabulary):,} pieces, the model {size:,}."
            )
    if any(source[piece] != target[piece] for piece in _SPECIAL):
        raise ModelFileError(f"the special pieces have different ids in the two vocabularies in {folder}.")
    spm = read_limited(spms[0], MAX_FILE_BYTES)
    start = source["</s>"] if peer == _FAIRSEQ else source["<s>"]
    files = {"vocab.json": _json(source), "target_vocab.json": _json(target), "source.spm": spm, "target.spm": spm}
    return MarianTokenizer(files, MarianOptions(separate_vocabs=True, start_id=start), where=str(folder))


def _fairseq_vocabularies(folder: Path, options: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]] | None:
    """Read dict.SOURCE.txt and dict.TARGET.txt: a piece and its count on each line, after four special pieces.

    A flag after the count allows a piece to be there twice, which `_numbered` does not.
    """
    files = [folder / f"dict.{options.get(name)}.txt" for name in ("source_lang", "target_lang")]
    if not all(path.is_file() for path in files):
        return None
    source, target = (
        [line.removesuffix(" #fairseq:overwrite").rpartition(" ")[0] for line in _lines(path)] for path in files
    )
    return _numbered([*_SPECIAL, *source], files[0]), _numbered([*_SPECIAL, *target], files[1])


def _joeynmt_vocabularies(folder: Path, _options: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]] | None:
    """Read src_vocab.txt and trg_vocab.txt: a piece on each line."""
    files = [folder / "src_vocab.txt", folder / "trg_vocab.txt"]
    if not all(path.is_file() for path in files):
        return None
    source, target = (_lines(path) for path in files)
    return _numbered(source, files[0]), _numbered(target, files[1])


def _lines(path: Path) -> list[str]:
    try:
        return read_limited(path, MAX_FILE_BYTES).decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}.") from error


def _numbered(pieces: list[str], path: Path) -> dict[str, int]:
    ids = {piece: index for index, piece in enumerate(pieces)}
    missing = [piece for piece in _SPECIAL if piece not in ids]
    if missing or len(ids) != len(pieces):
        raise DataError(f"{path} has no piece {missing[0]!r}." if missing else f"{path} has a piece twice.")
    return ids


def _json(vocabulary: Mapping[str, int]) -> bytes:
    return json.dumps(vocabulary, ensure_ascii=False).encode("utf-8")


_VOCABULARIES: dict[str, Callable[[Path, Mapping[str, Any]], tuple[dict[str, int], dict[str, int]] | None]] = {
    _FAIRSEQ: _fairseq_vocabularies,
    _JOEYNMT: _joeynmt_vocabularies,
}
