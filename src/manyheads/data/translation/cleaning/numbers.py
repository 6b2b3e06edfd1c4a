"""Numbers in two texts that may be translations of each other, in any digits and with any separators."""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

# Digits of any script; between them one separator of groups, of decimals, or of hours and minutes.
_NUMBER = re.compile(r"\d+(?:(?:[.,:'’\u066b\u066c \u00a0\u2009\u202f]|\s?h\s?)\d+)*")
_DIGITS = re.compile(r"\d+")
_OTHER_DIGIT = re.compile(r"[^\D0-9]")
_THOUSANDS = re.compile(r"(?<=\d)(?:000)+\Z")
_YEAR = re.compile(r"[12]\d{3}")
_HALF_OF_DAY = re.compile(r"\d\s?(?:[ap]\.?\s?m\b|o['’]clock)", re.IGNORECASE)


class _Number(NamedTuple):
    """A number as it can be read.

    whole: all digits together, without thousands that are only zeros: 10,000 is 10.
    parts: the digits between separators, without zeros in front: those of at least two digits, and the hour of a time.
    digits: all digits without zeros at the end.
    is_decimal: at most two digits are behind the last separator.
    is_time: there are two parts, and the second has two digits.
    """

    whole: str
    parts: list[str]
    digits: str
    is_decimal: bool
    is_time: bool


def numbers_differ(source: str, target: str) -> bool:
    """Return whether each text has a number of at least two digits that is in no reading a number of the other.

    So 1,500 is 1500, 1 500 and 1.5; ३० is 30; 90 is 1990; 15:30 is 3.30; and a date has the same day, month and year in
    whatever order. What is in one text alone, as a number that the other has in words, is no difference.
    """
    first, second = _numbers(source), _numbers(target)
    hours = any(_HALF_OF_DAY.search(text) for text in (source, target))
    return _has_another(first, second, hours) and _has_another(second, first, hours)


def _numbers(text: str) -> list[_Number]:
    if not text.isascii():
        text = _OTHER_DIGIT.sub(lambda found: str(unicodedata.decimal(found[0])), text)
    found = []
    for one in _NUMBER.findall(text):
        runs = _DIGITS.findall(one)
        whole = "".join(runs).lstrip("0") or "0"
        if sum(map(len, runs)) > 1:
            is_time = len(runs) == 2 and len(runs[1]) == 2
            parts = [run.lstrip("0") for run in runs if (len(run) > 1 or is_time) and run.strip("0")]
            is_decimal = len(runs) > 1 and len(runs[-1]) < 3
            found.append(_Number(_THOUSANDS.sub("", whole), parts, whole.rstrip("0"), is_decimal, is_time))
    return found


def _has_another(numbers: list[_Number], others: list[_Number], hours: bool) -> bool:
    """Return whether a number is not among others. hours: 3 and 15 can be the same."""
    known = {part for other in others for part in (*other.parts, other.whole)}
    decimals = {other.digits for other in others if other.is_decimal}
    digits = {other.digits for other in others}
    years = {part[2:].lstrip("0") for part in known if _YEAR.fullmatch(part)}
    times = {
        str(int(part) % 12 or 12)
        for other in others
        if hours or other.is_time
        for part in other.parts
        if len(part) < 3 and int(part) < 25
    }
    found = known | years | times
    return not all(
        number.whole in known
        or number.digits in (digits if number.is_decimal else decimals)
        or all(
            part in found or (_YEAR.fullmatch(part) and part[2:].lstrip("0") in known)
            for part in number.parts or [number.whole]
        )
        for number in numbers
    )
