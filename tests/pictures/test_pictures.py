"""docs/concepts/pictures are what the checkpoints hold."""

from math import ceil, prod

import pytest

from ckpt_tools.core.manifest import StateKey
from fixtures import store
from tests.pictures.drawing import FOLDER, cells_of, manifest_of, pictures, pieces_of

pytestmark = pytest.mark.extended

SVG = "{http://www.w3.org/2000/svg}"
NAMES = sorted(path.name for path in FOLDER.iterdir())


def test_the_pictures_are_up_to_date():
    written = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert written == pictures(), "draw them again with python -m tests.pictures.drawing"


def test_the_rows_are_those_of_torch_chunk():
    entries = manifest_of(store.checkpoint("fsdp2", "awkward", 4).checkpoint).tensors
    for fqn in ("embed.weight", "oddities.two"):
        (entry,) = (entry for key, entry in entries.items() if key.fqn == fqn and key.slot == "weight")
        rows = ceil(entry.shape[0] / 4)
        expected = [(rank, list(range(entry.shape[0]))[rank * rows :][:rows]) for rank in range(4)]
        found = [(cells.rank, list(cells.rows)) for cells in cells_of(entry.shards)]
        assert found == [(rank, rows) for rank, rows in expected if rows]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_intervals_are_those_of_deepspeed(stage):
    """Stage 2 cuts a group that is padded to a multiple of two elements a rank; stage 3 cuts and pads parameters."""
    manifest = manifest_of(store.checkpoint(f"zero{stage}-fp32", "awkward", 3).checkpoint)
    numels = {name: prod(manifest.tensors[StateKey(name)].shape) for name in manifest.groups[0].params}
    expected, start = set(), 0
    size = ceil(sum(numels.values()) / 6) * 2
    for name, numel in numels.items():
        piece = ceil(numel / 3)
        for rank in range(3):
            first, last = (rank * piece, min(numel, (rank + 1) * piece))
            at = start
            if stage == 2:
                first, last = max(start, rank * size), min(start + numel, (rank + 1) * size)
                at = first - rank * size
            if first < last:
                expected.add((name, rank, at, last - first))
        start += numel if stage == 2 else piece
    assert {*pieces_of(manifest, 0, "exp_avg")} == expected
