"""What transformers and accelerate write is converted whole, and training goes on in the targets' own frameworks."""

import json
import shutil
from collections.abc import Mapping

import numpy as np
import pytest
import torch

import ckpt_tools
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.notes import Outcome
from ckpt_tools.core.option_names import WrittenFormat
from ckpt_tools.core.options import ConvertOptions
from ckpt_tools.errors import CkptError, FormatError, UnsupportedError, UsageError
from ckpt_tools.runs.opening import read_checkpoint
from fixtures import buffers, hf_runs, launch
from fixtures.corpus import make
from tests.end_to_end.test_matrix import assert_same_state
from tests.layouts.contents import contents, of_tensor
from tests.support.ranks import for_ranks
from tests.support.sweep import tiered
from tests.support.truth import Truth

pytestmark = pytest.mark.extended

RANKS = 2


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Folders of two cases, with their truths."""
    root = tmp_path_factory.mktemp("full")
    for case in ("awkward", "plain"):
        folder = root / case / "checkpoint"
        folder.mkdir(parents=True)
        launch.pool(RANKS).run(hf_runs.save_fsdp_full, case, str(folder), str(root / case))
    return root


CELLS = {
    "awkward fsdp2": ("dcp", 3),
    "plain universal-zero2-fp32": ("universal", 3),
    "awkward zero2-fp32": ("zero2", 3),
    "awkward zero3-fp32": ("zero3", 1),
}
OF_TRAINER = {"dcp": 2, "universal": 2, "zero2": 2, "zero3": 3}


@pytest.mark.parametrize("cell", tiered(CELLS, test=(), extended=("awkward fsdp2", "plain universal-zero2-fp32")))
def test_fsdp_full_is_resumed(cell, full, resume, tmp_path):
    (case, kind), (to, ranks) = cell.split(), CELLS[cell]
    ckpt_tools.convert(full / case / "checkpoint", tmp_path / "out", to=to, **for_ranks(to, ranks))
    truth, resumed = Truth.load(full / case), resume(kind, case, tmp_path / "out", ranks)
    assert_same_state(truth, resumed)
    np.testing.assert_allclose(resumed.facts["losses"], truth.facts["losses"], rtol=1e-6, atol=0)
    assert resumed.facts["scheduler"] == truth.facts["scheduler"]


# Numbers: accelerate with DDP


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """A folder of a case with one group and of one with several, with the next losses and the names of the groups."""
    folders = {case: tmp_path_factory.mktemp(case) for case in ("plain", "amsgrad")}
    return {case: (folder, *hf_runs.save_numbered(case, folder)) for case, folder in folders.items()}


@pytest.mark.parametrize(("case", "has_order"), [("plain", False), ("amsgrad", True)])
def test_numbers_are_resumed(case, has_order, numbered, resume, tmp_path):
    """The order is that of a torch file, or, once safetensors has lost that, the user's."""
    folder, losses, groups = numbered[case]
    source, order = shutil.copytree(folder, tmp_path / "in"), None
    if has_order:
        ckpt_tools.convert(folder / "pytorch_model.bin", source / "model.safetensors")
        (source / "pytorch_model.bin").unlink()
        order = tmp_path / "order.json"
        order.write_text(json.dumps(groups))
    ckpt_tools.convert(source, tmp_path / "out", to="zero2", world_size=2, param_order=order)
    resumed = resume("zero2-fp32", case, tmp_path / "out", 2)
    np.testing.assert_allclose(resumed.facts["losses"], losses, rtol=1e-6, atol=0)


def test_in_safetensors_numbers_are_not_guessed(numbered, tmp_path):
    folder, _, _ = numbered["plain"]
    source = shutil.copytree(folder, tmp_path / "in")
    ckpt_tools.convert(folder / "pytorch_model.bin", source / "model.safetensors")
    (source / "pytorch_model.bin").unlink()
    with pytest.raises(UnsupportedError, match=r"nothing here proves which ones .* param_order=.* state='model'"):
        ckpt_tools.convert(source, tmp_path / "out", to="zero2")
    (note,) = [note for note in ckpt_tools.inspect(source).notes if note.what == "optimizer"]
    assert note.outcome is Outcome.KEPT and "param_order=" in note.why


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


