"""The table of built-in formats: the functions that it names as texts."""

import re
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest

from ckpt_tools.formats import builtin
from ckpt_tools.formats.base import Format

TABLE = Path(builtin.__file__).read_text()
NAMED = re.findall(r"^    (?:detect = )?(\w+) = import_when_called\(\"(.+)\"\)$", TABLE, re.MULTILINE)


def test_the_table_is_found_here():
    assert len(NAMED) == TABLE.count(' = import_when_called("')


@pytest.mark.parametrize(("method", "path"), NAMED)
def test_a_function_that_is_named_is_there_and_takes_the_arguments_of_the_method(method, path):
    module, _, name = path.partition(":")
    function = getattr(import_module(f"ckpt_tools.formats.{module}"), name)
    taken = [each for each in signature(function).parameters.values() if each.kind is not each.KEYWORD_ONLY]
    assert len(taken) == len(signature(getattr(Format, method)).parameters) - 1
