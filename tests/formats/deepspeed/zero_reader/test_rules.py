"""DeepSpeed checkpoints by hand: partitions of any shape, and one test for each rule that a damaged one breaks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import MASTER, Kind, Manifest, StateKey, TensorRef
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import (
    CkptError,
    IncompleteError,
    MalformedError,
    SourceNotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_tools.formats.builtin import DeepSpeedFormat
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.wrappers import overlay_literals
from tests.formats.deepspeed.zero_files import (
    MODEL,
    TAG,
    Files,
    build,
    moments_of,
    optim,
    own,
    rank_model,
    store_of,
    values_of,
)
from tests.support.manifests import elements
from tests.support.refusals import refusal_test

GROUPS = [{"a.weight": (5, 3), "a.bias": (5,)}, {"b": (1,)}]
FROZEN = {"f": (2, 3)}


def read(files: Files, tag: str | None = None) -> Manifest:
    return read_store(store_of(files), tag)


def read_store(store: MemoryStore, tag: str | None = None) -> Manifest:
    return DeepSpeedFormat().read(Source.open(store), ReadOptions(tag=tag))


def opened(files: Files) -> tuple[Manifest, Callable[[str, str], np.ndarray]]:
    store = store_of(files)
    manifest = read_store(store)
    whole = overlay_literals(store, manifest.literals)
    return manifest, lambda name, slot="weight": elements(whole, manifest.tensors[StateKey(name, slot)])


def assert_counts(files: Files, groups: list[Any], frozen: Any) -> None:
    _, found = opened(files)
    for slot, wanted in ((MASTER, values_of(groups)), ("exp_avg", moments_of(groups))):
        assert all(np.array_equal(found(name, slot), tensor.numpy()) for name, tensor in wanted.items())
    for name, tensor in values_of([*groups, frozen]).items():
        assert np.array_equal(found(name).astype(np.float32), tensor.bfloat16().float().numpy())


SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)


@given(
    stage=st.sampled_from([1, 2, 3]),
    world_size=st.integers(1, 6),
    sizes=st.lists(st.lists(SHAPES, min_size=1, max_size=4), min_size=1, max_size=3),
    frozen=st.lists(SHAPES, max_size=2),
)
@settings(max_examples=30, deadline=None)
def test_every_element_is_found_whatever_the_shapes(stage, world_size, sizes, frozen):
    groups = [{f"g{i}.p{j}": shape for j, shape in enumerate(group)} for i, group in enumerate(sizes)]
    fixed = {f"f{i}": shape for i, shape in enumerate(frozen)}
    assert_counts(build(stage, world_size, groups, fixed), groups, fixed)


def straddling(files: Files) -> None:
    """A parameter of stage 3 lies in several sub-groups."""
    for rank in range(2):
        state = own(files, rank)
        inner = state["optimizer_state_dict"]
        whole = [torch.cat(state["fp32_flat_groups"]), torch.cat([s["exp_avg"] for s in inner["state"].values()])]
        state["fp32_flat_groups"] = list(whole[0].split(3))
        inner["state"] = {i: {"exp_avg": m, "step": torch.tensor(7.0)} for i, m in enumerate(whole[1].split(3))}
        inner["param_groups"] = [{"params": list(range(len(inner["state"])))}]


def one_dictionary(files: Files) -> None:
    (files[MODEL]["param_shapes"],) = files[MODEL]["param_shapes"]


def old_names(files: Files) -> None:
    for rank in range(2):
        files[optim(rank).replace("_optim", "optim")] = files.pop(optim(rank))


@pytest.mark.parametrize(
    ("stage", "groups", "change"), [(3, GROUPS, straddling), (2, GROUPS[:1], one_dictionary), (2, GROUPS, old_names)]
)
def test_other_forms_hold_the_same(stage, groups, change):
    files = build(stage, 2, groups)
    change(files)
    assert_counts(files, groups, {})


def test_forms_of_the_optimizer():
    """Slots of some groups only, Adagrad's one group of all partitions, and names, which are no hyperparameters."""
    files = build(2, 2, GROUPS)
    for rank in range(2):
        own(files, rank)["base_optimizer_state"]["state"][1] = {"momentum_buffer": None}
        given = [{"lr": 0.5, "params": [0, 1], "param_names": ["a.weight", "a.bias", "b"]}]
        own(files, rank)["base_optimizer_state"]["param_groups"] = given
    manifest = read(files)
    assert {key.slot for key in manifest.tensors if key.fqn == "b"} == {"weight", "master"}
    (group,) = manifest.groups
    assert (group.params, group.options) == (("a.weight", "a.bias", "b"), {"lr": 0.5})


