"""``convert-run``: each complete checkpoint of a run once, also after kills and while a trainer still saves."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError, SourceNotFoundError, StoreError, UsageError
from fixtures.truth import raw_bytes
from fixtures.writers import alone, llama, trainer
from tests.support.commands import printed, run_command
from tests.support.s3_server import BUCKET

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SECONDS = 40.0


def state_of(step, numel=3000):
    """Values that are those of this step alone."""
    return {
        "a.weight": torch.arange(numel, dtype=torch.float32) + 1000 * step,
        "b.bias": torch.full((3,), -float(step)),
    }


def save_dcp(folder, step, numel=3000):
    dcp.save({"model": state_of(step, numel)}, checkpoint_id=folder / f"step-{step}", no_dist=True)


def dcp_run(folder, checkpoint):
    for step in (5, 10, 100):
        save_dcp(folder, step)
    return {step: state_of(step) for step in (5, 10, 100)}


def deepspeed_run(folder, checkpoint):
    """Real ZeRO-2 files of two ranks; those of each step are the masters of one save times the step."""
    saved = checkpoint("zero2-fp32", "plain", 2)
    expected = {}
    for step in (5, 10, 100):
        target = folder / f"global_step{step}"
        shutil.copytree(saved.checkpoint / "global_step4", target)
        for path in target.glob("*_optim_states.pt"):
            content = torch.load(path, weights_only=False)
            for part in content["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
                part.data *= step
            torch.save(content, path)
        state = saved.state()
        trained = {name for name, _ in state.optimizer}
        expected[step] = {name: tensor * step if name in trained else tensor for name, tensor in state.weights.items()}
    (folder / "latest").write_text("global_step100")
    return expected


def trainer_run(folder, checkpoint):
    with alone():
        trainer(folder, llama(), max_steps=3, save_steps=1).train()
    return {step: load_file(folder / f"checkpoint-{step}/model.safetensors") for step in (1, 2, 3)}


RUNS = {"dcp": dcp_run, "deepspeed": deepspeed_run, "trainer": trainer_run}


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def outputs(folder):
    """The weights of each output, by its step, as safetensors itself reads them."""
    return {int(each.name): load_file(each / "model.safetensors") for each in folder.iterdir()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for step, tensors in expected.items():
        assert set() < found[step].keys() <= tensors.keys()  # tied weights are written once
        for name, tensor in found[step].items():
            assert raw_bytes(tensor) == raw_bytes(tensors[name]), (step, name)


@pytest.mark.parametrize("kind", RUNS)
def test_every_checkpoint_becomes_its_own_output(kind, checkpoint, tmp_path):
    expected = RUNS[kind](tmp_path / "run", checkpoint)
    before = {path: path.stat() for path in (tmp_path / "run").rglob("*")}
    report = ckpt_tools.convert_run(tmp_path / "run", tmp_path / "out/{step}", to="safetensors", state="model")
    assert [(each.step, each.outcome) for each in report.checkpoints] == [(step, "written") for step in expected]
    assert_same(outputs(tmp_path / "out"), expected)
    stored = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = ckpt_tools.convert_run(tmp_path / "run", tmp_path / "out/{step}", to="safetensors", state="model")
    assert (again.num_written, again.num_published) == (0, len(expected))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == stored
    after = {path: path.stat() for path in (tmp_path / "run").rglob("*")}
    assert {path: (each.st_mtime_ns, each.st_ctime_ns) for path, each in before.items()} == {
        path: (each.st_mtime_ns, each.st_ctime_ns) for path, each in after.items()
    }


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (5, 10, 100):
        save_dcp(tmp_path / "run", step)
    return tmp_path / "run"


def convert(**options):
    return ckpt_tools.convert_run("run", "out/{step}", **({"to": "safetensors"} | options))


@pytest.mark.parametrize(
    ("chosen", "steps"),
    [
        ({"steps": [100, 5]}, [5, 100]),
        ({"every": 10}, [10, 100]),
        ({"last": 1}, [100]),
        ({"every": 5, "last": 2}, [10, 100]),
    ],
)
def test_steps_are_chosen(chosen, steps, run):
    assert [each.step for each in convert(**chosen).checkpoints] == steps
    assert names("out") == sorted(map(str, steps))


def test_what_is_not_complete_is_named_and_not_taken(run):
    (run / "step-10/.metadata").unlink()
    report = convert()
    assert [(each.step, each.outcome) for each in report.checkpoints] == [
        (5, "written"),
        (100, "written"),
        (10, "skipped"),
    ]
    assert report.checkpoints[-1].reason.startswith("not complete: ")
    with pytest.raises(SourceNotFoundError, match="no complete checkpoint of step 10; it has the steps 100, 5"):
        convert(steps=[10])
    with pytest.raises(SourceNotFoundError, match="no complete checkpoint of such a step; it has the steps"):
        convert(every=7)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: Path("out/10/model.safetensors").unlink(), "model.safetensors is not there"),
        (lambda: os.truncate("out/10/model.safetensors", 99), "model.safetensors has 99 bytes, and would have"),
        (lambda: shutil.copy("out/5/model.safetensors", "out/10"), "has other elements in model.safetensors"),
    ],
)
def test_another_output_is_not_taken_for_that_of_the_step(change, said, run):
    convert()
    Path("out/10/eval.json").write_text("{}")
    assert convert().num_published == 3
    change()
    with pytest.raises(DestinationExistsError, match=rf"^out/10 exists, and is not what .*step-10 becomes .*{said}"):
        convert()


def test_the_outputs_of_other_options_and_of_another_run_are_refused(run):
    convert()
    with pytest.raises(DestinationExistsError, match="and would have"):
        convert(dtype="bfloat16")
    shutil.rmtree(run)
    for step in (5, 10, 100):
        dcp.save({"model": state_of(step + 1)}, checkpoint_id=run / f"step-{step}", no_dist=True)
    with pytest.raises(DestinationExistsError, match=r"^out/5 exists, .* has other elements"):
        convert()


def test_the_first_error_ends_it_and_the_next_call_continues(run):
    Path("out").mkdir()
    Path("out/10").write_text("a file of the user")
    with pytest.raises(DestinationExistsError):
        convert()
    assert names("out") == ["10", "5"]
    Path("out/10").unlink()
    assert [each.outcome for each in convert().checkpoints] == ["published", "written", "written"]


def remove_while_read(done, total):
    shutil.rmtree("run/step-10", ignore_errors=True)


def write_again_while_read(done, total):
    for path in Path("run/step-10").iterdir():
        path.write_bytes(path.read_bytes())


def test_a_checkpoint_that_is_rotated_out_while_it_is_read_is_skipped(run):
    report = convert(on_progress=remove_while_read)
    assert [each.outcome for each in report.checkpoints] == ["written", "skipped", "written"]
    assert report.checkpoints[1].reason == "the trainer removed it while it was read"
    assert names("out") == ["100", "5"]


def test_a_checkpoint_that_is_written_again_while_it_is_read_is_an_error(run):
    with pytest.raises(StoreError, match="step-10 was written again while it was read"):
        convert(on_progress=write_again_while_read)
    assert names("out") == ["5"]
    assert convert().num_written == 2


def test_what_is_not_a_run_is_refused(run):
    with pytest.raises(UsageError, match="is one checkpoint, and not a run"):
        ckpt_tools.convert_run("run/step-5", "out/{step}", to="dcp")
    with pytest.raises(DestinationExistsError, match="is inside the source"):
        ckpt_tools.convert_run("run", "run/{step}-hf", to="dcp")
    with pytest.raises(UsageError, match="convert-run converts every checkpoint of run"):
        ckpt_tools.convert("run@all", "out", to="dcp")
    (run / "last").mkdir()
    shutil.move(run / "step-10", run / "last/step-10")
    with pytest.raises(UsageError, match="holds checkpoints of several runs"):
        convert()
    shutil.copytree(run / "step-5", run / "a_step-5")
    shutil.rmtree(run / "last")
    with pytest.raises(UsageError, match=r"a_step-5 and step-5 would both become out/5|step-5 and a_step-5 would both"):
        convert()
    for name in ("until", "poll"):
        with pytest.raises(UsageError, match=f"{name}=3 is for follow=True"):
            convert(**{name: 3})


def test_lines_of_json_and_the_command_of_then(run):
    log = 'echo "$CKPT_TOOLS_STEP $CKPT_TOOLS_DST" >> log; test $CKPT_TOOLS_STEP -lt 10'
    done = run_command("convert-run", "run", "out/{step}", "--to", "safetensors", "--then", log)
    assert done.code == 1
    assert "the command of --then failed with exit code 1 after step-10" in done.err
    assert [line.split()[0] for line in Path("log").read_text().splitlines()] == ["5", "10"]
    assert Path(Path("log").read_text().split()[1]).joinpath("model.safetensors").is_file()
    lines = printed("convert-run", "run", "out/{step}", "--to", "safetensors", "--json", "--then", "true").splitlines()
    assert [(each["step"], each["outcome"]) for each in map(json.loads, lines)] == [
        (5, "published"),
        (10, "published"),
        (100, "written"),
    ]
    assert "3 checkpoints: 0 written, 3 there already, 0 skipped" in printed(
        "convert-run", "run", "out/{step}", "--to", "safetensors"
    )
    nested = f"{sys.executable} -m ckpt_tools inspect $CKPT_TOOLS_DST > inspected"
    printed("convert-run", "run", "o/{name}.safetensors", "--last", "1", "--then", nested)
    assert "step-100.safetensors" in Path("inspected").read_text()


def command(*words, **options):
    return subprocess.Popen([sys.executable, "-m", "ckpt_tools", "convert-run", *words], text=True, **options)


def wait_for(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_kill_in_the_middle_leaves_whole_outputs_and_the_next_call_continues(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    steps = (1, 2, 3)
    for step in steps:
        save_dcp(tmp_path / "run", step, 16 << 20)
    words = ("run", "out/{step}", "--to", "safetensors")
    process = command(*words)
    wait_for(Path("out/.2.ckpt-tools-partial").exists)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    visible = [each for each in names("out") if not each.startswith(".")]
    assert visible == ["1"]
    first = Path("out/1/model.safetensors").stat()
    assert [json.loads(line)["outcome"] for line in printed("convert-run", *words, "--json").splitlines()] == [
        "published",
        "written",
        "written",
    ]
    after = Path("out/1/model.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert names("out") == ["1", "2", "3"]
    assert_same(outputs(Path("out")), {step: state_of(step, 16 << 20) for step in steps})


WRITER = """
import shutil, sys, time
from pathlib import Path
source, run = map(Path, sys.argv[1:])
for step in (5, 10, 100):
    target = run / f"step-{step}"
    target.mkdir(parents=True)
    for path in sorted((source / target.name).iterdir(), key=lambda path: path.name == ".metadata"):
        data = path.read_bytes()
        with open(target / path.name, "wb", buffering=0) as file:
            for start in range(0, len(data), 2000):
                file.write(data[start : start + 2000])
                time.sleep(0.03)
        time.sleep(0.2)
    if step == 10:
        deadline = time.monotonic() + 30
        while not Path("out/5").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        shutil.rmtree(run / "step-5")  # as save_total_limit=1 does
