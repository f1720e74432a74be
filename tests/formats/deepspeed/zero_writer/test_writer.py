"""The ZeRO writer over manifests made by hand: what is where, what is noted, and a way back through our own reader.

Files are opened with torch itself. What DeepSpeed makes of them is judged in ``test_zero_writer_deepspeed.py``.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import Layout, LazyFile
from ckpt_tools.core.manifest import MASTER, WEIGHT, Kind, Manifest, ParamGroup, StateKey, TensorEntry, TensorRef
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.options import ReadOptions, WriteOptions
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.core.transforms import cast
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError, UsageError
from ckpt_tools.formats.deepspeed.format import DeepSpeedFormat, ZeroFormat
from ckpt_tools.planning.plan import make_plan
from ckpt_tools.stores.file_destination import StoreDestination
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.wrappers import Overlay
from ckpt_tools.transfer.execute import execute
from ckpt_tools.transfer.runners.threads import ThreadRunner
from tests.support.manifests import read_bytes

DTYPES = {
    np.dtype(np.float32): DType.FLOAT32,
    np.dtype(np.float64): DType.FLOAT64,
    np.dtype(np.float16): DType.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): DType.BFLOAT16,
    np.dtype(np.int64): DType.INT64,
    np.dtype(np.uint8): DType.UINT8,
}
BF16 = np.dtype(ml_dtypes.bfloat16)
OPTIONS = {"lr": 0.125, "momentum": 0.5}


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint being made by hand: tensors in a store in memory, each a file of its own."""

    store: MemoryStore = field(default_factory=MemoryStore)
    tensors: dict[StateKey, TensorEntry] = field(default_factory=dict)
    literals: dict[str, bytes] = field(default_factory=dict)

    def add(
        self, fqn: str, slot: str, value: np.ndarray, kind: Kind = Kind.STATE, *, rows: Sequence[int] | None = None
    ) -> Checkpoint:
        """A tensor, in one piece or cut before ``rows``."""
        file, dtype = f"{fqn}.{slot}", DTYPES[value.dtype]
        self.store.files[file] = bytearray(value.tobytes())
        bounds = [0, *rows, len(value)] if rows is not None else []
        width = value.nbytes // len(value) if bounds else 0
        shards = [
            Shard(_rows(value.shape, a, b), ByteRange(file, a * width, b * width)) for a, b in pairwise(bounds)
        ] or [Shard(Box.whole(value.shape), ByteRange(file, 0, value.nbytes))]
        table = ShardTable.build(value.shape, dtype, shards)
        self.tensors[StateKey(fqn, slot)] = TensorEntry(value.shape, dtype, kind, table)
        return self

    def weight(self, fqn: str, value: np.ndarray, kind: Kind = Kind.PARAMETER, **options: Any) -> Checkpoint:
        return self.add(fqn, WEIGHT, value, kind, **options)

    def number(self, fqn: str, slot: str, value: int) -> Checkpoint:
        """State that the source keeps as a plain number."""
        name = f"literal:{fqn}.{slot}"
        self.literals[name] = value.to_bytes(8, "little")
        table = ShardTable.build((), DType.INT64, [Shard(Box.whole(()), ByteRange(name, 0, 8))])
        self.tensors[StateKey(fqn, slot)] = TensorEntry((), DType.INT64, Kind.STATE, table)
        return self

    def manifest(self, *groups: Sequence[str], source: str = "dcp", **more: Any) -> Manifest:
        """Groups of these parameters, all with the same hyperparameters."""
        found = tuple(ParamGroup(tuple(params), OPTIONS) for params in groups)
        return Manifest(source, self.tensors, groups=found, literals=self.literals, **more)


def _rows(shape: tuple[int, ...], start: int, stop: int) -> Box:
    return Box((start, *(0,) * (len(shape) - 1)), (stop, *shape[1:]))


def floats(*shape: int, first: float = 0.0) -> np.ndarray:
    """fp32 values that are all different, and exact in 16 bits where they are few."""
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) + np.float32(first)


def small() -> Checkpoint:
    """Two parameters with momentum, the second of one element."""
    found = Checkpoint().weight("a.weight", floats(3, 3)).weight("a.bias", floats(1, first=50))
    return found.add("a.weight", "momentum_buffer", floats(3, 3, first=100)).add(
        "a.bias", "momentum_buffer", floats(1, first=150)
    )


