"""Universal checkpoints that DeepSpeed's own converter made: every tensor against what DeepSpeed itself gathers."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fixtures
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import (
    CkptError,
    IncompleteError,
    MalformedError,
    SourceNotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_tools.formats.builtin import DeepSpeedFormat, UniversalFormat
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.source import Source
from tests.support.damage import Harm, save, swap, unlink
from tests.support.manifests import assert_holds, gathered
from tests.support.refusals import refusal_test
from tests.support.sweep import swept
from tests.support.truth import Truth, assert_same_bits

TAG = "global_step4"
STAGE1, STAGE3 = "universal-zero1-fp32", "universal-zero3-fp32"
MODEL1, MODEL3 = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"
UP, BIAS, OPTIMIZER = "zero/blocks.0.up.weight/fp32.pt", "zero/norm.bias", "zero/optimizer_state.pt"


def read(folder: Path, tag: str | None = None) -> Manifest:
    return UniversalFormat().read(Source.open(LocalStore(folder)), ReadOptions(tag=tag))


@pytest.mark.parametrize("wanted", swept(f for f in fixtures.CORE if f.kind.startswith("universal")))
def test_reads_what_deepspeed_holds(wanted, checkpoint):
    made = checkpoint(wanted.kind, wanted.case, wanted.world_size)
    assert_read(made.checkpoint, Truth.load(made.root))


def assert_read(folder: Path, truth: Truth) -> None:
    assert_holds(read(folder), folder, truth, format_name="universal")


def copied(kind: str, folder: Path) -> Path:
    return Path(shutil.copytree(fixtures.checkpoint(kind, "awkward", 2).checkpoint, folder / kind))


@pytest.fixture
def stage1(tmp_path):
    return copied(STAGE1, tmp_path)


def truth_of(kind: str) -> Truth:
    return Truth.load(fixtures.checkpoint(kind, "awkward", 2).root)


def replaced(name: str, new: Callable[[Any], Any]) -> Harm:
    return lambda tag: torch.save(new(torch.load(tag / name, weights_only=False)), tag / name)


def detects(folder: Path) -> tuple[bool, bool]:
    source = Source.open(LocalStore(folder))
    return UniversalFormat().detect(source), DeepSpeedFormat().detect(source)


@pytest.mark.parametrize("kind", [STAGE1, STAGE3])
def test_is_told_from_a_native_checkpoint(kind, checkpoint, tmp_path):
    folder, native = copied(kind, tmp_path), checkpoint("zero2-fp32", "awkward", 2).checkpoint
    assert detects(folder) == detects(folder / TAG) == (True, False)
    assert detects(native) == (False, True)
    shutil.copytree(native / TAG, folder / "global_step4_native")
    assert detects(folder) == (False, True)
    assert read(folder).format == "universal"


def test_latest_universal_chooses_and_a_tag_overrides(stage1):
    def tags(manifest: Manifest) -> set[str]:
        found = {file for entry in manifest.tensors.values() for file in entry.shards.files}
        return {path.split("/")[0] for path in found - set(manifest.literals)}

    shutil.copytree(stage1 / TAG, stage1 / "other")
    assert (tags(read(stage1)), tags(read(stage1, "other"))) == ({TAG}, {"other"})
    (stage1 / "latest_universal").unlink()
    with pytest.raises(UnsupportedError, match=r"choose one with tag="):
        read(stage1)


# Variants that are read


def longer(flat: Any) -> Any:
    return torch.cat([flat, torch.full((3,), 7.0)])


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param(STAGE1, [], id="a tag folder by itself"),
        pytest.param(STAGE3, [replaced(f"zero/oddities.one/{name}.pt", longer) for name in ("fp32", "exp_avg")],
            id="padding that older versions left"),
        pytest.param(STAGE1,
            [replaced("zero/blocks.0.up.weight/exp_avg.pt", lambda v: {**v, "param": v["param"].T.contiguous().T})],
            id="elements in another order"),
    ],
)  # fmt: skip
def test_it_is_read_as_it_was(kind, changes, tmp_path):
    folder = copied(kind, tmp_path)
    for change in changes:
        change(folder / TAG)
    assert_read(folder if changes else folder / TAG, truth_of(kind))


def test_rows_that_a_vocabulary_lacks_are_zeros(stage1):
    change = replaced("zero/embed.weight/fp32.pt", lambda v: {**v, "param": v["param"][:10], "vocab_tensor": True})
    change(stage1 / TAG)
    truth = truth_of(STAGE1).tensors["embed.weight", "master"].copy()
    truth[10:] = 0
    assert_same_bits({0: truth}, {0: gathered(stage1, read(stage1))["embed.weight", "master"]})


# Refusals


def latest(data: bytes) -> Harm:
    return lambda tag: (tag.parent / "latest_universal").write_bytes(data)


def huge_vocabulary(tag: Path) -> None:
    def huge(model: dict[str, Any]) -> dict[str, Any]:
        shapes = [{**group} for group in model["param_shapes"]]
        (group,) = (group for group in shapes if "embed.weight" in group)
        group["embed.weight"] = torch.Size([1 << 40, 7])
        module = {**model["module"], "embed.weight": torch.empty(0)}
        return {**model, "module": module, "param_shapes": shapes}

    for slot in ("fp32", "exp_avg", "exp_avg_sq"):
        replaced(f"zero/embed.weight/{slot}.pt", lambda value: {**value, "vocab_tensor": True})(tag)
    replaced(MODEL1, huge)(tag)


PIPELINE = {"checkpoint_parallel_dimensions": {"pp_degree": 2}}


def refused(kind: str, harm: Harm, tag: str | None, folder: Path) -> None:
    run = copied(kind, folder)
    harm(run / TAG)
    read(run, tag)


MISSING, WRONG, OTHER = IncompleteError, MalformedError, UnsupportedError
HARMED: list[tuple[str, str, Harm, type[CkptError], str]] = [
    ("latest names no tag", STAGE1, latest(b"global_step9"), MISSING, "global_step9"),
    ("latest leads outside", STAGE1, latest(b"../x"), UnsafeError, "."),
    ("latest is no text", STAGE1, latest(b"\xff\xfe"), WRONG, "."),
    ("no optimizer", STAGE1, unlink(OPTIMIZER), MISSING, OPTIMIZER),
    ("no model", STAGE1, unlink(MODEL1), MISSING, MODEL1),
    ("no master", STAGE1, unlink("zero/embed.weight/fp32.pt"), MISSING, "embed.weight"),
    ("no first rank", STAGE3, unlink(MODEL3.replace("_1_", "_0_")), MISSING, "zero_pp_rank_0"),
    ("no second rank", STAGE3, unlink(MODEL3), MISSING, "."),
    ("no moment", STAGE1, unlink(f"{BIAS}/exp_avg.pt"), MISSING, "norm.bias: there is no file zero/.../exp_avg"),
    ("no step", STAGE1, unlink(f"{BIAS}/step.pt"), MISSING, "norm.bias: there is no file zero/.../step.pt"),
    ("a copy of a file", STAGE1, save(f"{BIAS}/exp_avg (1).pt", {}), WRONG, r"exp_avg \(1\).pt: norm.bias: the other"),
    ("swapped slots", STAGE1, swap(f"{BIAS}/exp_avg.pt", f"{BIAS}/exp_avg_sq.pt"), WRONG,
        r"exp_avg.pt: it was saved as exp_avg_sq.pt"),
    ("too few elements", STAGE1, replaced(UP, lambda v: {"param": v["param"][1:]}), WRONG, "its shape is"),
    ("elements of another", STAGE1, replaced(UP, lambda v: {"param": torch.zeros(v["param"].numel() + 1)}), WRONG,
        "its shape is"),
    ("turned rows", STAGE1, replaced(UP, lambda v: {"param": v["param"].T}), WRONG, "its shape is"),
    ("no tensor", STAGE1, replaced(UP, lambda v: {"cat_dim": 0}), WRONG, "does not contain a tensor"),
    ("an expert", STAGE1, replaced(UP, lambda v: {**v, "is_expert_param": True}), OTHER, "experts"),
    ("tensor parallel", STAGE1, replaced(MODEL1, lambda v: {**v, "mp_world_size": 2}), MISSING, "mp_rank_01"),
    ("pipeline parallel", STAGE1, replaced(MODEL1, lambda v: {**v, **PIPELINE}), OTHER, "pipeline"),
    ("AutoEP", STAGE1, replaced(MODEL1, lambda v: {**v, "ds_autoep_layers": [{}]}), WRONG, "ds_autoep_layers"),
    ("older AutoEP", STAGE1, replaced(MODEL1, lambda v: {**v, "autoep_layers": [{}]}), OTHER, "AutoEP"),
    ("no groups", STAGE1, replaced(OPTIMIZER, lambda v: {"ds_version": "0"}), WRONG, "param_groups"),
    ("a group of nothing", STAGE1, replaced(OPTIMIZER, lambda v: {"param_groups": [{}]}), WRONG, "no 'params'"),
    ("a group", STAGE1, replaced(OPTIMIZER, lambda v: {"param_groups": v["param_groups"][:1]}), WRONG, "shapes has 3"),
    ("no fragment", STAGE3, replaced(MODEL3, lambda v: {**v, "frozen_param_fragments": {}}), MISSING, "its part"),
    ("names of layers", STAGE1, save("layer_00-model_00-model_states.pt", {}), OTHER, "not supported"),
    ("names of experts", STAGE1, save("expert_0.pt", {}), OTHER, "not supported"),
    ("a vocabulary that lacks too many rows", STAGE1, huge_vocabulary, OTHER, "too many to add"),
]  # fmt: skip

test_refused = refusal_test(
    *((name, partial(refused, kind, harm, None), error, words) for name, kind, harm, error, words in HARMED),
    ("an unknown tag", partial(refused, STAGE1, lambda _: None, "global_step5"), SourceNotFoundError, "it has global"),
)
