"""The header of a ``.npy`` array (numpy/lib/format.py, versions 1 to 3): its length, and its text read strictly.

numpy evaluates the text as a literal of Python. Here it is matched byte by byte, and only a form in which numpy reads
the same three entries is accepted: ASCII, blanks, numbers without leading zeros, a tuple with the commas of a tuple.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from ckpt_tools.errors import MalformedError, UnsupportedError

MAGIC = b"\x93NUMPY"

MAX_HEADER_BYTES = 10_000
"""numpy's own limit (``_MAX_HEADER_SIZE``)."""

PREFIX_BYTES = len(MAGIC) + 2 + 4
"""Magic, version, and the longer of the two forms of the header's length."""

_NUMBER = rb"(?:0|[1-9][0-9]{0,19})L?"  # Python 2 wrote an L
_ITEM = re.compile(
    rb" *'(?:(descr)' *: *'([!-&(-\[\]-~]{1,24})'|(fortran_order)' *: *(True|False)"
    rb"|(shape)' *: *\( *((?:NUMBER *, *(?:NUMBER(?: *, *NUMBER)* *,? *)?)?)\)) *(?:,|(?=\}))".replace(
        b"NUMBER", _NUMBER
    )
)
_END = re.compile(rb" *\} *\n?")


@dataclass(frozen=True, slots=True)
class NpyDescription:
    """Fields of the text: numpy's code of the dtype, the order, and the shape, which may be of any numbers."""

    descr: str
    is_fortran: bool
    shape: tuple[int, ...]


def read_header_length(prefix: bytes, path: str, key: str) -> int:
    """Bytes before the first element, from the first ``PREFIX_BYTES``. Raises FormatError."""
    if len(prefix) < PREFIX_BYTES or not prefix.startswith(MAGIC):
        raise MalformedError("it is not a .npy array", path=path, key=key)
    major, minor = prefix[6], prefix[7]
    if major not in (1, 2, 3) or minor:
        raise UnsupportedError(f"its version {major}.{minor} of .npy is not known", path=path, key=key)
    length = int.from_bytes(prefix[8 : get_text_start(prefix)], "little")
    if length > MAX_HEADER_BYTES:
        raise MalformedError(f"its header claims {length:,} bytes", path=path, key=key)
    return get_text_start(prefix) + length


def get_text_start(prefix: bytes) -> int:
    """Start of the text, behind its length of 2 bytes, or of 4 since version 2."""
    return 8 + struct.calcsize("<H" if prefix[6] == 1 else "<I")


def parse_header_text(text: bytes) -> NpyDescription | None:
    """The three entries of the text; None if it does not describe an array of one plain dtype."""
    value_by_field: dict[bytes, bytes] = {}
    position = 1
    if not text.startswith(b"{"):
        return None
    while (item := _ITEM.match(text, position)) is not None:
        name, value = filter(lambda part: part is not None, item.groups())
        if name in value_by_field:
            return None
        value_by_field[name], position = value, item.end()
    if len(value_by_field) != 3 or _END.fullmatch(text, position) is None:
        return None
    shape = tuple(int(extent) for extent in re.findall(rb"[0-9]+", value_by_field[b"shape"]))
    return NpyDescription(value_by_field[b"descr"].decode("ascii"), value_by_field[b"fortran_order"] == b"True", shape)