PARAMS = ("a.weight", "a.bias")


def layout_of(manifest: Manifest, stage: int, world_size: int = 2, tag: str | None = None) -> Layout:
    return ZeroFormat(stage).layout(manifest, WriteOptions(world_size=world_size, tag=tag))


def write(made: Checkpoint, manifest: Manifest, layout: Layout) -> MemoryStore:
    target = MemoryStore()
    plan = make_plan(manifest, layout, memory_bytes=512 << 20, num_workers=1)
    source = Overlay(made.store, manifest.literals)
    execute(plan, source, StoreDestination(target), runner=ThreadRunner(1), on_bytes=lambda _: None)
    return target


def opened(store: MemoryStore) -> dict[str, Any]:
    """Every file by its name, as torch loads it."""
    return {path.rpartition("/")[2]: _opened(path, bytes(data)) for path, data in store.files.items()}


def _opened(path: str, data: bytes) -> Any:
    return data.decode() if path == "latest" else torch.load(io.BytesIO(data), weights_only=False)


def written(made: Checkpoint, manifest: Manifest, stage: int, world_size: int = 2) -> dict[str, Any]:
    return opened(write(made, manifest, layout_of(manifest, stage, world_size)))


def model(files: Mapping[str, Any], rank: int | None = None) -> dict[str, Any]:
    """Of the one model file of stages 1 and 2, or of a rank's."""
    prefix = "" if rank is None else f"zero_pp_rank_{rank}_"
    return files[f"{prefix}mp_rank_00_model_states.pt"]


def optim(files: Mapping[str, Any], rank: int, prefix: str = "") -> dict[str, Any]:
    return files[f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]


def notes_about(notes: Sequence[Note], what: str) -> list[Note]:
    return [note for note in notes if what in note.what]


def numbers(tensor: torch.Tensor) -> list[float]:
    return tensor.float().tolist()


# Files


def test_stages_1_and_2_have_one_model_file_and_latest_comes_last():
    layout = layout_of(small().manifest(PARAMS, step=7), stage=2)
    assert [file.path for file in layout.files] == [
        "global_step7/mp_rank_00_model_states.pt",
        "global_step7/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "global_step7/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "latest",
    ]


def test_stage_3_has_a_model_file_a_rank_and_bf16_marks_optimizer_files_alone():
    made = Checkpoint().weight("a", floats(4).astype(BF16))
    layout = layout_of(made.manifest(["a"]), stage=3, tag="best")
    assert [file.path for file in layout.files] == [
        "best/zero_pp_rank_0_mp_rank_00_model_states.pt",
        "best/zero_pp_rank_1_mp_rank_00_model_states.pt",
        "best/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "best/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "latest",
    ]


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "latest", "a\\b", "a\nb"])
def test_a_tag_that_is_no_folder_is_refused(tag):
    manifest = small().manifest(PARAMS, extra={"deepspeed": {"tag": tag}})
    with pytest.raises(UsageError, match="tag="):
        layout_of(manifest, stage=1)


def test_a_sources_tag_is_kept_and_an_option_wins():
    manifest = small().manifest(PARAMS, extra={"deepspeed": {"tag": "best"}})
    assert layout_of(manifest, stage=1).files[0].path.startswith("best/")
    assert layout_of(manifest, stage=1, tag="mine").files[0].path.startswith("mine/")


def test_the_files_of_many_ranks_are_made_when_asked_for():
    manifest = replace(small().manifest(PARAMS), world_size=200)
    files = layout_of(manifest, stage=3, world_size=200).files
    assert len(files) == 401 and files[-1].path == "latest"
    assert all(isinstance(file, LazyFile) for file in files[:-1])
    assert [file.size_bytes for file in files] == [file.load().offsets[-1] for file in files]


# Partitions


