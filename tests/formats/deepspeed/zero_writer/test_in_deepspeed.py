"""What DeepSpeed makes of the ZeRO checkpoints that we write: ``load_checkpoint`` in 1 to 4 real processes.

Tests go by the number of processes, so that a pool of them serves many.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.options import ReadOptions, WriteOptions
from ckpt_tools.core.transforms import cast_weights
from ckpt_tools.formats.builtin import ZeroFormat
from ckpt_tools.formats.index import find_format, read_manifest
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.source import Source
from fixtures import launch, recipe, universal, zero
from fixtures.truth import Truth as Gathered
from tests.formats.deepspeed.by_hand import write
from tests.support.sweep import extended
from tests.support.truth import MASTER, Truth, assert_same_bits, same_bits


def convert(
    source: Path,
    target: Path,
    stage: int,
    world_size: int,
    change: Callable[[Manifest], Manifest] = lambda found: found,
) -> tuple[Note, ...]:
    """Write ``source`` for ``world_size`` ranks; the writer's notes."""
    opened = Source.open(LocalStore(source))
    manifest = change(read_manifest(find_format(opened), opened, ReadOptions()))
    layout = ZeroFormat(stage).layout(manifest, WriteOptions(world_size=world_size))
    target.mkdir(parents=True)
    write(manifest, layout, opened.store, LocalStore(target))
    return layout.notes


OF_TWO_RANKS = (
    "fsdp2 awkward 3 zero2-fp32 2", "fsdp2 plain 3 zero3-fp32 2", "zero1-bf16 awkward 3 zero1-bf16 2",
    "zero3-fp16 lion 3 zero2-fp16 2",
)  # fmt: skip
OF_OTHERS = (
    "zero3-fp32-sub awkward 3 zero3-fp32-sub 4",
    "zero1-bf16acc awkward 4 zero3-bf16 3", "zero3-fp16 awkward 2 zero2-fp16 3", "zero2-fp32 empty 2 zero1-fp32 3",
    "zero3-bf16 amsgrad 2 zero1-bf16 3", "zero3-fp32 adagrad 2 zero1-fp32 3", "zero2-fp32 rmsprop 3 zero3-fp32 2",
    "fsdp2 awkward 2 zero3-fp32 1",
)  # fmt: skip


@pytest.mark.parametrize("cell", [*OF_TWO_RANKS, *extended(*OF_OTHERS)])
def test_deepspeed_goes_on_as_if_nothing_had_happened(cell, checkpoint, resume, tmp_path):
    source, case, from_ranks, target, to_ranks = cell.split()
    made = checkpoint(source, case, int(from_ranks))
    notes = convert(made.checkpoint, tmp_path / "out", int(target[4]), int(to_ranks))
    truth, resumed = Truth.load(made.root), resume(target, case, tmp_path / "out", int(to_ranks))
    assert_same_bits(with_masters(truth), resumed.tensors)
    assert_same_facts(truth, resumed)
    np.testing.assert_allclose(resumed.facts["losses"], truth.facts["losses"], rtol=1e-6, atol=0)
    assert not [note for note in notes if note.outcome is Outcome.DROPPED]


def with_masters(truth: Truth) -> Mapping[tuple[str, str], np.ndarray]:
    """The truth's tensors; where a framework keeps no masters, its fp32 weights are the masters."""
    if truth.facts["framework"] == "deepspeed":
        return truth.tensors
    trained = {fqn for fqn, slot in truth.tensors if slot != WEIGHT}
    return {**truth.tensors, **{(fqn, MASTER): truth.tensors[fqn, WEIGHT] for fqn in trained}}


def assert_same_facts(truth: Truth, resumed: Truth) -> None:
    for fact in ("scheduler", "global_step", "epoch"):
        assert resumed.facts[fact] == truth.facts[fact], fact
    for expected, found in zip(truth.facts["groups"], resumed.facts["groups"], strict=True):
        assert found["fqns"] == expected["fqns"]
        assert expected["options"].items() <= found["options"].items()
    if truth.facts["framework"] == "deepspeed":
        for fact in ("groups", "client_state", "skipped_steps"):
            assert resumed.facts[fact] == truth.facts[fact], fact
        # Runs that do not scale have a scale of 1, and BF16_Optimizer has nothing.
        unscaled = ({}, {"cur_scale": 1.0, "dynamic": False})
        assert resumed.facts["loss_scaler"] in (truth.facts["loss_scaler"], *unscaled)


# Jobs of our own, which run on every rank


def produce_changed(flavour: zero.Flavour, folder: str) -> None:
    run = zero.Run(recipe.CASES["awkward"], flavour, seed=1)
    run.train(recipe.STEPS_BEFORE)
    run.engine.save_checkpoint(f"{folder}/checkpoint")
    _finish(run, folder)


