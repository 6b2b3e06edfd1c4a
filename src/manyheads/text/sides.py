"""Interface of tokenizers for translation: one side for sources and one for targets; languages, and tags for them.

Our `Tokenizer` is both sides. Other toolkits have a separate vocabulary or segmentation for each language.

A tag such as `>>de<<` gives a model of several languages the target language. Paper: Johnson et al. 2017,
arXiv:1611.04558, sec. 3 (a token at the start of the source). The form is that of Marian's models (OPUS-MT). A tag is
one piece of the tokenizer, and counts at the start of a source only. Languages have their names in BCP 47; a language
that is not given is guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from manyheads.config.checks import did_you_mean
from manyheads.errors import ConfigError, RequestError

LanguagePair = tuple[str, str]
"""Source and target."""

_LANGUAGE = re.compile(
    r"([a-z]{2,3})(-[a-z]{3}){0,3}(-[a-z]{4})?(-(?:[a-z]{2}|\d{3}))?((?:-(?:[a-z\d]{5,8}|\d[a-z\d]{3}))*)"
    r"((?:-[a-wy-z\d](?:-[a-z\d]{2,8})+)*)(-x(?:-[a-z\d]{1,8})+)?"
)
MOST_TEXTS = 1000  # number of texts that are enough for a guess
PASSAGE_CHARACTERS = 300
LEAST_LETTERS = 200  # of fewer letters there is no guess
CLEAR_SHARE = 0.5  # of the texts, weighted by length, that must be in one language


def language_tag(text: str, option: str = "") -> str:
    """Return a language tag in its usual spelling, as `en`, `de-AT`, `zh-Hant-TW`.

    Args: option: for the message.

    Raises: ConfigError: it does not have the form of a tag (BCP 47, RFC 5646 sec. 2.1).
    """
    lowered = text.replace("_", "-").lower()
    if not _LANGUAGE.fullmatch(lowered):
        raise ConfigError(
            f"{option} {text}: this is not a language tag; give one of BCP 47, such as en, de or pt-BR.".strip()
        )
    first, *rest = lowered.split("-")
    parts = [first]
    for number, part in enumerate(rest):
        if any(len(one) == 1 for one in rest[: number + 1]):
            parts.append(part)  # an extension is written in small letters
        elif len(part) == 4 and part.isalpha():
            parts.append(part.title())
        else:
            parts.append(part.upper() if len(part) == 2 else part)
    return "-".join(parts)


def same_language(one: str, other: str) -> bool:
    """Return whether two tags name the same language; script and region do not count."""
    return one.split("-")[0].lower() == other.split("-")[0].lower()


def guess_language(texts: Iterable[str]) -> str | None:
    """Return the language of most of the first texts, as in ISO 639-1; None: unknown, or py3langid is not installed."""
    try:
        import py3langid
    except ImportError:
        return None
    votes: Counter[str] = Counter()
    for passage in _passages(islice(texts, MOST_TEXTS)):
        if letters := sum(char.isalpha() for char in passage):
            votes[py3langid.classify(passage)[0]] += letters
    if votes.total() < LEAST_LETTERS:
        return None
    [(language, count)] = votes.most_common(1)
    return language if count >= CLEAR_SHARE * votes.total() else None


def _passages(texts: Iterable[str]) -> Iterator[str]:
    """Yield several texts joined: the guess is better for a longer passage."""
    passage = ""
    for text in texts:
        passage += text + "\n"
        if len(passage) >= PASSAGE_CHARACTERS:
            yield passage
            passage = ""
    yield passage


def warn_of_languages(given: tuple[str | None, str | None], guessed: tuple[str | None, str | None]) -> str | None:
    """Return a warning if files look exchanged, have the same language, or have another language than the given one.

    Args:
        given: languages of source and target that a person named.
        guessed: what the texts look like; None: unknown.
    """
    source, target = guessed
    if source is not None and target is not None and source == target:
        return f"Source and target both look like {source}; is one of the files wrong?"
    pairs: Sequence[tuple[str, str | None, str | None]] = (
        ("source", given[0], guessed[0]),
        ("target", given[1], guessed[1]),
    )
    wrong = [(side, tag, found) for side, tag, found in pairs if tag and found and not same_language(tag, found)]
    if len(wrong) == 2 and same_language(given[0] or "", target or "") and same_language(given[1] or "", source or ""):
        return f"The files look exchanged: the source looks like {source}, the target like {target}."
    told = [f"the {side} looks like {found}, not {tag}" for side, tag, found in wrong]
    return f"{' and '.join(told).replace('the', 'The', 1)}." if told else None


TAG = re.compile(r">>[^\s<>]{1,35}<<")


class Side(Protocol):
    """Conversion between text and ids for one language. bos_id: the first input id of the decoder."""

    pad_id: int
    bos_id: int
    eos_id: int

    @property
    def vocab_size(self) -> int:
        """Upper bound (exclusive) of the ids."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, without BOS and EOS."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, without special ids."""

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]: ...
    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the piece of each id in readable form."""