@pytest.mark.parametrize("stage", [2, 3])
def test_empty_parameters_have_a_weight_and_nothing_else(stage):
    """Among the frozen ones, or in the groups, where older versions of DeepSpeed have them."""
    empty = {"empty": (0, 4), "none": (0,)}
    for files in (
        build(stage, 2, [{"a": (3,)}], empty),
        build(stage, 2, [{"a": (3,), "empty": (0, 4)}, {"none": (0,)}]),
    ):
        found = {key: entry.shape for key, entry in read(files).tensors.items() if key.fqn in empty}
        assert found == {StateKey(name): shape for name, shape in empty.items()}


def test_python_steps_become_literals_of_their_own_width():
    files = build(2, 2, GROUPS)
    for rank in range(2):
        own(files, rank)["base_optimizer_state"]["state"][0]["step"] = 12
        own(files, rank)["base_optimizer_state"]["state"][1]["step"] = 12.5
    manifest, found = opened(files)
    step, other = (manifest.tensors[StateKey(name, "step")] for name in ("a.bias", "b"))
    assert (step.shape, step.dtype, other.dtype) == ((), DType.INT64, DType.FLOAT64)
    assert (found("a.bias", "step"), found("b", "step")) == (12, 12.5)


def test_a_step_among_the_hyperparameters_is_every_members_step():
    files = build(3, 2, GROUPS)
    for rank in range(2):
        for state in own(files, rank)["optimizer_state_dict"]["state"].values():
            del state["step"]
    own(files)["optimizer_state_dict"]["param_groups"][0]["step"] = 4
    manifest, found = opened(files)
    assert found("a.weight", "step") == 4
    assert StateKey("b", "step") not in manifest.tensors
    assert manifest.groups[0].options["step"] == 4


def test_state_that_is_not_cut_like_the_masters_stays_with_its_rank():
    files = build(2, 2, GROUPS)
    for rank in range(2):
        own(files, rank)["base_optimizer_state"]["state"][0] |= {"absmax": torch.tensor([rank + 0.5]), "kind": "blocks"}
    manifest, found = opened(files)
    kept = manifest.extra["deepspeed"]["partition_state"]
    assert [kept[rank][0]["kind"] for rank in (0, 1)] == ["blocks", "blocks"]
    refs = [kept[rank][0]["absmax"] for rank in (0, 1)]
    assert [found(ref.key.fqn, ref.key.slot).tolist() for ref in refs] == [[0.5], [1.5]]
    assert all(manifest.tensors[ref.key].kind is Kind.EXTRA for ref in refs)


def tied(stage: int) -> Files:
    files = build(stage, 2, [{"embed": (4, 3)}, {"b": (2,)}])
    for path in [path for path in files if path.endswith("model_states.pt")]:
        files[path]["module"]["head"] = files[path]["module"]["embed"]
    return files


def test_views_of_the_same_elements_are_tied():
    """Also where the alias comes before its owner in the model."""
    files = tied(2)
    assert read(files).aliases == {"head": "embed"}
    files[MODEL]["module"].move_to_end("embed")
    assert read(files).aliases == {"head": "embed"}


def test_tensors_at_one_address_are_not_tied_by_that_alone():
    """Two empty ones, or a view of another shape: DeepSpeed takes them for ties."""
    files = build(1, 2, [{"a": (4,)}], {"empty": (0, 2), "none": (0, 2)})
    module = files[MODEL]["module"]
    module["part"] = module["a"][:2]
    files[MODEL]["shared_params"] = {"none": "empty", "part": "a"}
    assert not read(files).aliases


def test_buffers_that_share_elements_stay_apart():
    files = build(1, 1, GROUPS)
    files[MODEL]["module"]["again"] = files[MODEL]["module"]["count"]
    files[MODEL]["buffer_names"].append("again")
    manifest = read(files)
    assert not manifest.aliases
    assert manifest.tensors[StateKey("again")].kind is Kind.BUFFER


@pytest.mark.parametrize("is_excluded", [True, False])
def test_weights_that_the_saver_left_out_are_mentioned(is_excluded):
    files = build(2, 2, GROUPS)
    if is_excluded:
        files[MODEL] |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
    assert any("exclude_frozen_parameters" in note.why for note in read(files).notes) is is_excluded


