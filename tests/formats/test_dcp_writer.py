"""DCP as we write it, judged by torch's own readers: the index, the items, the objects, the trees."""

import collections
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import ckpt_tools
from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, ParamGroup, StateKey, StateTree, TensorEntry, TensorRef
from ckpt_tools.core.notes import Outcome
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.state_tree.build import choose_tree, entries_of
from tests.support.sweep import extended
from tests.support.trees import assert_same_tree
from tests.support.truth import WEIGHT, Truth, assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")


def index_of(folder: Path) -> Metadata:
    found = pickle.loads((folder / ".metadata").read_bytes())
    assert isinstance(found, Metadata)
    return found


def whole_tree(folder: Path, out: Path) -> dict[str, Any]:
    format_utils.dcp_to_torch_save(folder, out)
    return torch.load(out, weights_only=False)  # type: ignore[no-any-return]


# The tree


def stored(shape: tuple[int, ...], kind: Kind, dtype: DType = DType.FLOAT32) -> TensorEntry:
    """A tensor whose bytes are those of a file that nobody reads here."""
    num_bytes = Box.whole(shape).numel * dtype.item_bytes
    shard = Shard(Box.whole(shape), ByteRange("data", 0, num_bytes))
    return TensorEntry(shape, dtype, kind, ShardTable.build(shape, dtype, [shard]))


def manifest(**changes: Any) -> Manifest:
    """A parameter with state, its tie, a buffer, and what DeepSpeed keeps beside them."""
    tensors = {
        StateKey("w"): stored((5, 3), Kind.PARAMETER),
        StateKey("count"): stored((), Kind.BUFFER, DType.INT64),
        StateKey("w", "exp_avg"): stored((5, 3), Kind.STATE),
        StateKey("w", "step"): stored((), Kind.STATE),
        StateKey("lr_scheduler.table", "extra"): stored((4,), Kind.EXTRA),
    }
    scheduler = {"last_epoch": 4, "table": TensorRef(StateKey("lr_scheduler.table", "extra"))}
    extra = {"global_step": 4, "lr_scheduler": scheduler, "client_state": {"epoch": 2}}
    given = {"format": "deepspeed", "tensors": tensors, "aliases": {"head": "w"}}
    given |= {"groups": (ParamGroup(("w",), {"lr": 0.5, "betas": (0.9, 0.95)}),)}
    return Manifest(**(given | {"extra": extra | {"deepspeed": {"ds_version": "0.19.8"}}} | changes))


def names(found: Manifest, model_key: str | None = None, optim_key: str | None = None) -> set[str]:
    return set(entries_of(found, choose_tree(found, model_key=model_key, optim_key=optim_key)).paths)


def test_a_whole_state_is_the_tree_of_a_stateful_called_app():
    optim = ("state.w.exp_avg", "state.w.step", *(f"param_groups.0.{name}" for name in ("params", "lr", "betas")))
    rest = ("global_step", "lr_scheduler.last_epoch", "lr_scheduler.table", "epoch")
    assert names(manifest()) == {
        *(f"app.model.{name}" for name in ("w", "head", "count")),
        *(f"app.optim.{name}" for name in optim),
        *(f"app.{name}" for name in rest),
    }


def test_keys_move_model_and_optimizer():
    found = names(manifest(), model_key="train.net", optim_key="train.opt")
    assert {"train.net.w", "train.opt.state.w.step", "train.epoch"} <= found
    assert {"optim.param_groups.0.lr", "epoch", "model.w"} <= names(manifest(), model_key="model")
    assert {"w", "optim.state.w.step", "epoch"} <= names(manifest(), model_key="")


def test_what_is_left_behind_is_said():
    client = {"model": {"x": 1}, "global_step": 5, "empty": {}}
    extra = {"client_state": client, "global_step": 4, "deepspeed": {"a": 1}}
    tensors = {**manifest().tensors, StateKey("stray", "extra"): stored((1,), Kind.EXTRA)}
    entries = entries_of(manifest(extra=extra, tensors=tensors), StateTree(("app", "model"), ("app", "optim")))
    dropped = {note.what for note in entries.notes if note.outcome is Outcome.DROPPED}
    lost = ("DeepSpeed's own a", "model", "client_state.global_step", "app.empty")
    assert dropped == {*lost, "stray (extra)", "lr_scheduler.table (extra)"}


