"""Comparison of the files that say what a model is: ``config.json``, a tokenizer, code."""

from __future__ import annotations

from pathlib import Path

from ckpt_tools.core.manifest import Manifest, StateKey
from ckpt_tools.core.options import ConvertOptions
from ckpt_tools.core.wording import listed
from ckpt_tools.formats.base import Format
from ckpt_tools.reading.model_files import config_in, find_model_files, fitted
from ckpt_tools.stores.output_form import SingleFile
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import open_place
from ckpt_tools.trainers.transformers import CONFIG
from ckpt_tools.verification.report import FILE, Aspect, Difference


def differing_files(
    src: str | Path,
    source: Source,
    manifest: Manifest,
    dst: str | Path,
    written: Source,
    writer: Format,
    options: ConvertOptions,
) -> list[Difference]:
    """The files that a conversion of ``manifest``, read at ``src``, copies, and that ``written`` at ``dst`` lacks or
    has with another content. Nothing is copied beside one file, and with ``like`` they are another model's.

    Raises:
        CkptError: a file cannot be read.
    """
    stores = options.storage_options
    is_file = isinstance(open_place(dst, stores).form, SingleFile)
    if "config" not in writer.writing_options or writer.asks_adapter_config or is_file or options.like is not None:
        return []
    model = find_model_files(src, source, manifest, config=options.config, storage_options=stores)
    if model is None:
        return []
    model, _ = fitted(model, manifest)
    config = config_in(written)
    lost = {} if config == model.config else {CONFIG: "missing"}
    if lost and config is not None:
        keys = sorted(key for key in {*model.config, *config} if model.config.get(key) != config.get(key))
        lost = {CONFIG: f"{listed(keys)}: another content"}
    for name, file in model.files.items():
        content = bytearray(file.num_bytes)
        model.store.read_into(file.source, 0, memoryview(content))
        if name not in written.files:
            lost[name] = "missing"
        elif content != written.read(name, 0, written.size(name)):
            lost[name] = "another content"
    return [Difference(StateKey(name, FILE), Aspect.FILE, what) for name, what in lost.items()]
