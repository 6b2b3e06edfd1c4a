"""`prepare --from SOURCE`: what each kind fetches, sources.lock, and what is refused, with a server on loopback."""

import gzip
import hashlib
import io
import json
import os
import shlex
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from extras.sources.conftest import Site
from hub_server import running_hub

from manyheads.data.translation.prepared import PreparedData
from manyheads.extras.push.upload import CardFacts, make_card, terms_of_data
from manyheads.extras.sources import fetching, names
from manyheads.extras.sources.names import ENTRIES, Entry
from manyheads.models.transformer.config import TransformerConfig

Run = Callable[..., int]
EN = [
    f"this is sentence {word}"
    for word in ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
]
DE = [
    f"das ist der Satz {word}"
    for word in ("eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn")
]
LANGUAGES = ("--source-lang", "en", "--target-lang", "de")


def text(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def tsv(start: int, end: int) -> bytes:
    return text([f"{en}\t{de}" for en, de in zip(EN[start:end], DE[start:end], strict=True)])


def as_zip(files: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def as_tar(files: dict[str, bytes], **changes: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            for field, value in changes.items():
                setattr(entry, field, value)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


CORPUS = {
    **{f"corpus/train.{end}": text(lines[:6]) for end, lines in (("en", EN), ("de", DE))},
    **{f"corpus/dev.{end}": text(lines[6:8]) for end, lines in (("en", EN), ("de", DE))},
    **{f"corpus/test.{end}.gz": gzip.compress(text(lines[8:])) for end, lines in (("en", EN), ("de", DE))},
}


def counts(folder: Path) -> dict[str, int]:
    return {split: each["pairs"] for split, each in PreparedData.open(folder).manifest["counts"].items()}


def refused(code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> None:
    error = capsys.readouterr().err
    assert code == 2, error
    assert "Traceback" not in error
    assert [word for word in words if word not in error] == [], error
    assert not (tmp_path / "data").exists()


def test_sources_of_several_kinds_are_read_one_after_the_other(site, prepare, tmp_path, capsys):
    site.files = {"/a.tsv": tsv(0, 4), "/b.en.gz": gzip.compress(text(EN[4:6])), "/b.de": text(DE[4:6])}
    site.files["/c.zip"] = as_zip(CORPUS)
    folder = tmp_path / "local"
    for name, content in CORPUS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    train = ("--from", f"url:{site.url}/a.tsv", f"url:{site.url}/b.en.gz,{site.url}/b.de", "--from", folder)
    held = ("--valid-from", f"url:{site.url}/c.zip", "--test-from", folder)
    assert prepare(*train, *held, *LANGUAGES) == 0
    assert counts(tmp_path / "data") == {"train": 12, "valid": 2, "test": 2}
    manifest = PreparedData.open(tmp_path / "data").manifest
    assert manifest["origin"]["train"].startswith(f"url:{site.url}/a.tsv + url:")
    files = json.loads((tmp_path / "sources.lock").read_text("utf-8"))["files"]
    assert files[f"{site.url}/a.tsv"]["bytes"] == len(tsv(0, 4))
    assert len(files) == 4
    said = capsys.readouterr()
    assert "bytes of a.tsv" in said.err
    before = len(site.requests)
    assert prepare(*train, *held, *LANGUAGES, "--replace") == 0
    assert len(site.requests) == before  # from the cache


def test_a_redirect_is_followed_and_an_archive_unpacked(site: Site, prepare: Run, tmp_path: Path) -> None:
    site.files["/deep/c.tar.gz"], site.redirects["/c.tar.gz"] = as_tar(CORPUS), "/deep/c.tar.gz"
    source = f"url:{site.url}/c.tar.gz"
    assert prepare("--from", source, "--valid-from", source, "--test-from", source, *LANGUAGES) == 0
    assert counts(tmp_path / "data") == {"train": 6, "valid": 2, "test": 2}


def test_a_transfer_that_broke_off_is_continued(site, prepare, tmp_path, capsys):
    site.files["/a.tsv"], site.broken["/a.tsv"] = tsv(0, 10), 100
    arguments = ("--from", f"url:{site.url}/a.tsv", "--valid-count", "2")
    refused(prepare(*arguments), capsys, tmp_path, "same command continues")
    assert prepare(*arguments) == 0
    assert site.requests[-1] == ("/a.tsv", "bytes=100-")
    assert counts(tmp_path / "data") == {"train": 8, "valid": 2}


def test_a_kill_after_the_last_byte_is_recovered(site: Site, prepare: Run, tmp_path: Path) -> None:
    site.files["/a.tsv"] = tsv(0, 10)
    arguments = ("--from", f"url:{site.url}/a.tsv", "--valid-count", "2")
    assert prepare(*arguments) == 0
    [path] = (tmp_path / "cache").rglob("a.tsv")
    path.with_name("a.tsv.tag").write_text(f'"{hash(site.files["/a.tsv"])}"')
    path.rename(path.with_name("a.tsv.part"))
    assert prepare(*arguments, "--replace") == 0
    assert [wanted for _, wanted in site.requests] == [None, f"bytes={len(tsv(0, 10))}-", None]


def test_a_file_that_changed_meanwhile_is_fetched_from_its_beginning(site, prepare, tmp_path, capsys):
    site.files["/a.tsv"], site.broken["/a.tsv"] = tsv(0, 4), 50
    arguments = ("--from", f"url:{site.url}/a.tsv", "--valid-count", "2")
    refused(prepare(*arguments), capsys, tmp_path, "same command continues")
    site.files["/a.tsv"] = tsv(0, 10)
    assert prepare(*arguments) == 0
    assert counts(tmp_path / "data") == {"train": 8, "valid": 2}


def test_another_file_at_the_same_address_needs_update(site, prepare, tmp_path, capsys):
    site.files["/a.zip"] = as_zip({"a.tsv": tsv(0, 8)})
    arguments = ("--from", f"url:{site.url}/a.zip", "--valid-count", "2")
    assert prepare(*arguments) == 0
    shutil.rmtree(tmp_path / "cache")
    shutil.rmtree(tmp_path / "data")
    site.files["/a.zip"] = as_zip({"a.tsv": tsv(0, 10)})
    refused(prepare(*arguments), capsys, tmp_path, "has changed", "--update")
    assert prepare(*arguments, "--update") == 0
    assert counts(tmp_path / "data")["train"] == 8
    assert prepare(*arguments, "--replace") == 0


@pytest.mark.parametrize("command", [("wmt14-en-de",), ("text8", "--task", "lm")])
def test_a_dry_run_needs_no_validation_data(command, prepare, capsys):
    assert prepare("--from", *command, "--dry-run") == 0
    assert "not tried" in capsys.readouterr().out


def test_a_dry_run_fetches_nothing(site, prepare, tmp_path, capsys):
    site.files["/a.tsv"] = tsv(0, 4)
    arguments = ("--from", f"url:{site.url}/a.tsv", "multi30k-en-de", "--valid-count", "2", *LANGUAGES, "--dry-run")
    assert prepare(*arguments) == 0
    said = capsys.readouterr().out
    assert [
        word for word in (f"{site.url}/a.tsv", "to be fetched", "not tried", "train.de.gz") if word not in said
    ] == []
    assert site.requests == []
    assert not (tmp_path / "data").exists()


def test_terms_are_accepted_by_name_and_recorded(site, prepare, tmp_path, monkeypatch, capsys):
    site.files["/a.tsv"] = tsv(0, 8)
    digest = hashlib.sha1(tsv(0, 8)).hexdigest()
    entry = Entry(
        "captions", "https://captions.example", {"train": f"url:{site.url}/a.tsv"}, terms="for research only",
        sums={"a.tsv": ("sha1", digest)},
    )  # fmt: skip
    monkeypatch.setattr(names, "ENTRIES", ENTRIES)
    monkeypatch.setitem(ENTRIES, "captions", entry)  # type: ignore[arg-type]
    arguments = ("--from", "captions", "--valid-count", "2")
    refused(prepare(*arguments), capsys, tmp_path, "for research only", "--accept-terms captions")
    assert site.requests == []
    refused(prepare(*arguments, "--accept-terms", "caption"), capsys, tmp_path, "--accept-terms captions")
    assert prepare(*arguments, "--accept-terms", "captions") == 0
    assert "captions: not tried" in capsys.readouterr().out
    origin = PreparedData.open(tmp_path / "data").manifest["origin"]["train"]
    assert "terms accepted: for research only" in origin
    assert "https://captions.example" in origin
    assert terms_of_data(str(tmp_path)) == {}
    (tmp_path / "config.yaml").write_text(f"data:\n  path: {tmp_path / 'data'}\n", encoding="utf-8")
    terms = terms_of_data(str(tmp_path))
    config = TransformerConfig(source_vocab_size=9, target_vocab_size=9)
    card = make_card("a/b", config, [], 1, "", CardFacts(terms=terms))
    assert "- Terms of the training data captions: for research only." in card
    shutil.rmtree(tmp_path / "data")
    changed = Entry("captions", "https://captions.example", entry.splits, sums={"a.tsv": ("sha1", "0" * 40)})
    monkeypatch.setitem(ENTRIES, "captions", changed)  # type: ignore[arg-type]
    refused(prepare(*arguments), capsys, tmp_path, "states " + "0" * 40)


def test_texts_of_a_language_model(site: Site, manyheads: Run, tmp_path: Path) -> None:
    site.files["/wiki.zip"] = as_zip({f"w/wiki.{split}.tokens": text(EN) for split in ("train", "valid", "test")})
    site.files["/a.jsonl"] = text([json.dumps({"text": line}) for line in DE])
    command = ("prepare", "--task", "lm", "--output", tmp_path / "data", "--level", "words", "--replace")
    wiki = f"url:{site.url}/wiki.zip"
    assert manyheads(*command, "--from", wiki, f"url:{site.url}/a.jsonl", "--valid-from", wiki) == 0
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text("utf-8"))
    assert manifest["counts"]["train"]["lines"] == 20
    assert manifest["origin"]["valid"] == wiki
    assert manyheads(*command[:5], "--from", wiki, "--layout", "wikitext-2", "--replace") == 0
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text("utf-8"))
    assert manifest["origin"] == dict.fromkeys(("train", "valid", "test"), wiki)


def test_files_of_data_on_the_hub(prepare, tmp_path, monkeypatch, capsys):
    with running_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setenv("MANYHEADS_SOURCES", str(tmp_path / "cache"))
        rows = [json.dumps({"translation": {"en": en, "de": de}}) for en, de in zip(EN, DE, strict=True)]
        files = {"de-en/train-0.jsonl": text(rows[:8]), "de-en/validation-0.jsonl": text(rows[8:]), "load.py": b"1/0"}
        hub.files["main"] = {**files, "fr-en/train-0.jsonl": b"{}\n"}
        source = "hf:owner/name[de-en]"
        assert prepare("--from", source, "--valid-from", source, *LANGUAGES) == 0, capsys.readouterr().err
        assert counts(tmp_path / "data") == {"train": 8, "valid": 2}
        assert not any("load.py" in request for request in hub.requests if "resolve" in request)
        shutil.rmtree(tmp_path / "data")
        more = ("--valid-count", "2", *LANGUAGES)
        refused(prepare("--from", "hf:owner/name", *more), capsys, tmp_path, "several configs", "de-en")
        refused(prepare("--from", "hf:owner/name[it-en]", *more), capsys, tmp_path, "no config 'it-en'")
        card = """---
configs:
- config_name: deen
  data_files:
  - {split: train, path: "old/*.jsonl"}
  - split: validation
    path: [new/b.jsonl]
- {config_name: other, data_files: gone.jsonl}
---
# A data set
"""
        hub.files["main"] = {
            "README.md": card.encode(), "old/test.jsonl": text(rows[:8]), "new/a.jsonl": b"{}\n",
            "new/b.jsonl": text(rows[8:]),
        }  # fmt: skip
        deen = "hf:owner/name[deen]"
        refused(prepare("--from", "hf:owner/name", *more), capsys, tmp_path, "several configs: deen, other")
        refused(prepare("--from", "hf:owner/name[other]", *more), capsys, tmp_path, "its card names gone.jsonl")
        both = ("--from", deen, "--valid-from", deen, *LANGUAGES)
        refused(prepare(*both, "--test-from", deen), capsys, tmp_path, "for the test split")
        assert prepare(*both) == 0, capsys.readouterr().err
        assert counts(tmp_path / "data") == {"train": 8, "valid": 2}
        shutil.rmtree(tmp_path / "data")
        hub.files["main"] = {"load.py": b"1/0"}
        refused(prepare("--from", "hf:owner/name", *more), capsys, tmp_path, "no files of data", "not run")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    refused(prepare("--from", "hf:owner/name", *more), capsys, tmp_path, "cannot be fetched from the hub")


def test_sacrebleu_gives_test_sets_only(prepare, tmp_path, monkeypatch, capsys):
    from sacrebleu.dataset import DATASETS

    known: Any = DATASETS["wmt14"]
    for end, lines in (("src", EN), ("ref", DE)):
        (tmp_path / end).write_bytes(text(lines[8:]))
    monkeypatch.setattr(type(known), "process_to_text", lambda *_: None)
    monkeypatch.setattr(type(known), "get_source_file", lambda *_: str(tmp_path / "src"))
    monkeypatch.setattr(type(known), "get_reference_files", lambda *_: [str(tmp_path / "ref")])
    (tmp_path / "a.tsv").write_bytes(tsv(0, 8))
    arguments = ("--from", tmp_path / "a.tsv", "--valid-count", "2")
    assert prepare(*arguments, "--test-from", "sacrebleu:wmt14/en-de") == 0, capsys.readouterr().err
    assert counts(tmp_path / "data")["test"] == 2
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "ref").write_bytes(text(DE[7:9]))
    changed = prepare(*arguments, "--test-from", "sacrebleu:wmt14/en-de")
    refused(changed, capsys, tmp_path, "sacrebleu:wmt14/en-de/reference has changed", "--update")
    refused(prepare("--from", "sacrebleu:wmt14/en-de", "--valid-count", "2"), capsys, tmp_path, "is a test set")
    refused(prepare(*arguments, "--test-from", "sacrebleu:wmt41/en-de"), capsys, tmp_path, "Did you mean")
    refused(prepare(*arguments, "--test-from", "sacrebleu:wmt14/en-dd"), capsys, tmp_path, "direction 'en-dd'")

    def fail(*_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(type(known), "process_to_text", fail)
    refused(prepare(*arguments, "--test-from", "sacrebleu:wmt14/en-de"), capsys, tmp_path, "no network")


PROGRAM = """\
import pathlib, sys
given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
assert sys.argv[1] == "get", sys.argv
if "broken" in given["--train"]:
    sys.exit("no such data set")
parts = pathlib.Path(given["--out"], "train-parts")
parts.mkdir(parents=True)
for code, lines in (("deu", {de!r}), ("eng", {en!r})):
    (parts / f"{{given['--train']}}.{{code}}").write_text("".join(f"{{line}}\\n" for line in lines), encoding="utf-8")
"""


def test_opus_and_mtdata_are_a_program_of_their_own(prepare, tmp_path, monkeypatch, capsys):
    program = tmp_path / "mtdata.py"
    program.write_text(PROGRAM.format(en=EN, de=DE), encoding="utf-8")
    monkeypatch.setenv("MANYHEADS_MTDATA", shlex.join([sys.executable, str(program)]))
    monkeypatch.setenv("MANYHEADS_SOURCES", str(tmp_path / "cache"))
    arguments = ("--from", "opus:books-v1-deu-eng", "--valid-count", "2", *LANGUAGES)
    assert prepare(*arguments) == 0, capsys.readouterr().err
    assert (tmp_path / "data" / "valid.source.txt").read_bytes() == text(EN[8:])
    program.unlink()
    assert prepare(*arguments, "--replace") == 0  # from the cache
    shutil.rmtree(tmp_path / "data")
    refused(prepare("--from", "mtdata:a-b-1-deu-eng", *arguments[2:]), capsys, tmp_path, "mtdata ended with the code")
    program.write_text("raise EOFError('Ran out of input')", encoding="utf-8")
    refused(prepare("--from", "mtdata:a-b-1-deu-eng", *arguments[2:]), capsys, tmp_path, "mtdata.py index")
    turned = ("--source-lang", "fr", "--target-lang", "it", "--valid-count", "2")
    refused(prepare("--from", "opus:books-v1-deu-eng", *turned), capsys, tmp_path, "[deu-eng]")
    refused(prepare("--from", "opus:books", "--valid-count", "2"), capsys, tmp_path, "lang1-lang2")
    monkeypatch.setenv("MANYHEADS_MTDATA", '"uvx mtdata')
    refused(prepare("--from", "mtdata:a-b-1-deu-eng", *arguments[2:]), capsys, tmp_path, "which is no command")
    monkeypatch.setenv("MANYHEADS_MTDATA", " ")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(prepare("--from", "mtdata:a-b-1-deu-eng", *arguments[2:]), capsys, tmp_path, "install uv or pipx")


BAD = {
    "a name that is nearly known": (["multi30k-en-dee"], ["multi30k-en-de"]),
    "a kind that is nearly known": (["huf:owner/name"], ["is unknown", "hf:"]),
    "the LDC's": (["ptb"], ["licensed by the LDC", "catalog.ldc.upenn.edu"]),
    "plain http": (["url:http://example.org/a.tsv"], ["only https"]),
    "a file": (["url:file:///etc/passwd"], ["only https"]),
    "this machine": (["url:https://127.0.0.1/a.tsv"], ["private network or of this machine"]),
    "a private network": (["url:https://10.1.2.3/a.tsv"], ["private network"]),
    "this machine by its name": (["url:https://localhost/a.tsv"], ["private network"]),
    "version 6": (["url:https://[::1]/a.tsv"], ["private network"]),
    "version 4 in version 6": (["url:https://[64:ff9b::a00:1]/a.tsv"], ["private network"]),
    "version 4 in an address of 6to4": (["url:https://[2002:7f00:1::]/a.tsv"], ["private network"]),
    "many receivers": (["url:https://224.0.0.1/a.tsv"], ["private network"]),
    "a password": (["url:https://me:secret@example.org/a.tsv"], ["without a password"]),
    "no network": (["url:https://no-such-host.invalid/a.tsv"], ["cannot be fetched", "Check the network"]),
    "not there": (["url:{site}/missing.tsv"], ["404"]),
    "a redirect to another scheme": (["url:{site}/ftp"], ["redirects to another place", "only https"]),
    "a redirect to a private address": (["url:{site}/private"], ["redirects to another place", "private network"]),
    "a redirect to no address": (["url:{site}/bracket"], ["redirects to another place", "Invalid IPv6 URL"]),
    "a host with an empty part": (["url:https://a..example.org/a.tsv"], ["is not an address", "empty or too long"]),
    "a host with a long part": ([f"url:https://{'a' * 64}.org/a.tsv"], ["is not an address", "empty or too long"]),
    "a redirect to itself": (["url:{site}/loop"], ["more than 5 times"]),
    "too large": (["url:{site}/a.tsv", "--most-bytes", "100"], ["at most 100 bytes", "--most-bytes"]),
    "an archive that is a bomb": (["url:{site}/bomb.zip"], ["expands to more than"]),
    "an archive with a link": (["url:{site}/link.tar.gz"], ["a link or a device"]),
    "an archive that leads out": (["url:{site}/out.tar.gz"], ["outside of the folder"]),
    "an archive with a file in a file": (["url:{site}/inside.tar.gz"], ["has a.tsv/b.tsv twice"]),
    "an archive with a name that is not UTF-8": (["url:{site}/name.zip"], ["name.zip is not an intact archive"]),
    "bzip2 that is damaged": (["url:{site}/bzip2.zip"], ["bzip2.zip is not an intact archive"]),
    "lzma that is damaged": (["url:{site}/lzma.zip"], ["lzma.zip is not an intact archive"]),
    "an archive in an archive": (["url:{site}/nested.zip"], ["inner.zip", "unpack it, and give the folder"]),
    "an empty archive": (["url:{site}/empty.zip"], ["has no files of data for the train split"]),
    "an archive with a long name": (["url:{site}/long.zip"], ["long.zip has a file whose name is too long"]),
    "gzip in gzip": (["url:{site}/twice.tsv.gz"], ["is packed twice", "gzip -dc"]),
    "gzip in gzip, records": (["url:{site}/twice.jsonl.gz", *LANGUAGES], ["is packed twice", "gzip -dc"]),
    "an archive of three bytes": (["url:{site}/three.tar.gz"], ["three.tar.gz is not an intact archive"]),
    "an archive with an empty name": (["url:{site}/nameless.zip"], ["whose place is outside"]),
    "a damaged archive": (["url:{site}/damaged.zip"], ["not an intact archive"]),
    "a split that is not there": (["url:{site}/only-test.zip"], ["no train split"]),
    "a side that is missing": (["url:{site}/one-side.zip", *LANGUAGES], ["no file train.de beside it"]),
    "no language": (["url:{site}/one-side.zip"], ["--source-lang and --target-lang"]),
    "both ways": (["url:{site}/a.tsv", "--tsv", "x.tsv"], ["--tsv cannot be used with --from"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input(
    kind: str, site: Site, prepare: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(fetching, "SPARE_BYTES", 1000)
    site.files = {
        "/a.tsv": tsv(0, 10),
        "/bomb.zip": as_zip({"a.tsv": b"a\tb\n" * 100_000}),
        "/link.tar.gz": as_tar({"train.tsv": b""}, type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "/out.tar.gz": as_tar({"../../train.tsv": tsv(0, 3)}),
        "/inside.tar.gz": as_tar({"a.tsv": tsv(0, 3), "a.tsv/b.tsv": tsv(0, 3)}),
        "/name.zip": as_zip({"ä.tsv": tsv(0, 3)}).replace("ä".encode(), b"\xff\xff"),
        "/bzip2.zip": as_zip({"a.tsv": b"x" * 90}, zipfile.ZIP_BZIP2).replace(b"1AY&SY", b"1AX&SY"),
        "/lzma.zip": as_zip({"a.tsv": b"x" * 90}, zipfile.ZIP_LZMA).replace(b"\x05\0]\0", b"\x05\0\xff\xff"),
        "/nested.zip": as_zip({"inner.zip": as_zip(CORPUS)}),
        "/empty.zip": as_zip({}),
        "/long.zip": as_zip({"x" * 300: tsv(0, 3)}),
        **{f"/twice.{end}.gz": gzip.compress(gzip.compress(tsv(0, 9))) for end in ("tsv", "jsonl")},
        "/three.tar.gz": as_tar(CORPUS)[:3],
        "/nameless.zip": as_zip({"n.tsv": tsv(0, 3)}).replace(b"n.tsv", b"\0.tsv"),
        "/damaged.zip": as_zip(CORPUS)[:-30],
        "/only-test.zip": as_zip({"test.en": text(EN), "test.de": text(DE)}),
        "/one-side.zip": as_zip({"train.en": text(EN)}),
    }
    site.redirects = {"/ftp": "ftp://example.org/a", "/loop": "/loop", "/private": "https://192.168.0.1/a"}
    site.redirects["/bracket"] = "https://[::1"
    arguments, words = BAD[kind]
    given = [one.replace("{site}", site.url) for one in arguments]
    refused(prepare("--from", *given, "--valid-count", "2"), capsys, tmp_path, *words)
    cache = tmp_path / "cache"
    left = [path.name for path in cache.rglob("*") if path.is_dir() and path.name.endswith(".files")]
    assert left == [name for name in left if name.startswith(("only-test", "one-side", "nested", "empty"))]
    assert not list(cache.rglob("*.tmp-*"))


@pytest.mark.parametrize("task", [(), ("--task", "lm")])
def test_what_a_source_lacks_is_said_in_order(task, prepare, tmp_path, capsys):
    (tmp_path / "a.tsv").write_bytes(tsv(0, 10))
    refused(prepare(*task, "--from", "ptb"), capsys, tmp_path, "licensed by the LDC")
    refused(prepare(*task, "--from", tmp_path / "a.tsv"), capsys, tmp_path, "no validation data", "or --valid-from; or")
    held = "--valid-bytes" if task else "--valid-count"
    both = ("--from", tmp_path / "a.tsv", "--valid-from", tmp_path / "a.tsv", held, "5")
    refused(prepare(*task, *both), capsys, tmp_path, "leave it out where --valid-from is given")


def test_what_a_folder_of_pairs_has_beside_tables_is_named_and_a_pipe_is_refused(prepare, tmp_path, capsys):
    folder = tmp_path / "mixed"
    folder.mkdir()
    for name, content in (("train.tsv", tsv(0, 10)), ("train.en", text(EN)), ("train.de", text(DE))):
        (folder / name).write_bytes(content)
    assert prepare("--from", folder, "--valid-count", "2", *LANGUAGES) == 0
    assert "not read, because beside tables they are not looked at: train.de, train.en" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "data")
    os.mkfifo(folder / "train.2.tsv")
    refused(prepare("--from", folder, "--valid-count", "2"), capsys, tmp_path, "train.2.tsv is a pipe")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("", "cannot be read as JSON"), ("[]", "must hold one JSON object"),
        ('{"version": 2, "files": {}}', "version 2"),
        ('{"version": 1, "files": {"a": 3}}', "is damaged"),
    ],
)  # fmt: skip
def test_a_damaged_lock_has_a_remedy(content, word, prepare, tmp_path, capsys):
    (tmp_path / "sources.lock").write_text(content)
    (tmp_path / "a.tsv").write_bytes(tsv(0, 10))
    refused(prepare("--from", tmp_path / "a.tsv", "--valid-count", "2"), capsys, tmp_path, word, "; restore it, or")


def test_an_archive_on_the_disk_that_was_replaced_is_unpacked_again(prepare, tmp_path, capsys):
    archive = tmp_path / "a.zip"
    for end in (8, 10):
        archive.write_bytes(as_zip({"a.tsv": tsv(0, end)}))
        assert prepare("--from", archive, "--valid-count", "2", "--replace") == 0
        assert counts(tmp_path / "data") == {"train": end - 2, "valid": 2}
    shutil.rmtree(tmp_path / "data")
    shutil.rmtree(tmp_path / "a.zip.files")
    (tmp_path / "a.zip.files").mkdir()
    (tmp_path / "a.zip.files" / "notes.txt").write_text("mine")
    refused(prepare("--from", archive, "--valid-count", "2"), capsys, tmp_path, "holds something else")
    assert (tmp_path / "a.zip.files" / "notes.txt").read_text() == "mine"


def test_a_proxy_that_is_no_address(prepare, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MANYHEADS_SOURCES", str(tmp_path / "cache"))
    monkeypatch.setenv("https_proxy", "proxy:port")
    source = "url:https://example.org/a.tsv"
    refused(prepare("--from", source, "--valid-count", "2"), capsys, tmp_path, "https_proxy is no address")


def test_a_disk_that_is_too_small(site, prepare, tmp_path, monkeypatch, capsys):
    site.files["/a.tsv"] = tsv(0, 10)
    monkeypatch.setattr("manyheads.files.commit.free_bytes", lambda _: 100)
    refused(prepare("--from", f"url:{site.url}/a.tsv", "--valid-count", "2"), capsys, tmp_path, "free")
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_a_size_that_the_server_hides_is_limited_too(site, prepare, tmp_path, capsys):
    site.files["/a.tsv"], site.hides_length = tsv(0, 10), True
    arguments = ("--from", f"url:{site.url}/a.tsv", "--valid-count", "2")
    refused(prepare(*arguments, "--most-bytes", "100"), capsys, tmp_path, "more than 100 bytes")
    assert prepare(*arguments) == 0


def test_a_cache_that_was_changed_is_noticed(site, prepare, tmp_path, capsys):
    site.files["/a.tsv"] = tsv(0, 10)
    arguments = ("--from", f"url:{site.url}/a.tsv", "--valid-count", "2")
    assert prepare(*arguments) == 0
    [path] = (tmp_path / "cache").rglob("a.tsv")
    path.write_bytes(tsv(0, 4))
    shutil.rmtree(tmp_path / "data")
    refused(prepare(*arguments), capsys, tmp_path, "is damaged", str(path))


def test_a_shard_that_vanished(prepare: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "a.tsv").write_bytes(tsv(0, 8))
    (folder / "b.tsv").symlink_to(tmp_path / "gone.tsv")
    refused(prepare("--from", folder, "--valid-count", "2"), capsys, tmp_path, "b.tsv")


def test_entries_have_pages_and_no_sums_of_their_own() -> None:
    for name, entry in ENTRIES.items():
        assert entry.page.startswith("http"), name
        assert entry.splits or entry.instead, name
        for source in entry.splits.values():
            kind, _, rest = source.partition(":")
            assert kind in ("url", "hf"), name
            for url in rest.split(",") if kind == "url" else ():
                fetching.check_address(url)
