"""Full stops beside numbers that do not end a sentence: `Jan. 5`, `Fig. 3`, `5. Dez.`."""

from __future__ import annotations

import re

__all__ = ["stands_before_number"]

_MONTHS = frozenset(
    """jan janv feb febr févr fev mär mrz mrt apr avr abr jun jul juil aug sep sept oct okt ott nov dec dez déc dic
    ene gen giu lug""".split()  # noqa: SIM905
)
_PLACES = frozenset(
    "fig figs vol vols ch chap kap p pp pag pág págs blz bd nr nrn num núm eq eqs abb abs art ziff".split()  # noqa: SIM905
)
# Without a capital letter these end sentences, too.
_CAPITAL = frozenset("Mar Sec Secs Tab Cap Ex Ref S No Nos".split())  # noqa: SIM905
_LAST_WORD = re.compile(r"(?<![\w.])([^\W\d_]+)\.\s*\Z")
_LAST_NUMBER = re.compile(r"(?<![\w.])\d{1,2}\.\s*\Z")
_FIRST_WORD = re.compile(r"\s*([^\W\d_]+)\.")
_NUMBER = re.compile(r"\s*\d")
_MOST_CHARACTERS = 40


def stands_before_number(before: str, after: str) -> bool:
    """Return whether the full stop at the end of `before` belongs to an abbreviation of a number that `after` begins
    with, or to an ordinal before an abbreviated month.
    """
    before = before[-_MOST_CHARACTERS:]
    if _NUMBER.match(after):
        word = _LAST_WORD.search(before)
        return word is not None and (word[1] in _CAPITAL or word[1].lower() in _MONTHS | _PLACES)
    month = _FIRST_WORD.match(after)
    return month is not None and month[1].lower() in _MONTHS and _LAST_NUMBER.search(before) is not None
