"""The delimiter of CSV text."""

from __future__ import annotations

import re

__all__ = ["csv_delimiter"]

_NAMED = re.compile(r'"?sep=([^"\r\n])"?(?:\r\n|\r|\n)')
_FIRST_LINE = re.compile(r"[^\r\n]*")


def csv_delimiter(text: str, start: int = 0) -> tuple[str, int]:
    """Return the delimiter, and where the table begins.

    A line such as `sep=;` above the table, which Excel reads, names the delimiter. Otherwise it is the comma, the
    semicolon, the tab or |, whichever the first line has most outside of quotation marks.

    Args: start: of the text, behind a byte order mark.
    """
    if named := _NAMED.match(text, start):
        return named[1], named.end()
    line = _FIRST_LINE.match(text, start)
    head = re.sub(r'"[^"]*"', "", line[0] if line else "")
    return max(",;\t|", key=head.count), start
