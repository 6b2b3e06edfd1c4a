"""Builds the image on a base of Debian's own packages, runs it as deploy/ says, and asks it for a translation.

    python tests/clients/check_container.py MODEL [--runtime runc] [--base NAME] [--torch-index URL] [--keep]

For Debian, as root, with podman, its network plug-ins, iptables, runc and mmdebstrap installed, and podman-compose and
deepl of PyPI. It pulls nothing from a registry of images: the base is made by mmdebstrap, and the reverse proxy of
deploy/compose.yaml is Debian's package on it. That composition needs the ports 80 and 443 of this machine. The settings
of pip of this machine, and the folders that they name, hold in the build as well. Prints sizes, times and memory; exits
with 1 after a failure. Images, containers, volumes and networks lie in a folder of their own, which is deleted at the
end; with --keep it stays, so that the next run is fast.
"""

import argparse
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BASE, IMAGE, CONTAINER = "localhost/manyheads-check-base", "localhost/manyheads-check", "manyheads-check"
STORE = Path("/var/tmp/manyheads-check")  # noqa: S108
MOST_BYTES = 1_300_000_000
LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
"""Some hosts do not permit the runtime's own."""
READY_SECONDS, DRAIN_SECONDS = 300, 5
PACKAGES = "python3,python3-venv,ca-certificates"
PLUGINS = [Path("/usr/lib/podman/netavark"), Path("/usr/lib/podman/aardvark-dns")]
COMPOSITION = ROOT / "deploy/compose.yaml"
KEY = "key-of-the-check"
TOO_LARGE = """
import sys
import deepl
client = deepl.Translator(sys.argv[1], server_url="https://localhost", verify_ssl=sys.argv[2])
try:
    client.translate_document_upload(b"x" * (1 << 23), filename="a.md", source_lang="EN", target_lang="DE")
except deepl.DeepLException as error:
    print(error.http_status_code, error)
"""
USER = 10001


def set_up(runtime: str) -> None:
    """Let podman, also as podman-compose calls it, keep everything in plain folders of our own, which needs no support
    of the kernel.
    """
    STORE.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("CONTAINERS_STORAGE_CONF", f"""[storage]
driver = "vfs"
graphroot = "{STORE / 'images'}"
runroot = "{STORE / 'running'}"
"""),
        ("CONTAINERS_CONF", f"""[containers]
default_ulimits = {json.dumps([*LIMITS[1::2]])}
[engine]
runtime = "{runtime}"
[network]
network_backend = "netavark"
network_config_dir = "{STORE / 'networks'}"
"""),
    ):  # fmt: skip
        file = STORE / f"{name.lower()}.toml"
        file.write_text(text, encoding="utf-8")
        os.environ[name] = str(file)


