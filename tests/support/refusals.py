"""Refusals as data: what is tried, the error, and the words that a user needs in its sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.errors import CkptError


def refusal_test(*refusals: tuple[str, Callable[[Path], object], type[CkptError], str]) -> Callable[..., None]:
    """The one test of a table. A row has a name, a call that gets an empty folder, the error, whose class gives the
    exit code, and a regular expression that its sentence matches."""
    rows: list[Any] = [pytest.param(*refusal[1:], id=refusal[0]) for refusal in refusals]

    @pytest.mark.parametrize(("call", "error", "words"), rows)
    def test(call, error, words, tmp_path):
        with pytest.raises(error, match=words) as caught:
            call(tmp_path)
        assert type(caught.value) is error and "Traceback" not in str(caught.value)

    return test
