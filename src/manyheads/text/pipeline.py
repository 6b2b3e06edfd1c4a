"""The file tokenizer.json and its stages: normalising text, splitting it into words, encoding and decoding.

Kind, case folding, pieces and symbols determine a file completely. A loaded file is checked by building it again from
these four; any other content is damage and is refused. Very long texts are split, so that encoding needs memory for one
part only (about 130 bytes per token).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import product, takewhile
from pathlib import Path
from typing import Any

from manyheads.errors import DataError
from manyheads.files.commit import write_output
from manyheads.files.safe_open import read_limited
from manyheads.text.sides import TAG

SEARCHED = 4096  # number of characters before the end of a part that are searched for a space
_SINGLE_SPACE = re.compile(r"(?<=\S) (?=\S)")


def parts_of(text: str) -> list[str]:
    """Split a text at each single space between two words, which no word and no piece crosses.

    So the ids of the parts, concatenated, are the ids of the text, because the tokenizer adds a space before each.
    """
    parts = text.split()
    # Other white space, and several spaces in a row, are words, too.
    return parts if " ".join(parts) == text else _SINGLE_SPACE.split(text)


def grouped(texts: Sequence[str], most: int) -> Iterator[list[str]]:
    """Yield groups of consecutive texts with at most `most` characters together; a longer text is a group by itself."""
    group: list[str] = []
    room = most
    for text in texts:
        if group and len(text) > room:
            yield group
            group, room = [], most
        group.append(text)
        room -= len(text)
    if group:
        yield group


def in_parts(text: str, most: int, *, through_words: bool) -> Iterator[tuple[str, bool]]:
    """Split a text into parts whose ids, concatenated, are the ids of the text.

    The text is split at a single space between two words; the tokenizer adds this space to the second part again. If
    there is no such space nearby, it is split inside a word, but not before a character that combines with the one
    before. In this case the ids can differ from those of the whole word, but they decode to the same text.

    Args:
        most: maximum number of characters of a part.
        through_words: split inside a word if there is no space; otherwise the part extends to the next space.

    Returns: pairs (part, whether the tokenizer adds a space before it, as at the start of a text).
    """
    start, begins = 0, True
    while len(text) - start > most:
        stop = _last_space(text, max(start, start + most - SEARCHED), start + most)
        if stop is None and not through_words:
            stop = _next_space(text, start + most)
        if stop is not None:
            yield text[start:stop], begins
            start, begins = stop + 1, True
        elif not through_words:
            break
        else:
            stop = start + most
            while stop > start + max(1, most // 2) and joins_before(text[stop]):
                stop -= 1
            yield text[start:stop], begins
            start, begins = stop, False
    yield text[start:], begins


def _last_space(text: str, start: int, stop: int) -> int | None:
    while (place := text.rfind(" ", start + 1, stop)) != -1:
        if _is_single(text, place):
            return place
        stop = place
    return None


def _next_space(text: str, start: int) -> int | None:
    while (place := text.find(" ", start, len(text) - 1)) != -1:
        if _is_single(text, place):
            return place
        start = place + 1
    return None


def _is_single(text: str, place: int) -> bool:
    return not text[place - 1].isspace() and not text[place + 1].isspace()


def joins_before(char: str) -> bool:
    """Return whether NFC can join the character with the previous one (marks, Hangul vowels and final consonants)."""
    return unicodedata.category(char)[0] == "M" or "\u1160" <= char <= "\u11ff"


MAX_FILE_BYTES = 64 * 2**20


class TokenizerFile(ABC):
    """Conversion between text and ids that is stored in one tokenizer.json, which contains no code."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, including special ones."""

    @abstractmethod
    def to_json(self) -> str:
        """Return the content of tokenizer.json."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, see `encode`."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without ids for its beginning and end.

        Raises: DataError: the text contains an unpaired surrogate.
        """
        return self.encode_batch([text])[0]

    @property
    def digest(self) -> str:
        """SHA-256 of the file's bytes, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode("utf-8")).hexdigest()

    def files(self) -> dict[str, bytes]:
        """Return the name and the content of tokenizer.json."""
        return {"tokenizer.json": self.to_json().encode("utf-8")}

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json in one step.

        Raises: SaveError: the path cannot be written; an older file is unchanged.
        """
        write_output(Path(path), self.to_json().encode("utf-8"))

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """Return the ids as integers. Raises: DataError: an id is outside the vocabulary."""
        known = [int(index) for index in ids]
        if known and not (min(known) >= 0 and max(known) < self.vocab_size):
            wrong = next(index for index in known if not 0 <= index < self.vocab_size)
            raise DataError(f"Id {wrong} is outside the vocabulary; ids are 0 to {self.vocab_size - 1}.")
        return known


