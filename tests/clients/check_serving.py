"""Real clients against a running server, in an environment of their own.

    python tests/clients/check_serving.py http://127.0.0.1:8000 --models FOLDER --ours PYTHON --node FOLDER

The server has the models of `serve_tiny_models.py`: en-de, which translates, and novel, a language model. PYTHON has
manyheads; the folder for Node has the packages of package.json. Prints a line per check; exits with 1 after a failure.
`make check-serving` does all of it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
TRANSLATOR, NOVEL = "en-de", "novel"
DOCUMENTS = [
    ("It is a truth", " universally acknowledged"), ("The old man", " opened the door and went out."),
    ("He said:", " \u201cNo\u201d \u2013 and nothing else, for a very long time indeed."), ("A", "b"),
]  # fmt: skip


def check_openai(url: str, options: argparse.Namespace) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert {model.id for model in client.models.list()} >= {TRANSLATOR, NOVEL}
    assert client.models.retrieve(NOVEL).owned_by == "manyheads"
    asked: dict[str, Any] = {"model": NOVEL, "prompt": "It is", "max_tokens": 20, "seed": 1, "logprobs": 2}
    whole = client.completions.create(**asked)
    parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    assert parts[-1].usage == whole.usage
    assert whole.choices[0].finish_reason == parts[-2].choices[0].finish_reason
    several = client.completions.create(model=NOVEL, prompt=["a", "b"], n=2, best_of=3, max_tokens=4)
    assert [one.index for one in several.choices] == [0, 1, 2, 3]
    scored = client.completions.create(
        model=NOVEL, prompt=[[65, 66, 67]], echo=True, max_tokens=1, logprobs=1, temperature=0
    )
    found = scored.choices[0].logprobs
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


def check_deepl_files(url: str, options: argparse.Namespace) -> None:
    """DeepL's client against a server of its own, with keys: glossaries of both versions, and documents."""
    with tempfile.TemporaryDirectory() as name, _keyed_server(options, Path(name)) as (address, key):
        check_glossaries(address, key)
        check_documents(address, key, Path(name))


def check_glossaries(address: str, key: str) -> None:
    """The calls of version 2, and where the client has them of version 3."""
    import deepl

    client = deepl.Translator(key, server_url=address)
    [pair] = client.get_glossary_languages()
    assert (pair.source_lang, pair.target_lang) == ("en", "de")
    made = client.create_glossary("food", "EN", "DE", {"hungry": "Bahnhof", "r\u00e9sum\u00e9": "\u00dcber"})
    assert (made.ready, made.entry_count, made.target_lang) == (True, 2, "DE")
    assert client.get_glossary(made.glossary_id).creation_time == made.creation_time
    assert client.get_glossary_entries(made)["r\u00e9sum\u00e9"] == "\u00dcber"
    asked: dict[str, Any] = {"source_lang": "EN", "target_lang": "DE"}
    assert "Bahnhof" in client.translate_text("I am hungry.", glossary=made, **asked).text
    assert "Bahnhof" in client.translate_text_with_glossary(["I am hungry."], made)[0].text
    table = client.create_glossary_from_csv("table", "EN", "DE", "station,Haus,en,de\n")
    assert [one.name for one in client.list_glossaries()] == ["food", "table"]
    client.delete_glossary(table)
    try:
        client.get_glossary(table.glossary_id)
    except deepl.GlossaryNotFoundException:
        pass
    else:
        raise AssertionError("a deleted glossary is there")
    if not hasattr(deepl.api_data, "MultilingualGlossaryDictionaryEntries"):  # an older version
        return
    client = deepl.DeepLClient(key, server_url=address)

    def entries(**terms: str) -> Any:
        return deepl.api_data.MultilingualGlossaryDictionaryEntries("EN", "DE", terms)

    several = client.create_multilingual_glossary("several", [entries(hungry="Haus")])
    several = client.update_multilingual_glossary_dictionary(several, entries(station="Hund"))
    assert several.dictionaries[0].entry_count == 2
    assert client.update_multilingual_glossary_name(several, "renamed").name == "renamed"
    assert client.replace_multilingual_glossary_dictionary(several, entries(hungry="Bahnhof")).entry_count == 1
    [found] = client.get_multilingual_glossary_entries(several, "EN", "DE").dictionaries
    assert found.entries == "hungry\tBahnhof"
    assert client.get_multilingual_glossary(several.glossary_id).name == "renamed"
    assert len(client.list_multilingual_glossaries()) == 2
    assert "Bahnhof" in client.translate_text("I am hungry.", glossary=several, **asked).text
    client.delete_multilingual_glossary_dictionary(several, source_lang="EN", target_lang="DE")
    client.delete_multilingual_glossary(several)