def test_every_moment_has_its_name():
    made = make("hf-trainer")
    truth = torch.load(made.folder / "slots.pt", weights_only=True)
    options = ConvertOptions(param_order=made.folder / "order.txt").reading
    manifest, found = contents(made.source, options)
    assert manifest.step == 2 and manifest.extra["lr_scheduler"]["last_epoch"] == 2
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


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    hf_runs.save_trainer_of_experts(folder)
    return folder


CANNOT = "it numbers 25 parameters, and the 45 tensors of the model have other shapes"


def test_an_order_is_not_proposed_where_none_fits(experts, tmp_path):
    """The optimizer knows fused experts, the file of the model has each for itself."""
    source = experts / "checkpoint-1"
    (note,) = [note for note in ckpt_tools.inspect(source).notes if note.what == "optimizer"]
    assert note.outcome is Outcome.KEPT and CANNOT in note.why and "param_order" not in note.why
    targets: tuple[WrittenFormat, ...] = ("dcp", "zero3", "universal", "megatron")
    for to in targets:
        with pytest.raises(UnsupportedError, match=f"optimizer: {CANNOT}") as told:
            ckpt_tools.plan(source, tmp_path / to, to=to)
        assert "param_order" not in str(told.value) and str(told.value).count("state='model'") == 1
    report = ckpt_tools.convert(source, tmp_path / "weights", to="dcp", state="model")
    assert report.plan.num_tensors == 45
    assert ckpt_tools.verify(source, tmp_path / "weights", state="model").equal


def test_an_order_where_none_fits_is_an_error(experts, tmp_path):
    for read in (
        lambda **options: ckpt_tools.inspect(experts / "checkpoint-1", **options),
        lambda **options: ckpt_tools.convert(experts / "checkpoint-1", tmp_path / "out", to="zero3", **options),
    ):
        with pytest.raises(UsageError, match=f"cannot name the parameters of this optimizer: {CANNOT}"):
            read(param_order=experts / "order.txt")
    assert not (tmp_path / "out").exists()


def test_an_order_for_nothing_is_an_error(full, tmp_path):
    (tmp_path / "order").write_text("w")
    with pytest.raises(UsageError, match="number their parameters"):
        ckpt_tools.inspect(full / "plain" / "checkpoint", param_order=tmp_path / "order")
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    with pytest.raises(UsageError, match="number their parameters"):
        ckpt_tools.inspect(tmp_path / "m.pt", param_order=tmp_path / "order")
    with pytest.raises(CkptError, match="No such file"):
        ckpt_tools.inspect(tmp_path / "m.pt", param_order=tmp_path / "absent")


def test_half_an_optimizer_that_of_another_model_and_code_are_errors(full, tmp_path):
    source = shutil.copytree(full / "plain" / "checkpoint", tmp_path / "in")
    file = source / "optimizer.bin"
    data = file.read_bytes()
    for size in (0, 100, 5000, -1):
        file.write_bytes(data[:size])
        with pytest.raises(FormatError, match=r"optimizer\.bin.*whose file can be named"):
            ckpt_tools.inspect(source)
        assert ckpt_tools.inspect(source / "pytorch_model_fsdp.bin").num_parameters
    shutil.copy(full / "awkward" / "checkpoint" / "optimizer.bin", source)
    with pytest.raises(FormatError):
        ckpt_tools.inspect(source)
    file.write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    with pytest.raises(CkptError):
        ckpt_tools.inspect(source)
    assert not (tmp_path / "ran").exists()
    assert not ckpt_tools.scan(source).clean


@pytest.mark.parametrize("layout", ["accelerate-ddp-bin", "accelerate-fsdp1-full", "hf-peft-lora", "torch-legacy"])
def test_the_scanner_finds_nothing_in_genuine_ones(layout):
    made = make(layout)
    files = made.source if made.source.is_file() else made.source / "optimizer.bin"
    report = ckpt_tools.scan(files if files.exists() else made.source)
    assert report.clean, report


# Lightning


