"""What is no word of a language stays in the translations of every protocol."""

import json

import pytest
from starlette.testclient import TestClient

TEXT = "Hello {name}, see https://x.org/a_b?c=d. 2020-01-01 I am hungry \U0001f60a!\nuser@example.org\n---"
KEPT = ("{name}", "https://x.org/a_b?c=d", "2020-01-01", "\U0001f60a", "user@example.org")


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("/translate", {"q": TEXT, "source": "en", "target": "de"}, "translatedText"),
        ("/translate", {"q": TEXT, "source": "en", "target": "de", "alternatives": 1}, "translatedText"),
        ("/v2/translate", {"text": [TEXT], "target_lang": "DE"}, "translations"),
        ("/v1/translate", {"text": TEXT}, "translations"),
        ("/v1/translate", {"text": TEXT, "num_return_sequences": 2, "alignments": True}, "translations"),
    ],
)
def test_what_is_kept(client: TestClient, path: str, body: dict[str, object], key: str) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()[key]
    text = found if isinstance(found, str) else found[0]["text"]
    assert all(text.count(word) == 1 for word in KEPT)
    assert text.split("\n")[1:] == TEXT.split("\n")[1:]


def test_a_stream_has_an_event_for_every_sentence(client: TestClient) -> None:
    answer = client.post("/v1/translate", json={"text": TEXT, "stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    sentences = [one for one in events if "candidates" in one]
    whole = client.post("/v1/translate", json={"text": TEXT}).json()["translations"][0]["sentences"]
    shown = {one["sentence"]: one["candidates"][0]["text"] for one in sentences}
    assert [shown[place] for place in sorted(shown)] == [one["candidates"][0]["text"] for one in whole]
    assert events[-1]["num_sentences"] == len(whole)


def test_a_sentence_in_capitals(client: TestClient) -> None:
    answer = client.post("/v1/translate", json={"text": "THE CAT SEES THE DOG."}).json()
    small = client.post("/v1/translate", json={"text": "The cat sees the dog."}).json()
    [sentence] = answer["translations"][0]["sentences"]
    candidate, other = sentence["candidates"][0], small["translations"][0]["sentences"][0]["candidates"][0]
    each = [one["log_prob"] / max(1, len(one["token_log_probs"])) for one in (candidate, other)]
    assert each[0] >= each[1] - 1e-5