def check_documents(address: str, key: str, folder: Path) -> None:
    """The calls for documents, with a glossary, a format that is not read, and a second download."""
    import deepl

    client = deepl.Translator(key, server_url=address)
    source, target = folder / "caf\u00e9.html", folder / "out.html"
    source.write_text("<p>I am <b>hungry</b>.</p>\n", "utf-8")
    glossary = client.list_glossaries()[0]
    asked: dict[str, Any] = {"source_lang": "EN", "target_lang": "DE"}
    status = client.translate_document_from_filepath(source, target, glossary=glossary, **asked)
    assert (status.done, status.billed_characters) == (True, 27)
    assert "Bahnhof" in target.read_text("utf-8")
    handle = client.translate_document_upload("# I am hungry", filename="a.md", **asked)
    assert client.translate_document_wait_until_done(handle).ok
    assert client.translate_document_download(handle).content.startswith(b"# ")
    assert client.translate_document_get_status(handle).status.value == "downloaded"
    for wrong in (
        lambda: client.translate_document_download(handle),
        lambda: client.translate_document_upload(b"PK", filename="a.docx", **asked),
        lambda: client.translate_document_upload(b"x" * (1 << 23), filename="a.md", **asked),
    ):
        try:
            wrong()
        except deepl.DeepLException as error:
            assert error.http_status_code in (404, 413, 415), error  # noqa: PT017
        else:
            raise AssertionError("it was accepted")