def test_stage_2_pads_moments_and_not_masters():
    made = small()
    files = written(made, made.manifest(PARAMS), stage=2)
    first, second = optim(files, 0), optim(files, 1)
    assert numbers(first["single_partition_of_fp32_groups"][0]) == [0, 1, 2, 3, 4, 5]
    assert numbers(second["single_partition_of_fp32_groups"][0]) == [6, 7, 8, 50]
    assert numbers(second["base_optimizer_state"]["state"][0]["momentum_buffer"]) == [106, 107, 108, 150, 0, 0]
    assert (first["group_paddings"], second["group_paddings"]) == ([0], [2])
    mapping = second["param_slice_mappings"][0]
    assert {name: (at.numel, at.start) for name, at in mapping.items()} == {"a.weight": (3, 0), "a.bias": (1, 3)}


def test_stage_3_pads_each_parameter():
    made = small()
    second = optim(written(made, made.manifest(PARAMS), stage=3), 1)
    assert numbers(second["fp32_flat_groups"][0]) == [5, 6, 7, 8, 0, 0]
    assert numbers(second["optimizer_state_dict"]["state"][0]["momentum_buffer"]) == [105, 106, 107, 108, 0, 0]
    assert second["optimizer_state_dict"]["param_groups"] == [{**OPTIONS, "params": [0]}]


def test_stage_3_cuts_groups_at_the_sub_group_size_of_the_sources_config():
    made = small()
    extra = {"deepspeed": {"ds_config": {"zero_optimization": {"stage": 2, "sub_group_size": 5.0}}}}
    files = written(made, made.manifest(PARAMS, extra=extra), stage=3)
    states = optim(files, 0)
    assert [numbers(flat) for flat in states["fp32_flat_groups"]] == [[0, 1, 2, 3, 4], [50]]
    assert states["optimizer_state_dict"]["param_groups"][0]["params"] == [0, 1]
    assert [list(shapes) for shapes in model(files, 0)["param_shapes"]] == [["a.weight"], ["a.bias"]]
    assert model(files, 0)["ds_config"]["zero_optimization"] == {"stage": 3, "sub_group_size": 5.0}


@pytest.mark.parametrize("size", ["auto", None, True, -1])
def test_a_sub_group_size_that_is_no_number_is_the_default(size):
    made = small()
    extra = {"deepspeed": {"ds_config": {"zero_optimization": {"sub_group_size": size}}}}
    assert len(optim(written(made, made.manifest(PARAMS, extra=extra), stage=3), 0)["fp32_flat_groups"]) == 1


def test_round_robin_deals_the_parameters_out_before_they_are_flattened():
    made = Checkpoint()
    for name, first in (("a", 0), ("b", 10), ("c", 20)):
        made.weight(name, floats(2, first=first))
    extra = {"deepspeed": {"ds_config": {"zero_optimization": {"round_robin_gradients": True}}}}
    files = written(made, made.manifest("abc", extra=extra), stage=1)
    assert numbers(optim(files, 0)["single_partition_of_fp32_groups"][0]) == [0, 1, 20, 21]
    assert list(model(files)["param_shapes"][0]) == ["a", "c", "b"]
    assert {name: at.start for name, at in optim(files, 0)["param_slice_mappings"][0].items()} == {"a": 0, "c": 2}


# Optimizer state


def test_a_0d_slot_is_one_for_its_group():
    made = small().add("a.weight", "step", np.float32([4]).reshape(())).number("a.bias", "count", 9)
    state = optim(written(made, made.manifest(PARAMS), stage=1), 1)["base_optimizer_state"]["state"][0]
    assert state["step"].shape == () and state["step"].dtype is torch.float32 and state["step"].item() == 4
    assert type(state["count"]) is int and state["count"] == 9


def test_the_step_of_a_0d_parameter_is_no_vector_and_its_moment_is():
    made = Checkpoint().weight("a", floats(1).reshape(())).add("a", "exp_avg", floats(1, first=7).reshape(()))
    made.add("a", "step", np.float32([4]).reshape(()))
    state = optim(written(made, made.manifest(["a"]), stage=2, world_size=1), 0)["base_optimizer_state"]["state"][0]
    assert state["step"].shape == () and numbers(state["exp_avg"]) == [7, 0]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_fresh_parameter_beside_others_gets_zeros_and_a_note(stage):
    made = small().weight("head", floats(2, first=30))
    layout = layout_of(manifest := made.manifest([*PARAMS, "head"]), stage, world_size=1)
    own = optim(opened(write(made, manifest, layout)), 0)
    state = (own["base_optimizer_state"] if stage == 2 else own["optimizer_state_dict"])["state"][0]
    assert numbers(state["momentum_buffer"])[9:12] == [150, 0, 0]
    assert numbers((own.get("single_partition_of_fp32_groups") or own["fp32_flat_groups"])[0])[9:12] == [50, 30, 31]
    (note,) = notes_about(layout.notes, "momentum_buffer of head")
    assert note.outcome is Outcome.DEFAULTED and note.num_bytes == 8


