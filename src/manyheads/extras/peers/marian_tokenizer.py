"""The tokenizer of Marian models (OPUS-MT): one SentencePiece model per language and a vocabulary of their pieces.

    source.spm  target.spm      segmentation of each language into pieces
    vocab.json                  piece -> id; with `separate_vocabs` of the source only, and target_vocab.json beside it
    tokenizer_config.json       special pieces, and under "manyheads" the files' SHA-256

It behaves like `MarianTokenizer` of `transformers`. `>>deu<<` at the start of a text is one piece. A piece that is not
in the vocabulary is `<unk>`. `</s>`, `<unk>` and `<pad>` in a text *are* these ids, and the text between them is
segmented separately. Decoding leaves out special ids, joins pieces with the target's SentencePiece model, and strips
white space. Punctuation is not normalised: the peer has a normaliser (sacremoses) but does not call it when it encodes.

Sizes, SHA-256 and every entry of a vocabulary are checked when the files are read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from manyheads.errors import DataError
from manyheads.files.safe_open import read_limited
from manyheads.installation import needing_extra
from manyheads.text.pipeline import MAX_FILE_BYTES, check_encodable, parse_json
from manyheads.text.sides import Capabilities, untagged

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


_SPACE_SIGN = "▁"
# The replacements of the peer's clean-up option, in the peer's order, which matters.
_CLEAN_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class MarianSide:
    """One language's side; see `sides.Side`.

    Args:
        vocab: piece -> id.
        spm: the SentencePiece processor.
        options: special pieces and options.
        special: id of each special piece, the same on both sides.
    """

    def __init__(self, vocab: dict[str, int], spm: Any, options: MarianOptions, special: dict[str, int]) -> None:
        self._vocab = vocab
        self._spm = spm
        self._options = options
        self._special = special
        self._pieces = {index: piece for piece, index in vocab.items()}
        self.unk_id = special[options.unk_token]
        self.eos_id = special[options.eos_token]
        self.pad_id = special[options.pad_token]
        self.bos_id = self.pad_id if options.start_id is None else options.start_id
        self.vocab_size = max(*self._pieces, *special.values(), self.bos_id) + 1
        longest_first = sorted(special, key=lambda piece: -len(piece))
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split

    def encode(self, text: str) -> list[int]:
        """See `sides.Side.encode`.

        Raises: DataError: the text contains an unpaired surrogate.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text; raises the same errors as `encode`."""
        check_encodable(texts)
        split = [[part for part in self._split(text) if part] for text in texts]
        coded = [_language_code(part) for parts in split for part in parts if part not in self._special]
        cut: list[list[str]] = self._spm.encode([rest for _, rest in coded], out_type=str) if coded else []
        segments = iter([[code, *pieces] if code else pieces for (code, _), pieces in zip(coded, cut, strict=True)])
        rows = []
        for parts in split:
            ids: list[int] = []
            for part in parts:
                if part in self._special:
                    ids.append(self._special[part])
                else:
                    ids += [self._vocab.get(piece, self.unk_id) for piece in next(segments)]
            rows.append(ids)
        return rows

    def decode(self, ids: Sequence[int]) -> str:
        """See `sides.Side.decode`.

        Raises: DataError: an id is negative.
        """
        return self.decode_batch([ids])[0]

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence of ids; special ids and ids without a piece are left out."""
        special = {*self._special.values(), self.bos_id}
        texts = []
        for ids in batch:
            pieces = [self._pieces[i] for i in _checked(ids) if i in self._pieces and i not in special]
            text: str = self._spm.decode_pieces(pieces).replace(_SPACE_SIGN, " ").strip()
            if self._options.clean_up_spaces:
                for spaced in _CLEAN_UP:
                    text = text.replace(spaced, spaced.strip())
            texts.append(text)
        return texts

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """See `sides.Side.tokens`.

        Raises: DataError: an id is negative.
        """
        names = self._pieces | {index: piece for piece, index in self._special.items()}
        return [names.get(index, self._options.unk_token) for index in _checked(ids)]


