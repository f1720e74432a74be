"""What is published, built as a build tool builds it: a source distribution of this tree, and a wheel of that alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

FOLDERS = {"ckpt_tools": "ckpt_tools", "ckpt_tools_training": "training", "ckpt_tools_inference": "inference"}
"""The folder of the tree that each package of the wheel is."""

_HOOK = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


@dataclass(frozen=True, slots=True)
class Built:
    """The source distribution, the folder that it unpacks to, and the wheel."""

    sdist: Path
    source: Path
    wheel: Path


def build(folder: Path) -> Built:
    """Build in ``folder``, from copies: building leaves files in the tree, and takes up what an earlier build left."""
    copy = shutil.copytree(ROOT, folder / "copy", symlinks=True, ignore=_ignored)
    _run_hook("build_sdist", copy, folder)
    [sdist] = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    return Built(sdist, source, _wheel("build_wheel", shutil.copytree(source, folder / "to-build"), folder))


def build_editable(source: Path, folder: Path) -> Path:
    """A wheel that leads to ``source``, as ``pip install -e`` makes it."""
    return _wheel("build_editable", source, folder)


def _wheel(hook: str, source: Path, out: Path) -> Path:
    _run_hook(hook, source, out)
    [wheel] = out.glob("*.whl")
    return wheel


def _run_hook(hook: str, source: Path, out: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HOOK, hook, str(out)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def tree() -> set[Path]:
    """The files that a fresh clone of this tree has, relative to it."""
    found: set[Path] = set()
    for folder, folders, files in os.walk(ROOT):
        ignored = _ignored(folder, [*folders, *files])
        folders[:] = [name for name in folders if name not in ignored]
        found |= {Path(folder, name).relative_to(ROOT) for name in files if name not in ignored}
    return found


def _ignored(folder: str, names: list[str]) -> set[str]:
    """What git ignores: a fresh clone does not have it."""
    patterns = [".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines())]
    paths = {name: (Path(folder) / name).relative_to(ROOT).as_posix() for name in names}
    return {name for name, path in paths.items() if any(fnmatch(name, each) or path == each for each in patterns)}
