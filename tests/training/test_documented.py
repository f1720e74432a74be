"""The commands, scripts and notebooks about training: in the soak each is run."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import training
from tests.training.conftest import in_process
from tests.training.hub import save_llama, save_tokenizer
from tests.training.jobs import result_of
from training.config.command_line import parse_options
from training.config.train_config import TrainConfig
from training.loop.stopping import EXIT_CODE

ROOT = Path(training.__file__).parent.parent
PAGES = {path.name: re.sub(r" \\\n +", " ", path.read_text()) for path in sorted((ROOT / "docs").glob("training*.md"))}
"""With commands of several lines as one."""

ALL = "\n".join(PAGES.values())
PAGE = ALL.replace(PAGES["training_own.md"], "")
APART = PAGE.split("## Checkpoints and resuming")[1].split("\n## ")[0]
"""Its commands build on each other."""

SMALL = "--launcher=torchrun --num-samples=64"
SECONDS = 900


def commands(program: str, page: str = PAGE) -> list[str]:
    """What follows the program on each of its lines."""
    return re.findall(rf"(?m)^\$ {re.escape(program)} (.*)$", page)


def is_for_this_machine(words: str) -> bool:
    """test_s3 has a store, and nobody here has sixteen workers."""
    return "s3://" not in words and "--num-workers 16" not in words


def config_of(words: list[str]) -> TrainConfig:
    return TrainConfig(**parse_options(words))


def run(folder: Path, *words: str) -> str:
    """Python with these words in the folder, which finds the packages of a checkout."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), *sys.path))}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    # Ray Tune and transformers log what they do to stderr.
    assert done.returncode == 0 and "Traceback" not in done.stderr, (words, done.stderr)
    return done.stdout


RUNS = [words for words in commands("ckpt-tools train", PAGE.replace(APART, "")) if is_for_this_machine(words)]


@pytest.mark.soak
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("words", RUNS)
def test_a_documented_run_ends_with_a_result(words, tmp_path):
    """By torchrun, on a few samples; everything else as on the page."""
    asked = shlex.split(words)
    if "hf:base" in asked:
        save_tokenizer(save_llama(tmp_path / "base"))
    run(tmp_path, "-m", "training", *asked, *SMALL.split(), "--epochs=1")
    found = result_of(tmp_path / config_of(asked).out)
    assert Path(found.checkpoint).is_dir() and len(found.history) == 1


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_commands_about_resuming_and_those_about_ones_own_model_work(tmp_path):
    """One after the other in one folder; without the libraries of the callbacks."""
    for words in commands("ckpt-tools train", APART):
        run(tmp_path, "-m", "training", *shlex.split(words), *SMALL.split(), "--num-workers=1", "--epochs=2")
    for code, name in re.findall(r'(?s)```python\n("""(\w+\.py):.*?)```', PAGES["training_own.md"]):
        (tmp_path / name).write_text(code)
    (tmp_path / "point.json").write_text("[1, 2, 3, 4, 5, 6, 7, 8]")
    (tmp_path / "points.txt").write_text("point.json\n")
    modules = {"train": "training", "predict": "inference.batch"}
    found = commands("ckpt-tools", PAGES["training_own.md"])
    assert len(found) == 7
    for verb, *words in (shlex.split(each) for each in found if "to_wandb" not in each):
        run(tmp_path, "-m", modules[verb], *words)


@pytest.mark.soak
@pytest.mark.timeout(SECONDS)
def test_the_documented_learning_rates_are_runs(tmp_path):
    """The file as printed, of a checkout."""
    [printed] = re.findall(r'(?s)```python\n("""rates.py.*?)```', PAGE)
    (tmp_path / "rates.py").write_text(printed.replace("ckpt_tools_training", "training"))
    last = run(tmp_path, "rates.py").splitlines()[-1]
    results = [result_of(tmp_path / "rates" / name) for name in ("0.001", "0.003")]
    assert [each.settings["learning_rate"] for each in results] == [1e-3, 3e-3]
    best = max(results, key=lambda each: each.accuracy)
    assert last == f"{best.settings['learning_rate']} {best.accuracy} {best.checkpoint}"


@pytest.mark.soak
@pytest.mark.timeout(SECONDS)
def test_readme_trains_the_samples_further(tmp_path):
    """Under FSDP2 from the sample, and then under DeepSpeed on another number of workers."""
    run(tmp_path, "-m", "ckpt_tools", "samples", "tiny")
    readme = re.sub(r" \\\n +", " ", (ROOT / "README.md").read_text())
    for words in commands("ckpt-tools train", readme):
        run(tmp_path, "-m", "training", *shlex.split(words))
    assert result_of(tmp_path / "more").history and (tmp_path / "taught/config.json").is_file()


TINY = ("--model=cnn", "--num-samples=32", "--batch-size=16", "--epochs=1", "--strategy=full_shard")


