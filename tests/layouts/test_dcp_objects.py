"""Tensors in pickled objects, and tensors of classes of their own: read exactly, or refused by name everywhere."""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.masked import masked_tensor

import ckpt_tools
from ckpt_tools.errors import FormatError, UnsafeError, UnsupportedError
from fixtures.corpus import make
from fixtures.corpus.dcp_variants import Quantized
from tests.layouts.contents import of_tensor
from tests.support.every_verb import refusal

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.extended]

UNFLATTENED = ["dcp-unflattened", "dcp-unflattened-zstd"]


def loaded(folder: Path) -> dict[str, Any]:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    state: dict[str, Any] = dict.fromkeys(metadata.state_dict_metadata)
    dcp.load(state, checkpoint_id=folder, planner=planner)
    return state


def tensors(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield ".".join(map(str, path)), value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from tensors(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            yield from tensors(inner, (*path, position))
    elif isinstance(value, Held):
        yield from tensors(vars(value), path)


def assert_same(found: Any, wanted: Any) -> None:
    one, other = dict(tensors(found)), dict(tensors(wanted))
    assert one.keys() == other.keys() and other
    for name, tensor in other.items():
        assert of_tensor(one[name]) == of_tensor(tensor), name


def save(state: dict[str, Any], folder: Path, **planner: Any) -> Path:
    dcp.save(state, checkpoint_id=folder, planner=DefaultSavePlanner(**planner))
    return folder


def is_sound(folder: Path) -> bool:
    try:
        return ckpt_tools.verify(folder).equal
    except (FormatError, UnsafeError):
        return False


def as_torch(folder: Path, out: Path) -> Any:
    dcp_to_torch_save(folder, out)
    return torch.load(out, weights_only=False)


class TestUnflattened:
    """``DefaultSavePlanner(flatten_state_dict=False)``."""

    @pytest.mark.parametrize("name", UNFLATTENED)
    def test_every_tensor_that_torch_gives_is_counted_and_converted(self, name, tmp_path):
        source = make(name).source
        wanted, found = loaded(source), ckpt_tools.inspect(source)
        weights = [tensor for _, tensor in tensors(wanted["model"])]
        assert found.num_parameters == sum(each.numel() for each in weights if each.is_floating_point())
        assert len(found.tensors) == len(dict(tensors(wanted)))
        ckpt_tools.convert(source, tmp_path / "whole.pt", state="all")
        whole = torch.load(tmp_path / "whole.pt", weights_only=True)
        assert_same(whole, wanted)
        assert whole["epoch"] == 3 and whole["optim"]["param_groups"] == wanted["optim"]["param_groups"]
        ckpt_tools.convert(source, tmp_path / "dcp", to="dcp", world_size=2)
        assert_same(as_torch(tmp_path / "dcp", tmp_path / "of_dcp.pt"), wanted)
        ckpt_tools.convert(source, tmp_path / "model.safetensors")
        assert_same(load_file(tmp_path / "model.safetensors"), wanted["model"])

    @pytest.mark.parametrize("wanted", [b"PK\x03\x04", b"blocks.0.up.bias", None], ids=["zip", "pickle", "elements"])
    def test_damage_is_found(self, wanted, tmp_path):
        source = tmp_path / "in"
        shutil.copytree(make("dcp-unflattened").source, source)
        assert is_sound(source)
        weight = loaded(source)["model"]["blocks.0.up.weight"].numpy().tobytes() if wanted is None else wanted
        file = next(each for each in sorted(source.glob("*.distcp")) if weight in each.read_bytes())
        data = bytearray(file.read_bytes())
        data[data.index(weight) + 1] ^= 0x55
        file.write_bytes(data)
        assert not is_sound(source)


@dataclass
class Held:
    rows: torch.Tensor


class TestObjects:
    """Tensors that flattening leaves in objects."""

    STATE: Callable[[], dict[str, Any]] = staticmethod(
        lambda: {
            "model": {"w": torch.ones(3)},
            "pair": (torch.ones(2), torch.tensor(5.0)),
            "held": Held(torch.arange(4.0)),
            "deep": ({"x": [torch.ones(2, 2)]}, {"y": (torch.zeros(()),)}),
            "step": torch.tensor(7),
        }
    )

    @pytest.mark.parametrize("extensions", [[], [ZStandard()]], ids=["plain", "zstd"])
    def test_each_is_counted_and_kept(self, extensions, tmp_path):
        state = self.STATE()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "in", _extensions=extensions))
        found = ckpt_tools.inspect(tmp_path / "in")
        assert len(found.tensors) == len(dict(tensors(state))) == 7
        ckpt_tools.convert(tmp_path / "in", tmp_path / "dcp", to="dcp")
        assert_same(as_torch(tmp_path / "dcp", tmp_path / "of_dcp.pt"), state)
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out.pt", state="all")
        assert_same(torch.load(tmp_path / "out.pt", weights_only=False), state)

    @pytest.mark.parametrize("name", ["of_subclass", "storage"])
    def test_what_cannot_be_kept_is_named(self, name, tmp_path):
        value = {"of_subclass": (torch.ones(2).as_subclass(Plain),), "storage": (torch.ones(2).untyped_storage(),)}[
            name
        ]
        save({"model": {"w": torch.ones(3)}, name: value}, tmp_path / "in")
        with pytest.raises(UnsupportedError, match=rf"{name}: it holds a .*, which cannot be read"):
            ckpt_tools.inspect(tmp_path / "in")
        ckpt_tools.convert(tmp_path / "in", tmp_path / "out", to="dcp", exclude=name)
        assert_same(as_torch(tmp_path / "out", tmp_path / "of.pt"), {"model": {"w": torch.ones(3)}})


