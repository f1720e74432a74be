"""Ranks that hold a tensor of one name on meshes of their own: replicas if their values are the same, else refused.

A process group that sends nothing lets one process save the file of each rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.api import load_with_process_group
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed import fake_pg

import ckpt_tools
from ckpt_tools.core.notes import Outcome
from ckpt_tools.errors import CkptError, DifferenceError
from tests.support.sweep import extended

WHOLE = torch.arange(96.0).reshape(4, 6, 4)
BASE = torch.arange(24.0).reshape(8, 3)


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=fake_pg.FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def cut(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    local, coordinate = whole, mesh.get_coordinate()
    assert coordinate is not None
    for placement, size, position in zip(placements, mesh.shape, coordinate, strict=True):
        if isinstance(placement, Shard):
            parts = local.chunk(size, placement.dim)
            local = parts[position] if position < len(parts) else local.narrow(placement.dim, 0, 0)
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=shape, stride=stride)


def save(
    folder: Path, sizes: dict[str, int], names: tuple[str, ...], experts: Callable[[int], torch.Tensor], dim: int = 0
) -> Path:
    """A file a rank: ``base`` over all ranks, and ``experts`` over the dims ``names`` of the mesh, ``dim`` along the
    last and whole along the others. ``experts`` is asked for what lies at a place along all other dims."""
    folder.mkdir()
    for rank in range(prod(sizes.values())):
        with as_rank(rank, prod(sizes.values())):
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            flat = init_device_mesh("cpu", (prod(sizes.values()),), mesh_dim_names=("all",))
            place = 0
            for name in sizes:
                place = place if name in names else place * sizes[name] + mesh[name].get_local_rank()
            placements = [*[Replicate()] * (len(names) - 1), Shard(dim)]
            part = cut(experts(place), mesh[names] if len(names) < len(sizes) else mesh, placements)
            state = {"base": cut(BASE, flat, [Shard(0)]), "experts": part}
            torch.save(state, folder / f"model_world_size_{prod(sizes.values())}_rank_{rank}.pt")
    return folder


def other_experts(place: int) -> torch.Tensor:
    return WHOLE + 1000 * place


def same_experts(place: int) -> torch.Tensor:
    return WHOLE


SAMPLE = [({"ep": 2, "fsdp": 3}, 0), ({"fsdp": 2, "dp": 2, "ep": 2}, 1), ({"fsdp": 1, "ep": 2}, 0)]
MORE = [({"fsdp": 3, "ep": 2}, 1), ({"dp": 2, "fsdp": 2, "ep": 2}, 1), ({"ep": 2, "dp": 2, "fsdp": 2}, 0)]
ON_MESHES = [*SAMPLE, *extended(*MORE, ({"ep": 4, "fsdp": 1}, 1))]


@pytest.mark.parametrize(("sizes", "dim"), ON_MESHES)
def test_experts_of_other_ranks_are_no_replicas(sizes, dim, tmp_path):
    source = save(tmp_path / "run", sizes, ("fsdp",), other_experts, dim)
    for verb in (ckpt_tools.inspect, ckpt_tools.verify, ckpt_tools.checksum, lambda run: ckpt_tools.open(run)):
        with pytest.raises(CkptError, match=r"experts: ranks? .* and ranks? .* hold different values of it") as found:
            verb(source)
        assert found.value.exit_code == 4
    ckpt_tools.convert(source, tmp_path / "base.pt", exclude=["experts"])
    assert torch.equal(torch.load(tmp_path / "base.pt", weights_only=True)["base"], BASE)


@pytest.mark.parametrize(("sizes", "dim"), ON_MESHES)
def test_replicas_on_other_ranks_are_one_tensor(sizes, dim, tmp_path):
    source = save(tmp_path / "run", sizes, ("fsdp",), same_experts, dim)
    assert ckpt_tools.verify(source).equal
    assert not ckpt_tools.convert(source, tmp_path / "out.pt", strict=True).plan.notes
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(loaded["experts"], WHOLE) and torch.equal(loaded["base"], BASE)


@pytest.mark.parametrize(
    "sizes", [{"dp": 2, "fsdp": 2}, *extended({"dp": 3, "fsdp": 2}, {"pp": 1, "dp": 2, "fsdp": 2})], ids=str
)
@pytest.mark.parametrize("is_cut_out", [False, True])
def test_replicas_by_their_placement_are_taken(sizes, is_cut_out, tmp_path):
    """HSDP, on the mesh of all ranks or a part of it."""
    names = ("dp", "fsdp") if is_cut_out else tuple(sizes)
    source = save(tmp_path / "run", sizes, names, same_experts)
    assert ckpt_tools.verify(source).equal and not ckpt_tools.inspect(source).notes
    ckpt_tools.convert(source, tmp_path / "out.pt", strict=True)
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["experts"], WHOLE)


@pytest.mark.parametrize("differs", [False, True])
def test_values_that_headers_do_not_compare_are_read(differs, tmp_path):
    """Without checksums in the files, and too large to be read for ``inspect``."""
    large = torch.arange(1024 * 600.0).reshape(1024, 600)
    torch.serialization.set_crc32_options(False)
    try:
        source = save(tmp_path / "run", {"ep": 2, "fsdp": 2}, ("fsdp",), lambda place: large + place * differs)
    finally:
        torch.serialization.set_crc32_options(True)
    assert ckpt_tools.inspect(source).world_size == 4
    verbs = (
        ckpt_tools.verify,
        lambda run: ckpt_tools.convert(run, tmp_path / "out.pt"),
        lambda run: ckpt_tools.checksum(run, output="-"),
        lambda run: ckpt_tools.diff(run, run),
        lambda run: ckpt_tools.load_into(torch.nn.ParameterDict({"experts": large * 0, "base": BASE * 0}), None, run),
    )
    for verb in verbs:
        if not differs:
            verb(source)
            continue
        with pytest.raises(DifferenceError, match="experts of ranks 0, 1 and of ranks 2, 3: their bits differ"):
            verb(source)
    assert (tmp_path / "out.pt").exists() is not differs


@pytest.mark.parametrize("name", ["experts.w", "gate.scale", "norm.running_mean", "norm.num_batches_tracked"])
def test_plain_tensors_that_differ_are_no_replicas(name, tmp_path):
    """Each rank's own statistics of a batch norm are told; any other tensor is no model's."""
    source = tmp_path / "run"
    source.mkdir()
    for rank in range(2):
        with as_rank(rank, 2):
            value = torch.full((2,) * ("scale" not in name), float(rank))
            state = {"base": cut(BASE, init_device_mesh("cpu", (2,)), [Shard(0)]), name: value}
            torch.save(state, source / f"model_rank_{rank}.pt")
    if name.startswith("norm."):
        (note,) = ckpt_tools.convert(source, tmp_path / "out.pt").plan.notes
        assert note.outcome is Outcome.DROPPED and note.what == f"other values of {name}"
        return
    with pytest.raises(CkptError, match=f"{name}: rank 0 and rank 1 hold different values of it, .*exclude='{name}'"):
        ckpt_tools.verify(source)


def test_a_rank_that_no_mesh_knows_is_missed_by_its_name(tmp_path):
    """Meshes that were not cut from one of all ranks."""
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = DeviceMesh("cpu", [rank // 2 * 2, rank // 2 * 2 + 1])
            torch.save({"base": cut(BASE, mesh, [Shard(0)])}, tmp_path / f"model_world_size_4_rank_{rank}.pt")
    assert ckpt_tools.verify(tmp_path).equal
    for rank in (2, 3):
        (tmp_path / f"model_world_size_4_rank_{rank}.pt").unlink()
    with pytest.raises(CkptError, match="files of 4 ranks, and that of 2 is missing"):
        ckpt_tools.verify(tmp_path)


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
@pytest.mark.parametrize("differs", [False, True])
def test_groups_of_fsdp1_that_hold_a_tensor_each(differs, tmp_path):
    """Those of ``HYBRID_SHARD`` are replicas; those of experts are not."""
    for rank in range(4):
        with as_rank(rank, 4):
            groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
            group, whole = groups[rank // 2], BASE + rank // 2 * differs
            part = _create_chunk_sharded_tensor(whole, rank % 2, 2, 1, group, torch.device("cpu"))
            with load_with_process_group(group):
                torch.save({"base": part}, tmp_path / f"part_{rank}.pt")
    if not differs:
        assert torch.equal(ckpt_tools.open(tmp_path)["base"].torch(), BASE)
        return
    with pytest.raises(CkptError, match=r"base: ranks 0, 1 and ranks 2, 3 hold different values of it"):
        ckpt_tools.verify(tmp_path)


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")
@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize("differs", [False, True])
def test_ranks_that_save_a_dcp_by_themselves(differs, is_compressed, tmp_path):
    """Without collectives nobody leaves out the chunk that another rank has too."""
    source = tmp_path / "run"
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "fsdp"))
            place = mesh["ep"].get_local_rank() * differs
            state = {"experts": cut(WHOLE + place, mesh["fsdp"], [Shard(1)]), "bias": torch.zeros(2)}
            own = {"norm": {"running_mean": torch.full((2,), 1.0 + rank)}, "seen": torch.tensor(rank)}
            own["history"] = {"cut": cut(BASE, mesh["fsdp"], [Shard(0)])}  # the same on both meshes, in two chunks
            writer = dcp.FileSystemWriter(source, _extensions=[ZStandard()] if is_compressed else [])
            dcp.save({"model": state, **own}, storage_writer=writer, use_collectives=False)
    notes = {note.what: note.count for note in ckpt_tools.inspect(source, model_key="model").notes}
    assert notes == {"other values of norm.running_mean": 3, "other values of seen": 3}
    if not differs:
        assert ckpt_tools.verify(source, model_key="model").equal
        ckpt_tools.convert(source, tmp_path / "out.safetensors", model_key="model")
        assert torch.equal(ckpt_tools.open(tmp_path / "out.safetensors")["experts"].torch(), WHOLE)
        return
    for verb in (ckpt_tools.verify, lambda run, **key: ckpt_tools.convert(run, tmp_path / "out.pt", **key)):
        with pytest.raises(DifferenceError, match=r"experts in __0_0.distcp and in __2_0.distcp: their bits differ"):
            verb(source, model_key="model")
    assert not (tmp_path / "out.pt").exists()


def test_a_transposed_view_of_a_weight_is_not_tied_to_it(tmp_path):
    square = torch.arange(16.0).reshape(4, 4)
    with as_rank(0, 1):
        base = cut(BASE, init_device_mesh("cpu", (1,)), [Shard(0)])
        state = {"base": base, "a": square, "b": square.t(), "c": square, "d": square.t()}
        torch.save(state, tmp_path / "model_world_size_1_rank_0.pt")
    found = ckpt_tools.open(tmp_path)
    assert ckpt_tools.inspect(tmp_path).format == "sharded"
    assert ckpt_tools.inspect(tmp_path).aliases == {"c": "a", "d": "b"}
    for name, expected in (("a", square), ("b", square.t()), ("c", square), ("d", square.t())):
        assert torch.equal(found[name].torch(), expected), name
