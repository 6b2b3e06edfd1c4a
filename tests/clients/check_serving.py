"""Real clients against a running server: openai, deepl and libretranslatepy, in an environment of their own.

    python tests/clients/check_serving.py http://127.0.0.1:8000 --translator en-de --novel novel

The server has a translation model from en to de and a language model. Prints a line per check; exits with 1 after a
failure. `make check-serving` starts the server and calls this.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Callable
from typing import Any


def check_openai(url: str, options: argparse.Namespace) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert {model.id for model in client.models.list()} >= {options.translator, options.novel}
    assert client.models.retrieve(options.novel).owned_by == "manyheads"
    asked: dict[str, Any] = {"model": options.novel, "prompt": "It is", "max_tokens": 20, "seed": 1, "logprobs": 2}
    whole = client.completions.create(**asked)
    parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    assert parts[-1].usage == whole.usage
    assert whole.choices[0].finish_reason == parts[-2].choices[0].finish_reason
    several = client.completions.create(model=options.novel, prompt=["a", "b"], n=2, best_of=3, max_tokens=4)
    assert [one.index for one in several.choices] == [0, 1, 2, 3]
    scored = client.completions.create(
        model=options.novel, prompt=[[65, 66, 67]], echo=True, max_tokens=1, logprobs=1, temperature=0
    )
    found = scored.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert found.token_logprobs[0] is None
    assert len(found.token_logprobs) == 4
    for wrong, kind in (
        ({"model": "none"}, openai.NotFoundError),
        ({"max_tokens": -1}, openai.UnprocessableEntityError),
        ({"suffix": "x"}, openai.BadRequestError),
    ):
        try:
            client.completions.create(**{**asked, **wrong})
        except kind as error:
            assert error.body  # noqa: PT017
        else:
            raise AssertionError(f"{wrong} was accepted")


def check_deepl(url: str, options: argparse.Namespace) -> None:
    import deepl

    translator = deepl.DeepLClient("none", server_url=url)
    one = translator.translate_text("I am hungry. Where is it?", source_lang="EN", target_lang="DE")
    assert isinstance(one, deepl.TextResult)
    assert one.detected_source_lang == "EN"
    assert one.billed_characters == 25
    many = translator.translate_text(["I am hungry.", "", "Hello"], target_lang="DE")
    assert isinstance(many, list)
    assert len(many) == 3
    assert [language.code for language in translator.get_source_languages()] == ["EN"]
    assert [language.code for language in translator.get_target_languages()] == ["DE"]
    assert not translator.get_usage().any_limit_reached
    try:
        translator.translate_text("a", target_lang="FR")
    except deepl.DeepLException as error:
        assert "not supported" in str(error)  # noqa: PT017
    else:
        raise AssertionError("French was accepted")


def check_libretranslate(url: str, options: argparse.Namespace) -> None:
    from libretranslatepy import LibreTranslateAPI

    api = LibreTranslateAPI(f"{url}/")
    assert isinstance(api.translate("I am hungry.", "en", "de"), str)
    assert {language["code"] for language in api.languages()} == {"en", "de"}
    assert api.detect("Hello")[0]["language"] == "en"
    # Mastodon's request, but for the format: it sends html, which this server refuses.
    body = {"q": ["I am hungry.", "Hello"], "source": "auto", "target": "de", "format": "text", "api_key": ""}
    request = urllib.request.Request(
        f"{url}/translate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        found = json.load(answer)
    assert len(found["translatedText"]) == 2
    assert found["detectedLanguage"][1] == {"confidence": 0, "language": "en"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--translator", default="en-de")
    parser.add_argument("--novel", default="novel")
    options = parser.parse_args()
    checks: list[Callable[[str, argparse.Namespace], None]] = [check_openai, check_deepl, check_libretranslate]
    failed = 0
    for check in checks:
        try:
            check(options.url, options)
            print(f"{check.__name__}: good")
        except Exception as error:
            failed += 1
            print(f"{check.__name__}: {type(error).__name__}: {error}", file=sys.stderr)
            if not str(error):
                raise
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
