"""The folders that frameworks and trainers leave behind, each read without being told what it is, and judged by the
state that the framework itself gathered."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ckpt_tools.core.manifest import Manifest, StateTree
from ckpt_tools.core.notes import ASSUMED_ORDER_ITEM
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import CkptError, IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.runs.opening import open_checkpoint
from tests.support.manifests import as_json, elements_in
from tests.support.sweep import extended
from tests.support.truth import WEIGHT, Key, Truth, assert_same_bits

TREES = {
    "fsdp2": StateTree(("app", "model"), ("app", "optim")),
    "fsdp2-pair": StateTree(("model",), ("optimizer",)),
    "fsdp2-model": StateTree((), None),
    "fsdp2-titan": StateTree((), ("optimizer",), is_flattened=True),
    "fsdp2-accelerate": StateTree(("model",), ("optimizer",)),
}
"""Where each layout of ``fixtures.layouts`` keeps model and optimizer."""


def manifest_of(folder: Path) -> Manifest:
    return open_checkpoint(folder, ReadOptions()).manifest


def gathered(folder: Path) -> dict[Key, np.ndarray]:
    """Every weight, under its aliases too, and every tensor of the optimizer."""
    opened = open_checkpoint(folder, ReadOptions())
    source, manifest = opened.source, opened.manifest
    return elements_in(source.store, manifest)


@pytest.mark.parametrize("kind", TREES)
def test_model_and_optimizer_are_found(kind, checkpoint):
    made = checkpoint(kind, "awkward", 2)
    manifest, truth = manifest_of(made.checkpoint), Truth.load(made.root)
    tree = manifest.tree
    assert tree is not None
    assert StateTree(tree.model, tree.optim, tree.is_flattened) == TREES[kind]
    assert_same_bits(truth.tensors, gathered(made.checkpoint))
    if tree.optim is not None:
        found = {frozenset(group.params): as_json(dict(group.options)) for group in manifest.groups}
        assert found == {frozenset(group["fqns"]): group["options"] for group in truth.facts["groups"]}


@pytest.mark.parametrize("world_size", [3, *extended(2)])
def test_pieces_of_every_rank_in_safetensors(world_size, checkpoint):
    """What ``HuggingFaceStorageWriter(save_distributed=True)`` writes; it has no place for the tied name."""
    made = checkpoint("fsdp2-hf", "awkward", world_size)
    truth = Truth.load(made.root)
    assert_same_bits(
        {key: tensor for key, tensor in truth.tensors.items() if key[0] not in truth.facts["ties"]},
        gathered(made.checkpoint),
    )
    assert manifest_of(made.checkpoint).format == "safetensors"


@pytest.mark.parametrize("lost", [1, 2])
def test_a_lost_rank_of_them_is_missed(lost, checkpoint, tmp_path):
    made, name = checkpoint("fsdp2-hf", "awkward", 3).checkpoint, PIECE.format(lost)
    run = shutil.copytree(made, tmp_path / "cut")
    (run / name).unlink()
    with pytest.raises(IncompleteError, match=name):
        manifest_of(run)
    with pytest.raises(UnsupportedError, match="this is one file of a checkpoint"):
        manifest_of(made / PIECE.format(2))


PIECE = "shard-{:05d}-model-00001-of-00001.safetensors"
SPLITS: dict[str, tuple[list[tuple[list[int] | None, list[int]]], type[CkptError], str]] = {
    "overlap": ([([0, 0], [2, 3]), ([1, 0], [2, 3])], MalformedError, "overlap"),
    "gap": ([([0, 0], [1, 3]), ([2, 0], [2, 3])], IncompleteError, "in no shard"),
    "dims": ([([0, 0], [2, 3]), ([2], [3])], MalformedError, "dtype or dims"),
    "negative": ([([0, 0], [2, 3]), ([-2, 0], [2, 3])], MalformedError, "saved_offsets"),
    "far": ([([0, 0], [2, 3]), ([(1 << 63) - 1, 0], [2, 3])], MalformedError, "not a 64-bit number"),
    "unsaid": ([([0, 0], [2, 3]), (None, [2, 3])], MalformedError, "saved_offsets"),
}


@pytest.mark.parametrize("split", SPLITS)
def test_pieces_that_do_not_make_a_tensor(split, tmp_path):
    pieces, error, message = SPLITS[split]
    with pytest.raises(error, match=message):
        manifest_of(with_pieces(pieces, tmp_path))


def with_pieces(pieces: Iterable[tuple[list[int] | None, list[int]]], folder: Path) -> Path:
    for rank, (start, shape) in enumerate(pieces, 1):
        where = {"w": {"saved_offsets": start} if start is not None else {}}
        tensors = {"w": np.ones(shape, np.float32)}
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(where)}
        safetensors.numpy.save_file(tensors, folder / PIECE.format(rank), metadata=metadata)
    return folder


@pytest.mark.parametrize("named", [False, True])
def test_numbers_of_an_optimizer_that_mean_one_thing(named, tmp_path):
    model, optimizer = _trained(named=named)
    by_number = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(by_number, tmp_path / "numbers.pt")
    optim: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    state, groups = optim["state"], optim["param_groups"]
    found = gathered(tmp_path / "numbers.pt")
    wanted = {(fqn, slot): tensor.numpy() for fqn, slots in state.items() for slot, tensor in slots.items()}
    assert_same_bits(wanted, {key: tensor for key, tensor in found.items() if key[1] != WEIGHT})
    manifest = manifest_of(tmp_path / "numbers.pt")
    assert [list(group.params) for group in manifest.groups] == [group["params"] for group in groups]
    assert [note.what for note in manifest.notes] == ([] if named else [ASSUMED_ORDER_ITEM])
    assert manifest.extra == {"epoch": 3}


def _trained(*, named: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Two groups that interleave in the model, and buffers of the shape of parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    weights = [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
    others = [(name, p) for name, p in model.named_parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": part if named else [p for _, p in part]} for part in (weights, others)]
    optimizer = torch.optim.AdamW([groups[0], groups[1] | {"weight_decay": 0.0}])
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_of_safetensors_that_torch_itself_cannot_read(tmp_path):
    kind = SerializationFormat.SAFETENSORS
    writer = FileSystemWriter(tmp_path, serialization_format=kind)
    state_dict_saver.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    with pytest.raises(UnsupportedError, match="which torch cannot read either"):
        manifest_of(tmp_path)
