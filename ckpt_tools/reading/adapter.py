"""Opens an adapter of LoRA: its tensors, and ``adapter_config.json`` beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ConvertRequest
from ckpt_tools.errors import IncompleteError, name_file_in_errors
from ckpt_tools.lora.adapter import Adapter, read_adapter
from ckpt_tools.lora.config import AdapterConfig, check_mergeable, parse_config
from ckpt_tools.messages.wording import join_names
from ckpt_tools.reading.opened import OpenedCheckpoint
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.source import Store
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
    prefix, config_text = "adapter:", opened.read_adapter_config()
    tensors = {key: entry.with_file_prefix(prefix) for key, entry in opened.manifest.tensors.items()}
    with name_file_in_errors(str(request.adapter)):
        config = parse_config(parse_json(config_text, ADAPTER_CONFIG_FILE), ADAPTER_CONFIG_FILE)
        check_mergeable(config, ADAPTER_CONFIG_FILE)
        choice = f"choose one with {format_option('adapter_name')}"
        adapter = read_adapter(replace(opened.manifest, tensors=tensors), config, request.adapter_name, choice)
        _refuse_empty_tensors(adapter)
    locations = {prefix + file: (opened.source.store, file) for file in opened.manifest.files}
    return OpenAdapter(adapter, config, RedirectingStore(base_store, locations))


def _refuse_empty_tensors(adapter: Adapter) -> None:
    parts = {f"{module}.{part}": entry for module, found in adapter.parts.items() for part, entry in found.items()}
    empty = [name for name, entry in {**parts, **adapter.saved}.items() if not entry.numel]
    if empty:
        why = "saved empty by ZeRO-3, which had gathered nothing; build it from the checkpoint of the run"
        raise IncompleteError(f"{join_names(empty)}: {why} (ckpt-tools convert CKPT OUT {format_option('to', 'peft')})")