def test_module_state_that_is_no_tensor_is_kept():
    files = build(1, 1, GROUPS)
    files[MODEL]["module"]["norm._extra_state"] = {"amax": torch.tensor([2.5])}
    manifest, found = opened(files)
    ref = manifest.extra["deepspeed"]["module"]["norm._extra_state"]["amax"]
    assert found(ref.key.fqn, ref.key.slot) == 2.5


def test_tensors_of_the_client_state_become_tensors_of_the_manifest():
    shared = [torch.tensor([1.5])]
    files = build(1, 1, GROUPS)
    files[MODEL] |= {"rng": {"cpu": torch.arange(3), 1: shared, "1": shared}, "epoch": 3}
    manifest, found = opened(files)
    state = manifest.extra["client_state"]
    assert state["epoch"] == 3
    assert isinstance(state["rng"]["cpu"], TensorRef) and state["rng"][1] is state["rng"]["1"]
    key = state["rng"]["cpu"].key
    assert (manifest.tensors[key].kind, found(key.fqn, key.slot).tolist()) == (Kind.EXTRA, [0, 1, 2])


Change = Callable[[Files], Any]


def drop(*paths: str) -> Change:
    return lambda files: [files.pop(path) for path in paths]


def add(path: str, content: Any = b"") -> Change:
    return lambda files: files.update({path: content})


def in_model(**values: Any) -> Change:
    return lambda files: [content.update(values) for path, content in files.items() if path.endswith("model_states.pt")]


def in_optim(rank: int = 0, **values: Any) -> Change:
    return lambda files: own(files, rank).update(values)