def podman(*given: Any, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run podman."""
    return called(["podman", *given], check=check)


def called(command: list[Any], check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program. Raises: SystemExit: it failed; with the end of its output."""
    done = subprocess.run(
        list(map(str, command)), text=True, capture_output=True, check=False, env={**os.environ, **environment}
    )
    if check and done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {(done.stdout + done.stderr)[-3000:]}")
    return done


def build_base(release: str) -> None:
    """Make the base image of Debian's packages, unless it is there."""
    if podman("image", "exists", BASE, check=False).returncode == 0:
        return
    with tempfile.TemporaryDirectory() as name:
        tar = Path(name) / "base.tar"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", release, str(tar)]
        subprocess.run(command, check=True)
        podman("import", "--quiet", tar, BASE)


def pip_settings() -> list[str]:
    """Return options of `podman build` with which pip works as on this machine."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], text=True, capture_output=True, check=True
    ).stdout
    options, places = [], set(re.findall(r"(?:file://)?(/[^\s']+)", re.sub(r"https?://\S+", "", listed)))
    for place in sorted({place.removesuffix("/simple") for place in places}):  # an index names files beside it
        if Path(place).exists():
            options += ["--volume", f"{place}:{place}:ro"]
    values = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):  # which have the last word
        name, _, value = line.partition("=")
        values[name.partition(".")[2]] = value.strip("'\"").replace("\\n", " ")
    rows = [f"{name} = {value}" for name, value in values.items()]
    file = Path(tempfile.gettempdir()) / "manyheads-check-pip.conf"
    file.write_text("\n".join(["[global]", *rows, ""]), encoding="utf-8")
    return [*options, "--volume", f"{file}:/etc/pip.conf:ro"] if rows else []


def build(base: str, torch_index: str) -> int:
    """Build the image. Returns: its size in bytes."""
    arguments = ["--build-arg", f"BASE={base}", "--build-arg", f"TORCH_INDEX={torch_index}"]
    # With plain folders each layer is a copy of the whole, so only the last one is kept.
    podman("build", "--quiet", "--layers=false", "--format", "docker", "--network", "host",
           *LIMITS, *arguments,
           *pip_settings(), "-t", IMAGE, "-f", ROOT / "deploy/Containerfile", ROOT)  # fmt: skip
    [found] = json.loads(podman("image", "inspect", IMAGE).stdout)
    assert found.get("Healthcheck") or found["Config"].get("Healthcheck"), "the image has no HEALTHCHECK"
    return int(found["Size"])


@contextmanager
def running(model: Path | None, *given: str) -> Iterator[str]:
    """Run the image with a read-only root and few rights. Yields the address of the server."""
    podman("rm", "--force", CONTAINER, check=False)
    mount = ["--volume", f"{model}:/models/model:ro"] if model is not None else []
    podman("run", "--detach", "--name", CONTAINER, "--network", "host", "--read-only",
           "--tmpfs", "/tmp", "--user", USER, "--cap-drop", "all",  # noqa: S108
           "--security-opt", "no-new-privileges",
           *mount, IMAGE, *given)  # fmt: skip
    try:
        yield "http://127.0.0.1:8000"
    finally:
        podman("rm", "--force", CONTAINER, check=False)


def wait_until_ready(url: str) -> float:
    """Return the seconds until /readyz answers 200."""
    began = time.monotonic()
    while time.monotonic() - began < READY_SECONDS:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return time.monotonic() - began
        except (OSError, urllib.error.HTTPError):
            if inspected()["State"]["Status"] not in ("running", "created", "initialized"):
                break
            time.sleep(0.5)
    raise SystemExit(f"the server did not become ready: {podman('logs', CONTAINER, check=False).stderr[-3000:]}")


def inspected(name: str = CONTAINER) -> dict[str, Any]:
    [found] = json.loads(podman("inspect", name).stdout)
    return dict(found)


def memory_of(process: int) -> int:
    """Return the resident memory of a process in bytes."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) * 1024


def translate(url: str, text: str) -> str:
    request = urllib.request.Request(
        f"{url}/v1/translate", json.dumps({"text": text}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["translations"][0]["text"])


def check_server(model: Path) -> None:
    """Start the server, translate, and stop it."""
    with running(model, "--drain-delay", "1", "--deadline", str(DRAIN_SECONDS)) as url:
        print(f"ready after {wait_until_ready(url):.1f} s")
        text = translate(url, "I am very hungry.")
        assert text.strip(), "the translation is empty"
        state = inspected()
        process = int(state["State"]["Pid"])
        owner = Path(f"/proc/{process}").stat().st_uid
        assert owner == USER, f"the server runs as user {owner}"
        print(f"a translation: {text!r}; {memory_of(process) / 1e6:.0f} MB resident")
        healthy = podman("healthcheck", "run", CONTAINER, check=False)
        print(f"HEALTHCHECK: {'healthy' if healthy.returncode == 0 else healthy.stdout + healthy.stderr}")
        began = time.monotonic()
        podman("stop", "--time", "60", CONTAINER)
        seconds, code = time.monotonic() - began, inspected()["State"]["ExitCode"]
        print(f"stopped after {seconds:.1f} s, exit code {code}")
        assert code == 0, f"the server ended with {code}"
        assert seconds < 1 + DRAIN_SECONDS + 10, "the server did not stop within its drain time"


def check_without_model() -> None:
    """Without a model: one sentence, exit code 2."""
    with running(None):
        podman("wait", CONTAINER)
        code, told = inspected()["State"]["ExitCode"], podman("logs", CONTAINER).stderr.strip()
        print(f"without a model: exit code {code}: {told}")
        assert code == 2, f"without a model the exit code is {code}"
        assert "Traceback" not in told
        assert len(told.splitlines()) == 1, told


class Composition:
    """deploy/compose.yaml, and requests over TLS to its proxy. Args: program: podman-compose. model: a folder."""

    def __init__(self, program: str, model: Path) -> None:
        keys, self._authority = STORE / "keys.txt", STORE / "authority.pem"
        keys.write_text(f"{KEY}\n", encoding="utf-8")
        keys.chmod(0o600)
        os.chown(keys, USER, USER)
        self._program, self._settings = program, {"MODEL": str(model), "KEYS": str(keys), "SITE": "localhost"}
        self._trusted: ssl.SSLContext | None = None

    def call(self, *given: str) -> float:
        """Run a command of the program. Returns: the seconds that it took."""
        began = time.monotonic()
        called([self._program, "--file", COMPOSITION, *given], **self._settings)
        return time.monotonic() - began

    def container(self, service: str) -> str:
        """Return the name of the container of a service."""
        label = f"label=com.docker.compose.service={service}"
        return podman("ps", "--all", "--filter", label, "--format", "{{.Names}}").stdout.strip()

    def trust(self) -> bool:
        """Trust the authority that the proxy made for itself, once it is there; nothing else."""
        made = "/data/caddy/pki/authorities/local/root.crt"
        found = podman("exec", self.container("proxy"), "cat", made, check=False).stdout
        if found:
            self._trusted = ssl.create_default_context(cadata=found)
            self._authority.write_text(found, encoding="utf-8")
        return bool(found)

    def upload_too_large(self) -> str:
        """Return what DeepL's own client says about a document that is too large."""
        python = Path(self._program).parent / "python"
        return called([python, "-c", TOO_LARGE, KEY, self._authority]).stdout

    def ask(self, path: str, body: bytes | None = None, kind: str = "application/json", key: str = KEY) -> bytes:
        """Return the answer to a request. Raises: HTTPError: it is a refusal."""
        headers = {"Content-Type": kind, "Authorization": f"DeepL-Auth-Key {key}"}
        request = urllib.request.Request(f"https://localhost{path}", body, headers)
        with urllib.request.urlopen(request, timeout=90, context=self._trusted) as answer:
            return bytes(answer.read())

    def ask_json(self, path: str, **body: Any) -> Any:
        """Return what the answer in JSON holds."""
        return json.loads(self.ask(path, json.dumps(body).encode()))

    def upload(self, name: str, content: bytes) -> bytes:
        """Upload a document, wait, and return its translation."""
        head = '--mark\r\nContent-Disposition: form-data; name="{}"\r\n\r\n'
        form = head.format("target_lang").encode() + b"DE\r\n" + head.format(f'file"; filename="{name}').encode()
        made = json.loads(
            self.ask("/v2/document", form + content + b"\r\n--mark--\r\n", "multipart/form-data; boundary=mark")
        )
        place, key = f"/v2/document/{made['document_id']}", made["document_key"]
        wait(lambda: self.ask_json(place, document_key=key)["status"] not in ("queued", "translating"))
        return self.ask(f"{place}/result", json.dumps({"document_key": key}).encode())


def wait(is_there: Callable[[], bool]) -> float:
    """Return the seconds until a function returns True; a refusal or a connection that fails counts as False."""
    last: OSError | None = None
    began = time.monotonic()
    while time.monotonic() - began < READY_SECONDS:
        try:
            if is_there():
                return time.monotonic() - began
        except OSError as error:  # HTTPError, too
            last = error
        time.sleep(0.5)
    raise SystemExit(f"waited for {READY_SECONDS} s in vain; last: {last}")


def check_composition(program: str, base: str, model: Path) -> None:
    """The server behind the proxy of deploy/compose.yaml: started, asked over TLS, stopped in the middle of work."""
    file = STORE / "proxy"
    file.write_text(
        f"""FROM {base}
RUN apt-get update -qq && apt-get install --yes -qq --no-install-recommends caddy
ENV XDG_DATA_HOME=/data XDG_CONFIG_HOME=/config
""",
        encoding="utf-8",
    )
    podman("build", "--quiet", "--layers=false", "--network", "host", *LIMITS, "-t", "docker.io/library/caddy:2",
           "-f", file, STORE / "networks")  # fmt: skip
    podman("tag", IMAGE, "localhost/manyheads")
    composition = Composition(program, model)
    try:
        print(f"composition: up in {composition.call('up', '--detach'):.1f} s", flush=True)
        seconds = wait(composition.trust) + wait(lambda: bool(composition.ask("/readyz")))
        print(f"ready behind the proxy after {seconds:.1f} s")
        check_requests(composition)
        check_end(composition)
    except BaseException:
        for service in ("manyheads", "proxy"):
            print(podman("logs", composition.container(service), check=False).stderr[-2000:], file=sys.stderr)
        raise
    finally:
        composition.call("down", "--volumes")
    left = [podman(what, "ls", "--quiet").stdout.split() for what in ("container", "volume", "network")]
    assert left == [[], [], ["podman"]], f"the composition left {left}"


def check_requests(composition: Composition) -> None:
    """A translation, a document, a glossary, a wrong key, and a document that is too large."""
    told = composition.ask_json("/v1/translate", text="I am very hungry.")["translations"][0]["text"]
    document = composition.upload("page.html", b"<p>I am <b>very</b> hungry.</p>\n").decode()
    assert document.startswith("<p>"), document
    entries = {"source_lang": "en", "target_lang": "de", "entries": "hungry\tmuede", "entries_format": "tsv"}
    made = composition.ask_json("/v2/glossaries", name="check", **entries)
    asked = {"text": ["I am hungry."], "source_lang": "EN", "target_lang": "DE", "glossary_id": made["glossary_id"]}
    [found] = composition.ask_json("/v2/translate", **asked)["translations"]
    assert "muede" in found["text"], found
    try:
        composition.ask("/v2/usage", key="another-key-12345")
    except urllib.error.HTTPError as error:
        assert error.code == 403, error  # noqa: PT017
    else:
        raise AssertionError("a wrong key was accepted")
    refused = composition.upload_too_large()
    assert refused.startswith("413 "), refused
    assert "the limit of a document is 4,194,304" in refused, refused
    print(f"a document of 8 MiB, by DeepL's client: {refused.strip()}")
    print(f"over TLS: {told!r}, {document.strip()!r}, with a term {found['text']!r}")


def check_end(composition: Composition) -> None:
    """What the server has begun when it is told to stop is answered through the proxy."""
    texts = [f"This is sentence {number} of a text that takes a while, and you wait for it." for number in range(200)]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(composition.ask_json, "/v1/translate", text=texts, num_beams=8)
        wait(lambda: bool(re.search(rb"\nmanyheads_num_requests_running [1-9]", composition.ask("/metrics"))))
        seconds = composition.call("stop")
        assert len(asked.result()["translations"]) == len(texts)
    codes = [inspected(composition.container(service))["State"]["ExitCode"] for service in ("manyheads", "proxy")]
    print(f"stopped after {seconds:.1f} s with work, exit codes {codes}")
    assert codes == [0, 0], codes
    assert 5 < seconds < 75, "the composition did not stop within its time"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a translator")
    parser.add_argument("--runtime", default="runc", help="OCI runtime; some hosts run runc and not crun")
    parser.add_argument("--base", default=BASE, help="base image; the default is made by mmdebstrap")
    parser.add_argument("--compose", default="podman-compose", help="program that runs deploy/compose.yaml")
    parser.add_argument("--release", default="bookworm", help="of Debian, for the base")
    parser.add_argument("--torch-index", default="", help="where pip finds torch; empty: where it finds everything")
    parser.add_argument("--keep", action="store_true", help="keep the images")
    options = parser.parse_args()
    needed = ["podman", options.runtime, options.compose, "iptables", *(["mmdebstrap"] if options.base == BASE else [])]
    missing = [name for name in needed if shutil.which(name) is None]
    missing += [path.name for path in PLUGINS if not path.is_file()]
    if missing or os.geteuid() != 0:
        tools = (
            "apt-get install podman netavark aardvark-dns iptables runc mmdebstrap; pip install podman-compose deepl"
        )
        what = f"{', '.join(missing)}: {tools}" if missing else "root"
        print(f"check_container.py needs {what}.", file=sys.stderr)
        return 2
    if not (options.model / "config.json").is_file():
        print(f"{options.model} is no model folder; name one with config.json.", file=sys.stderr)
        return 2
    set_up(options.runtime)
    began = time.monotonic()
    try:
        if options.base == BASE:
            build_base(options.release)
            print(f"base: {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        size = build(options.base, options.torch_index)
        print(f"image: {time.monotonic() - began:.0f} s, {size:,} bytes", flush=True)
        assert size <= MOST_BYTES, f"the image has more than {MOST_BYTES:,} bytes"
        check_without_model()
        check_server(options.model.resolve())
        check_composition(options.compose, options.base, options.model.resolve())
    finally:
        if not options.keep:
            shutil.rmtree(STORE, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