def test_0d_slots_of_several_parameters_are_noted_unless_they_are_one():
    one = np.float32([4]).reshape(())
    made = small().add("a.weight", "step", one).add("a.bias", "step", one)
    (note,) = notes_about(layout_of(made.manifest(PARAMS), stage=1).notes, "step of parameter group 0")
    assert (note.outcome, note.count) == (Outcome.DEFAULTED, 2) and "the value of a.weight" in note.why
    shared = StateKey("a.weight", "step")
    made.tensors[StateKey("a.bias", "step")] = made.tensors[shared]
    assert not notes_about(layout_of(made.manifest(PARAMS), stage=1).notes, "step of")


def test_a_group_without_state_has_none_and_a_note():
    made = small().weight("head", floats(2))
    layout = layout_of(manifest := made.manifest(PARAMS, ["head"]), stage=1)
    optimizer = optim(opened(write(made, manifest, layout)), 0)["base_optimizer_state"]
    assert list(optimizer["state"]) == [0] and len(optimizer["param_groups"]) == 2
    assert notes_about(layout.notes, "optimizer state of parameter group 1")[0].outcome is Outcome.MISSING


def test_a_slot_of_another_shape_starts_its_group_afresh():
    made = small().add("a.weight", "row_var", floats(3)).weight("b", floats(2))
    made.add("b", "momentum_buffer", floats(2))
    layout = layout_of(manifest := made.manifest(PARAMS, ["b"]), stage=3)
    optimizer = optim(opened(write(made, manifest, layout)), 0)["optimizer_state_dict"]
    assert list(optimizer["state"]) == [1]
    (note,) = notes_about(layout.notes, "optimizer state of parameter group 0")
    assert note.outcome is Outcome.DROPPED and "row_var" in note.why
    assert (note.count, note.num_bytes) == (3, 36 + 4 + 12)


def test_16_bit_moments_become_fp32_and_integers_stay():
    made = Checkpoint().weight("a", floats(3)).add("a", "exp_avg", floats(3).astype(BF16))
    made.add("a", "code", np.uint8([7, 8, 9]))
    state = optim(written(made, made.manifest(["a"]), stage=1), 0)["base_optimizer_state"]["state"][0]
    assert state["exp_avg"].dtype is torch.float32 and state["code"].dtype is torch.uint8


@pytest.mark.parametrize("dtype", [np.dtype(np.float64), np.dtype(BF16)])
def test_moments_of_another_type_are_noted_as_cast(dtype):
    made = Checkpoint().weight("a", floats(3)).add("a", "exp_avg", floats(3).astype(dtype))
    notes = layout_of(made.manifest(["a"], extra={"lr_scheduler": {"last_epoch": 1}, "global_step": 1}), stage=1).notes
    (note,) = [note for note in notes if note.what != "lr_scheduler"]
    assert (note.outcome, note.what, note.why) == (Outcome.CAST, "exp_avg of 1 tensor", f"{dtype.name} to float32")


def test_state_of_parameters_in_no_group_is_dropped_with_a_note():
    layout = layout_of(small().manifest(["a.weight"]), stage=1)
    assert notes_about(layout.notes, "optimizer state of a.bias")[0].outcome is Outcome.DROPPED


def test_torchs_adam_gets_the_option_that_deepspeeds_needs():
    made = Checkpoint().weight("a", floats(3))
    options = {"lr": 0.5, "betas": (0.9, 0.5), "eps": 1.0, "weight_decay": 0.0}
    groups = (ParamGroup(("a",), options),)
    foreign = replace(made.manifest(["a"]), groups=groups)
    layout = layout_of(foreign, stage=3)
    optimizer = optim(opened(write(made, foreign, layout)), 0)["optimizer_state_dict"]
    assert optimizer["param_groups"][0] == {**options, "bias_correction": True, "params": [0]}
    assert notes_about(layout.notes, "bias_correction")[0].outcome is Outcome.DEFAULTED
    native = replace(foreign, format="zero1")
    assert "bias_correction" not in optim(written(made, native, stage=3), 0)["optimizer_state_dict"]["param_groups"][0]


