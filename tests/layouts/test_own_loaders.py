"""A resharded DCP is loaded by the code of the job that saved the source, unchanged: the tree, its keys and its numbers
are the source's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint._extension import ZStandard

import ckpt_tools
from ckpt_tools.errors import LossError, UnsupportedError
from fixtures import launch

pytestmark = pytest.mark.extended

CASES = (("fsdp2-plain", 2, 3), ("fsdp2-pair", 3, 2), ("fsdp2-olmo", 2, 3), ("fsdp2-titan", 3, 2))


@pytest.mark.parametrize(("kind", "before", "after"), CASES)
def test_the_job_resumes_as_from_the_source(kind, before, after, checkpoint, resume, tmp_path):
    source = checkpoint(kind, "plain", before).checkpoint
    report = ckpt_tools.reshard(source, tmp_path / "out", world_size=after, strict=True)
    assert report.notes == ()
    wanted, found = (resume(kind, "plain", each, after) for each in (source, tmp_path / "out"))
    assert found.facts["losses"] == wanted.facts["losses"]
    assert {key: each.tobytes() for key, each in found.tensors.items()} == {
        key: each.tobytes() for key, each in wanted.tensors.items()
    }


def keys_of(folder: Path) -> set[str]:
    """Names of entries, with the folder that each lies in."""
    found = (path.parent for path in folder.rglob(".metadata"))
    return {
        f"{each.relative_to(folder)}:{name}"
        for each in found
        for name in dcp.FileSystemReader(each).read_metadata().state_dict_metadata
    }


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(*(torch.nn.Linear(n, n + 1) for n in (3, 4, 5)))


OPTIMIZERS = {
    "groups": lambda net: torch.optim.AdamW([{"params": [each for each in net.parameters() if each.ndim > 1],
        "weight_decay": 0.1}, {"params": [each for each in net.parameters() if each.ndim < 2], "weight_decay": 0.0}]),
    "named": lambda net: torch.optim.AdamW(net.named_parameters(), amsgrad=True),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
    "some": lambda net: torch.optim.RMSprop(net[1].parameters()),
    "no state": lambda net: torch.optim.SGD(net.parameters(), 0.1),
    "nested options": lambda net: torch.optim.SGD([{"params": net.parameters(), "own": {"a": {"b": 1}, "c": {}}}], 0.1),
    "number": lambda net: torch.optim.ASGD(net.parameters()),
}  # fmt: skip


def trained(name: str) -> dict[str, object]:
    net = Net()
    optimizer = OPTIMIZERS[name](net)
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    counts = {"seen": {0: 7, 1: 8}, "losses": [0.5, 0.25], "nested": [{"a": 1}, {"b": torch.arange(3)}]}
    return {
        "net": net.state_dict(),
        "optimizers": [optimizer.state_dict()],
        "scheduler": scheduler.state_dict(),
    } | counts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_dcp_and_a_torch_file_keep_every_key_and_load(name, tmp_path):
    dcp.save(trained(name), checkpoint_id=tmp_path / "in", no_dist=True)
    torch.save(trained(name), tmp_path / "in.pt")
    ckpt_tools.convert(tmp_path / "in", tmp_path / "out", to="dcp", world_size=3, model_key="net", strict=True)
    ckpt_tools.convert(tmp_path / "in.pt", tmp_path / "out.pt", state="all", model_key="net", strict=True)
    assert keys_of(tmp_path / "out") == keys_of(tmp_path / "in")
    loaded = {folder: trained(name) for folder in ("in", "out")}
    for folder, tree in loaded.items():
        dcp.load(tree, checkpoint_id=tmp_path / folder, no_dist=True)
    loaded |= {file: torch.load(tmp_path / file, weights_only=True) for file in ("in.pt", "out.pt")}
    for found, wanted in (("out", "in"), ("out.pt", "in.pt")):
        assert_same(loaded[found], loaded[wanted])
        OPTIMIZERS[name](Net()).load_state_dict(loaded[found]["optimizers"][0])  # type: ignore[index]


def assert_same(found: object, wanted: object) -> None:
    """The same keys in any order, values and bits, all the way down."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor) and found.dtype is wanted.dtype and torch.equal(found, wanted)
    elif isinstance(wanted, dict | list):
        assert isinstance(found, dict if isinstance(wanted, dict) else list) and len(found) == len(wanted)
        for key in wanted if isinstance(wanted, dict) else range(len(wanted)):
            assert_same(found[key], wanted[key])  # type: ignore[index]
    else:
        assert found == wanted