def read_tokenizer_file(path: str | Path) -> str:
    """Return the text of a tokenizer.json.

    Raises: DataError: it is missing, not a regular file, too large, or not UTF-8.
    """
    path = Path(path)
    try:
        return read_limited(path, MAX_FILE_BYTES).decode("utf-8")
    except OSError as error:
        raise DataError(f"Cannot read the tokenizer {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}; it is damaged or not a tokenizer file.") from None


def parse_json(content: str | bytes, where: str) -> Any:
    """Return the value of a JSON text. where: its name in the message.

    Raises: DataError: the content is not JSON in UTF-8.
    """
    try:
        return json.loads(content if isinstance(content, str) else content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}.") from None


def check_encodable(texts: Sequence[str]) -> None:
    """Raise DataError for unpaired surrogates, which Python and JSON can store but UTF-8 and the library cannot."""
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        for number, text in enumerate(texts):
            for position, char in enumerate(text):
                if "\ud800" <= char <= "\udfff":
                    raise DataError(
                        f"Text {number} contains half a surrogate pair (U+{ord(char):04X}) at character {position};"
                        " it is not valid Unicode text. Remove or replace that character."
                    ) from None


SPECIAL_PIECES = ("<pad>", "<s>", "</s>", "<unk>")  # ids 0 to 3
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))  # ids 4 to 259 of `bpe` and `unigram`
SPACE_SIGN = "▁"  # shown for a space inside a piece
BYTE_SCORE = -100.0  # unigram log-probability of a byte; low, so that bytes are used only if no piece fits
MAX_PIECES = 1_000_000
LANGUAGE_FORMAT = "manyheads.vocabulary"  # `format` in the tokenizer.json of a language model; a translator has none
MODEL_TYPES = {"bpe": "BPE", "unigram": "Unigram", "word": "WordLevel"}

