"""Our own protocol: what the server says is what the library says."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from manyheads.catalogue import build_model
from manyheads.decoding.generator import Generator
from manyheads.decoding.translator import Translator
from manyheads.errors import NonFiniteError
from manyheads.extras.serving.app import build_app
from manyheads.extras.serving.jobs import _chosen
from manyheads.extras.serving.settings import ServingSettings
from manyheads.models.pretrained import save_pretrained
from manyheads.models.reformer.config import PRESETS
from manyheads.models.transformer_xl.config import TransformerXLConfig
from manyheads.tasks.language_modelling.score import score_texts
from manyheads.text.vocabulary import ByteVocabulary

ENGLISH = "Hello, how are you? I am hungry.\n\nThe cat sees the dog."


@pytest.fixture(scope="module")
def translator(translator_folder: Path) -> Translator:
    return Translator.from_pretrained(translator_folder, "cpu")


@pytest.fixture(scope="module")
def generator(novel_folder: Path) -> Generator:
    return Generator.from_pretrained(novel_folder, "cpu")


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Server-sent events: (name, data)."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((lines["event"], json.loads(lines["data"])))
    return found


def test_sentences_are_translated_each_and_rejoined(client: TestClient, translator: Translator) -> None:
    answer = client.post("/v1/translate", json={"text": [ENGLISH, "", "  \n"], "num_return_sequences": 2})
    assert answer.status_code == 200, answer.text
    sentences = ["Hello, how are you?", "I am hungry.", "The cat sees the dog."]
    expected = translator.translate_nbest(sentences, num_return_sequences=2)
    first, empty, blank = answer.json()["translations"]
    one, two, three = (row[0].text for row in expected)
    assert first["text"] == f"{one} {two}\n\n{three}"
    assert (empty["text"], blank["text"]) == ("", "  \n")
    for sentence, row in zip(first["sentences"], expected, strict=True):
        assert [one["text"] for one in sentence["candidates"]] == [one.text for one in row]
        assert [one["tokens"] for one in sentence["candidates"]] == [one.tokens for one in row]
        for shown, found in zip(sentence["candidates"], row, strict=True):
            assert shown["score"] == pytest.approx(found.score, abs=1e-4)
            assert shown["token_log_probs"] == pytest.approx(found.token_log_probs, abs=1e-4)
    assert ENGLISH[first["sentences"][1]["start"] : first["sentences"][1]["end"]] == "I am hungry."


def test_sentences_are_streamed(client: TestClient) -> None:
    whole = client.post("/v1/translate", json={"text": ENGLISH}).json()
    found = events(client.post("/v1/translate", json={"text": ENGLISH, "stream": True}).text)
    assert [name for name, _ in found] == ["sentence"] * 3 + ["done"]
    by_place = {one["sentence"]: one["candidates"][0]["text"] for _, one in found[:-1]}
    assert [by_place[place] for place in range(3)] == [
        one["candidates"][0]["text"] for one in whole["translations"][0]["sentences"]
    ]


def test_a_forced_prefix_begins_the_translation(client: TestClient, translator: Translator) -> None:
    body = {"text": "I am hungry.", "forced_prefix": "Die Katze", "alignments": True}
    [found] = client.post("/v1/translate", json=body).json()["translations"][0]["sentences"]
    best = found["candidates"][0]
    ids = translator.tokenizer.target.encode("Die Katze")
    assert best["token_ids"][: len(ids)] == ids
    assert best["token_log_probs"][: len(ids)] == [0.0] * len(ids)
    assert len(found["alignment"]) == len(best["tokens"])
    assert all(sum(row) == pytest.approx(1, abs=1e-2) for row in found["alignment"])
    assert len(found["alignment"][0]) == len(found["source_tokens"])
    several = client.post("/v1/translate", json={**body, "text": ENGLISH})
    assert several.status_code == 422
    assert several.json()["error"]["param"] == "forced_prefix"


@pytest.mark.parametrize("options", [{"do_sample": False}, {"seed": 5, "num_return_sequences": 3}, {"stop": ["e"]}])
def test_continuations_are_those_of_the_library(client, generator, options):
    prompts = ["It is a truth", "", "x"]
    answer = client.post("/v1/generate", json={"prompt": prompts, **options}).json()
    own = {**options, "stop": tuple(options.get("stop", ()))}
    expected = generator.continuations(prompts, **own)
    assert [[one["text"] for one in row] for row in answer["continuations"]] == [
        [one.text for one in row] for row in expected
    ]
    assert [[one["ended_by"] for one in row] for row in answer["continuations"]] == [
        [one.ended_by for one in row] for row in expected
    ]


def test_a_continuation_is_streamed_with_alternatives(client: TestClient, generator: Generator) -> None:
    body = {"prompt": "It is", "stream": True, "top_log_probs": 3, "seed": 2}
    found = events(client.post("/v1/generate", json=body).text)
    tokens = [one for name, one in found if name == "token"]
    assert "".join(one["text"] for one in tokens) == generator.generate("It is", seed=2)
    assert all(len(one["top_log_probs"]) == 3 for one in tokens)
    assert found[-1][1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 24}


def test_scores_are_those_of_the_library(client: TestClient, generator: Generator, translator: Translator) -> None:
    texts = ["It is a truth universally acknowledged", "", "x", "y" * 700]
    answer = client.post("/v1/score", json={"text": texts, "top_log_probs": 2}).json()
    for shown, expected in zip(answer["scores"], score_texts(generator, texts), strict=True):
        assert shown["tokens"] == expected.tokens
        assert shown["token_log_probs"] == pytest.approx(expected.token_log_probs, abs=1e-4)
        for top, log_prob in zip(shown.get("top_log_probs", []), shown["token_log_probs"], strict=True):
            assert top[0]["log_prob"] >= max(log_prob, top[1]["log_prob"])
    sources, targets = ["I am hungry.", "Where is the station?"], ["Ich habe Hunger.", ""]
    answer = client.post("/v1/score", json={"source": sources, "target": targets}).json()
    for shown, expected in zip(answer["scores"], translator.score(sources, targets), strict=True):
        assert shown["tokens"] == expected.tokens
        assert shown["token_log_probs"] == pytest.approx(expected.token_log_probs, abs=1e-4)


def test_a_request_gets_the_same_in_a_crowd_as_alone(client: TestClient) -> None:
    words = ["I", "am", "hungry.", "The", "cat", "sees", "the", "dog.", "Where", "is", "station?"]
    bodies: list[tuple[str, dict[str, Any]]] = []
    for number in range(24):
        text = " ".join(words[place % 11] for place in range(number, number + 1 + number % 7))
        bodies.append(("translate", {"text": text, "num_beams": 1 + number % 3}))
        bodies.append(("generate", {"prompt": text, "seed": number % 5, "max_new_tokens": 5 + number % 9}))
        bodies.append(("score", {"text": [text, text[:5]]}))

    def ask(path: str, body: dict[str, Any]) -> Any:
        answer = client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        del found["id"]
        return found

    alone = [ask(*one) for one in bodies]
    with ThreadPoolExecutor(24) as pool:
        crowd = list(pool.map(lambda one: ask(*one), bodies))
    for one, other in zip(alone, crowd, strict=True):
        assert same(one, other)


def same(one: Any, other: Any) -> bool:
    """Whether two answers are equal, numbers to 1e-4."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == (pytest.approx(other, abs=1e-4) if isinstance(other, float) else other)


