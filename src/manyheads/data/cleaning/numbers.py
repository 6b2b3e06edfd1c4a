"""Numbers in two texts that may be translations of each other, in any digits and with any separators."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

__all__ = ["numbers_differ"]

# Digits of any script; between them one separator of groups, of decimals, or of hours and minutes.
_NUMBER = re.compile(r"\d+(?:(?:[.,:'’\u066b\u066c \u00a0\u2009\u202f]|\s?h\s?)\d+)*")
_DIGITS = re.compile(r"\d+")
_OTHER_DIGIT = re.compile(r"[^\D0-9]")
_THOUSANDS = re.compile(r"(?<=\d)(?:000)+\Z")
_YEAR = re.compile(r"[12]\d{3}")
_HALF_OF_DAY = re.compile(r"\d\s?(?:[ap]\.?\s?m\b|o['’]clock)", re.IGNORECASE)


@dataclass(frozen=True)
class _Number:
    """A number as it can be read.

    Attributes:
        whole: all digits together, without thousands that are only zeros: 10,000 is 10.
        parts: the digits between separators: those of at least two digits, and the hour of a time, without zeros in
            front; none that is 0.
        digits: the digits of a decimal number without zeros at its ends; otherwise empty.
        is_time: there are two parts, and the second has two digits.
    """

    whole: str
    parts: frozenset[str]
    digits: str
    is_time: bool


def numbers_differ(source: str, target: str) -> bool:
    """Return whether each text has a number of at least two digits that is in no reading a number of the other.

    So 1,500 is 1500 and 1 500; ३० is 30; 90 is 1990; 15:30 is 3.30; and a date has the same day, month and year in
    whatever order. What is in one text alone, as a number that the other has in words, is no difference.
    """
    sides = [_numbers(text) for text in (source, target)]
    hours = any(_HALF_OF_DAY.search(text) for text in (source, target))
    return all(
        not all(_is_known(number, other, hours) for number in numbers)
        for numbers, other in ((sides[0], sides[1]), (sides[1], sides[0]))
    )


def _numbers(text: str) -> list[_Number]:
    if not text.isascii():
        text = _OTHER_DIGIT.sub(lambda found: str(unicodedata.decimal(found[0])), text)
    found = []
    for one in _NUMBER.findall(text):
        runs = _DIGITS.findall(one)
        whole = "".join(runs).lstrip("0") or "0"
        if sum(map(len, runs)) > 1:
            is_time = len(runs) == 2 and len(runs[1]) == 2
            parts = {run.lstrip("0") for run in runs if len(run) > 1 or is_time} - {""}
            digits = whole.rstrip("0") if len(runs) > 1 and len(runs[-1]) < 3 else ""
            found.append(_Number(_THOUSANDS.sub("", whole), frozenset(parts), digits, is_time))
    return found


def _is_known(number: _Number, others: list[_Number], hours: bool) -> bool:
    """Return whether a number is in others. hours: 3 and 15 can be the same."""
    known = {part for other in others for part in (*other.parts, other.whole)}
    if number.whole in known or any(_are_digits(number, other) for other in others):
        return True
    times = {str(int(part) % 12 or 12) for other in others for part in other.parts if _is_hour(part, other, hours)}
    years = {part[2:].lstrip("0") for part in known if _YEAR.fullmatch(part)}
    return all(
        part in known or part in times or part in years or (_YEAR.fullmatch(part) and part[2:].lstrip("0") in known)
        for part in number.parts or {number.whole}
    )


def _are_digits(one: _Number, other: _Number) -> bool:
    """Return whether two numbers differ only in zeros at their ends, as 1.5, 1,50 and 1500."""
    return (
        ""
        != (one.digits or other.digits)
        == (one.digits or one.whole.rstrip("0"))
        == (other.digits or other.whole.rstrip("0"))
    )


def _is_hour(part: str, number: _Number, hours: bool) -> bool:
    """Return whether a part of a number can be the hour of a time of day."""
    return len(part) < 3 and int(part) < 25 and (hours or number.is_time)
