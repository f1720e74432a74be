"""Comparison of the files that say what a model is: ``config.json``, a tokenizer, code."""

from __future__ import annotations

from pathlib import Path

from ckpt_tools.core.manifest import Manifest, StateKey
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ConvertOptions
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.base import Format
from ckpt_tools.messages.wording import join_names
from ckpt_tools.reading.model_files import (
    ModelFiles,
    apply_config_ties,
    fit_to_output,
    is_pretrained_folder,
    read_model_config,
)
from ckpt_tools.reading.opened import OpenedCheckpoint
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import open_output_location
from ckpt_tools.trainers.transformers import CONFIG_FILE
from ckpt_tools.verification.report import FILE_SLOT, Aspect, Difference


def build_expected_model(
    opened: OpenedCheckpoint, manifest: Manifest, dst: str | Path, writer: Format | None, options: ConvertOptions
) -> tuple[Manifest, ModelFiles | None]:
    """``manifest``, which options made of ``opened``, and the files beside it as a conversion to ``dst`` writes them.
    None if it copies no files, and with ``like``: they are another model's then.

    Raises:
        UsageError: ``untie`` is for a model with ``config.json``. CkptError: a file cannot be read.
    """
    storage_options = options.storage_options
    if (
        writer is None
        or not is_pretrained_folder(writer, open_output_location(dst, storage_options).form)
        or options.like is not None
    ):
        files = None
    else:
        files = opened.find_model_files(manifest)
    if files is None:
        if options.untie:
            raise UsageError(f"{format_option('untie', True)} is for folders with a config.json")
        return manifest, None
    if options.untie:
        manifest, files, _ = apply_config_ties(manifest, files, untie=True)
    return manifest, fit_to_output(files, manifest)[0]


def find_differing_files(expected: ModelFiles, source: Source, written: Source) -> list[Difference]:
    """The files of ``source`` that ``written`` lacks or has with another content. Raises CkptError if one cannot be
    read."""
    store, config = expected.join_to(source.store), read_model_config(written)
    problems = {} if config == expected.config else {CONFIG_FILE: "missing"}
    if problems and config is not None:
        differing = sorted(key for key in {*expected.config, *config} if expected.config.get(key) != config.get(key))
        problems = {CONFIG_FILE: f"{join_names(differing)}: another content"}
    for name, file in expected.files.items():
        content = bytearray(file.num_bytes)
        store.read_into(file.source, 0, memoryview(content))
        if name not in written.files:
            problems[name] = "missing"
        elif written.size(name) != file.num_bytes or content != written.read(name, 0, file.num_bytes):
            problems[name] = "another content"
    return [Difference(StateKey(name, FILE_SLOT), Aspect.FILE, what) for name, what in problems.items()]
