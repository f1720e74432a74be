"""Random trees around a destination, on a disk or in a bucket, and what of them a command may change.

A tree knows of each thing in it what it is: the oracle asks the tree and never the code under test.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.end_to_end.overwrite.checkpoints import FOLDERS, SUFFIXES, TAG, made
from tests.support.s3_server import BUCKET, S3Server

Kind = Literal["file", "folder", "link", "pipe"]

SIGNATURE = b'{"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json"}'

STRANGERS = (
    "notes.txt", ".hidden", ".git/HEAD", "src/main.py", "config.json", "Notiz für später.txt", "日本/メモ",
    "with\nline", ".METADATA", "Model.safetensors", "model.safetensors.bak", "__0_0.distcp.old",
    "0.distcp", "latest.txt", "Latest", f"{TAG}/notes.txt", f"{TAG}/zero/notes.pt",
    f"{TAG}2/mp_rank_00_model_states.pt", "global_step9/other.pt", "checkpoints/epoch_1/.metadata",
    "checkpoints/epoch_1/__0_0.distcp", "a/b/c/d", "scheduler.pt", ".ckpt-tools-partial-not/x",
    "model.sig.old",
)  # fmt: skip
"""Names of files that are of no checkpoint of ours, in a destination or beside one."""


@dataclass(frozen=True, slots=True)
class Node:
    """One thing of a tree. ``own`` is of the checkpoint at the destination, ``digests`` and ``signature`` may be
    written anew when asked for, ``left`` is of a run that was killed."""

    kind: Kind
    data: bytes = b""
    role: Literal["", "own", "digests", "signature", "left"] = ""


@dataclass(slots=True)
class Tree:
    """Things by path. The destination is ``dst``, the source ``src``; ``whole`` says that what is at the destination
    is a checkpoint."""

    src: str
    dst: str
    nodes: dict[str, Node] = field(default_factory=dict)

    def add(self, path: str, node: Node) -> None:
        """A thing that was put there first stays, and so does a file in the place of a folder."""
        parents = [path.rpartition("/")[0]]
        while parents[-1]:
            parents.append(parents[-1].rpartition("/")[0])
        is_free = path not in self.nodes and not any(known.startswith(f"{path}/") for known in self.nodes)
        if is_free and not any(self._is_in_the_way(parent) for parent in parents):
            self.nodes[path] = node

    def _is_in_the_way(self, parent: str) -> bool:
        return parent in self.nodes and self.nodes[parent].kind != "folder"

    def at_destination(self) -> dict[str, Node]:
        """All that is there, but for where a store has its output staged: what lies there stays, and is in no way."""
        place = self.place
        staged = f"{place}/.ckpt-tools-partial/"
        inside = {path: node for path, node in self.nodes.items() if path == place or path.startswith(f"{place}/")}
        return {path: node for path, node in inside.items() if not path.startswith(staged)}

    @property
    def place(self) -> str:
        """The destination, where it is a link to a folder that one."""
        node = self.nodes.get(self.dst)
        return node.data.decode() if node is not None and node.kind == "link" else self.dst

    @property
    def is_pure(self) -> bool:
        """Whether the destination is one checkpoint and nothing else."""
        found = [node for path, node in self.at_destination().items() if path != self.place or node.kind != "folder"]
        return bool(found) and all(node.role in ("own", "digests", "signature") for node in found)

    @property
    def is_full(self) -> bool:
        return any(path != self.place or node.kind != "folder" for path, node in self.at_destination().items())

    @property
    def is_related(self) -> bool:
        """Whether source and destination are, or lie in, one another."""
        a, b = f"{self.src}/", f"{self.place}/"
        return a.startswith(b) or b.startswith(a)


def made_tree(rng: random.Random, *, is_remote: bool) -> Tree:
    """A tree by chance; that of a bucket has neither links nor pipes."""
    is_file = rng.random() < 0.2
    suffix = rng.choice([*SUFFIXES.values()])
    tree = Tree(src="work/src", dst=f"work/run/out{suffix if is_file else ''}")
    if rng.random() < 0.15:
        # Related to the destination: in it, above it, or the same.
        tree.src = rng.choice(["work/run/out", "work/run/out/checkpoints/epoch_2", "work/run"])
    _fill_destination(tree, rng, suffix if is_file else None, is_remote)
    if tree.src != tree.dst:
        _put_checkpoint(tree, tree.src, rng.choice(FOLDERS), "")
    _put_strangers(tree, rng, is_remote)
    _put_traces(tree, rng, is_remote)
    return tree


def _fill_destination(tree: Tree, rng: random.Random, suffix: str | None, is_remote: bool) -> None:
    what = rng.choices(["checkpoint", "absent", "empty", "link", "garbage"], [7, 2, 1, 1, 1])[0]
    if suffix is not None:
        if what in ("checkpoint", "link"):
            tree.add(tree.dst, Node("file", made().files[suffix], "own"))
        elif what == "garbage":
            tree.add(tree.dst, Node("file", b"mine"))
        return
    if what == "link" and not is_remote:
        tree.add(tree.dst, Node("link", b"work/disk/real"))
    if what in ("checkpoint", "link"):
        _put_checkpoint(tree, tree.place, rng.choice(FOLDERS), "own")
    elif what == "empty":
        tree.add(tree.dst, Node("folder"))


def _put_checkpoint(tree: Tree, place: str, name: str, role: Literal["", "own"]) -> None:
    for path, data in made().folders[name].items():
        tree.add(f"{place}/{path}", Node("file", data, role))


def _put_strangers(tree: Tree, rng: random.Random, is_remote: bool) -> None:
    inside = [tree.place] if rng.random() < 0.45 and not tree.dst.endswith((*SUFFIXES.values(),)) else []
    for folder in [*inside, "work/run", "work", tree.dst + "2", tree.dst + "-old"]:
        for name in rng.sample(STRANGERS, rng.choice([1, 1, 2, 5])):
            tree.add(f"{folder}/{name}", _stranger(rng, name, is_remote))
    if inside and rng.random() < 0.3:
        _put_checkpoint(tree, f"{tree.place}/checkpoints/epoch_3", rng.choice(FOLDERS), "")


def _stranger(rng: random.Random, name: str, is_remote: bool) -> Node:
    kind = "file" if is_remote else rng.choices(["file", "link", "folder", "pipe"], [6, 2, 1, 1])[0]
    if is_remote and rng.random() < 0.15:
        kind = "folder"
    data = rng.choice([b"work/src", b"work/nowhere", b"work/run"]) if kind == "link" else f"mine: {name}".encode()
    return Node(kind, data)  # type: ignore[arg-type]


def _put_traces(tree: Tree, rng: random.Random, is_remote: bool) -> None:
    """Lists, signatures, what a killed run left, and what only looks so."""
    if rng.random() < 0.3:
        name = f"{tree.dst}.digests.json" if tree.dst.endswith((*SUFFIXES.values(),)) else _list_name(tree)
        if name is not None:
            is_list = rng.random() < 0.7
            role: Literal["", "digests"] = "digests" if is_list else ""
            tree.add(name, Node("file", made().digests if is_list else b"mine", role))
    if rng.random() < 0.1 and any(node.role == "own" for node in tree.at_destination().values()):
        tree.add(f"{tree.place}/model.sig", Node("file", SIGNATURE, "signature"))
    folder, _, name = tree.place.rpartition("/")
    staging = f"{tree.place}/.ckpt-tools-partial" if is_remote else f"{folder}/.{name}.ckpt-tools-partial"
    if rng.random() < 0.15 and not is_remote:
        tree.add(f"{staging}/names", Node("file", b'"a/b"\n', "left"))
        tree.add(f"{staging}/output/a/b", Node("file", b"half", "left"))
    if rng.random() < 0.1:
        tree.add(f"{staging}/{rng.choice(['notes.txt', 'output/notes.txt', 'log/mine'])}", Node("file", b"mine"))
    if rng.random() < 0.1 and not is_remote and (tree.is_full or tree.place in tree.nodes):
        tree.add(f"{folder}/.{name}.ckpt-tools-replaced/notes.txt", Node("file", b"mine"))


def _list_name(tree: Tree) -> str | None:
    """Where the list of a checkpoint lies that is at the destination."""
    own = [path.removeprefix(f"{tree.place}/") for path, node in tree.at_destination().items() if node.role == "own"]
    if not own:
        return None
    is_tagged = any(path.startswith(f"{TAG}/") for path in own)
    return f"{tree.place}/{TAG + '/' if is_tagged else ''}ckpt-tools.digests.json"


# Where a tree stands


@dataclass(frozen=True, slots=True)
class Disk:
    """A folder."""

    root: Path

    def put(self, tree: Tree) -> None:
        for path, node in tree.nodes.items():
            full = self.root / path
            full.parent.mkdir(parents=True, exist_ok=True)
            if node.kind == "file":
                full.write_bytes(node.data)
            elif node.kind == "folder":
                full.mkdir(exist_ok=True)
            elif node.kind == "pipe":
                os.mkfifo(full)
            else:
                full.symlink_to(self.root / node.data.decode())

    def url(self, path: str) -> str:
        return str(self.root / path)

    def look(self) -> dict[str, object]:
        return dict(self._walk(""))

    def _walk(self, prefix: str) -> Iterator[tuple[str, object]]:
        for entry in os.scandir(self.root / prefix):
            path = f"{prefix}{entry.name}"
            if entry.is_symlink():
                yield path, ("link", str(Path(entry.path).readlink()))
            elif entry.is_dir():
                yield path, "folder"
                yield from self._walk(f"{path}/")
            else:
                yield path, Path(entry.path).read_bytes() if entry.is_file() else "pipe"

    def clear(self) -> None:
        for path in sorted(self.root.rglob("*"), key=lambda path: -len(path.parts)):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@dataclass(frozen=True, slots=True)
class InBucket:
    """A prefix of a bucket; a folder that holds nothing is an object with a slash at the end of its name."""

    server: S3Server
    prefix: str

    def put(self, tree: Tree) -> None:
        found = {f"{path}/" if node.kind == "folder" else path: node for path, node in tree.nodes.items()}
        marks = {path: b"" if path.endswith("/") else node.data for path, node in found.items()}
        self.server.put(self.prefix, marks)

    def url(self, path: str) -> str:
        return f"s3://{BUCKET}/{self.prefix}{path}"

    def look(self) -> dict[str, object]:
        pages = self.server.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=self.prefix)
        found = (each for page in pages for each in page.get("Contents", ()))
        return {each["Key"].removeprefix(self.prefix): (each["ETag"], each["Size"]) for each in found}

    def clear(self) -> None:
        keys = [{"Key": self.prefix + path} for path in self.look()]
        if keys:
            self.server.client().delete_objects(Bucket=BUCKET, Delete={"Objects": keys})


World = Disk | InBucket

RUN_STRANGERS = (
    "notes.txt", ".hidden", "eval/results.txt", "Latest", "__0_0.distcp.old", "backup/.metadata",
)  # fmt: skip
"""Names of files that no trainer writes into a checkpoint."""


@dataclass(slots=True)
class RunTree:
    """A run of several checkpoints. ``pure`` are those of which all files are a trainer's, ``whole`` those of which no
    file is missing, both by name and the newest first; ``nodes`` of the role ``own`` are their files."""

    tree: Tree
    names: list[str] = field(default_factory=list)
    pure: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)

    def files_of(self, name: str) -> set[str]:
        return {path for path, node in self.tree.nodes.items() if path.startswith(f"work/run/{name}/")}


def made_run(rng: random.Random, *, is_remote: bool) -> RunTree:
    """Checkpoints in formats by chance: whole ones, ones without a file, ones with something of somebody in them."""
    run = RunTree(Tree(src="", dst="work/run"))
    form = rng.choice(["step_{}", "checkpoint-{}", "epoch_{:04d}"])
    for step in sorted(rng.sample(range(1, 40), rng.randint(1, 6)), reverse=True):
        name = form.format(step)
        run.names.append(name)
        _put_member(run, name, rng)
        if rng.random() < 0.25:
            other = rng.choice(RUN_STRANGERS)
            run.tree.add(f"work/run/{name}/{other}", _stranger(rng, other, is_remote))
            run.pure -= {name}
    for folder in ("work/run", "work", "work/run/logs", "work/run/old"):
        for name in rng.sample(STRANGERS[:9], rng.choice([0, 1, 3])):
            run.tree.add(f"{folder}/{name}", _stranger(rng, name, is_remote))
    if not is_remote and rng.random() < 0.3:
        run.tree.add("work/run/best", Node("link", f"work/run/{rng.choice(run.names)}".encode()))
    return run


def _put_member(run: RunTree, name: str, rng: random.Random) -> None:
    files = dict(made().folders[rng.choice(FOLDERS)])
    needed = sorted(path for path in files if not path.endswith(".index.json"))
    missing = rng.choice(needed) if rng.random() < 0.2 and len(needed) > 1 else None
    for path, data in files.items():
        if path != missing:
            run.tree.add(f"work/run/{name}/{path}", Node("file", data, "own"))
    run.pure |= {name}
    run.whole |= {name} if missing is None else set()
