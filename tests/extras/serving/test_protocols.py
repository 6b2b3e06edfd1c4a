"""The protocols of others, with requests as their clients send them (`tests/clients` runs the real clients)."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from manyheads import catalogue
from manyheads.catalogue import Table, build_model
from manyheads.decoding.generator import Generator
from manyheads.decoding.translator import Translator
from manyheads.extras.documents.html import read_html
from manyheads.extras.documents.sentence_ends import split_sentences
from manyheads.extras.documents.terms import Terms
from manyheads.extras.documents.translating import DocumentTranslation, UnitTranslator
from manyheads.extras.serving import app as application
from manyheads.extras.serving.api.shared import nearest_translator
from manyheads.extras.serving.app import build_app
from manyheads.extras.serving.refusals import Refusal
from manyheads.extras.serving.settings import ServingSettings
from manyheads.extras.serving.texts import MOST_TAGS
from manyheads.models.pretrained import save_pretrained
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.tasks.language_modelling.score import score_texts
from manyheads.text.of_folder import PieceVocabulary
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

TEXTS = ["It is a truth universally acknowledged", "that a single man in possession of a good fortune"] * 2
FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.fixture(scope="module")
def generator(novel_folder: Path) -> Generator:
    return Generator.from_pretrained(novel_folder, "cpu")


@pytest.fixture(scope="module")
def translator(translator_folder: Path) -> Translator:
    return Translator.from_pretrained(translator_folder, "cpu")


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"model": "novel", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    text = client.post("/v1/completions", json={"model": "novel", "stream": True, **body}).text
    blocks = text.strip().split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_completions(client: TestClient, generator: Generator) -> None:
    found = complete(client, prompt=["It is", "x"], max_tokens=9, seed=4, n=2, top_p=0.9, user="me")
    expected = generator.continuations(
        ["It is", "x"], max_new_tokens=9, seed=4, num_return_sequences=2, do_sample=True, top_p=0.9
    )
    assert [one["text"] for one in found["choices"]] == [one.text for row in expected for one in row]
    assert [one["index"] for one in found["choices"]] == [0, 1, 2, 3]
    assert found["object"] == "text_completion"
    assert found["usage"] == {"prompt_tokens": 6, "completion_tokens": 36, "total_tokens": 42}


def test_a_streamed_completion_says_the_same(client: TestClient) -> None:
    body = {"prompt": ["It is", "x"], "max_tokens": 9, "seed": 4, "n": 2, "logprobs": 2, "echo": True}
    whole = complete(client, **body)
    found = chunks(client, **body, stream_options={"include_usage": True})
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [one["choices"][0] for one in found[:-1] if one["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"]
        assert [one["finish_reason"] for one in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        tokens = [token for one in own for token in one["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]
        offsets = [offset for one in own for offset in one["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_offsets_of_a_stream_count_what_is_held_back(client: TestClient, echo: bool, seed: int) -> None:
    """Text that may begin a stop text is sent later than its tokens."""
    body = {"prompt": "aé", "max_tokens": 20, "seed": seed, "logprobs": 1, "echo": echo}
    text = complete(client, **{**body, "echo": False})["choices"][0]["text"]
    stops = [text[place : place + 4] + "\x01" for place in (0, 3, 7, 12)]
    for stop in (stops, [*stops[:3], text[9:11]]):
        whole = complete(client, **body, stop=stop)
        own = [one["choices"][0] for one in chunks(client, **body, stop=stop)]
        assert "" in [one["text"] for one in own], "nothing was held back"
        record = whole["choices"][0]["logprobs"]
        for name in ("tokens", "text_offset"):
            assert [value for one in own for value in one["logprobs"][name]] == record[name]
        assert record["text_offset"] == sorted(record["text_offset"])


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of a server with a model of subwords."""
    vocabulary = PieceVocabulary(Tokenizer.train(TEXTS, TokenizerSettings(vocab_size=320)))
    torch.manual_seed(3)
    model = build_model(
        TransformerXLConfig(
            vocab_size=vocabulary.vocab_size, d_model=16, num_heads=2, d_ff=24, num_layers=2, memory_len=12
        )
    )
    folder = tmp_path_factory.mktemp("served") / "novel"
    save_pretrained(model, folder, tokenizer=vocabulary)
    with TestClient(build_app(ServingSettings(models=(str(folder),), device="cpu", allowed_hosts=("*",)))) as running:
        yield running