# Weights and masters


def test_masters_come_from_the_weights_as_they_are_stored():
    made = Checkpoint().weight("a", np.float32([1.0000001, -0.0]))
    manifest, _ = cast(made.manifest(["a"]), DType.BFLOAT16)
    layout = layout_of(manifest, stage=2, world_size=1)
    files = opened(write(made, manifest, layout))
    assert (
        optim(files, 0, "bf16_")["single_partition_of_fp32_groups"][0].numpy().tobytes()
        == np.float32([1.0000001, -0.0]).tobytes()
    )
    assert model(files)["module"]["a"].dtype is torch.bfloat16
    assert not notes_about(layout.notes, "masters")


def test_masters_widened_from_16_bits_are_noted():
    layout = layout_of(Checkpoint().weight("a", floats(3).astype(BF16)).manifest(["a"]), stage=2)
    assert notes_about(layout.notes, "fp32 masters of 1 parameter")[0].outcome is Outcome.DEFAULTED


def test_in_fp32_the_weights_are_the_masters():
    made = Checkpoint().weight("a", floats(2).astype(BF16)).add("a", MASTER, np.float32([0.1, 0.2]))
    manifest, _ = cast(made.manifest(["a"]), DType.FLOAT32)
    assert numbers(model(written(made, manifest, stage=1))["module"]["a"]) == numbers(torch.tensor([0.1, 0.2]))


def test_stage_3_has_empty_weights_whole_buffers_and_frozen_pieces():
    made = small().weight("f", floats(3, first=70)).weight("n", np.int64([5]), Kind.BUFFER)
    manifest = made.manifest(PARAMS, source="zero2", aliases={"tied": "a.weight"})
    files = written(made, manifest, stage=3)
    module = model(files, 1)["module"]
    assert {name: tuple(value.shape) for name, value in module.items()} == {
        **dict.fromkeys(("a.weight", "a.bias", "f", "tied"), (0,)),
        "n": (1,),
    }
    assert [numbers(model(files, rank)["frozen_param_fragments"]["f"]) for rank in (0, 1)] == [[70, 71], [72, 0]]
    assert model(files, 0)["frozen_param_shapes"] == {"f": torch.Size([3])}
    assert [model(files, rank)["shared_params"] for rank in (0, 1)] == [{"tied": "a.weight"}, {}]
    assert model(files, 1)["buffer_names"] == ["n"]


def test_stage_1_says_nothing_of_frozen_parameters_and_stage_2_does():
    made = small().weight("f", floats(3))
    manifest = made.manifest(PARAMS, source="zero1")
    one, two = (model(written(made, manifest, stage)) for stage in (1, 2))
    assert (one["frozen_param_shapes"], one["frozen_param_fragments"]) == (None, None)
    assert two["frozen_param_shapes"] == {"f": torch.Size([3])} and numbers(two["frozen_param_fragments"]["f"])[2] == 2
    assert numbers(one["module"]["f"]) == [0, 1, 2]


def test_a_parameter_without_elements_is_listed_with_the_frozen_ones():
    made = small().weight("none", floats(0, 4)).add("none", "momentum_buffer", floats(0, 4))
    layout = layout_of(manifest := made.manifest([*PARAMS, "none"]), stage=2)
    content = model(opened(write(made, manifest, layout)))
    assert list(content["param_shapes"][0]) == list(PARAMS)
    assert content["frozen_param_shapes"] == {"none": torch.Size([0, 4])}
    assert notes_about(layout.notes, "optimizer state of none")[0].outcome is Outcome.DROPPED


def test_a_group_of_empty_parameters_alone_is_left_out():
    made = small().weight("none", floats(0))
    layout = layout_of(manifest := made.manifest(["none"], PARAMS), stage=1)
    optimizer = optim(opened(write(made, manifest, layout)), 0)["base_optimizer_state"]
    assert [group["params"] for group in optimizer["param_groups"]] == [[0]] and list(optimizer["state"]) == [0]
    assert notes_about(layout.notes, "hyperparameters of parameter group 0")[0].outcome is Outcome.DROPPED


