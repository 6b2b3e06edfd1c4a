"""A vocabulary of bytes: id n is byte n, so no text is unknown and decoding restores every file exactly."""

from __future__ import annotations

from collections.abc import Sequence

from manyheads.text.tokenizer_file import check_encodable
from manyheads.text.vocabulary import Documents, Vocabulary

__all__ = ["NUM_BYTES", "ByteVocabulary"]

NUM_BYTES = 256


class ByteVocabulary(Vocabulary):
    """Ids 0 to 255 are bytes. With documents, id 256 ends a document.

    Args: documents: what counts as a document.
    """

    kind = "bytes"
    unk_id = None
    reads_bytes = True

    def __init__(self, documents: Documents = "none") -> None:
        self.documents = documents
        self.end_id = None if documents == "none" else NUM_BYTES
        self.line_id = NUM_BYTES if documents == "lines" else ord("\n")

    @property
    def vocab_size(self) -> int:
        """256, or 257 with documents."""
        return NUM_BYTES + (self.end_id is not None)

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the UTF-8 bytes of each line. Raises: DataError: a line contains an unpaired surrogate."""
        check_encodable(lines)
        return [list(line.encode("utf-8")) for line in lines]

    def encode_content(self, content: bytes) -> list[int]:
        """Return the bytes."""
        return list(content)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes. The end of a document gives "\\n" if documents are lines, otherwise nothing."""
        end = b"\n" if self.documents == "lines" else b""
        return b"".join(bytes([index]) if index < NUM_BYTES else end for index in self._checked(ids))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return visible ASCII as it is, a space as `▁`, other bytes as `<0xE2>`, the end of a document as `<eod>`."""
        return [_shown(index) for index in self._checked(ids)]

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
        return self._render()


def _shown(index: int) -> str:
    if index == NUM_BYTES:
        return "<eod>"
    if index == ord(" "):
        return "▁"
    return chr(index) if 32 < index < 127 else f"<0x{index:02X}>"