@pytest.mark.one_in(3)
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["It is", "It is ", "It is  ", " ", "", "a\n "])
def test_offsets_are_places_in_the_text(pieces: TestClient, prompt: str, echo: bool) -> None:
    """A space at the end of a prompt belongs to the first token, too, but not to its text."""
    compared = 0
    for seed in range(12):
        body = {"prompt": prompt, "logprobs": 1, "echo": echo, "seed": seed}
        [whole], [first] = (complete(pieces, **body, max_tokens=most)["choices"] for most in (2, 1))
        begin, end = whole["logprobs"]["text_offset"][-2:]
        assert begin == (len(prompt) if echo else 0)
        if "\ufffd" not in first["text"]:  # part of a character, which counts with its last token
            compared += 1
            assert end == len(first["text"])
    assert compared > 3


def test_usage_counts_what_was_sent_and_written(client: TestClient) -> None:
    """Prompts once each; every continuation, with the tokens of stop texts."""

    def usage(**body: Any) -> tuple[int, int]:
        found = complete(client, **body)
        if body.get("best_of") is None:
            assert chunks(client, **body, stream_options={"include_usage": True})[-1]["usage"] == found["usage"]
        return found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]

    own = {"prompt": ["It is", "é"], "max_tokens": 5, "seed": 1}
    assert usage(**own) == (7, 10)
    assert usage(**own, n=3) == (7, 30)
    assert usage(**own, n=3, temperature=0) == (7, 30)
    assert usage(**own, n=2, best_of=4) == (7, 40)
    assert usage(**own, echo=True, logprobs=1) == (7, 10)
    assert usage(**{**own, "max_tokens": 0}, echo=True) == (7, 0)
    assert usage(**{**own, "prompt": [[65, 66], [67]]}) == (3, 10)
    text = complete(client, prompt="It is", max_tokens=9, temperature=0)["choices"][0]["text"]
    stopped = usage(prompt="It is", max_tokens=9, temperature=0, stop=text[2:4])
    assert stopped[1] == len(text[: text.index(text[2:4]) + 2].encode())
    native = client.post("/v1/generate", json={"prompt": ["It is", ""], "max_new_tokens": 5, "num_return_sequences": 2})
    assert native.json()["usage"] == {"prompt_tokens": 5, "completion_tokens": 20}


def test_usage_of_a_stream_of_translations(client: TestClient) -> None:
    body = {"text": "I am hungry. Where is the station?", "max_new_tokens": 9, "num_beams": 2}
    whole = client.post("/v1/translate", json=body).json()["usage"]
    last = client.post("/v1/translate", json={**body, "stream": True}).text.strip().split("\n\n")[-1]
    assert json.loads(last.partition("data: ")[2])["usage"] == whole
    assert whole["source_tokens"] > 0 < whole["target_tokens"]


def test_an_evaluator_scores_through_echo(client: TestClient, generator: Generator) -> None:
    """What lm-evaluation-harness sends and reads: ids, echo, and log-probabilities of the prompt."""
    text = "It is a truth universally acknowledged"
    ids = list(text.encode())
    found = complete(client, prompt=[ids], max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234)
    record = found["choices"][0]["logprobs"]
    [expected] = score_texts(generator, [text])
    assert record["token_logprobs"][0] is None
    assert record["token_logprobs"][1:-1] == pytest.approx(expected.token_log_probs[1:], abs=1e-4)
    assert len(record["tokens"]) == len(ids) + 1
    assert record["text_offset"][:3] == [0, 1, 2]
    columns = (record[name][1:-1] for name in ("tokens", "token_logprobs", "top_logprobs"))
    for token, log_prob, top in zip(*columns, strict=True):
        assert max(top.values()) >= log_prob
        assert top[token] == log_prob
    only = complete(client, prompt=[ids], max_tokens=0, logprobs=1, echo=True)["choices"][0]
    assert only["text"] == text
    assert only["logprobs"]["token_logprobs"] == pytest.approx(record["token_logprobs"][:-1], abs=1e-4)


def test_offsets_of_tokens_count_characters(client: TestClient) -> None:
    """The model's tokens are bytes: two of them are one character."""
    body = {"prompt": "aé€b", "max_tokens": 3, "logprobs": 1}
    record = complete(client, **body, echo=True)["choices"][0]["logprobs"]
    assert record["text_offset"][:8] == [0, 1, 1, 2, 2, 2, 3, 4]
    assert complete(client, **body)["choices"][0]["logprobs"]["text_offset"][0] == 0


