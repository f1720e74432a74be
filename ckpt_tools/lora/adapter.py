"""One adapter out of the tensors of an adapter's file or of a training state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ckpt_tools.core.manifest import Manifest, StateKey, TensorEntry
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.renaming import rename_tensors, strip_wrappers
from ckpt_tools.core.transforms import keep_model_only
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.lora.config import EMBEDDING_LAYERS, AdapterConfig
from ckpt_tools.lora.names import EMBEDDING_PARTS, ParsedName, PeftRole, get_base_module, parse_name
from ckpt_tools.messages.wording import join_names


@dataclass(frozen=True, slots=True)
class Adapter:
    """The tensors of one adapter: ``parts`` of LoRA by module and part, and ``saved`` ones that replace those of the
    base model, by name."""

    parts: Mapping[str, Mapping[str, TensorEntry]]
    saved: Mapping[str, TensorEntry] = field(default_factory=dict)


def map_weight_keys(manifest: Manifest) -> dict[str, StateKey]:
    """The weights of a manifest by name, tied names too."""
    keys = {name: StateKey(name) for name in manifest.weights}
    return keys | {alias: keys[owner] for alias, owner in manifest.aliases.items() if owner in keys}


def parse_weight_names(manifest: Manifest) -> dict[str, ParsedName]:
    """The parts of the name of each weight."""
    return {name: parse_name(name) for name in map_weight_keys(manifest)}


def select_adapter_names(
    manifest: Manifest, config: AdapterConfig, adapter: str | None, advice: str
) -> dict[str, ParsedName]:
    """The names in ``manifest`` that belong to one adapter; ``advice`` is how the user names it.

    Raises:
        UsageError: there is no adapter, there are several and ``adapter`` is None, or none is called ``adapter``.
        UnsupportedError: a tensor belongs to another method.
    """
    names = parse_weight_names(manifest)
    foreign_names = sorted(name for name, read in names.items() if read.role is PeftRole.FOREIGN)
    if foreign_names:
        raise UnsupportedError(f"{join_names(foreign_names)}: tensors of a method that is not LoRA")
    adapters = sorted({read.adapter for read in names.values() if read.adapter is not None})
    lora_names = [read for read in names.values() if read.role is PeftRole.LORA]
    if not lora_names:
        if any(".linear_in." in name for name in names):
            raise UsageError(
                "it holds no lora_A and lora_B; adapters of Megatron (linear_in, linear_out) are not supported"
            )
        raise UsageError("it holds no adapter: no tensor is called lora_A or lora_B")
    if adapter is not None and adapter not in adapters:
        existing = f"has {join_names(adapters)}" if adapters else "is that of one adapter, without names of adapters"
        raise UsageError(
            f"{format_option('adapter_name', adapter)}: there is no adapter {adapter!r}; the checkpoint {existing}"
        )
    if adapter is None and len(adapters) > 1:
        raise UsageError(f"there are several adapters ({join_names(adapters)}); {advice}")
    adapter_name = adapter if adapter is not None else next(iter(adapters), None)
    has_adapter_names = adapter_name is not None
    own_names = {name: read for name, read in names.items() if read.adapter == adapter_name}
    if not has_adapter_names:
        return own_names
    own_names = {name: read for name, read in own_names.items() if read.role in (PeftRole.LORA, PeftRole.SAVED)}
    modules = {get_base_module(read.name) for read in own_names.values() if read.role is PeftRole.LORA}
    biases = {
        name: read
        for name, read in names.items()
        if read.role is PeftRole.BASE
        and read.name.endswith("bias")
        and (config.bias == "all" or (config.bias == "lora_only" and read.name.removesuffix(".bias") in modules))
    }
    return own_names | biases


def read_adapter(manifest: Manifest, config: AdapterConfig, adapter: str | None, advice: str) -> Adapter:
    """The adapter in ``manifest``. Raises CkptError as ``select_adapter_names``, and for a name that appears twice."""
    model, _ = strip_wrappers(keep_model_only(manifest, weight_copy="master", is_requested=True)[0])
    keys = map_weight_keys(model)
    parts: dict[str, dict[str, TensorEntry]] = {}
    saved: dict[str, TensorEntry] = {}
    for name, parsed_name in select_adapter_names(model, config, adapter, advice).items():
        target, key = (
            (parts.setdefault(parsed_name.name, {}), parsed_name.part)
            if parsed_name.role is PeftRole.LORA
            else (saved, parsed_name.name)
        )
        if key in target:
            raise UnsupportedError(f"the adapter has {parsed_name.file_name} twice", key=name)
        target[key] = model.tensors[keys[name]]
    return Adapter(parts, saved)


def extract_base_model(manifest: Manifest) -> Manifest:
    """The base model in a training state of PEFT, under the base model's own names. Any other manifest is returned as
    it is."""
    names = parse_weight_names(manifest)
    if all(read.role is PeftRole.BASE and read.name == name for name, read in names.items()):
        return manifest
    base_names = {name: read.name for name, read in names.items() if read.role in (PeftRole.BASE, PeftRole.ORIGINAL)}
    tensors = {key: entry for key, entry in manifest.tensors.items() if key.fqn in base_names}
    aliases = {alias: owner for alias, owner in manifest.aliases.items() if alias in base_names and owner in base_names}
    base_model = replace(manifest, tensors=tensors, aliases=aliases)
    return rename_tensors(base_model, lambda name: base_names[name])[0]


def map_file_names(
    names: Mapping[str, ParsedName], own_names: Mapping[str, ParsedName], config: AdapterConfig
) -> dict[str, str]:
    """The names in an adapter's file of all that PEFT writes into it: of the adapter's ``own_names`` tensors among
    ``names``, and of embeddings that have an adapter, if ``target_modules`` names some as transformers calls them."""
    file_names = {name: name if read.role is PeftRole.BASE else read.file_name for name, read in own_names.items()}
    if not config.saves_embeddings:
        return file_names
    embeddings = {
        get_base_module(read.name)
        for read in own_names.values()
        if read.part in EMBEDDING_PARTS or get_base_module(read.name).rpartition(".")[2] in EMBEDDING_LAYERS
    }
    return file_names | {
        name: name
        for name, read in names.items()
        if read.role is PeftRole.BASE and ".base_layer." in name and read.name.rpartition(".")[0] in embeddings
    }
