"""Sentence pairs from TMX files, translation memories in XML.

Each translation unit is cut out of the file and parsed alone, so that a character that XML does not allow concerns its
unit only, and memory does not grow with the file. Declarations of entities are not read: nothing is expanded, and no
other file is opened.
"""

from __future__ import annotations

import codecs
import html
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.parsers import expat

from manyheads.data.lines import OnBadUtf8, ReadReport, describe, read_chunks
from manyheads.errors import DataError

MOST_UNIT_CHARS = 2**24
# Elements in a segment whose content is code of a document format, not text.
_CODE = frozenset({"bpt", "ept", "it", "ph", "ut"})
# The ends of a unit, and all that can hold the characters of a tag without being one.
_MARK = re.compile(
    r"<!--|-->|<!\[CDATA\[|\]\]>|<tu(?=[\s/>])|</tu\s*>|<header(?=[\s/>])|</(?:body|tmx)\s*>|<tmx(?=[\s/>])"
)
_LONGEST_MARK = 4096  # of spaces in an end tag
_ENDS = {"<!--": "-->", "<![CDATA[": "]]>"}
_DECLARED = re.compile(rb"""<\?xml[^>]{0,200}?\sencoding\s*=\s*["']([A-Za-z0-9._:-]{1,40})["']""")
_SOURCE_LANGUAGE = re.compile(r"""\ssrclang\s*=\s*(?:"([^"<]*)"|'([^'<]*)')""")
_ENCODINGS = ("utf-8", "utf-16", "ascii", "iso8859", "cp", "koi8", "mac", "shift_jis", "euc_", "gb", "big5")
_BAD = re.compile(
    r"(?P<kept><!--.*?(?:-->|\Z)|<!\[CDATA\[.*?(?:\]\]>|\Z)|&(?:amp|lt|gt|quot|apos);)|&#(?:x[0-9a-fA-F]{1,8}|[0-9]{1,9});"
    r"|&[A-Za-z][A-Za-z0-9]{1,30};|&|<(?![A-Za-z/!?_])|[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]",
    re.DOTALL,
)
_NO_CHARACTER = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]{2}")


class _Unit(NamedTuple):
    """A translation unit: its characters, the line on which it begins, and its number in the file."""

    text: str
    line: int
    number: int


Variant = tuple[str, str]
"""Language, as en-us, and text."""


def tmx_pairs(
    path: str | Path, languages: tuple[str | None, str | None], on_bad_utf8: OnBadUtf8, report: ReadReport
) -> Iterator[tuple[str, str]]:
    """Yield the segments of the translation units of a TMX file in two languages.

    Args:
        languages: as in BCP 47; `en` is also found as `en-GB`, and `en-GB` as `en`, but the exact tag is preferred.
            None: of a file in two languages, `srclang` of its header is the source, the other language the target; then
            the file is read twice.
        on_bad_utf8: for a unit with characters that XML does not allow: `fail`, `replace` them, or `skip` the unit.
        report: counts units, also those without one of the languages, and further variants of a language in a unit, of
            which the first is taken.

    Raises: DataError: the file is not TMX, has no such languages, or its languages do not tell which are meant.
    """
    name = describe(path)
    source, target = languages
    if source is None or target is None:
        source, target = _languages(path, name, languages)
    found: Counter[str] = Counter()
    num_pairs = num_units = 0
    for unit in _units(path, name):
        num_units += 1
        variants = _variants(unit, name, on_bad_utf8, report)
        if variants is None:
            report.lines += 1
            continue
        found.update({language for language, _ in variants})
        sides = [_of_language(variants, language) for language in (source, target)]
        if not sides[0] or not sides[1] or sides[0][0] is sides[1][0]:
            report.lines += 1
            report.units_incomplete += 1
            continue
        num_pairs += 1
        report.variants_ignored += len({id(one) for side in sides for one in side}) - 2
        yield sides[0][0][1], sides[1][0][1]
    if not num_units:
        raise DataError(f"{name} has no translation units (<tu>).")
    if not num_pairs and not report.bad_units_skipped:
        missing = [one for one in (source, target) if not any(_matches(language, one) for language in found)]
        lacks = f"no {' and no '.join(missing)}" if missing else f"no unit with both {source} and {target}"
        raise DataError(f"{name} has {lacks} in its {num_units:,} translation units; {_told(found)}.")


def _told(found: Counter[str]) -> str:
    shown = ", ".join(f"{language} ({count:,} units)" for language, count in found.most_common(8))
    return f"its languages are {shown}" if found else "none has a language and a segment (<seg>)"