def test_greedy_copies_and_the_best_of_several(client: TestClient, generator: Generator) -> None:
    greedy = complete(client, prompt="It", temperature=0, n=2, max_tokens=5)["choices"]
    [[expected]] = generator.continuations(["It"], do_sample=False, max_new_tokens=5)
    assert [one["text"] for one in greedy] == [expected.text] * 2
    best = complete(client, prompt="It", best_of=6, max_tokens=5, seed=1)["choices"]
    [all_six] = generator.continuations(["It"], num_return_sequences=6, max_new_tokens=5, seed=1)
    assert best[0]["text"] == max(all_six, key=lambda one: sum(one.log_probs)).text
    hot = {"prompt": "It", "max_tokens": 20, "temperature": 50}
    assert len({complete(client, **hot)["choices"][0]["text"] for _ in range(3)}) == 3, "without a seed all differ"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "en-de"}, 400, "model"),
        ({"model": "none"}, 404, "model"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"suffix": "x"}, 400, "suffix"),
        ({"logprobs": 99}, 422, "logprobs"),
        ({"stop": ["a"] * 5}, 422, "stop"),
        *(({name: True}, 422, name) for name in ("n", "best_of", "logprobs", "max_tokens", "temperature", "top_k")),
        ({"prompt": [True]}, 422, "prompt"),
        ({"best_of": 3, "stream": True}, 400, "best_of"),
        ({"best_of": 1, "n": 2}, 400, "best_of"),
        ({"prompt": []}, 400, "prompt"),
        ({"top_p": 0}, 422, None),
        ({"prompt": [300]}, 422, None),
        ({"prompt": [[-1]]}, 422, "prompt"),
        ({"max_tokens": 1_000_000}, 422, "prompt"),
        ({"n": 1000}, 422, "n"),
        ({"n": 1000, "temperature": 0}, 422, "n"),  # copies of one continuation
        ({"best_of": 1000}, 422, "n"),
        ({"n": 250, "temperature": 0, "max_tokens": 200, "logprobs": 20}, 422, "logprobs"),
    ],
)
def test_refused_completions(client: TestClient, body: dict[str, Any], status: int, param: str | None) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a", **body})
    assert answer.status_code == status, answer.text
    assert (answer.json()["error"]["param"] or "").startswith(param or "")


