"""Names of the files of a DCP."""

from __future__ import annotations

import re

METADATA = ".metadata"

RANK_INDEX_NAME = re.compile(r"__(\d{1,9})\.metadata")
"""A rank's own index, as ``dcp.save(use_collectives=False)`` leaves it."""
DATA_FILE_NAME = re.compile(r"__(\d+)_\d+\.distcp")

FILE_NAME_PATTERN = r"\.metadata(?:\.tmp)?|__\d+\.metadata|__\d+_\d+\.distcp"
"""A pattern of all of them, with the index while it is written."""


def is_metadata(path: str) -> bool:
    return path.rpartition("/")[2] == METADATA


def is_rank_index(path: str) -> bool:
    """Whether it is a rank's own ``__<rank>.metadata``."""
    return RANK_INDEX_NAME.fullmatch(path.rpartition("/")[2]) is not None


def is_dcp_file(name: str) -> bool:
    """Whether torch names the files of a DCP so."""
    return name == METADATA or RANK_INDEX_NAME.fullmatch(name) is not None or DATA_FILE_NAME.fullmatch(name) is not None
