"""Reading and checking of the files of a Marian tokenizer: sizes, SHA-256 and every entry of a vocabulary."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyheads.errors import DataError
from manyheads.files.guarded import read_limited
from manyheads.text.tokenizer_file import MAX_FILE_BYTES, parse_json

FORMAT_VERSION = 1
OWN = "manyheads"  # the key of our entry in tokenizer_config.json
MAX_PIECES = 1_000_000
_TEXTS = ("unk_token", "eos_token", "pad_token")
_OPTIONS = {"separate_vocabs": bool, "clean_up_tokenization_spaces": bool, "source_lang": str, "target_lang": str}
# A vocabulary may list more unsplittable pieces; they are not supported, because no model has needed them yet.
_MORE_SPECIAL = (
    *("additional_special_tokens", "extra_special_tokens"),
    *("bos_token", "sep_token", "cls_token", "mask_token"),
)


@dataclass(frozen=True, kw_only=True)
class MarianOptions:
    """The options in a tokenizer_config.json.

    Args:
        source_lang: source language, for display only.
        target_lang: target language, for display only.
        unk_token: the piece for unknown pieces.
        eos_token: the last piece of every sequence.
        pad_token: the padding piece.
        separate_vocabs: target_vocab.json contains the ids of the target's pieces.
        clean_up_spaces: decoding removes spaces before punctuation and English contractions.
        start_id: the first input id of the decoder; None: padding, as in all OPUS-MT models.
        peer: the complete file, if the options come from one, for converting back.
    """

    source_lang: str | None = None
    target_lang: str | None = None
    unk_token: str = "<unk>"  # noqa: S105  (a token of text, not a password)
    eos_token: str = "</s>"  # noqa: S105  (a token of text, not a password)
    pad_token: str = "<pad>"  # noqa: S105  (a token of text, not a password)
    separate_vocabs: bool = False
    clean_up_spaces: bool = False
    start_id: int | None = None
    peer: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_peer(cls, values: Mapping[str, Any], where: str, start_id: int | None = None) -> MarianOptions:
        """Read the options of a tokenizer_config.json.

        Raises: DataError: an option has a wrong type, or its effect is unknown.
        """
        more = {name: value for name, value in values.items() if name != OWN}
        texts = {name: _text(more.pop(name, getattr(cls, name)), name, where) for name in _TEXTS}
        given = {name: more.pop(name, None) for name in _OPTIONS}
        for name, kind in _OPTIONS.items():
            if given[name] is not None and not isinstance(given[name], kind):
                raise DataError(f"{where}: {name} is {given[name]!r}; it must be of type {kind.__name__}, or null.")
        _refuse_more(more, texts, where)
        return cls(
            **texts,
            source_lang=given["source_lang"],
            target_lang=given["target_lang"],
            separate_vocabs=bool(given["separate_vocabs"]),
            clean_up_spaces=bool(given["clean_up_tokenization_spaces"]),
            start_id=start_id,
            peer={name: value for name, value in values.items() if name != OWN},
        )

    def to_peer(self) -> dict[str, Any]:
        """Return the peer's tokenizer_config.json."""
        if self.peer:
            return dict(self.peer)
        own: dict[str, Any] = {name: getattr(self, name) for name in ("source_lang", "target_lang", *_TEXTS)}
        own |= {"separate_vocabs": self.separate_vocabs, "clean_up_tokenization_spaces": self.clean_up_spaces}
        return {"tokenizer_class": "MarianTokenizer", **own}


