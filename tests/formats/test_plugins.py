"""A format of another distribution: the one of docs/extending.md as printed there, and plug-ins that are wrong."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

import ckpt_tools
from ckpt_tools.cli.main import main
from ckpt_tools.core import boxes, layout, manifest, shards
from ckpt_tools.errors import CkptError, FormatError, UnsupportedError, UsageError
from ckpt_tools.formats import plugins

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()


def printed(name: str) -> str:
    """The block of the page that follows the first mention of the file."""
    found = re.search(rf"`{re.escape(name)}` .*?```(?:python|toml)\n(.*?)```", PAGE, re.DOTALL)
    assert found, name
    return found[1]


def environment(*folders: Path) -> dict[str, str]:
    found = [*map(str, folders), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found), "PYTHONDONTWRITEBYTECODE": "1"}


def python(*words: str | Path, folder: Path | None = None) -> str:
    line, folders = [sys.executable, *map(str, words)], [] if folder is None else [folder]
    run = subprocess.run(
        line, capture_output=True, text=True, env=environment(*folders), check=False, timeout=300, cwd=folder
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that pip installed the printed package in."""
    package, target = tmp_path_factory.mktemp("ckpt-npy"), tmp_path_factory.mktemp("installed")
    for name in ("pyproject.toml", "ckpt_npy.py"):
        (package / name).write_text(printed(name))
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    python("-m", "pip", "install", *options, "--target", target, package)
    return target


def forget() -> None:
    for cached in (plugins.list_plugin_entries, plugins._load_signs, plugins._may_declare_signs):
        cached.cache_clear()


@pytest.fixture
def path(monkeypatch):
    """What is put on the import path for a test is looked for in it, and forgotten after it."""
    modules = set(sys.modules)
    forget()
    yield monkeypatch
    forget()
    plugins.load_plugin_format.cache_clear()
    for name in set(sys.modules) - modules:
        if name.startswith("ckpt_npy"):
            del sys.modules[name]


@pytest.fixture
def npy(installed, path):
    path.syspath_prepend(str(installed))


@pytest.fixture
def plugin(tmp_path, path):
    """``plugin(distribution, code, **formats)``: a distribution whose formats are found, without pip."""

    def make(distribution: str, code: str, signs: Mapping[str, str] = MappingProxyType({}), **formats: str) -> None:
        folder = tmp_path / distribution
        info = folder / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        rows = [f"{name} = {place}" for name, place in formats.items()]
        claims = ["[ckpt_tools.signs]", *(f"{pattern} = {name}" for pattern, name in signs.items())] if signs else []
        (info / "entry_points.txt").write_text("\n".join(["[ckpt_tools.formats]", *rows, *claims, ""]))
        (folder / f"ckpt_npy_{distribution}.py").write_text(code)
        path.syspath_prepend(str(folder))

    return make


@pytest.mark.parametrize(
    ("name", "arguments"), re.findall(r"^- `([\w.]+)\(([^)]*)\)`", PAGE, re.MULTILINE), ids=lambda text: text[:20]
)
def test_a_listed_constructor_takes_the_listed_arguments(name, arguments):
    kind, _, method = name.partition(".")
    (found, *_) = (getattr(module, kind) for module in (manifest, shards, boxes, layout) if hasattr(module, kind))
    taken = list(signature(getattr(found, method) if method else found).parameters)
    positional, by_name = re.findall(r"\w+(?=,|$)", arguments), re.findall(r"\w+(?==)", arguments)
    assert taken[: len(positional)] == positional
    assert set(by_name) <= set(taken)


