"""What the wheel and the source distribution hold, and that the latter is enough to test."""

from __future__ import annotations

import email
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

import ckpt_tools
from tests.packaging.distributions import FOLDERS, ROOT, tree
from tests.packaging.environments import clean_variables, metadata_of

NOT_IN_THE_SDIST = {".ci"}
"""What is of use to the repository alone."""

pytestmark = pytest.mark.extended

QUICK_TESTS = [f"tests/{name}.py" for name in ("core/test_boxes", "core/test_layout", "serialization/test_zip_archive")]


@pytest.fixture(scope="module")
def metadata(built):
    return email.message_from_string(metadata_of(built.wheel).read_text("METADATA") or "")


@pytest.fixture(scope="module")
def project():
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


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
    assert built.wheel.stat().st_size < 1_600_000


def test_the_source_distribution_holds_the_whole_tree(built):
    with tarfile.open(built.sdist) as archive:
        held = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    lacking = {path for path in tree() if path.parts[0] not in NOT_IN_THE_SDIST} - held
    assert not lacking
    for name in (
        "docs/cli.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "constraints/tests.txt",
        "Makefile",
        "tests/conftest.py",
    ):
        assert Path(name) in held
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


def test_the_index_page_says_whose_it_is_and_where(metadata):
    assert metadata["Author"] and metadata["Maintainer"]
    addresses = dict(each.split(", ", 1) for each in metadata.get_all("Project-URL", []))
    assert {"Homepage", "Documentation", "Issues", "Changelog"} <= set(addresses)
    assert all(address.startswith(addresses["Homepage"]) for address in addresses.values())


@pytest.mark.parametrize("minor", [11, 12, 13])
def test_the_index_page_names_each_python(minor, metadata):
    assert f"Programming Language :: Python :: 3.{minor}" in metadata.get_all("Classifier", [])


def links(markdown: str) -> Iterator[str]:
    """Where the links and pictures of a text lead, as a renderer understands it."""
    for block in MarkdownIt().parse(markdown):
        for token in block.children or ():
            yield from (str(token.attrs[name]) for name in ("href", "src") if name in token.attrs)


def test_links_on_the_index_page_lead_to_files_of_the_repository(metadata, project):
    home = project["urls"]["Homepage"]
    found = list(links(metadata.get_payload()))
    assert any(link.endswith(".svg") for link in found)
    for link in found:
        assert link.startswith(f"{home}/"), f"{link} in README.md needs a definition in docs/index_links.md"
        where = link.partition("#")[0].removeprefix(f"{home}/").split("/", 2)
        assert where[:2] in (["blob", "main"], ["raw", "main"]) and (ROOT / where[2]).is_file(), link


def test_links_in_the_tree_lead_to_its_files():
    found = list(links((ROOT / "README.md").read_text()))
    assert found and all((ROOT / link.partition("#")[0]).is_file() for link in found), found


def test_the_image_of_the_service_installs_what_there_is(built):
    text = (built.source / "docker" / "service.Dockerfile").read_text().replace("\\\n", " ")
    [install] = re.findall(r"pip install (.*)", text)
    [wanted] = [word for word in shlex.split(install) if word.startswith(".")]
    extras = set(metadata_of(built.wheel).metadata.get_all("Provides-Extra", []))
    assert {"serve"} <= {*wanted[2:-1].split(",")} <= extras