def test_what_newcomers_send_first_is_answered_with_the_remedy(client: TestClient) -> None:
    """A body without a header, as `curl -d` sends it; a chat; and GET."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    cases = [
        (client.post("/v1/translate", content='{"text": "Hi."}', headers=form), 422, "Content-Type: application/json"),
        (client.post("/v1/chat/completions", json={"messages": []}), 404, "use POST /v1/completions"),
        (client.get("/v1/translate"), 405, "use POST"),
        (client.get("/v2/nothing"), 404, "There is no such path"),
    ]
    for answer, status, said in cases:
        assert answer.status_code == status
        assert said in answer.text


def test_models_and_tokens(client: TestClient) -> None:
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["en-de", "novel"]
    assert client.get("/v1/models/novel").json()["object"] == "model"
    assert client.get("/v1/models/none").status_code == 404
    body = {"prompt": "I am é", "return_token_strs": True}
    found = client.post("/tokenize", json=body).json()
    assert found["tokens"] == list("I am é".encode())
    assert found["token_strs"][:2] == ["I", " "]
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "I am é"}
    assert client.post("/detokenize", json={"tokens": [256]}).status_code == 422
    source = client.post("/tokenize", json={"model": "en-de", "prompt": "I am hungry."}).json()
    assert source["count"] == len(source["tokens"])
    assert client.get("/tokenizer_info").json()["eos_token"] == "\n"


def test_libretranslate(client: TestClient, translator: Translator) -> None:
    one, two = "I am hungry. Where is the station?", "Hello, how are you?"
    best = translator.translate(["I am hungry.", "Where is the station?", two])
    asked = {"q": one, "source": "en", "target": "de"}
    assert client.post("/translate", json=asked).json() == {"translatedText": f"{best[0]} {best[1]}"}
    form = "q=I+am+hungry.+Where+is+the+station%3F&source=en&target=de&api_key="
    assert client.post("/translate", content=form, headers=FORM).json() == {"translatedText": f"{best[0]} {best[1]}"}
    by_curl = "q=Grüße&source=en&target=de"  # curl -d does not encode letters
    assert client.post("/translate", content=by_curl, headers=FORM).json() == {
        "translatedText": translator.translate("Grüße")
    }
    mastodon = {"q": [one, two], "source": "auto", "target": "de", "format": "text", "api_key": "x"}
    found = client.post("/translate", json={**mastodon, "alternatives": 2}).json()
    assert len(found["translatedText"]) == 2
    assert [len(row) for row in found["alternatives"]] == [2, 2]
    assert found["detectedLanguage"] == [{"confidence": 0, "language": "en"}] * 2
    for wrong in ({"format": "markdown"}, {"format": "html", "alternatives": 1}):
        assert client.post("/translate", json={**mastodon, **wrong}).status_code == 400
    assert client.get("/languages").json() == [
        {"code": "en", "name": "en", "targets": ["de"]},
        {"code": "de", "name": "de", "targets": []},
    ]
    assert client.post("/detect", json={"q": "Hello"}).json() == [{"confidence": 0, "language": "en"}]


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        ('{"q": "a", "source": "en", "target": "fr"}', {}, 400),
        ('{"q": "a", "source": "en", "target": "de", "alternatives": 1000}', {}, 400),
        ('{"q": "a", "source": "en", "target": "de", "alternatives": true}', {}, 400),
        ('{"q": "\\ud800", "source": "en", "target": "de"}', {}, 400),
        ("{", {}, 400),
        ("q=%ff&source=en&target=de", FORM, 400),
        ("q=a&source=en", FORM, 400),
        ("&".join(["q=a"] * 2000), FORM, 400),
    ],
)
def test_refused_by_libretranslate(client: TestClient, content: str, headers: dict[str, str], status: int) -> None:
    answer = client.post("/translate", content=content, headers={"content-type": "application/json", **headers})
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    assert "..." not in answer.json()["error"]


@pytest.fixture(scope="module")
def several(settings: ServingSettings) -> Iterator[TestClient]:
    """Two models with regions in their languages; the second one is also given twice."""
    folder = settings.models[0]
    named = (f"any={folder}", f"br={folder}", f"again={folder}")
    app = build_app(replace(settings, models=named))
    with TestClient(app) as running:
        models = app.state.service.models
        pairs = {"any": ("en_GB", "pt"), "br": ("en_GB", "pt_BR"), "again": ("en_GB", "pt_BR")}
        models |= {name: replace(model, pairs=(pairs[name],)) for name, model in models.items()}
        yield running


def test_languages_with_regions(several: TestClient) -> None:
    """The variety that is asked for comes first, and codes are compared as tags."""
    for target, source, name in (
        ("PT-BR", None, "br"), ("pt_br", "EN", "br"), ("PT-PT", "EN-GB", "any"), ("PT", "en-gb", "any"),
    ):  # fmt: skip
        service = several.app.state.service  # type: ignore[attr-defined]
        assert nearest_translator(service, source, target)[0].name == name
    for target, source in (("PT", "EN-US"), ("DE", "EN")):
        with pytest.raises(Refusal):
            nearest_translator(service, source, target)
    asked = {"q": "a", "source": "auto", "target": "pt-BR"}
    assert several.post("/translate", json=asked).json()["detectedLanguage"]["language"] == "en_GB"
    assert several.get("/languages").json()[0]["targets"] == ["pt", "pt_BR"]
    assert [one["language"] for one in several.get("/v2/languages?type=target").json()] == ["PT-PT", "PT-BR"]
    assert [one["language"] for one in several.get("/v2/languages").json()] == ["EN-GB"]


def test_deepl(client: TestClient, translator: Translator) -> None:
    best = translator.translate(["I am hungry.", "Hello, how are you?"])
    body = {"text": ["I am hungry. Hello, how are you?", ""], "target_lang": "DE", "show_billed_characters": True}
    assert client.post("/v2/translate", json=body).json() == {
        "translations": [
            {"detected_source_language": "EN", "text": " ".join(best), "billed_characters": 32},
            {"detected_source_language": "EN", "text": "", "billed_characters": 0},
        ]
    }
    whole = client.post("/v2/translate", json={**body, "split_sentences": "0"}).json()["translations"][0]["text"]
    assert whole == translator.translate(body["text"][0])
    wrapped = {**body, "text": ["I am\nhungry. Hello,\r\nhow are you?\n"], "split_sentences": "nonewlines"}
    found = client.post("/v2/translate", json=wrapped).json()["translations"][0]["text"]
    assert found == " ".join(best) + "\n"
    assert client.post("/v2/translate", json={"text": ["a"]}).status_code == 400
    refused = client.post("/v2/translate", json={**body, "target_lang": "FR"})
    assert (refused.status_code, set(refused.json())) == (400, {"message", "detail"})
    for wrong in ({"tag_handling": "xml"}, {"tag_handling": "html", "ignore_tags": ["x"]}, {"glossary_id": "a"}):
        assert client.post("/v2/translate", json={**body, **wrong}).status_code == 400
    targets = client.request("GET", "/v2/languages", content="type=target", headers=FORM).json()
    assert targets == [{"language": "DE", "name": "DE", "supports_formality": False}]
    assert client.get("/v2/languages").json()[0]["language"] == "EN"
    assert set(client.get("/v2/usage").json()) == {"character_count", "character_limit"}


PAGE = """<p class="a">I am <b>hungry</b>. Where is the station?</p>
<!-- a note --><script>if (a < b) { run("The cat"); }</script>
<p>The cat sees <a href="https://a.example/x?a=1&amp;b=2" rel="tag">the dog</a> &amp; <code>ls</code>.<br>She
reads.</p>"""
TAG = re.compile(r"<!--.*?-->|<script.*?</script>|<code>.*?</code>|<[^>]*>", re.DOTALL)


def test_html_in_capitals_is_searched_in_sentence_case(client: TestClient, translator: Translator) -> None:
    page = "<p>THE CAT SEES {name}.<p>WHERE IS <b>THE STATION</b>?"
    units = UnitTranslator(translator, Terms(), {})
    document = DocumentTranslation(read_html(page), split_sentences, units.fits)
    work = units.work(document.units)
    next(work)
    assert len(work.send(["", ""]).others) == 2
    expected, _ = document.finish(units.translate(document.units))
    asked = {"q": page, "source": "en", "target": "de", "format": "html"}
    assert client.post("/translate", json=asked).json()["translatedText"] == expected


def test_html_is_the_document_that_the_translator_makes(client: TestClient, translator: Translator) -> None:
    """The same as a document translated in one process by `documents`."""
    units = UnitTranslator(translator, Terms(), {})
    document = DocumentTranslation(read_html(PAGE), split_sentences, units.fits)
    expected, report = document.finish(units.translate(document.units))
    assert report.sentences == 4
    assert expected != PAGE
    asked = {"q": [PAGE, "", "Hello, <i>how</i> are you?", "a < b"], "source": "auto", "target": "de", "format": "html"}
    answer = client.post("/translate", json=asked).json()
    assert answer["detectedLanguage"] == [{"confidence": 0, "language": "en"}] * 4
    found = answer["translatedText"]
    assert found[0] == expected
    assert sorted(TAG.findall(found[0])) == sorted(TAG.findall(PAGE))
    assert found[1] == ""
    assert TAG.findall(found[2]) == ["<i>", "</i>"]
    assert "<" not in found[3], "what the model writes is text"
    deepl = {"text": [PAGE], "target_lang": "DE", "tag_handling": "html"}
    assert client.post("/v2/translate", json=deepl).json()["translations"][0]["text"] == expected


@pytest.mark.parametrize("part", ["<", "</b>", "<b>", "<b></i>", "<a '", "<!", "<code ", "<code>", "<!-- ", "&amp;<p>"])
def test_hostile_html_is_translated_or_refused(client: TestClient, part: str) -> None:
    for count, statuses in ((20, {200}), (MOST_TAGS + 1, {400}), (100_000, {400, 413})):
        body = {"q": part * count, "source": "en", "target": "de", "format": "html"}
        assert client.post("/translate", json=body).status_code in statuses


def test_a_plugin_adds_a_protocol(settings: ServingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counting_protocol.py").write_text(
        "from fastapi import APIRouter\n"
        "def router(service):\n"
        "    routes = APIRouter()\n"
        "    routes.get('/count')(lambda: {'models': len(service.models)})\n"
        "    return routes\n"
        "MANYHEADS = {'protocol.count': 'counting_protocol:router'}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(catalogue.PLUGINS, "counting_protocol")
    own = {name: application.PROTOCOLS[name] for name in application.PROTOCOLS}
    catalogue._plugins.cache_clear()
    try:
        monkeypatch.setattr(application, "PROTOCOLS", Table("protocol", own))
        with TestClient(build_app(settings)) as client:
            assert client.get("/count").json() == {"models": 2}
            assert client.get("/languages").status_code == 200
    finally:
        catalogue._plugins.cache_clear()
