"""Names of Orbax's files. Facts from orbax-checkpoint 0.12.8 and files it wrote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt_tools.stores.source import Source

TREE_FILE = "_METADATA"
"""Every leaf of the tree, beside the arrays of one item."""
CHECKPOINT_FILE = "_CHECKPOINT_METADATA"
OCDBT_MANIFEST = "manifest.ocdbt"
COMMIT_FILE = "commit_success.txt"
STRINGS_FILE = "_strings.json"
VERSION_1_MARKER = "orbax.checkpoint"
"""An empty file that version 1 writes at the top, where version 0 writes none."""
MSGPACK_FILE = "checkpoint"
"""The msgpack file of versions before ``_METADATA``: the structure of the tree, and values of small leaves."""
DELETION_MARKER = "_CHECKPOINT_DELETION"
"""Version 1 keeps it at the top while it deletes an item."""
TEMPORARY_MARKS = (".orbax-checkpoint-tmp", ".partial_save")
"""Parts of the names of folders that Orbax renames or merges when they are whole."""

HOUSEKEEPING = (
    TREE_FILE,
    CHECKPOINT_FILE,
    COMMIT_FILE,
    OCDBT_MANIFEST,
    STRINGS_FILE,
    VERSION_1_MARKER,
    "_sharding",
    "checkpoint_metadata.json",
)
ARRAY_METADATAS = "array_metadatas"
DATA_FOLDERS = ("d", ARRAY_METADATAS)
"""In an item: the data files of OCDBT, and the shapes of chunks, which the arrays themselves state."""

JSON_FILES = ("data.json", "metadata", "metrics")
"""A JSON item of version 1 and of version 0, and the metrics of a CheckpointManager, in their folders."""

RANDOM_KEY_FOLDERS = ("jax_random_key", "np_random_key")
"""The tree inside an item that is one random key; ``NAME_metadata`` beside it is Orbax's own."""

ARRAY_HANDLER = "ArrayCheckpointHandler"
SINGLE_ARRAY_NAME = "checkpoint"
"""The name of the array in an item that is one array."""

FILE_OF_HANDLER = {
    "PyTreeCheckpointHandler": TREE_FILE,
    "StandardCheckpointHandler": TREE_FILE,
    "PyTreeHandler": TREE_FILE,
    ARRAY_HANDLER: TREE_FILE,
    "JaxRandomKeyCheckpointHandler": f"{RANDOM_KEY_FOLDERS[0]}/{TREE_FILE}",
    "NumpyRandomKeyCheckpointHandler": f"{RANDOM_KEY_FOLDERS[1]}/{TREE_FILE}",
}
"""The file that an item of this handler has; ``_CHECKPOINT_METADATA`` names the handler of each item."""

FILE_NAME_PATTERN = (
    r"_CHECKPOINT_METADATA|_METADATA|_sharding|manifest\.ocdbt|commit_success\.txt|orbax\.checkpoint"
    r"|process_\d+|[0-9a-f]{32}"
)
"""A pattern of the names of files in a checkpoint; the last are data files of OCDBT."""


def detect(source: Source) -> bool:
    return any(path.rpartition("/")[2] in (TREE_FILE, CHECKPOINT_FILE, OCDBT_MANIFEST) for path in source.files)


def find_unfinished(paths: Iterable[str]) -> tuple[str, str] | None:
    """The first path in a folder that a save left unfinished, and the mark in the folder's name."""
    return next(((path, mark) for path in paths for mark in TEMPORARY_MARKS if mark in path), None)
