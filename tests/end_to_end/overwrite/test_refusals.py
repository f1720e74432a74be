"""Each way to lose files by ``--overwrite``, and each thing that keeps a destination from being replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError
from tests.end_to_end.overwrite.checkpoints import FOLDERS, TAG, files_below, made

Tree = Mapping[str, object]


def put(folder: Path, name: str) -> Path:
    """A checkpoint of that format."""
    for path, data in made().folders[name].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def write(path: Path, text: str = "mine") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def look(root: Path) -> Tree:
    """Everything below ``root``: what it is, what it holds, where it leads."""
    found: dict[str, object] = {}
    for path in root.rglob("*"):
        is_file = path.is_file() and not path.is_symlink()
        found[str(path)] = path.read_bytes() if is_file else (path.is_symlink() and str(path.readlink()), path.is_dir())
    return found


def by_python(src: Path | str, dst: Path | str, to: str | None) -> str:
    with pytest.raises(DestinationExistsError) as caught:
        ckpt_tools.convert(src, dst, to=to, overwrite=True)
    with pytest.raises(DestinationExistsError) as planned:
        ckpt_tools.plan(src, dst, to=to, overwrite=True)
    assert str(planned.value) == str(caught.value)
    return str(caught.value)


def by_command(src: Path | str, dst: Path | str, to: str | None) -> str:
    words = ["convert", str(src), str(dst), "--overwrite", *([] if to is None else ["--to", to])]
    ends = [
        subprocess.run([sys.executable, "-m", "ckpt_tools", *words, *more], capture_output=True, text=True, check=False)
        for more in ([], ["--dry-run"])
    ]
    assert [end.returncode for end in ends] == [8, 8], ends
    assert ends[0].stderr == ends[1].stderr and ends[0].stderr.count("\n") == 1
    return ends[0].stderr


Way = Callable[[Path | str, Path | str, str | None], str]
BOTH = pytest.mark.parametrize("refusal", [by_python, by_command], ids=["python", "command"])


@BOTH
def test_a_run_folder_that_holds_the_source(refusal, tmp_path):
    for number in (10, 11, 12):
        put(tmp_path / f"run/checkpoints/epoch_{number}", "zero3")
    write(tmp_path / "run/result.json")
    before = look(tmp_path)
    told = refusal(tmp_path / "run/checkpoints/epoch_12", tmp_path / "run", "dcp")
    assert "contains the source" in told
    assert look(tmp_path) == before


@BOTH
def test_a_project_that_holds_a_checkpoint_somewhere(refusal, tmp_path):
    put(tmp_path / "proj/run1/epoch_12", "dcp")
    write(tmp_path / "proj/src/main.py")
    write(tmp_path / "proj/thesis.tex")
    src = put(tmp_path / "other/epoch_12", "dcp")
    before = look(tmp_path)
    told = refusal(src, tmp_path / "proj", "dcp")
    assert "not a checkpoint itself but contains one" in told and "src/main.py" in told and "thesis.tex" in told
    assert look(tmp_path) == before


@BOTH
def test_files_beside_a_model(refusal, tmp_path):
    hf = put(tmp_path / "hf", "safetensors")
    for name in ("notes.txt", "src/a.py", "config.json", *(f"more/{number}" for number in range(20))):
        write(hf / name)
    src = put(tmp_path / "src", "dcp")
    before = look(tmp_path)
    told = refusal(src, hf, "safetensors")
    assert "config.json" in told and "and 15 more" in told and "not part of its checkpoint" in told
    assert look(tmp_path) == before


@BOTH
@pytest.mark.parametrize("name", ["dcp", "x.pt"])
def test_the_source_itself(refusal, name, tmp_path):
    src = put(tmp_path / name, name) if name == "dcp" else tmp_path / name
    if name == "x.pt":
        src.write_bytes(made().files[".pt"])
    before = look(tmp_path)
    assert "is the source itself" in refusal(src, src, "dcp" if name == "dcp" else None)
    assert look(tmp_path) == before


SAME_PLACES: Mapping[str, Callable[[Path], str]] = {
    "dots": lambda path: f"{path}/../{path.name}",
    "file-url": lambda path: f"file://{path}",
    "fsspec-local": lambda path: f"local://{path}",
    "marker": lambda path: f"{path}/.metadata",
    "link": lambda path: str(_linked(path)),
    "link-above": lambda path: str(_linked(path.parent) / path.name),
}


def _linked(path: Path) -> Path:
    link = path.with_name("a-link")
    link.symlink_to(path)
    return link


@pytest.mark.parametrize("name", SAME_PLACES)
def test_a_source_by_another_name(name, tmp_path):
    src = put(tmp_path / "in/dcp", "dcp")
    other = SAME_PLACES[name](src)
    before = look(tmp_path)
    told = by_python(other, src, "dcp")
    assert "is the source itself" in told
    assert "contains the source" in by_python(other, src.parent, "dcp")
    if name != "fsspec-local":
        assert "is inside the source" in by_python(other, src / "x.safetensors", None)
    assert look(tmp_path) == before


def test_the_same_file_by_a_hard_link(tmp_path):
    (tmp_path / "a.pt").write_bytes(made().files[".pt"])
    os.link(tmp_path / "a.pt", tmp_path / "b.pt")
    assert "is the source itself" in by_python(tmp_path / "a.pt", tmp_path / "b.pt", None)


ADDED: Mapping[str, Callable[[Path], object]] = {
    "hidden file": lambda dst: write(dst / ".env"),
    "hidden folder": lambda dst: write(dst / ".git/HEAD"),
    "link to a file": lambda dst: (dst / "link").symlink_to(write(dst.parent / "target")),
    "link by an own name": lambda dst: (dst / "__7_0.distcp").symlink_to(write(dst.parent / "target")),
    "dangling link": lambda dst: (dst / "link").symlink_to("nowhere"),
    "link to a folder": lambda dst: (dst / "link").symlink_to(dst.parent),
    "empty folder": lambda dst: (dst / "empty").mkdir(),
    "empty folder by an own name": lambda dst: (dst / "__7_0.distcp").mkdir(),
    "pipe": lambda dst: os.mkfifo(dst / "pipe"),
    "other case": lambda dst: write(dst / "MODEL.SAFETENSORS.TXT"),
    "unicode": lambda dst: write(dst / "Straße 東京"),
    "no name that can be shown": lambda dst: write(dst / os.fsdecode(b"\xff\n")),
    "another tag": lambda dst: write(dst / "step9/mp_rank_00_model_states.pt"),
    "in the tag": lambda dst: write(dst / TAG / "notes.pt"),
    "in zero": lambda dst: write(dst / TAG / "zero/weight/notes.pt"),
    "config": lambda dst: write(dst / "config.json"),
    "an epoch": lambda dst: put(dst / "checkpoints/epoch_1", "dcp"),
    "a list that is none": lambda dst: write(dst / "ckpt-tools.digests.json"),
    "a signature that is none": lambda dst: write(dst / "model.sig"),
    "a backup": lambda dst: write(dst / ".metadata.bak"),
}


@pytest.mark.parametrize("what", ADDED)
@pytest.mark.parametrize("name", FOLDERS)
def test_anything_else_in_the_folder(name, what, tmp_path):
    src, dst = put(tmp_path / "src", "torch"), put(tmp_path / "dst", name)
    ADDED[what](dst)
    before = look(tmp_path)
    to = "safetensors" if name == "sharded" else name
    tagged = {"tag": TAG} if to.startswith(("zero", "universal")) else {}
    with pytest.raises(DestinationExistsError):
        ckpt_tools.convert(src, dst, to=to, overwrite=True, **tagged)
    assert look(tmp_path) == before


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("extra", ["plain", "checksum", "signature", "script", "link"])
def test_a_checkpoint_alone_is_replaced_and_counted(name, extra, tmp_path):
    src, dst = put(tmp_path / "src", "torch"), put(tmp_path / "disk/real", name)
    if extra == "checksum":
        ckpt_tools.checksum(dst)
    elif extra == "signature":
        write(dst / "model.sig", '{"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json"}')
    elif extra == "script" and name.startswith("zero"):
        write(dst / "zero_to_fp32.py", "print()")
        write(dst / "zero_to_torch.py", "print()")
    elif extra == "link":
        (tmp_path / "dst").symlink_to(dst)
    there = {path: len(data) for path, data in files_below(dst).items()}
    write(tmp_path / "disk/beside")
    named = tmp_path / "dst" if extra == "link" else dst
    planned = ckpt_tools.plan(src, named, to="dcp", overwrite=True)
    assert (planned.removed_files, planned.removed_bytes) == (there, sum(there.values()))
    done = ckpt_tools.convert(src, named, to="dcp", overwrite=True)
    assert done.plan.removed_files == there and done.to_json()["plan"]["removed_files"] == there
    assert sorted(files_below(dst)) == [".metadata", "__0_0.distcp"]
    assert sorted(path.name for path in dst.parent.iterdir()) == ["beside", "real"]
    assert ckpt_tools.plan(src, tmp_path / "new", to="dcp", overwrite=True).removed_files == {}


def test_the_dry_run_says_what_would_go(tmp_path):
    src, dst = put(tmp_path / "src", "torch"), put(tmp_path / "dst", "dcp")
    size = sum(map(len, files_below(dst).values()))
    for words in (["convert", src, dst, "--dry-run"], ["plan", src, dst]):
        command = [sys.executable, "-m", "ckpt_tools", *map(str, words), "--to", "zero2", "--overwrite"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "removes 3 files" in said and "__1_0.distcp" in said
        report = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
        assert (sorted(report["removed_files"]), report["removed_bytes"]) == (sorted(files_below(dst)), size)


def test_without_overwrite_a_plan_refuses_what_the_run_refuses(tmp_path):
    src, dst = put(tmp_path / "src", "torch"), put(tmp_path / "dst", "dcp")
    for verb in (ckpt_tools.plan, ckpt_tools.convert):
        with pytest.raises(DestinationExistsError, match="exists; choose another destination"):
            verb(src, dst, to="dcp")


HARMED: Mapping[str, Callable[[Path], object]] = {
    "cut": lambda dst: os.truncate(dst / ".metadata", 100),
    "garbage": lambda dst: write(dst / ".metadata"),
    "no index": lambda dst: (dst / ".metadata").unlink(),
}


@pytest.mark.parametrize("how", HARMED)
def test_a_checkpoint_that_cannot_be_read(how, tmp_path):
    src, dst = put(tmp_path / "src", "torch"), put(tmp_path / "dst", "dcp")
    HARMED[how](dst)
    before = look(tmp_path)
    assert "__0_0.distcp" in by_python(src, dst, "dcp")
    assert look(tmp_path) == before


def test_a_tag_without_the_file_that_names_it_lies_deeper(tmp_path):
    src, dst = put(tmp_path / "src", "torch"), put(tmp_path / "dst", "zero2")
    (dst / "latest").unlink()
    assert "not a checkpoint itself but contains one" in by_python(src, dst, "dcp")


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors", "m.bin"])
def test_a_file_that_is_no_checkpoint(name, tmp_path):
    src, dst = put(tmp_path / "src", "dcp"), write(tmp_path / name)
    assert "is not a checkpoint that can be read" in by_python(src, dst, None)
    assert dst.read_text() == "mine"


def test_a_file_beside_that_is_no_list(tmp_path):
    src = put(tmp_path / "src", "dcp")
    ckpt_tools.convert(src, tmp_path / "m.pt")
    mine = write(tmp_path / "m.pt.digests.json")
    for options in ({}, {"checksum": True}):
        with pytest.raises(DestinationExistsError):
            ckpt_tools.convert(src, tmp_path / "m.pt", overwrite=True, **options)
    assert mine.read_text() == "mine"


def test_lists_replace_lists_alone(tmp_path):
    src = put(tmp_path / "src", "dcp")
    before = look(tmp_path)
    for output in (src / ".metadata", src / "__0_0.distcp"):
        with pytest.raises(DestinationExistsError, match="is not a list of digests"):
            ckpt_tools.checksum(src, output=output, overwrite=True)
    assert look(tmp_path) == before
    for _ in range(2):
        ckpt_tools.checksum(src, output=tmp_path / "list.json", overwrite=True)


def test_what_comes_while_it_is_written_is_kept(tmp_path):
    src, dst = put(tmp_path / "src", "torch"), put(tmp_path / "dst", "dcp")
    before = look(dst)
    with pytest.raises(DestinationExistsError, match="late"):
        ckpt_tools.convert(src, dst, to="dcp", overwrite=True, on_progress=lambda done, total: write(dst / "late"))
    assert look(dst) == {**before, str(dst / "late"): b"mine"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src"]


@pytest.mark.parametrize("stranger", [None, "out/notes.txt", "out/sub/", "out/.ckpt-tools-partial/notes.txt"])
def test_a_store_of_fsspec(stranger, tmp_path):
    memory = MemoryFileSystem()
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    src = put(tmp_path / "src", "torch")
    ckpt_tools.convert(src, "memory://out", to="zero2", tag=TAG)
    memory.pipe_file("/outer/x", b"mine")
    if stranger is not None:
        memory.mkdirs(f"/{stranger}") if stranger.endswith("/") else memory.pipe_file(f"/{stranger}", b"mine")
    before = memory.find("/", withdirs=True)
    if stranger is None or "partial" in stranger:
        ckpt_tools.convert(src, "memory://out", to="dcp", overwrite=True)
        ckpt_tools.clean("memory://out")
        kept = [] if stranger is None else [f"/{stranger}"]
        assert memory.find("/") == sorted(["/out/.metadata", "/out/__0_0.distcp", *kept, "/outer/x"])
        assert not memory.exists(f"/out/{TAG}")
    else:
        told = by_python(src, "memory://out", "dcp")
        assert stranger.removeprefix("out/").rstrip("/") in told
        assert memory.find("/", withdirs=True) == before
    assert "is the source itself" in by_python("memory://out", "memory://x/../out", "dcp")
