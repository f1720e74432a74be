"""``diff`` and ``verify`` show a summary, then the largest differences. Differences are a result and not an error."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.cli.main import main
from tests.cli.terminals import shown

SCREEN_LINES = 50

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


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    out, error = capsys.readouterr()
    return int(str(ended.value.code or 0)), out, error


def test_a_pipe_gets_a_summary_and_one_line_a_tensor(pair, capsys):
    assert run(capsys, "diff", *pair) == (6, EXPECTED, "")


def test_top_and_all(pair, capsys):
    lines = EXPECTED.splitlines()
    _, out, _ = run(capsys, "diff", *pair, "--top", "2")
    assert out.splitlines() == [*lines[:5], "and 5 more; --all lists them"]
    assert run(capsys, "diff", *pair, "--all")[1] == EXPECTED
    code, _, error = run(capsys, "diff", *pair, "--top", "2", "--all")
    assert code == 2 and "--top and --all cannot be combined" in error
    assert len(json.loads(run(capsys, "diff", *pair, "--top", "2", "--json")[1])["differences"]) == 7
    assert len(ckpt_tools.diff(*pair).differences) == 7


def test_the_totals_in_python(pair):
    report = ckpt_tools.diff(*pair)
    assert (report.num_tensors, report.num_compared, report.num_differing, report.num_equal) == (7, 8, 7, 1)
    assert report.summary.aspects == {"values": 3, "dtype": 1, "missing": 1, "shape": 1, "unexpected": 1}
    assert next(iter(report.summary.modules.items())) == ("model.layers", 3)


def state(path: Path, weight: float, master: float, moment: float, step: int) -> Path:
    """A DCP of a model with one parameter and its Adam."""
    import torch.distributed.checkpoint as dcp

    slots = {"exp_avg": torch.full((4,), moment), "exp_avg_sq": torch.ones(4), "step": torch.tensor(float(step))}
    model = {"layer.w": torch.full((4,), weight)}
    group = {"params": ["layer.w"], "lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}
    optim = {"state": {"layer.w": slots}, "param_groups": [group]}
    dcp.save({"app": {"model": model, "optim": optim}}, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.filterwarnings("ignore")
def test_a_weight_and_its_equal_master_are_one_line(tmp_path, capsys):
    folders = []
    for name, weight, step in (("a", 1.0, 3), ("b", 1.5, 8)):
        made = state(tmp_path / f"dcp-{name}", weight, weight, weight * 8, step)
        ckpt_tools.convert(made, tmp_path / name, to="zero1", world_size=1)
        folders.append(tmp_path / name)
    code, out, _ = run(capsys, "diff", *folders)
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


def test_many_differences_fit_on_a_screen_and_no_name_is_folded(tmp_path):
    names = [
        f"encoder.layers.encoder_layer_{layer}.self_attention.out_proj_{part}.weight"
        for layer in range(32)
        for part in range(20)
    ]
    for file, value in (("a", 1.0), ("b", 1.001)):
        save_file({name: torch.full((128,), value) for name in names}, tmp_path / f"{file}.safetensors")
    code, text = shown("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--quiet", columns=80)
    lines = text.splitlines()
    assert code == 6
    assert len(lines) <= SCREEN_LINES
    assert all(len(line) <= 80 for line in lines)
    assert lines[0] == "640 of 640 tensors differ: 640 in values"
    assert lines[-1] == "and 620 more; --all lists them"
    assert set(re.findall(r"^encoder\S+?(?=:)", text, re.MULTILINE)) <= set(names)
    assert len(re.findall(r"^encoder\S+?(?=:)", text, re.MULTILINE)) == 20


def test_verify_says_that_it_failed_and_asks_for_the_dtype(tmp_path, capsys):
    save_file({"w": torch.ones(4), "v": torch.ones(2)}, tmp_path / "a.safetensors")
    ckpt_tools.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", dtype="bfloat16")
    code, out, error = run(capsys, "verify", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (code, error) == (6, "")
    assert out.splitlines() == [
        "verification failed",
        "2 of 2 tensors differ: 2 in dtype",
        "by module: v 1, w 1",
        "2 tensors: float32 -> bfloat16, equal as numbers (v, w)",
        "Every difference is in dtype. Was DST converted with --dtype? Then give verify the same --dtype.",
    ]


@pytest.mark.parametrize("columns", [40, 80])
def test_long_file_names_are_not_folded(columns, tmp_path):
    save_file({"w": torch.ones(4)}, tmp_path / "a.safetensors")
    name = "pytorch_model_of_the_second_epoch_with_a_long_name.safetensors"
    code, text = shown("plan", tmp_path / "a.safetensors", tmp_path / name, columns=columns)
    assert code == 0
    assert name in text


def test_findings_wrap_at_words(tmp_path):
    name = "a_checkpoint_of_somebody_else_with_a_long_name_of_its_own.npy"
    (tmp_path / name).write_bytes(b"\x93NUMPY\x01\x00\x02\x00{}")
    code, text = shown("scan", tmp_path, columns=60)
    assert code == 7
    assert name in text
    assert all(len(line) <= 60 or len(line.split()) == 1 for line in text.splitlines())
    assert "the header of the array is not as numpy writes it; it may mean objects" in " ".join(text.split())