def test_weights_alone_are_one_group_without_hyperparameters():
    made = Checkpoint().weight("a", floats(3)).weight("b", floats(2)).weight("n", np.int64([1]), Kind.BUFFER)
    made.weight("table", np.float64([1])).weight("none", floats(0, 2))
    layout = layout_of(manifest := made.manifest(), stage=2)
    files = opened(write(made, manifest, layout))
    assert [list(shapes) for shapes in model(files)["param_shapes"]] == [["a", "b"]]
    assert model(files)["buffer_names"] == ["n", "table", "none"] and model(files)["frozen_param_fragments"] is None
    assert optim(files, 0)["base_optimizer_state"] == {"state": {}, "param_groups": [{"params": [0]}]}
    assert "load_optimizer_states=False" in notes_about(layout.notes, "parameter groups")[0].why


# Frozen parameters and buffers of sources that do not tell


def kinds(made: Checkpoint, *trained: str) -> tuple[list[str], list[str], list[Note]]:
    """Names taken for frozen parameters and for buffers, and the notes about it."""
    layout = layout_of(manifest := made.manifest(trained), stage=3, world_size=1)
    content = model(opened(write(made, manifest, layout)), 0)
    return list(content["frozen_param_shapes"]), content["buffer_names"], notes_about(layout.notes, "taken as")


def test_a_source_that_cuts_parameters_tells_by_their_pieces():
    made = Checkpoint().weight("a.w", floats(4, 2), rows=[2]).weight("b.w", floats(4), rows=[2])
    made.weight("b.weight", floats(4)).weight("b.one", floats(1), rows=[1])
    assert kinds(made, "a.w") == (["b.w", "b.one"], ["b.weight"], [])


def test_a_source_that_keeps_some_parameters_whole_does_not_tell_by_their_pieces():
    """Experts are cut, and the head is whole though it is the embedding's other name."""
    made = Checkpoint().weight("experts.w", floats(4, 2), rows=[2]).weight("embed.weight", floats(4))
    made.weight("head.weight", floats(4)).weight("late.w", floats(4), rows=[2])
    frozen, buffers, notes = kinds(made, "experts.w", "embed.weight")
    assert (frozen, buffers) == (["head.weight", "late.w"], [])
    assert [note.count for note in notes] == [1]


def test_a_tensor_of_another_type_is_a_buffer():
    made = Checkpoint().weight("a.w", floats(4)).weight("a.weight", floats(4).astype(np.float64))
    assert kinds(made, "a.w") == ([], ["a.weight"], [])


def test_names_and_places_decide_where_nothing_else_does():
    made = Checkpoint().weight("bn.gain", floats(2)).weight("bn.weight", floats(2))
    made.weight("bn.running_mean", floats(2)).weight("bn.count", np.int64([3]), Kind.BUFFER)
    made.weight("bn.late", floats(2)).weight("alone.table", floats(2)).weight("head", floats(2))
    frozen, buffers, notes = kinds(made, "head")
    assert frozen == ["bn.gain", "bn.weight", "alone.table"]
    assert buffers == ["bn.running_mean", "bn.count", "bn.late"]
    assert [note.count for note in notes] == [3, 2]
    assert all(note.outcome is Outcome.DEFAULTED for note in notes)


def test_a_buffer_is_not_cast_with_the_weights():
    made = Checkpoint().weight("a.weight", floats(2)).weight("a.running", floats(2))
    manifest, _ = cast(made.manifest(["a.weight"]), DType.BFLOAT16)
    module = model(written(made, manifest, stage=2))["module"]
    assert (module["a.weight"].dtype, module["a.running"].dtype) == (torch.bfloat16, torch.float32)


# Everything else


