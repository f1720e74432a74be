"""The example scripts, run by the commands in their docstrings; then ckpt-tools opens what they saved."""

import ast
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_tools
import training
from tests.support.ray_cluster import cluster
from training.examples import fsdp2_on_ray

__all__ = ["cluster"]

FOLDER = Path(training.__file__).parent / "examples"
STEPS_OF_AN_EPOCH = 22
PROGRAMS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "ckpt-tools": [sys.executable, "-m", "ckpt_tools"],
}


@dataclass(frozen=True, slots=True)
class Examples:
    """The folder in the place of ``/tmp`` of all documented commands, and the environment in which they ran."""

    out: Path
    environment: dict[str, str]

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        program, *words = shlex.split(command.replace("/tmp", str(self.out)))
        call = [*PROGRAMS[program], *words]
        return subprocess.run(call, cwd=FOLDER, env=self.environment, capture_output=True, text=True, check=False)

    def run_all(self, commands: list[str]) -> None:
        for command in commands:
            done = self.run(command)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    def reported(self, run: str) -> list[dict[str, Any]]:
        """What ``ray.train.report`` was given with each checkpoint of a run."""
        record = json.loads((self.out / run / "checkpoints/checkpoint_manager_snapshot.json").read_text())
        return [entry["metrics"] for entry in record["checkpoint_results"]]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The loop's first documented command has run, for which no Ray is needed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parent.parent)}
    made = Examples(tmp_path_factory.mktemp("examples"), environment)
    made.run_all(documented_commands("your_own_loop")[:1])
    return made


@pytest.fixture(scope="module")
def examples(own, cluster):
    """Documented commands have run: both scripts on Ray at the same time, then the loop, which needs the second."""
    own.environment["RAY_ADDRESS"] = cluster.address
    own.environment["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # a process for each run, which imports torch
    # `ast.parse` is not safe in two threads of Python 3.11.
    on_ray = [documented_commands(script) for script in ("fsdp2_on_ray", "deepspeed_on_ray")]
    with ThreadPoolExecutor() as threads:
        list(threads.map(own.run_all, on_ray))
    own.run_all(documented_commands("your_own_loop")[1:])
    return own


def documented_commands(script: str) -> list[str]:
    docstring = ast.get_docstring(ast.parse((FOLDER / f"{script}.py").read_text())) or ""
    return [line for line in docstring.splitlines() if line.startswith("    ")]


def losses(entries: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    """By epoch and step."""
    return {(entry["epoch"], entry["step"]): entry["loss"] for entry in entries}


@pytest.mark.extended
def test_the_optimizer_of_the_loop_is_in_its_checkpoint(own):
    check_has_optimizer(f"{own.out}/own/epoch_1", 2)


def check_has_optimizer(checkpoint: str, world_size: int) -> None:
    assert ckpt_tools.inspect(checkpoint).world_size == world_size
    found: dict[str, set[str]] = {}
    for tensor in ckpt_tools.inspect(checkpoint).tensors:
        found.setdefault(tensor.name, set()).add(tensor.slot)
    assert found and all(each >= {"weight", "exp_avg", "exp_avg_sq", "step"} for each in found.values())


@pytest.mark.soak
def test_both_frameworks_compute_the_same_losses_and_resume_on_one_worker_to_the_same(examples):
    fsdp2, zero, resumed = (losses(examples.reported(name)) for name in ("fsdp2", "zero", "zero-1"))
    assert [*fsdp2] == [(1, STEPS_OF_AN_EPOCH), (2, 2 * STEPS_OF_AN_EPOCH)]
    assert zero == pytest.approx({key: fsdp2[key] for key in [*fsdp2][:1]}, rel=1e-4)
    assert resumed == pytest.approx({key: fsdp2[key] for key in [*fsdp2][1:]}, rel=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize("run", ["fsdp2", "zero", "zero-1"])
def test_ckpt_tools_converts_what_they_saved_to_the_same_model(examples, run):
    """The plain model predicts the same bits with these weights as with the file that the framework wrote."""
    ours, theirs = examples.out / f"{run}.safetensors", examples.out / f"{run}.pt"
    ckpt_tools.convert(f"{examples.out}/{run}/checkpoints@latest", ours, to="safetensors")
    torch.save(load_file(ours), theirs)
    images, labels = fsdp2_on_ray.load_data(None, train=False)[:]
    logits = fsdp2_on_ray.predict(f"{examples.out}/{run}/model.pt", images)
    assert torch.equal(fsdp2_on_ray.predict(str(theirs), images), logits)
    assert (logits.argmax(dim=1) == labels).float().mean() > 0.2, "twice of what chance gives"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("checkpoint", "world_size"),
    [
        ("fsdp2/checkpoints@latest", 1),
        ("zero/checkpoints@latest", 2),
        ("zero-1/checkpoints@latest", 1),
        ("continued/epoch_2", 1),
    ],
)
def test_the_optimizer_is_in_the_checkpoint_and_counts_the_steps_of_both_runs(examples, checkpoint, world_size):
    check_has_optimizer(f"{examples.out}/{checkpoint}", world_size)
    if not checkpoint.startswith("zero/"):
        model = fsdp2_on_ray.build_model()
        optimizer = torch.optim.AdamW(model.parameters())
        extras = ckpt_tools.load_into(model, optimizer, f"{examples.out}/{checkpoint}")
        assert extras["epoch"] == 2
        assert {int(state["step"]) for state in optimizer.state.values()} == {2 * STEPS_OF_AN_EPOCH}


@pytest.mark.soak
@pytest.mark.parametrize(
    "options", ["fsdp2_on_ray.py", *(f"deepspeed_on_ray.py --stage {stage}" for stage in (1, 2, 3))]
)
def test_bf16_and_offload_train_and_continue(examples, options):
    run = options.replace(" ", "")
    for epochs in (1, 2):
        done = examples.run(f"python {options} --dtype bf16 --offload --epochs {epochs} --out /tmp/{run}")
        assert done.returncode == 0, done.stderr
    assert losses(examples.reported(run)) == pytest.approx(losses(examples.reported("fsdp2")), rel=0.1)
