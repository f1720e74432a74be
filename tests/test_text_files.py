"""Files that a user names as options: an endless device is refused, and a byte order mark is none of the text."""

from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest

from ckpt_tools.core.name_files import read_key_map, read_param_order
from ckpt_tools.errors import CkptError
from ckpt_tools.process.text_files import MAX_TEXT_BYTES, read_text
from ckpt_tools.recipes.reading import read_recipe
from inference.models.options import DEFAULT_OPTIONS
from inference.serving.sources import read_sources
from tests.training.jobs import small_config
from training.config.command_line import read_defaults
from training.engines.deepspeed_config import deepspeed_config

pytestmark = pytest.mark.quick

ENDLESS = Path("/dev/zero")


def read_config(path: Path) -> Any:
    return read_defaults(click.Context(click.Command("train")), click.Option(["--config"]), str(path))


def read_deepspeed(path: Path) -> Any:
    return deepspeed_config(small_config(path.parent / "out", engine="zero1", deepspeed_config=path), 2)


@pytest.mark.parametrize(
    "read",
    [
        read_key_map,
        read_param_order,
        read_recipe,
        partial(read_sources, defaults=DEFAULT_OPTIONS),
        read_config,
        read_deepspeed,
    ],
)
def test_an_endless_device_is_refused(read):
    with pytest.raises((CkptError, click.BadParameter)) as caught:
        read(ENDLESS)
    assert "File too large" in str(caught.value) or "is not a file that can be read" in str(caught.value)


def test_the_text_of_a_file(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"\xef\xbb\xbfname\n")
    assert read_text(file) == "name\n"
    with file.open("r+b") as opened:
        opened.truncate(MAX_TEXT_BYTES)
    assert len(read_text(file)) == MAX_TEXT_BYTES - 3
    with file.open("r+b") as opened:
        opened.truncate(MAX_TEXT_BYTES + 1)
    with pytest.raises(OSError, match="File too large"):
        read_text(file)