def test_what_is_no_tensor_comes_along():
    made = small().add("rng", "extra", np.uint8([1, 2, 3]), Kind.EXTRA)
    extra = {
        "global_step": 12,
        "lr_scheduler": {"last_epoch": 12},
        "epoch": 3,
        "rng": {"cpu": TensorRef(StateKey("rng", "extra"))},
        "client_state": {"best": 0.5},
        "deepspeed": {"skipped_steps": 2, "global_samples": 96, "clip_grad": 1.5, "module": {"a._extra_state": b"x"}},
    }
    files = written(made, made.manifest(PARAMS, extra=extra), stage=2)
    content = model(files)
    assert (content["global_steps"], content["skipped_steps"], content["global_samples"]) == (12, 2, 96)
    assert (content["lr_scheduler"], content["epoch"], content["best"]) == ({"last_epoch": 12}, 3, 0.5)
    assert numbers(content["rng"]["cpu"]) == [1, 2, 3]
    assert content["module"]["a._extra_state"] == b"x"
    assert optim(files, 0)["clip_grad"] == 1.5
    assert (content["dp_world_size"], content["mp_world_size"]) == (2, 1)


def test_what_the_source_does_not_say_is_left_to_deepspeed_or_noted():
    made = small()
    layout = layout_of(manifest := made.manifest(PARAMS), stage=1)
    files = opened(write(made, manifest, layout))
    assert "global_samples" not in model(files) and "clip_grad" not in optim(files, 0)
    assert model(files)["global_steps"] == 0 and files["latest"] == "global_step0"
    assert {note.what for note in layout.notes} == {"global_step", "lr_scheduler"}


def test_client_state_does_not_replace_deepspeeds_own_entries():
    made = small()
    layout = layout_of(manifest := made.manifest(PARAMS, extra={"module": 5, "global_step": 1}), stage=1)
    assert set(model(opened(write(made, manifest, layout)))["module"]) == set(PARAMS)
    assert notes_about(layout.notes, "module")[0].outcome is Outcome.DROPPED


SCALER = {"cur_scale": 64.0, "dynamic": True, "scale_window": 3}


def test_a_loss_scaler_is_kept_in_fp16():
    made = Checkpoint().weight("a", floats(3).astype(np.float16))
    layout = layout_of(manifest := made.manifest(["a"], extra={"loss_scaler": SCALER}), stage=3)
    own = optim(opened(write(made, manifest, layout)), 0)
    assert type(own["loss_scaler"]).__name__ == "DynamicLossScaler" and own["dynamic_loss_scale"] is True
    assert (own["loss_scaler"].cur_scale, own["loss_scaler"].scale_window, own["loss_scaler"].min_scale) == (64, 3, 1)
    assert not notes_about(layout.notes, "loss_scaler")


def test_a_loss_scaler_is_made_up_in_fp16_and_dropped_elsewhere():
    made = Checkpoint().weight("a", floats(3).astype(np.float16)).weight("b", floats(3))
    fp16 = layout_of(half := made.manifest(["a"]), stage=2)
    assert optim(opened(write(made, half, fp16)), 0)["loss_scaler"].cur_scale == 2**16
    assert notes_about(fp16.notes, "loss_scaler")[0].outcome is Outcome.DEFAULTED
    fp32 = layout_of(full := made.manifest(["b"], extra={"loss_scaler": SCALER}), stage=2)
    assert vars(optim(opened(write(made, full, fp32)), 0)["loss_scaler"]) == {"cur_scale": 1.0, "dynamic": False}
    assert notes_about(fp32.notes, "loss_scaler")[0].outcome is Outcome.DROPPED


def test_a_static_loss_scaler_stays_static():
    made = Checkpoint().weight("a", floats(3).astype(np.float16))
    extra = {"loss_scaler": {"cur_scale": 128.0, "dynamic": False}}
    own = optim(written(made, made.manifest(["a"], extra=extra), stage=1), 0)
    assert type(own["loss_scaler"]).__name__ == "LossScaler" and own["loss_scaler"].cur_scale == 128
    assert own["dynamic_loss_scale"] is False


def test_the_config_is_the_sources_for_another_stage_and_type():
    made = Checkpoint().weight("a", floats(3).astype(BF16))
    config = {"train_batch_size": 8, "fp16": {"enabled": True, "loss_scale": 2}, "zero_optimization": {"stage": 1}}
    files = written(made, made.manifest(["a"], extra={"deepspeed": {"ds_config": config}}), stage=3)
    assert model(files, 1)["ds_config"] == {
        "train_batch_size": 8,
        "fp16": {"enabled": False, "loss_scale": 2},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }


def test_without_a_config_it_says_stage_and_type_and_nothing_else():
    made = small()
    assert model(written(made, made.manifest(PARAMS), stage=2))["ds_config"] == {"zero_optimization": {"stage": 2}}


