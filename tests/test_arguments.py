"""No argument of any function or command may be empty; the cases are made from the signatures and commands."""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt_tools
from ckpt_tools.arguments import check_not_empty
from ckpt_tools.cli.beside import ExternalCommand
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import StoreError, UsageError
from tests.support.commands import all_commands, run_command
from tests.support.empty_values import lines_with_one_empty_value
from tests.support.refusals import refusal_test

pytestmark = pytest.mark.quick

FUNCTIONS = {name: value for name in ckpt_tools.__all__ if inspect.isfunction(value := getattr(ckpt_tools, name, None))}
TEXT = re.compile(r"\b(str|Path|ReadFormat|WrittenFormat|State|Weights|DTypeLike|Runner)\b")
COMMANDS = {name: each for name, each in all_commands().items() if not isinstance(each, ExternalCommand)}


def empty_of(annotation: str) -> list[Any]:
    """The empty values of a parameter: alone, and as the second of several."""
    if annotation.startswith("Mapping"):
        return [{"": "1"}, {"key": ""}]
    if re.match("Sequence|Iterable|Collection", annotation):
        return ["", [""], ("a", ""), iter(["a", ""])]
    return [""] if TEXT.search(annotation) else []


def calls(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each parameter of a function, and the arguments of a call in which it alone is empty."""
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    given = [each for each in parameters if each.default is each.empty]
    required = {each.name: 1 if "int" in str(each.annotation) else "x" for each in given}
    for each in parameters:
        yield from ((each.name, {**required, each.name: value}) for value in empty_of(str(each.annotation)))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_refuses_an_empty_argument(function):
    for name, given in calls(function):
        with pytest.raises(UsageError, match=rf"^{re.escape(format_option(name))} (is empty|contains an empty text)"):
            FUNCTIONS[function](**given)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_an_empty_argument(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for label, words in lines_with_one_empty_value(COMMANDS[command]):
        done = run_command(*command.split(), *words)
        assert (done.code, label in done.err) == (2, True), done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["s3://", "s3:///key", "https:///x", "file://", "memory://", "zip://a::s3://"])
def test_a_url_without_a_place_is_refused(url):
    for call in (ckpt_tools.ls, ckpt_tools.inspect, lambda url: ckpt_tools.plan("x", url)):
        with pytest.raises(UsageError, match=r"is a URL without a place"):
            call(url)


def test_what_is_not_empty_passes():
    for value in ("x", ".", "file:///x", "s3://bucket", "a=s3://", None, 0, (), {}, " "):
        check_not_empty("SRC", value)


def run_in(folder: Path) -> Path:
    """A run with three checkpoints."""
    save_file({"w": np.zeros(4, np.float32)}, folder / "model.safetensors")
    for step in (1, 2, 3):
        ckpt_tools.convert(folder / "model.safetensors", folder / f"run/step_{step}", to="dcp")
    return folder / "run"


@pytest.mark.parametrize("url", ["", "file://", "file://run"])
def test_prune_of_an_unset_variable_or_a_relative_url_removes_nothing(url, tmp_path, monkeypatch):
    run = run_in(tmp_path)
    monkeypatch.chdir(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    said = r"run is empty; name a folder or a URL|a URL without a place|path of a file:// URL is absolute"
    with pytest.raises(UsageError, match=said):
        ckpt_tools.prune(url, keep_last=1, yes=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def of_step(call: Callable[..., object], **file: str) -> Callable[[Path], object]:
    """A call with a checkpoint, a destination, and an option that names a file with this text."""

    def refused(folder: Path) -> object:
        source, options = run_in(folder) / "step_1", {}
        for name, text in file.items():
            (folder / "file.json").write_text(text)
            options[name] = folder / "file.json"
        return call(source, folder / "x.pt", **options)

    return refused


def inspect_ordered(source: Path, _: Path, **options: Any) -> object:
    return ckpt_tools.inspect(source, **options)


NO_NAME = r"names no checkpoint behind @; write .*@latest"
ARCHIVE = r"^zip://run::.*none\.zip: \[Errno 2\] No such file or directory"

test_a_refusal = refusal_test(
    ("@", lambda at: ckpt_tools.inspect(f"{run_in(at)}@"), UsageError, NO_NAME),
    ("@/", lambda at: ckpt_tools.inspect(f"{run_in(at)}@/"), UsageError, NO_NAME),
    ("regex", of_step(lambda *at: ckpt_tools.plan(*at, rename=["=x"])), UsageError, "'=x' has an empty REGEX"),
    ("key map", of_step(ckpt_tools.plan, key_map='{"w": ""}'), UsageError, "key_map='.*file.json' has an empty name"),
    ("order", of_step(inspect_ordered, param_order='["a", ""]'), UsageError, "param_order= has an empty name"),
    ("archive", lambda at: ckpt_tools.inspect(f"zip://run::{at}/none.zip"), StoreError, ARCHIVE),
    ("brackets", lambda _: ckpt_tools.inspect("http://[::1/run"), UsageError, r"^src: http://\[::1/run is not a URL: "),
)