# A word includes the space before it and apostrophes inside it. Digits are grouped by three, other signs are separate.
# The last of several spaces belongs to the next word. Letters, digits and signs are never joined, so no learned piece
# can equal a special or a byte piece.
WORD_PATTERN = (
    r" ?[\p{L}\p{M}]+(?:['’][\p{L}\p{M}]+)*"
    r"| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


# Characters without width or meaning in a sentence: control characters, the soft hyphen, zero-width spaces and the
# marks of writing direction. Joiners have one after marks (Indic scripts), in Arabic, Syriac, Mongolian and in emoji;
# variation selectors and the tags of flags have one behind pictures, but not behind letters.
# The patterns are valid in Oniguruma and in JavaScript, where exports are read.
NO_WIDTH = (
    r"[\x00-\x08\x0E-\x1B\u007F-\u0084\u0086-\u009F\u00AD\u034F\u061C\u17B4\u17B5\u180E\u200B\u200E\u200F\u202A-\u202E"
    r"\u2060-\u206F\uFEFF\uFFF9-\uFFFB]"
    r"|(?<![\p{M}\p{So}\p{Sk}\u0600-\u077F\u08A0-\u08FF\u1800-\u18AF\uFB50-\uFDFF\uFE70-\uFEFC])[\u200C\u200D]"
    "|(?<![^\\p{L}\\s.,;:!?\"')])[\\uFE00-\\uFE0F\U000e0000-\U000e0fff]+"
)
WHITE = r"[\s\x1C-\x1F\u0085\u2800\u3164\uFFA0]+"  # also characters that show nothing: of Braille, Hangul fillers
BEFORE_MARKS = r"[\u00A0\u2009\u202F]+(?=[.,;:!?]+(?:\s|$))"  # of sources, where it means as much as no space
# No-break spaces belong to a language: to French before a semicolon.
WHITE_OF_TARGETS = r"[\t-\r\x1C-\x20\u0085\u1680\u2000-\u200A\u2028\u2029\u205F\u3000]+"


def normalizer(kind: str, lowercase: bool, white: str = "") -> dict[str, Any]:
    """Normalise to NFC, fold case if requested, and add a space in front, so that a first word is like any other.

    Args: white: pattern of what becomes a single space between words and nothing at the ends; characters without width
        then are left out, too. Empty: all of them stay.
    """
    stages: list[dict[str, Any]] = [{"type": "NFC"}]
    if white:
        for pattern, content in replacements(white):
            stages.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
        stages.append({"type": "Strip", "strip_left": True, "strip_right": True})
    if lowercase:
        stages.append({"type": "Lowercase"})
    if kind != "word":
        stages.append({"type": "Prepend", "prepend": " "})
    return {"type": "Sequence", "normalizers": stages}


def replacements(white: str) -> list[tuple[str, str]]:
    """Return patterns and what replaces them, in order. Args: white: see `normalizer`."""
    return [(NO_WIDTH, ""), *([(BEFORE_MARKS, "")] if white == WHITE else []), (white, " ")]


def pre_tokenizer(kind: str) -> dict[str, Any]:
    """Split the text before the model is applied."""
    if kind == "word":
        return {"type": "WhitespaceSplit"}
    return {"type": "Split", "pattern": {"Regex": WORD_PATTERN}, "behavior": "Isolated", "invert": False}


def decoder(kind: str) -> dict[str, Any] | None:
    """Convert bytes to characters, join pieces and remove the leading space; words are joined by spaces."""
    if kind == "word":
        return None
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, strip]}


def model(kind: str, pieces: list[str], extra: list[Any]) -> dict[str, Any]:
    """Return the model part. extra: the merges as pairs of pieces for `bpe`, a score for each piece for `unigram`."""
    if kind == "unigram":
        scored = [list(item) for item in zip(pieces, extra, strict=True)]
        return {"type": "Unigram", "unk_id": 3, "vocab": scored, "byte_fallback": True}
    vocab = {piece: index for index, piece in enumerate(pieces)}
    if kind == "word":
        return {"type": "WordLevel", "vocab": vocab, "unk_token": SPECIAL_PIECES[3]}
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": SPECIAL_PIECES[3],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": extra,
    }


def heads_of(kind: str) -> tuple[str, ...]:
    """Return the first pieces of every vocabulary of a kind."""
    return SPECIAL_PIECES if kind == "word" else SPECIAL_PIECES + BYTE_PIECES