class MarianTokenizer(Capabilities):
    """Both sides; see `sides.TranslationTokenizer`. Create one with `load` or from the contents of the files.

    Args:
        files: name -> content of the .spm and vocabulary files.
        options: the content of tokenizer_config.json.

    Raises: DataError: a file is damaged, or the files do not match. MissingExtraError: sentencepiece is not installed.
    """

    kind = "marian"

    def __init__(self, files: Mapping[str, bytes], options: MarianOptions, where: str = "the tokenizer") -> None:
        self.options = options
        self._files = dict(files)
        joint = read_vocab(files["vocab.json"], f"{where}: vocab.json")
        separate = options.separate_vocabs
        vocabs = (joint, read_vocab(files["target_vocab.json"], f"{where}: target_vocab.json") if separate else joint)
        names = (options.unk_token, options.eos_token, options.pad_token)
        # The peer looks up special pieces in the source's vocabulary for both sides.
        missing = [name for name in names if name not in joint]
        if missing:
            raise DataError(f"{where}: vocab.json has no piece {missing[0]!r}, which tokenizer_config.json names.")
        self._source_pieces = tuple(piece for piece in joint if piece.startswith(">>"))
        special = {name: joint[name] for name in names}
        spms = (_load_spm(files[name], f"{where}: {name}") for name in ("source.spm", "target.spm"))
        sides = (MarianSide(vocab, spm, options, special) for vocab, spm in zip(vocabs, spms, strict=True))
        self.source, self.target = sides

    @classmethod
    def load(cls, folder: str | Path) -> MarianTokenizer:
        """Read the tokenizer of a folder that manyheads wrote.

        Raises: DataError: a file is missing or too large, or its SHA-256 differs. MissingExtraError: see the class.
        """
        files, options = read_files(Path(folder))
        return cls(files, options, where=str(folder))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of tokenizer_config.json, which contains the SHA-256 of all other files."""
        return hashlib.sha256(self.files()["tokenizer_config.json"]).hexdigest()

    @property
    def target_languages(self) -> tuple[str, ...]:
        """The codes `>>...<<` in the source's vocabulary. A text without one is translated, too."""
        return tuple(sorted(code for piece in self._source_pieces if (code := untagged(piece)[1])))

    def describe(self) -> dict[str, object]:
        """Return the properties to show to users."""
        languages = {"source_lang": self.options.source_lang, "target_lang": self.options.target_lang}
        return {"vocab_size": self.source.vocab_size, "target_vocab_size": self.target.vocab_size, **languages}

    def files(self) -> dict[str, bytes]:
        """Return the content of all files."""
        config = {**self.options.to_peer(), **own_part(self._files, self.target.bos_id)}
        text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
        return {**self._files, "tokenizer_config.json": text.encode("utf-8")}

    def __repr__(self) -> str:
        names = f"{self.options.source_lang or '?'} to {self.options.target_lang or '?'}"
        return f"MarianTokenizer({names}, {self.source.vocab_size} + {self.target.vocab_size} ids, {self.digest[:12]})"


def _language_code(text: str) -> tuple[str | None, str]:
    """Split `>>deu<< Hello` into `>>deu<<` and ` Hello`; other texts have the code None."""
    end = text.find("<<")
    return (text[: end + 2], text[end + 2 :]) if text.startswith(">>") and end >= 0 else (None, text)


def _checked(ids: Sequence[int]) -> list[int]:
    known = [int(index) for index in ids]
    if known and min(known) < 0:
        raise DataError(f"Id {min(known)} is outside the vocabulary; ids start at 0.")
    return known


def _load_spm(content: bytes, where: str) -> Any:
    with needing_extra("This model's tokenizer needs the package sentencepiece", "spm"):
        import sentencepiece
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(f"{where} is not a SentencePiece model, or is damaged: {reason}") from None
    return processor
