"""What the wheel and the source distribution hold, the documented lines that install them, and that each extra is
enough for its commands. Without ``--soak`` nothing comes from a package index: dependencies are links."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

import ckpt_tools
from fixtures.corpus import make
from tests.packaging.documented import CHECKS
from tests.packaging.environments import (
    FOLDERS,
    ROOT,
    Environment,
    build_editable,
    clean_variables,
    empty,
    installed,
    link,
    linked,
    metadata_of,
    required,
    tree,
)
from tests.support.sweep import tiered

NOT_IN_THE_SDIST = {".ci"}
"""What is of use to the repository alone."""

pytestmark = pytest.mark.extended

QUICK_TESTS = [f"tests/{name}.py" for name in ("core/test_boxes", "core/test_layout", "serialization/test_zip_archive")]


def test_the_wheel_holds_every_module_of_the_packages_and_nothing_else(built):
    held = set(zipfile.ZipFile(built.wheel).namelist())
    metadata = {path for path in held if path.startswith(f"ckpt_tools-{ckpt_tools.__version__}.dist-info/")}
    files = tree()
    assert held - metadata == {
        f"{name}/{path.relative_to(folder)}"
        for name, folder in FOLDERS.items()
        for path in files
        if path.is_relative_to(folder)
    }
    assert any(path.endswith("/licenses/LICENSE") for path in metadata)
    assert {"ckpt_tools/py.typed", "ckpt_tools_training/notebooks/fsdp2_on_ray.ipynb"} <= held
    assert built.wheel.stat().st_size < 2_200_000


def test_the_source_distribution_holds_the_whole_tree(built):
    with tarfile.open(built.sdist) as archive:
        held = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    lacking = {path for path in tree() if path.parts[0] not in NOT_IN_THE_SDIST} - held
    assert not lacking
    assert not {path for path in held if "__pycache__" in path.parts}


def test_the_source_distribution_runs_its_own_tests(built):
    program = "import ckpt_tools, pytest, sys; print(ckpt_tools.__file__); sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-c", program, *options, *QUICK_TESTS],
        cwd=built.source,
        env=clean_variables(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith(f"{built.source}/")


PAGES = ("README.md", *(f"docs/{name}.md" for name in ("index", "install", "start", "training", "inference")))
LINE = re.compile(r"(?:\$ |`)((?:pip install (?:-e )?|uv tool install |uvx --from )'?\.[^`#\n]*)")
LINES = sorted({each.strip() for page in PAGES for each in LINE.findall((ROOT / page).read_text())})
COMMANDS = {"train": ["train"], "serve": ["predict", "serve"]}
"""What an extra is for, in the commands whose help imports it."""

SAMPLE = ("pip install -e .", "pip install '.[train,serve]'")
"""The lines that the normal run installs: the checkout itself, and a copy with extras that have commands."""


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


@pytest.fixture(scope="module")
def checkout(built, tmp_path_factory):
    return Path(shutil.copytree(built.source, tmp_path_factory.mktemp("checkout") / "source"))


@pytest.mark.parametrize("line", tiered([line for line in LINES if line.startswith("pip")], test=SAMPLE))
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


@pytest.mark.parametrize("make", [linked, pytest.param(installed, marks=pytest.mark.soak)])
@pytest.mark.parametrize("extras", tiered(CHECKS, test=["", "s3"]))
def test_an_extra_is_enough(extras, make, built, material, tmp_path):
    environment = make(tmp_path, built.wheel, extras.split(",") if extras else [])
    CHECKS[extras](environment, material)


@pytest.fixture(scope="module")
def bare(built, tmp_path_factory):
    """The wheel without any extra."""
    return linked(tmp_path_factory.mktemp("bare"), built.wheel)


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["train", "--engine=fsdp2", "--out=run"], "train"),
        (["predict", "--model", "MODEL", "--architecture=ours", "--input=digits", "--output=rows.jsonl"], "serve"),
        (["serve", "MODEL", "--architecture=ours", "--port=0", "--runner=ray"], "ray-serve"),
        (["inspect", "s3://bucket/model"], "s3"),
        (["inspect", "hf://org/model"], "hub"),
        (["sign", "MODEL", "--private-key=KEY"], "sign"),
        (["convert", "MODEL", "out.pt", "--runner=ray"], "ray"),
        (["inspect", "ZSTD"], "zstd"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_without_the_extra_a_command_says_what_to_install(words, extra, bare, material):
    given = {
        "MODEL": str(material.model),
        "ZSTD": str(make("dcp-zstd").source),
        "--private-key=KEY": f"--private-key={material.folder}/key.pem",
    }
    done = bare.run(*(given.get(word, word) for word in words))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert f"pip install 'ckpt-tools[{extra}]'" in done.stderr


@pytest.mark.parametrize("extra", tiered(("all", "train", "ray-serve", "zstd"), test=["zstd"]))
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


MODULES = ("training", "inference.batch", "inference.serving", "inference.demo")
WORDS = ("ckpt_tools train", "ckpt_tools predict", "ckpt_tools serve")


@pytest.mark.parametrize("words", tiered((*MODULES, *WORDS), test=["training", "ckpt_tools serve"]))
def test_a_source_tree_runs_its_modules_without_being_installed(words, uninstalled, built):
    done = uninstalled.run_python("-m", *words.split(), "--help", cwd=built.source)
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