@pytest.mark.parametrize("option", ["exclude", "like"])
def test_other_parameters_get_names_and_a_note(option, tmp_path):
    save_file(Net().state_dict(), tmp_path / "like.safetensors")
    torch.save({"model": Net().state_dict(), "optimizer": trained("groups")["optimizers"][0]}, tmp_path / "in.pt")  # type: ignore[index]
    options: Any = {"exclude": ["2.*"]} if option == "exclude" else {"like": tmp_path / "like.safetensors"}
    report = ckpt_tools.convert(tmp_path / "in.pt", tmp_path / "out.pt", state="all", **options)
    assert "the numbers of the optimizer's parameters" in [note.what for note in report.notes]
    found = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]
    assert "0.weight" in found["state"] and "0.weight" in found["param_groups"][0]["params"]
    with pytest.raises(LossError, match="the numbers of the optimizer's parameters"):
        ckpt_tools.convert(tmp_path / "in.pt", tmp_path / "no.pt", state="all", strict=True, **options)


TARGETS_OF_RUNS = ["dcp", "zero2", "zero3", "universal", "megatron", "sharded"]


def unproved(folder: Path) -> dict[str, Path]:
    """Optimizers whose parameters nothing tells apart: in a torch file, in a DCP, and beside safetensors."""
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.AdamW([*net[2].parameters(), *net[0].parameters()])
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    tree = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, folder / "in.pt")
    dcp.save(tree, checkpoint_id=folder / "dcp", no_dist=True)
    (folder / "trainer").mkdir()
    save_file(net.state_dict(), folder / "trainer" / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "trainer" / "optimizer.pt")
    return {name: folder / name for name in ("in.pt", "dcp", "trainer")}


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_that_cannot_be_placed_is_not_dropped(tmp_path):
    """A run would go on without it; the weights alone are for those who ask for them."""
    order = ["2.weight", "2.bias", "0.weight", "0.bias"]
    (tmp_path / "order.json").write_text(json.dumps([order]))
    for name, source in unproved(tmp_path).items():
        for to in TARGETS_OF_RUNS:
            if name == to:
                continue
            options: Any = {"to": to, "world_size": 2} if to != "universal" else {"to": to}
            for call in (ckpt_tools.convert, ckpt_tools.plan):
                with pytest.raises(
                    UnsupportedError, match=r"it numbers its parameters, and nothing .* param_order="
                ) as told:
                    call(source, tmp_path / "out", **options)
                assert "state='model'" in str(told.value) and not (tmp_path / "out").exists()
            assert ckpt_tools.plan(source, tmp_path / "out", **options, state="model").tensors_by_role["weights"] == 6
            report = ckpt_tools.plan(source, tmp_path / "out", **options, param_order=tmp_path / "order.json")
            assert report.tensors_by_role["optimizer"] >= 8
    ckpt_tools.reshard(tmp_path / "dcp", tmp_path / "same", world_size=2, strict=True)
    assert keys_of(tmp_path / "same") == keys_of(tmp_path / "dcp")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_compressed", [False, True])
def test_the_step_of_torchtitan_and_the_states_of_its_ranks(is_compressed, tmp_path):
    state = {"w": torch.ones(6, 2), "train_state": {"step": torch.tensor(1234, dtype=torch.int32)}}
    state["dataloader"] = {f"dp_rank_{rank}": b"state" for rank in range(4)} | {"world_size": 4}
    launch.pool(2).run(_save_as_titan, state, str(tmp_path / "run" / "final"), is_compressed)
    assert ckpt_tools.inspect(tmp_path / "run" / "final").step == 1234
    (listed,) = ckpt_tools.ls(tmp_path / "run").checkpoints
    assert listed.step == 1234
    assert ckpt_tools.inspect(f"{tmp_path}/run@latest").step == 1234
    assert not ckpt_tools.convert(f"{tmp_path}/run/final", tmp_path / "same", to="dcp", strict=True).notes
    report = ckpt_tools.reshard(tmp_path / "run" / "final", tmp_path / "out", world_size=3)
    (note,) = report.notes
    assert (note.what, note.count, note.is_loss) == ("dataloader", 4, True)
    assert keys_of(tmp_path / "out") == keys_of(tmp_path / "run" / "final")
    with pytest.raises(LossError, match="dataloader"):
        ckpt_tools.reshard(tmp_path / "run" / "final", tmp_path / "no", world_size=3, strict=True)


def _save_as_titan(state: dict[str, Any], folder: str, is_compressed: bool) -> None:
    extensions: list[Any] = [ZStandard()] if is_compressed else []
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, _extensions=extensions))


def test_names_beside_numbers_are_renamed_with_the_weights(tmp_path):
    torch.save(trained("named"), tmp_path / "in.pt")
    options: Any = {"state": "all", "model_key": "net", "rename": [r"^(.)=layers.\1"]}
    ckpt_tools.convert(tmp_path / "in.pt", tmp_path / "out.pt", strict=True, **options)
    (optimizer,) = torch.load(tmp_path / "out.pt", weights_only=True)["optimizers"]
    assert optimizer["param_groups"][0]["params"] == list(range(6))
    assert optimizer["param_groups"][0]["param_names"][0] == "layers.0.weight"
    assert set(ckpt_tools.inspect(tmp_path / "out.pt", model_key="net").optimizer_slots) >= {"exp_avg", "step"}
