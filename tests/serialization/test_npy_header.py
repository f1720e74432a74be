"""The text of a ``.npy`` header means to numpy what it means here, or it is refused."""

import io
import warnings
from random import Random

import numpy as np
import pytest

from ckpt_tools.errors import MalformedError
from ckpt_tools.formats.npz.npy import parse_npy_header
from ckpt_tools.serialization.npy_header import MAGIC, parse_header_text
from tests.end_to_end.fuzzing.mutations import changed_npy_text

pytestmark = pytest.mark.quick

PLAIN = "{'descr': '<f4', 'fortran_order': False, 'shape': (4, 3), }"
NUM_SAMPLED = 2000

LOOSE = (
    "(4\x0c 3,)", "(4 3,)", "(4,,3)", "(04,)", "(+4,)", "(4_0,)", "(\u0663,)", "(\xb2,)", "(4)", "4,", "(4,\xa0)",
    "(4.0,)", "(0x4,)", f"({'9' * 5000},)", "(-4,)", "(True,)", "(4,\n3)", "(4,3", "(,)", "(4,3,)#", "('4',)", "[4, 3]",
)  # fmt: skip
"""Shapes that ``int``, ``\\d`` or ``\\s`` take for more than numpy writes."""


def encoded(text: str, version: int) -> bytes:
    data = text.encode("utf-8" if version == 3 else "latin1", errors="replace")
    return MAGIC + bytes([version, 0]) + len(data).to_bytes(2 if version == 1 else 4, "little") + data


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("shape", LOOSE)
def test_a_loose_shape_is_refused(shape, version):
    with pytest.raises(MalformedError, match="does not describe an array"):
        parse_npy_header(encoded(PLAIN.replace("(4, 3)", shape), version), "a.npz", "w")


@pytest.mark.parametrize("shape", ["()", "(0,)", "(4,)", "(4, 3)", "(4,3)", "( 4 , 3 , )", "(4L, 3L)", "(1, 0, 2)"])
def test_a_shape_of_any_writer_is_read(shape):
    agree(PLAIN.replace("(4, 3)", shape))
    assert parse_header_text(PLAIN.replace("(4, 3)", shape).encode()) is not None


def test_what_is_accepted_means_the_same_to_numpy(pytestconfig):
    random = Random(0)
    head, rest = PLAIN[:15], PLAIN[15:]
    number = NUM_SAMPLED * (50 if pytestconfig.getoption("--soak") else 1)
    texts = [head + changed_npy_text(rest, random) for _ in range(number)]
    assert sum(agree(text) for text in texts) > len(texts) / 10


def agree(text: str) -> bool:
    """Whether the text is accepted. numpy takes what we accept for the same, too."""
    data = text.encode("latin1", errors="replace")
    ours = parse_header_text(data)
    if ours is None:
        return False
    with warnings.catch_warnings(action="ignore"):
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(
            io.BytesIO(len(data).to_bytes(2, "little") + data)
        )
    assert (shape, is_fortran, dtype) == (ours.shape, ours.is_fortran, np.dtype(ours.descr))
    return True