def test_line_breaks_of_scored_sentences_are_not_read(client: TestClient) -> None:
    bodies = [
        {"source": ["I am hungry."], "target": ["Ich habe Hunger."]},
        {"source": ["I am\nhungry.\r\n"], "target": ["Ich habe\r\nHunger.\n"]},
    ]
    one, other = (client.post("/v1/score", json=body).json()["scores"] for body in bodies)
    assert same(one, other)


@pytest.mark.parametrize("kind", ["cross", "encoder", "decoder"])
def test_attention_weights(client: TestClient, kind: str) -> None:
    answer = client.post("/v1/attention", json={"source": "I am hungry.", "kind": kind, "layer": 1, "head": 0}).json()
    assert len(answer["weights"]) == len(answer["query_tokens"])
    assert all(len(row) == len(answer["key_tokens"]) for row in answer["weights"])
    assert all(sum(row) == pytest.approx(1, abs=1e-2) for row in answer["weights"])
    assert client.post("/v1/attention", json={"source": "I", "layer": 99}).status_code == 422


def test_attention_of_the_models_own_translation_is_that_of_its_tokens(client: TestClient) -> None:
    """Of a translation that was cut at its limit, there is no end."""
    endings = set()
    for text in ("I am hungry.", "Hello, how are you?", "The cat sees the dog.", "a", "Where is the station?"):
        body = {"text": text, "split_sentences": False}
        [sentence] = client.post("/v1/translate", json=body).json()["translations"][0]["sentences"]
        tokens = sentence["candidates"][0]["tokens"]
        assert client.post("/v1/attention", json={"source": text}).json()["query_tokens"] == tokens
        endings.add(tokens[-1] == "</s>")
    assert False in endings


