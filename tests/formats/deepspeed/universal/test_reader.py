"""Universal checkpoints that DeepSpeed's own converter made: every tensor against what DeepSpeed itself gathers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fixtures
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import IncompleteError, MalformedError, SourceNotFoundError, UnsafeError, UnsupportedError
from ckpt_tools.formats.deepspeed.format import DeepSpeedFormat, UniversalFormat
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.source import Source
from fixtures.store import Fixture
from tests.support.manifests import assert_holds, gathered
from tests.support.sweep import swept
from tests.support.truth import Truth, assert_same_bits

Checkpoint = Callable[[str, str, int], Fixture]

WANTED = [f for f in fixtures.CORE if f.kind.startswith("universal")]
TAG = "global_step4"


def read(folder: Path, tag: str | None = None) -> Manifest:
    return UniversalFormat().read(Source.open(LocalStore(folder)), ReadOptions(tag=tag))


@pytest.mark.parametrize("wanted", swept(WANTED))
def test_reads_what_deepspeed_holds(wanted, checkpoint):
    made = checkpoint(wanted.kind, wanted.case, wanted.world_size)
    assert_read(made.checkpoint, Truth.load(made.root))


def assert_read(folder: Path, truth: Truth) -> None:
    assert_holds(read(folder), folder, truth, format_name="universal")


@pytest.fixture
def edited(checkpoint, tmp_path):
    """`edited(kind)`: a copy of a checkpoint by two ranks, to be changed."""

    def copy(kind: str) -> Path:
        folder = tmp_path / kind
        shutil.copytree(checkpoint(kind, "awkward", 2).checkpoint, folder)
        return folder

    return copy


STAGE1, STAGE3 = "universal-zero1-fp32", "universal-zero3-fp32"


def change(path: Path, new: Callable[[Any], Any]) -> None:
    """Replace what a torch file holds."""
    torch.save(new(torch.load(path, weights_only=False)), path)


def truth_of(checkpoint: Checkpoint, kind: str) -> Truth:
    return Truth.load(checkpoint(kind, "awkward", 2).root)


def detects(folder: Path) -> tuple[bool, bool]:
    """Whether it looks universal, and whether it looks native."""
    source = Source.open(LocalStore(folder))
    return UniversalFormat().detect(source), DeepSpeedFormat().detect(source)


@pytest.mark.parametrize("kind", [STAGE1, STAGE3])
def test_is_told_from_a_native_checkpoint(kind, edited, checkpoint):
    folder = edited(kind)
    native = checkpoint("zero2-fp32", "awkward", 2).checkpoint
    assert detects(folder) == detects(folder / TAG) == (True, False)
    assert detects(native) == (False, True)
    shutil.copytree(native / TAG, folder / "global_step4_native")
    assert detects(folder) == (False, True)
    assert read(folder).format == "universal"


def test_a_folder_of_that_name_is_no_sign(tmp_path):
    for name in ("zero/fp32.pt", "nonzero/a/fp32.pt", "zero/a/exp_avg.pt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert detects(tmp_path) == (False, False)


def test_reads_a_tag_folder_by_itself(edited, checkpoint):
    folder = edited(STAGE1) / TAG
    assert_read(folder, truth_of(checkpoint, STAGE1))


def test_latest_universal_chooses_and_a_tag_overrides(edited):
    folder = edited(STAGE1)
    shutil.copytree(folder / TAG, folder / "other")
    assert {path.split("/")[0] for path in files_of(read(folder))} == {TAG}
    assert {path.split("/")[0] for path in files_of(read(folder, "other"))} == {"other"}
    (folder / "latest_universal").unlink()
    with pytest.raises(UnsupportedError, match="choose one with tag="):
        read(folder)


def files_of(manifest: Manifest) -> set[str]:
    found = {file for entry in manifest.tensors.values() for file in entry.shards.files}
    return found - set(manifest.literals)


@pytest.mark.parametrize(
    ("latest", "error"), [(b"global_step9", IncompleteError), (b"../x", UnsafeError), (b"\xff\xfe", MalformedError)]
)
def test_latest_universal_has_to_name_a_tag(latest, error, edited):
    folder = edited(STAGE1)
    (folder / "latest_universal").write_bytes(latest)
    with pytest.raises(error):
        read(folder)


def test_an_unknown_tag_is_not_found(edited):
    with pytest.raises(SourceNotFoundError, match="it has global_step4"):
        read(edited(STAGE1), "global_step5")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (STAGE1, "zero/optimizer_state.pt"),
        (STAGE1, "mp_rank_00_model_states.pt"),
        (STAGE1, "zero/embed.weight/fp32.pt"),
        (STAGE3, "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        (STAGE3, "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    ],
)
def test_a_missing_file_is_named(kind, name, edited):
    folder = edited(kind)
    (folder / TAG / name).unlink()
    with pytest.raises(IncompleteError) as caught:
        read(folder)
    missing = (caught.value.path, caught.value.key)
    assert f"{TAG}/{name}" in missing or "embed.weight" in missing or name.startswith("zero_pp_rank_1")


def test_padding_that_older_versions_left_is_trimmed(edited, checkpoint):
    folder = edited(STAGE3)
    for name in ("fp32", "exp_avg"):
        path = folder / TAG / "zero/oddities.one" / f"{name}.pt"
        change(path, lambda flat: torch.cat([flat, torch.full((3,), 7.0)]))
    assert_read(folder, truth_of(checkpoint, STAGE3))


def test_rows_that_a_vocabulary_lacks_are_zeros(edited, checkpoint):
    folder = edited(STAGE1)
    path = folder / TAG / "zero/embed.weight/fp32.pt"
    change(path, lambda value: {**value, "param": value["param"][:10], "vocab_tensor": True})
    truth = truth_of(checkpoint, STAGE1).tensors["embed.weight", "master"].copy()
    truth[10:] = 0
    assert_same_bits({0: truth}, {0: gathered(folder, read(folder))["embed.weight", "master"]})


def test_elements_need_not_lie_in_order(edited, checkpoint):
    folder = edited(STAGE1)
    path = folder / TAG / "zero/blocks.0.up.weight/exp_avg.pt"
    change(path, lambda value: {**value, "param": value["param"].T.contiguous().T})
    assert_read(folder, truth_of(checkpoint, STAGE1))


def test_a_step_may_be_a_number(edited):
    folder = edited(STAGE1)
    change(folder / TAG / "zero/norm.bias/step.pt", lambda step: int(step))
    step = gathered(folder, read(folder))["norm.bias", "step"]
    assert (step.dtype, step.shape, step.item()) == (np.int64, (), 4)


def test_a_parameter_that_never_got_a_gradient_has_a_master_alone(edited):
    folder = edited(STAGE1)
    for slot in ("exp_avg", "exp_avg_sq", "step"):
        (folder / TAG / "zero/norm.bias" / f"{slot}.pt").unlink()
    assert {key.slot for key in read(folder).tensors if key.fqn == "norm.bias"} == {"weight", "master"}


def test_another_optimizer_s_slots_keep_their_names(edited, checkpoint):
    folder = edited(STAGE1)
    for path in (folder / TAG / "zero").glob("*/exp_avg.pt"):
        torch.save(torch.load(path, weights_only=False), path.with_name("momentum_buffer.pt"))
        path.unlink()
    truth = truth_of(checkpoint, STAGE1).tensors
    got = gathered(folder, read(folder))
    assert_same_bits({0: truth["norm.bias", "exp_avg"]}, {0: got["norm.bias", "momentum_buffer"]})
    assert ("norm.bias", "exp_avg") not in got


@pytest.mark.parametrize("lost", ["exp_avg", "step"])
def test_a_lost_file_of_a_parameter_is_missed(lost, edited):
    folder = edited(STAGE1)
    (folder / TAG / f"zero/norm.bias/{lost}.pt").unlink()
    with pytest.raises(IncompleteError, match=rf"norm.bias: there is no file zero/.../{lost}.pt"):
        read(folder)


def test_a_copy_of_a_file_is_no_slot(edited):
    folder = edited(STAGE1)
    shutil.copy(folder / TAG / "zero/norm.bias/exp_avg.pt", folder / TAG / "zero/norm.bias/exp_avg (1).pt")
    with pytest.raises(MalformedError, match=r"exp_avg \(1\).pt: norm.bias: the other parameters"):
        read(folder)


def test_slots_that_were_swapped_are_refused(edited):
    folder = edited(STAGE1)
    one, other = (folder / TAG / f"zero/norm.bias/{slot}.pt" for slot in ("exp_avg", "exp_avg_sq"))
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)
    with pytest.raises(MalformedError, match=r"exp_avg.pt: it was saved as exp_avg_sq.pt"):
        read(folder)


Change = tuple[str, str, Callable[[Any], Any], type[Exception], str]

UP = "zero/blocks.0.up.weight/fp32.pt"
MODEL1, MODEL3 = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"
OPTIMIZER = "zero/optimizer_state.pt"

REFUSED: dict[str, Change] = {
    "too few elements": (STAGE1, UP, lambda v: {"param": v["param"][1:]}, MalformedError, "its shape is"),
    "rows without a vocabulary": (STAGE1, UP, lambda v: {"param": v["param"].T}, MalformedError, "its shape is"),
    "no tensor": (STAGE1, UP, lambda v: {"cat_dim": 0}, MalformedError, "does not contain a tensor"),
    "an expert": (STAGE1, UP, lambda v: {**v, "is_expert_param": True}, UnsupportedError, "experts"),
    "tensor parallel": (STAGE1, MODEL1, lambda v: {**v, "mp_world_size": 2}, IncompleteError, "mp_rank_01"),
    "pipeline parallel": (
        STAGE1,
        MODEL1,
        lambda v: {**v, "checkpoint_parallel_dimensions": {"pp_degree": 2}},
        UnsupportedError,
        "pipeline",
    ),
    "AutoEP layers": (STAGE1, MODEL1, lambda v: {**v, "ds_autoep_layers": [{}]}, MalformedError, "ds_autoep_layers"),
    "older AutoEP layers": (STAGE1, MODEL1, lambda v: {**v, "autoep_layers": [{}]}, UnsupportedError, "AutoEP"),
    "no groups": (STAGE1, OPTIMIZER, lambda v: {"ds_version": "0"}, MalformedError, "param_groups"),
    "group of nothing": (STAGE1, OPTIMIZER, lambda v: {"param_groups": [{}]}, MalformedError, "no 'params'"),
    "too few groups": (
        STAGE1,
        OPTIMIZER,
        lambda v: {**v, "param_groups": v["param_groups"][:1]},
        MalformedError,
        "param_shapes has 3",
    ),
    "no fragment": (STAGE3, MODEL3, lambda v: {**v, "frozen_param_fragments": {}}, IncompleteError, "its part"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_in_one_sentence(case, edited):
    kind, name, new, error, words = REFUSED[case]
    folder = edited(kind)
    change(folder / TAG / name, new)
    with pytest.raises(error, match=words):
        read(folder)


@pytest.mark.parametrize("name", ["layer_00-model_00-model_states.pt", "expert_0.pt"])
def test_refuses_other_parallelism_by_the_names_of_its_files(name, edited):
    folder = edited(STAGE1)
    (folder / TAG / name).touch()
    with pytest.raises(UnsupportedError, match="not supported"):
        read(folder)


def test_a_vocabulary_that_lacks_too_many_rows_is_refused(edited):
    folder = edited(STAGE1)
    for slot in ("fp32", "exp_avg", "exp_avg_sq"):
        change(folder / TAG / f"zero/embed.weight/{slot}.pt", lambda value: {**value, "vocab_tensor": True})

    def huge(model: dict[str, Any]) -> dict[str, Any]:
        model["module"]["embed.weight"] = torch.empty(0)
        model["param_shapes"] = [
            {name: torch.Size([1 << 40, 7]) if name == "embed.weight" else shape for name, shape in group.items()}
            for group in model["param_shapes"]
        ]
        return model

    change(folder / TAG / MODEL1, huge)
    with pytest.raises(UnsupportedError, match="too many to add"):
        read(folder)
