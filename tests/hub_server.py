"""A small server on loopback that speaks the endpoints of the Hugging Face hub which uploads and downloads use."""

import hashlib
import json
import re
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

__all__ = ["FakeHub", "running_hub"]


class FakeHub:
    """What was sent. files: of each revision, by name. requests: method and path of each."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.large: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.token = "hf_right"
        self.url = ""

    def commit(self, revision: str) -> str:
        """Return the commit of a revision, which may be one itself."""
        is_commit = any(self.commit(one) == revision for one in self.files) if len(revision) == 40 else False
        return revision if is_commit else hashlib.sha1(revision.encode()).hexdigest()

    def files_of(self, revision: str) -> dict[str, bytes] | None:
        """Return the files of a branch or a commit; None: there is none."""
        return next((files for name, files in self.files.items() if revision in (name, self.commit(name))), None)


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    """Run a hub until the context ends."""
    hub = FakeHub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        body = self._body()
        self.state.requests.append(f"POST {self.path}")
        if self.headers.get("Authorization") != f"Bearer {self.state.token}":
            self._send({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/validate-yaml":
            self._send({"errors": [], "warnings": []})
        elif self.path == "/api/repos/create":
            self.state.created.append(json.loads(body))
            self._send({"url": f"{self.state.url}/owner/name"})
        elif found := re.fullmatch(r"/api/models/owner/name/branch/([^/]+)", self.path):
            self.state.files.setdefault(found[1], {})
            self._send({})
        elif re.fullmatch(r"/api/models/owner/name/preupload/[^/]+", self.path):
            modes = [
                {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                 "shouldIgnore": False, "oid": None}
                for one in json.loads(body)["files"]
            ]  # fmt: skip
            self._send({"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.state.url}/upload/{one['oid']}", "header": {}}}}
                for one in json.loads(body)["objects"]
            ]
            self._send({"transfer": "basic", "objects": objects}, content="application/vnd.git-lfs+json")
        elif found := re.fullmatch(r"/api/models/owner/name/commit/([^/]+)", self.path):
            self._commit(found[1], [json.loads(line) for line in body.splitlines() if line.strip()])
        else:
            self._send({"error": "no such place"}, 404)

    def do_PUT(self) -> None:
        self.state.requests.append(f"PUT {self.path}")
        self.state.large[self.path.rpartition("/")[2]] = self._body()
        self._send({})

    def do_GET(self) -> None:
        self.state.requests.append(f"{self.command} {self.path}")
        if found := re.match(r"/api/(?:models|datasets)/owner/name(?:/(?:revision|tree)/([^/?]+))?", self.path):
            revision = found[1] or "main"
            files = self.state.files_of(revision)
            if files is None:
                self._send({"error": "Revision Not Found"}, 404, extra={"X-Error-Code": "RevisionNotFound"})
            elif "/tree/" in self.path:
                self._send(
                    [{"type": "file", "path": name, "size": len(one), "oid": "0"} for name, one in files.items()]
                )
            else:
                siblings = [{"rfilename": name} for name in files]
                self._send({"id": "owner/name", "sha": self.state.commit(revision), "siblings": siblings})
        elif found := re.fullmatch(r"(?:/datasets)?/owner/name/resolve/([^/]+)/(.+)", self.path):
            content = (self.state.files_of(found[1]) or {})[found[2]]
            commit = self.state.commit(found[1])
            self._send(content, extra={"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'})
        else:
            self._send({"error": "no such place"}, 404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _commit(self, revision: str, lines: list[dict[str, Any]]) -> None:
        files = self.state.files.setdefault(revision, {})
        for line in lines:
            if line["key"] == "file":
                files[line["value"]["path"]] = b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.state.large[line["value"]["oid"]]
        commit = self.state.commit(revision)
        self._send({"success": True, "commitOid": commit, "commitUrl": f"{self.state.url}/owner/name/commit/{commit}"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(
        self, value: Any, status: int = 200, *, content: str = "application/json", extra: dict[str, str] | None = None
    ) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": content, "Content-Length": str(len(body)), **(extra or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
