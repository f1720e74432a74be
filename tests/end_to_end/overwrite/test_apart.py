"""An output is never written into its source, nor around it, with or without ``--overwrite``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.numpy import save_file

import ckpt_tools
from ckpt_tools.cli.main import main
from ckpt_tools.errors import DestinationExistsError
from tests.support.s3_server import BUCKET

Call = Callable[..., Any]

WRITING: dict[str, Call] = {
    "convert": lambda src, dst: ckpt_tools.convert(src, dst, to="safetensors"),
    "plan": lambda src, dst: ckpt_tools.plan(src, dst, to="safetensors"),
    "consolidate": ckpt_tools.consolidate,
    "reshard": lambda src, dst: ckpt_tools.reshard(src, dst, world_size=3),
}


@pytest.fixture
def run(tmp_path):
    """A run with two checkpoints."""
    save_file({"w": np.zeros((4, 2), np.float32)}, tmp_path / "model.safetensors")
    for step in (1, 2):
        ckpt_tools.convert(tmp_path / "model.safetensors", tmp_path / f"run/step_{step}", to="dcp", world_size=2)
    return tmp_path / "run"


def names(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


INSIDE: dict[str, Callable[[Path], tuple[str, str]]] = {
    "plain": lambda src: (f"{src}", f"{src}/out"),
    "deep": lambda src: (f"{src}", f"{src}/a/b/out"),
    "dots": lambda src: (f"{src}/../step_2", f"{src}/out"),
    "dots of DST": lambda src: (f"{src}", f"{src.parent}/step_1/../step_2/out"),
    "link": lambda src: (f"{src}", f"{_linked(src)}/out"),
    "link of SRC": lambda src: (f"{_linked(src)}", f"{src}/out"),
    "file URL": lambda src: (f"file://{src}", f"{src}/out"),
    "fsspec URL": lambda src: (f"local://{src}", f"{src}/out"),
    "fsspec URL of DST": lambda src: (f"{src}", f"local://{src}/out"),
    "marker": lambda src: (f"{src}/.metadata", f"{src}/out"),
    "name": lambda src: (f"{src.parent}@latest", f"{src}/out"),
}


def _linked(path: Path) -> Path:
    link = path.parent.with_name("a-link")
    link.symlink_to(path)
    return link


@pytest.mark.parametrize("verb", WRITING)
@pytest.mark.parametrize("how", INSIDE)
def test_a_destination_in_the_source(verb, how, run):
    src, dst = INSIDE[how](run / "step_2")
    before = names(run.parent)
    with pytest.raises(DestinationExistsError, match=r"is inside the source .*, which is not changed; choose another"):
        WRITING[verb](src, dst)
    assert names(run.parent) == before


@pytest.mark.parametrize("verb", WRITING)
def test_a_source_in_the_destination(verb, run):
    before = names(run.parent)
    for dst in (run, run.parent, f"{run}/step_1/..", f"local://{run}"):
        with pytest.raises(DestinationExistsError, match=r"contains the source .*, which is not changed; choose anoth"):
            WRITING[verb](run / "step_2", dst)
    assert names(run.parent) == before


def test_make_loadable_onto_its_source(tmp_path):
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pt")
    (tmp_path / "b.pt").symlink_to(tmp_path / "a.pt")
    for dst in ("a.pt", "b.pt"):
        with pytest.raises(DestinationExistsError, match="is the source itself"):
            ckpt_tools.make_loadable(tmp_path / "a.pt", tmp_path / dst)


def test_the_command_says_it_in_one_sentence(run, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(run / "step_2"), str(run / "step_2/model.safetensors")])
    assert ended.value.code == 8
    source = run / "step_2"
    assert capsys.readouterr().err == (
        f"Error: {source}/model.safetensors is inside the source {source}, which is not changed; choose another "
        "destination\n"
    )


@pytest.mark.parametrize("src", ["step_2", "../run@latest", "../run@step_2"])
@pytest.mark.parametrize("dst", ["step_2_converted", "step_2.safetensors", "exports/step_2"])
def test_a_sibling_is_written(src, dst, run):
    ckpt_tools.convert(f"{run}/{src}", run / dst, to="safetensors")
    assert ckpt_tools.diff(run / "step_2", run / dst).equal


def test_a_folder_of_a_model_keeps_its_files_to_itself(run):
    ckpt_tools.convert(run / "step_2", run / "hf", to="safetensors")
    with pytest.raises(DestinationExistsError, match="is inside the source"):
        ckpt_tools.convert(run / "hf", run / "hf/model.gguf")
    ckpt_tools.convert(run / "hf/model.safetensors", run / "hf/model.npz")


def test_urls_of_a_store(run):
    MemoryFileSystem.store.clear()
    ckpt_tools.convert(run / "step_2", "memory://top/runs/step_2", to="dcp")
    for src, dst in (
        ("memory://top/runs/step_2", "memory://top/runs/step_2/out"),
        ("memory://top/runs/step_2", "memory:///top/runs/step_2/out"),
        ("memory://top/runs@latest", "memory://top/runs/step_2/out"),
    ):
        with pytest.raises(DestinationExistsError, match="is inside the source"):
            ckpt_tools.convert(src, dst, to="safetensors")
    with pytest.raises(DestinationExistsError, match="contains the source"):
        ckpt_tools.convert("memory://top/runs/step_2", "memory://top/runs", to="safetensors")
    ckpt_tools.convert("memory://top/runs/step_2", "memory://top/runs/step_2_converted", to="safetensors")


def test_urls_of_a_bucket(run, s3):
    root = f"s3://{BUCKET}/{s3.new_prefix()}runs"
    ckpt_tools.convert(run / "step_2", f"{root}/step_2", to="dcp")
    before = s3.files("")
    for dst in ("step_2/out", "step_2/a/out.safetensors"):
        with pytest.raises(DestinationExistsError, match="is inside the source"):
            ckpt_tools.convert(f"{root}/step_2", f"{root}/{dst}", to="safetensors")
    with pytest.raises(DestinationExistsError, match="contains the source"):
        ckpt_tools.convert(f"{root}/step_2", root, to="safetensors")
    assert s3.files("") == before
    ckpt_tools.convert(f"{root}@latest", f"{root}/step_2_converted", to="safetensors")
