"""Checkpoints of the newest frameworks, which need a newer Python: made in the environment of ``make judges``."""

import subprocess
from pathlib import Path

import pytest
import torch

from ckpt_tools.core.manifest import StateKey
from fixtures.corpus import layouts
from tests.layouts.contents import contents, of_tensor

ROOT = Path(__file__).parent.parent.parent
NEWER = ROOT / ".venv-judges/bin/python"
NAMES = ("megatron", "megatron-experts", "orbax-items", "orbax-manager", "orbax-zarr3", "mlx", "hf-trainer")
MAKE = """
import sys, torch
from fixtures.corpus import make
for name in sys.argv[2:]:
    made = make(name)
    truth = {"weights": dict(made.state.weights), "optimizer": dict(made.state.optimizer)}
    torch.save({"source": str(made.source), **truth}, f"{sys.argv[1]}/{name}")
"""

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not NEWER.exists(), reason="there is no Python 3.12 or 3.13 for the newest frameworks"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One file of each name: where its checkpoint lies, and the tensors that it was made of."""
    folder = tmp_path_factory.mktemp("newest")
    made = subprocess.run([NEWER, "-c", MAKE, folder, *NAMES], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_it_is_opened_whole(name, folder):
    truth = torch.load(folder / name, weights_only=True)
    manifest, found = contents(Path(truth["source"]))
    assert manifest.format == layouts()[name].opens_as
    assert found == {
        **{StateKey(fqn): of_tensor(tensor) for fqn, tensor in truth["weights"].items()},
        **{StateKey(fqn, slot): of_tensor(tensor) for (fqn, slot), tensor in truth["optimizer"].items()},
    }
