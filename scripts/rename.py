"""Rename many symbols at once, with all of their uses: a language server finds them.

A list has lines ``path/to/module.py:Class.method.local  new_name``; ``#impl``, ``#@`` and ``# ALSO`` begin lines for
methods of the same name that a server does not link, and other lines are comments. A name that an earlier line of the
list changed may stand by its new name. Nothing is written before all lines were looked up. Keywords of
``dataclasses.replace``, untyped tests and strings do not follow: mypy and the tests find them.

    python -m scripts.rename LIST... (with basedpyright-langserver on PATH)
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlparse

ROOT = Path(__file__).resolve().parent.parent
LINE = re.compile(r"(?:(?:#impl|#@|# ALSO)\s+)?([\w/]+\.py):([\w.]+)\s+(\w+)")
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class LanguageServer:
    """basedpyright, which knows the project's files. Requests are answered in their order."""

    def __init__(self) -> None:
        command = ["basedpyright-langserver", "--stdio"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.opened: set[Path] = set()
        folder = {"uri": uri_of(ROOT), "name": "project"}
        self.request("initialize", processId=None, rootUri=folder["uri"], workspaceFolders=[folder], capabilities={})
        self._send(method="initialized", params={})

    def request(self, method: str, **params: Any) -> Any:
        """The result of a request; None if it has none."""
        self._send(id=1, method=method, params=params)
        while True:
            message = self._receive()
            if "method" not in message and message.get("id") == 1:
                return message.get("result")
            if "id" in message:
                items = message.get("params", {}).get("items", ())
                settings = {"analysis": {"typeCheckingMode": "off"}, "pythonPath": sys.executable}
                self._send(id=message["id"], result=[settings for _ in items])

    def find_edits(self, path: Path, line: int, column: int, new_name: str) -> dict[Path, list[Any]]:
        """Edits of all files that give the symbol at this place another name."""
        if path not in self.opened:
            self.opened.add(path)
            document = {"uri": uri_of(path), "languageId": "python", "version": 1, "text": path.read_text()}
            self._send(method="textDocument/didOpen", params={"textDocument": document})
        place = {"textDocument": {"uri": uri_of(path)}, "position": {"line": line, "character": column}}
        found = self.request("textDocument/rename", **place, newName=new_name) or {}
        edits = defaultdict(list, {path_of(uri): list(each) for uri, each in (found.get("changes") or {}).items()})
        for change in found.get("documentChanges") or ():
            edits[path_of(change["textDocument"]["uri"])] += change["edits"]
        return edits

    def _send(self, **message: Any) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
        self.process.stdin.flush()

    def _receive(self) -> Any:
        stream = self.process.stdout
        assert stream is not None
        num_bytes = 0
        while (line := stream.readline().strip()) or not num_bytes:
            name, _, value = line.partition(b":")
            num_bytes = int(value) if name.lower() == b"content-length" else num_bytes
        return json.loads(stream.read(num_bytes))


def uri_of(path: Path) -> str:
    return f"file://{quote(str(path))}"


def path_of(uri: str) -> Path:
    return Path(unquote(urlparse(uri).path))


def locate(tree: ast.Module, names: tuple[str, ...], lines: list[str]) -> tuple[int, int] | None:
    """Line and column, from 0, where the innermost of these names is defined: a class, a function, a parameter or a
    variable."""
    scope: ast.AST = tree
    for name in names[:-1]:
        inner = (node for node in nodes_in(scope) if isinstance(node, (*FUNCTION, ast.ClassDef)) and node.name == name)
        found = next(inner, None)
        if found is None:
            return None
        scope = found
    for node in nodes_in(scope):
        if isinstance(node, (*FUNCTION, ast.ClassDef)) and node.name == names[-1]:
            return node.lineno - 1, lines[node.lineno - 1].index(node.name, node.col_offset + len("def "))
        if isinstance(node, ast.arg) and node.arg == names[-1]:
            return node.lineno - 1, node.col_offset
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == names[-1]:
            return node.lineno - 1, node.col_offset
    for node in ast.walk(scope) if isinstance(scope, ast.ClassDef) else ():
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == names[-1]:
            return (node.end_lineno or 0) - 1, (node.end_col_offset or 0) - len(node.attr)
    return None


def nodes_in(scope: ast.AST) -> list[ast.AST]:
    """All nodes of a function, but those of functions in it last; of a class or module, without those of functions."""
    found, inner, waiting = [], [], list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop(0)
        found.append(node)
        if not isinstance(node, (*FUNCTION, ast.ClassDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)
        elif isinstance(scope, FUNCTION):
            inner += [each for each in ast.walk(node) if each is not node]
    return found + inner


def main() -> None:
    server = LanguageServer()
    before: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}
    edits: dict[tuple[Path, int, int, int], str] = {}
    for text in (line for file in sys.argv[1:] for line in Path(file).read_text().splitlines()):
        parsed = LINE.match(text)
        if parsed is None:
            continue
        file, qualified, new_name = parsed.groups()
        names: tuple[str, ...] = ()
        for end, name in enumerate(new := tuple(qualified.split(".")), 1):
            names = before.get((file, new[:end]), (*names, name))
        code = (ROOT / file).read_text()
        place = locate(ast.parse(code), names, code.splitlines())
        found = server.find_edits(ROOT / file, *place, new_name) if place else {}
        if not found:
            print(f"not found: {file}:{qualified}", flush=True)
        before[file, (*new[:-1], new_name)] = names
        for path, each in ((path, each) for path, some in found.items() for each in some):
            start, end = each["range"]["start"], each["range"]["end"]
            key = (path, start["line"], start["character"], end["character"])
            if edits.setdefault(key, new_name) != new_name:
                print(f"two names for {path}:{key[1] + 1}: {edits[key]} and {new_name} ({qualified})", flush=True)
    server.process.kill()
    for path in {path for path, *_ in edits}:
        assert path.is_relative_to(ROOT) and ".venv" not in path.parts, path
        lines = path.read_text().splitlines(keepends=True)
        for line, start, end in sorted((key[1:] for key in edits if key[0] == path), reverse=True):
            lines[line] = lines[line][:start] + edits[path, line, start, end] + lines[line][end:]
        path.write_text("".join(lines))
    print(f"{len(edits):,} edits")


if __name__ == "__main__":
    main()
