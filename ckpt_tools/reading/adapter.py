"""Opens an adapter of LoRA: its tensors, and ``adapter_config.json`` beside them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ConvertRequest
from ckpt_tools.errors import IncompleteError, SourceNotFoundError, StoreError, UsageError, name_file_in_errors
from ckpt_tools.lora.adapter import Adapter, read_adapter
from ckpt_tools.lora.config import AdapterConfig, check_mergeable, parse_config
from ckpt_tools.messages.wording import join_names
from ckpt_tools.reading.model_files import MAX_CONFIG_BYTES, find_nearby_folder, iter_folders_around
from ckpt_tools.reading.opened import OpenedCheckpoint
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.source import Store
from ckpt_tools.stores.urls import open_source
from ckpt_tools.stores.wrappers import RedirectingStore
from ckpt_tools.trainers.transformers import ADAPTER_CONFIG_FILE


@dataclass(frozen=True, slots=True)
class OpenAdapter:
    """An adapter, its settings, and a store that has its files beside those of the base model."""

    adapter: Adapter
    config: AdapterConfig
    store: Store


def open_adapter(request: ConvertRequest, opened: OpenedCheckpoint, base_store: Store) -> OpenAdapter:
    """The adapter that ``request`` names and ``opened`` holds; its files get names that none of ``base_store`` has.

    Raises:
        CkptError: its settings are missing or cannot be merged, or there is not exactly one that is meant.
    """
    assert request.adapter is not None
    source = opened.source
    config_text = read_adapter_config(opened)
    with name_file_in_errors(str(request.adapter)):
        config = parse_config(parse_json(config_text, ADAPTER_CONFIG_FILE), ADAPTER_CONFIG_FILE)
        check_mergeable(config, ADAPTER_CONFIG_FILE)
        adapter = read_adapter(
            opened.manifest, config, request.adapter_name, f"choose one with {format_option('adapter_name')}"
        )
        _refuse_empty_tensors(adapter)
    prefix = "adapter:"
    files = {
        file
        for entries in (*adapter.parts.values(), adapter.saved)
        for e in entries.values()
        for file in e.shards.files
    }
    store = RedirectingStore(base_store, {prefix + file: (source.store, file) for file in files})
    parts = {
        module: {part: e.with_file_prefix(prefix) for part, e in found.items()}
        for module, found in adapter.parts.items()
    }
    saved = {name: entry.with_file_prefix(prefix) for name, entry in adapter.saved.items()}
    return OpenAdapter(Adapter(parts, saved), config, store)


def _refuse_empty_tensors(adapter: Adapter) -> None:
    parts = {f"{module}.{part}": entry for module, found in adapter.parts.items() for part, entry in found.items()}
    empty = [name for name, entry in {**parts, **adapter.saved}.items() if not entry.numel]
    if empty:
        why = "saved empty by ZeRO-3, which had gathered nothing; build it from the checkpoint of the run"
        raise IncompleteError(f"{join_names(empty)}: {why} (ckpt-tools convert CKPT OUT {format_option('to', 'peft')})")


def read_adapter_config(opened: OpenedCheckpoint) -> bytes:
    """The content of ``adapter_config.json`` in its ``config_folder``, else beside the checkpoint, in a folder around
    it, or in the folder above.

    Raises:
        UsageError: there is none. CkptError: it cannot be read.
    """
    source, manifest, storage_options = opened.source, opened.manifest, opened.storage_options
    config_folder = opened.config_folder
    if config_folder is not None:
        config_source = open_source(config_folder, storage_options)
        if ADAPTER_CONFIG_FILE in config_source.files:
            return config_source.read_all(ADAPTER_CONFIG_FILE, limit_bytes=MAX_CONFIG_BYTES)
    for prefix in iter_folders_around(manifest.files - manifest.literals.keys()):
        if prefix + ADAPTER_CONFIG_FILE in source.files:
            return source.read_all(prefix + ADAPTER_CONFIG_FILE, limit_bytes=MAX_CONFIG_BYTES)
    parent_url, _ = find_nearby_folder(opened.url, source)
    if parent_url is not None:
        with suppress(SourceNotFoundError, StoreError):
            config_source = open_source(f"{parent_url}/{ADAPTER_CONFIG_FILE}", storage_options)
            return config_source.read_all(ADAPTER_CONFIG_FILE, limit_bytes=MAX_CONFIG_BYTES)
    where = f"in {format_option('config', config_folder)} or " if config_folder is not None else ""
    raise UsageError(
        f"there is no {ADAPTER_CONFIG_FILE} {where}beside {opened.url}; name the folder that has it with "
        f"{format_option('config')}"
    )
