"""Each way to lose files by ``--overwrite``, and each thing that keeps a destination from being replaced."""

import json
import os
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError
from tests.end_to_end.overwrite.checkpoints import FOLDERS, TAG, made
from tests.support.commands import printed, run_command
from tests.support.files import files_below, write_files
from tests.support.s3_server import BUCKET
from tests.support.sweep import tiered

Tree = Mapping[str, object]


def put(folder: Path, name: str) -> Path:
    """A checkpoint of that format."""
    return write_files(folder, made().folders[name])


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
    words = ["convert", src, dst, "--overwrite", *([] if to is None else ["--to", to])]
    done, dry = run_command(*words), run_command(*words, "--dry-run")
    assert (done.code, done.err, done.err.count("\n")) == (8, dry.err, 1)
    return done.err


@pytest.fixture
def two(tmp_path):
    """A source, and a destination where there is a checkpoint."""
    return put(tmp_path / "src", "torch"), put(tmp_path / "dst", "dcp")


def run_of(root: Path) -> Path:
    """A run, of which the last checkpoint is the source."""
    write(root / "run/result.json")
    return [put(root / f"run/checkpoints/epoch_{number}", "zero3") for number in (10, 11, 12)][-1]


def project(root: Path) -> Path:
    """A folder that holds a checkpoint somewhere."""
    put(root / "proj/run1/epoch_12", "dcp")
    write(root / "proj/src/main.py")
    return write(root / "proj/thesis.tex").parent


def model(root: Path) -> Path:
    """A model with files beside it."""
    for name in ("notes.txt", "src/a.py", "config.json", *(f"more/{number}" for number in range(20))):
        write(root / "hf" / name)
    return put(root / "hf", "safetensors")


def harmed(root: Path, harm: Callable[[Path], object], name: str = "dcp") -> Path:
    harm(put(root / "dst", name))
    return root / "dst"


def file_of(root: Path) -> Path:
    (root / "x.pt").write_bytes(made().files[".pt"])
    return root / "x.pt"


def linked_hard(root: Path) -> Path:
    os.link(file_of(root), root / "b.pt")
    return root / "b.pt"


Places = Callable[[Path], tuple[Path, Path]]
INSIDE = "not a checkpoint itself but contains one"
REFUSED: Mapping[str, tuple[Places, str | None, tuple[str, ...]]] = {
    "a run that holds the source": (lambda root: (run_of(root), root / "run"), "dcp", ("contains the source",)),
    "a project": (lambda root: (put(root / "src", "dcp"), project(root)), "dcp",
                  (INSIDE, "src/main.py", "thesis.tex")),
    "files beside a model": (lambda root: (put(root / "src", "dcp"), model(root)), "safetensors",
                             ("config.json", "and 15 more", "not part of its checkpoint")),
    "the file itself": (lambda root: (file_of(root),) * 2, None, ("is the source itself",)),
    "a hard link": (lambda root: (linked_hard(root), root / "x.pt"), None, ("is the source itself",)),
    "no index": (lambda root: (put(root / "src", "torch"), harmed(root, lambda dst: (dst / ".metadata").unlink())),
                 "dcp", ("__0_0.distcp",)),
    "a tag that nothing names": (lambda root: (put(root / "src", "torch"),
                                               harmed(root, lambda dst: (dst / "latest").unlink(), "zero2")),
                                 "dcp", (INSIDE,)),
    "no checkpoint": (lambda root: (put(root / "src", "dcp"), write(root / "m.pt")), None,
                      ("is not a checkpoint that can be read",)),
}  # fmt: skip


@pytest.mark.parametrize("refusal", [by_python, by_command])
@pytest.mark.parametrize("name", REFUSED)
def test_each_is_refused_and_stays(name, refusal, tmp_path):
    places, to, words = REFUSED[name]
    src, dst = places(tmp_path)
    before = look(tmp_path)
    told = refusal(src, dst, to)
    assert [word for word in words if word not in told] == []
    assert look(tmp_path) == before


SAME_PLACES: Mapping[str, Callable[[Path], str]] = {
    "dots": lambda path: f"{path}/../{path.name}",
    "fsspec URL": lambda path: f"local://{path}",
    "marker": lambda path: f"{path}/.metadata",
    "name": lambda path: f"{path.parent}@latest",
    "link above": lambda path: str(_linked(path.parent) / path.name),
}


def _linked(path: Path) -> Path:
    link = path.with_name("a-link")
    link.symlink_to(path)
    return link


@pytest.mark.parametrize("name", SAME_PLACES)
def test_a_source_by_another_name(name, tmp_path):
    src = put(tmp_path / "run/step_2", "dcp")
    other = SAME_PLACES[name](src)
    before = look(tmp_path)
    for dst, said in ((src, "is the source itself"), (src.parent, "contains the source"), (src / "a/b", "is inside")):
        assert said in by_python(other, dst, "dcp")
        if name not in ("marker", "name") and said != "contains the source":
            under = other if said == "is the source itself" else f"{other}/a/b"
            assert said in by_python(src, under, "dcp")
    assert look(tmp_path) == before


COPYING: Mapping[str, Callable[..., object]] = {
    "convert": lambda src, dst: ckpt_tools.convert(src, dst, to="safetensors"),
    "consolidate": ckpt_tools.consolidate,
    "reshard": lambda src, dst: ckpt_tools.reshard(src, dst, world_size=3),
}