def _languages(path: str | Path, name: str, given: tuple[str | None, str | None]) -> tuple[str, str]:
    """Return both languages, as all units of a file tell them.

    Raises: DataError: the file has other or more languages.
    """
    if not Path(path).is_file():
        raise DataError(f"{name} can be read once only, so give its languages by --source-lang and --target-lang.")
    header: list[str] = []
    found: Counter[str] = Counter()
    for unit in _units(path, name, header):
        variants = _variants(unit, name, "skip", ReadReport())
        found.update({language for language, _ in variants or ()})
    choose = "choose two by --source-lang and --target-lang"
    source, target = given
    if source is None and target is None:
        source = header[0] if header and header[0] not in ("", "*all*") else None
        if source is None:
            raise DataError(f"{name} does not say which of its languages is the source; {_told(found)}; {choose}.")
    known = source or target or ""
    others = {language.split("-")[0] for language in found if not _matches(language, known)}
    if len(others) != 1:
        told = f"more than one language beside {known}" if others else f"no language beside {known}"
        raise DataError(f"{name} has {told}; {_told(found)}; {choose}.")
    [other] = others
    return (source, other) if source is not None else (other, known)


def _matches(found: str, wanted: str) -> bool:
    """Return whether a language is the wanted one or a variety of it, as en-gb is of en, or what it is a variety of."""
    found, wanted = found.lower(), wanted.lower().replace("_", "-")
    return found == wanted or found.startswith(wanted + "-") or wanted.startswith(found + "-")


def _of_language(variants: list[Variant], language: str) -> list[Variant]:
    """Return the variants of a language and of its varieties; those with its exact tag are first."""
    found = [one for one in variants if _matches(one[0], language)]
    return sorted(found, key=lambda one: one[0] != language.lower().replace("_", "-"))


def _decoded(path: str | Path, name: str) -> Iterator[str]:
    """Yield the characters of the file. Bytes that are wrong become lone surrogates, which the parser refuses."""
    chunks = read_chunks(path)
    head = b""
    while len(head) < 256 and (chunk := next(chunks, b"")):
        head += chunk
    encoding = "utf-8-sig"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    elif head[:4] in (b"<\0?\0", b"\0<\0?", b"<\0t\0", b"\0<\0t"):
        encoding = "utf-16-le" if head[0] else "utf-16-be"
    elif declared := _DECLARED.search(head[:256]):
        wanted = declared[1].decode()
        try:
            encoding = codecs.lookup(wanted).name
        except LookupError:
            encoding = "unknown"
        if not encoding.startswith(_ENCODINGS):
            raise DataError(f"{name} has an unknown encoding: {wanted}; convert it to UTF-8, and name this in line 1.")
        # A file whose first line can be read in bytes is not in UTF-16, whatever the line says.
        encoding = "utf-8-sig" if encoding.startswith("utf") else encoding
    errors = "surrogatepass" if encoding.startswith("utf-16") else "surrogateescape"
    decoder = codecs.getincrementaldecoder(encoding)(errors)
    try:
        yield decoder.decode(head)
        for chunk in chunks:
            yield decoder.decode(chunk)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is damaged: its text is not {encoding} ({error.reason}).") from None


def _units(path: str | Path, name: str, header: list[str] | None = None) -> Iterator[_Unit]:
    """Yield the translation units. header: gets the source language.

    Raises: DataError: it is no TMX file, is incomplete, or a unit does not end.
    """
    text, place, number = "", 0, 0
    line, counted = 1, 0  # the line at the place in `text` up to which line ends are counted
    begun: int | None = None  # place of the unit
    waiting = ""  # the end of a comment or of a literal section
    seen: set[str] = set()
    for chunk in _decoded(path, name):
        # What is done is dropped; a mark may have its end in this chunk.
        place = max(place, len(text) - _LONGEST_MARK)
        low = place if begun is None else begun
        line += text.count("\n", counted, low)
        text, place, counted, begun = text[low:] + chunk, place - low, 0, None if begun is None else 0
        if len(text) - len(chunk) > MOST_UNIT_CHARS:
            raise DataError(f"{name}: line {line}: a translation unit does not end in {MOST_UNIT_CHARS:,} characters.")
        while found := _MARK.search(text, place):
            mark = found[0]
            kind = mark.rstrip(">").rstrip()
            if waiting:
                waiting = "" if mark == waiting else waiting
            elif mark in _ENDS:
                waiting = _ENDS[mark]
            elif kind == "<header" and header is not None:
                if (end := text.find(">", found.end())) < 0 and len(text) < MOST_UNIT_CHARS:
                    break  # the rest of it is in the next chunk
                if given := _SOURCE_LANGUAGE.search(text, found.start(), max(end, 0)):
                    header.append((given[1] or given[2] or "").strip())
            elif kind in ("<tu", "</tu", "</body", "</tmx"):  # the others end an empty <tu/>, or an unclosed unit
                if begun is not None:
                    yield _Unit(text[begun : found.end() if kind == "</tu" else found.start()], line, number)
                begun = found.start() if kind == "<tu" else None
                number += kind == "<tu"
                line += text.count("\n", counted, found.start())
                counted = found.start()
            seen.add(kind)
            place = found.end()
    if begun is not None:
        raise DataError(f"{name} ends inside the translation unit that begins in line {line}; is the file complete?")
    if "<tmx" not in seen:
        raise DataError(f"{name} is not a TMX file: it has no element <tmx>.")
    if "</tmx" not in seen:
        raise DataError(f"{name} is not a TMX file to its end: </tmx> is missing. Copy it once more.")


