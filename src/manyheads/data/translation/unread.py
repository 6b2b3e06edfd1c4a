"""Files whose lines are no sentences, by the ending of their name."""

from __future__ import annotations

from pathlib import Path, PurePath

from manyheads.data.lines import describe
from manyheads.errors import DataError

# Known formats without a reader: line by line, their keys, times and code would be translated. Endings that also
# name a language, such as `.rar` and `.smi`, are left out where lines are more likely.
_UNREAD = {
    "subtitles in another format": "ass ssa sbv sub ttml dfxp lrc",
    "a catalogue of messages": "po pot xlf xliff sdlxliff mqxliff resx resw strings stringsdict xcstrings arb ftl",
    "a translation memory or glossary": "tmx tbx",
    "code": "py js cjs mjs jsx tsx java php",
    "JSON": "json json5 jsonc geojson ipynb webmanifest",
    "XML": "xml svg rss atom xsl xslt plist dita docbook opf ncx fb2",
    "a file of settings": "yaml yml toml ini properties cfg",
    "markup of another kind": "rst adoc asciidoc tex latex textile mediawiki mdx",
    "an office document": "docx doc odt rtf pages pptx ppt odp xlsx xls ods numbers",
    "a book or a printed page": "pdf epub mobi azw3 djvu",
}
# Of these no ending is also the name of a language, as `arb` and `lrc` are, so files of lines do not bear them.
_NEVER_LINES = ("a translation memory or glossary", "JSON", "XML", "an office document", "a book or a printed page")


def unread_format(name: str) -> str | None:
    """Return what a file of this name is, if it is in a known format without a reader; before `.gz`."""
    ending = PurePath(name.lower().removesuffix(".gz")).suffix[1:]
    return next((what for what, endings in _UNREAD.items() if ending in endings.split()), None)


def refuse_documents(*paths: str | Path) -> None:
    """Check that files, whose lines are to be read as sentences, are no documents by their names.

    Raises: DataError: one is.
    """
    for path in paths:
        what = unread_format(str(path))
        if what in _NEVER_LINES:
            raise DataError(
                f"{describe(path)} is {what}, and its lines are no sentences; convert it to a file with one sentence a"
                " line, or rename it if it is one."
            )