# Refusals


def test_weights_of_several_types_are_refused():
    made = Checkpoint().weight("a", floats(3)).weight("b", floats(3).astype(BF16))
    with pytest.raises(UnsupportedError, match=r"float32 \(a\), bfloat16 \(b\); choose one with dtype="):
        layout_of(made.manifest("ab"), stage=1)


def test_weights_of_a_type_that_deepspeed_does_not_train_in_are_refused():
    with pytest.raises(UnsupportedError, match="dtype="):
        layout_of(Checkpoint().weight("a", floats(3).astype(np.float64)).manifest("a"), stage=1)


def test_nothing_to_train_is_refused():
    with pytest.raises(UnsupportedError, match="no trainable parameter"):
        layout_of(Checkpoint().weight("a", floats(0)).manifest("a"), stage=1, world_size=1)


def test_a_parameter_of_which_only_the_state_is_there_is_refused():
    made = small().add("gone", "momentum_buffer", floats(2))
    with pytest.raises(IncompleteError, match="gone"):
        layout_of(made.manifest([*PARAMS, "gone"]), stage=1)


def test_a_parameter_in_two_groups_is_refused():
    with pytest.raises(MalformedError, match="two parameter groups"):
        layout_of(small().manifest(PARAMS, ["a.bias"]), stage=1)


# And back


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[Checkpoint, Manifest]:
    """Groups of parameters with two slots, frozen parameters, a buffer and a tie."""
    made, first = Checkpoint(), 0
    shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
    groups = draw(st.lists(st.lists(shapes, min_size=1, max_size=4), min_size=1, max_size=3))
    dtype = draw(st.sampled_from([np.dtype(np.float32), BF16, np.dtype(np.float16)]))
    step = Checkpoint(made.store).add("", "step", np.float32([3]).reshape(())).tensors[StateKey("", "step")]
    names: list[list[str]] = [[f"g{g}.p{p}" for p in range(len(group))] for g, group in enumerate(groups)]
    for name, shape in zip([n for group in names for n in group], [s for group in groups for s in group], strict=True):
        master = floats(*shape, first=first) / 7
        first += master.size
        weight = master.astype(dtype)
        made.weight(name, weight).add(name, MASTER, master)
        made.add(name, "exp_avg", -master).tensors[StateKey(name, "step")] = step
    for number, shape in enumerate(draw(st.lists(shapes, max_size=3))):
        made.weight(f"frozen{number}", floats(*shape, first=1000).astype(dtype))
    made.weight("buffer", np.int64([1, 2]), Kind.BUFFER)
    extra = {"global_step": 3, "lr_scheduler": {"last_epoch": 3}}
    extra |= {"loss_scaler": SCALER} if dtype == np.float16 else {}
    return made, made.manifest(*names, source="zero2", aliases={"tied": names[0][0]}, extra=extra)


def elements(made: MemoryStore, manifest: Manifest) -> dict[StateKey, tuple[tuple[int, ...], DType, bytes]]:
    """Shape, type and bytes of every tensor."""
    store = Overlay(made, manifest.literals)
    return {key: (each.shape, each.dtype, read_bytes(store, each)) for key, each in manifest.tensors.items()}


@settings(max_examples=60, deadline=None)
@given(checkpoints(), st.integers(1, 3), st.integers(1, 5), st.sampled_from([3, 10**9]))
def test_our_own_reader_finds_every_element(case, stage, world_size, sub_group_size):
    made, manifest = case
    config = {"zero_optimization": {"sub_group_size": sub_group_size}}
    extra = {**manifest.extra, "deepspeed": {"ds_config": config}}
    manifest = replace(manifest, extra=extra, world_size=world_size)
    layout = layout_of(manifest, stage, world_size)
    store = write(made, manifest, layout)
    found = DeepSpeedFormat().read(Source.open(store), ReadOptions())
    assert elements(store, found) == elements(made.store, manifest)
    assert {key: entry.kind for key, entry in found.tensors.items()} == {
        key: entry.kind for key, entry in manifest.tensors.items()
    }
    assert (found.groups, found.aliases, found.world_size) == (manifest.groups, manifest.aliases, world_size)
    assert layout.notes == ()
