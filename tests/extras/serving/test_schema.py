"""What others rely on: the schema of the interface, and the files for deployment."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.testclient import TestClient

from manyheads.cli.command_line.parsing import parse
from manyheads.extras.serving.app import FILES
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


def test_all_references_of_the_schema_lead_somewhere(client: TestClient) -> None:
    text = client.get("/openapi.json").text
    names = json.loads(text)["components"]["schemas"]
    found = set(re.findall(r'"\$ref":\s*"([^"]+)"', text))
    assert found
    assert found <= {f"#/components/schemas/{name}" for name in names}


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


def compose() -> dict[str, Any]:
    """The services, as they are without variables of the environment but MODEL and KEYS."""
    text = (ROOT / "deploy/compose.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}", lambda one: one[2] or one[1], text)))


def unit() -> dict[str, str]:
    """The settings of the service of systemd."""
    lines = (ROOT / "deploy/manyheads.service").read_text(encoding="utf-8").split("\n")
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_compose_and_the_service_of_systemd_fit_the_program() -> None:
    services, networks = compose()["services"], compose()["networks"]
    assert {name for one in services.values() for name in one["networks"]} == set(networks), "podman-compose needs each"
    server = services["manyheads"]
    assert server["user"] == "10001:10001"
    assert server["read_only"] is True
    assert services["proxy"]["depends_on"] == {"manyheads": {"condition": "service_healthy"}}
    assert "manyheads:8000" in services["proxy"]["command"]
    assert "ports" not in server, "only the proxy is reached from outside"
    assert services["proxy"]["stop_grace_period"] == server["stop_grace_period"], "answers go through the proxy"
    of_systemd = unit()
    for arguments, seconds in (
        ([*server["entrypoint"], *server["command"]], int(server["stop_grace_period"].removesuffix("s"))),
        (of_systemd["ExecStart"].split(), int(of_systemd["TimeoutStopSec"])),
    ):
        program, name, *given = arguments
        assert (Path(program).name, name) == ("manyheads", "serve")
        options = parse(PAGE, given, "serve")
        assert options.port == 8000
        assert options.api_key_file
        assert options.glossaries
        assert options.settings().allowed_hosts
        assert seconds >= options.drain_delay_seconds + options.deadline_seconds


def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze")
    text = (ROOT / "deploy/manyheads.service").read_text(encoding="utf-8")
    for change, is_good in (("", True), ("Unknwon=1\n", False)):  # for which it ends with 0
        file = tmp_path / "manyheads.service"
        changed = text.replace("/opt/manyheads/bin/manyheads", sys.executable)
        file.write_text(changed.replace("[Service]\n", f"[Service]\n{change}"), encoding="utf-8")
        done = subprocess.run([program, "verify", file], capture_output=True, text=True, check=False)
        assert (done.returncode == 0 and not done.stderr) is is_good, done.stderr


def test_the_image_names_no_host_in_its_commands_and_has_a_health_check() -> None:
    text = (ROOT / "deploy/Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.split("\n") if line and not line.startswith("#")]
    assert not [line for line in lines if line.startswith("RUN") and "://" in line]
    assert {"ARG BASE", "ARG TORCH_INDEX"} <= {line.partition("=")[0] for line in lines}
    assert [line for line in lines if line.startswith("FROM")] == ["FROM ${BASE} AS build", "FROM ${BASE}"]
    [check] = [line for line in lines if line.startswith("HEALTHCHECK")]
    assert "http://127.0.0.1:8000/healthz" in json.loads(check[check.index("[") :])[2]


def test_the_metric_that_scales_is_there(client: TestClient) -> None:
    assert "\nmanyheads_num_requests_waiting " in client.get("/metrics").text


def test_a_server_gets_its_settings(settings: ServingSettings) -> None:
    from manyheads.extras.serving.app import build_app

    server = Server(build_app(settings), settings)
    assert server.config.h11_max_incomplete_event_size == 1 << 16
    assert server.config.timeout_graceful_shutdown == 65