def resume_changed(flavour: zero.Flavour, checkpoint: str, folder: str) -> None:
    run = zero.Run(recipe.CASES["awkward"], flavour, seed=2)
    run.engine.load_checkpoint(checkpoint)
    _finish(run, folder)


def _finish(run: zero.Run, folder: str) -> None:
    truth: Gathered = run.gather()
    truth.facts["losses"] = run.train(recipe.STEPS_AFTER)
    if torch.distributed.get_rank() == 0:
        truth.write(Path(folder))
    run.close()


@pytest.mark.parametrize(
    "flavour",
    [
        pytest.param(zero.Flavour(2, "fp32", changes={"round_robin_gradients": True}), id="round-robin"),
        pytest.param(
            zero.Flavour(1, "bf16", changes={"parameter_alignment": True}), id="aligned", marks=pytest.mark.extended
        ),
    ],
)
def test_a_run_whose_settings_move_elements_finds_them(flavour, tmp_path):
    """Masters and moments are judged by the losses: DeepSpeed's mappings, through which they are gathered, are those
    of another order where parameters are dealt out."""
    launch.pool(3).run(produce_changed, flavour, str(tmp_path))
    convert(tmp_path / "checkpoint", tmp_path / "out", flavour.stage, 2)
    launch.pool(2).run(resume_changed, flavour, str(tmp_path / "out"), str(tmp_path / "resumed"))
    truth, resumed = Truth.load(tmp_path), Truth.load(tmp_path / "resumed")
    assert_same_bits(truth.slot(WEIGHT), resumed.slot(WEIGHT))
    np.testing.assert_allclose(resumed.facts["losses"], truth.facts["losses"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.extended), 3])
def test_16_bits_asked_for_keep_fp32_masters(stage, checkpoint, resume, tmp_path):
    made = checkpoint("fsdp2", "awkward", 2)
    convert(made.checkpoint, tmp_path / "out", stage, 2, lambda manifest: cast_weights(manifest, DType.BFLOAT16)[0])
    resumed = resume(f"zero{stage}-bf16", "awkward", tmp_path / "out", 2)
    truth = with_masters(Truth.load(made.root))
    assert_same_bits(*({k: t for k, t in found.items() if k[1] != WEIGHT} for found in (truth, resumed.tensors)))
    for fqn, master in resumed.slot(MASTER).items():
        assert same_bits(master.astype(ml_dtypes.bfloat16), resumed.tensors[fqn, WEIGHT]), fqn
    assert same_bits(truth["keepsakes.table32", WEIGHT], resumed.tensors["keepsakes.table32", WEIGHT])


def losses_after(stage: int, checkpoint: str) -> list[float]:
    run = zero.Run(recipe.CASES["awkward"], zero.Flavour(stage, "fp32"), seed=2)
    run.engine.load_checkpoint(checkpoint)
    losses = run.train(recipe.STEPS_AFTER)
    run.close()
    return losses


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_group_that_has_no_state_yet_is_trained_from_the_start(stage, checkpoint, tmp_path):
    made = checkpoint("fsdp2", "awkward", 3)

    def change(manifest: Manifest) -> Manifest:
        fresh = (*manifest.groups[1].params, "oddities.two")
        kept = {k: e for k, e in manifest.tensors.items() if e.kind is not Kind.STATE or k.fqn not in fresh}
        return replace(manifest, tensors=kept)

    notes = convert(made.checkpoint, tmp_path / "out", stage, 2, change)
    losses = launch.pool(2).run(losses_after, stage, str(tmp_path / "out"))[0]
    expected = Truth.load(made.root).facts["losses"]
    np.testing.assert_allclose(losses[0], expected[0], rtol=1e-6)
    assert np.isfinite(losses).all() and losses[2] != expected[2]
    assert {"optimizer state of parameter group 1", "exp_avg of oddities.two"} <= {note.what for note in notes}


def weights_alone(stage: int, checkpoint: str) -> dict[str, np.ndarray]:
    run = zero.Run(recipe.CASES["awkward"], zero.Flavour(stage, "fp32"), seed=2)
    run.engine.load_checkpoint(checkpoint, load_optimizer_states=False, load_lr_scheduler_states=False)
    full = run.engine._zero3_consolidated_16bit_state_dict if stage == 3 else run.engine.module.state_dict
    found = {fqn: t.numpy().copy() for fqn, t in (full() or {}).items() if run.kinds[fqn] == "parameter"}
    run.train(1)
    run.close()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_alone_are_a_warm_start(stage, checkpoint, tmp_path):
    made = checkpoint("fsdp2", "awkward", 3)

    def change(manifest: Manifest) -> Manifest:
        weights = {key: entry for key, entry in manifest.tensors.items() if key.slot == WEIGHT}
        return replace(manifest, tensors=weights, groups=(), extra={})

    notes = convert(made.checkpoint, tmp_path / "out", stage, 2, change)
    assert "parameter groups" in {note.what for note in notes}
    truth = Truth.load(made.root)
    expected = {fqn: t for fqn, t in truth.slot(WEIGHT).items() if truth.kinds[fqn] == "parameter"}
    assert_same_bits(expected, launch.pool(2).run(weights_alone, stage, str(tmp_path / "out"))[0])


