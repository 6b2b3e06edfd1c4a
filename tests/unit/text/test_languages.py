"""Language tags, and guesses of languages."""

import pytest

from manyheads.data.corpora import load_tatoeba
from manyheads.errors import ConfigError
from manyheads.text.sides import guess_language, language_tag, same_language, warn_of_languages


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("en", "en"),
        ("DE_at", "de-AT"),
        ("zh-hant-tw", "zh-Hant-TW"),
        ("es-419", "es-419"),
        ("sl-nedis", "sl-nedis"),
        ("en-x-SHORT", "en-x-short"),
        ("haw", "haw"),
    ],
)
def test_tags(text: str, tag: str) -> None:
    assert language_tag(text) == tag


@pytest.mark.parametrize("text", ["", "e", "english", "en-", "en us", "12", "en-GB-US"])
def test_what_is_no_tag(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--source-lang .*: this is not a language tag; give one of BCP 47, such as en"
    ):
        language_tag(text, "--source-lang")


def test_guesses() -> None:
    pytest.importorskip("py3langid")
    pairs = load_tatoeba("test")
    assert guess_language(source for source, _ in pairs) == "en"
    assert guess_language(target for _, target in pairs) == "de"
    assert guess_language(["Too short."]) is None
    assert guess_language(["123 456 789"] * 100) is None


def test_warnings() -> None:
    assert warn_of_languages(("en", "de"), ("en", "de")) is None
    assert warn_of_languages((None, None), ("en", "de")) is None
    assert warn_of_languages(("en", "de"), (None, None)) is None
    exchanged = warn_of_languages(("en-GB", "de"), ("de", "en"))
    assert exchanged == "The files look exchanged: the source looks like de, the target like en."
    assert warn_of_languages(("en", "fr"), ("en", "de")) == "The target looks like de, not fr."
    regional = warn_of_languages(("zh-Hant-TW", "pt-BR"), ("ja", "es"))
    assert regional == "The source looks like ja, not zh-Hant-TW and the target looks like es, not pt-BR."
    same = warn_of_languages(("en", "de"), ("en", "en"))
    assert same == "Source and target both look like en; is one of the files wrong?"
    assert same_language("de-AT", "de")
