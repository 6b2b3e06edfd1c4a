"""Glossaries by DeepL's calls: what is stored, who sees it, and what it does to translations."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from manyheads.errors import ConfigError
from manyheads.extras.serving import glossaries as module
from manyheads.extras.serving.app import build_app
from manyheads.extras.serving.glossaries import Glossaries, TermList, parse_entries
from manyheads.extras.serving.refusals import Refusal
from manyheads.extras.serving.settings import ServingSettings

OWN, OTHER = ({"authorization": f"DeepL-Auth-Key {name}-key-12345"} for name in ("own", "other"))
TERMS = "hungry\tBahnhof\nstation\tKatze"
FORM = {"name": "food", "source_lang": "EN", "target_lang": "DE", "entries": TERMS, "entries_format": "tsv"}
V3 = {"name": "food", "dictionaries": [FORM]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("glossaries") / "kept"


@pytest.fixture(scope="module")
def keyed(settings: ServingSettings, folder: Path) -> Iterator[TestClient]:
    """A server with two keys that keeps glossaries."""
    keys = folder.parent / "keys"
    keys.write_text("own-key-12345\nother-key-12345\n", encoding="utf-8")
    keys.chmod(0o600)
    with TestClient(build_app(replace(settings, glossaries=str(folder), api_key_file=str(keys)))) as running:
        running.headers.update(OWN)
        yield running


@pytest.fixture
def glossary(keyed: TestClient) -> str:
    return str(keyed.post("/v2/glossaries", json=FORM).json()["glossary_id"])


def test_version_2(keyed: TestClient, folder: Path) -> None:
    answer = keyed.post("/v2/glossaries", json=FORM)
    made = answer.json()
    assert answer.status_code == 201
    assert "not inflected" in made.pop("note")
    assert made | {"glossary_id": "", "creation_time": ""} == {
        "glossary_id": "", "name": "food", "ready": True, "source_lang": "en", "target_lang": "de",
        "creation_time": "", "entry_count": 2,
    }  # fmt: skip
    place = f"/v2/glossaries/{made['glossary_id']}"
    assert made.items() <= keyed.get(place).json().items()
    assert keyed.get("/v2/glossaries").json()["glossaries"][0]["glossary_id"] == made["glossary_id"]
    entries = keyed.get(f"{place}/entries", headers={"accept": "text/tab-separated-values"})
    assert entries.text == TERMS
    pairs = keyed.get("/v2/glossary-language-pairs").json()
    assert pairs == {"supported_languages": [{"source_lang": "en", "target_lang": "de"}]}
    [file] = folder.glob("*/*.json")
    assert file.stem == made["glossary_id"]
    assert "own-key" not in str(file)
    assert "food" not in str(file)
    assert file.parent.stat().st_mode & 0o077 == 0
    assert keyed.delete(place).status_code == 204
    assert keyed.get(place).status_code == 404
    assert not list(folder.glob("*/*"))


def test_version_3(keyed: TestClient) -> None:
    made = keyed.post("/v3/glossaries", json=V3).json()
    place = f"/v3/glossaries/{made['glossary_id']}"
    assert made["dictionaries"] == [{"source_lang": "en", "target_lang": "de", "entry_count": 2}]
    pair = {"source_lang": "en", "target_lang": "de"}
    changed = {"dictionaries": [{**pair, "entries": "Hungry\tHund\nnew\tneu", "entries_format": "tsv"}]}
    assert keyed.patch(place, json={"name": "more", **changed}).json()["dictionaries"][0]["entry_count"] == 3
    twice = {"dictionaries": [{**pair, "entries": f"{word}\t{word}"} for word in ("one", "two")]}
    assert keyed.patch(place, json=twice).json()["dictionaries"][0]["entry_count"] == 5
    assert keyed.patch(place, json={"name": ""}).status_code == 400
    [terms] = keyed.get(f"{place}/entries", params=pair).json()["dictionaries"]
    assert terms["entries"] == "Hungry\tHund\nstation\tKatze\nnew\tneu\none\tone\ntwo\ttwo"
    put = keyed.put(f"{place}/dictionaries", json={**pair, "entries": "a,b,en,de\n", "entries_format": "csv"})
    assert put.json() == {**pair, "entry_count": 1}
    assert keyed.get(place).json()["name"] == "more"
    assert keyed.get("/v3/glossaries").json()["glossaries"][-1]["name"] == "more"
    assert keyed.delete(f"{place}/dictionaries", params=pair).status_code == 204
    assert keyed.get(f"{place}/entries", params=pair).status_code == 404
    assert keyed.get(f"/v2/glossaries/{made['glossary_id']}").status_code == 404  # none, or several pairs
    assert keyed.delete(place).status_code == 204


def test_translations_have_the_terms(keyed: TestClient, glossary: str) -> None:
    body: dict[str, Any] = {"text": ["I am hungry. Where is it?", "A dog."], "source_lang": "EN", "target_lang": "DE"}
    plain = keyed.post("/v2/translate", json=body).json()
    assert "Bahnhof" not in plain["translations"][0]["text"]
    assert "note" not in plain
    for chosen in ({"glossary_id": glossary}, {"glossary_ids": [glossary]}):
        found = keyed.post("/v2/translate", json={**body, **chosen}).json()
        assert "Bahnhof" in found["translations"][0]["text"]
        assert found["translations"][1] == plain["translations"][1]
        assert "not inflected" in found["note"]
    marked = {**body, "text": ["<p>I am <b>hungry</b>.</p>"], "tag_handling": "html", "glossary_id": glossary}
    assert "Bahnhof" in keyed.post("/v2/translate", json=marked).json()["translations"][0]["text"]
    form = {**body, "text": "I am hungry.", "glossary_ids": glossary}
    assert "Bahnhof" in keyed.post("/v2/translate", data=form).json()["translations"][0]["text"]
    native = keyed.post("/v1/translate", json={"text": "I am hungry.", "terms": "hungry\tBahnhof"}).json()
    assert "Bahnhof" in native["translations"][0]["text"]
    assert "not inflected" in native["note"]


def test_a_key_sees_its_own_glossaries_only(keyed: TestClient, glossary: str) -> None:
    for version in ("/v2", "/v3"):
        assert keyed.get(f"{version}/glossaries", headers=OTHER).json() == {"glossaries": []}
        place = f"{version}/glossaries/{glossary}"
        assert [keyed.request(how, place, headers=OTHER).status_code for how in ("GET", "DELETE")] == [404, 404]
        assert keyed.get(f"{version}/glossaries", headers={"authorization": ""}).status_code == 403
    body = {"text": ["a"], "source_lang": "EN", "target_lang": "DE", "glossary_id": glossary}
    assert keyed.post("/v2/translate", json=body, headers=OTHER).status_code == 404
    assert keyed.post("/v2/translate", json=body).status_code == 200


@pytest.mark.parametrize(
    ("change", "status", "told"),
    [
        ({"target_lang": "FR"}, 400, "no model here"),
        ({"entries": "a\tb\nc"}, 400, "line 2"),
        ({"entries": "a\tb\tc"}, 400, "line 1"),
        ({"entries": "a\t"}, 400, "line 1"),
        ({"entries": "a\tb\nA\tc"}, 400, "line 2"),
        ({"entries": "a\tb\u0007"}, 400, "control character"),
        ({"entries": 'a,"b', "entries_format": "csv"}, 400, "line 1"),
        ({"entries": "a,b,en,fr", "entries_format": "csv"}, 400, "line 1"),
        ({"entries": " \n"}, 400, "no terms"),
        ({"entries_format": "xlsx"}, 400, "tsv or csv"),
        ({"entries": None}, 400, "entries"),
        ({"name": ""}, 400, "name"),
        ({"name": "a\nb"}, 400, "name"),
        ({"entries": "ä\tb\n" + "x" * 1_000_000}, 413, "1,000,000 bytes"),
        ({"entries": "x" * 6_100_000}, 413, "a glossary is 1,000,000"),
    ],
)
def test_bad_glossaries_are_refused(keyed, folder, change, status, told):
    before = sorted(folder.rglob("*"))
    form = {**FORM, **change}
    for path, body in (("/v2/glossaries", form), ("/v3/glossaries", {"name": form["name"], "dictionaries": [form]})):
        answer = keyed.post(path, json=body)
        assert answer.status_code == status, answer.text
        assert told in answer.json()["message"]
    assert sorted(folder.rglob("*")) == before


def test_a_glossary_for_another_pair_and_unusable_ids(keyed: TestClient, glossary: str) -> None:
    service: Any = keyed.app.state.service  # type: ignore[attr-defined]
    other = service.glossaries.create("own-key-12345", "o", [TermList("en", "fr", (("a", "b"),))])
    body = {"text": ["a"], "source_lang": "EN", "target_lang": "DE"}
    for ids, status, told in (
        (other.id, 400, "en to fr"), ("../../keys", 404, "no such"), (glossary.upper(), 404, "no such"),
    ):  # fmt: skip
        answer = keyed.post("/v2/translate", json={**body, "glossary_id": ids})
        assert answer.status_code == status
        assert told in answer.json()["message"]
    del body["source_lang"]
    assert keyed.post("/v2/translate", json={**body, "glossary_id": glossary}).status_code == 400
    asked = {"text": "a", "terms": "a\tb", "do_sample": True}
    assert keyed.post("/v1/translate", json=asked).status_code == 422


def test_the_limits_of_a_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_GLOSSARIES", 2)
    store = Glossaries(folder.parent / "few")
    terms = TermList("en", "de", (("a", "b"),))
    for _ in range(2):
        store.create("key", "name", [terms])
    with pytest.raises(Refusal) as refused:
        store.create("key", "name", [terms])
    assert refused.value.status == 456
    store.create("another", "name", [terms])


def test_a_full_disk_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Glossaries(folder.parent / "full")
    terms = TermList("en", "de", (("a", "b"),))
    kept = store.create("key", "name", [terms])
    before = sorted((folder.parent / "full").rglob("*"))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("manyheads.files.commit.os.fsync", full)
    with pytest.raises(Refusal) as refused:
        store.create("key", "name", [terms])
    with pytest.raises(Refusal), store.changing("key", kept.id) as versions:
        versions.append(kept.with_lists([TermList("en", "de", (("c", "d"),))]))
    assert refused.value.status == 507
    assert sorted((folder.parent / "full").rglob("*")) == before
    assert store.get("key", kept.id) == kept


def test_a_killed_server_and_a_damaged_file(folder: Path) -> None:
    place = folder.parent / "killed"
    kept = Glossaries(place).create("key", "name", [TermList("en", "de", (("a", "b"),))])
    [file] = place.glob("*/*.json")
    rest = file.with_name(f"{file.name}.tmp-999999-0123456789abcdef")
    rest.write_text("half", encoding="utf-8")
    store = Glossaries(place)
    assert store.heads("key") == [kept.head]
    file.write_text(json.dumps([]), encoding="utf-8")
    with pytest.raises(Refusal) as refused:
        store.get("key", kept.id)
    assert refused.value.status == 500
    store.delete("key", kept.id)


def test_terms_are_read_anew_after_a_change(folder: Path) -> None:
    store = Glossaries(folder.parent / "changed")
    one, other = (store.create("key", "n", [TermList("en", "de", ((" a".strip(), text),))]) for text in ("b", "c"))
    assert [term.target for term in store.terms("key", [one.id, other.id], "EN", "DE-CH")] == ["b"]
    with store.changing("key", one.id) as versions:
        versions.append(one.with_lists([TermList("en", "de", (("a", "d"),))]))
    assert [term.target for term in store.terms("key", [one.id, other.id], "en", "de")] == ["d"]


def test_lines_of_other_systems() -> None:
    assert parse_entries("a\tb\r\n\r\nc\td", "tsv", ("en", "de")) == (("a", "b"), ("c", "d"))
    assert parse_entries('"a, b",c\r\n', "csv", ("en", "de")) == (("a, b", "c"),)
    for kind, lines in (("tsv", "\ufeffa\tb"), ("csv", '\ufeff"a",b')):  # as Excel begins a file
        assert parse_entries(lines, kind, ("en", "de")) == (("a", "b"),)


def test_only_with_keys_and_a_folder(settings: ServingSettings, client: TestClient, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--api-key-file"):
        ServingSettings(glossaries=str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot keep glossaries"):
        Glossaries(tmp_path / "file")
    assert client.get("/v2/glossaries").status_code == 404
    assert client.post("/v3/glossaries", json=V3).status_code == 404
    asked = {"text": ["a"], "source_lang": "EN", "target_lang": "DE", "glossary_id": "x"}
    answer = client.post("/v2/translate", json=asked)
    assert (answer.status_code, "--glossaries" in answer.json()["message"]) == (400, True)
