"""DeepSpeed's own checkpoints, by 1 to 4 real processes: every tensor against what DeepSpeed itself gathers."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import fixtures
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.formats.deepspeed.format import DeepSpeedFormat
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.source import Source
from fixtures import launch, recipe, zero
from fixtures.store import Fixture
from tests.support.manifests import assert_holds, gathered, groups_of
from tests.support.sweep import swept
from tests.support.truth import Truth, assert_same_bits

OTHER_OPTIMIZERS = [
    Fixture("zero2-fp32", "rmsprop", 3),
    Fixture("zero3-bf16", "amsgrad", 2),
    Fixture("zero2-bf16", "adagrad", 2),
    Fixture("zero3-fp32", "adagrad", 2),
    Fixture("zero1-fp32", "adafactor", 3),
    Fixture("zero3-fp16", "lion", 3),
    Fixture("zero1-bf16acc", "lone", 4),
]
WANTED = [f for f in fixtures.CORE if f.kind.startswith("zero")] + OTHER_OPTIMIZERS


def read(folder: Path, tag: str | None = None) -> Manifest:
    return DeepSpeedFormat().read(Source.open(LocalStore(folder)), ReadOptions(tag=tag))


@pytest.mark.parametrize("wanted", swept(WANTED))
def test_reads_what_deepspeed_holds(wanted, checkpoint):
    made = checkpoint(wanted.kind, wanted.case, wanted.world_size)
    assert_read(made.checkpoint, Truth.load(made.root), stage=int(wanted.kind[4]))


def assert_read(folder: Path, truth: Truth, *, stage: int) -> None:
    assert_holds(read(folder), folder, truth, format_name=f"zero{stage}")


CHANGED = {
    "elastic": zero.Flavour(2, "bf16", changes={"elastic_checkpoint": True}),
    "round-robin": zero.Flavour(1, "fp32", changes={"round_robin_gradients": True}),
    "aligned": zero.Flavour(2, "bf16", changes={"parameter_alignment": True}),
}


def produce_changed(name: str, folder: str) -> None:
    """Runs on every rank."""
    run = zero.Run(recipe.CASES["awkward"], CHANGED[name], seed=1)
    run.train(recipe.STEPS_BEFORE)
    run.engine.save_checkpoint(f"{folder}/checkpoint", client_state=dict(recipe.CLIENT_STATE))
    truth = run.gather()
    truth.facts |= {"client_state": recipe.CLIENT_STATE}
    if run.engine.global_rank == 0:
        truth.write(Path(folder))
    run.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_reads_groups_with_padding_after_each_parameter(world_size, tmp_path):
    launch.pool(world_size).run(produce_changed, "aligned", str(tmp_path))
    assert_read(tmp_path / "checkpoint", Truth.load(tmp_path), stage=2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_reads_groups_dealt_out_to_the_ranks(world_size, tmp_path):
    """The fp32 weights judge the masters here: DeepSpeed's own gather takes the undealt order and returns other
    parameters' elements (0.19.8, ``_link_all_hp_params``)."""
    launch.pool(world_size).run(produce_changed, "round-robin", str(tmp_path))
    manifest, truth = read(tmp_path / "checkpoint"), Truth.load(tmp_path)
    got = gathered(tmp_path / "checkpoint", manifest)
    assert_same_bits(truth.slot("weight"), in_slot(got, "weight"))
    assert_same_bits({fqn: got[fqn, "weight"] for fqn in truth.slot("master")}, in_slot(got, "master"))
    assert groups_of(manifest) == truth.facts["groups"]


def in_slot(tensors: Mapping[tuple[str, str], np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {fqn: tensor for (fqn, slot), tensor in tensors.items() if slot == name}


def test_reads_elastic_checkpoints_which_keep_no_hyperparameters(tmp_path):
    launch.pool(3).run(produce_changed, "elastic", str(tmp_path))
    manifest, truth = read(tmp_path / "checkpoint"), Truth.load(tmp_path)
    assert_same_bits(truth.tensors, gathered(tmp_path / "checkpoint", manifest))
    assert groups_of(manifest) == [group | {"options": {}} for group in truth.facts["groups"]]


@pytest.fixture
def saved(checkpoint, tmp_path):
    """A save directory with two tags, of which ``latest`` names the second."""
    shutil.copytree(checkpoint("zero3-bf16", "awkward", 2).checkpoint, tmp_path / "saved")
    other = checkpoint("zero2-fp16", "awkward", 3).checkpoint / "global_step4"
    shutil.copytree(other, tmp_path / "saved" / "before")
    return tmp_path / "saved"


def test_latest_chooses_and_a_tag_overrides(saved):
    assert read(saved).format == "zero3"
    assert (read(saved, "before").format, read(saved, "before").world_size) == ("zero2", 3)


def test_a_tag_folder_and_a_folder_around_them_are_read_as_well(saved, tmp_path):
    assert read(saved / "before").format == "zero2"
    assert read(tmp_path, "saved/before").format == "zero2"


def test_universal_folders_are_of_another_format(checkpoint):
    universal = checkpoint("universal-zero2-bf16", "awkward", 2).checkpoint
    assert not DeepSpeedFormat().detect(Source.open(LocalStore(universal)))
    native = checkpoint("zero2-bf16", "awkward", 2).checkpoint
    assert DeepSpeedFormat().detect(Source.open(LocalStore(native)))