"""


def test_a_run_is_followed_while_a_trainer_saves_slowly(run, tmp_path):
    Path("live").mkdir()
    process = command(
        *("live", "out/{step}", "--to", "safetensors", "--follow", "--poll", "0.05", "--until", "100", "--json"),
        *("--then", "echo $CKPT_TOOLS_STEP >> steps; test -s live/step-$CKPT_TOOLS_STEP/.metadata"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    writer = subprocess.Popen([sys.executable, "-c", WRITER, "run", "live"])
    out, error = process.communicate(timeout=SECONDS)
    assert writer.wait() == 0
    assert process.returncode == 0, error
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(each["step"], each["outcome"]) for each in lines] == [(5, "written"), (10, "written"), (100, "written")]
    assert Path("steps").read_text().split() == ["5", "10", "100"]
    assert_same(outputs(Path("out")), {step: state_of(step) for step in (5, 10, 100)})


def test_a_run_that_is_followed_is_killed_between_two_checkpoints_and_during_one(run):
    words = ("run", "out/{step}", "--to", "safetensors", "--follow", "--poll", "0.05")

    def kill_once(condition):
        process = command(*words)
        wait_for(condition)
        process.kill()
        assert process.wait() == -signal.SIGKILL

    kill_once(lambda: Path("out").exists() and names("out") == ["10", "100", "5"])  # it waits for the next
    save_dcp(run, 200, 16 << 20)
    kill_once(Path("out/.200.ckpt-tools-partial").exists)
    assert [name for name in names("out") if not name.startswith(".")] == ["10", "100", "5"]
    lines = printed("convert-run", *words, "--until", 200, "--json").splitlines()
    assert [json.loads(line)["outcome"] for line in lines] == ["published"] * 3 + ["written"]
    assert names("out") == ["10", "100", "200", "5"]
    expected = {step: state_of(step, 16 << 20 if step == 200 else 3000) for step in (5, 10, 100, 200)}
    assert_same(outputs(Path("out")), expected)


def test_following_ends_with_the_steps_that_are_named_or_by_a_signal(run):
    process = command("run", "out/{step}", "--to", "dcp", "--follow", "--poll", "0.01", "--steps", "5,10")
    assert process.wait(SECONDS) == 0
    process = command("run", "out/{step}", "--to", "dcp", "--follow", "--poll", "0.01", stderr=subprocess.PIPE)
    wait_for(Path("out/100").exists)
    process.send_signal(signal.SIGINT)
    assert "Interrupted" in process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 130
    assert names("out") == ["10", "100", "5"]


def test_a_run_in_a_store(run, s3):
    for step in (5, 10, 100):
        ckpt_tools.convert(run / f"step-{step}", f"s3://{BUCKET}/live/step-{step}", to="dcp")
    place = f"s3://{BUCKET}/exported/{{step}}"
    for outcome in ("written", "published"):
        report = ckpt_tools.convert_run(f"s3://{BUCKET}/live", place, to="safetensors", every=10)
        assert [(each.step, each.outcome) for each in report.checkpoints] == [(10, outcome), (100, outcome)]
    assert ckpt_tools.open(f"s3://{BUCKET}/exported/100")["b.bias"].numpy().tolist() == [-100] * 3
    ckpt_tools.convert(f"s3://{BUCKET}/exported/10", f"s3://{BUCKET}/wrong/100", to="safetensors")
    with pytest.raises(DestinationExistsError, match="has other elements"):
        ckpt_tools.convert_run(f"s3://{BUCKET}/live", f"s3://{BUCKET}/wrong/{{step}}", to="safetensors", steps=[100])
