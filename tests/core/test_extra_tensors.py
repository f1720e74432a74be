"""Tensors of the user's own entries are no part of the model: its names may change and be chosen without them."""

from __future__ import annotations

import pytest

from ckpt_tools.core import transforms
from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, StateKey, TensorEntry, TensorRef
from ckpt_tools.core.shards import ByteRange, Shard, ShardTable

pytestmark = pytest.mark.quick

RNG = StateKey("rng", "extra")


def entry(kind: Kind) -> TensorEntry:
    shard = Shard(Box.whole((2,)), ByteRange("data", 0, 8))
    return TensorEntry((2,), DType.FLOAT32, kind, ShardTable.build((2,), DType.FLOAT32, [shard]))


def manifest() -> Manifest:
    tensors = {StateKey(f"module.{name}"): entry(Kind.PARAMETER) for name in ("a", "b")}
    return Manifest("dcp", {**tensors, RNG: entry(Kind.EXTRA)}, extra={"rng": (TensorRef(RNG),)})


def test_selecting_keeps_them():
    kept, _ = transforms.select(manifest(), include=("module.a",), exclude=())
    assert set(kept.tensors) == {StateKey("module.a"), RNG}


def test_renaming_leaves_them_alone():
    renamed, _ = transforms.rename(manifest(), lambda name: name.replace("module.", "net."))
    assert set(renamed.tensors) == {StateKey("net.a"), StateKey("net.b"), RNG}


def test_a_prefix_of_the_whole_model_is_found_beside_them():
    bare, _ = transforms.without_wrappers(manifest())
    assert set(bare.tensors) == {StateKey("a"), StateKey("b"), RNG}
