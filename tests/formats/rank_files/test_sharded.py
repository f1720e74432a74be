"""Files of ranks: what each has of a tensor, old forms of meshes, and what is refused by name."""

import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard

import ckpt_tools
from ckpt_tools.core.boxes import Box
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.notes import Outcome
from ckpt_tools.core.values import PARAMETER, GlobalRef, Opaque, StorageRef, StoredTensor
from ckpt_tools.errors import CkptError, FormatError
from ckpt_tools.formats.rank_files.detection import detect
from ckpt_tools.formats.rank_files.geometry import compute_region
from ckpt_tools.formats.rank_files.items import group_by_number, group_by_template, make_label
from ckpt_tools.serialization.pickle.sharded_tensors import (
    PartReader,
    Placement,
    ReplicatePlacement,
    ShardPlacement,
    StridedShardPlacement,
)
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from fixtures.corpus import make
from tests.support.damage import Harm, changed, unlink
from tests.support.sweep import extended


class TestGeometry:
    @settings(deadline=None, max_examples=30)
    @given(data=st.data())
    def test_it_is_torchs_own(self, data):
        shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
        mesh = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
        placements = tuple(data.draw(placements_of(len(shape))) for _ in mesh)
        torchs = [_of_torch(each) for each in placements]
        elements: list[tuple[int, ...]] = []
        for number in range(prod(mesh)):
            coordinate = _unravelled(number, mesh)
            region = compute_region(shape, mesh, coordinate, placements)
            local, offset = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), torchs)
            assert region.shape == local
            if region.boxes:
                assert region.boxes[0] == (Box(offset, region.boxes[0][0].stop), (0,) * len(shape))
                assert sum(box.numel for box, _ in region.boxes) == prod(local)
            elements += [index for box, _ in region.boxes for index in _indices(box)]
        replicas = prod(
            [size for size, each in zip(mesh, placements, strict=True) if isinstance(each, ReplicatePlacement)]
        )
        assert sorted(elements) == sorted([*_indices(Box.whole(shape))] * replicas)


def placements_of(ndim: int) -> st.SearchStrategy[Placement]:
    dims = st.integers(0, ndim - 1)
    return st.one_of(
        st.just(ReplicatePlacement()),
        st.builds(ShardPlacement, dims),
        st.builds(StridedShardPlacement, dims, st.integers(1, 4)),
    )


def _of_torch(placement: Placement) -> Any:
    if isinstance(placement, ReplicatePlacement):
        return TorchReplicate()
    if isinstance(placement, ShardPlacement):
        return TorchShard(placement.dim)
    return TorchStridedShard(placement.dim, split_factor=placement.split_factor)


def _unravelled(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(n) for n in torch.unravel_index(torch.tensor(number), shape))


def _indices(box: Box) -> list[tuple[int, ...]]:
    return [
        tuple(int(a) + int(n) for a, n in zip(box.start, _unravelled(number, box.shape), strict=True))
        for number in range(box.numel)
    ]


class TestNames:
    def test_the_rank_is_the_number_that_most_files_agree_on(self):
        ranks = {f"run1-layer{n}.of2.pt": n for n in range(2)}
        assert group_by_template(ranks) == {"run1-layer{rank}.of2.pt": list(ranks)}

    def test_files_without_parts_are_found_by_their_number(self):
        files = ["extra_0.pt", "extra_1.pt", "notes.pt"]
        assert group_by_number(files, (0, 1)) == {"extra_{rank}.pt": {0: "extra_0.pt", 1: "extra_1.pt"}}

    @pytest.mark.parametrize(
        ("template", "wanted"),
        [
            ("model_world_size_2_rank_{rank}.pt", "model"),
            ("optimizer_0_rank{rank}.bin", "optimizer"),
            ("rank{rank}.pt", "state"),
        ],
    )
    def test_an_item_is_called_by_what_is_left(self, template, wanted):
        assert make_label(template) == wanted


MODEL = "model_world_size_2_rank_{}.pt"


def actor() -> Path:
    return make("verl").folder / "actor"


@pytest.fixture
def verl(tmp_path):
    return shutil.copytree(actor(), tmp_path / "actor")


