"""What is published, and environments that hold the wheel and what it requires, and nothing else.

A source distribution of this tree is built as a build tool builds it, and a wheel of that alone. torch is gigabytes, so
nothing is downloaded: an environment gets links to the packages of the one that the tests run in, but only to those
that the wheel's own metadata leads to. A package that an extra forgets is absent.
"""

import csv
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def clean_variables() -> dict[str, str]:
    """This process's environment variables, less those by which other packages or another Ray would be found."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RAY_"))}


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment, and a folder of its own to run in."""

    folder: Path
    work: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def command(self) -> Path:
        return self.folder / "bin" / "ckpt-tools"

    @property
    def site_packages(self) -> Path:
        [found] = self.folder.glob("lib/python*/site-packages")
        return found

    def run(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """``ckpt-tools`` with these words."""
        return self._run([self.command, *words], variables)

    def run_python(self, *words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return self._run([self.python, *words], {}, cwd)

    def succeed(self, *words: str | Path, **variables: str) -> str:
        """What ``ckpt-tools`` prints, which ends with 0."""
        done = self.run(*words, **variables)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def _run(
        self, command: Iterable[str | Path], variables: dict[str, str], cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=cwd or self.work,
            env=clean_variables() | variables,
            check=False,
        )


def linked(folder: Path, wheel: Path, extras: Iterable[str] = ()) -> Environment:
    """The wheel with these extras, and links to the packages that it requires."""
    environment = empty(folder)
    install = ["install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", str(wheel)]
    words = [sys.executable, "-m", "pip", "--python", str(environment.python), *install]
    done = subprocess.run(words, env=clean_variables(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    link(required(metadata_of(wheel), extras), environment.site_packages)
    return environment


def installed(folder: Path, wheel: Path, extras: Iterable[str] = ()) -> Environment:
    """The same as a user makes it, from the package index: minutes, and gigabytes where torch is one of them."""
    environment = empty(folder, with_pip=True)
    listed = ",".join(extras)
    wanted = f"{wheel}[{listed}]" if listed else str(wheel)
    for words in (["install", "--quiet", "--disable-pip-version-check", wanted], ["check"]):
        done = subprocess.run([environment.python, "-m", "pip", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return environment


def empty(folder: Path, *, with_pip: bool = False) -> Environment:
    """An environment with the standard library alone."""
    venv.EnvBuilder(with_pip=with_pip, symlinks=True).create(folder / "venv")
    work = folder / "work"
    work.mkdir()
    return Environment(folder / "venv", work)


def metadata_of(wheel: Path) -> Distribution:
    [metadata] = (each for each in zipfile.Path(wheel).iterdir() if each.name.endswith(".dist-info"))
    return PathDistribution(metadata)


def required(ours: Distribution, extras: Iterable[str]) -> list[Distribution]:
    """What ``ours`` requires with ``extras``, and what that requires, out of the environment of the tests."""
    first = canonicalize_name(ours.name)
    found: dict[str, Distribution] = {first: ours}
    seen: set[tuple[str, str]] = set()
    waiting = [(first, extra) for extra in ("", *extras)]
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen.add(each)
            waiting += _followed(found, *each)
    del found[first]
    return list(found.values())


def _followed(found: dict[str, Distribution], name: str, extra: str) -> Iterator[tuple[str, str]]:
    """Distributions with an extra, or with "" for none, that one with an extra requires; ``found`` grows by them."""
    for requirement in map(Requirement, found[name].requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            there = canonicalize_name(requirement.name)
            if there not in found:
                found[there] = distribution(requirement.name)
            version = found[there].version
            assert requirement.specifier.contains(version, prereleases=True), f"{requirement}: {version} is installed"
            yield from ((there, each) for each in ("", *requirement.extras))


def link(distributions: Collection[Distribution], site_packages: Path) -> None:
    """Link what each has in its site-packages: whole folders, but for those of a namespace that several share. A file
    that several have, such as the ``__init__.py`` of a namespace, is that of the first."""
    files = {each.name: list(_files(each)) for each in distributions}
    owners: dict[str, set[str]] = {}
    for name, paths in files.items():
        for path in {folder for each in paths for folder in _above(each)}:
            owners.setdefault(path, set()).add(name)
    for each in distributions:
        chosen = {next((path for path in _above(file) if len(owners[path]) == 1), file) for file in files[each.name]}
        for path in chosen:
            if (site_packages / path).is_symlink():
                continue
            (site_packages / path).parent.mkdir(parents=True, exist_ok=True)
            (site_packages / path).symlink_to(Path(str(each.locate_file(path))))


def _above(file: str) -> Iterator[str]:
    """The folders that ``file`` lies in, from the top, and itself."""
    parts = file.split("/")
    return ("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))


def _files(distribution: Distribution) -> Iterator[str]:
    """Its files in site-packages; from the text of its record, for torch alone has 15,000."""
    for path, *_ in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        if not path.startswith(("..", "/")) and "__pycache__" not in path:
            yield path
