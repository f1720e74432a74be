"""Opens an adapter of LoRA: its tensors, and ``adapter_config.json`` beside them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_tools.core.manifest import Manifest, TensorEntry
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ConvertOptions, ConvertRequest
from ckpt_tools.core.wording import join_names
from ckpt_tools.errors import IncompleteError, SourceNotFoundError, StoreError, UsageError, name_file_in_errors
from ckpt_tools.lora.adapter import Adapter, read_adapter
from ckpt_tools.lora.config import AdapterConfig, check_mergeable, parse_config
from ckpt_tools.reading.model_files import MAX_CONFIG_BYTES, folder_near, folders_around
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.source import Source, Store
from ckpt_tools.stores.urls import open_source
from ckpt_tools.stores.wrappers import RedirectingStore
from ckpt_tools.trainers.transformers import ADAPTER


@dataclass(frozen=True, slots=True)
class OpenAdapter:
    """An adapter, its settings, and a store that has its files beside those of the base model."""

    adapter: Adapter
    config: AdapterConfig
    store: Store


def open_adapter(request: ConvertRequest, source: Source, manifest: Manifest, base: Store) -> OpenAdapter:
    """The adapter that ``request`` names, which is ``manifest`` of ``source``; its files get names that none of
    ``base`` has.

    Raises:
        CkptError: its settings are missing or cannot be merged, or there is not exactly one that is meant.
    """
    assert request.adapter is not None
    text = adapter_config(request.adapter, source, manifest, request)
    with name_file_in_errors(str(request.adapter)):
        config = parse_config(parse_json(text, ADAPTER), ADAPTER)
        check_mergeable(config, ADAPTER)
        adapter = read_adapter(
            manifest, config, request.adapter_name, f"choose one with {format_option('adapter_name')}"
        )
        _refuse_empty(adapter)
    prefix = "adapter:"
    files = {
        file
        for entries in (*adapter.parts.values(), adapter.saved)
        for e in entries.values()
        for file in e.shards.files
    }
    store = RedirectingStore(base, {prefix + file: (source.store, file) for file in files})
    parts = {module: {part: _below(e, prefix) for part, e in found.items()} for module, found in adapter.parts.items()}
    saved = {name: _below(entry, prefix) for name, entry in adapter.saved.items()}
    return OpenAdapter(Adapter(parts, saved), config, store)


def _refuse_empty(adapter: Adapter) -> None:
    parts = {f"{module}.{part}": entry for module, found in adapter.parts.items() for part, entry in found.items()}
    empty = [name for name, entry in {**parts, **adapter.saved}.items() if not entry.numel]
    if empty:
        why = "saved empty by ZeRO-3, which had gathered nothing; build it from the checkpoint of the run"
        raise IncompleteError(f"{join_names(empty)}: {why} (ckpt-tools convert CKPT OUT {format_option('to', 'peft')})")


def _below(entry: TensorEntry, prefix: str) -> TensorEntry:
    return replace(entry, shards=entry.shards.with_file_prefix(prefix))


def adapter_config(url: str | Path, source: Source, manifest: Manifest, options: ConvertOptions) -> bytes:
    """The content of ``adapter_config.json`` in the folder ``options.config``, else beside the checkpoint ``source`` at
    ``url``, in a folder around it, or in the folder above.

    Raises:
        UsageError: there is none. CkptError: it cannot be read.
    """
    config, stores = options.config, options.storage_options
    if config is not None:
        opened = open_source(config, stores)
        if ADAPTER in opened.files:
            return opened.read_all(ADAPTER, limit_bytes=MAX_CONFIG_BYTES)
    for prefix in folders_around(manifest.files - manifest.literals.keys()):
        if prefix + ADAPTER in source.files:
            return source.read_all(prefix + ADAPTER, limit_bytes=MAX_CONFIG_BYTES)
    base, _ = folder_near(url, source)
    if base is not None:
        with suppress(SourceNotFoundError, StoreError):
            opened = open_source(f"{base}/{ADAPTER}", stores)
            return opened.read_all(ADAPTER, limit_bytes=MAX_CONFIG_BYTES)
    where = f"in {format_option('config', config)} or " if config is not None else ""
    raise UsageError(
        f"there is no {ADAPTER} {where}beside {url}; name the folder that has it with {format_option('config')}"
    )