class Plain(torch.Tensor):
    """A subclass that adds nothing."""


def _with_attribute(found: torch.Tensor) -> torch.Tensor:
    found.scale = torch.ones(2)  # type: ignore[attr-defined]
    return found


KINDS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "wrapper": (lambda: Quantized(torch.zeros(64, 64).byte(), torch.ones(64)), r"dcp_variants\.Quantized"),
    "of a parameter": (lambda: nn.Parameter(Quantized(torch.zeros(64, 64).byte(), torch.ones(64))),
        r"dcp_variants\.Quantized"),
    "subclass": (lambda: torch.ones(5, 5).as_subclass(Plain), r"test_dcp_objects\.Plain"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
        "NestedTensor"),
    "coo": (lambda: torch.ones(3, 3).to_sparse(), "sparse tensor"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized tensor|qint8"),
    "masked": (lambda: masked_tensor(torch.ones(3), torch.ones(3).bool()), "MaskedTensor"),
    "meta": (lambda: torch.ones(3, device="meta"), "on the meta device"),
    "conjugated": (lambda: torch.ones(3, dtype=torch.complex64).conj(), "the flags conj"),
    "uninitialized": (nn.UninitializedParameter, "UninitializedParameter, which has no elements"),
    "with a tensor as attribute": (lambda: _with_attribute(torch.ones(2, 2)),
        r"torch\.Tensor with attributes of its own \(scale\)"),
}  # fmt: skip

OF_DCP = ("wrapper", "of a parameter", "subclass", "quantized", "conjugated")
"""Those that torch saves in a DCP, and still are what they were."""


def _saved(kind: str, form: str, tmp_path: Path) -> Path:
    state = {"model": {"a.weight": torch.ones(5, 5), "b.weight": KINDS[kind][0]()}}
    if form == "pt":
        torch.save(state, tmp_path / "in.pt")
        return tmp_path / "in.pt"
    extensions = [ZStandard()] if form == "zstd" else []
    planner = DefaultSavePlanner(flatten_state_dict=form != "unflattened")
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "in", _extensions=extensions), planner=planner)
    return tmp_path / "in"


FORMS = [(kind, form) for kind in KINDS for form in ("pt", "unflattened", "dcp", "zstd")]


@pytest.mark.parametrize(
    ("kind", "form"), [(kind, form) for kind, form in FORMS if form in ("pt", "unflattened") or kind in OF_DCP]
)
def test_a_class_is_refused_by_name_in_every_command_and_can_be_left_out(kind, form, tmp_path):
    source, out, exclude = _saved(kind, form, tmp_path), tmp_path / "out", "b.weight"
    wanted = {"a.weight": torch.ones(5, 5)}
    code, told = refusal(source, out)
    assert code == 4 and re.search(rf"b\.weight: it .*{KINDS[kind][1]}", told)
    assert "leave it out with exclude='b.weight'" in told
    assert ckpt_tools.plan(source, out, to="dcp", exclude=exclude).num_tensors == 1
    report = ckpt_tools.convert(source, out, to="dcp", exclude=exclude)
    changed = [("the form of model as one entry", False)] if form == "unflattened" else []
    assert [(note.what, note.asked) for note in report.plan.notes] == [("b.weight", True), *changed]
    found = as_torch(out, tmp_path / "of_dcp.pt")
    assert_same(found.get("model", found), wanted)
    assert ckpt_tools.verify(source, out, exclude=exclude).equal
    assert ckpt_tools.diff(source, out, exclude=exclude).equal
    ckpt_tools.consolidate(source, tmp_path / "out.safetensors", include="a.*")
    assert_same(load_file(tmp_path / "out.safetensors"), wanted)


def test_a_quantized_optimizer_is_left_out_by_its_own_names(tmp_path):
    """Its parameters stay."""
    moment = Quantized(torch.zeros(2, 2).byte(), torch.ones(2))
    state = {
        "model": {"w": torch.ones(2, 2), "v": torch.ones(2)},
        "optim": {
            "state": {"w": {"exp_avg": moment, "step": torch.tensor(1.0)}},
            "param_groups": [{"params": ["w", "v"], "lr": 0.1}],
        },
    }
    for number, planner in enumerate([{}, {"flatten_state_dict": False}]):
        source = save(state, tmp_path / f"in{number}", **planner)
        with pytest.raises(UnsupportedError, match=r"exclude='optim\.state\.w\.exp_avg'"):
            ckpt_tools.inspect(source)
        out = tmp_path / f"out{number}.safetensors"
        ckpt_tools.convert(source, out, exclude="optim.state.*")
        assert load_file(out).keys() == {"w", "v"}
        ckpt_tools.convert(source, tmp_path / f"dcp{number}", to="dcp", exclude="w")
        found = ckpt_tools.inspect(tmp_path / f"dcp{number}")
        assert found.num_tensors == 1 and found.groups[0].num_tensors == 1
