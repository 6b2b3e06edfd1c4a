"""Glossaries on the server's disk: terms that a client stored, to be used by its later requests.

A glossary belongs to the key of the client that made it, and no other key sees it. A file is named by an id of ours in
a folder that is named by a digest of the key, so nothing that a client sends becomes a part of a path. The first line
of a file describes the glossary, the second one has its terms; so a list of many glossaries is read quickly.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import threading
import unicodedata
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from manyheads.errors import ConfigError, SaveError
from manyheads.extras.documents.terms import Term, Terms
from manyheads.extras.serving.refusals import Refusal
from manyheads.extras.serving.settings import plain_tag
from manyheads.files.commit import remove_stale, write_file
from manyheads.files.safe_open import open_regular, read_limited

MOST_GLOSSARIES = 1_000
"""Of one key."""
MOST_BYTES = 1_000_000
"""Of the terms of a glossary, as lines of source and target in UTF-8."""
MOST_BODY_BYTES = 6 * MOST_BYTES + (1 << 16)
"""Of a request with a glossary: in JSON, a character may be written as six."""
MOST_NAME = 1_024
NOTE = "Terms are forced as they are written; they are not inflected."
_MOST_FILE_BYTES = 1 << 24
_MOST_READY = 16
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DIGEST = "manyheads glossaries of the key "


def base_language(tag: str) -> str:
    """Return a language without its region: glossaries are of languages."""
    return plain_tag(tag).partition("-")[0]


@dataclass(frozen=True)
class TermList:
    """The terms of a language pair. source_lang, target_lang: without regions. entries: (source, target)."""

    source_lang: str
    target_lang: str
    entries: tuple[tuple[str, str], ...]

    @property
    def pair(self) -> tuple[str, str]:
        """Both languages."""
        return self.source_lang, self.target_lang

    def tsv(self) -> str:
        """Return the terms as lines of source and target, separated by a tab."""
        return "\n".join(f"{source}\t{target}" for source, target in self.entries)

    def with_entries(self, other: TermList) -> TermList:
        """Return these terms and others, of which the others replace those of an equal source."""
        merged = {source.casefold(): (source, target) for source, target in (*self.entries, *other.entries)}
        return replace(self, entries=tuple(merged.values()))


@dataclass(frozen=True)
class Head:
    """The description of a glossary, without its terms. counts: (source language, target language, number of terms)."""

    id: str
    name: str
    created: str
    counts: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True)
class Glossary:
    """A glossary. created: time in ISO 8601. lists: the terms of each language pair."""

    id: str
    name: str
    created: str
    lists: tuple[TermList, ...]

    @property
    def head(self) -> Head:
        """Everything but the terms."""
        return Head(self.id, self.name, self.created, tuple((*one.pair, len(one.entries)) for one in self.lists))

    def list_of(self, source_lang: str, target_lang: str) -> TermList:
        """Return the terms of a language pair. Raises: Refusal: it has none for this pair."""
        pair = base_language(source_lang), base_language(target_lang)
        for one in self.lists:
            if one.pair == pair:
                return one
        has = ", ".join(f"{source} to {target}" for source, target in (one.pair for one in self.lists)) or "nothing"
        raise Refusal(
            400, f"glossary_id: the glossary is for {has}, not for the languages of this request; choose another one.",
            code="glossary_language", field="glossary_id",
        )  # fmt: skip

    def with_lists(self, lists: Iterable[TermList]) -> Glossary:
        """Return the glossary with other terms for some language pairs."""
        merged = {one.pair: one for one in (*self.lists, *lists)}
        return replace(self, lists=tuple(merged.values()))


def parse_entries(text: str, kind: str, pair: tuple[str, str], field: str = "entries") -> tuple[tuple[str, str], ...]:
    """Return the terms of a text of lines with source and target; empty lines are left out.

    Args: kind: `tsv` or `csv`; a line of CSV may name the languages of the pair in two more columns.

    Raises: Refusal: a line is malformed, a source has two targets, or there are no terms, or too many.
    """
    if kind not in ("tsv", "csv"):
        raise Refusal(422, f"{field}: the format of entries is tsv or csv.", code="invalid", field="entries_format")
    if len(text.encode()) > MOST_BYTES:
        raise too_large(field)
    text = text.removeprefix("\ufeff")  # of a file that was saved by Excel
    targets: dict[str, str] = {}
    entries: list[tuple[str, str]] = []
    for number, columns in _rows(text, kind, field):
        cells = [unicodedata.normalize("NFC", column.strip()) for column in columns]
        if kind == "csv" and len(cells) == 4 and tuple(map(base_language, cells[2:])) == pair:
            cells = cells[:2]
        if len(cells) != 2 or not all(cells):
            raise _malformed(field, number, "it must have a source and a target, and neither of them is empty")
        if any(unicodedata.category(char) in ("Cc", "Zl", "Zp") for cell in cells for char in cell):
            raise _malformed(field, number, "it has a control character")
        known = targets.get(cells[0].casefold())
        if known not in (None, cells[1]):
            raise _malformed(field, number, "it gives a source another target than a line before it")
        if known is None:
            targets[cells[0].casefold()] = cells[1]
            entries.append((cells[0], cells[1]))
    if not entries:
        raise Refusal(422, f"{field}: there are no terms; a line is source, tab, target.", code="invalid", field=field)
    return tuple(entries)


def _rows(text: str, kind: str, field: str) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield the number and the columns of each line that is not empty."""
    if kind == "tsv":
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield number, line.removesuffix("\r").split("\t")
        return
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for columns in reader:
            if any(map(str.strip, columns)):
                yield reader.line_num, columns
    except csv.Error:
        raise _malformed(field, reader.line_num, "its quotation marks do not match, or it is too long") from None


