"""DeepSpeed's Muon: in stages 1 and 2 a rank keeps the momentum of whole parameters."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import MalformedError
from ckpt_tools.formats.builtin import DeepSpeedFormat
from ckpt_tools.stores.source import Source
from fixtures import launch
from fixtures.corpus import deepspeed
from fixtures.truth import State
from tests.formats.deepspeed import zero_files
from tests.support.manifests import elements
from tests.support.resumed import assert_goes_on

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(stage)`: what two ranks wrote in fp32, its truth, and the losses of the next steps."""

    @cache
    def get(stage: int) -> tuple[Path, State, list[float]]:
        folder = tmp_path_factory.mktemp(f"muon{stage}")
        return folder, *launch.pool(2).run(deepspeed.save_muon, str(folder), stage, "fp32")[0]

    return get


@pytest.mark.parametrize(("stage", "to"), [(2, 1), (2, 3), (3, 2)])
def test_the_run_goes_on_at_another_stage_and_world_size(stage, to, saved, tmp_path):
    folder, state, losses = saved(stage)
    ckpt_tools.convert(folder, tmp_path / "out", to=f"zero{to}", world_size=3)
    resumed, next_losses = launch.pool(3).run(deepspeed.load_muon, str(tmp_path / "out"), to, "fp32")[0]
    assert_goes_on(resumed, next_losses, state, losses)


SHAPES = {"a": (3, 2), "b": (3, 3), "c": (2, 2)}
"""19 elements on 2 ranks: partitions of 10, the last padded by 1; ``b`` lies on both."""


def two_ranks(*momenta: list[float]) -> dict[str, Any]:
    files = zero_files.build(2, 2, [SHAPES])
    for rank, momentum in enumerate(momenta):
        own = zero_files.own(files, rank)["base_optimizer_state"]
        own["param_groups"][0]["use_muon"] = True
        own["state"][0] = {"momentum_buffer": torch.tensor(momentum)}
    return files


def numbers(start: int, count: int) -> list[float]:
    return [float(start + index) for index in range(count)]


def momentum_of(files: dict[str, Any], name: str) -> list[float]:
    source = zero_files.store_of(files)
    manifest = DeepSpeedFormat().read(Source.open(source), ReadOptions())
    return elements(source, manifest.tensors[StateKey(name, "momentum_buffer")]).flatten().tolist()


def test_momenta_of_whole_parameters():
    """Of a parameter on two ranks it is read from the first; an offloaded one is cut as the masters are."""
    files = two_ranks(numbers(0, 15), [*numbers(6, 9), *numbers(50, 4)])
    assert momentum_of(files, "a") == numbers(0, 6)
    assert momentum_of(files, "b") == numbers(6, 9)
    assert momentum_of(files, "c") == numbers(50, 4)
    files = two_ranks(numbers(0, 10), numbers(10, 10))
    assert momentum_of(files, "b") == numbers(6, 9)
    assert momentum_of(files, "c") == numbers(15, 4)


def test_a_momentum_of_another_length_is_refused():
    with pytest.raises(MalformedError, match="has 14 elements; the whole parameters of its partition have 13"):
        momentum_of(two_ranks(numbers(0, 15), numbers(0, 14)), "a")