def second(change: Callable[[Any], object]) -> Harm:
    return changed(MODEL.format(1), change)


def anonymous(folder: Path) -> None:
    """The second rank's content as the first's, without the name in the archive."""
    content = torch.load(folder / MODEL.format(1), weights_only=False)
    with (folder / MODEL.format(0)).open("wb") as file:
        torch.save(content, file)


def cut(num_bytes: int) -> Harm:
    return lambda folder: (folder / MODEL.format(0)).write_bytes((folder / MODEL.format(0)).read_bytes()[:num_bytes])


def copied(name: str, source: Callable[[], Path]) -> Harm:
    return lambda folder: shutil.copy(source(), folder / name)


def of_three(rank: int) -> Path:
    return make("verl-3").folder / f"model_world_size_3_rank_{rank}.pt"


def partial_sums(state: Any) -> None:
    state["up.weight"]._spec.placements = (Partial(),)


def smaller_part(state: Any) -> None:
    state["one.weight"]._local_tensor = torch.zeros(1, 6)


HARMS: list[tuple[str, Harm, str]] = [
    ("another rank's file", copied(MODEL.format(0), lambda: actor() / MODEL.format(1)),
        "it was saved as model_world_size_2_rank_1, so it is another rank's"),
    ("another rank's content", anonymous, "it is of rank 1 by its content, but its name has another"),
    *((f"no {item}", unlink(f"{item}_*_rank_1.pt"),
        rf"rank 1 of 2 is missing \({item}_world_size_2_rank_1\.pt\)") for item in ("model", "optim", "extra_state")),
    ("a file of a run of three", copied(of_three(0).name, lambda: of_three(0)), r"several world sizes here \(2, 3\)"),
    ("the same under this run's name", copied(MODEL.format(1), lambda: of_three(1)), "several world sizes"),
    ("a configuration of another size",
        lambda folder: (folder / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 8}'),
        "it says world_size 8, but the files are of 2 ranks"),
    *((f"cut at {num_bytes}", cut(num_bytes), ".") for num_bytes in (0, 10, -1)),
    ("two shapes", second(lambda own: own.update(table=torch.zeros(4))), r"rank 0 has it as a whole tensor"),
    ("buffers that differ", second(lambda own: own["table"].add_(1)), "table: rank 0 and rank 1 hold different"),
    ("a part of another shape", second(smaller_part),
        r"rank 1 holds a part of shape \[1, 6\], but by its placement on the mesh it should be \[0, 6\]"),
    ("sums that are not added up", second(partial_sums), "placement Partial"),
]  # fmt: skip


@pytest.mark.parametrize(("harm", "words"), [pytest.param(*each, id=name) for name, *each in HARMS])
def test_files_that_do_not_fit_are_refused(harm, words, verl):
    harm(verl)
    with pytest.raises(FormatError, match=words) as found:
        ckpt_tools.inspect(verl)
    assert found.value.exit_code == 4


class TestFolders:
    def test_plain_tensors_under_names_of_several_ranks(self, tmp_path):
        for rank in range(2):
            torch.save({"w": torch.ones(2)}, tmp_path / MODEL.format(rank))
        with pytest.raises(CkptError, match="hold plain tensors"):
            ckpt_tools.inspect(tmp_path)

    def test_few_of_many_files_are_opened_to_tell(self):
        asked = set[str]()

        class Asked(MemoryStore):
            def read_into(self, path: str, start: int, buffer: memoryview) -> None:
                asked.add(path)
                super().read_into(path, start, buffer)

        names = [f"{letter}.pt" for letter in "abcdefghijkl"]
        assert not detect(Source.open(Asked({name: bytearray(b"no archive") for name in names})))
        assert asked == {*names[:8]}

    @pytest.mark.extended
    def test_two_files_of_one_rank(self, tmp_path):
        for name in ("first.pt", "second.pt"):
            shutil.copy(next(make("torch-save-ranks").folder.glob("*rank0*")), tmp_path / name)
        with pytest.raises(CkptError, match=r"two files are of rank 0 \(first\.pt and second\.pt\)"):
            ckpt_tools.inspect(tmp_path)


