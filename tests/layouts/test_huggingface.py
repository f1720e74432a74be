"""What transformers and accelerate write is converted whole, and training goes on in the targets' own frameworks."""

import json
import shutil
from collections.abc import Mapping

import numpy as np
import pytest
import torch

import ckpt_tools
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.options import ConvertOptions
from ckpt_tools.errors import CkptError, FormatError, UsageError
from fixtures import buffers, hf_runs, launch
from fixtures.corpus import make
from tests.layouts.contents import contents, of_tensor
from tests.support.ranks import for_ranks
from tests.support.sweep import tiered

pytestmark = pytest.mark.extended


OF_TRAINER = {"dcp": 2, "universal": 2, "zero2": 2, "zero3": 3}


# Numbers: the Trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    return folder, hf_runs.save_trainer(folder)


@pytest.mark.parametrize("to", tiered(OF_TRAINER, test=(), extended=("dcp", "universal")))
def test_the_trainers_checkpoint_is_resumed(to, trained, tmp_path):
    (folder, losses), ranks = trained, OF_TRAINER[to]
    source, out = folder / "checkpoint-2", tmp_path / "out"
    ckpt_tools.convert(source, out, to=to, param_order=folder / "order.txt", **for_ranks(to, ranks))
    pool = launch.pool(ranks)
    if to == "dcp":
        found = pool.run(hf_runs.resume_in_fsdp2, str(out))
    else:
        stage = 2 if to == "universal" else int(to[-1])
        found = pool.run(hf_runs.resume_in_deepspeed, stage, to == "universal", str(out))
    np.testing.assert_allclose(found[0], losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["hf-trainer", "diffusers"])
def test_every_moment_has_its_name(name):
    made = make(name)
    truth = torch.load(made.folder / "slots.pt", weights_only=True)
    options = ConvertOptions(param_order=made.folder / "order.txt").read_options
    manifest, found = contents(made.source, options)
    assert ckpt_tools.inspect(made.source).step == 2 and manifest.extra["lr_scheduler"]["last_epoch"] == 2
    state = {key: value for key, value in found.items() if key.slot != "weight"}
    assert state == {StateKey(*key): of_tensor(tensor) for key, tensor in truth.items()}


# What is not whole, or does not fit


ORDERS: Mapping[str, tuple[str, str]] = {
    "a name too few": ("model.norm.weight\n", "list exactly these"),
    "a name that is not there": ("model.norm.wait\n", "'model.norm.wait'.*nearest"),
    "a name twice": ("a\na\n", "'a' twice"),
    "nothing": ("\n", "no names"),
    "other JSON": ("[1]", "list of names"),
    "half JSON": ("[", "not valid JSON"),
    "groups of other sizes": ('[["model.norm.weight"], ["model.embed_tokens.weight"]]', "groups of"),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_an_order_that_does_not_fit_is_an_error(kind, trained, tmp_path):
    text, reason = ORDERS[kind]
    (tmp_path / "order").write_text(text)
    with pytest.raises(UsageError, match=reason):
        ckpt_tools.convert(trained[0] / "checkpoint-2", tmp_path / "out", to="dcp", param_order=tmp_path / "order")
    assert not (tmp_path / "out").exists()
    names = (trained[0] / "order.txt").read_text().split()
    (tmp_path / "order").write_text(json.dumps([names[:16], names[16:]]))
    with pytest.raises(UsageError, match=r"does not fit: state \d+ .* has the shape"):
        ckpt_tools.plan(trained[0] / "checkpoint-2", tmp_path / "out", to="dcp", param_order=tmp_path / "order")


def test_half_an_optimizer_that_of_another_model_and_code_are_errors(tmp_path):
    source = shutil.copytree(make("accelerate-fsdp1-full").source, tmp_path / "in")
    file = source / "optimizer.bin"
    data = file.read_bytes()
    for size in (0, 100, -1):
        file.write_bytes(data[:size])
        with pytest.raises(FormatError, match=r"optimizer\.bin.*whose file can be named"):
            ckpt_tools.inspect(source)
        assert ckpt_tools.inspect(source / "pytorch_model_fsdp.bin").num_parameters
    torch.save({"state": {"gone": {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": ["gone"]}]}, file)
    with pytest.raises(FormatError):
        ckpt_tools.inspect(source)
    file.write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    with pytest.raises(CkptError):
        ckpt_tools.inspect(source)
    assert not (tmp_path / "ran").exists()
    assert not ckpt_tools.scan(source).clean


# Notes


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    file = tmp_path_factory.mktemp("buffers") / "run.pt"
    return file, buffers.save(file)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_goes_on(stage, saved, tmp_path):
    file, losses = saved
    report = ckpt_tools.convert(file, tmp_path / "out", to=f"zero{stage}", world_size=2, buffers="shift.*")  # type: ignore[arg-type]
    assert not [note for note in report.plan.notes if "scale" in note.what or "shift" in note.what]
    found = launch.pool(2).run(buffers.resume, stage, str(tmp_path / "out"))
    np.testing.assert_allclose(found[0], losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("glob", "reason"), [("shift.hold", "matches no tensor.*shift.held"), ("first.*", "first.weight.*trains")]
)
def test_a_glob_that_cannot_be_is_an_error(glob, reason, saved, tmp_path):
    with pytest.raises(UsageError, match=reason):
        ckpt_tools.convert(saved[0], tmp_path / "out", to="zero3", buffers=[glob])
    assert ConvertOptions(buffers=glob).buffers == (glob,)
