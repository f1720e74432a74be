"""The notebooks run as they are, in a checkout and beside an installed wheel."""

from __future__ import annotations

import json
import os
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


def test_there_is_one_for_each_framework() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["deepspeed_on_ray", "fsdp2_on_ray"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_are_stored_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if "outputs" in cell)


@pytest.fixture
def site(tmp_path: Path) -> Path:
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
    """Both runs, a prediction for each image by the name of its class, and a picture in the notebook."""
    text = printed(cells)
    assert [line.split("  ")[:2] for line in text.splitlines() if line.startswith("epoch ")] == [
        ["epoch", "1/1"],
        ["epoch", "2/2"],
    ]
    assert text.count("is taken for '") == PREDICTED
    assert any("image/png" in out.get("data", {}) for cell in cells for out in cell.outputs)


@pytest.mark.soak
def test_the_notebook_of_fsdp2_runs_in_a_checkout() -> None:
    check(executed(ROOT / "training/notebooks/fsdp2_on_ray.ipynb", ROOT))


def test_the_notebook_of_deepspeed_runs_beside_an_installed_wheel(site: Path, pytestconfig: pytest.Config) -> None:
    """In the soak; without it, the names that it imports are there."""
    path = ROOT / "training/notebooks/deepspeed_on_ray.ipynb"
    if pytestconfig.getoption("--soak"):
        check(executed(path, site))
    else:
        assert imports(path) == imports(ROOT / "training/notebooks/fsdp2_on_ray.ipynb")


def imports(path: Path) -> str:
    """The first cell of code."""
    return next(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