@pytest.mark.parametrize("verb", COPYING)
def test_an_output_is_apart_from_its_source_without_overwrite_too(verb, tmp_path):
    src = put(tmp_path / "run/step_2", "dcp")
    before = look(tmp_path)
    for dst, said in ((src / "out", "is inside"), (src.parent, "contains"), (f"{src}/..", "contains"),
                      (f"{src.parent}/step_1/../step_2/out", "is inside")):  # fmt: skip
        with pytest.raises(DestinationExistsError, match=f"{said} the source .*, which is not changed; choose another"):
            COPYING[verb](src, dst)
    assert look(tmp_path) == before


@pytest.mark.parametrize("src", ["step_2", "../run@latest"])
@pytest.mark.parametrize("dst", ["step_2_converted", "step_2.safetensors"])
def test_a_sibling_is_written(src, dst, tmp_path):
    run = put(tmp_path / "run/step_2", "dcp").parent
    ckpt_tools.convert(f"{run}/{src}", run / dst, to="safetensors", state="model")
    assert ckpt_tools.diff(run / "step_2", run / dst, state="model").equal


def test_make_loadable_onto_its_source(tmp_path):
    (tmp_path / "c.pt").symlink_to(file_of(tmp_path))
    for dst in ("x.pt", "c.pt"):
        with pytest.raises(DestinationExistsError, match="is the source itself"):
            ckpt_tools.make_loadable(tmp_path / "x.pt", tmp_path / dst)


@pytest.mark.parametrize("store", ["memory", "bucket"])
def test_urls_of_a_store(store, tmp_path, request):
    if store == "memory":
        MemoryFileSystem.store.clear()
        root, other = "memory://top/runs", "memory:///top/runs/step_2/out"
    else:
        root = f"s3://{BUCKET}/{request.getfixturevalue('s3').new_prefix()}runs"
        other = f"{root}/step_2/a/out.safetensors"
    ckpt_tools.convert(put(tmp_path / "dcp", "dcp"), f"{root}/step_2", to="dcp")
    for src, dst, told in (
        (f"{root}/step_2", other, "is inside"),
        (f"{root}@latest", f"{root}/step_2/out", "is inside"),
        (f"{root}/step_2", root, "contains"),
    ):
        with pytest.raises(DestinationExistsError, match=f"{told} the source"):
            ckpt_tools.convert(src, dst, to="safetensors")
    ckpt_tools.convert(f"{root}@latest", f"{root}/step_2_converted", to="safetensors")


ADDED: Mapping[str, Callable[[Path], object]] = {
    "hidden file": lambda dst: write(dst / ".env"),
    "link by an own name": lambda dst: (dst / "__7_0.distcp").symlink_to(write(dst.parent / "target")),
    "dangling link": lambda dst: (dst / "link").symlink_to("nowhere"),
    "link to a folder": lambda dst: (dst / "link").symlink_to(dst.parent),
    "empty folder": lambda dst: (dst / "empty").mkdir(),
    "empty folder by an own name": lambda dst: (dst / "__7_0.distcp").mkdir(),
    "pipe": lambda dst: os.mkfifo(dst / "pipe"),
    "no name that can be shown": lambda dst: write(dst / os.fsdecode(b"\xff\n")),
    "another tag": lambda dst: write(dst / "step9/mp_rank_00_model_states.pt"),
    "in zero": lambda dst: write(dst / TAG / "zero/weight/notes.pt"),
    "an epoch": lambda dst: put(dst / "checkpoints/epoch_1", "dcp"),
    "a list that is none": lambda dst: write(dst / "ckpt-tools.digests.json"),
    "a signature that is none": lambda dst: write(dst / "model.sig"),
}


@pytest.mark.parametrize("what", ADDED)
@pytest.mark.parametrize("name", ["dcp", "zero2"])
def test_anything_else_in_the_folder(name, what, tmp_path):
    src, dst = put(tmp_path / "src", "torch"), put(tmp_path / "dst", name)
    ADDED[what](dst)
    before = look(tmp_path)
    tagged = {"tag": TAG} if name == "zero2" else {}
    with pytest.raises(DestinationExistsError):
        ckpt_tools.convert(src, dst, to=name, overwrite=True, **tagged)
    assert look(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "extra"),
    tiered(
        product(FOLDERS, ("plain", "checksum", "signature", "script", "link")),
        test=["zero1-script", "zero3-link", "universal-checksum", "safetensors-signature", "sharded-plain"],
        extended=["dcp-signature"],
    ),
)
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


def test_the_dry_run_says_what_would_go(two, tmp_path):
    src, dst = two
    size = sum(map(len, files_below(dst).values()))
    command = ["convert", src, dst, "--dry-run", "--to", "zero2", "--overwrite"]
    out = printed(*command)
    assert "removes 3 files" in out and "__1_0.distcp" in out
    report = json.loads(printed(*command, "--json"))
    assert (sorted(report["removed_files"]), report["removed_bytes"]) == (sorted(files_below(dst)), size)


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


def test_what_comes_while_it_is_written_is_kept(two, tmp_path):
    src, dst = two
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