class TestContents:
    def test_generators_of_another_trainer_are_dropped(self, tmp_path):
        """verl would give them to ``torch.set_rng_state``: Composer's entry is a list with a dict for each rank."""
        report = ckpt_tools.convert(make("composer").source, tmp_path / "out", to="sharded")
        (note,) = [each for each in report.plan.notes if each.outcome is Outcome.DROPPED]
        assert (note.what, note.count) == ("rng", 1)
        saved = torch.load(tmp_path / "out" / "extra_state_world_size_2_rank_0.pt", weights_only=True)
        assert "rng" not in saved and saved["lr_scheduler"] is None and saved["rank_zero_seed"] == 17

    @pytest.mark.parametrize("world_size", [1, 2, *extended(3)])
    def test_what_one_rank_had_whole_is_cut_for_several(self, world_size, tmp_path):
        source = make("verl-1").source
        ckpt_tools.convert(source, tmp_path / "out", to="sharded", world_size=world_size)
        assert ckpt_tools.verify(tmp_path / "out").equal and ckpt_tools.verify(source, tmp_path / "out").equal
        state = torch.load(tmp_path / "out" / f"model_world_size_{world_size}_rank_0.pt", weights_only=False)
        assert isinstance(state["up.weight"], DTensor) is (world_size > 1)
        assert not isinstance(state["norm.running_mean"], DTensor)

    def test_the_order_of_parameters_that_the_user_says(self, tmp_path):
        state = {number: {"exp_avg": torch.full((4, 4), float(number))} for number in range(2)}
        optim = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
        torch.save({"a": torch.ones(4, 4), "b": torch.zeros(4, 4)}, tmp_path / "model_world_size_1_rank_0.pt")
        torch.save(optim, tmp_path / "optim_world_size_1_rank_0.pt")
        (tmp_path / "order.txt").write_text("b\na\n")
        for options, names in (({}, "ab"), ({"param_order": tmp_path / "order.txt"}, "ba")):
            found = ckpt_tools.open(tmp_path, **options)
            assert [found.state(name, "exp_avg").numpy()[0, 0] for name in names] == [0, 1]

    def test_an_optimizer_whose_weights_are_elsewhere_is_refused(self, tmp_path):
        optim = {"state": {"a": {"exp_avg": torch.ones(4)}}, "param_groups": [{"lr": 0.1, "params": ["a"]}]}
        torch.save({"optim": optim, "step": 1}, tmp_path / "optim.pt")
        with pytest.raises(FormatError, match=r"a parameter group names it, but there is no such weight"):
            ckpt_tools.convert(tmp_path / "optim.pt", tmp_path / "out", to="sharded")


MESH = GlobalRef("torch.distributed.device_mesh", "DeviceMesh")
LAYOUT = GlobalRef("torch.distributed._mesh_layout", "_MeshLayout")


def dtensor(mesh: Opaque, *, package: str = "torch.distributed.tensor", placements: int = 1) -> Opaque:
    """A DTensor of (4, 2) as a torch of before would have pickled it, from the field names of its sources."""
    old = package.endswith("_tensor")
    spec_module = f"{package}.placement_types" if old else f"{package}._dtensor_spec"
    local = StoredTensor(StorageRef("0", DType.FLOAT32, 4), DType.FLOAT32, 0, (2, 2), (2, 1))
    element = GlobalRef("torch", "float32")
    shard = Opaque(GlobalRef(f"{package}.placement_types", "Shard"), form="new", state={"dim": 0})
    meta = Opaque(GlobalRef(spec_module, "TensorMeta"), ((4, 2), (2, 1), element), form="new")
    spec = {"mesh": mesh, "placements": (shard,) * placements, "tensor_meta": meta, "_hash": None}
    kind = GlobalRef(f"{package}.api" if old else package, "DTensor")
    layout = Opaque(GlobalRef("torch.serialization", "_get_layout"), ("torch.strided",))
    args = (kind, element, (4, 2), (2, 1), 0, layout, Opaque(GlobalRef("torch", "device"), ("cpu",)), False)
    state = (
        None,
        {"_local_tensor": local, "_spec": Opaque(GlobalRef(spec_module, "DTensorSpec"), form="new", state=spec)},
    )
    rebuild = GlobalRef("torch._utils", "_rebuild_wrapper_subclass")
    return Opaque(GlobalRef("torch._tensor", "_rebuild_from_type_v2"), (rebuild, kind, args, state))


