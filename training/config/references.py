"""Functions of the user's: ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``, and their ``NAME=VALUE`` arguments.

From Python an option takes the function itself. Ray sends it to the workers; torchrun's ranks import it.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from typing import Any
from zlib import crc32

import ckpt_tools
from ckpt_tools.errors import CkptError, UsageError

Reference = str | Callable[..., Any]
"""A name, ``MODULE:FUNCTION``, ``FILE.py:FUNCTION``, or a function."""

PYTHON = ".py"
NOT_THE_USERS = (
    *(str(Path(file).parent) for file in (ckpt_tools.__file__, Path(__file__).parent)),
    *("site-packages", "dist-packages", "<frozen", sysconfig.get_path("stdlib")),
)
"""Parts of the paths of code that is not the user's."""


def is_function(reference: Reference | None) -> bool:
    """Whether it names or is a function of the user's; ``hf:FOLDER`` is none."""
    return callable(reference) or (reference is not None and ":" in reference and not reference.startswith("hf:"))


def text_of(reference: Reference) -> str:
    """``MODULE:FUNCTION`` of a function, ``FILE.py:FUNCTION`` if it is of the script that runs."""
    if isinstance(reference, str):
        return reference
    if isinstance(reference, partial):
        return text_of(reference.func)
    name = getattr(reference, "__qualname__", type(reference).__qualname__)
    module = getattr(reference, "__module__", None) or type(reference).__module__
    script = getattr(sys.modules.get("__main__"), "__file__", None) if module == "__main__" else None
    return f"{Path(script).absolute() if script else module}:{name}"


def recorded_name(reference: Reference) -> str:
    """``MODULE:FUNCTION`` without the folder of a file, which differs between machines."""
    file, colon, name = text_of(reference).rpartition(":")
    return f"{Path(file).stem}:{name}" if colon and file.endswith(PYTHON) else text_of(reference)


def make_path_absolute(reference: Any) -> Any:
    """The reference with the absolute path of its file or folder, if it has one."""
    if isinstance(reference, str) and reference.startswith("hf:") and reference != "hf:":
        return f"hf:{Path(reference[3:]).absolute()}"
    if not isinstance(reference, str) or not reference.rpartition(":")[0].endswith(PYTHON):
        return reference
    file, _, name = reference.rpartition(":")
    return f"{Path(file).absolute()}:{name}"


def import_function(reference: Reference, option: str) -> Callable[..., Any]:
    """The function. Modules are found in the current folder too. Raises ``UsageError``, which names ``option``."""
    if callable(reference):
        return reference
    module, _, name = reference.rpartition(":")
    try:
        attribute = getattr(import_file_or_module(module), name)
    except Exception as error:
        raise UsageError(f"--{option} {reference} cannot be imported: {describe_error(error)}") from error
    if not callable(attribute):
        raise UsageError(f"--{option} {reference} is not a function")
    function: Callable[..., Any] = attribute
    return function


def call_function(reference: Reference, option: str, *values: Any, **named: Any) -> Any:
    """Call the function. Raises ``UsageError`` with the place of an error in it, or if it takes other
    arguments."""
    function = import_function(reference, option)
    check_arguments(function, len(values), named, f"{option}-arg" if named else option)
    with name_failures(reference, option):
        return function(*values, **named)


@contextmanager
def name_failures(reference: Reference, option: str) -> Iterator[None]:
    """Errors within the block become a ``UsageError`` with the option and the place in the user's code."""
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        raise UsageError(f"--{option} {text_of(reference)} failed with {describe_error(error)}") from error


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def describe_error(error: BaseException) -> str:
    """Type, first line and place of an error."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}{find_users_line(''.join(traceback.format_exception(error)))}"


def find_users_line(details: str) -> str:
    """File and line of the last call in the user's code, of a formatted traceback; empty if there is none."""
    calls = re.findall(r'File "([^"]+)", line (\d+)', details)
    users = [(file, line) for file, line in calls if not any(part in file for part in NOT_THE_USERS)]
    return f" ({Path(users[-1][0]).name}, line {users[-1][1]})" if users else ""


def import_file_or_module(module: str) -> Any:
    """The module of this name, or of the file ``FILE.py``, which finds the modules in its folder."""
    if not module.endswith(PYTHON):
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        return import_module(module)
    path = Path(module).absolute()
    # The same name for the same file in every process, so that classes of it are the same.
    name = f"{path.stem}_{crc32(str(path).encode())}" if path.stem in sys.modules else path.stem
    known = next((each for each in list(sys.modules.values()) if getattr(each, "__file__", None) == str(path)), None)
    if known is not None and known.__name__ != "__main__":
        return known
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    if (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)
    imported = module_from_spec(spec)
    sys.modules[name] = imported
    try:
        spec.loader.exec_module(imported)
    except BaseException:
        del sys.modules[name]
        raise
    return imported


def check_importable(reference: Any, option: str) -> None:
    """Raises ``UsageError`` if another process cannot import the function, as one of a notebook or within another."""
    if not callable(reference):
        return
    text = text_of(reference)
    try:
        function: Any = import_function(text, option)
    except UsageError:
        function = None
    if function is None or "<" in text:
        raise UsageError(
            f"--{option} is {text}, which torchrun's ranks cannot import; define it at the top level of a file, or "
            "use --launcher ray"
        )


def parse_arguments(entries: Sequence[str], option: str) -> dict[str, Any]:
    """Values of ``NAME=VALUE``, in the syntax of TOML; what is not TOML is text. Raises ``UsageError``."""
    arguments: dict[str, Any] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--{option} is NAME=VALUE, not {entry!r}")
        if name in arguments:
            raise UsageError(f"--{option} {name} is given twice")
        try:
            arguments[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            arguments[name] = text
    return arguments


def format_arguments(values: Mapping[str, Any]) -> list[str]:
    """``NAME=VALUE`` of a table in a TOML file."""
    return [f"{name}={_toml_text(value)}" for name, value in values.items()]


def _toml_text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_text, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)


def check_arguments(function: Callable[..., Any], positional: int, arguments: Mapping[str, Any], option: str) -> None:
    """Raises ``UsageError`` if ``function`` does not take these arguments after ``positional`` ones."""
    try:
        parameters = signature(function)
    except (TypeError, ValueError):
        return  # of C
    try:
        parameters.bind(*[None] * positional, **arguments)
    except TypeError as error:
        names = ", ".join(list(parameters.parameters)[positional:]) or "none"
        raise UsageError(f"--{option}: {error}; it takes {names}") from error
