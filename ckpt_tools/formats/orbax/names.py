"""Names of Orbax's files. Facts from orbax-checkpoint 0.12.8 and files it wrote."""

TREE = "_METADATA"
"""Every leaf of the tree, beside the arrays of one item."""
CHECKPOINT = "_CHECKPOINT_METADATA"
MANIFEST = "manifest.ocdbt"
COMMITTED = "commit_success.txt"
STRINGS = "_strings.json"
UNFINISHED = ".orbax-checkpoint-tmp"

HOUSEKEEPING = (TREE, CHECKPOINT, COMMITTED, MANIFEST, STRINGS, "_sharding", "checkpoint_metadata.json")
FOLDERS = ("d", "array_metadatas")
"""In an item: the data files of OCDBT, and the shapes of chunks, which the arrays themselves state."""

JSON_FILES = ("metadata", "metrics")
"""A JSON item and the metrics of a CheckpointManager, in their folders."""

FILES = r"_CHECKPOINT_METADATA|_METADATA|_sharding|manifest\.ocdbt|commit_success\.txt|process_\d+|[0-9a-f]{32}"
"""A pattern of the names of files in a checkpoint; the last are data files of OCDBT."""