@pytest.mark.soak
@pytest.mark.timeout(SECONDS)
def test_a_run_under_accelerate_trains_saves_and_says_its_world_size(tmp_path):
    """The documented options on one machine, with two ranks and a free port."""
    own = ("--multi_gpu", "--num_processes=2", "--num_machines=1", "--main_process_port=0", "--module", "training")
    words = ("--launcher=torchrun", "--num-workers=2", f"--out={tmp_path}", *TINY)
    done = in_process("-m", "accelerate.commands.launch", *own, *words)
    assert done.returncode == 0, done.stderr
    result = result_of(tmp_path)
    assert (result.num_workers, len(result.history[0].losses)) == (2, 2)
    assert len(list(Path(result.checkpoint).glob("__*.distcp"))) == 2


EVERY = [page.read_text() for page in sorted((ROOT / "docs").rglob("*.md"))]
[SLURM] = [script for page in EVERY for script in re.findall(r"(?ms)^```bash\n(#!/bin/bash\n#SBATCH .*?)^```$", page)]
[OPTIONS] = [options for page in EVERY for options in re.findall(r"(?m)^\$ sbatch job\.sh (.*)$", page)]
BIN = {
    "scontrol": 'case $1 in show) echo node1;; requeue) echo "requeued $2" >> log;; esac',
    "squeue": "echo $STATE",
    "srun": 'shift; SLURM_PROCID=3 SLURM_LOCALID=1 "$@"; exit $CODE',
    "python": """echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT" >> log; printf '%s\\n' "$@" > words""",
}
"""Programs in the place of SLURM's own: the script itself is run."""


@pytest.mark.parametrize(
    ("code", "state", "ends", "requeued"),
    [
        (EXIT_CODE, "RUNNING", 0, "requeued 7\n"),
        (EXIT_CODE, "COMPLETING", EXIT_CODE, ""),
        (1, "RUNNING", 1, ""),
        (0, "RUNNING", 0, ""),
    ],
)
def test_a_stopped_job_of_slurm_is_requeued_and_a_cancelled_or_failed_one_is_not(code, state, ends, requeued, tmp_path):
    for name, body in BIN.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(SLURM)
    given = [*shlex.split(OPTIONS), "--out", "/runs/with a space"]
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS": "4"}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CODE": str(code), "STATE": state, **job}
    done = subprocess.run(["/bin/bash", "job.sh", *given], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == ends
    assert (tmp_path / "log").read_text() == f"3 1 4 node1 20007\n{requeued}"
    dash_m, module, *options = (tmp_path / "words").read_text().splitlines()
    assert (dash_m, module) == ("-m", "ckpt_tools_training")
    config = config_of(options)
    assert (config.launcher, config.resume, config.num_workers) == ("torchrun", "auto", 4)
    assert (config.sharding.name, config.out) == ("full_shard", Path("/runs/with a space"))


NOTEBOOKS = sorted((ROOT / "training/notebooks").glob("*.ipynb"))
INSTALLED = {"ckpt_tools": "ckpt_tools", "training": "ckpt_tools_training", "inference": "ckpt_tools_inference"}
STEPS_OF_AN_EPOCH = 22


def definitions(text: str) -> dict[str, str]:
    """The source of each function and class at the top of a program."""
    parts = [each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef | ast.ClassDef)]
    return {each.name: ast.unparse(each) for each in parts}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_the_code_of_its_example_and_what_it_prints(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    example = (ROOT / "training/examples" / f"{path.stem}.py").read_text()
    assert definitions("\n".join(cell.source for cell in cells)) == definitions(example)
    shown = [cell for cell in cells if re.search(r"^(print|Image)|^ +print", cell.source, re.MULTILINE)]
    assert shown and all(cell.outputs for cell in shown)
    assert not any(out.get("name") == "stderr" or out.output_type == "error" for cell in cells for out in cell.outputs)


@pytest.mark.soak
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    """Of FSDP2 in a checkout, and of DeepSpeed beside packages with the names that a wheel gives them. Both runs, the
    second from the first's checkpoint; a prediction for each image, and a picture in the notebook."""
    for folder, name in INSTALLED.items():
        (tmp_path / name).symlink_to(ROOT / folder)
    folder = ROOT if path.stem == "fsdp2_on_ray" else tmp_path
    book: Any = nbformat.read(path, as_version=4)
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    NotebookClient(book, timeout=600, resources={"metadata": {"path": str(folder)}}).execute(env=environment)
    outputs = [out for cell in book.cells if cell.cell_type == "code" for out in cell.outputs]
    text = "".join(out.text for out in outputs if out.output_type == "stream")
    runs = [ast.literal_eval(line) for line in text.splitlines() if line.startswith("{")]
    assert [(run["epoch"], run["step"]) for run in runs] == [(1, STEPS_OF_AN_EPOCH), (2, 2 * STEPS_OF_AN_EPOCH)]
    assert runs[1]["loss"] < runs[0]["loss"]
    assert "56 tensors are equal" in text
    assert text.count(" is taken for a ") == 8
    assert any("image/png" in out.get("data", {}) for out in outputs)