def _variants(unit: _Unit, name: str, on_bad_utf8: OnBadUtf8, report: ReadReport) -> list[Variant] | None:
    """Return the language and the text of each variant; None: the unit is skipped.

    Raises: DataError: the unit is not well-formed, and is not to be mended or skipped.
    """
    try:
        return _parsed(unit.text)
    except (expat.ExpatError, UnicodeEncodeError) as error:
        if on_bad_utf8 == "skip":
            report.bad_units_skipped += 1
            return None
        fault = next((one for one in _BAD.finditer(unit.text) if _mended(one) != one[0]), None)
        if fault is None:
            reason = expat.ErrorString(error.code) if isinstance(error, expat.ExpatError) else str(error)
            line = unit.line + (error.lineno - 1 if isinstance(error, expat.ExpatError) else 0)
            raise DataError(
                f"{name}: line {line}: translation unit {unit.number} is not XML ({reason}); correct it, or let"
                " --on-bad-utf8 skip it."
            ) from None
        if on_bad_utf8 == "fail":
            shown = fault[0].encode("utf-8", "surrogateescape" if "\udc80" <= fault[0] <= "\udcff" else "surrogatepass")
            line = unit.line + unit.text.count("\n", 0, fault.start())
            raise DataError(
                f"{name}: line {line}: translation unit {unit.number} has {str(shown)[1:]}, which XML does not allow"
                " there; correct it, or let --on-bad-utf8 replace it or skip the unit."
            ) from None
        report.bad_units_replaced += 1
        mended = unit._replace(text=_BAD.sub(_mended, unit.text))
    return _variants(mended, name, "fail", report)


def _mended(found: re.Match[str]) -> str:
    """Return what takes the place of characters that may be wrong: themselves, what was meant, or U+FFFD."""
    text = found[0]
    if found["kept"]:
        return _NO_CHARACTER.sub("\ufffd", text)
    if text.startswith("&#"):
        number = int(text[3:-1], 16) if text[2] == "x" else int(text[2:-1])
        is_character = 0 < number < 0x110000 and (number in (0xD, 0x85) or not _NO_CHARACTER.match(chr(number)))
        return text if is_character else "\ufffd"
    if text[0] in "&<":
        return html.escape(html.unescape(text), quote=False)
    return "\ufffd"


def _parsed(unit: str) -> list[Variant]:
    """Return the language and the text of each variant that has both a language and a segment."""
    variants: list[Variant] = []
    language = ""
    pieces: list[str] | None = None  # of the segment; a NUL stands for code
    depth = 0  # of elements in code

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal language, pieces, depth
        if name == "tuv":
            language = (attributes.get("xml:lang") or attributes.get("lang") or "").strip().lower().replace("_", "-")
        elif name == "seg" and pieces is None:
            pieces = []
        elif pieces is not None and (depth or name in _CODE):
            depth += 1

    def end(name: str) -> None:
        nonlocal language, pieces, depth
        if depth:
            depth -= 1
            if not depth and pieces is not None:
                pieces.append("\0")
        elif name == "seg" and pieces is not None:
            if language:
                variants.append((language, _segment("".join(pieces))))
            language, pieces = "", None  # a variant has one segment

    def characters(text: str) -> None:
        if pieces is not None and not depth:
            pieces.append(text)

    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, characters
    parser.Parse(unit, True)
    return variants


def _segment(text: str) -> str:
    """Return the text of a segment in one line. text: a NUL stands for code."""
    if text.isprintable():  # there is neither code nor a line break
        return text.strip(" ")
    first, *others = re.split("\0+", text)
    pieces = [first]
    for piece in others:
        pieces += [" " if _is_apart(pieces[-1][-1:], piece[:1]) else "", piece]
    return " ".join(filter(None, (line.strip(" \t") for line in re.split("[\r\n]", "".join(pieces)))))


def _is_apart(left: str, right: str) -> bool:
    """Return whether characters on both sides of code would be glued: two words, or an end and a beginning."""
    if not left or not right or left.isspace() or right.isspace() or left in "\"'" or _UNSPACED.match(left + right):
        return False
    opens, closes = unicodedata.category(left) in ("Ps", "Pi"), unicodedata.category(right) in ("Pe", "Pf", "Po")
    return not opens and (not closes or right in "¿¡&@#")
