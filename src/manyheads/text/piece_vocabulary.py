"""A vocabulary of subwords: the BPE of translation models, applied line by line, so that a text can have any length.

Encoding normalises text to NFC and keeps a "\\r" before a line break; everything else is restored exactly.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from manyheads.text.pipeline import BYTE_PIECES, SPECIAL_PIECES
from manyheads.text.tokenizer import Tokenizer
from manyheads.text.vocabulary import Documents, Vocabulary

__all__ = ["PieceVocabulary"]

_FIRST_BYTE = len(SPECIAL_PIECES)


class PieceVocabulary(Vocabulary):
    """The ids of a `bpe` or `unigram` tokenizer. The byte 0x0A is a line break, `</s>` the end of a document.

    Args:
        tokenizer: a tokenizer without symbols.
        documents: what counts as a document.
    """

    kind = "bpe"
    unk_id = None

    def __init__(self, tokenizer: Tokenizer, documents: Documents = "none") -> None:
        self.documents = documents
        self.tokenizer = tokenizer
        self.end_id = None if documents == "none" else tokenizer.eos_id
        self.line_id = tokenizer.eos_id if documents == "lines" else _FIRST_BYTE + ord("\n")
        pieces = [piece.encode("utf-8") for piece in tokenizer.pieces]
        pieces[:_FIRST_BYTE] = [b""] * _FIRST_BYTE
        pieces[_FIRST_BYTE : _FIRST_BYTE + len(BYTE_PIECES)] = [bytes([byte]) for byte in range(len(BYTE_PIECES))]
        self._bytes = pieces
        spaced = [index for index, piece in enumerate(pieces) if piece.startswith(b" ")]
        bare = [index for index in spaced if not pieces[index].strip(b" ")]
        self._spaced = bare, sorted({*spaced} - {*bare})

    @property
    def vocab_size(self) -> int:
        """Number of ids, including special and byte pieces."""
        return self.tokenizer.vocab_size

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the pieces of each line, using all threads of the library."""
        return self.tokenizer.encode_batch(lines)

    def spaced_ids(self) -> tuple[list[int], list[int]]:
        """See `Vocabulary.spaced_ids`."""
        return self._spaced

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the joined pieces, without the space before each line's first word; special ids give nothing."""
        text = bytearray()
        begins = True
        for index in self._checked(ids):
            if index == self.line_id:
                text += b"\n"
            if index in (self.line_id, self.end_id):
                begins = True
            elif piece := self._bytes[index]:
                text += piece.removeprefix(b" ") if begins else piece
                begins = False
        return bytes(text)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the pieces: spaces as `▁`, bytes as `<0xE2>`, special ids as `</s>`."""
        return self.tokenizer.tokens(ids)

    def describe(self) -> dict[str, object]:
        """Return the properties to show to users."""
        return {**super().describe(), "lowercase": self.tokenizer.lowercase}

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
        return self._render(tokenizer=json.loads(self.tokenizer.to_json()))