def ranks_tensor(*shape: int) -> StoredTensor:
    strides = {1: (1,), 2: (shape[-1], 1)}[len(shape)]
    return StoredTensor(StorageRef("9", DType.INT64, prod(shape)), DType.INT64, 0, shape, strides)


def old_mesh(coordinate: list[int], *shape: int) -> Opaque:
    """torch 2.4 to 2.9."""
    ranks = tuple(range(prod(shape)))
    state = {"device_type": "cuda", "mesh": ranks_tensor(*shape), "mesh_dim_names": ("dp", "tp")[: len(shape)]}
    state |= {"_flatten_mesh_list": ranks, "_thread_id": 7, "_coordinate_on_dim": coordinate}
    return Opaque(MESH, form="new", state=state | {"_dim_group_names": ["0"], "_hash": 5})


def middle_mesh(coordinate: list[int], shape: Any, stride: Any, root: Opaque | None = None) -> Opaque:
    """torch 2.10."""
    layout = Opaque(LAYOUT, form="new", state={"shape": shape, "stride": stride})
    state = {"_device_type": "cuda", "_layout": layout, "_rank_map": ranks_tensor(4), "_mesh_dim_names": None}
    state |= {"_root_mesh": root, "_flatten_rank_map": (0, 1, 2, 3), "_thread_id": None, "_flatten_mapping": {}}
    return Opaque(MESH, form="new", state=state | {"_coordinate_on_dim": coordinate, "_dim_group_names": ["0"]})


def read_part(*arguments: Any, **options: Any) -> Any:
    part = PartReader().read_part(dtensor(*arguments, **options))
    assert part is not None
    return part


class TestOlderForms:
    """Stand-ins: the fields are those of the older sources, and no file of theirs was at hand."""

    @pytest.mark.parametrize("package", ["torch.distributed.tensor", "torch.distributed._tensor"])
    def test_a_mesh_that_is_a_tensor_of_ranks(self, package):
        part = read_part(old_mesh([1], 2), package=package)
        assert (part.rank, part.ranks, part.shape) == (1, (0, 1), (4, 2))
        assert read_part(old_mesh([1, 0], 2, 2), placements=2).rank == 2

    @pytest.mark.parametrize(("shape", "stride"), [((2, 2), (2, 1)), (((2,), (2,)), ((2,), (1,)))])
    def test_a_layout_of_torch_2_10(self, shape, stride):
        assert read_part(middle_mesh([1, 1], shape, stride), placements=2).rank == 3

    def test_a_mesh_that_was_cut_from_another_knows_its_rank_by_it(self):
        part = read_part(middle_mesh([1], 2, 1, root=middle_mesh([1, 1], (2, 2), (2, 1))))
        assert (part.rank, part.ranks) == (3, (0, 1, 2, 3))

    def test_the_order_of_two_cuts_of_torch_2_4_is_not_known(self):
        with pytest.raises(CkptError, match=r"before 2\.5"):
            read_part(old_mesh([1, 0], 2, 2), package="torch.distributed._tensor", placements=2)

    def test_a_field_that_is_not_known(self):
        mesh = old_mesh([1], 2)
        mesh.state["_backwards"] = True
        with pytest.raises(CkptError, match="_backwards"):
            read_part(mesh)

    def test_a_parameter_is_read_as_what_it_wraps(self):
        parameter = Opaque(PARAMETER, (dtensor(old_mesh([1], 2)), True))
        assert PartReader().read_part(parameter) == read_part(old_mesh([1], 2))

    @pytest.mark.parametrize("coordinate", [[2], [0, 0], [-1], [True], None])
    def test_a_coordinate_outside_of_the_mesh(self, coordinate):
        with pytest.raises(CkptError):
            read_part(old_mesh(coordinate, 2))