class TestThePrintedReader:
    @pytest.fixture
    def raw(self, plugin, tmp_path):
        plugin("raw", printed("ckpt_raw.py"), raw="ckpt_npy_raw:RawFormat")
        folder = tmp_path / "folder"
        folder.mkdir()
        np.arange(6, dtype="<f4").tofile(folder / "w.f32")
        np.array([-0.0], "<f4").tofile(folder / "b.f32")
        (folder / "shapes.json").write_text('{"w": [2, 3], "b": [1]}')
        return folder

    def test_every_command_reads_it_and_none_writes_it(self, raw, tmp_path):
        assert len([line for line in printed("ckpt_raw.py").splitlines() if line]) <= 20
        ckpt_tools.convert(raw, tmp_path / "out.npz")
        loaded = np.load(tmp_path / "out.npz")
        assert loaded["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert loaded["b"].tobytes() == b"\x00\x00\x00\x80"
        assert ckpt_tools.inspect(raw).format == "raw"
        assert ckpt_tools.verify(raw, tmp_path / "out.npz").equal
        with pytest.raises(UsageError, match=r"^no format 'raw' can be written; there are megatron.*, npz$"):
            ckpt_tools.convert(raw, tmp_path / "out", to="raw")
        row = ckpt_tools.list_formats()[-1]
        assert (row.name, row.reads, row.writes, row.holds) == ("raw", True, False, "weights")

    @pytest.mark.extended
    def test_it_passes_the_suite_of_readers(self, tmp_path):
        (tmp_path / "ckpt_raw.py").write_text(printed("ckpt_raw.py"))
        block = PAGE.index("from ckpt_raw import RawFormat")
        (tmp_path / "test_ckpt_raw.py").write_text(PAGE[block : PAGE.index("```", block)])
        check_suite(tmp_path / "test_ckpt_raw.py", tmp_path)


def check_suite(test: Path, folder: Path) -> None:
    """Every test of the file passes in a process that finds packages in ``folder``; none is skipped."""
    told = python("-m", "pytest", "-q", "-p", "no:cacheprovider", test, folder=folder)
    assert re.search(r"\d\d passed", told)


class TestThePrintedFormat:
    @pytest.mark.extended
    def test_it_passes_the_suite_that_it_inherits(self, installed, tmp_path):
        (tmp_path / "test_ckpt_npy.py").write_text(printed("test_ckpt_npy.py"))
        check_suite(tmp_path / "test_ckpt_npy.py", installed)

    def test_whole_state_goes_there_and_back(self, npy, checkpoint, tmp_path):
        source = checkpoint("zero2-fp32", "awkward", 2).checkpoint
        ckpt_tools.convert(source, tmp_path / "npy", to="npy")
        assert ckpt_tools.verify(source, tmp_path / "npy").equal
        assert ckpt_tools.inspect(tmp_path / "npy").format == "npy"
        ckpt_tools.convert(tmp_path / "npy", tmp_path / "back", to="zero2", world_size=2)
        assert ckpt_tools.verify(source, tmp_path / "back").equal


def typed(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = 0
    try:
        main([*map(str, words)])
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()


CLAIMING = """
from ckpt_tools.formats.base import Format
class Claiming(Format):
    name, about = "{name}", "claims what has a file.odd"
    def detect(self, source): return "file.odd" in source.files
    def read(self, source, options): raise NotImplementedError
"""


class TestWrongPlugins:
    @pytest.fixture
    def odd(self, tmp_path):
        folder = tmp_path / "odd"
        folder.mkdir()
        (folder / "file.odd").write_bytes(b"?")
        return folder

    def test_two_of_one_name_are_refused(self, plugin):
        for distribution in ("one", "two"):
            plugin(distribution, CLAIMING.format(name="odd"), odd=f"ckpt_npy_{distribution}:Claiming")
        with pytest.raises(UsageError, match=r"one 1\.0, two 1\.0 each give a format 'odd'; uninstall one") as caught:
            ckpt_tools.list_formats()
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize(
        ("code", "message"),
        [
            ("import a_module_that_is_missing", "No module named 'a_module_that_is_missing'"),
            ("1 / 0", "ZeroDivisionError"),
            ("", "has no attribute 'Claiming'"),
            ("from ckpt_tools.formats.base import Format as Claiming", "overrides neither read nor layout"),
            ("Claiming = dict", "is not a Format of ckpt_tools.formats.base"),
            (CLAIMING.format(name="other"), "calls itself 'other'"),
            (CLAIMING.format(name="odd") + "    reading_options = ('weights',)", "formats do not have: weights"),
        ],
    )
    def test_one_that_is_wrong_is_named_if_it_is_needed(self, plugin, odd, code, message):
        plugin("broken", code, odd="ckpt_npy_broken:Claiming")
        for need in (
            ckpt_tools.list_formats,
            lambda: ckpt_tools.inspect(odd),
            lambda: ckpt_tools.inspect(odd, from_="odd"),
        ):
            with pytest.raises(UsageError, match=rf"'odd' of broken 1\.0.*{message}") as caught:
                need()
            assert "\n" not in str(caught.value)

    def test_one_that_is_wrong_is_nothing_to_the_others(self, plugin, odd, checkpoint, tmp_path):
        plugin("broken", "1 / 0", aaa="ckpt_npy_broken:Claiming")
        plugin("good", CLAIMING.format(name="odd"), odd="ckpt_npy_good:Claiming")
        ckpt_tools.convert(checkpoint("fsdp2", "awkward", 2).checkpoint, tmp_path / "out.safetensors")
        with pytest.raises(CkptError, match=r"^the format 'odd' of good 1\.0 failed in read"):
            ckpt_tools.inspect(odd)
        with pytest.raises(UsageError, match=r"no format .nope. can be read; there are megatron, dcp.*torch.*aaa, odd"):
            ckpt_tools.inspect(odd, from_="nope")
        with pytest.raises(UsageError, match="no format 'odd' can be written"):
            ckpt_tools.convert(odd, tmp_path / "out", to="odd")

    def test_two_that_recognise_one_source_are_refused(self, plugin, odd, tmp_path):
        plugin("one", CLAIMING.format(name="odd"), odd="ckpt_npy_one:Claiming")
        plugin("two", CLAIMING.format(name="even"), even="ckpt_npy_two:Claiming")
        with pytest.raises(UsageError, match=r"several formats recognise .* \(even, odd\); say which with from_="):
            ckpt_tools.inspect(odd)
        (tmp_path / "x.bin2").write_bytes(b"?")
        with pytest.raises(UnsupportedError, match=r"torch.*odd"):
            ckpt_tools.inspect(tmp_path / "x.bin2")


WEIGHTS = """
from ckpt_tools.formats.base import Format
from ckpt_tools.core.manifest import Manifest
class Weights(Format):
    name, about = "odd", "a file weights.bin of its own"
    def detect(self, source): {detect}
    def read(self, source, options): {read}
    def own_files(self, source, manifest): {own}
    def layout(self, manifest, options): {layout}
"""
WORKING = {
    "detect": "return any(path.endswith('.bin') for path in source.files)",
    "read": "return Manifest('odd', {})",
    "own": "return frozenset(source.files)",
    "layout": "return None",
}
SIGN = {"weights*.bin": "odd"}


class TestClaims:
    """A file whose name a built-in reader knows too."""

    @pytest.fixture
    def weights(self, tmp_path):
        folder = tmp_path / "weights"
        folder.mkdir()
        torch.save({"w": torch.ones(2)}, folder / "weights.bin")
        return folder

    @pytest.mark.parametrize("inside", ["", "weights.bin"])
    def test_a_declared_sign_wins(self, plugin, weights, inside):
        assert ckpt_tools.inspect(weights / inside).format == "torch"
        forget()
        plugin("odd", WEIGHTS.format(**WORKING), SIGN, odd="ckpt_npy_odd:Weights")
        assert ckpt_tools.inspect(weights / inside).format == "odd"
        assert ckpt_tools.inspect(weights / inside, from_="torch").format == "torch"

    @pytest.mark.parametrize(
        ("code", "signs"),
        [
            (WEIGHTS.format(**{**WORKING, "detect": "return False"}), SIGN),
            pytest.param("1 / 0", {"*.odd": "odd"}, id="of other signs, which is not imported"),
        ],
    )
    def test_a_sign_is_not_enough(self, plugin, weights, code, signs):
        plugin("odd", code, signs, odd="ckpt_npy_odd:Weights")
        assert ckpt_tools.inspect(weights).format == "torch"

    def test_without_a_sign_the_error_names_the_plug_in(self, plugin, weights):
        plugin("odd", WEIGHTS.format(**WORKING), odd="ckpt_npy_odd:Weights")
        assert ckpt_tools.inspect(weights).format == "torch"
        (weights / "weights.bin").write_bytes(b"of the plug-in")
        with pytest.raises(FormatError, match=r"the plug-in's format odd recognises it: add from_='odd'"):
            ckpt_tools.inspect(weights)
        assert ckpt_tools.inspect(weights, from_="odd").format == "odd"

    def test_a_sign_that_names_no_format_is_refused(self, plugin, weights):
        plugin("odd", WEIGHTS.format(**WORKING), {"weights.bin": "ckpt_npy_odd:Weights"}, odd="ckpt_npy_odd:Weights")
        with pytest.raises(UsageError, match="'ckpt_npy_odd:Weights' is none"):
            ckpt_tools.inspect(weights)


@pytest.mark.parametrize(
    ("method", "code", "reason"),
    [
        ("detect", "return 1 / 0", "ZeroDivisionError: division by zero"),
        ("read", "return source.files['no such']", "KeyError: 'no such'"),
        ("read", "return None", "returned NoneType instead of Manifest"),
        ("own_files", "raise OSError('two' + chr(10) + 'lines')", "OSError: two lines"),
        ("layout", "assert False, 'not yet'", "AssertionError: not yet"),
    ],
)
def test_an_error_inside_a_plug_in_names_it(plugin, tmp_path, method, code, reason, capsys):
    written = WEIGHTS.format(**{**WORKING, method.removesuffix("_files"): code})
    plugin("odd", written, SIGN, odd="ckpt_npy_odd:Weights")
    source = tmp_path / "run.bin" if method == "layout" else tmp_path / "weights.bin"
    torch.save({"w": torch.ones(2)}, source)
    words = ["convert", source, tmp_path / "out", "--to", "odd" if method == "layout" else "dcp"]
    exit_code, _, told = typed(capsys, *words)
    (said,) = told.splitlines()
    assert (exit_code, said.startswith("Error: the format 'odd' of odd 1.0")) == (1, True), told
    assert method in said and reason in said and "unexpected" not in said
    assert not (tmp_path / "out").exists()
    verbose = typed(capsys, *words, "--verbose")[2]
    assert "Traceback" in verbose and verbose.splitlines()[-1] == said


def test_plug_ins_are_not_looked_up_for_what_is_built_in(checkpoint, tmp_path):
    """Looking them up takes 20 ms."""
    source, out = str(checkpoint("fsdp2", "awkward", 2).checkpoint), str(tmp_path / "out")
    code = f"""
import sys, ckpt_tools
ckpt_tools.inspect({source!r})
ckpt_tools.convert({source!r}, {out!r}, to="zero2")
ckpt_tools.verify({source!r}, {out!r})
print("importlib.metadata" in sys.modules)
"""
    assert python("-c", code).strip() == "False"
