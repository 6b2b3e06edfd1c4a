"""An option of search is one field: a copy of the package gets it, and it is everywhere an option is."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import manyheads

FIELD = """
    sparkle: int = setting(
        0, "How much the output sparkles.", allowed=between(0, 9), http=("native", "openai"), aliases=("--shine",)
    )
"""
BEFORE = "    min_new_tokens: int = setting(\n"

SCRIPT = """
import contextlib, io, json, sys
from dataclasses import asdict, replace
from pathlib import Path
from starlette.testclient import TestClient
from manyheads import Generator, Translator
from manyheads.models.pretrained import save_pretrained
from manyheads.catalogue import ARCHITECTURES, build_model
from manyheads.cli.main import main
from manyheads.decoding.settings import DecodingSettings
from manyheads.errors import ConfigError, RequestError
from manyheads.extras.exports import ExportOptions
from manyheads.extras.exports.engine import export_model
from manyheads.extras.serving.app import build_app
from manyheads.extras.serving.settings import ServingSettings
from manyheads.tasks.report import search_line
from manyheads.text.vocabulary import ByteVocabulary
from manyheads.text.settings import TokenizerSettings
from manyheads.text.tokenizer import Tokenizer

found = {}

def shown(*arguments):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), contextlib.suppress(SystemExit):
        main(list(arguments))
    return " ".join(text.getvalue().split())

def refused(call):
    try:
        call()
    except (ConfigError, RequestError) as error:
        return str(error)

tokenizer = Tokenizer.train(["a b c", "d e f"], TokenizerSettings(kind="word"))
size = tokenizer.vocab_size
preset = replace(ARCHITECTURES["transformer"].presets["debug"], positions="sinusoidal_halves")
model = build_model(replace(preset, source_vocab_size=size, target_vocab_size=size))
save_pretrained(model, "translator", tokenizer=tokenizer, generation=DecodingSettings(max_new_tokens=4))
save_pretrained(model, "sparkling", tokenizer=tokenizer, generation=DecodingSettings(max_new_tokens=4, sparkle=2))
words = ByteVocabulary()
novel = build_model(replace(ARCHITECTURES["transformer-xl"].presets["debug"], vocab_size=words.vocab_size))
save_pretrained(novel, "novel", tokenizer=words)

found["help"] = [shown(command, "--help") for command in ("translate", "generate", "evaluate", "train")]
found["command"] = [shown("generate", "novel", "a", "--sparkle", "10"),
                    shown("translate", "translator", "--shine", "x")]
translator = Translator.from_pretrained("translator", "cpu")
found["python"] = [translator.options(sparkle=3).sparkle, translator.translate("a", sparkle=3) is not None]
found["refused"] = refused(lambda: translator.translate("a", sparkle=10))
found["protocol"] = search_line({"decoding": asdict(translator.options(sparkle=3))})

limits = ServingSettings(models=("translator", "novel"), source_lang="en", target_lang="de", device="cpu",
                         allowed_hosts=("testserver",))
with TestClient(build_app(limits)) as client:
    schema = client.get("/openapi.json").json()["components"]["schemas"]
    found["schema"] = sorted(name for name, one in schema.items() if "sparkle" in one.get("properties", ()))
    bodies = {"/v1/translate": {"text": "a"}, "/v1/generate": {"prompt": "a", "max_new_tokens": 2},
              "/v1/completions": {"prompt": "a", "max_tokens": 2}}
    found["http"] = [[client.post(path, json=body | {"sparkle": value}).status_code for value in (9, 10)]
                     for path, body in bodies.items()]

found["export"] = refused(lambda: export_model(Path("sparkling"), Path("out"), ExportOptions(to="transformers")))
if sys.argv[1] == "engine":
    chosen = Translator.from_pretrained("translator", "cpu", engine="ctranslate2")
    options = {"num_beams": 1, "sparkle": 3}
    found["engine"] = refused(lambda: chosen.translate("a", **options))
    chosen = Translator.from_pretrained("translator", "cpu", engine="auto")
    found["auto"] = chosen.search.choose_engine(chosen.options(**options))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("option")
    package = Path(manyheads.__file__).parent
    shutil.copytree(package, folder / "manyheads", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "manyheads/decoding/settings.py"
    text = path.read_text("utf-8")
    assert text.count(BEFORE) == 1
    path.write_text(text.replace(BEFORE, FIELD.lstrip("\n") + BEFORE), "utf-8")
    pytest.importorskip("fastapi", reason="the server's packages are not installed")
    try:
        import ctranslate2  # noqa: F401

        runs = "engine"
    except ImportError:
        runs = "no engine"
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "MANYHEADS_TYPECHECK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, runs], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_commands_have_it(found: dict[str, Any]) -> None:
    translate, generate, evaluate, train = found["help"]
    for page in (translate, generate, evaluate):
        assert "--sparkle, --shine N How much the output sparkles. [default: the model's]" in page
    assert "--decoding.sparkle INT How much the output sparkles. [0]" in train
    assert "sparkle is 10; it must be from 0 to 9" in found["command"][0]
    assert "--sparkle" in found["command"][1]


def test_python_has_it(found: dict[str, Any]) -> None:
    assert found["python"] == [3, True]
    assert "sparkle is 10; it must be from 0 to 9" in found["refused"]


def test_requests_and_their_schema_have_it(found: dict[str, Any]) -> None:
    assert found["schema"] == ["CompletionBody", "GenerateBody", "TranslateBody"]
    assert [first for first, _ in found["http"]] == [200, 200, 200]
    assert all(second in (400, 422) for _, second in found["http"])


def test_the_protocol_tells_it(found: dict[str, Any]) -> None:
    assert ", sparkle 3, " in found["protocol"]


def test_an_export_refuses_it(found: dict[str, Any]) -> None:
    assert "sparkle 2" in found["export"]


def test_the_other_engine_refuses_it(found: dict[str, Any]) -> None:
    if "engine" not in found:
        pytest.skip("CTranslate2 is not installed")
    assert "cannot search with sparkle 3" in found["engine"]
    assert found["auto"] == "engine torch: ctranslate2 cannot search with sparkle 3"
