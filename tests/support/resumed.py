"""A run that went on elsewhere holds what was saved, and computes the losses that the first one would have had."""

from collections.abc import Sequence

import numpy as np
import torch

from fixtures.truth import State


def assert_goes_on(
    resumed: State, losses: Sequence[float], saved: State, next_losses: Sequence[float], rtol: float = 1e-5
) -> None:
    """The state of the optimizer bit for bit, and the losses up to ``rtol``: another layout adds in another order."""
    assert resumed.optimizer.keys() == saved.optimizer.keys()
    for key, tensor in saved.optimizer.items():
        assert torch.equal(resumed.optimizer[key], tensor), key
    np.testing.assert_allclose(losses, next_losses, rtol=rtol)
