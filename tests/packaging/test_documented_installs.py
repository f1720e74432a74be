"""The lines of README and the pages that install ckpt-tools in a checkout, run as they are printed.

The normal run installs from the tree what needs no package index, and links the dependencies. With ``--soak`` each line
runs as a user runs it, some gigabytes each.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.packaging.distributions import ROOT
from tests.packaging.environments import Environment, clean_variables, empty, link, metadata_of, required

pytestmark = pytest.mark.extended

PAGES = ("README.md", *(f"docs/{name}.md" for name in ("index", "install", "start", "training", "inference")))
LINE = re.compile(r"(?:\$ |`)((?:pip install (?:-e )?|uv tool install |uvx --from )'?\.[^`#\n]*)")
LINES = sorted({each.strip() for page in PAGES for each in LINE.findall((ROOT / page).read_text())})
COMMANDS = {"train": ["train"], "serve": ["predict", "serve"]}
"""What an extra is for, in the commands whose help imports it."""

SAMPLE = ("pip install .", "pip install -e .", "pip install '.[train,serve]'")
"""The lines that the normal run installs: a copy, the checkout itself, and extras with commands of their own."""


def extras_of(line: str) -> list[str]:
    found = re.search(r"\.\[([a-z0-9,-]+)\]", line)
    return found[1].split(",") if found else []


def run(line: str, environment: Environment, source: Path, **variables: str) -> None:
    path = f"{environment.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=source,
        env=clean_variables() | {"PATH": path, "UV_TOOL_DIR": str(environment.work / "tools")} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_lines_are_found():
    assert {*SAMPLE, "pip install '.[train]'", "pip install '.[serve]'"} <= set(LINES)
    assert {"all", "train", "serve", "s3"} <= {extra for line in LINES for extra in extras_of(line)}


def test_no_line_asks_an_index_for_ckpt_tools():
    """As one that nothing precedes; the other pages name extras of what is installed."""
    for page in PAGES:
        assert not re.search(r"^\$ .*install .*ckpt-tools", (ROOT / page).read_text(), re.MULTILINE), page


@pytest.fixture(scope="module")
def checkout(built, tmp_path_factory):
    return Path(shutil.copytree(built.source, tmp_path_factory.mktemp("checkout") / "source"))


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=() if line in SAMPLE else pytest.mark.soak) for line in LINES if line.startswith("pip")],
)
def test_a_line_installs_from_the_tree(line, checkout, built, tmp_path):
    environment = empty(tmp_path)
    link([distribution("setuptools")], environment.site_packages)
    pip = environment.folder / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip --python {environment.python} "$@"\n')
    pip.chmod(0o755)
    ours = line.split(" transformers")[0]
    run(ours, environment, checkout, PIP_NO_INDEX="1", PIP_NO_DEPS="1", PIP_NO_BUILD_ISOLATION="0")
    needed = required(metadata_of(built.wheel), extras_of(line))
    assert not [each.name for each in needed if each.name.startswith("ckpt")]
    link(needed, environment.site_packages)
    for name in [name for extra in extras_of(line) for name in COMMANDS.get(extra, [])]:
        assert f"Usage: ckpt-tools {name}" in environment.succeed(name, "--help")
    assert "universal" in environment.succeed("formats")


@pytest.mark.soak
@pytest.mark.parametrize("line", LINES)
def test_a_line_installs_from_the_index(line, checkout, tmp_path):
    environment = empty(tmp_path, with_pip=True)
    if line.startswith("uv"):
        assert environment.run_python("-m", "pip", "install", "--quiet", "uv").returncode == 0
    run(line, environment, checkout)
    if line.startswith("pip"):
        assert "universal" in environment.succeed("formats")
