"""The ZeRO writer over manifests made by hand: what is where, what is noted, and a way back through our own reader.

Files are opened with torch itself. What DeepSpeed makes of them is judged in ``test_in_deepspeed.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import Layout, LazyFile
from ckpt_tools.core.manifest import MASTER, Kind, Manifest, ParamGroup, StateKey, TensorRef
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.options import ReadOptions, WriteOptions
from ckpt_tools.core.transforms import cast_weights
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError, UsageError
from ckpt_tools.formats.builtin import DeepSpeedFormat, ZeroFormat
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.wrappers import overlay_literals
from tests.formats.deepspeed.by_hand import SCALER, Checkpoint, loaded, notes_about, write
from tests.support.manifests import read_bytes
from tests.support.refusals import refusal_test

BF16 = np.dtype(ml_dtypes.bfloat16)
STEP = np.float32(4)


def floats(*shape: int, first: float = 0.0) -> np.ndarray:
    """fp32 values that are all different, and exact in 16 bits where they are few."""
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape) + np.float32(first)


def one(name: str = "a", num: int = 3, dtype: Any = np.float32) -> Checkpoint:
    return Checkpoint().weight(name, floats(num).astype(dtype))


def small() -> Checkpoint:
    """Two parameters with momentum, the second of one element."""
    found = Checkpoint().weight("a.weight", floats(3, 3)).weight("a.bias", floats(1, first=50))
    return found.add("a.weight", "momentum_buffer", floats(3, 3, first=100)).add(
        "a.bias", "momentum_buffer", floats(1, first=150)
    )


PARAMS = ("a.weight", "a.bias")


def layout_of(manifest: Manifest, stage: int, world_size: int = 2, tag: str | None = None) -> Layout:
    return ZeroFormat(stage).layout(manifest, WriteOptions(world_size=world_size, tag=tag))


def written(made: Checkpoint, manifest: Manifest, stage: int, world_size: int = 2) -> tuple[dict[str, bytes], Layout]:
    layout = layout_of(manifest, stage, world_size)
    return made.files(manifest, layout), layout


def model(files: Mapping[str, bytes], rank: int | None = None) -> dict[str, Any]:
    """Of the one model file of stages 1 and 2, or of a rank's."""
    return loaded(files, f"{'' if rank is None else f'zero_pp_rank_{rank}_'}mp_rank_00_model_states.pt")  # type: ignore[no-any-return]


