"""Random files that mix all that is odd within a text, and their lines, found in another way than the reader's."""

import gzip
import random
from dataclasses import dataclass

__all__ = ["RandomFile", "random_file"]

PARTS = [
    "The cat", " sees", " the dog", ".", "a", " ", "  ", "\t", "\r", "\0", "\x0b", "\x0c", "\x1c", "\x1e", "\x7f",
    "\x85", "\u00a0", "\u2028", "\u2029", "\u3000", "\ufeff", "\u200b", "\u200d", "\u0301", "e\u0301", "é", "\u202e",
    "שלום", "日本", "🎉", "👩‍👧", "\U0010ffff", "\ufffd", "<s>", "</s>", "<unk>", "--help", "../..", "▁", "&lt;",
]  # fmt: skip
BAD = [b"\xff", b"\xc3", b"\xe4 ", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\x80"]
LONG = "qx" * 60  # twice as many tokens as there is room for


@dataclass(frozen=True)
class RandomFile:
    """A file, how it is to be read, and the lines in it.

    Args:
        content: its bytes.
        policy: for --on-bad-utf8.
        lines: the text of each, empty for one that is skipped.
        bad: how many lines are not UTF-8.
    """

    content: bytes
    policy: str
    lines: tuple[str, ...]
    bad: int


def random_file(
    seed: int, *, num_lines: int | None = None, policies: tuple[str, ...] = ("replace", "skip")
) -> RandomFile:
    """The file of a seed: the same everywhere. num_lines: none for any from 0 to 9."""
    chance = random.Random(seed)
    policy = chance.choice(policies)
    count = chance.choice([0, 1, 2, 3, 4, 5, 7, 9]) if num_lines is None else num_lines
    raw: list[bytes] = []
    texts: list[str] = []
    bad = 0
    for _ in range(count):
        line = "".join(chance.choices(PARTS, k=chance.choice([0, 0, 1, 2, 3, 5, 8]))).encode()
        if chance.random() < 0.04:
            line += LONG.encode()
        broken = chance.random() < 0.1
        if broken:
            place = chance.randrange(len(line) + 1)
            line = line[:place] + chance.choice(BAD) + b"." + line[place:]
        if not raw and line[:1] not in (b"T", b"a", b" "):  # not the mark of another encoding
            line = b"a" + line
        text = line.decode("utf-8", "replace")
        broken = text.encode() != line  # bytes in the midst of a character may go well together
        bad += broken
        text = "" if broken and policy == "skip" else text
        raw.append(line)
        texts.append(text)
    ends = [chance.choice([b"\n", b"\n", b"\r\n"]) for _ in raw]
    # a line's own "\r" before a plain "\n" is taken for a line end's
    texts = [text[:-1] if end == b"\n" and text.endswith("\r") else text for text, end in zip(texts, ends, strict=True)]
    if raw and raw[-1] and chance.random() < 0.3:
        ends[-1] = b""
    content = b"".join(line + end for line, end in zip(raw, ends, strict=True))
    if chance.random() < 0.15:
        content = b"\xef\xbb\xbf" + content
    return RandomFile(_packed(content, chance), policy, tuple(texts), bad)


def _packed(content: bytes, chance: random.Random) -> bytes:
    """Sometimes gzip, of one member or of two."""
    if chance.random() > 0.25:
        return content
    middle = chance.randrange(len(content) + 1) if chance.random() < 0.5 else len(content)
    parts = [part for part in (content[:middle], content[middle:]) if part] or [b""]
    return b"".join(gzip.compress(part, mtime=0) for part in parts)