def test_line_breaks_in_a_pair_are_spaces_to_its_attention(client: TestClient) -> None:
    one, other = (
        client.post("/v1/attention", json={"source": "I am hungry.", "target": target}).json()
        for target in ("Ich habe Hunger.", "Ich\nhabe Hunger.\r\n")
    )
    assert one == other


def test_alternatives_are_tokens_of_the_vocabulary(client: TestClient) -> None:
    """A model can have more rows than its vocabulary has tokens."""
    table = torch.tensor([[4.0, 3.0, 2.0, 1.0, 9.0]] * 2).log_softmax(-1)
    assert [[index for index, _ in one] for one in _chosen(table, [1, 2], 3, 4).top] == [[0, 1, 2]] * 2
    with pytest.raises(NonFiniteError):  # a fault of the model, not of the request
        _chosen(table * torch.nan, [1, 2], 0, 4)


def test_a_named_model_may_be_given_its_languages(client: TestClient) -> None:
    both = {"source_lang": "EN", "target_lang": "de"}
    for languages in ({"source_lang": "en"}, {"target_lang": "de-AT"}, both, {"source_lang": "", "target_lang": ""}):
        assert client.post("/v1/translate", json={"text": "a", "model": "en-de", **languages}).status_code == 200


def test_memory_of_a_model_without_one_is_refused_before_a_stream_begins(settings, tmp_path):
    vocabulary = ByteVocabulary()
    config = dataclasses.replace(PRESETS["debug"], vocab_size=vocabulary.vocab_size)
    save_pretrained(build_model(config), tmp_path / "reformer", tokenizer=vocabulary)
    with TestClient(build_app(dataclasses.replace(settings, models=(str(tmp_path / "reformer"),)))) as client:
        for stream in (False, True):
            body = {"prompt": ["a", "b"], "memory_len": 5, "stream": stream}
            answer = client.post("/v1/generate", json=body)
            assert answer.status_code == 422
            assert "leave it out" in answer.json()["error"]["message"]


