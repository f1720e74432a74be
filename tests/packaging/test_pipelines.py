"""The GitHub Action and the pre-commit hook, run as GitHub and pre-commit run them."""

import os
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

ROOT = Path(__file__).parent.parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())

RUN = ACTION["runs"]["steps"][1]


class Harm:
    def __reduce__(self) -> Any:
        return os.getpid, ()


@dataclass(frozen=True)
class Step:
    """What a step left."""

    code: int
    summary: str
    output: str
    log: str


def step(tmp_path: Path, **inputs: str) -> Step:
    """Run the second step as GitHub runs ``shell: bash``, with the inputs where its ``env`` puts them."""
    given = {name: each.get("default", "") for name, each in ACTION["inputs"].items()} | inputs
    environment = {}
    for name, value in RUN["env"].items():
        found = re.fullmatch(r"\$\{\{ inputs\.([a-z]+) \}\}", value)
        assert found is not None
        environment[name] = given[found[1]]
    tools = tmp_path / "temp" / "ckpt-tools" / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    (tools / "ckpt-tools").write_text(f'#!/bin/sh\nexec {sys.executable} -m ckpt_tools "$@"\n')
    (tools / "ckpt-tools").chmod(0o755)
    (tmp_path / "step.sh").write_text(RUN["run"])
    summary, output = tmp_path / "summary.md", tmp_path / "output"
    for each in (summary, output):
        each.write_text("")
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", tmp_path / "step.sh"],
        env=os.environ
        | environment
        | {
            "RUNNER_TEMP": str(tmp_path / "temp"),
            "GITHUB_STEP_SUMMARY": str(summary),
            "GITHUB_OUTPUT": str(output),
            "PYTHONPATH": str(ROOT),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    return Step(done.returncode, summary.read_text(), output.read_text(), done.stdout + done.stderr)


@pytest.fixture
def files(tmp_path):
    save_file({"a": np.zeros(3), "b": np.ones(2)}, tmp_path / "a.safetensors")
    save_file({"a": np.ones(3), "b": np.ones(2)}, tmp_path / "b.safetensors")
    (tmp_path / "harm.pkl").write_bytes(pickle.dumps(Harm()))
    return tmp_path


def test_no_input_is_part_of_a_script():
    assert [each["shell"] for each in ACTION["runs"]["steps"]] == ["bash", "bash"]
    for each in ACTION["runs"]["steps"]:
        assert "${{" not in each["run"]
        assert "eval" not in each["run"]


def test_the_exit_code_and_the_summary_of_each_command(files):
    same = step(files, command="verify", source="a.safetensors")
    assert (same.code, same.output) == (0, "exit-code=0\n")
    assert "all are whole" in same.summary
    differ = step(files, command="diff", source="a.safetensors", other="b.safetensors", options="--all\n--workers 1")
    assert (differ.code, differ.output) == (6, "exit-code=6\n")
    assert "| a | 3 of 3 elements differ" in differ.summary
    found = step(files, command="scan", source="a.safetensors\nharm.pkl\n")
    assert (found.code, "posix.getpid" in found.summary) == (7, True)
    lost = step(files, command="verify", source="nothing")
    assert (lost.code, "exit code 3" in lost.summary) == (3, True)
    assert "nothing" in lost.log


HARMLESS = [
    {"command": "verify; touch owned", "source": "a.safetensors"},
    {"command": "verify", "source": "$(touch owned)"},
    {"command": "verify", "source": "a.safetensors", "options": "$(touch owned) '; touch owned"},
    {"command": "convert", "source": "a.safetensors", "other": "owned"},
]


@pytest.mark.parametrize("inputs", HARMLESS)
def test_no_input_is_run(inputs, files):
    assert step(files, **inputs).code in (2, 3)
    assert not (files / "owned").exists()


def test_an_option_is_no_pattern_of_the_shell(files):
    done = step(files, command="diff", source="a.safetensors", other="b.safetensors", options="--include *")
    assert (done.code, "1 of 2 tensors differs" in done.summary) == (6, True)


def hook(*files: str, cwd: Path) -> int:
    """The entry with the files that its pattern matches, as pre-commit runs it."""
    command, *words = HOOK["entry"].split()
    assert command == "ckpt-tools"
    chosen = [name for name in files if re.search(HOOK["files"], name)]
    entry = [sys.executable, "-m", "ckpt_tools", *words, *chosen]
    return subprocess.run(entry, cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode


def test_the_hook_scans_what_looks_like_a_checkpoint(files):
    (files / "train.py").write_text("print(1)\n")
    assert hook("a.safetensors", "b.safetensors", "train.py", cwd=files) == 0
    assert hook("a.safetensors", "harm.pkl", cwd=files) == 7
    names = ["x.PT", "a/b.ckpt", "pytorch_model.bin", "weights.pth", "m.gguf", "m.npz", "__0_0.distcp"]
    assert all(re.search(HOOK["files"], name) for name in names)
    assert not any(re.search(HOOK["files"], name) for name in ("a.py", "README.md", "script", "a.pt.py"))