def assemble(
    kind: str,
    lowercase: bool,
    pieces: list[str],
    extra: list[Any],
    num_symbols: int = 0,
    num_tags: int = 0,
    normalize_spaces: bool = False,
) -> dict[str, Any]:
    """Return the content of tokenizer.json in the format of the `tokenizers` library.

    Args:
        kind: `bpe`, `unigram` or `word`.
        lowercase: fold case.
        pieces: all pieces by id, special and byte pieces first.
        extra: see `model`.
        num_symbols: number of pieces after the special and byte pieces that stand for whole words of targets.
        num_tags: number of pieces at the end that name the language of the translation, see `text.sides`.
        normalize_spaces: see `settings.TokenizerSettings`.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    first = len(heads_of(kind))
    added = [*range(3), *range(first, first + num_symbols), *range(len(pieces) - num_tags, len(pieces))]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": pieces[index], **flags} for index in added],
        "normalizer": normalizer(kind, lowercase, WHITE if normalize_spaces else ""),
        "pre_tokenizer": pre_tokenizer(kind),
        "post_processor": None,
        "decoder": decoder(kind),
        "model": model(kind, pieces, extra),
    }


def take_apart(data: Any, where: str) -> tuple[str, bool, list[str], list[Any], int, int, bool]:
    """Return the arguments of `assemble` for a parsed file.

    Raises: DataError: the content differs from the result of `assemble`; `where` is its name in the message.
    """
    part = data.get("model") if isinstance(data, dict) else None
    kinds = [kind for kind, name in MODEL_TYPES.items() if isinstance(part, dict) and part.get("type") == name]
    if isinstance(data, dict) and data.get("format") == LANGUAGE_FORMAT:
        raise DataError(
            f"{where} is the vocabulary of a language model, which continues texts (`manyheads generate`) and cannot"
            " translate; give the tokenizer of a translation model."
        )
    if not kinds or not isinstance(part, dict):
        raise DataError(
            f"{where} is not a tokenizer of manyheads: it has no model of type {', '.join(MODEL_TYPES.values())}."
        )
    kind = kinds[0]
    pieces, extra = _read_pieces(kind, part.get("vocab"), part.get("merges"), where)
    heads = heads_of(kind)
    for index, piece in enumerate(heads):
        if index >= len(pieces) or pieces[index] != piece:
            found = repr(pieces[index]) if index < len(pieces) else "missing"
            raise DataError(
                f"{where}: id {index} must be {piece}, but it is {found}; the file is damaged, or not a"
                " tokenizer of manyheads."
            )
    added = data.get("added_tokens")
    named = max(0, len(added) - 3) if isinstance(added, list) else 0
    named = min(named, len(pieces) - len(heads))
    num_tags = sum(1 for _ in takewhile(TAG.fullmatch, reversed(pieces[len(pieces) - named :])))
    num_symbols = named - num_tags
    expected = assemble(kind, False, pieces, extra, num_symbols, num_tags)
    for lowercase, normalize_spaces in product((False, True), repeat=2):
        normal = normalizer(kind, lowercase, WHITE if normalize_spaces else "")
        if data == {**expected, "normalizer": normal}:
            return kind, lowercase, pieces, extra, num_symbols, num_tags, normalize_spaces
    odd = [key for key in sorted({*data, *expected}) if data.get(key) != expected.get(key)]
    raise DataError(
        f"{where} was changed or damaged: unexpected content under {', '.join(odd)}. Train the tokenizer again."
    )


def _read_pieces(kind: str, vocab: Any, merges: Any, where: str) -> tuple[list[str], list[Any]]:
    """Return the pieces by id, and the scores or merges, after checking all that the Rust library might fail on."""
    if not isinstance(vocab, list if kind == "unigram" else dict) or not 0 < len(vocab) <= MAX_PIECES:
        raise DataError(f"{where}: the vocabulary is missing, of a wrong type, or larger than {MAX_PIECES} pieces.")
    if kind == "unigram":
        for index, item in enumerate(vocab):
            good = isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and type(item[1]) is float
            if not good or not math.isfinite(item[1]):
                raise DataError(f"{where}: entry {index} of the vocabulary is not a piece with a finite score.")
        pieces = [item[0] for item in vocab]
        _check_texts(pieces, where)
        return pieces, [item[1] for item in vocab]
    pieces = sorted(vocab, key=lambda piece: vocab[piece] if type(vocab[piece]) is int else -1)
    if any(type(vocab[piece]) is not int or vocab[piece] != index for index, piece in enumerate(pieces)):
        raise DataError(f"{where}: the ids of the {len(pieces)} pieces are not 0 to {len(pieces) - 1}, each once.")
    _check_texts(pieces, where)
    if kind == "word":
        return pieces, []
    if not isinstance(merges, list):
        raise DataError(f"{where}: the list of merges is missing.")
    for index, pair in enumerate(merges):
        good = (
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(half, str) and half in vocab for half in pair)
        )
        if not good or "".join(pair) not in vocab:
            raise DataError(f"{where}: merge {index} does not join two known pieces into a known one.")
    return pieces, merges


def _check_texts(pieces: list[str], where: str) -> None:
    """Check that every piece is unique, not empty and valid UTF-8."""
    if len(set(pieces)) != len(pieces) or "" in pieces:
        raise DataError(f"{where}: a piece of the vocabulary is empty or occurs twice.")
    try:
        "".join(pieces).encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(
            f"{where}: a piece of the vocabulary contains half a surrogate pair, which is not valid Unicode."
        ) from None


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model folder contains a tokenizer, complete or not."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "source.spm"))
