"""The tokenizer of Marian models (OPUS-MT): one SentencePiece model per language and a vocabulary of their pieces.

    source.spm  target.spm      segmentation of each language into pieces
    vocab.json                  piece -> id; with `separate_vocabs` of the source only, and target_vocab.json beside it
    tokenizer_config.json       special pieces, and under "manyheads" the files' SHA-256

It behaves like `MarianTokenizer` of `transformers`. `>>deu<<` at the start of a text is one piece. A piece that is not
in the vocabulary is `<unk>`. `</s>`, `<unk>` and `<pad>` in a text *are* these ids, and the text between them is
segmented separately. Decoding leaves out special ids, joins pieces with the target's SentencePiece model, and strips
white space. Punctuation is not normalised: the peer has a normaliser (sacremoses) but does not call it when it encodes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from manyheads.errors import DataError, needing_extra
from manyheads.text.marian_files import MarianOptions, own_part, read_files, read_vocab
from manyheads.text.sides import Capabilities, untagged
from manyheads.text.tokenizer_file import check_encodable

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