# The files themselves, against those that DeepSpeed writes, and what its tools make of them


@pytest.mark.parametrize("kind", ["zero1-fp32", "zero2-bf16", "zero3-fp32-sub", "zero3-fp16"])
def test_files_are_those_of_deepspeed_itself(kind, checkpoint, tmp_path):
    native = checkpoint(kind, "awkward", 3).checkpoint
    convert(native, tmp_path / "out", int(kind[4]), 3)
    assert files_of(tmp_path / "out") == files_of(native) - {"zero_to_fp32.py", "zero_to_torch.py"}
    for name in sorted(files_of(native)):
        if name.endswith(".pt"):
            want, got = (opened(folder / name) for folder in (native, tmp_path / "out"))
            assert list(differences(want, got, name)) == []


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def opened(path: Path) -> dict[str, Any]:
    """A file of a checkpoint. What DeepSpeed leaves uninitialised in stage 3, the padding of masters and of frozen
    fragments, becomes zero."""
    found: dict[str, Any] = torch.load(path, weights_only=False)
    if found["ds_config"]["zero_optimization"]["stage"] == 3:
        rank = int(path.name.split("rank_")[1].split("_")[0])
        for name, fragment in (found.get("frozen_param_fragments") or {}).items():
            _clear_padding(fragment, [found["frozen_param_shapes"][name]], rank)
        model = path.with_name(path.name.removeprefix("bf16_").replace("optim", "model"))
        shapes = torch.load(model, weights_only=False)["param_shapes"]
        for flat, group in zip(found.get("optimizer_state_dict", {}).get("fp32_flat_groups", ()), shapes, strict=False):
            _clear_padding(flat.data, group.values(), rank)
    return found


def _clear_padding(vector: torch.Tensor, shapes: Iterable[torch.Size], rank: int) -> None:
    """Zero what a rank of three has after its part of each parameter."""
    start = 0
    for shape in shapes:
        share = -(-shape.numel() // 3)
        held = max(0, min(share, shape.numel() - rank * share))
        vector[start + held : start + share] = 0
        start += share


LEFT_OUT = {"param_alignment_paddings", "data_sampler", "random_ltd"}
"""Without the first a file loads whatever alignment the run has; the others are None in DeepSpeed's, and would stop a
run that has them."""


def differences(want: Any, got: Any, where: str) -> Iterator[str]:
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        same = want.shape == got.shape and want.dtype == got.dtype and _bits(want) == _bits(got)
        yield from [] if same else [where]
    elif isinstance(want, dict) and isinstance(got, dict) and type(want) is type(got):
        yield from (f"{where}.{name}" for name in want.keys() ^ got.keys() if name not in LEFT_OUT)
        for name in want.keys() & got.keys():
            yield from differences(want[name], got[name], f"{where}.{name}")
    elif isinstance(want, list | tuple) and type(want) is type(got) and len(want) == len(got):
        for position, pair in enumerate(zip(want, got, strict=True)):
            yield from differences(*pair, f"{where}.{position}")
    elif type(want).__name__.endswith("LossScaler") and type(want) is type(got):
        yield from differences(vars(want), vars(got), where)
    elif type(want) is not type(got) or want != got:
        yield f"{where}: {want!r} and {got!r}"


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("kind", ["zero2-fp32", "zero3-fp32"])
def test_zero_to_fp32_reads_what_we_write(kind, checkpoint, tmp_path):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    made = checkpoint(kind, "awkward", 2)
    convert(made.checkpoint, tmp_path / "out", int(kind[4]), 3)
    found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "out"))
    masters = Truth.load(made.root).slot(MASTER)
    assert_same_bits(masters, {fqn: found[fqn].numpy() for fqn in masters})


def test_ds_to_universal_reads_the_mappings_that_we_write(checkpoint, tmp_path):
    made = checkpoint("zero2-fp32", "lone", 2)
    convert(made.checkpoint, tmp_path / "out", 2, 3)
    universal.convert(tmp_path / "out", tmp_path / "universal")
    (tag,) = [path for path in (tmp_path / "universal").iterdir() if path.is_dir()]
    for (fqn, slot), expected in Truth.load(made.root).tensors.items():
        if name := {MASTER: "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}.get(slot):
            found = torch.load(tag / "zero" / fqn / f"{name}.pt", weights_only=False)["param"]
            assert same_bits(expected, found.numpy()), (fqn, slot)
