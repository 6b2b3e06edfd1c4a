"""Pages of other origins, names of hosts, and what clients ask without a key."""

from collections.abc import Iterator
from dataclasses import replace as changed
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from manyheads.errors import ConfigError
from manyheads.extras.serving.app import build_app
from manyheads.extras.serving.settings import ServingSettings

ORIGIN = "https://pages.example"
BODY = {"text": ""}


@pytest.fixture(scope="module")
def client(settings: ServingSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of a server with a key, and an origin as people write it."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("long-enough-1\n")
    keys.chmod(0o600)
    changes = {"api_key_file": str(keys), "allowed_origins": ("https://Pages.example/",)}
    hosts = ("TestServer", "Models.example:8000")
    with TestClient(build_app(changed(settings, **changes, allowed_hosts=hosts))) as running:
        yield running


def test_a_browser_may_ask_and_show_the_answer(client: TestClient) -> None:
    asked = {
        "origin": ORIGIN, "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }  # fmt: skip
    answer = client.options("/v1/translate", headers=asked)
    assert answer.status_code == 204
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    for headers, status in (({"authorization": "Bearer long-enough-1"}, 200), ({}, 401)):
        answer = client.post("/v1/translate", json=BODY, headers={"origin": ORIGIN, **headers})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_other_origins_may_not(client: TestClient) -> None:
    for origin in ("https://evil.example", "https://pages.example.evil.example", "null", ""):
        asked = {"origin": origin, "access-control-request-method": "POST"}
        answer = client.options("/v1/translate", headers=asked)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
    answer = client.options("/v1/translate", headers={"access-control-request-method": "POST"})
    assert answer.status_code == 401


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"allowed_origins": ("example.org",)}, "allowed_origins has 'example.org', which no browser sends"),
        ({"allowed_origins": (ORIGIN, "*")}, "allowed_origins has '\\*'"),
        ({"allowed_origins": ("https://example.org/page",)}, "without a path"),
        ({"allowed_hosts": ("https://models.example",)}, "allowed_hosts has 'https://models.example'; give the name"),
        ({"allowed_hosts": ("",)}, "allowed_hosts has ''"),
        ({"allowed_hosts": ("::1",)}, "such as models.example or"),
    ],
)
def test_names_that_permit_nobody_are_refused(given: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServingSettings(**given)  # type: ignore[arg-type]


def test_other_forms_of_names_are_taken() -> None:
    hosts = ("models.example:8000", "[::1]", "*")
    origins = ("HTTPS://Example.ORG/", "http://localhost:3000", "moz-extension://1f2e", "null")
    assert ServingSettings(allowed_hosts=hosts, allowed_origins=origins).allowed_hosts == hosts


def test_names_of_hosts_are_compared_as_dns_does(client: TestClient) -> None:
    for host in ("testserver", "TESTSERVER:80", "models.example", "models.example:9"):
        assert client.get("/languages", headers={"host": host}).status_code == 200
    assert client.get("/languages", headers={"host": "other.example"}).status_code == 421


def test_probes_may_name_any_host(client: TestClient) -> None:
    """Kubernetes sends the address of the pod. Everything else is closed to names that DNS gave to this server."""
    pod = {"host": "10.42.0.17:8000"}
    for path in ("/healthz", "/readyz", "/health"):
        assert client.get(path, headers=pod).status_code == client.head(path, headers=pod).status_code == 200
        assert client.post(path, headers=pod).status_code == 421
        assert client.get(path, headers={**pod, "origin": "http://evil.example"}).status_code == 403
    for path in ("/", "/metrics", "/v1/models", "/healthz/", "/healthz/../v1/models", "/static/page.js"):
        assert client.get(path, headers=pod).status_code == 421


def test_libretranslate_says_without_a_key_what_it_can(client: TestClient) -> None:
    """Mastodon asks for the languages without its key, and pages ask whether a key is needed."""
    assert client.get("/languages").json()[0] == {"code": "en", "name": "en", "targets": ["de"]}
    assert client.get("/frontend/settings").json()["keyRequired"] is True
    assert client.post("/translate", json={"q": "a", "source": "en", "target": "de"}).status_code == 403


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/health"])
def test_monitors_ask_with_head(client: TestClient, path: str) -> None:
    answer = client.head(path)
    assert answer.status_code == 200


def test_every_setting_of_the_server_is_read() -> None:
    """A setting that no code reads would be ignored without a word."""
    source = Path(build_app.__code__.co_filename).parent
    code = "\n".join(path.read_text() for path in source.rglob("*.py") if path.name != "settings.py")
    assert not [name for name in ServingSettings.__dataclass_fields__ if f"ettings.{name}" not in code
                and f"imits.{name}" not in code]  # fmt: skip
