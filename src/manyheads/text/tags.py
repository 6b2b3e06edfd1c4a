"""Tags such as `>>de<<`, which give a model of several languages the target language.

Paper: Johnson et al. 2017, arXiv:1611.04558, sec. 3 (a token at the start of the source). The form is that of Marian's
models (OPUS-MT). A tag is one piece of the tokenizer, and counts at the start of a source only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from manyheads.config.suggest import did_you_mean
from manyheads.errors import ConfigError, RequestError

__all__ = ["TAG", "check_target", "refuse_untagged", "tag_of", "tagged", "untagged"]

TAG = re.compile(r">>[^\s<>]{1,35}<<")


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
                f" {', '.join(languages)} with --target-lang (in Python: translator.into(language)), or begin the text"
                f" with a tag, such as {tag_of(languages[0])}."
            )
