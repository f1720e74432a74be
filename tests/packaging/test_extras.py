"""Each extra is enough for the commands that the documents give for it, and the wheel alone for the converter's.

With ``--soak`` every environment is also installed from the package index, some gigabytes each.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fixtures.corpus import make
from tests.packaging.distributions import FOLDERS, build_editable
from tests.packaging.documented import CHECKS, SOAKED
from tests.packaging.environments import Environment, clean_variables, installed, linked, metadata_of

pytestmark = pytest.mark.extended

SAMPLE = ("", "torch", "serve", "s3")
"""Extras that are tried outside of the soak: none, a library, a service, a store."""

Maker = Callable[[Path, Path, Sequence[str]], Environment]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "make" in metafunc.fixturenames:
        soak = metafunc.config.getoption("--soak")
        metafunc.parametrize("make", [linked, installed] if soak else [linked], ids=lambda maker: maker.__name__)
        metafunc.parametrize("extras", SOAKED if soak else SAMPLE, ids=lambda extras: extras or "none")


def test_an_extra_is_enough(extras, make, built, material, tmp_path):
    environment = make(tmp_path, built.wheel, extras.split(",") if extras else [])
    SOAKED[extras](environment, material)


def test_every_extra_is_tried(built):
    extras = set(metadata_of(built.wheel).metadata.get_all("Provides-Extra", []))
    assert extras - {"all"} <= set(CHECKS)


def refused(done: subprocess.CompletedProcess[str], sentence: str) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert sentence in done.stderr


@pytest.fixture(scope="module")
def bare(built, tmp_path_factory):
    """The wheel without any extra."""
    return linked(tmp_path_factory.mktemp("bare"), built.wheel)


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["train", "--engine=fsdp2", "--out=run"], "train"),
        (["predict", "--model", "MODEL", "--architecture=ours", "--input=digits", "--output=rows.jsonl"], "serve"),
        (["serve", "MODEL", "--architecture=ours", "--port=0"], "serve"),
        (["serve", "MODEL", "--architecture=ours", "--port=0", "--runner=ray"], "ray-serve"),
        (["inspect", "s3://bucket/model"], "s3"),
        (["inspect", "hf://org/model"], "hub"),
        (["convert", "MODEL", "hf://org/model"], "hub"),
        (["sign", "MODEL", "--private-key=KEY"], "sign"),
        (["convert", "MODEL", "out.pt", "--runner=ray"], "ray"),
        (["inspect", "ORBAX"], "orbax"),
        (["inspect", "ZSTD"], "zstd"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_without_the_extra_a_command_says_what_to_install(words, extra, bare, material):
    given = {
        "MODEL": str(material.model),
        "ORBAX": str(make("orbax").source),
        "ZSTD": str(make("dcp-zstd").source),
        "--private-key=KEY": f"--private-key={material.private_key}",
    }
    refused(bare.run(*(given.get(word, word) for word in words)), f"pip install 'ckpt-tools[{extra}]'")


@pytest.mark.parametrize(
    "extra", ["all", *(pytest.param(each, marks=pytest.mark.soak) for each in ("train", "ray-serve"))]
)
def test_what_to_install_needs_ckpt_tools_of_no_index(extra, built, tmp_path):
    """pip takes the installed ckpt-tools, and adds what its extra requires: all of it is there."""
    environment = linked(tmp_path, built.wheel, [extra])
    install = ["install", "--no-index", "--disable-pip-version-check", f"ckpt-tools[{extra}]"]
    words = [sys.executable, "-m", "pip", "--python", str(environment.python), *install]
    done = subprocess.run(words, env=clean_variables(), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Successfully installed" not in done.stdout, done.stderr


@pytest.fixture(scope="module")
def uninstalled(built, tmp_path_factory):
    """What training and inference require, without ckpt-tools itself."""
    environment = linked(tmp_path_factory.mktemp("uninstalled"), built.wheel, ["train", "serve"])
    for path in environment.site_packages.glob("ckpt_tools*"):
        shutil.rmtree(path)
    return environment


@pytest.mark.parametrize(
    ("module", "words"),
    [
        *((module, []) for module in ("training", "inference.batch", "inference.serving", "inference.demo")),
        *(("ckpt_tools", [name]) for name in ("train", "predict", "serve")),
    ],
)
def test_a_source_tree_runs_its_modules_without_being_installed(module, words, uninstalled, built):
    done = uninstalled.run_python("-m", module, *words, "--help", cwd=built.source)
    assert done.returncode == 0 and "Usage: " in done.stdout, done.stderr


def test_an_editable_installation_has_both_names_for_the_same_files(built, tmp_path):
    environment = linked(tmp_path, build_editable(built.source, tmp_path), ["train", "serve"])
    for name in ("train", "predict", "serve"):
        assert f"Usage: ckpt-tools {name}" in environment.succeed(name, "--help")
    program = "import ckpt_tools_training as t, ckpt_tools_inference as i; print(t.__file__, i.__file__, sep='\\n')"
    printed = environment.run_python("-c", program).stdout.splitlines()
    assert printed == [str(built.source / name / "__init__.py") for name in list(FOLDERS)[1:]]
    script = tmp_path / "script.py"
    script.write_text("from ckpt_tools import convert\n")
    mypy = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=skip", f"--cache-dir={tmp_path / 'cache'}"]
    words = [*mypy, f"--python-executable={environment.python}", script]
    done = subprocess.run(words, cwd=tmp_path, env=clean_variables(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_help_imports_nothing_of_the_commands_beside(bare):
    program = "import sys; from ckpt_tools.cli import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    loaded = set(bare.run_python("-c", program).stdout.split())
    assert "ckpt_tools.cli.group" in loaded
    assert not loaded & {"importlib.metadata", "ckpt_tools_training", "ckpt_tools_inference", "torch"}
