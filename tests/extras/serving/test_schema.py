"""What others rely on: the schema of the interface, and the files for deployment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from starlette.testclient import TestClient

from manyheads.cli.command_line.parsing import parse
from manyheads.extras.serving.api.operations import FILES
from manyheads.extras.serving.command import PAGE
from manyheads.extras.serving.server import Server
from manyheads.extras.serving.settings import ServingSettings

ROOT = Path(__file__).resolve().parents[3]
SNAPSHOT = Path(__file__).with_name("openapi.json")


def test_the_schema_is_as_recorded(client: TestClient) -> None:
    """After an intended change: delete the file, run this test, and look at the difference."""
    found = client.get("/openapi.json").json()
    del found["info"]["version"]
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    if not SNAPSHOT.exists():
        SNAPSHOT.write_text(text, encoding="utf-8")
    assert text == SNAPSHOT.read_text(encoding="utf-8")


def test_files_of_the_page_are_a_fixed_list(client: TestClient) -> None:
    known = [client.get(path).content for path in FILES]
    for path, (_, kind) in FILES.items():
        answer = client.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
        assert client.get(path, headers={"if-none-match": answer.headers["etag"]}).status_code == 304
        assert "script-src 'self'" in answer.headers["content-security-policy"]
    tricks = [
        f"/static/{dots}{name}"
        for dots in ("", "../", "..%2f", "%2e%2e/", "..\\", "....//", "//", "%00", "./", "/etc/", "..%252f", "~/")
        for name in ("app.py", "../app.py", "../../pyproject.toml", "etc/passwd", "app.js%00", "app.js/", "", "APP.JS")
    ]
    for path in tricks:
        answer = client.get(path)
        assert answer.status_code == 404 or answer.content in known, path


def test_the_page_needs_nothing_from_other_hosts() -> None:
    folder = ROOT / "src/manyheads/extras/serving/page"
    for path in folder.iterdir():
        text = path.read_text(encoding="utf-8")
        assert "innerHTML" not in text
        assert "style=" not in text
        assert not [line for line in text.split("\n") if "src=" in line and '"/static/' not in line]
        assert "https://" not in text


def manifests() -> dict[str, Any]:
    with (ROOT / "deploy/kubernetes.yaml").open(encoding="utf-8") as file:
        return {one["kind"]: one for one in yaml.safe_load_all(file)}


def test_the_manifests_fit_together_and_the_program() -> None:
    found = manifests()
    assert set(found) == {"Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"}
    pod = found["Deployment"]["spec"]["template"]
    [container] = pod["spec"]["containers"]
    lines = (ROOT / "deploy/Containerfile").read_text(encoding="utf-8").split("\n")
    entry = json.loads(next(line for line in lines if line.startswith("ENTRYPOINT")).removeprefix("ENTRYPOINT "))
    for arguments in ([], container["args"]):
        given = [*entry[2:], *arguments]
        options = parse(PAGE, given, "serve")
        assert options.no_api_key
    assert pod["spec"]["terminationGracePeriodSeconds"] >= options.drain_delay_seconds + options.deadline_seconds
    assert found["Service"]["spec"]["selector"] == pod["metadata"]["labels"]
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    [metric] = found["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "manyheads_num_requests_waiting"
    assert container["ports"][0]["containerPort"] == 8000


def test_the_metric_that_scales_is_there(client: TestClient) -> None:
    assert "\nmanyheads_num_requests_waiting " in client.get("/metrics").text


def test_a_server_gets_its_settings(settings: ServingSettings) -> None:
    from manyheads.extras.serving.app import build_app

    server = Server(build_app(settings), settings)
    assert server.config.h11_max_incomplete_event_size == 1 << 16
    assert server.config.timeout_graceful_shutdown == 65
