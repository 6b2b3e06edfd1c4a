"""Hints about texts whose form changes their scores: tokenised text, and other forms of the same signs."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_TOKENISED = re.compile(
    r"(?<=\S) [.,](?= |$)|(?<=\S) (?:'(?:s|re|ve|ll|d|m)|n't)(?= |$)|&(?:apos|quot|#91|#93|#124);|@-@"
)
"""Signs that tokenizers have moved away from their word, or escaped as Moses does. Some languages have spaces before
other signs, such as French."""
_PLAIN = re.compile(r"\w[.,](?= |$)|\w\w'(?:s|re|ve|ll|d|m|t)\b")
_MOST_TEXTS = 10_000
"""Texts of each side that are looked at, evenly spaced."""
_FORMS = {
    "quotation marks “ ” „ « »": (re.compile("[“”„«»]"), re.compile('"')),
    "apostrophes ’": (re.compile("[‘’]"), re.compile("'")),
    "full-width signs such as ， ！": (re.compile("[\uff01-\uff5e\uffe5]"), re.compile(r"[!-/:-@]")),
    "ellipses …": (re.compile("…"), re.compile(r"\.\.\.")),
    "no-break spaces": (re.compile("[\u00a0\u202f]"), re.compile(r"(?<=\S) (?=[:;!?»%])|(?<=«) ")),
    "ideographic spaces": (re.compile("\u3000"), re.compile(r"(?<=\S) (?=\S)")),
}
"""Form of a sign -> itself, and the plain form."""
_CLEARLY = 0.8
"""Share of one form on one side, where the other side has as large a share of the other form."""
_LEAST = 5
"""Signs of a form; fewer may be chance."""


def text_hints(
    hypotheses: Sequence[str], all_references: Sequence[Sequence[str]], tokenize: str, option: str = "--tokenize"
) -> list[str]:
    """Return a sentence for each thing in the texts that a person should know about their scores.

    Args:
        hypotheses: translations.
        all_references: one or several references for each.
        tokenize: BLEU's tokenizer; `none` expects tokenised text.
        option: which chooses it.
    """
    references = [text for one in all_references for text in one]
    sides = {"translations": hypotheses, "references": references}
    hints = []
    if counts := {name: count for name, one in sides.items() if (count := _count_not_composed(one))}:
        shown = " and ".join(f"{count:,} of the {name}" for name, count in counts.items())
        hints.append(
            f"{shown} {'are' if sum(counts.values()) > 1 else 'is'} not in Unicode's composed form (NFC); scores"
            " compare all texts in NFC, which other tools may not do."
        )
    some = {name: one[:: 1 + len(one) // _MOST_TEXTS] for name, one in sides.items()}
    if tokenize != "none" and (names := [name for name, one in some.items() if _is_tokenised(one)]):
        hints.append(
            f"The {' and the '.join(names)} look tokenised (such as `Hello , world .`), which changes BLEU; score"
            f" detokenised text, or give {option} none if both sides are tokenised alike."
        )
    for form, patterns in _FORMS.items():
        shares = {name: _share(one, *patterns) for name, one in some.items()}
        for one, other in (("translations", "references"), ("references", "translations")):
            if (shares[one] or 0) >= _CLEARLY and (share := shares[other]) is not None and share <= 1 - _CLEARLY:
                hints.append(f"The {one} have {form}, the {other} plain ones; scores count them as different.")
    return hints


def _count_not_composed(texts: Sequence[str]) -> int:
    return sum(not unicodedata.is_normalized("NFC", text) for text in texts)


def _is_tokenised(texts: Sequence[str]) -> bool:
    """Return whether most signs that tokenizers move stand alone."""
    alone = sum(len(_TOKENISED.findall(text)) for text in texts)
    return alone > sum(len(_PLAIN.findall(text)) for text in texts)


def _share(texts: Sequence[str], form: re.Pattern[str], plain: re.Pattern[str]) -> float | None:
    """Return the share of a form among the signs of both forms; None: there are few of them."""
    found, others = (sum(len(one.findall(text)) for text in texts) for one in (form, plain))
    return found / (found + others) if found + others >= _LEAST else None