def test_two_entries_of_one_name_are_refused():
    with pytest.raises(UnsupportedError, match="this name"):
        names(manifest(extra={"client_state": {"a.b": 1, "a": {"b": 2}}}))


# DeepSpeed's own Adams

FUSED = {"lr": 0.25, "bias_correction": True, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def options_of(options: dict[str, Any], config: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[str]]:
    """What a group becomes, and what is noted."""
    extra = {"deepspeed": {"ds_config": config or {}}}
    found = manifest(groups=(ParamGroup(("w",), options),), extra=extra)
    entries = entries_of(found, choose_tree(found, model_key=None, optim_key=None))
    prefix = "app.optim.param_groups.0."
    values = {name.removeprefix(prefix): value for name, value in entries.objects.items() if name.startswith(prefix)}
    return values, [note.what for note in entries.notes if "group" in note.what]


def test_a_group_of_deepspeeds_adam_has_all_that_torch_asks_for():
    values, notes = options_of(FUSED)
    theirs = torch.optim.AdamW([torch.zeros(1)], lr=0.25, betas=(0.9, 0.95), weight_decay=0.1).param_groups[0]
    assert values == {**theirs, "params": ["w"]}
    assert notes == [
        "amsgrad, maximize, foreach, capturable, differentiable, fused, decoupled_weight_decay of parameter group 0"
    ]
    config = {"optimizer": {"params": {"adam_w_mode": False}}}
    assert options_of(FUSED, config)[0]["decoupled_weight_decay"] is False


def test_groups_of_torch_are_left_as_they_are():
    theirs = {k: v for k, v in torch.optim.AdamW([torch.zeros(1)]).param_groups[0].items() if k != "params"}
    assert options_of(theirs) == ({**theirs, "params": ["w"]}, [])
    assert options_of({"lr": 0.5, "momentum": 0.9}) == ({"lr": 0.5, "momentum": 0.9, "params": ["w"]}, [])
    # A correction that was off is said.
    assert options_of({"lr": 0.5, "bias_correction": False})[1] == ["bias_correction of parameter group 0"]


# Against torch's own files


@pytest.fixture(scope="module")
def rewritten(checkpoint, tmp_path_factory):
    source = checkpoint("fsdp2", "awkward", 3).checkpoint
    out = tmp_path_factory.mktemp("dcp") / "out"
    ckpt_tools.reshard(source, out, world_size=3)
    return source, out


def test_the_index_says_what_torch_says(rewritten, checkpoint):
    theirs, ours = map(index_of, rewritten)
    kinds = Truth.load(checkpoint("fsdp2", "awkward", 3).root).kinds
    assert set(ours.state_dict_metadata) == set(theirs.state_dict_metadata)
    assert ours.planner_data == theirs.planner_data
    assert ours.version == theirs.version
    for name, want in theirs.state_dict_metadata.items():
        got = ours.state_dict_metadata[name]
        assert type(got) is type(want)
        if isinstance(want, TensorStorageMetadata):
            assert (got.size, got.properties.dtype) == (want.size, want.properties.dtype), name
            # Nothing in a DCP tells a floating-point buffer from a parameter, so we cut it like one.
            if kinds.get(name.removeprefix("app.model."), "state") != "buffer":
                assert got.chunks == want.chunks, name


def test_torch_rebuilds_the_same_tree_from_both(rewritten, tmp_path):
    theirs, ours = (whole_tree(folder, tmp_path / f"{n}.pt") for n, folder in enumerate(rewritten))
    assert_same_tree(theirs, ours)


class Unknown:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


OBJECTS: dict[str, Any] = {
    "numbers": [1, -(2**40), 2**70, 0.1, float("inf"), True, None, 1 + 2j],
    "texts": ("näïve", "", b"\x00\xff", bytearray(b"ab")),
    "sets": {1, 2, 3},
    "frozen": frozenset({"a"}),
    "ordered": collections.OrderedDict(b=1, a=(2, [3])),
    "counter": collections.Counter({3: 1, 7: 2}),
    "default": (collections.defaultdict(list, {1: [2]}),),
    "rng": {
        "python": random.Random(0).getstate(),
        "numpy": np.random.RandomState(0).get_state(),
        "torch": torch.arange(9),
    },
    "torch": (torch.float16, torch.Size([2, 3]), torch.device("cuda", 1)),
    "array": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "inside": ("a tuple with a tensor", torch.arange(5, dtype=torch.int16)),
    "loaders": [{"at": 3, "seen": [1, 2]}, {"at": 4, "seen": []}],
    "own": Unknown(7),
    "path": Path("/some/where"),
}


def test_objects_come_back_as_they_were(tmp_path):
    dcp.save({"model": {"w": torch.ones(3, 2)}, **OBJECTS}, checkpoint_id=str(tmp_path / "source"), no_dist=True)
    ckpt_tools.reshard(tmp_path / "source", tmp_path / "out", world_size=2)
    theirs, ours = (whole_tree(tmp_path / each, tmp_path / f"{each}.pt") for each in ("source", "out"))
    assert_same_tree(theirs, ours)
    assert isinstance(ours["own"], Unknown)


# Ties


def test_a_tie_is_written_once_and_loads_under_both_names(checkpoint, tmp_path):
    made = checkpoint("zero2-fp32", "awkward", 2)
    ckpt_tools.convert(made.checkpoint, tmp_path / "out", to="dcp", world_size=3)
    index = index_of(tmp_path / "out")
    places = {(at.fqn, at.offset): info for at, info in index.storage_data.items()}
    ties = [(offset, info) for (fqn, offset), info in places.items() if fqn == "app.model.head.weight"]
    assert ties and all(places["app.model.embed.weight", offset] == info for offset, info in ties)
    masters = Truth.load(made.root).best_weights()
    model = {name: torch.zeros(masters[name].shape) for name in ("head.weight", "embed.weight")}
    dcp.load({"app": {"model": model}}, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert_same_bits({name: masters[name] for name in model}, {name: value.numpy() for name, value in model.items()})
    assert not any(name.startswith("app.optim.state.head.weight") for name in index.state_dict_metadata)


# Into torch, by real processes

RESUMED = ("fsdp2 awkward 3 fsdp2 2", "zero1-fp32 sgd 3 fsdp2 2")
"""By two ranks."""
OF_OTHER_KINDS = (
    "fsdp2-model awkward 3 fsdp2-model 2", "fsdp2-bf16 awkward 2 fsdp2-bf16 3", "fsdp2-titan awkward 2 fsdp2-titan 3",
    "fsdp2 scalar 2 fsdp2 3", "fsdp2-hsdp awkward 4 fsdp2 3",
)  # fmt: skip


@pytest.mark.parametrize("cell", [*RESUMED, *extended(*OF_OTHER_KINDS, "zero3-fp32 plain 3 fsdp2-tp 4")])
def test_torch_resumes(cell, checkpoint, resume, tmp_path):
    kind, case, ranks, target, new_ranks = cell.split()
    made = checkpoint(kind, case, int(ranks))
    ckpt_tools.convert(made.checkpoint, tmp_path / "out", to="dcp", world_size=int(new_ranks))
    truth, resumed = Truth.load(made.root), resume(target, case, tmp_path / "out", int(new_ranks))
    assert_same_bits(truth.best_weights(), resumed.best_weights())
    assert_same_bits(
        *({key: t for key, t in run.tensors.items() if key[1] not in (WEIGHT, "master")} for run in (truth, resumed))
    )
    assert resumed.facts["groups"] == truth.facts["groups"]
    if kind != "fsdp2-model":
        assert resumed.facts["scheduler"]["last_epoch"] == truth.facts["scheduler"]["last_epoch"]
        np.testing.assert_allclose(resumed.facts["losses"], truth.facts["losses"], rtol=1e-6, atol=0)


def test_empty_parameters_get_the_state_that_torch_asks_for(checkpoint, resume, tmp_path):
    made = checkpoint("zero2-fp32", "empty", 2)
    report = ckpt_tools.convert(made.checkpoint, tmp_path / "out", to="dcp", world_size=3)
    assert [note.what for note in report.plan.notes if note.outcome is Outcome.DEFAULTED] == [
        "optimizer state of 1 empty parameter"
    ]
    truth, resumed = Truth.load(made.root), resume("fsdp2", "empty", tmp_path / "out", 3)
    np.testing.assert_allclose(resumed.facts["losses"], truth.facts["losses"], rtol=1e-6, atol=0)
    assert_same_bits(truth.best_weights(), resumed.best_weights())