def test_a_memory_of_zeros_counts_as_work(settings: ServingSettings, tmp_path: Path) -> None:
    vocabulary = ByteVocabulary()
    config = TransformerXLConfig(
        vocab_size=vocabulary.vocab_size, d_model=16, num_heads=2, d_ff=24, num_layers=1, memory_len=12,
        initial_memory="zeros",
    )  # fmt: skip
    save_pretrained(build_model(config), tmp_path / "zeros", tokenizer=vocabulary)
    with TestClient(build_app(dataclasses.replace(settings, models=(str(tmp_path / "zeros"),)))) as client:
        body = {"prompt": "a", "max_new_tokens": 3, "num_return_sequences": 2}
        found = [client.post("/v1/generate", json=body | {"memory_len": size}) for size in (100, 20_000)]
        assert [answer.status_code for answer in found] == [200, 422]
        assert "20000 of memory" in found[1].json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("translate", {"text": "a\ud800"}, 422, "text"),
        ("translate", {"text": 5}, 422, "text"),
        ("translate", {}, 422, "text"),
        ("translate", {"text": "a", "beams": 3}, 422, "beams"),
        ("translate", {"text": "a", "num_beams": "4"}, 422, "num_beams"),
        ("translate", {"text": "a", "num_beams": 0}, 422, None),
        ("translate", {"text": "a", "num_beams": 500, "num_return_sequences": 2}, 422, "text"),
        ("translate", {"text": "a", "model": "novel"}, 400, "model"),
        ("translate", {"text": "a", "model": "none"}, 404, "model"),
        ("translate", {"text": "a", "target_lang": "fr"}, 422, "target_lang"),
        ("translate", {"text": "a", "model": "en-de", "target_lang": "fr"}, 422, "target_lang"),
        ("translate", {"text": "a", "model": "en-de", "source_lang": "de"}, 422, "target_lang"),
        ("translate", {"text": "a", "temperature": 0.5}, 422, "temperature"),
        ("generate", {"prompt": "a", "top_k": 5, "do_sample": False}, 422, "top_k"),
        ("translate", {"text": ["a"] * 1000}, 422, "text"),
        ("translate", {"text": "word " * 5000}, 422, "text"),
        ("translate", {"text": "a", "forced_prefix_ids": [10**9]}, 422, None),
        ("translate", {"text": "a", "min_new_tokens": 8_200}, 422, "text"),
        ("translate", {"text": "a", "forced_prefix_ids": [5] * 8_200}, 422, "text"),
        ("generate", {"prompt": "a", "max_new_tokens": 100_000}, 422, "prompt"),
        ("generate", {"prompt": "a", "temperature": 0}, 422, None),
        ("generate", {"prompt": "a", "num_return_sequences": 1000}, 422, "prompt"),
        ("generate", {"prompt": "a", "no_repeat_ngram_size": 101}, 422, "no_repeat_ngram_size"),
        ("translate", {"text": "a", "no_repeat_ngram_size": 101}, 422, "no_repeat_ngram_size"),
        ("score", {"source": ["a"] * 200, "target": ["a" * 200] * 200, "top_log_probs": 20}, 422, "top_log_probs"),
        ("score", {"text": ["a" * 700] * 40, "top_log_probs": 20}, 422, "top_log_probs"),
        ("generate", {"prompt": ["a"] * 9, "max_new_tokens": 9_000, "top_log_probs": 20}, 422, "top_log_probs"),
        ("translate", {"text": ["a"] * 9, "min_new_tokens": 4_000, "top_log_probs": 20}, 422, "top_log_probs"),
        ("score", {}, 422, "text"),
        ("score", {"source": ["a"], "target": []}, 422, "target"),
        ("score", {"text": ["a" * 20_000]}, 422, "text"),
        ("attention", {"source": " "}, 422, "source"),
        ("attention", {"source": "word " * 600, "target": "a"}, 422, "source"),
        ("attention", {"source": "a", "target": "word " * 600, "kind": "encoder"}, 422, "source"),
        # In Python, true is the integer 1.
        ("translate", {"text": "a", "num_return_sequences": True}, 422, "num_return_sequences"),
        ("translate", {"text": "a", "top_log_probs": True}, 422, "top_log_probs"),
        ("translate", {"text": "a", "forced_prefix_ids": [True]}, 422, "forced_prefix_ids"),
        ("translate", {"text": "a", "length_penalty": True}, 422, "length_penalty"),
        ("generate", {"prompt": "a", "seed": True}, 422, "seed"),
        ("generate", {"prompt_ids": [True]}, 422, "prompt_ids"),
        ("generate", {"prompt_ids": [10**400]}, 422, "prompt_ids"),
        ("translate", {"text": "a", "forced_prefix_ids": [-(10**400)]}, 422, "forced_prefix_ids"),
        ("generate", {"prompt": "a", "top_k": 10**400}, 422, None),
        ("attention", {"source": "a", "layer": False}, 422, "layer"),
    ],
)
def test_what_cannot_be_served_is_refused(client, path, body, status, field):
    content = json.dumps(body)
    answer = client.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "").startswith(field or "")
    assert len(error["message"]) < 400


def test_a_number_of_too_many_digits_is_named(client: TestClient) -> None:
    content = '{"prompt": "a", "top_k": 1' + "0" * 5000 + "}"
    answer = client.post("/v1/generate", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "too many digits" in answer.json()["error"]["message"]


def test_a_very_long_sentence_is_translated_without_alignment(client: TestClient) -> None:
    """The page asks for alignments of whatever is typed."""
    body = {"text": ["word " * 250, "I am hungry."], "alignments": True, "max_new_tokens": 9}
    found = client.post("/v1/translate", json=body).json()["translations"]
    assert ["alignment" in one["sentences"][0] for one in found] == [False, True]


def test_the_text_that_is_too_long_is_named(client: TestClient) -> None:
    body = {"text": ["One. Two. Three.", "word " * 5000]}
    assert "a sentence of text 2 " in client.post("/v1/translate", json=body).json()["error"]["message"]


def test_a_model_without_beams_counts_n_as_samples(client: TestClient) -> None:
    body = {"text": "I am hungry.", "do_sample": True, "num_return_sequences": 5, "seed": 3}
    first, second = (client.post("/v1/translate", json=body).json()["translations"] for _ in range(2))
    assert first == second
    assert len(first[0]["sentences"][0]["candidates"]) == 5


def test_a_continued_prompt_says_the_same(client: TestClient, generator: Generator) -> None:
    prompt = "It is a truth universally acknowledged, " * 30
    for text in (prompt, prompt + "that a single man"):
        body = {"prompt": text, "seed": 3, "max_new_tokens": 9}
        found = client.post("/v1/generate", json=body).json()["continuations"][0][0]
        assert found["text"] == generator.generate(text, seed=3, max_new_tokens=9)
    [line] = [
        line for line in client.get("/metrics").text.split("\n") if line.startswith("manyheads_prefix_cache_bytes")
    ]
    assert float(line.split()[1]) > 0