def test_lightnings_scheduler_is_a_scheduler():
    _, manifest = read_checkpoint(make("lightning-ckpt").source, ConvertOptions().reading)
    assert manifest.extra["lr_scheduler"]["step_size"] == 2
    assert "lr_schedulers" not in manifest.extra
    assert manifest.step == 2


# Files of torch


def test_an_old_file_is_the_same_checkpoint(tmp_path):
    old, new = make("torch-legacy").source, make("torch-whole").source
    assert ckpt_tools.diff(old, new).equal
    assert ckpt_tools.verify(old).equal
    ckpt_tools.convert(old, tmp_path / "out", to="dcp", world_size=3)
    assert ckpt_tools.verify(new, tmp_path / "out").equal


class _Marked(torch.Tensor):
    """A class of tensor that a reader cannot know."""


@pytest.mark.parametrize(
    ("mark", "is_read"),
    [({"_has_been_cloned": True}, True), ({"rank": 3, "name": "w"}, True), ({"scale": torch.ones(1)}, False)],
)
def test_attributes_of_a_tensor_are_left_behind_if_they_mean_nothing(mark, is_read, tmp_path):
    tensor = torch.rand(3)
    vars(tensor).update(mark)
    torch.save({"w": tensor, "b": torch.ones(2)}, tmp_path / "m.pt")
    if is_read:
        ckpt_tools.convert(tmp_path / "m.pt", tmp_path / "out.pt")
        assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["w"], tensor)
        return
    with pytest.raises(FormatError, match=r"w: .*save plain tensors"):
        ckpt_tools.inspect(tmp_path / "m.pt")


def test_another_class_of_tensor_is_refused(tmp_path):
    torch.save({"w": torch.rand(3).as_subclass(_Marked)}, tmp_path / "m.pt")
    with pytest.raises(FormatError, match="_Marked"):
        ckpt_tools.inspect(tmp_path / "m.pt")


# Notes


def test_an_adapter_is_named(tmp_path):
    source = shutil.copytree(make("hf-peft-lora").source, tmp_path / "in")
    (source / "adapter_config.json").write_text("{")
    notes = ckpt_tools.plan(source, tmp_path / "out.safetensors").notes
    assert any("those of an adapter, not a whole model" in note.why for note in notes)


def test_a_second_copy_of_the_model_is_noted(full, tmp_path):
    source = shutil.copytree(full / "plain" / "checkpoint", tmp_path / "in")
    ckpt_tools.convert(source / "pytorch_model_fsdp.bin", source / "model.safetensors")
    report = ckpt_tools.plan(source, tmp_path / "out", to="dcp")
    assert [note.what for note in report.notes if "not part of" in note.why] == ["pytorch_model_fsdp.bin"]
    assert ckpt_tools.inspect(source).optimizer_slots


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


def test_a_guess_is_noted(saved, tmp_path):
    notes = ckpt_tools.plan(saved[0], tmp_path / "out", to="zero3", world_size=2).notes
    (guess,) = [note for note in notes if "guessed" in note.why]
    assert "shift.held" in guess.what and "scale" not in guess.what
    assert "buffers=" in guess.why


def test_a_buffer_is_not_cast(saved, tmp_path):
    ckpt_tools.convert(saved[0], tmp_path / "m.safetensors", dtype="bfloat16", buffers=["shift.held", "scale"])
    with ckpt_tools.open(tmp_path / "m.safetensors") as written:
        assert {name: written[name].numpy().dtype.name for name in ("scale", "shift.held", "first.weight")} == {
            "scale": "float32",
            "shift.held": "float32",
            "first.weight": "bfloat16",
        }
    again = ckpt_tools.verify(saved[0], tmp_path / "m.safetensors", dtype="bfloat16", buffers=["shift.held", "scale"])
    assert again.equal


@pytest.mark.parametrize(
    ("glob", "reason"), [("shift.hold", "matches no tensor.*shift.held"), ("first.*", "first.weight.*trains")]
)
def test_a_glob_that_cannot_be_is_an_error(glob, reason, saved, tmp_path):
    with pytest.raises(UsageError, match=reason):
        ckpt_tools.convert(saved[0], tmp_path / "out", to="zero3", buffers=[glob])
    assert ConvertOptions(buffers=glob).buffers == (glob,)
