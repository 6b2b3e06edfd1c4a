"""Stand-ins: words that the model reads and writes in place of things that are not words (see `text.words`).

A model seldom copies an address, and spells it wrongly where it has never seen one. It copies a name that it knows. So
such a name stands in the source, and the translation has the address in its place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from manyheads.decoding.forced import can_force
from manyheads.decoding.settings import DecodingSettings
from manyheads.decoding.translation_model import TranslationModel
from manyheads.text.sides import tag_of
from manyheads.text.words import AFTER, BEFORE, LETTER, is_loose, kept_index, stands

_NAMES = ("Tom", "Maria", "Anna", "Peter", "David", "Martin", "Daniel", "Robert", "Linda", "Paul", "Laura", "Alex")
"""First names that many languages spell alike."""
_LETTERS = "XYZQWVKJ"
MOST_STAND_INS = 16
_FINAL_MARKS = ".!?…。！？"


@dataclass(frozen=True, slots=True)
class Shown:
    """A text as the model reads it.

    Args:
        text: with stand-ins.
        names: the stand-ins, in their order. kept: the private characters for which they stand.
        tight: for each, whether a letter or another kept word stands directly before it, and directly after it.
        before, after: emoji at the ends and white space beside them, which the model does not read.
        is_inside: `after` stands in front of the marks that end the text.
        lost: private characters for which there is no stand-in.
    """

    text: str
    names: tuple[str, ...] = ()
    kept: str = ""
    tight: tuple[tuple[bool, bool], ...] = ()
    before: str = ""
    after: str = ""
    is_inside: bool = False
    lost: str = ""


def stand_ins_of(model: TranslationModel) -> Sequence[str]:
    """Return the words that a model can have as stand-ins, the best first: names that it copies, then letters.

    The first call for a target language searches a translation of each name.
    """
    found = model.stand_ins.get(model.target_lang)
    if found is None:
        reader, writer = model.tokenizer.source, model.tokenizer.target

        def is_known(word: str) -> bool:
            return reader.decode(reader.encode(word)) == word and can_force(writer, word)

        names = [word for word in (*_NAMES, *map(str.lower, _NAMES)) if is_known(word)]
        letters = [letter for letter in (*_LETTERS, *_LETTERS.lower()) if is_known(letter)]
        has_to_choose = model.tokenizer.target_languages and model.target_lang is None
        tag = tag_of(model.tokenizer.target_languages[0]) + " " if has_to_choose else ""
        settings = DecodingSettings(num_beams=1, max_new_tokens=8, rules=model.settings.rules)
        tried = model.by_torch().search.hypotheses([f"{tag}{name}." for name in names], settings, None)
        copied = {
            name: hypothesis.sum_log_prob / len(hypothesis.token_log_probs)
            for name, [hypothesis] in zip(names, tried, strict=True)
            if re.findall(r"\w+", writer.decode(hypothesis.ids)) == [name]
        }
        found = (*sorted(copied, key=lambda name: -copied[name]), *letters)[:MOST_STAND_INS]
        model.stand_ins[model.target_lang] = found
    return found


def show(text: str, names: Sequence[str], *, whole: bool = False, is_aligned: bool = False) -> Shown:
    """Return a text as the model reads it.

    Args:
        text: with private characters in place of kept words.
        names: stand-ins.
        whole: nothing is cut off at the ends.
        is_aligned: only characters are replaced, by single letters.
    """
    stop = len(text.rstrip(_FINAL_MARKS))
    start, end = 0, stop
    if not (whole or is_aligned) and any(map(is_loose, text)):
        start = len(text) - len(_without_loose_start(text))
        end = start + len(_without_loose_start(text[start:stop][::-1]))
    core = text[start:end] + text[stop:]
    used = core.casefold()
    free = [name for name in names if name.casefold() not in used]
    shown: list[str] = []
    stands_for: list[tuple[str, str, tuple[bool, bool]]] = []
    lost = ""
    for place, char in enumerate(core):
        if kept_index(char) is None:
            shown.append(char)
        elif len(stands_for) == len(free):
            lost += char
        else:
            before, after = core[place - 1 : place] if place else "", core[place + 1 : place + 2]
            tight = tuple(not is_aligned and _is_joined(one) for one in (before, after))
            shown += [" " * (tight[0] and shown[-1:] != [" "]), free[len(stands_for)], " " * tight[1]]
            stands_for.append((free[len(stands_for)], char, (tight[0], tight[1])))
    return Shown(
        text="".join(shown),
        names=tuple(name for name, _, _ in stands_for),
        kept="".join(char for _, char, _ in stands_for),
        tight=tuple(tight for _, _, tight in stands_for),
        before=text[:start],
        after=text[end:stop],
        is_inside=stop < len(text),
        lost=lost,
    )


def _is_joined(char: str) -> bool:
    """Whether a stand-in beside this character, or nothing, would be a part of its word."""
    return char != "" and (re.match(LETTER, char) is not None or kept_index(char) is not None)


def _without_loose_start(text: str) -> str:
    """Return a text without emoji at its start, and the white space beside them; as it is if it begins with none."""
    place = next((place for place, char in enumerate(text) if not (char.isspace() or is_loose(char))), len(text))
    return text[place:] if any(map(is_loose, text[:place])) else text


def has_all(shown: Shown, translation: str) -> bool:
    """Whether a translation contains every stand-in as a word."""
    return all(re.search(stands(name), translation) for name in shown.names)


def restored(shown: Shown, translation: str) -> tuple[str, str]:
    """Return a translation with private characters in place of stand-ins, and those that have no place in it."""
    text, lost = translation, shown.lost
    for name, char, tight in zip(shown.names, shown.kept, shown.tight, strict=True):
        # A stand-in may have become the beginning of a word; the rest of that word goes with it.
        found = re.search(stands(name), text) or re.search(rf"{BEFORE}{re.escape(name)}{LETTER}*", text)
        if found is None:
            lost += char
            continue
        before, after = text[: found.start()], text[found.end() :]
        text = (before.rstrip(" ") if tight[0] else before) + char + (after.lstrip(" ") if tight[1] else after)
        text = re.sub(rf"{BEFORE}{re.escape(name)}{AFTER}\s?", "", text)  # it stands for one word, and occurs once
    if shown.after and shown.is_inside:
        place = len(text.rstrip(_FINAL_MARKS))
        return shown.before + text[:place] + shown.after + text[place:], lost
    return shown.before + text + shown.after, lost
