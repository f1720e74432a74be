"""Names that mean something wherever a checkpoint lies."""

from __future__ import annotations

PARTIAL = ".ckpt-tools-partial"
"""The folder of what is ours while we write to an object store: in a destination that is a folder, beside a file."""

MARKERS = (".metadata", "latest", "latest_universal")
"""With ``*.index.json``, the files without which a folder is no checkpoint."""

DIGESTS_NAME = "ckpt-tools.digests.json"
"""The list of digests in a folder."""

DIGESTS_SUFFIX = ".digests.json"
"""Behind the name of a file: the list of its digests beside it."""


SIGNATURE_NAME = "model.sig"
"""The signature of a folder, in it; model-signing's own name."""

TOKEN_NAME = "seen"
"""A file beside an output that is staged, by which other machines see that they share the folder: never in the output,
so that no killed run leaves it to be published by the next."""


def is_marker(path: str) -> bool:
    """Whether a folder is no checkpoint without the file."""
    name = path.rpartition("/")[2]
    return name in MARKERS or name.endswith(".index.json")


def is_shown(path: str) -> bool:
    """Whether a relative name is a file's that belongs to a checkpoint: none of a hidden folder, and no folder itself,
    for which tools make empty objects."""
    *folders, name = path.split("/")
    return bool(name) and not any(folder.startswith(".") for folder in folders)
