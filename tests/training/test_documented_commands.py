"""Each command of the pages about training: a run of each in the soak, and everywhere that its options fit together.

The commands of "Checkpoints and resuming" build on each other, and test_checkpointing runs them; test_own runs those of
"Your own model and data".
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import training
from tests.training.documents import ALL, PAGES
from tests.training.hub import save_llama, save_tokenizer
from training.__main__ import main
from training.loop.result import RunResult
from training.studies.compare import cases_of
from training.studies.compare import main as compare

ROOT = Path(training.__file__).parent.parent
PAGE = ALL.replace(PAGES["training_own.md"], "")
APART = PAGE.split("## Checkpoints and resuming")[1].split("\n## ")[0]
SMALL = ["--launcher=torchrun", "--num-samples=64", "--epochs=1"]
SECONDS = 900


def commands(program: str, page: str = PAGE) -> list[str]:
    """What follows the program on each of its lines."""
    return re.findall(rf"(?m)^\$ {re.escape(program)} (.*)$", page)


def is_for_this_machine(words: str) -> bool:
    """test_s3 has a store, and nobody here has sixteen workers."""
    return "s3://" not in words and "--num-workers 16" not in words


RUNS = [words for words in commands("ckpt-tools train", PAGE.replace(APART, "")) if is_for_this_machine(words)]


@pytest.mark.soak
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("words", RUNS)
def test_a_documented_run_ends_with_a_result(words, tmp_path):
    """By torchrun, on a few samples; everything else as on the page."""
    asked = shlex.split(words)
    if "hf:base" in asked:
        save_tokenizer(save_llama(tmp_path / "base"))
    command = [sys.executable, "-m", "training", *asked, *SMALL]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    out = main.make_context("training", asked).params["out"]
    found = RunResult.read(tmp_path / out / "result.json")
    assert Path(found.checkpoint).is_dir() and len(found.history) == 1


def test_few_documented_runs_are_left_out():
    assert len(RUNS) >= 17
    left = [words for words in commands("ckpt-tools train") if not is_for_this_machine(words)]
    assert len(left) == 4, left


def test_the_documented_comparisons_are_runs(tmp_path):
    found = commands("python -m ckpt_tools_training.studies.compare")
    assert len(found) == 2
    for words in found:
        params = compare.make_context("compare", shlex.split(words)).params
        assert len(cases_of(params["texts"], params["options"], tmp_path)) in (3, 11)


@pytest.mark.soak
@pytest.mark.timeout(SECONDS)
def test_the_documented_learning_rates_are_runs(tmp_path):
    """The file as printed, of a checkout."""
    [printed] = re.findall(r'(?s)```python\n("""rates.py.*?)```', PAGE)
    file = tmp_path / "rates.py"
    file.write_text(printed.replace("ckpt_tools_training", "training"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, file],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = [RunResult.read(tmp_path / "rates" / name / "result.json") for name in ("0.001", "0.003")]
    assert [each.settings["learning_rate"] for each in results] == [1e-3, 3e-3]
    best = max(results, key=lambda each: each.accuracy)
    assert done.stdout.splitlines()[-1] == f"{best.settings['learning_rate']} {best.accuracy} {best.checkpoint}"
