"""The bar in a kernel of Jupyter. tests/cli shows it on a terminal."""

import os
import re

import nbformat
import numpy as np
import pytest
import safetensors.numpy
from nbclient import NotebookClient

pytestmark = pytest.mark.extended

CODE = """
import ckpt_tools
with ckpt_tools.progress_bar("<converting>") as bar:
    report = ckpt_tools.convert("in.safetensors", "out.pt", on_progress=bar)
"""


def test_a_notebook_keeps_a_bar_below_the_cell(tmp_path):
    safetensors.numpy.save_file({"a": np.ones(1000, np.float32)}, tmp_path / "in.safetensors")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])
    NotebookClient(book, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute(env=dict(os.environ))
    (shown,) = book.cells[0].outputs
    size = (tmp_path / "out.pt").stat().st_size
    html = shown["data"]["text/html"]
    assert html.startswith(f'<div>&lt;converting&gt; <progress value="{size}" max="{size}"></progress> ')
    assert re.search(r"</progress> ([\d.]+ kB) of \1, [\d.]+ [kM]?B/s</div>$", html)
