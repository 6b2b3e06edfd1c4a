"""Where sentences end. One set of rules for lines, documents and the server; the time grows with the length alone."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

# Unicode 17, PropList.txt: Sentence_Terminal, without the full stops . ․ ﹒ ．, which can also stand inside a sentence,
# and without ၊ (U+104A), which Burmese writes as a comma.
_TERMINAL = (
    r"!?\u0589\u061d-\u061f\u06d4\u0700-\u0702\u07f9\u0837\u0839\u083d\u083e\u0964\u0965\u104b\u1362\u1367\u1368"
    r"\u166e\u1735\u1736\u17d4\u17d5\u1803\u1809\u1944\u1945\u1aa8-\u1aab\u1b4e\u1b4f\u1b5a\u1b5b\u1b5e\u1b5f"
    r"\u1b7d-\u1b7f\u1c3b\u1c3c\u1c7e\u1c7f\u203c\u203d\u2047-\u2049\u2cf9-\u2cfb\u2e2e\u2e3c\u2e53\u2e54\u3002\ua4ff"
    r"\ua60e\ua60f\ua6f3\ua6f7\ua876\ua877\ua8ce\ua8cf\ua92f\ua9c8\ua9c9\uaa5d-\uaa5f\uaaf0\uaaf1\uabeb\ufe12\ufe15"
    r"\ufe16\ufe56\ufe57\uff01\uff1f\uff61\U00010a56\U00010a57\U00010f55-\U00010f59\U00010f86-\U00010f89\U00011047"
    r"\U00011048\U000110be-\U000110c1\U00011141-\U00011143\U000111c5\U000111c6\U000111cd\U000111de\U000111df\U00011238"
    r"\U00011239\U0001123b\U0001123c\U000112a9\U000113d4\U000113d5\U0001144b\U0001144c\U000115c2\U000115c3"
    r"\U000115c9-\U000115d7\U00011641\U00011642\U0001173c-\U0001173e\U00011944\U00011946\U00011a42\U00011a43\U00011a9b"
    r"\U00011a9c\U00011c41\U00011c42\U00011ef7\U00011ef8\U00011f43\U00011f44\U00016a6e\U00016a6f\U00016af5\U00016b37"
    r"\U00016b38\U00016b44\U00016d6e\U00016d6f\U00016e98\U0001bc9f\U0001da88"
)
_STOPS = "․﹒．"
_CLOSERS = r"""["'”’»›)\]}」』）】》〉〕］｣]|[«‹“‘](?![^\W_])"""
# Behind the marks: what closes (German “ too), a French » behind a space, and numbers of notes.
_END = (
    rf"(?P<marks>(?:[.…{_STOPS}{_TERMINAL}\u037e]|%s)++)"
    rf"(?P<closers>(?:{_CLOSERS}|[ \u00a0\u202f][»›](?![^\W_])|\[\d{{1,3}}\])*+)"
)
_QUESTION = {"el": ";", "": r"(?<=[\u0370-\u03ff\u1f00-\u1fff]);"}  # a Greek semicolon asks
_NEXT = re.compile(r"(?P<space>[\s\u200b]*+)(?P<signs>(?:[^\w\s]{1,6}+\s?){0,2}+)(?P<word>[^\W_]{0,30}+)(?P<dot>\.?)")
_UNSPACED = re.compile(r"[\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_DIGITS = re.compile(r"\d+")
_INNER_DOTS = re.compile(r"(?:[^\W\d_]{1,3}\.-?)+[^\W\d_]{1,3}")
_ROMAN = re.compile(r"[IVXLC]{2,6}|[VX]")

# Abbreviations that end no sentence, because something always follows: a name, a noun, the other half of a comparison.
_NEVER = {
    "": "dr prof vs mr mrs ms mme mlle ca al",
    "de": """hr fr hrn frl bzw z.b d.h u.a z.t i.d.r v.a o.ä s.o s.u vgl evtl ggf inkl exkl zzgl sog gem geb gest dipl
        ing co jh bspw str tel st hl""",
    "en": "e.g i.e cf viz approx messrs mt gen sen rep gov col capt cmdr lt sgt rev hon pres maj adm cpl msgr",
    "es": "sr sra srta sres ud uds d dña dra lic ing av avda p.ej aprox",
    "fr": "m mm mlles mmes mgr st ste c.-à-d p.ex cf env av bd",
    "it": "sig sigg sig.ra sig.na dott dott.ssa avv ing geom p.es cfr",
    "nl": "dhr mw mevr drs ir ing bijv b.v d.w.z m.b.t o.a i.p.v incl excl",
    "pl": "np tzn tzw m.in ul św hab inż mgr ks płk gen",
    "pt": "sr sra srta d dra exmo eng av p.ex aprox",
    "ru": "т.е т.к т.н напр ул им проф акад тов пр просп см ср стр",
    "sv": "t.ex d.v.s bl.a s.k f.d t.o.m",
    "da": "f.eks d.v.s bl.a fx hr fru mht",
    "tr": "doç av sn örn bkz yrd",
    "cs": "např tzv tj ing mgr sv ul resp mudr judr phdr",
}
_BEFORE_NUMBER = frozenset(
    """jan janv feb febr févr fev mrz avr abr jun jul juil aug sep sept oct okt ott nov dec dez déc dic ene gen giu lug
    fig figs vol vols ch chap kap p pp pag pág págs blz bd nr nrn no num núm eq eqs abb abs art ziff""".split()  # noqa: SIM905
)
_MONTHS = frozenset("jan janv feb febr apr jun jul aug sep sept okt oct nov dez dec".split())  # noqa: SIM905
_CAPITAL = frozenset("Mar Apr Sec Secs Tab Cap Ex Ref S Nos Nr".split())  # noqa: SIM905  # in small letters: words
_COMPANY = frozenset("ltd inc llc kg kgaa ohg".split())  # noqa: SIM905
# Words that begin sentences. Behind initials, ordinals and abbreviations with dots inside they show that one began.
_OPENERS = {
    "de": """er sie es wir ihr ich der die das ein eine dann da doch aber und danach heute nun jetzt dort hier wer was
        wie warum wo wenn als auch im in am an auf mit für von zu bei seit vor nach nein ja du man dies diese dieser""",
    "en": """the he she it they we you i this that these those there then but and in on at if when what who why how
        where his her its their our my your so after before now today as an no not yes is are was do does did can or""",
    "es": "el la los las un una él ella ellos es en pero y entonces no sí qué cómo cuando luego después esto esta yo",
    "fr": "le la les un une il elle ils elles on nous vous je ce cela c et mais puis dans en l j oui non que qui après",
    "it": "il lo la i gli le un una lui lei è e ma poi non sì in questo questa che chi dopo io",
    "nl": "de het een hij zij ze wij we ik dit dat maar en dan in op nee ja toen daarna er wat wie",
    "pl": "on ona ono oni to ten ta w na i ale nie tak potem czy jak ja my",
    "pt": "o a os as um uma ele ela eles é em mas e então não sim isto este esta eu depois",
    "ru": "он она оно они это в на и но а не я мы вы ты потом затем там здесь как что кто когда да нет",
    "sv": "han hon det den de vi jag du en ett men och sedan då i på nej ja",
    "da": "han hun det den de vi jeg du en et men og så da i på nej ja",
    "tr": "o bu şu bir ve ama sonra ben biz siz hayır evet",
    "cs": "on ona to ten ta v na a ale ne ano pak já my",
}
_ORDINALS = frozenset("de da nb nn no fi is et lv cs sk sl hr sr bs hu tr pl eu lb".split())  # noqa: SIM905  # as in `3. Mai`
_VOWELS = frozenset("aeiouyαεηιουωаеиоуыэюяі")


class _Rules(NamedTuple):
    """Rules of a language; never, openers: words in small letters. ordinals: a full stop makes a number an ordinal."""

    end: re.Pattern[str]
    never: frozenset[str]
    openers: frozenset[str]
    ordinals: bool
    roman_ordinals: bool


@lru_cache(maxsize=64)
def _rules(language: str) -> _Rules:
    """Return the rules of a language, `` for an unknown one; without words of its own it has those of all."""
    language = {"nb": "da", "nn": "da", "no": "da"}.get(language, language)
    languages = ("", language) if language in _OPENERS else tuple(_NEVER)
    never, openers = (
        frozenset(word for one in languages for word in words.get(one, "").split()) for words in (_NEVER, _OPENERS)
    )
    is_ordinal = language in _ORDINALS
    end = re.compile(_END % _QUESTION.get(language, "(?!)"))
    return _Rules(end, never, openers, is_ordinal or not language, is_ordinal)


def split_sentences(text: str, language: str | None = None) -> list[str]:
    """Return the sentences of a text, each with the white space behind it; together they are the text.

    Args: language: of the text, as in BCP 47; None: unknown, so general rules hold.
    """
    rules = _rules((language or "").replace("_", "-").split("-")[0].lower())
    found, start = [], 0
    for match in rules.end.finditer(text):
        after = _NEXT.match(text, match.end())
        assert after is not None  # every part of it can be empty
        end = after.end("space")
        if end < len(text) and _ends(text, start, match, after, rules):
            found.append(text[start:end])
            start = end
    return [*found, text[start:]] if start < len(text) else found


def _ends(text: str, start: int, match: re.Match[str], after: re.Match[str], rules: _Rules) -> bool:
    """Return whether a sentence ends at a match of `_END`, before which it began at `start`."""
    mark, following, word = match["marks"][-1], text[after.end("space")], after["word"]
    if following in ",;:)]}%،、，；：）」』…." or (mark in _STOPS and following.isdigit()):
        return False
    if not after["space"]:
        if match["closers"] and following in "とって":  # Japanese: 「…。」と言った
            return False
        if mark in ".!?" or (mark in _STOPS and following.isascii()):
            is_between = _UNSPACED.match(following) and _UNSPACED.match(text, max(0, match.start() - 1))
            return is_between is not None and match["marks"][-2:] != ".."
        # These marks stand at ends alone, but for 17D4 in the Khmer word for `and so on`.
        return ("\u0900" <= mark < "\u2000" and following != "ល") or mark >= "\u3000"
    if word[:1].islower() and not "\u10d0" <= word[0] <= "\u10ff":  # Georgian has small letters only
        return False
    before = text[max(start, match.start() - 80) : match.start()]
    return match["marks"] != "." or match["closers"] != "" or _stop_ends(before, after, rules)


def _stop_ends(before: str, after: re.Match[str], rules: _Rules) -> bool:
    """Return whether a full stop ends a sentence.

    Args: before: the end of what stands in the sentence before it. after: a match of `_NEXT`.
    """
    tokens = before.split()
    own = _bare(tokens.pop()) if tokens else ""
    whole = own
    while tokens and len(whole) < 9 and _INNER_DOTS.fullmatch(_bare(tokens[-1]) + "x"):  # z. B., т. е., J. S.
        whole = _bare(tokens.pop()) + whole
    known, following = whole.lower(), after["word"]
    opens = following.lower() in rules.openers and not after["dot"]
    if _DIGITS.fullmatch(own):
        if not tokens:
            return False  # the number of an item
        if not rules.ordinals or len(own) > 3:
            return not (len(own) < 3 and after["dot"] and following.lower() in _MONTHS)
        return opens
    if (rules.roman_ordinals and _ROMAN.fullmatch(own)) or known == "st":
        return opens
    if following[:1].isdigit() and (own in _CAPITAL or known in _BEFORE_NUMBER):
        return False
    if known in rules.never or (known == "co" and following.lower() in _COMPANY):
        return False
    if known in _BEFORE_NUMBER and (own[:1].isupper() or len(following) > 1) and _ROMAN.fullmatch(following):
        return False
    return opens or not (_INNER_DOTS.fullmatch(whole) or _is_initial(own))


def _bare(token: str) -> str:
    return token.lstrip("\"'“„«»‹›‘’([{¿¡-–—/")


def _is_initial(word: str) -> bool:
    """Whether a word before a full stop is a letter that stands for a word; in some scripts words are one letter."""
    is_vowel = word.islower() and unicodedata.normalize("NFD", word)[0] in _VOWELS
    return len(word) == 1 and word.isalpha() and word < "\u1000" and not is_vowel


WINDOW = 1 << 15  # characters


def in_windows(text: str, cut: Callable[[str], list[str]]) -> Iterator[str]:
    """Yield the sentences of a text, of which `cut` sees at most WINDOW characters in a call.

    So no call keeps the interpreter's lock for long. Only a sentence of more characters is cut elsewhere.

    Args: cut: a text -> its sentences, which together are the text.
    """
    start = 0
    while start < len(text):
        end = start + WINDOW
        found = cut(text[start:end])
        if len(found) > 1 and end < len(text):
            found.pop()  # the next call sees the whole of it
        yield from found
        start += sum(map(len, found))
