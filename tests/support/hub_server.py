"""A hub on loopback for huggingface_hub's own client: folders ``ORG/NAME`` served by the paths of the Hub's HTTP API.

Only what reading asks for: whether a model is there, the list of its files, and ranges of them.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = hashlib.sha1(b"the only commit").hexdigest()

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/[^/]+)?")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@contextmanager
def running_hub(root: Path) -> Iterator[str]:
    """The URL of a hub that serves the models below ``root``."""

    class Handler(_Handler):
        folder = root

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        api, file = _API.fullmatch(path), _RESOLVE.fullmatch(path)
        if api is not None and (self.folder / api[1]).is_dir():
            self._tell(self._listing(api[1]) if api[2] == "tree" else self._model(api[1]))
        elif file is not None and (self.folder / file[1] / file[2]).is_file():
            self._send(self.folder / file[1] / file[2])
        else:
            self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound" if file else "RepoNotFound"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        api = _API.fullmatch(path)
        assert api is not None and api[2] == "paths-info", path
        self._tell([each for each in self._listing(api[1]) if each["path"] in asked["paths"]])

    def _model(self, name: str) -> dict[str, object]:
        return {"id": name, "modelId": name, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "likes": 0}

    def _listing(self, name: str) -> list[dict[str, object]]:
        files = [each for each in sorted((self.folder / name).rglob("*")) if each.is_file()]
        return [
            {
                "type": "file",
                "path": each.relative_to(self.folder / name).as_posix(),
                "size": each.stat().st_size,
                "oid": hashlib.sha1(each.name.encode()).hexdigest(),
            }
            for each in files
        ]

    def _send(self, file: Path) -> None:
        data = file.read_bytes()
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        headers = {"ETag": '"1"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if wanted is None:
            self._answer(200, data, headers)
            return
        start, stop = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self._answer(206, data[start:stop], headers)

    def _tell(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