@contextmanager
def _keyed_server(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the address of a server with keys and glossaries, and a key."""
    key, keys = "own-key-12345", folder / "keys"
    keys.write_text(f"{key}\n", "utf-8")
    keys.chmod(0o600)
    command = [
        options.ours, "-m", "manyheads", "serve", options.models / TRANSLATOR, "--port", "0", "--quiet", "--device",
        "cpu", "--source-lang", "en", "--target-lang", "de", "--api-key-file", keys, "--glossaries", folder / "kept",
    ]  # fmt: skip
    with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True) as running:
        line = running.stderr.readline().strip()
        try:
            assert "http" in line, line
            yield line.rpartition(" ")[2], key
        finally:
            running.terminate()


def check_libretranslate(url: str, options: argparse.Namespace) -> None:
    from libretranslatepy import LibreTranslateAPI

    api = LibreTranslateAPI(f"{url}/")
    assert isinstance(api.translate("I am hungry.", "en", "de"), str)
    assert {language["code"] for language in api.languages()} == {"en", "de"}
    assert api.detect("Hello")[0]["language"] == "en"


def check_mastodon(url: str, options: argparse.Namespace) -> None:
    """The shape of its requests: several texts in HTML, the language unknown."""
    texts = ['<p>I am <b>hungry</b>.</p><p>Where is <a href="https://a.example/?b=1&amp;c=2">the station</a>?</p>', ""]
    body = {"q": texts, "source": "auto", "target": "de", "format": "html", "api_key": ""}
    request = urllib.request.Request(
        f"{url}/translate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        found = json.load(answer)
    first, second = found["translatedText"]
    for tag in ("<p>", "</p>", "<b>", "</b>", '<a href="https://a.example/?b=1&amp;c=2">', "</a>"):
        assert first.count(tag) == texts[0].count(tag), first
    assert first != texts[0]
    assert second == ""
    assert [one["language"] for one in found["detectedLanguage"]] == ["en", "en"]


def check_curl(url: str, options: argparse.Namespace) -> None:
    """`curl -N`: a stream arrives piece by piece, and ends where it should."""
    program = shutil.which("curl")
    assert program is not None, "curl is not installed"
    body = json.dumps({"model": NOVEL, "prompt": "It is", "max_tokens": 50, "stream": True})
    command = [program, "-sSN", f"{url}/v1/completions", "-H", "content-type: application/json", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        lines = [line for line in running.stdout if line.strip()]
    assert running.returncode == 0
    assert lines.pop() == "data: [DONE]\n"
    assert len(lines) == 50
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines)


def check_prometheus(url: str, options: argparse.Namespace) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"{url}/metrics") as answer:
        families = {one.name: one for one in text_string_to_metric_families(answer.read().decode())}
    assert families["manyheads_num_requests_waiting"].type == "gauge"
    ended = families["manyheads_request_success"]
    assert ended.type == "counter"
    assert sum(one.value for one in ended.samples if one.labels["finished_reason"] == "completed") > 10
    for family in families.values():
        assert family.name.startswith("manyheads_")
        assert family.documentation
        if family.type == "histogram":
            counts = [one.value for one in family.samples if one.name.endswith("_bucket")]
            assert counts == sorted(counts)
            assert counts[-1] == next(one.value for one in family.samples if one.name.endswith("_count"))


def check_lm_eval(url: str, options: argparse.Namespace) -> None:
    """Log-likelihoods of lm-evaluation-harness, with a task of a local file, are those of `manyheads score`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [json.dumps({"context": context, "continuation": rest}) for context, rest in DOCUMENTS]
        (folder / "documents.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        (folder / "ours.yaml").write_text(
            f"""task: ours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "documents.jsonl"}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{continuation}}}}"
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""",
            "utf-8",
        )
        model = f"base_url={url}/v1/completions,model={NOVEL},tokenizer_backend=remote,max_length=512,num_concurrent=2"
        command = [
            BIN / "lm_eval", "--model", "local-completions", "--model_args", model, "--tasks", "ours",
            "--include_path", folder, "--output_path", folder / "found", "--log_samples", "--batch_size", "1",
        ]  # fmt: skip
        environment = {**os.environ, "HF_HOME": name, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
        _run(command, environment)
        [samples] = (folder / "found").rglob("samples_ours_*.jsonl")
        found = {}
        for line in samples.read_text("utf-8").splitlines():
            sample = json.loads(line)
            found[sample["doc_id"]] = float(sample["resps"][0][0][0])
        text = folder / "texts"
        text.write_text("".join(f"{context}{rest}\n" for context, rest in DOCUMENTS), "utf-8")
        scored = _run([options.ours, "-m", "manyheads", "score", options.models / NOVEL, "--text", text, "--tokens"])
    for number, line in enumerate(scored.splitlines()):
        context, rest = (part.encode() for part in DOCUMENTS[number])  # a token is a byte
        expected = sum(json.loads(line)["token_log_probs"][len(context) : len(context) + len(rest)])
        assert abs(found[number] - expected) < 1e-4, (number, found[number], expected)
    assert len(found) == len(DOCUMENTS)


def check_schemathesis(url: str, options: argparse.Namespace) -> None:
    """All operations, with bodies that fit the schema and bodies that do not."""
    command = [
        BIN / "schemathesis", "run", f"{url}/openapi.json", "--max-examples", str(options.examples),
        "--phases", "examples,coverage,fuzzing", "--seed", "1", "--request-timeout", "30", "--no-color",
        "--exclude-checks", "positive_data_acceptance,negative_data_rejection", "--suppress-health-check", "all",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as name:  # it leaves files in its folder
        _run(command, folder=Path(name))


def check_node(url: str, options: argparse.Namespace) -> None:
    """The client openai in TypeScript: compiled in strict form, then run."""
    node = shutil.which("node")
    assert node is not None, "node is not installed"
    source = options.node / "check_openai.ts"
    shutil.copy(HERE / "check_openai.ts", source)
    flags = ["--strict", "--module", "nodenext", "--target", "es2022", "--types", "node", "--skipLibCheck"]
    _run([options.node / "node_modules/.bin/tsc", *flags, source.name], folder=options.node)
    _run([node, source.with_suffix(".js"), url, NOVEL])


def check_page(url: str, options: argparse.Namespace) -> None:
    """See check_page.py."""
    axe = options.node / "node_modules/axe-core/axe.min.js"
    pictures = ["--pictures", options.pictures] if options.pictures else []
    _run([sys.executable, HERE / "check_page.py", url, "--axe", axe, *pictures])


def check_kubernetes(url: str, options: argparse.Namespace) -> None:
    """The manifests fit the schemas of Kubernetes, strictly: no unknown fields."""
    _run([BIN / "kubernetes-validate", "--strict", HERE.parents[1] / "deploy/kubernetes.yaml"])


def _run(command: list[Any], environment: dict[str, str] | None = None, folder: Path | None = None) -> str:
    """Return what a program prints.

    Raises: AssertionError: it failed; with the end of its output.
    """
    done = subprocess.run(list(map(str, command)), env=environment, cwd=folder, text=True, capture_output=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


CHECKS: dict[str, Callable[[str, argparse.Namespace], None]] = {
    "openai": check_openai, "node": check_node, "deepl": check_deepl, "deepl-files": check_deepl_files,
    "libretranslate": check_libretranslate,
    "mastodon": check_mastodon, "curl": check_curl, "lm-eval": check_lm_eval, "schemathesis": check_schemathesis,
    "page": check_page, "kubernetes": check_kubernetes, "prometheus": check_prometheus,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--models", type=Path, required=True, help="folder of the models en-de and novel")
    parser.add_argument("--ours", required=True, help="a Python with manyheads")
    parser.add_argument(
        "--node", type=lambda text: Path(text).resolve(), required=True, help="folder with node_modules"
    )
    parser.add_argument("--examples", type=int, default=30, help="of schemathesis, for each operation")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the page")
    parser.add_argument("--only", default=",".join(CHECKS), help=f"some of {','.join(CHECKS)}")
    options = parser.parse_args()
    failed = 0
    for name in options.only.split(","):
        try:
            CHECKS[name](options.url, options)
            print(f"{name}: good", flush=True)
        except Exception as error:
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if not str(error):
                traceback.print_exc()
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