def of_module(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda files: [change(content["module"]) for path, content in files.items() if "model_states" in path]


def of_torch(change: Callable[[dict[str, Any]], Any], rank: int = 0) -> Change:
    return lambda files: change(own(files, rank)["base_optimizer_state"])


def of_state(change: Callable[[dict[str, Any]], Any], rank: int = 0) -> Change:
    return of_torch(lambda optimizer: change(optimizer["state"][0]), rank)


def masters(rank: int, change: Callable[[list[torch.Tensor]], Any]) -> Change:
    def apply(files: Files) -> None:
        state = own(files, rank)
        change(state["fp32_flat_groups" if state["zero_stage"] == 3 else "single_partition_of_fp32_groups"])

    return apply


def fragment(rank: int, change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda files: change(files[rank_model(rank)]["frozen_param_fragments"])


def reshaped(shape: tuple[int, ...]) -> Change:
    """``a.weight`` of another shape, in param_shapes and in module."""

    def apply(files: Files) -> None:
        for path, content in files.items():
            if path.endswith("model_states.pt"):
                content["param_shapes"][0]["a.weight"] = torch.Size(shape)
                if content["module"]["a.weight"].numel():
                    content["module"]["a.weight"] = torch.ones(shape)

    return apply


def shorter(tensors: list[torch.Tensor]) -> None:
    tensors[0] = tensors[0][:-1].clone()


def longer(tensors: list[torch.Tensor]) -> None:
    tensors[0] = torch.cat([tensors[0], tensors[0][:1]])


def half(tensors: list[torch.Tensor]) -> None:
    tensors[0] = tensors[0].half()


MISSING, WRONG, OTHER = IncompleteError, MalformedError, UnsupportedError
RULES: list[tuple[str, int, Change, type[CkptError], str]] = [
    ("no optimizer files", 2, drop(*map(optim, range(3))), MISSING, "no .*_optim_states"),
    ("first rank missing", 2, drop(optim(0)), MISSING, optim(0)),
    ("middle rank missing", 2, drop(optim(1)), MISSING, optim(1)),
    ("last rank missing", 2, drop(optim(2)), MISSING, optim(2)),
    ("a rank too many", 2, add(optim(3)), WRONG, "of 3 ranks.*another"),
    ("no model file", 2, drop(MODEL), MISSING, MODEL),
    ("no model file of a stage 3 rank", 3, drop(rank_model(1)), MISSING, rank_model(1)),
    ("no model file of the last stage 3 rank", 3, drop(rank_model(2)), MISSING, rank_model(2)),
    ("two files of one rank", 2, add(f"{TAG}/bf16_" + optim(1).split("/")[1]), WRONG, "are both of rank"),
    ("a file cut short", 2, lambda f: f.update({optim(2): bytes(store_of(f).files[optim(2)][:-99])}), WRONG, optim(2)),
    ("no dictionary", 2, add(optim(1), [1, 2]), WRONG, "does not contain a dictionary"),
    ("latest names no tag", 2, add("latest", "global_step8"), MISSING, "'global_step8'.*global_step7"),
    ("latest leads outside", 2, add("latest", "../other"), UnsafeError, "outside"),
    ("latest is empty", 2, add("latest", ""), MISSING, "empty"),
    ("latest is no text", 2, add("latest", b"\xff\xfe"), WRONG, "not text"),
    ("latest is too long", 2, add("latest", "x" * 5000), WRONG, "5,000 bytes"),
    # Kinds of parallelism.
    ("tensor-parallel names", 2, add(f"{TAG}/mp_rank_01_model_states.pt"), WRONG, "mp_rank_01_model_states"),
    ("pipeline names", 2, add(f"{TAG}/layer_00-model_states.pt"), WRONG, "it holds a model, but"),
    ("expert names", 2, add(f"{TAG}/layer_0_expert_1_mp_rank_00_model_states.pt"), OTHER, "experts"),
    ("expert optimizer", 2, add(f"{TAG}/expp_rank_0_mp_rank_00_optim_states.pt"), WRONG, "without ZeRO"),
    ("NVMe", 3, add(f"{TAG}/offloaded_tensors/rank0/1.tensor.swp"), OTHER, "NVMe"),
    ("mp_world_size", 2, in_model(mp_world_size=2), MISSING, "mp_rank_01 is missing"),
    ("pp_degree", 2, in_model(checkpoint_parallel_dimensions={"pp_degree": 2}), OTHER, "pipeline"),
    ("AutoEP layers", 2, in_model(ds_autoep_layers=[{}]), WRONG, "ds_autoep_layers"),
    ("older AutoEP layers", 2, in_model(autoep_layers=[{}]), OTHER, "AutoEP"),
    ("AutoEP partitions", 3, in_optim(ds_zero_partition_groups=[{}]), OTHER, "AutoEP"),
    ("expert partitions", 2, in_optim(partition_count=[3, 1]), MISSING, "no files of experts"),
    # What ranks say of themselves.
    ("no zero state", 2, lambda f: own(f).clear(), OTHER, "does not contain ZeRO"),
    ("stage 0", 2, in_optim(zero_stage=0), OTHER, "stage is 0"),
    ("saved without ZeRO", 2, in_model(param_shapes=None), OTHER, "stage 0"),
    ("older than param_shapes", 2, lambda f: f[MODEL].pop("param_shapes"), OTHER, "older than"),
    ("another stage on a rank", 2, in_optim(1, zero_stage=1), WRONG, "stage is 1.*rank 0 is 2"),
    ("another world size on a rank", 2, in_optim(1, partition_count=[2, 2]), WRONG, "partition_counts"),
    ("dp_world_size", 2, in_model(dp_world_size=4), WRONG, "dp_world_size is 4"),
    ("no partition_count", 2, in_optim(partition_count=None), WRONG, "partition_count"),
    ("no optimizer dictionary", 2, in_optim(base_optimizer_state=None), WRONG, "base_optimizer_state"),
    ("no masters", 2, lambda f: own(f).pop("single_partition_of_fp32_groups"), WRONG, "single_partition"),
    ("paddings", 2, in_optim(group_paddings=[1]), WRONG, "group_paddings"),
    ("alignment paddings", 2, in_optim(param_alignment_paddings=[[0]]), WRONG, "param_alignment_paddings"),
    # Shapes against partitions.
    ("fewer groups than shapes", 2, in_model(param_shapes=[{"a.weight": (5, 3)}]), WRONG, "2 groups"),
    ("shapes too large", 2, reshaped((9, 9)), WRONG, "3 partitions of 8 elements.*86"),
    ("shapes too small", 2, reshaped((2, 3)), WRONG, "3 partitions of 8 elements.*11"),
    ("stage 3 shapes", 3, reshaped((9, 9)), WRONG, "8 elements.*states 30"),
    ("a master too short", 2, masters(1, shorter), WRONG, "7 elements instead of 8"),
    ("the first master too short", 2, masters(0, shorter), WRONG, "7 elements instead of 8"),
    ("a master too long", 2, masters(2, longer), WRONG, "5 elements instead of 4"),
    ("a master of another type", 2, masters(1, half), WRONG, "float16.*float32"),
    ("a master of two dims", 2, masters(1, lambda m: m.append(torch.ones(2, 2))), WRONG, "flat"),
    ("a master too many", 2, masters(1, lambda m: m.append(torch.ones(2))), WRONG, "partitions"),
    ("a stage 3 master too short", 3, masters(1, shorter), WRONG, r"\[6, 1\].*\[7, 1\]"),
    ("a stage 3 master missing", 3, masters(0, lambda m: m.pop()), WRONG, "partitions"),
    # Slots.
    ("a slot of one rank missing", 2, of_state(lambda s: s.pop("exp_avg"), 1), MISSING, "exp_avg is missing"),
    ("a short slot", 2, of_state(lambda s: s.update(exp_avg=s["exp_avg"][:3] + 0), 1), MISSING, "exp_avg is"),
    ("a slot of another type", 2, of_state(lambda s: s.update(exp_avg=s["exp_avg"].half()), 1), WRONG,
        "its exp_avg is float16"),
    ("a slot called master", 2, of_state(lambda s: s.update(master=s["exp_avg"])), OTHER, "'master'"),
    ("a step of 65 bits", 2, of_state(lambda s: s.update(step=1 << 64)), WRONG, "65 bits"),
    ("state that is no dictionary", 2, of_torch(lambda own: own["state"].update({0: [1]})), WRONG, "not a dictionary"),
    ("groups without params", 2, of_torch(lambda own: own.update(param_groups=[{"lr": 1.0}])), WRONG, "no 'params'"),
    ("a partition in no group", 2, of_torch(lambda own: own["param_groups"].pop()), WRONG, r"partitions \[0\] of 2"),
    # The model.
    ("no module", 2, in_model(module=None), WRONG, "'module' is a NoneType"),
    ("a weight missing", 2, of_module(lambda m: m.pop("a.bias")), MISSING, "a.bias.*in param_shapes but not"),
    ("a weight that is no tensor", 2, of_module(lambda m: m.update({"a.bias": 3})), WRONG, "contains a int instead"),
    ("another shape", 2, of_module(lambda m: m.update({"a.bias": torch.ones(4)})), WRONG, r"\[4\] in module"),
    ("a parameter in two groups", 2, in_model(param_shapes=[{"b": (1,)}, {"b": (1,)}]), WRONG, "b: .*two groups"),
    ("a shape that is none", 2, in_model(param_shapes=[{"b": (-1,)}]), WRONG, r"\[-1\]"),
    ("a shape of too many elements", 3, reshaped((1 << 40, 1 << 40)), WRONG, "1099511627776"),
    ("shapes that are none", 2, in_model(param_shapes=[3]), WRONG, "not a dictionary"),
    ("names that are none", 2, in_model(buffer_names=[3]), WRONG, "expected a name, found a int"),
    ("ties that are none", 2, in_model(shared_params=[3]), WRONG, "shared_params"),
    ("a stage 3 weight without elements", 3, of_module(lambda m: m.update(lost=torch.empty(0))), MISSING,
        "lost: no file"),
    ("a sparse weight", 2, of_module(lambda m: m.update(b=torch.ones(1).to_sparse())), OTHER, "sparse tensor"),
    ("a sparse buffer", 2, of_module(lambda m: m.update(count=torch.ones(2).to_sparse())), OTHER, "sparse tensor"),
    # Frozen parameters of stage 3.
    ("a fragment missing", 3, fragment(1, lambda f: f.pop("f")), MISSING, "frozen f is missing"),
    ("a fragment too short", 3, fragment(1, lambda f: f.update(f=f["f"][:1].clone())), WRONG, "frozen f has"),
    ("a fragment of another type", 3, fragment(1, lambda f: f.update(f=f["f"].half())), WRONG, "float16"),
    ("a fragment that is no tensor", 3, fragment(1, lambda f: f.update(f=3)), WRONG, "not a tensor"),
    ("ranks of different steps", 3, lambda f: f[rank_model(1)].update(global_steps=8), WRONG, "global_steps is 8"),
]  # fmt: skip


def refused(stage: int, change: Change) -> None:
    files = build(stage, 3, GROUPS, FROZEN)
    change(files)
    read(files)


test_a_broken_rule_is_refused = refusal_test(
    *((name, lambda _, row=row: refused(*row), error, words) for name, *row, error, words in RULES),
    ("a tag that is not there", lambda _: read(build(2, 1, GROUPS), "global_step9"), SourceNotFoundError,
        "no tag 'global_step9'; it has global_step7"),
    ("nothing at the source", lambda _: read({"latest": TAG}), SourceNotFoundError, "no DeepSpeed checkpoint"),
)  # fmt: skip
