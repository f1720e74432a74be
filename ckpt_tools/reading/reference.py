"""Reads the reference that an output is to be like, from headers and ``config.json`` alone."""

from __future__ import annotations

from pathlib import Path

from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ConvertOptions, ReadOptions
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.formats.index import find_format
from ckpt_tools.reading.checkpoint import read_source
from ckpt_tools.reading.model_files import read_model_config
from ckpt_tools.recipes.like import Reference, ReferenceMatcher, ReferenceTensor
from ckpt_tools.recipes.search import iter_mappings
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import StorageOptions, open_source


def read_reference(folder: str | Path, storage_options: StorageOptions) -> Reference:
    """The model at ``folder``: a checkpoint of any format, or a folder that has only a ``config.json``.

    Raises:
        UsageError: there is neither a checkpoint nor a ``config.json`` of a model. CkptError: it cannot be read.
    """
    source = open_source(folder, storage_options)
    config = read_model_config(source)
    if config is not None and not _has_weights(source):
        return Reference(str(folder), config=config)
    opened_source, manifest = read_source(source, ReadOptions())
    weights = manifest.weights
    if not weights:
        raise UsageError(f"{format_option('like', folder)} holds no weights")
    tensors = {name: ReferenceTensor(entry.shape, entry.dtype) for name, entry in weights.items()}
    files = {name: entry.shards.files[0] for name, entry in weights.items()}
    is_folder = manifest.format == "safetensors" and len(opened_source.files) > 1
    if not is_folder or not all(file.endswith(".safetensors") for file in files.values()):
        files = {}
    return Reference(str(folder), tensors, manifest.aliases, config or {}, files)


def make_reference_matcher(folder: str | Path, options: ConvertOptions) -> ReferenceMatcher:
    """The steps that make a manifest like the model at ``folder``. Raises CkptError as ``read_reference``."""
    reference = read_reference(folder, options.storage_options).exclude_tensors(options.exclude)
    return ReferenceMatcher(
        reference, lambda manifest: iter_mappings(manifest, reference, has_recipe=options.recipe is not None)
    )


def _has_weights(source: Source) -> bool:
    """False if no format recognises any of the files. Raises CkptError, also for a format that is not read."""
    try:
        find_format(source)
    except UnsupportedError as error:
        if type(error) is not UnsupportedError or error.path is not None:
            raise
        return False
    return True
