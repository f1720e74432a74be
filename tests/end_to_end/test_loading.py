"""The code that a report gives to load its output: run as it is, and what it loads compared with the source, bit for
bit. tests/formats/deepspeed/common/test_scheduler.py runs DeepSpeed's."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt_tools
from ckpt_tools.cli.main import group
from tests.support.trees import assert_same_tree

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for _ in range(seed):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture
def state(tmp_path):
    model, optimizer = made(1)
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 7, "log": {"loss": [0.5]}},
        tmp_path / "state.pt",
    )
    return tmp_path / "state.pt"


@pytest.fixture
def weights(tmp_path):
    torch.save(made(1)[0].state_dict(), tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def run(report: ckpt_tools.ConvertReport, **names: Any) -> dict[str, Any]:
    assert len(report.loading.splitlines()) <= 5
    exec(report.loading, names)
    return names


def assert_same(found: Any, expected: Any) -> None:
    """The same tree, tensors by their bits."""
    assert_same_tree(*(dict(each) if isinstance(each, Mapping) else each for each in (expected, found)))


def assert_resumed(names: Mapping[str, Any]) -> None:
    model, optimizer = made(1)
    assert_same(names["model"].state_dict(), model.state_dict())
    found, expected = names["optimizer"].state_dict(), optimizer.state_dict()
    assert_same(found["state"], expected["state"])
    assert found["param_groups"][0]["lr"] == expected["param_groups"][0]["lr"]


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_a_whole_state_into_a_job(to, state, tmp_path):
    model, optimizer = made(2)
    report = ckpt_tools.convert(state, tmp_path / "it's {odd}", to=to, state="all")
    assert_resumed(run(report, model=model, optimizer=optimizer))


def test_another_tree_of_a_dcp(tmp_path, state):
    ckpt_tools.convert(state, tmp_path / "zero", to="zero1")
    report = ckpt_tools.convert(tmp_path / "zero", tmp_path / "out", to="dcp", model_key="a.b.net")
    assert 'dcp.load({"a": {"b": {"net": weights, "optim": optim}}}, checkpoint_id=' in report.loading
    assert report.loading.endswith(", a.b.epoch, a.b.log; for another tree: model_key=")
    model, optimizer = made(2)
    assert_resumed(run(report, model=model, optimizer=optimizer))


def test_the_tree_of_the_source(tmp_path):
    import torch.distributed.checkpoint as dcp
    import torch.distributed.checkpoint.state_dict as sd

    options = sd.StateDictOptions(flatten_optimizer_state_dict=True)
    weights, optim = sd.get_state_dict(*made(1), options=options)
    dcp.save({**weights, "optimizer": optim, "train": {"step": 3}}, checkpoint_id=tmp_path / "in", no_dist=True)
    report = ckpt_tools.reshard(tmp_path / "in", tmp_path / "out", world_size=2)
    assert 'dcp.load({**weights, "optimizer": optim}, ' in report.loading
    assert report.loading.endswith("# also in the tree: train")
    model, optimizer = made(2)
    assert_resumed(run(report, model=model, optimizer=optimizer))


@pytest.mark.parametrize(
    ("to", "ending"),
    [*((to, "") for to in ("dcp", "safetensors", "torch", "gguf", "meta")), ("torch", ".pt"), ("npz", ".npz")],
)
def test_weights_alone(to, ending, weights, tmp_path):
    expected = made(1)[0].state_dict()
    if to in ("meta", "gguf"):  # names of Llama, and no integers of 64 bits
        expected = {"layers.0.attention.wq.weight": expected["0.weight"], "norm.weight": expected["0.bias"]}
        torch.save(expected, weights)
    model = made(2)[0]
    sharded = {"max_shard_size": 60} if to in ("safetensors", "torch") and not ending else {}
    names = run(ckpt_tools.convert(weights, tmp_path / f"out{ending}", to=to, **sharded), model=model)
    if to == "gguf":
        found = {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in names["reader"].tensors}
    elif to == "npz":
        found = {name: torch.from_numpy(array) for name, array in names["arrays"].items()}
    else:
        found = model.state_dict() if to == "dcp" else names["state_dict"]
    assert_same({name: found[name] for name in expected}, expected)


def test_tied_weights_of_safetensors(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    first, second = Tied(), Tied()
    torch.save(first.state_dict(), tmp_path / "m.pt")
    run(ckpt_tools.convert(tmp_path / "m.pt", tmp_path / "m.safetensors"), model=second)
    assert_same(second.state_dict(), first.state_dict())


def test_objects_that_weights_only_refuses(state, tmp_path):
    torch.save({**torch.load(state), "rng": np.random.default_rng(1).bit_generator.state, "n": np.float64(2)}, state)
    report = ckpt_tools.convert(state, tmp_path / "out.pt", state="all")
    assert report.loading.startswith("# torch.load(weights_only=True) refuses numpy")
    model, optimizer = made(2)
    assert run(report, model=model, optimizer=optimizer)["extras"]["n"] == 2
    assert_same(model.state_dict(), made(1)[0].state_dict())


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_files_of_ranks(state, tmp_path, process_group):
    names = run(ckpt_tools.convert(state, tmp_path / "out", to="sharded"), rank=0)
    model, optimizer = made(2)
    model.load_state_dict({name: getattr(part, "_local_tensor", part) for name, part in names["model_state"].items()})
    assert_same(model.state_dict(), made(1)[0].state_dict())
    assert names["optim_state"]["state"].keys() == optimizer.state_dict()["state"].keys()


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore")
def test_megatron(weights, tmp_path, process_group):
    from megatron.core.dist_checkpointing import ShardedTensor

    report = ckpt_tools.convert(weights, tmp_path / "out", to="megatron")
    expected = torch.load(weights)["0.weight"]
    asked = {"w": ShardedTensor.from_rank_offsets("0.weight", torch.zeros_like(expected))}
    assert_same(run(report, sharded_state_dict=asked)["state"]["w"], expected)


def test_a_folder_of_transformers(tmp_path):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "in")
    report = ckpt_tools.convert(tmp_path / "in", tmp_path / "out", to="torch")
    assert report.loading.splitlines()[0] == "from transformers import LlamaForCausalLM"
    assert_same(run(report)["model"].state_dict(), model.state_dict())


def test_a_copy_of_what_is_in_a_store(weights):
    report = ckpt_tools.convert(weights, "memory://loading/model.safetensors")
    assert report.loading.splitlines()[1:] == [
        'state_dict = load_file("model.safetensors")',
        f"# model.safetensors: a local copy of {report.destination}",
    ]


def test_the_command_line_prints_it(weights, tmp_path):
    def printed(*options: str) -> str:
        return CliRunner().invoke(group, ["convert", str(weights), str(tmp_path / "m.safetensors"), *options]).stdout

    code = f'from safetensors.torch import load_file\nstate_dict = load_file("{tmp_path}/m.safetensors")'
    assert printed().endswith("load it with:\n" + "".join(f"  {line}\n" for line in code.splitlines()))
    assert "load it with" not in printed("--overwrite", "--quiet")
    assert json.loads(printed("--overwrite", "--json"))["loading"] == code