def optim(files: Mapping[str, bytes], rank: int = 0, prefix: str = "") -> dict[str, Any]:
    return loaded(files, f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"]  # type: ignore[no-any-return]


def base(files: Mapping[str, bytes], rank: int = 0) -> dict[str, Any]:
    """torch's part of a rank's optimizer in stages 1 and 2."""
    return optim(files, rank)["base_optimizer_state"]  # type: ignore[no-any-return]


def config(**zero: Any) -> dict[str, Any]:
    return {"deepspeed": {"ds_config": {"zero_optimization": zero}}}


def numbers(tensor: torch.Tensor) -> list[float]:
    return tensor.float().tolist()


# Files


def test_a_sources_tag_is_kept_and_an_option_wins():
    manifest = small().manifest(PARAMS, extra={"deepspeed": {"tag": "best"}})
    assert layout_of(manifest, stage=1).files[0].path.startswith("best/")
    assert layout_of(manifest, stage=1, tag="mine").files[0].path.startswith("mine/")


def test_the_files_of_many_ranks_are_made_when_asked_for():
    files = layout_of(replace(small().manifest(PARAMS), world_size=200), stage=3, world_size=200).files
    assert len(files) == 401 and files[-1].path == "latest"
    assert all(isinstance(file, LazyFile) for file in files[:-1])
    assert [file.size_bytes for file in files] == [file.load_layout().offsets[-1] for file in files]


# Partitions


def test_a_sub_group_size_that_is_no_number_is_the_default():
    made = small()
    for size in ("auto", None, True, -1):
        files, _ = written(made, made.manifest(PARAMS, extra=config(sub_group_size=size)), stage=3)
        assert len(optim(files)["fp32_flat_groups"]) == 1


def test_a_0d_slot_is_one_for_its_group():
    made = small().add("a.weight", "step", STEP).number("a.bias", "count", 9)
    state = base(written(made, made.manifest(PARAMS), stage=1)[0], 1)["state"][0]
    assert state["step"].shape == () and state["step"].dtype is torch.float32 and state["step"].item() == 4
    assert type(state["count"]) is int and state["count"] == 9


def test_0d_slots_of_several_parameters_are_noted_unless_they_are_one():
    made = small().add("a.weight", "step", STEP).add("a.bias", "step", STEP)
    (note,) = notes_about(layout_of(made.manifest(PARAMS), stage=1), "step of parameter group 0")
    assert (note.outcome, note.count) == (Outcome.DEFAULTED, 2) and "the value of a.weight" in note.why
    made.tensors[StateKey("a.bias", "step")] = made.tensors[StateKey("a.weight", "step")]
    assert not notes_about(layout_of(made.manifest(PARAMS), stage=1), "step of")


def test_a_slot_of_another_shape_starts_its_group_afresh():
    made = small().add("a.weight", "row_var", floats(3)).weight("b", floats(2)).add("b", "momentum_buffer", floats(2))
    files, layout = written(made, made.manifest(PARAMS, "b"), stage=3)
    assert list(optim(files)["optimizer_state_dict"]["state"]) == [1]
    (note,) = notes_about(layout, "optimizer state of parameter group 0")
    assert note.outcome is Outcome.DROPPED and "row_var" in note.why
    assert (note.count, note.num_bytes) == (3, 36 + 4 + 12)


@pytest.mark.parametrize("dtype", [np.dtype(np.float64), BF16])
def test_moments_of_another_type_become_fp32_with_a_note_and_integers_stay(dtype):
    made = one().add("a", "exp_avg", floats(3).astype(dtype)).add("a", "code", np.uint8([7, 8, 9]))
    files, layout = written(made, made.manifest("a", extra={"lr_scheduler": {"last_epoch": 1}, "global_step": 1}), 1)
    state = base(files)["state"][0]
    assert state["exp_avg"].dtype is torch.float32 and state["code"].dtype is torch.uint8
    (note,) = [note for note in layout.notes if note.what != "lr_scheduler"]
    assert (note.outcome, note.what, note.why) == (Outcome.CAST, "exp_avg of 1 tensor", f"{dtype.name} to float32")


def test_torchs_adam_gets_the_option_that_deepspeeds_needs():
    made, options = one(), {"lr": 0.5, "betas": (0.9, 0.5), "eps": 1.0, "weight_decay": 0.0}
    foreign = made.manifest(ParamGroup(("a",), options))
    files, layout = written(made, foreign, stage=3)
    assert optim(files)["optimizer_state_dict"]["param_groups"][0] == {
        **options,
        "bias_correction": True,
        "params": [0],
    }
    assert notes_about(layout, "bias_correction")[0].outcome is Outcome.DEFAULTED
    files, _ = written(made, replace(foreign, format="zero1"), stage=3)
    assert "bias_correction" not in optim(files)["optimizer_state_dict"]["param_groups"][0]


# Weights and masters


def test_masters_of_16_bit_weights():
    """Widened ones are noted; in fp32 the masters are the weights."""
    made = one(num=2, dtype=BF16)
    layout = layout_of(made.manifest("a"), stage=2)
    assert notes_about(layout, "fp32 masters of 1 parameter")[0].outcome is Outcome.DEFAULTED
    made.add("a", MASTER, np.float32([0.1, 0.2]))
    files, _ = written(made, cast_weights(made.manifest("a"), DType.FLOAT32)[0], stage=1)
    assert numbers(model(files)["module"]["a"]) == numbers(torch.tensor([0.1, 0.2]))


def test_a_parameter_without_elements_is_listed_with_the_frozen_ones():
    made = small().weight("none", floats(0, 4)).add("none", "momentum_buffer", floats(0, 4))
    files, layout = written(made, made.manifest([*PARAMS, "none"]), stage=2)
    assert list(model(files)["param_shapes"][0]) == list(PARAMS)
    assert model(files)["frozen_param_shapes"] == {"none": torch.Size([0, 4])}
    assert notes_about(layout, "optimizer state of none")[0].outcome is Outcome.DROPPED


# Frozen parameters and buffers of sources that do not tell


def kinds(made: Checkpoint, *trained: str) -> tuple[list[str], list[str], list[Note]]:
    """Names taken for frozen parameters and for buffers, and the notes about it."""
    files, layout = written(made, made.manifest(trained), stage=3, world_size=1)
    return (
        list(model(files, 0)["frozen_param_shapes"]),
        model(files, 0)["buffer_names"],
        notes_about(layout, "taken as"),
    )


def test_a_source_that_cuts_parameters_tells_by_their_pieces():
    made = Checkpoint().weight("a.w", floats(4, 2), rows=[2]).weight("b.w", floats(4), rows=[2])
    made.weight("b.weight", floats(4)).weight("b.one", floats(1), rows=[1])
    assert kinds(made, "a.w") == (["b.w", "b.one"], ["b.weight"], [])
    made = Checkpoint().weight("a.w", floats(4)).weight("a.weight", floats(4).astype(np.float64))
    assert kinds(made, "a.w") == ([], ["a.weight"], []), "a tensor of another type is a buffer"


def test_a_source_that_keeps_some_parameters_whole_does_not_tell_by_their_pieces():
    """Experts are cut, and the head is whole though it is the embedding's other name."""
    made = Checkpoint().weight("experts.w", floats(4, 2), rows=[2]).weight("embed.weight", floats(4))
    made.weight("head.weight", floats(4)).weight("late.w", floats(4), rows=[2])
    frozen, buffers, notes = kinds(made, "experts.w", "embed.weight")
    assert (frozen, buffers) == (["head.weight", "late.w"], [])
    assert [note.count for note in notes] == [1]


def test_names_and_places_decide_where_nothing_else_does():
    made = Checkpoint().weight("bn.count", np.int64([3]), Kind.BUFFER)
    for name in ("bn.gain", "bn.weight", "bn.running_mean", "bn.late", "alone.table", "head"):
        made.weight(name, floats(2))
    frozen, buffers, notes = kinds(made, "head")
    assert frozen == ["bn.gain", "bn.weight", "alone.table"]
    assert sorted(buffers) == ["bn.count", "bn.late", "bn.running_mean"]
    assert [note.count for note in notes] == [3, 2]
    assert all(note.outcome is Outcome.DEFAULTED for note in notes)


# Everything else


def test_what_is_no_tensor_comes_along():
    made = small().add("rng", "extra", np.uint8([1, 2, 3]), Kind.EXTRA)
    own = {"skipped_steps": 2, "global_samples": 96, "clip_grad": 1.5, "module": {"a._extra_state": b"x"}}
    extra = {"global_step": 12, "lr_scheduler": {"last_epoch": 12}, "epoch": 3, "client_state": {"best": 0.5}}
    extra |= {"rng": {"cpu": TensorRef(StateKey("rng", "extra"))}, "deepspeed": own}
    files, _ = written(made, made.manifest(PARAMS, extra=extra), stage=2)
    content = model(files)
    assert (content["global_steps"], content["skipped_steps"], content["global_samples"]) == (12, 2, 96)
    assert (content["lr_scheduler"], content["epoch"], content["best"]) == ({"last_epoch": 12}, 3, 0.5)
    assert numbers(content["rng"]["cpu"]) == [1, 2, 3]
    assert content["module"]["a._extra_state"] == b"x"
    assert optim(files)["clip_grad"] == 1.5
    assert (content["dp_world_size"], content["mp_world_size"]) == (2, 1)


LOSS_SCALERS: dict[str, tuple[Any, dict[str, Any] | None, str, dict[str, Any], Outcome | None]] = {
    "kept": ("float16", SCALER, "DynamicLossScaler", {"cur_scale": 64, "scale_window": 3, "min_scale": 1}, None),
    "static": ("float16", {"cur_scale": 128.0, "dynamic": False}, "LossScaler", {"cur_scale": 128}, None),
    "made up": ("float16", None, "DynamicLossScaler", {"cur_scale": 2**16}, Outcome.DEFAULTED),
    "dropped": ("float32", SCALER, "LossScaler", {"cur_scale": 1.0, "dynamic": False}, Outcome.DROPPED),
}


@pytest.mark.parametrize("case", LOSS_SCALERS)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_scaler_is_that_of_the_source_in_fp16_alone(case, stage):
    dtype, given_, kind, values, outcome = LOSS_SCALERS[case]
    made = one(dtype=dtype)
    files, layout = written(made, made.manifest("a", extra={"loss_scaler": given_} if given_ else {}), stage)
    own = optim(files)
    assert type(own["loss_scaler"]).__name__ == kind and values.items() <= vars(own["loss_scaler"]).items()
    assert own["dynamic_loss_scale"] is (kind == "DynamicLossScaler")
    assert [note.outcome for note in notes_about(layout, "loss_scaler")] == ([outcome] if outcome else [])


def test_the_config_is_the_sources_for_another_stage_and_type():
    made = one(dtype=BF16)
    found = {"train_batch_size": 8, "fp16": {"enabled": True, "loss_scale": 2}, "zero_optimization": {"stage": 1}}
    files, _ = written(made, made.manifest("a", extra={"deepspeed": {"ds_config": found}}), stage=3)
    changed = {
        "fp16": {"enabled": False, "loss_scale": 2},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
    assert model(files, 1)["ds_config"] == found | changed
    made = small()
    assert model(written(made, made.manifest(PARAMS), 2)[0])["ds_config"] == {"zero_optimization": {"stage": 2}}


def refused_of(made: Checkpoint, *groups: Sequence[str], **more: Any) -> Any:
    return lambda _: layout_of(made.manifest(*groups, **more), stage=1, world_size=1)


test_refused = refusal_test(
    *((f"the tag {tag!r}", refused_of(small(), PARAMS, extra={"deepspeed": {"tag": tag}}), UsageError,
        "tag=") for tag in ("", ".", "..", "a/b", "latest", "a\\b", "a\nb")),
    ("several types", refused_of(one().weight("b", floats(3).astype(BF16)), "ab"), UnsupportedError,
        r"float32 \(a\), bfloat16 \(b\); choose one with dtype="),
    ("a type that DeepSpeed does not train in", refused_of(one(dtype="float64"), "a"), UnsupportedError, "dtype="),
    ("nothing to train", refused_of(one(num=0), "a"), UnsupportedError, "no trainable parameter"),
    ("no parameter", refused_of(small().add("gone", "momentum_buffer", floats(2)), ["gone"]), IncompleteError, "gone"),
    ("a parameter in two groups", refused_of(small(), PARAMS, ["a.bias"]), MalformedError, "two parameter groups"),
)  # fmt: skip


# And back


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[Checkpoint, Manifest]:
    """Groups of parameters with two slots, frozen parameters, a buffer and a tie."""
    made, first = Checkpoint(), 0
    shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
    groups = draw(st.lists(st.lists(shapes, min_size=1, max_size=4), min_size=1, max_size=3))
    dtype = draw(st.sampled_from([np.dtype(np.float32), BF16, np.dtype(np.float16)]))
    step = Checkpoint(made.store).add("", "step", STEP).tensors[StateKey("", "step")]
    named = [{f"g{g}.p{p}": shape for p, shape in enumerate(group)} for g, group in enumerate(groups)]
    for name, shape in [item for group in named for item in group.items()]:
        master = floats(*shape, first=first) / 7
        first += master.size
        made.weight(name, master.astype(dtype)).add(name, MASTER, master)
        made.add(name, "exp_avg", -master).tensors[StateKey(name, "step")] = step
    for number, shape in enumerate(draw(st.lists(shapes, max_size=3))):
        made.weight(f"frozen{number}", floats(*shape, first=1000).astype(dtype))
    made.weight("buffer", np.int64([1, 2]), Kind.BUFFER)
    extra = {"global_step": 3, "lr_scheduler": {"last_epoch": 3}}
    extra |= {"loss_scaler": SCALER} if dtype == np.float16 else {}
    return made, made.manifest(*map(list, named), source="zero2", aliases={"tied": "g0.p0"}, extra=extra)


def elements(made: MemoryStore, manifest: Manifest) -> dict[StateKey, tuple[tuple[int, ...], DType, Kind, bytes]]:
    """Shape, type, kind and bytes of every tensor."""
    store = overlay_literals(made, manifest.literals)
    return {key: (each.shape, each.dtype, each.kind, read_bytes(store, each)) for key, each in manifest.tensors.items()}


@settings(max_examples=30, deadline=None)
@given(checkpoints(), st.integers(1, 3), st.integers(1, 5), st.sampled_from([3, 10**9]))
def test_our_own_reader_finds_every_element(case, stage, world_size, sub_group_size):
    made, manifest = case
    extra = {**manifest.extra, **config(sub_group_size=sub_group_size)}
    manifest = replace(manifest, extra=extra, world_size=world_size)
    layout, store = layout_of(manifest, stage, world_size), MemoryStore()
    write(manifest, layout, made.store, store)
    found = DeepSpeedFormat().read(Source.open(store), ReadOptions())
    assert elements(store, found) == elements(made.store, manifest)
    assert (found.groups, found.aliases, found.world_size) == (manifest.groups, manifest.aliases, world_size)
    assert layout.notes == ()
