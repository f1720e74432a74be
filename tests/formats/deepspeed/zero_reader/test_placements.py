"""Where elements lie, of groups that some of the ranks hold."""

import numpy as np
import pytest

from ckpt_tools.core.dtypes import DType
from ckpt_tools.formats.deepspeed.zero_reader.placements import (
    GroupPlacement,
    SlotVectors,
    StoredVector,
    locate_parameters,
)


@pytest.mark.parametrize(("stage", "numels", "starts"), [(1, [4, 4, 2, 2], [0, 4, 6, 10]), (3, [3] * 4, [0, 3, 6, 9])])
def test_rows_that_ranks_hold_by_sets_follow_each_other(stage, numels, starts):
    """Six elements of a tensor of experts on ranks 0 and 2, and six on ranks 1 and 3. In stage 1 a partition has four,
    and the masters lack the padding of the last."""
    placements = [GroupPlacement(0, np.array(ranks), {"w": 6}) for ranks in ([0, 2], [1, 3])]
    vectors = {(rank, 0): StoredVector(0, numel, DType.FLOAT32) for rank, numel in enumerate(numels)}
    masters = SlotVectors.of("the masters", [f"rank{rank}" for rank in range(4)], vectors, 1)
    paddings = np.array([[0 if stage == 3 else 4 - numel] for numel in numels])
    intervals = locate_parameters(placements, masters, paddings, stage)["w"]
    assert intervals.ranks.tolist() == [0, 2, 1, 3]
    assert (intervals.numel, intervals.starts.tolist(), intervals.stops.tolist()) == (12, starts, [*starts[1:], 12])
