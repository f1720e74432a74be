"""What each command imports: the packages that its work needs, and no more modules than it had."""

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from ckpt_tools import cli
from ckpt_tools.cli.group import get_summary
from ckpt_tools.cli.main import COMMANDS, group
from tests.support.commands import all_commands
from tests.support.sweep import tiered

PROBE = """
import json, runpy, sys
before = set(sys.modules)
target, *words = sys.argv[1:]
sys.argv = ["ckpt-tools", *words]
try:
    runpy.run_module("ckpt_tools", run_name="__main__", alter_sys=True)
except SystemExit as done:
    assert not done.code, done.code
with open(target, "w") as file:
    json.dump(sorted(set(sys.modules) - before), file)
"""


BASE = {"cli", "core", "messages", "process"}
MACHINERY = {*BASE, "stores", "state_tree", "formats", "reading", "runs", "serialization", "trainers"}
"""What reading a checkpoint takes."""
NAMING = {*MACHINERY, "recipes"}
"""With the text of recipes, which tells whose names its tensors have."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a command may import: packages of ours, formats of them, at most so many modules, and others' packages."""

    packages: set[str]
    formats: set[str]
    num_modules: int
    others: set[str]


CHECKING = {*MACHINERY, "planning", "transfer", "verification"}
CONVERTING = {*MACHINERY, "planning", "transfer", "conversion"}
LISTING = Allowed(BASE, set(), 26, {"click"})

ALLOWED = {
    "--help": LISTING,
    "--version": LISTING,
    "convert --help": LISTING,
    "inspect": Allowed(NAMING, {"safetensors"}, 109, {"click", "numpy", "rich"}),
    "inspect torch": Allowed(NAMING, {"safetensors", "rank_files", "torch"}, 136, {"click", "numpy", "rich"}),
    "plan": Allowed(CONVERTING, {"safetensors", "torch"}, 160, {"click", "numpy", "rich", "xxhash"}),
    "convert": Allowed(CONVERTING, {"safetensors"}, 167, {"click", "isal", "numpy", "xxhash"}),
    "verify": Allowed(CHECKING, {"safetensors"}, 144, {"click", "isal", "numpy"}),
    "verify pair": Allowed(CHECKING, {"safetensors"}, 146, {"click", "isal", "numpy"}),
    "diff": Allowed(CHECKING, {"safetensors"}, 142, {"click", "isal", "numpy"}),
    "scan": Allowed({*MACHINERY, "verification"}, {"safetensors"}, 124, {"click", "numpy"}),
    "formats": Allowed({*BASE, "formats"}, set(), 39, {"click", "rich"}),
    "clean": Allowed({*BASE, "stores"}, set(), 44, {"click"}),
}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The words of a command on a small checkpoint, which each has for itself."""
    folder = tmp_path_factory.mktemp("small")
    source, same, torch_file = (folder / name for name in ("a.safetensors", "same.safetensors", "a.pt"))
    for path in (source, same):
        safetensors.numpy.save_file({f"t{n}": np.full(8, n, np.float32) for n in range(3)}, path)
    subprocess.run([sys.executable, "-m", "ckpt_tools", "convert", source, torch_file, "-q"], check=True)
    words: dict[str, list[str | Path]] = {
        "inspect": ["inspect", source],
        "inspect torch": ["inspect", torch_file],
        "plan": ["plan", source, folder / "planned.pt"],
        "convert": ["convert", source, folder / "done.safetensors"],
        "verify": ["verify", source],
        "verify pair": ["verify", source, same],
        "diff": ["diff", source, same],
        "scan": ["scan", torch_file],
        "clean": ["clean", folder / "done.safetensors"],
    }
    return lambda name: list(map(str, words.get(name, name.split())))


def imported(words: list[str], tmp_path: Path) -> set[str]:
    """The modules that the command imports, beside those of every Python."""
    target = tmp_path / "modules.json"
    subprocess.run([sys.executable, "-c", PROBE, str(target), *words], check=True, stdout=subprocess.DEVNULL)
    return set(json.loads(target.read_text()))


def packages_of(modules: set[str]) -> set[str]:
    """Packages of ours, without the modules that lie at the root."""
    parts = [module.split(".") for module in modules if module.startswith("ckpt_tools.")]
    return {each[1] for each in parts if len(each) > 2}


def formats_of(modules: set[str]) -> set[str]:
    """Formats of which more than the names of files is imported."""
    parts = [module.split(".") for module in modules if module.startswith("ckpt_tools.formats.")]
    return {each[2] for each in parts if len(each) > 3 and each[3] != "names"}


@pytest.mark.parametrize(
    "command",
    tiered(
        ALLOWED,
        test=("--help", "inspect", "convert", "verify", "clean"),
        extended=("convert --help", "inspect torch", "plan", "diff", "scan", "formats"),
    ),
)
def test_a_command_imports_what_its_work_needs(command, given, tmp_path):
    allowed, modules = ALLOWED[command], imported(given(command), tmp_path)
    ours = {module for module in modules if module.split(".")[0] == "ckpt_tools"}
    others = {module.split(".")[0] for module in modules} - sys.stdlib_module_names - {"ckpt_tools"}
    assert packages_of(ours) <= allowed.packages
    assert formats_of(ours) <= allowed.formats
    assert others <= allowed.others
    assert len(ours) <= allowed.num_modules, sorted(ours)


GIVE_BACK = """
import os
from ckpt_tools.cli import process
before = os.environ.get(process.THREADS_VARIABLE)
process.restore_settings()
print(before, os.environ.get(process.THREADS_VARIABLE))
"""


@pytest.mark.parametrize(("users", "said"), [(None, "1 None"), ("3", "3 3")])
def test_a_command_that_computes_has_the_threads_that_the_user_gave(users, said, monkeypatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if users:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", users)
    done = subprocess.run([sys.executable, "-c", GIVE_BACK], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said


def test_the_list_of_commands_has_every_command_and_says_what_its_help_says():
    assert {name: home.summary for name, home in COMMANDS.items()} == {
        name: get_summary(command) for name, command in group.commands.items()
    }
    modules = [path.stem for path in Path(cli.__path__[0]).glob("*.py")]
    names = {name for module in modules for name in vars(import_module(f"ckpt_tools.cli.{module}"))}
    functions = [name for name in names if name.endswith("_command") and not name.startswith("_")]
    found = {name.removesuffix("_command").replace("_", "-") for name in functions}
    assert found == {name.replace(" ", "-") for name in all_commands()}
