"""The notebooks run as they are, in a checkout and beside an installed wheel."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import training

ROOT = Path(training.__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "training/notebooks").glob("*.ipynb"))
INSTALLED = {"ckpt_tools": "ckpt_tools", "training": "ckpt_tools_training", "inference": "ckpt_tools_inference"}
CELL_SECONDS = 600
PREDICTED = 8
STEPS_OF_AN_EPOCH = 22
TENSORS = 56


def test_there_is_one_for_each_framework():
    assert [path.stem for path in NOTEBOOKS] == ["deepspeed_on_ray", "fsdp2_on_ray"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_are_stored_without_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if "outputs" in cell)


@pytest.fixture
def site(tmp_path):
    """A folder of packages under the names that a wheel gives them."""
    for folder, name in INSTALLED.items():
        (tmp_path / name).symlink_to(ROOT / folder)
    return tmp_path


def executed(path: Path, folder: Path) -> list[Any]:
    """The cells after they have run in a kernel whose current folder is ``folder``, and which finds packages there."""
    book = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(book, timeout=CELL_SECONDS, resources=resources).execute(
        env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    )
    return [cell for cell in book.cells if cell.cell_type == "code"]


def printed(cells: list[Any]) -> str:
    return "".join(out.text for cell in cells for out in cell.outputs if out.output_type == "stream")


def check(cells: list[Any]) -> None:
    """Both runs, the second from the first's checkpoint; a prediction for each image, and a picture in the notebook."""
    text = printed(cells)
    runs = [ast.literal_eval(line) for line in text.splitlines() if line.startswith("{")]
    assert [(run["epoch"], run["step"]) for run in runs] == [(1, STEPS_OF_AN_EPOCH), (2, 2 * STEPS_OF_AN_EPOCH)]
    assert runs[1]["loss"] < runs[0]["loss"]
    assert f"{TENSORS} tensors are equal" in text
    assert text.count(" is taken for a ") == PREDICTED
    assert any("image/png" in out.get("data", {}) for cell in cells for out in cell.outputs)


@pytest.mark.soak
def test_the_notebook_of_fsdp2_runs_in_a_checkout():
    check(executed(ROOT / "training/notebooks/fsdp2_on_ray.ipynb", ROOT))


@pytest.mark.soak
def test_the_notebook_of_deepspeed_runs_beside_an_installed_wheel(site):
    check(executed(ROOT / "training/notebooks/deepspeed_on_ray.ipynb", site))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_show_every_piece_of_their_example(path):
    """Data and model are left out, which are no part of the framework."""
    example = ast.parse((ROOT / f"training/examples/{path.stem}.py").read_text())
    pieces = {node.name for node in example.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    source = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    assert f"examples import {path.stem} as example" in source
    assert {*re.findall(r"show\(example\.(\w+)\)", source)} == pieces - {"load_data", "build_model", "options"}
    assert {*re.findall(r"example\.(\w+)\(", source)} == {"fit", "options", "load_data", "predict"}