class Capabilities(Protocol):
    """What a model with a tokenizer can do. These are the values of a tokenizer of text in natural languages.

    model_kind: what the model is; the targets of one that is no `translator` are no text of a language.
    splits_lines: whether the lines and pieces of a text may be translated one by one.
    is_shared: an id means the same on both sides. needs_language: a text needs one of `target_languages`, if there are
    any.
    """

    model_kind: str = "translator"
    splits_lines: bool = True
    is_shared: bool = False
    needs_language: bool = False

    @property
    def in_pieces(self) -> Any | None:
        """The tokenizer if it is a `Tokenizer`, with pieces that both sides share and a tokenizer.json; else None."""
        return None

    def grammar(self, settings: Any) -> Any | None:
        """Return the `Grammar` (see `decoding.search_problem`) of a search with these `DecodingSettings`; None: all
        outputs are permitted.
        """
        return None

    def fits(self: TranslationTokenizer, source_vocab_size: int, target_vocab_size: int) -> bool:
        """Return whether a model with so many ids on each side has a row for every id of a text."""
        return self.source.vocab_size <= source_vocab_size and self.target.vocab_size <= target_vocab_size


def can_force(side: Side, phrase: str) -> bool:
    """Return whether the tokens of a phrase give the phrase again, except for upper and lower case."""
    return bool(phrase.strip()) and side.decode(side.encode(phrase)).casefold() == phrase.strip().casefold()


class TranslationTokenizer(Capabilities, Protocol):
    """Both sides, and the files in which they are stored.

    kind: a name of the kind. digest: SHA-256 of everything that determines the behaviour.
    """

    kind: str

    @property
    def source(self) -> Side: ...
    @property
    def target(self) -> Side: ...
    @property
    def digest(self) -> str: ...
    @property
    def target_languages(self) -> tuple[str, ...]:
        """The target languages of a model of several languages, with one tag each (see `TAG`); otherwise empty."""
        ...

    def describe(self) -> Mapping[str, object]:
        """Return the properties to show to users."""

    def files(self) -> Mapping[str, bytes]:
        """Return name -> content of each file that `of_folder.load_tokenizer` reads."""


class IntoLanguage(Capabilities):
    """A tokenizer whose sources have the tag of one language in front of them; see `TranslationTokenizer`.

    Args:
        tokenizer: with tags.
        language: one of its `target_languages`.
    """

    def __init__(self, tokenizer: TranslationTokenizer, language: str) -> None:
        self.untagged = tokenizer
        self.language = language
        self.kind, self.is_shared = tokenizer.kind, tokenizer.is_shared
        self.target = tokenizer.target
        self.digest = tokenizer.digest
        self.source: Side = _TaggedSide(tokenizer.source, language)

    @property
    def target_languages(self) -> tuple[str, ...]:
        """Those of the tokenizer."""
        return self.untagged.target_languages

    def describe(self) -> Mapping[str, object]:
        """Return the properties to show to users."""
        return self.untagged.describe()

    def files(self) -> Mapping[str, bytes]:
        """Return the tokenizer's files, which do not contain the choice of a language."""
        return self.untagged.files()


class _TaggedSide:
    """A side for sources that adds the tag; see `sides.Side`."""

    def __init__(self, side: Side, language: str) -> None:
        self._side, self._language = side, language
        self.pad_id, self.bos_id, self.eos_id = side.pad_id, side.bos_id, side.eos_id

    @property
    def vocab_size(self) -> int:
        return self._side.vocab_size

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._side.encode_batch([tagged(text, self._language) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        return untagged(self._side.decode(ids))[0]

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        return [untagged(text)[0] for text in self._side.decode_batch(batch)]

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return self._side.tokens(ids)


def tag_of(language: str) -> str:
    """Return the tag of a target language. language: as in BCP 47, or as the model names it."""
    return f">>{language}<<"


def tagged(text: str, language: str) -> str:
    """Return a source with the tag of its target language; an empty one stays as it is."""
    return f"{tag_of(language)} {text}" if text.strip() else text


def untagged(text: str) -> tuple[str, str | None]:
    """Return a source without its tag, and the language of the tag; None: it has no tag."""
    found = TAG.match(text)
    return (text, None) if found is None else (text[found.end() :].removeprefix(" "), found[0][2:-2])


def check_target(
    languages: Sequence[str], wanted: str | None, model: str, option: str, *, is_needed: bool = True
) -> str | None:
    """Return the target language in the model's spelling; None for a model of one pair of languages.

    Args:
        languages: into which a model with tags translates; empty for a model without tags.
        wanted: by the user.
        model: its name, for messages.
        option: which names the language, for messages.
        is_needed: a text without a tag cannot be translated.

    Raises: ConfigError: the model has no tags but one is wanted, or it has tags and none, or an unknown one, is wanted.
    """
    if not languages:
        if wanted is not None:
            raise ConfigError(
                f"{option} is {wanted}, but {model} was trained for one pair of languages and has no tags; leave"
                f" {option} out."
            )
        return None
    listed = ", ".join(languages)
    if wanted is None and not is_needed:
        return None
    if wanted is None:
        raise ConfigError(f"{model} translates into several languages ({listed}); choose one with {option}.")
    known = {one.replace("_", "-").lower(): one for one in languages}
    found = known.get(wanted.replace("_", "-").lower())
    if found is None:
        near = did_you_mean(wanted, languages)
        raise ConfigError(f"{option} is {wanted}, but {model} translates into {listed}.{near}")
    return found


def refuse_untagged(texts: Sequence[str], languages: Sequence[str]) -> None:
    """Raises: RequestError: a non-empty text does not begin with a tag of these languages."""
    for number, text in enumerate(texts, 1):
        if text.strip() and untagged(text)[1] not in languages:
            raise RequestError(
                f"text {number} has no target language; choose one of"
                f" {', '.join(languages)} (in Python: translator.into(language)), or begin the text with a tag, such as"
                f" {tag_of(languages[0])}.",
                in_command="The option is --target-lang.",
            )