def _malformed(field: str, number: int, reason: str) -> Refusal:
    return Refusal(422, f"{field}: line {number:,} is malformed: {reason}.", code="invalid", field=field)


def too_large(field: str) -> Refusal:
    """Return the refusal of too many terms."""
    return Refusal(
        413, f"{field}: the terms have more than {MOST_BYTES:,} bytes; divide the glossary.",
        code="glossary_size", field=field,
    )  # fmt: skip


def terms_of(entries: Iterable[tuple[str, str]]) -> Terms:
    """Return terms for a search. Of an equal source the first one counts."""
    first: dict[str, Term] = {}
    for source, target in entries:
        first.setdefault(source.casefold(), Term(source, target))
    return Terms(list(first.values()))


def parse_terms(lines: str | None) -> Terms:
    """Return the terms of lines of source and target; none without lines. Raises: Refusal: a line is malformed."""
    if not lines or not lines.strip():
        return Terms()
    return terms_of(parse_entries(lines, "tsv", ("", ""), "terms"))


class Glossaries:
    """The glossaries in a folder. Methods may be called from any thread.

    Raises: ConfigError: the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._ready: OrderedDict[tuple[object, ...], Terms] = OrderedDict()
        try:
            if not folder.is_dir():
                folder.mkdir(mode=0o700, parents=True)
            probe = folder / f"probe-{uuid.uuid4()}"
            write_file(probe, b"")
            probe.unlink()
            for each in folder.iterdir():
                remove_stale(each)  # of a server that was killed while it wrote
        except (OSError, SaveError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it cannot be written"
            raise ConfigError(
                f"cannot keep glossaries in {folder}: {reason}; name a folder that this user may write, with"
                " --glossaries.", fields=("glossaries",),
            ) from None  # fmt: skip

    def create(self, owner: str, name: str, lists: Sequence[TermList]) -> Glossary:
        """Store a new glossary. owner: a key. Raises: Refusal: there are too many, or see `_checked`."""
        created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        glossary = _checked(Glossary(str(uuid.uuid4()), name, created, tuple(lists)))
        with self._lock:
            count = len(self._files(owner))
            if count >= MOST_GLOSSARIES:
                raise Refusal(
                    456, f"This key has {count:,} glossaries, which is the limit; delete one.", code="glossaries"
                )
            self._write(owner, glossary)
        return glossary

    def heads(self, owner: str) -> list[Head]:
        """Return the glossaries of a key, the oldest first."""
        heads = []
        for path in self._files(owner):
            try:
                with _reading(), open_regular(path) as file:
                    heads.append(_head(json.loads(file.readline(_MOST_FILE_BYTES))))
            except Refusal as refusal:
                if refusal.status != 404:  # deleted in the meantime
                    raise
        return sorted(heads, key=lambda head: (head.created, head.id))

    def get(self, owner: str, glossary_id: str) -> Glossary:
        """Return a glossary. Raises: Refusal: this key has none with this id."""
        with _reading():
            lines = read_limited(self._path(owner, glossary_id), _MOST_FILE_BYTES).split(b"\n")
            head, lists = _head(json.loads(lines[0])), json.loads(lines[1])
            return Glossary(head.id, head.name, head.created, tuple(
                TermList(source, target, tuple((one, other) for one, other in entries))
                for source, target, entries in lists
            ))  # fmt: skip

    @contextmanager
    def changing(self, owner: str, glossary_id: str) -> Iterator[list[Glossary]]:
        """Hold the lock while a glossary is changed: a list with it, whose last item is stored at the end.

        Raises: Refusal: this key has none with this id, or see `_checked`.
        """
        with self._lock:
            versions = [self.get(owner, glossary_id)]
            yield versions
            self._write(owner, _checked(versions[-1]))

    def delete(self, owner: str, glossary_id: str) -> None:
        """Delete a glossary. Raises: Refusal: this key has none with this id."""
        with self._lock, _reading():
            self._path(owner, glossary_id).unlink()

    def terms(self, owner: str, ids: Sequence[str], source_lang: str, target_lang: str) -> Terms:
        """Return the terms of glossaries for a language pair; of an equal source those of the first glossary.

        Raises: Refusal: this key has no such glossary, or it has no terms for this pair.
        """
        stamps = []
        for one in ids:
            with _reading():
                status = self._path(owner, one).stat()
            stamps.append((status.st_mtime_ns, status.st_ino))  # a change makes a new file
        key = (owner, *ids, base_language(source_lang), base_language(target_lang), *stamps)
        with self._lock:
            if key in self._ready:
                self._ready.move_to_end(key)
                return self._ready[key]
        lists = [self.get(owner, one).list_of(source_lang, target_lang) for one in ids]
        found = terms_of(entry for one in lists for entry in one.entries)
        with self._lock:
            self._ready[key] = found
            while len(self._ready) > _MOST_READY:
                self._ready.popitem(last=False)
        return found

    def _of(self, owner: str) -> Path:
        return self._folder / hashlib.sha256((_DIGEST + owner).encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def _path(self, owner: str, glossary_id: str) -> Path:
        if not _ID.fullmatch(glossary_id):
            raise not_found()
        return self._of(owner) / f"{glossary_id}.json"

    def _files(self, owner: str) -> list[Path]:
        folder = self._of(owner)
        return [path for path in folder.iterdir() if _ID.fullmatch(path.stem)] if folder.is_dir() else []

    def _write(self, owner: str, glossary: Glossary) -> None:
        """Store a glossary in one step. The lock is held."""
        folder, head = self._of(owner), json.dumps(asdict(glossary.head))
        lists = json.dumps([[*one.pair, one.entries] for one in glossary.lists], ensure_ascii=False)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            write_file(folder / f"{glossary.id}.json", f"{head}\n{lists}\n".encode())
        except (OSError, SaveError):
            raise Refusal(
                507, "The server cannot store the glossary: its disk is full or cannot be written. Try again later.",
                code="disk",
            ) from None  # fmt: skip


def _checked(glossary: Glossary) -> Glossary:
    """Raises: Refusal: the name, the number of language pairs or the size is not permitted."""
    if not glossary.name.strip() or len(glossary.name) > MOST_NAME or not glossary.name.isprintable():
        raise Refusal(
            422, f"name: give 1 to {MOST_NAME:,} printable characters.", code="invalid", field="name"
        )  # fmt: skip
    pairs = [one.pair for one in glossary.lists]
    if len(set(pairs)) < len(pairs):
        raise Refusal(
            422, "dictionaries: two of them are for the same languages; join them.", code="invalid",
            field="dictionaries",
        )  # fmt: skip
    if sum(len(one.tsv().encode()) for one in glossary.lists) > MOST_BYTES:
        raise too_large("entries")
    return glossary


def _head(values: dict[str, object]) -> Head:
    counts = values["counts"]
    assert isinstance(counts, list)
    return Head(
        str(values["id"]), str(values["name"]), str(values["created"]),
        tuple((str(source), str(target), int(count)) for source, target, count in counts),
    )  # fmt: skip


@contextmanager
def _reading() -> Iterator[None]:
    """Raises: Refusal: there is no such file, or it is damaged."""
    try:
        yield
    except FileNotFoundError:
        raise not_found() from None
    except (OSError, ValueError, KeyError, IndexError, TypeError, AssertionError):
        raise Refusal(500, "The glossary's file is damaged; delete it and make it again.", code="glossary") from None


def not_found() -> Refusal:
    """Return the refusal of an id that this key does not have; whether another key has it is not told."""
    return Refusal(
        404, "glossary_id: this key has no such glossary; GET /v2/glossaries lists them.", code="glossary",
        field="glossary_id",
    )  # fmt: skip
