"""Signs that text was prepared for another tool: its marks stand apart, or are escaped as Moses does it."""

from __future__ import annotations

import re
from collections.abc import Sequence

_APART = re.compile(r"\w [.,](?=\s|\Z)")
_ATTACHED = re.compile(r"\w[.,](?=\s|\Z)")
_ESCAPED = re.compile(r"&(?:apos|quot|amp|lt|gt|#91|#93|#124);|@-@")
_PLAIN = re.compile("['\"&<>]")
LEAST_TEXTS = 2
LEAST_SHARE = 0.01  # of the texts
MOST_OTHERS = 0.05  # plain marks for each escaped one


def how_prepared(texts: Sequence[str]) -> list[str]:
    """Return what is unusual about texts, for people: that they are tokenised, or escaped. Empty for natural text."""
    told = []
    least = max(LEAST_TEXTS, LEAST_SHARE * len(texts))
    apart = [len(_APART.findall(text)) for text in texts]
    with_apart = sum(count > 0 for count in apart)
    if with_apart >= least and sum(apart) > sum(len(_ATTACHED.findall(text)) for text in texts):
        told.append(f"is tokenised (' ,' or ' .' in {with_apart:,} of {len(texts):,} lines); detokenise it")
    escaped = [len(_ESCAPED.findall(text)) for text in texts]
    with_escaped = sum(count > 0 for count in escaped)
    if with_escaped >= least:
        plain = sum(len(_PLAIN.findall(_ESCAPED.sub("", text))) for text in texts)
        if plain <= MOST_OTHERS * sum(escaped):
            told.append(f"is escaped as Moses does it (&quot;, &apos;, @-@ in {with_escaped:,} lines); unescape it")
    return told
