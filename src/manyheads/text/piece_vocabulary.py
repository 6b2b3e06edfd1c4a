"""Pieces of words as a vocabulary: the BPE that translation uses, line by line, so that a text of any length is read.

Text is made NFC by it, and a "\\r" before a line break is kept; everything else comes back as it was.
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
    """The ids of a `bpe` or `unigram` tokenizer: a line break is the byte 0x0A, the end of a document `</s>`.

    Args:
        tokenizer: without symbols.
        documents: what a document is.
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

    @property
    def vocab_size(self) -> int:
        """Number of ids, special and byte pieces included."""
        return self.tokenizer.vocab_size

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """The pieces of each line, on all threads of the library at once."""
        return self.tokenizer.encode_batch(lines)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The pieces joined; the space in front of each line's first word goes, special ids give nothing."""
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
        """The pieces: spaces show as `▁`, bytes as `<0xE2>`, special ids as `</s>`."""
        return self.tokenizer.tokens(ids)

    def describe(self) -> dict[str, object]:
        """What people may want to know."""
        return {**super().describe(), "lowercase": self.tokenizer.lowercase}

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        return self._render(tokenizer=json.loads(self.tokenizer.to_json()))
