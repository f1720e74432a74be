"""A hub on loopback for huggingface_hub's own client: repositories with commits, and buckets, by the Hub's HTTP API.

It has what reading by range and one commit at a time ask for; large files come by the LFS protocol. A repository is
made from the folder ``ORG/NAME`` when it is first asked for, a bucket is the folder ``buckets/ORG/NAME``.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

Files = Mapping[str, bytes]

LARGE_BYTES = 512
"""Files of this size and more are uploaded by LFS."""

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|paths-info|preupload|commit)/([^/]+)(?:/(.+))?)?")
_BUCKET = re.compile(r"/api/buckets/([^/]+/[^/]+)(?:/tree(?:/(.+))?)?")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_RESOLVE_BUCKET = re.compile(r"/(buckets/[^/]+/[^/]+)/resolve/(.+)")
_LFS = re.compile(r"/[^/]+/[^/]+\.git/info/lfs/objects/batch")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(slots=True)
class Hub:
    """A running hub. ``refused`` gives a status and an ``X-Error-Code`` to requests for a repository."""

    root: Path
    endpoint: str = ""
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    busy: int = 0
    """So many of the next requests for bytes of files are answered with 429."""
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """Ranges that were served."""
    _commits: dict[str, list[tuple[str, Files]]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def commits(self, name: str) -> list[tuple[str, Files]]:
        """From the first commit to the last; none if there is no such repository."""
        if name not in self._commits and (self.root / name).is_dir():
            self.push(name, files_in(self.root / name))
        return self._commits.get(name, [])

    def push(self, name: str, files: Files) -> None:
        """Make a commit with all of these files, and no others."""
        commits = self._commits.setdefault(name, [])
        commits.append((hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest(), files))

    def files(self, name: str) -> Files:
        """Those of the last commit."""
        return self.commits(name)[-1][1]


def files_in(folder: Path) -> Files:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def running_hub(root: Path) -> Iterator[Hub]:
    class Handler(_Handler):
        hub = Hub(root)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Handler.hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield Handler.hub
        finally:
            server.shutdown()
            thread.join()


class _RefusalError(Exception):
    """An answer with a status and an ``X-Error-Code``."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        body = self._body()
        try:
            self._route(unquote(urlsplit(self.path).path), body)
        except _RefusalError as refusal:
            status, code = refusal.args
            self._answer(status, b"{}", {"X-Error-Code": code})

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _route(self, path: str, body: bytes) -> None:
        if api := _API.fullmatch(path):
            self._repository(api[1], api[2] or "revision", api[3] or "main", api[4] or "", body)
        elif bucket := _BUCKET.fullmatch(path):
            self._bucket(bucket[1], "/tree" in path, bucket[2] or "")
        elif file := _RESOLVE_BUCKET.fullmatch(path):
            self._send(files_in(self.hub.root / file[1]), file[2], "")
        elif file := _RESOLVE.fullmatch(path):
            commit, files = self._at(file[1], file[2])
            self._send(files, file[3], commit)
        elif _LFS.fullmatch(path):
            self._tell({"transfer": "basic", "objects": [self._upload(each) for each in json.loads(body)["objects"]]})
        elif self.command == "PUT":
            assert hashlib.sha256(body).hexdigest() == path.rpartition("/")[2]
            self.hub.blobs[path.rpartition("/")[2]] = body
            self._answer(200, b"", {})
        else:
            raise _RefusalError(404, "EntryNotFound")

    def _upload(self, wanted: dict[str, object]) -> dict[str, object]:
        return {**wanted, "actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{wanted['oid']}"}}}

    def _at(self, name: str, revision: str) -> tuple[str, Files]:
        if name in self.hub.refused:
            raise _RefusalError(*self.hub.refused[name])
        commits = self.hub.commits(name)
        if not commits:
            raise _RefusalError(404, "RepoNotFound")
        found = commits[-1] if revision == "main" else next((each for each in commits if each[0] == revision), None)
        if found is None:
            raise _RefusalError(404, "RevisionNotFound")
        return found

    def _repository(self, name: str, what: str, revision: str, path: str, body: bytes) -> None:
        commit, files = self._at(name, revision)
        if what == "revision":
            facts = {"id": name, "modelId": name, "sha": commit, "private": False, "tags": []}
            self._tell({**facts, "downloads": 0, "likes": 0})
        elif what == "tree":
            self._tell(self._listing(files, path))
        elif what == "paths-info":
            self._tell([each for each in self._listing(files, "", True) if each["path"] in json.loads(body)["paths"]])
        elif what == "preupload":
            self._tell({"files": [_mode(each) for each in json.loads(body)["files"]]})
        else:
            self._commit(name, commit, files, [json.loads(line) for line in body.splitlines()])

    def _commit(self, name: str, parent: str, files: Files, lines: list[dict[str, dict[str, str]]]) -> None:
        after = dict(files)
        for line in lines:
            key, value = str(line["key"]), line["value"]
            if key == "header" and value.get("parentCommit", parent) != parent:
                raise _RefusalError(412, "PreconditionFailed")
            if key == "file":
                after[value["path"]] = base64.b64decode(value["content"])
            if key == "lfsFile":
                after[value["path"]] = self.hub.blobs[value["oid"]]
            if key == "deletedFile":
                del after[value["path"]]
        self.hub.push(name, after)
        commit = self.hub.commits(name)[-1][0]
        self._tell({"commitUrl": f"{self.hub.endpoint}/{name}/commit/{commit}", "commitOid": commit})

    def _bucket(self, name: str, is_tree: bool, prefix: str) -> None:
        folder = self.hub.root / "buckets" / name
        if not folder.is_dir():
            raise _RefusalError(404, "RepoNotFound")
        files = files_in(folder)
        if is_tree:
            self._tell(
                [{**each, "xetHash": each["oid"]} for each in self._listing(files, prefix, missing_is_empty=True)]
            )
        else:
            facts = {"id": name, "private": False, "createdAt": "2026-01-01T00:00:00.000Z"}
            self._tell({**facts, "size": sum(map(len, files.values())), "totalFiles": len(files)})

    def _listing(
        self, files: Files, folder: str, recursive: bool | None = None, missing_is_empty: bool = False
    ) -> list[dict[str, object]]:
        if recursive is None:
            asked = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])
            recursive = asked[0].lower() == "true"
        inside = f"{folder}/" if folder else ""
        below = {name: data for name, data in files.items() if name.startswith(inside)}
        if folder and not below and not missing_is_empty:
            raise _RefusalError(404, "EntryNotFound")
        depth = inside.count("/")
        folders = {str(parent) for name in below for parent in Path(name).parents if str(parent) != "."}
        folders = {each for each in folders if each.startswith(inside)}
        entries: list[dict[str, object]] = [{"type": "directory", "path": each, "oid": ""} for each in sorted(folders)]
        entries += [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in sorted(below.items())
        ]
        return [each for each in entries if recursive or str(each["path"]).count("/") == depth]

    def _send(self, files: Files, name: str, commit: str) -> None:
        if name not in files:
            raise _RefusalError(404, "EntryNotFound")
        if self.hub.busy:
            self.hub.busy -= 1
            raise _RefusalError(429, "TooManyRequests")
        data = files[name]
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        if wanted is None:
            self._answer(200, data, headers)
            return
        start, stop = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
        self.hub.ranges.append((start, stop))
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


def _mode(asked: dict[str, object]) -> dict[str, object]:
    is_large = int(str(asked["size"])) >= LARGE_BYTES
    return {"path": asked["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False, "oid": None}


def _etag(data: bytes) -> str:
    """As the Hub has it: the SHA-256 of a file in LFS, git's SHA-1 of any other."""
    if len(data) >= LARGE_BYTES:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
