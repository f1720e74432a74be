"""``diff`` and ``verify`` show a summary, then the largest differences. Differences are a result and not an error."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file

import ckpt_tools
from tests.support.commands import run_command

EXPECTED = """\
7 of 8 tensors differ: 3 in values, 1 in dtype, 1 missing, 1 in shape, 1 unexpected
largest difference of a weight: 2 (relative 0.667), in model.layers.1.w
by module: model.layers 3, head 1, model.embed 1, model.new 1, scale 1
head.w: shape [2] in A, [3] in B
scale: only in A
model.new.w: only in B
model.layers.1.w: 1 of 4 elements differ, by at most 2 (relative 0.667)
model.layers.2.w: 4 of 4 elements differ, by at most 0.5 (relative 0.333)
model.embed.w: float32 in A, bfloat16 in B; as numbers, 0 of 4 elements differ
model.layers.0.w: 1 of 4 elements differ; 1 in the sign of a zero
"""


@pytest.fixture
def pair(tmp_path):
    zeros, ones = torch.zeros(4), torch.ones(4)
    a = {f"model.layers.{number}.w": ones.clone() for number in range(4)}
    a |= {"model.layers.0.w": zeros, "model.embed.w": ones.clone(), "head.w": torch.ones(2), "scale": torch.ones(1)}
    b = {name: tensor.clone() for name, tensor in a.items() if name != "scale"}
    b["model.layers.0.w"][0] = -0.0
    b["model.layers.1.w"][3] = 3
    b["model.layers.2.w"] = ones + 0.5
    b |= {"model.embed.w": ones.bfloat16(), "head.w": torch.ones(3), "model.new.w": torch.ones(2)}
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    return tmp_path / "a.safetensors", tmp_path / "b.safetensors"


def test_a_pipe_gets_a_summary_and_one_line_a_tensor(pair):
    assert run_command("diff", *pair) == (6, EXPECTED, "")


def test_top_and_all_on_the_command_line_and_totals_in_python(pair):
    lines = EXPECTED.splitlines()
    _, out, _ = run_command("diff", *pair, "--top", "2")
    assert out.splitlines() == [*lines[:5], "and 5 more; --all lists them"]
    assert run_command("diff", *pair, "--all")[1] == EXPECTED
    code, _, error = run_command("diff", *pair, "--top", "2", "--all")
    assert code == 2 and "--top and --all cannot be combined" in error
    code, _, error = run_command("diff", *pair, "--json", "--format", "text")
    assert code == 2 and "contradict" in error
    found = run_command("diff", *pair, "--top", "2", "--json")[1]
    assert found == run_command("diff", *pair, "--format", "json")[1] and len(json.loads(found)["differences"]) == 7
    report = ckpt_tools.diff(*pair)
    assert len(report.differences) == 7
    assert (report.num_tensors, report.num_compared, report.num_differing, report.num_equal) == (7, 8, 7, 1)
    assert report.summary.aspects == {"values": 3, "dtype": 1, "missing": 1, "shape": 1, "unexpected": 1}
    assert next(iter(report.summary.modules.items())) == ("model.layers", 3)


def state(path: Path, weight: float, step: int) -> Path:
    """A DCP of a model with one parameter and its Adam."""
    moments = {"exp_avg": torch.full((4,), 8 * weight), "exp_avg_sq": torch.ones(4), "step": torch.tensor(float(step))}
    group = {"params": ["layer.w"], "lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}
    optim = {"state": {"layer.w": moments}, "param_groups": [group]}
    model = {"layer.w": torch.full((4,), weight)}
    torch.distributed.checkpoint.save({"app": {"model": model, "optim": optim}}, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.filterwarnings("ignore")
def test_a_weight_and_its_equal_master_are_one_line(tmp_path):
    folders = []
    for name, weight, step in (("a", 1.0, 3), ("b", 1.5, 8)):
        made = state(tmp_path / f"dcp-{name}", weight, step)
        ckpt_tools.convert(made, tmp_path / name, to="zero1", world_size=1)
        folders.append(tmp_path / name)
    code, out, _ = run_command("diff", *folders)
    assert code == 6
    assert out.splitlines() == [
        "4 of 5 tensors differ: 4 in values",
        "largest difference of a weight: 0.5 (relative 0.333), in layer.w",
        "largest difference of optimizer state: 4 (relative 0.333), in layer.w (exp_avg)",
        "largest difference of a step count: 5 (relative 0.625), in layer.w (step)",
        "by module: layer 4",
        "layer.w (weight and master): 4 of 4 elements differ, by at most 0.5 (relative 0.333)",
        "layer.w (exp_avg): 4 of 4 elements differ, by at most 4 (relative 0.333)",
        "layer.w (step): 1 of 1 element differs, by at most 5 (relative 0.625)",
    ]
    assert len(ckpt_tools.diff(*folders).differences) == 4


def test_verify_says_that_it_failed_and_asks_for_the_dtype(tmp_path):
    save_file({"w": torch.ones(4), "v": torch.ones(2)}, tmp_path / "a.safetensors")
    ckpt_tools.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", dtype="bfloat16")
    code, out, error = run_command("verify", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (code, error) == (6, "")
    assert out.splitlines() == [
        "verification failed",
        "2 of 2 tensors differ: 2 in dtype",
        "by module: v 1, w 1",
        "2 tensors: float32 -> bfloat16, equal as numbers (v, w)",
        "Every difference is in dtype. Was DST converted with --dtype? Then give verify the same --dtype.",
    ]
