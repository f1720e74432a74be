"""``ckpt-tools samples``: its checkpoints are whole, the frameworks load them, and nothing is written over."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, AutoTokenizer

import ckpt_tools
from ckpt_tools.cli.samples import SAMPLES
from tests.support.commands import run_command


@pytest.fixture
def samples(tmp_path):
    folder = tmp_path / "new" / "tiny"
    done = run_command("samples", folder)
    assert (done.code, done.err) == (0, "")
    assert [line.split("\t")[0] for line in done.out.splitlines()] == [str(folder / name) for name in SAMPLES]
    assert {path.name for path in folder.iterdir()} == SAMPLES.keys()
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_samples_are_whole_and_load(samples, tmp_path):
    assert [each.problem for each in ckpt_tools.ls(str(samples / "fsdp2")).checkpoints] == [None]
    for name in ("fsdp2/step-600", "zero3"):
        ckpt_tools.verify(samples / name)
        ckpt_tools.convert(samples / name, tmp_path / name, to="safetensors", config=samples / "base")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        tokens = tokenizer("First Citizen:\nBefore we", return_tensors="pt").input_ids
        with torch.no_grad():
            loss = model(input_ids=tokens, labels=tokens).loss
        assert loss < 2.5  # of a model that has learned: it begins with log(256) = 5.5
    weights = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    dcp.load({"model": weights}, checkpoint_id=samples / "fsdp2/step-600", no_dist=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fsdp2/step-600")
    assert all(each.equal(weights[name]) for name, each in model.state_dict().items())


def test_what_is_there_stays(samples, tmp_path):
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for taken in (samples, tmp_path / "file"):
        done = run_command("samples", taken)
        assert done.code == 8 and str(taken) in done.err
    assert run_command("samples", "s3://bucket/tiny").code == 2
    assert sorted(tmp_path.rglob("*")) == before
