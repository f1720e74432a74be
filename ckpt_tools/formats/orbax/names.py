"""Names of Orbax's files. Facts from orbax-checkpoint 0.12.8 and files it wrote."""

from __future__ import annotations

from collections.abc import Iterable

TREE = "_METADATA"
"""Every leaf of the tree, beside the arrays of one item."""
CHECKPOINT = "_CHECKPOINT_METADATA"
MANIFEST = "manifest.ocdbt"
COMMITTED = "commit_success.txt"
STRINGS = "_strings.json"
MARKER = "orbax.checkpoint"
"""An empty file that version 1 writes at the top, where version 0 writes none."""
AGGREGATE = "checkpoint"
"""The msgpack file of versions before ``_METADATA``: the structure of the tree, and values of small leaves."""
DELETION = "_CHECKPOINT_DELETION"
"""Version 1 keeps it at the top while it deletes an item."""
UNFINISHED = (".orbax-checkpoint-tmp", ".partial_save")
"""Parts of the names of folders that Orbax renames or merges when they are whole."""

HOUSEKEEPING = (TREE, CHECKPOINT, COMMITTED, MANIFEST, STRINGS, MARKER, "_sharding", "checkpoint_metadata.json")
ARRAY_METADATAS = "array_metadatas"
FOLDERS = ("d", ARRAY_METADATAS)
"""In an item: the data files of OCDBT, and the shapes of chunks, which the arrays themselves state."""

JSON_FILES = ("data.json", "metadata", "metrics")
"""A JSON item of version 1 and of version 0, and the metrics of a CheckpointManager, in their folders."""

RANDOM_KEYS = ("jax_random_key", "np_random_key")
"""The tree inside an item that is one random key; ``NAME_metadata`` beside it is Orbax's own."""

ARRAY_HANDLER = "ArrayCheckpointHandler"
ARRAY = "checkpoint"
"""The name of the array in an item that is one array."""

TREES = {
    "PyTreeCheckpointHandler": TREE,
    "StandardCheckpointHandler": TREE,
    "PyTreeHandler": TREE,
    ARRAY_HANDLER: TREE,
    "JaxRandomKeyCheckpointHandler": f"{RANDOM_KEYS[0]}/{TREE}",
    "NumpyRandomKeyCheckpointHandler": f"{RANDOM_KEYS[1]}/{TREE}",
}
"""The file that an item of this handler has; ``_CHECKPOINT_METADATA`` names the handler of each item."""

FILES = (
    r"_CHECKPOINT_METADATA|_METADATA|_sharding|manifest\.ocdbt|commit_success\.txt|orbax\.checkpoint"
    r"|process_\d+|[0-9a-f]{32}"
)
"""A pattern of the names of files in a checkpoint; the last are data files of OCDBT."""


def unfinished(paths: Iterable[str]) -> tuple[str, str] | None:
    """The first path in a folder that a save left unfinished, and the mark in the folder's name."""
    return next(((path, mark) for path in paths for mark in UNFINISHED if mark in path), None)
