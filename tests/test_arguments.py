"""No argument of any function or command may be empty; the cases are made from the signatures and commands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt_tools
from ckpt_tools.arguments import check_not_empty
from ckpt_tools.cli.beside import BesideCommand
from ckpt_tools.cli.main import main
from ckpt_tools.core.option_names import option
from ckpt_tools.errors import StoreError, UsageError
from tests.support.commands import all_commands
from tests.support.empty_values import lines_with_one_empty_value

pytestmark = pytest.mark.quick

FUNCTIONS = {name: value for name in ckpt_tools.__all__ if inspect.isfunction(value := getattr(ckpt_tools, name, None))}
TEXT = re.compile(r"\b(str|Path|ReadFormat|WrittenFormat|State|Weights|DTypeLike|Runner)\b")
COMMANDS = {name: each for name, each in all_commands().items() if not isinstance(each, BesideCommand)}


def empty_of(annotation: str) -> list[Any]:
    """The empty values of a parameter: alone, and as the second of several."""
    if annotation.startswith("Mapping"):
        return [{"": "1"}, {"key": ""}]
    if re.match("Sequence|Iterable|Collection", annotation):
        return ["", [""], ("a", ""), iter(["a", ""])]
    return [""] if TEXT.search(annotation) else []


def calls() -> Iterator[Any]:
    for name, function in FUNCTIONS.items():
        parameters = inspect.signature(function).parameters
        required = {each.name: 1 if "int" in str(each.annotation) else "x" for each in parameters.values()
                    if each.default is each.empty}  # fmt: skip
        for each in parameters.values():
            for number, value in enumerate(empty_of(str(each.annotation))):
                yield pytest.param(
                    function, each.name, {**required, each.name: value}, id=f"{name}-{each.name}-{number}"
                )


def lines() -> Iterator[Any]:
    for name, command in COMMANDS.items():
        for label, words in lines_with_one_empty_value(command):
            yield pytest.param(label, [*name.split(), *words], id=f"{name}{label}")


def test_the_sweeps_reach_every_function_and_command():
    assert {"open", "prune", "claim", "load_into", "storage_reader", "make_loadable", "sign"} <= FUNCTIONS.keys()
    reached = {case.id.split("-")[0] for case in calls()}
    assert reached == FUNCTIONS.keys() - {"list_formats", "list_recipes"}
    reached = {name for case in lines() for name in COMMANDS if case.id.startswith(f"{name}{case.values[0]}")}
    assert reached == COMMANDS.keys() - {"recipes"}


@pytest.mark.parametrize(("function", "name", "given"), list(calls()))
def test_a_function_refuses_an_empty_argument(function, name, given):
    with pytest.raises(UsageError, match=rf"^{re.escape(option(name))} (is empty|contains an empty text)"):
        function(**given)


@pytest.mark.parametrize(("label", "words"), list(lines()))
def test_a_command_refuses_an_empty_argument(label, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert (ended.value.code, label in said) == (2, True), said
    assert not list(tmp_path.iterdir())


URLS = ["s3://", "s3:///key", "gs:///key", "https:///x", "file://", "memory://", "simplecache::s3://", "zip://a::s3://"]


@pytest.mark.parametrize("url", URLS)
def test_a_url_without_a_place_is_refused(url):
    for call in (ckpt_tools.ls, ckpt_tools.inspect, ckpt_tools.clean, lambda url: ckpt_tools.plan("x", url)):
        with pytest.raises(UsageError, match=r"is a URL without a place"):
            call(url)


@pytest.mark.parametrize("value", ["x", ".", "file:///x", "s3://bucket", "memory://x", "a=s3://", None, 0, (), {}, " "])
def test_what_is_not_empty_passes(value):
    check_not_empty("SRC", value)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with three checkpoints, which is the current folder."""
    save_file({"w": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    for step in (1, 2, 3):
        ckpt_tools.convert(tmp_path / "model.safetensors", tmp_path / f"run/step_{step}", to="dcp")
    monkeypatch.chdir(tmp_path / "run")
    return tmp_path / "run"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_prune_of_an_unset_variable_removes_nothing(run, capsys):
    before = files_of(run)
    with pytest.raises(SystemExit) as ended:
        main(["prune", "", "--keep-last", "1", "--yes"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "Error: RUN is empty; name a folder or a URL\n"
    with pytest.raises(UsageError, match="run is empty; name a folder or a URL"):
        ckpt_tools.prune("", keep_last=1, yes=True)
    assert files_of(run) == before


@pytest.mark.parametrize("url", ["file://", "file://run", "file://./", "file://step_1"])
def test_a_relative_file_url_is_not_the_current_folder(url, run):
    before = files_of(run)
    with pytest.raises(UsageError, match=r"a URL without a place|path of a file:// URL is absolute"):
        ckpt_tools.prune(url, keep_last=1, yes=True)
    assert files_of(run) == before


def test_a_file_url_keeps_all_its_letters(run):
    (run / "step_1").rename(run / "a#b?c")
    assert ckpt_tools.inspect(f"file://{run}/a#b?c").num_tensors == 1
    assert ckpt_tools.inspect(f"file://localhost{run}/step_2").num_tensors == 1


@pytest.mark.parametrize("name", ["@", "@/"])
def test_an_empty_name_of_a_checkpoint_is_refused(name, run):
    with pytest.raises(UsageError, match=r"names no checkpoint behind @; write .*@latest"):
        ckpt_tools.inspect(f"{run}{name}")


@pytest.mark.parametrize("call", [ckpt_tools.plan, ckpt_tools.convert, ckpt_tools.verify, ckpt_tools.diff])
def test_an_empty_regex_is_refused(call, run):
    with pytest.raises(UsageError, match="rename='=x' has an empty REGEX"):
        call(run / "step_1", run / "out.safetensors", rename=["=x"])


def test_files_of_names_have_no_empty_name(run):
    (run / "map.json").write_text('{"w": ""}')
    with pytest.raises(UsageError, match=r"key_map='.*map.json' has an empty name"):
        ckpt_tools.plan(run / "step_1", run / "x.pt", key_map=run / "map.json")
    (run / "order.json").write_text('["a", ""]')
    with pytest.raises(UsageError, match="the file of param_order= has an empty name"):
        ckpt_tools.inspect(run / "step_1", param_order=run / "order.json")


@pytest.mark.parametrize("url", ["http://[::1/run", "s3://bucket]/run"])
def test_a_url_with_a_single_bracket_is_refused(url):
    with pytest.raises(UsageError, match=rf"^src: {re.escape(url)} is not a URL: "):
        ckpt_tools.inspect(url)


def test_an_archive_that_is_not_there_is_a_sentence(tmp_path):
    with pytest.raises(StoreError, match=r"^zip://run::.*none\.zip: \[Errno 2\] No such file or directory"):
        ckpt_tools.inspect(f"zip://run::{tmp_path}/none.zip")