def _text(token: Any, name: str, where: str) -> str:
    """Return a special piece, which may also be given as an object with flags."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str) or not content:
        raise DataError(f"{where}: {name} is {token!r}; it must be a piece of text.")
    return content


def _refuse_more(more: Mapping[str, Any], texts: Mapping[str, str], where: str) -> None:
    """Raises: DataError: there are other special pieces or SentencePiece options that are not supported."""
    listed = [more.get(name) for name in _MORE_SPECIAL]
    added = more.get("added_tokens_decoder")
    listed += list(added.values()) if isinstance(added, dict) else []
    for one in [one for item in listed for one in (item if isinstance(item, list) else [item])]:
        piece = one.get("content") if isinstance(one, dict) else one
        if piece and piece not in texts.values():
            known = ", ".join(texts.values())
            raise DataError(f"{where} names the special piece {piece!r}; only {known} are supported.")
        flags = ("lstrip", "rstrip", "single_word", "normalized")
        set_flags = [flag for flag in flags if isinstance(one, dict) and one.get(flag)]
        if set_flags:
            raise DataError(f"{where}: {set_flags[0]} of the special piece {piece!r} is not supported.")
    for name in ("sp_model_kwargs", "split_special_tokens"):
        if more.get(name):
            raise DataError(f"{where}: {name} is {more[name]!r}, which is not supported.")


def own_part(files: Mapping[str, bytes], start_id: int) -> dict[str, Any]:
    """Return our entry in tokenizer_config.json, which the peer ignores: the digests of the other files."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    return {OWN: {"format_version": FORMAT_VERSION, "decoder_start_token_id": start_id, "sha256": digests}}


def file_names(separate_vocabs: bool) -> list[str]:
    """Return the names of the files beside tokenizer_config.json."""
    return ["source.spm", "target.spm", "vocab.json", *(["target_vocab.json"] if separate_vocabs else [])]


def read_files(folder: Path) -> tuple[dict[str, bytes], MarianOptions]:
    """Return contents and options of a folder that manyheads wrote.

    Raises: DataError: a file is missing or too large, its SHA-256 differs, or another program wrote the folder.
    """
    path = folder / "tokenizer_config.json"
    config = read_json(read_bytes(path), str(path))
    own = config.get(OWN)
    if not isinstance(own, dict) or not isinstance(own.get("sha256"), dict):
        raise DataError(f"{path} was not written by manyheads; convert the model: manyheads convert {folder} -o MODEL")
    version = own.get("format_version")
    if version != FORMAT_VERSION:
        raise DataError(f"{path} has format_version {version!r}; this manyheads reads {FORMAT_VERSION}.")
    start_id = own.get("decoder_start_token_id")
    if type(start_id) is not int or not 0 <= start_id < MAX_PIECES:
        raise DataError(f"{path}: decoder_start_token_id is {start_id!r}; it must be an id.")
    options = MarianOptions.from_peer(config, str(path), start_id)
    files = {name: read_bytes(folder / name) for name in file_names(options.separate_vocabs)}
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != own["sha256"].get(name):
            raise DataError(f"{folder / name} is damaged: its contents differ from their SHA-256 in {path.name}.")
    return files, options


def read_bytes(path: Path) -> bytes:
    """Raises: DataError: the file is missing, cannot be read, or is too large."""
    try:
        return read_limited(path, MAX_FILE_BYTES)
    except OSError as error:
        raise DataError(f"Cannot read the tokenizer's {path}: {error.strerror or error}.") from None


def read_json(content: bytes, where: str) -> dict[str, Any]:
    """Raises: DataError: the content is not one JSON object in UTF-8."""
    values = parse_json(content, where)
    if not isinstance(values, dict):
        raise DataError(f"{where} must hold one JSON object, not a {type(values).__name__}.")
    return values


def read_vocab(content: bytes, where: str) -> dict[str, int]:
    """Return piece -> id.

    Raises: DataError: the content is not such a mapping, or an id occurs twice.
    """
    vocab = read_json(content, where)
    if not 0 < len(vocab) <= MAX_PIECES:
        raise DataError(f"{where} has {len(vocab)} pieces; 1 to {MAX_PIECES} are possible.")
    for piece, index in vocab.items():
        if type(index) is not int or not 0 <= index < MAX_PIECES:
            raise DataError(f"{where}: the piece {piece!r} has the id {index!r}; ids are 0 to {MAX_PIECES - 1}.")
    if len(set(vocab.values())) != len(vocab):
        raise DataError(f"{where}: two pieces have the same id.")
    return vocab
