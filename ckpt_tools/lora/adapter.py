"""One adapter out of the tensors of an adapter's file or of a training state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.option_names import option
from ckpt_tools.core.transforms import model_only, rename, without_wrappers
from ckpt_tools.core.wording import listed
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.lora.config import EMBEDDING_LAYERS, AdapterConfig
from ckpt_tools.lora.names import EMBEDDING, Named, Role, bare_module, read_name


@dataclass(frozen=True, slots=True)
class Adapter:
    """The tensors of one adapter: ``parts`` of LoRA by module and part, and ``saved`` ones that replace those of the
    base model, by name."""

    parts: Mapping[str, Mapping[str, TensorEntry]]
    saved: Mapping[str, TensorEntry] = field(default_factory=dict)


def weight_keys(manifest: Manifest) -> dict[str, StateKey]:
    """The weights of a manifest by name, tied names too."""
    found = {
        key.fqn: key for key, entry in manifest.tensors.items() if key.slot == WEIGHT and entry.kind is not Kind.EXTRA
    }
    return found | {alias: found[owner] for alias, owner in manifest.aliases.items() if owner in found}


def named_weights(manifest: Manifest) -> dict[str, Named]:
    """Each name of a weight, read."""
    return {name: read_name(name) for name in weight_keys(manifest)}


def chosen(manifest: Manifest, config: AdapterConfig, adapter: str | None, advice: str) -> dict[str, Named]:
    """The names in ``manifest`` that belong to one adapter; ``advice`` is how the user names it.

    Raises:
        UsageError: there is no adapter, there are several and ``adapter`` is None, or none is called ``adapter``.
        UnsupportedError: a tensor belongs to another method.
    """
    names = named_weights(manifest)
    foreign = sorted(name for name, read in names.items() if read.role is Role.FOREIGN)
    if foreign:
        raise UnsupportedError(f"{listed(foreign)}: tensors of a method that is not LoRA")
    known = sorted({read.adapter for read in names.values() if read.adapter is not None})
    parts = [read for read in names.values() if read.role is Role.LORA]
    if not parts:
        raise UsageError(_empty(names))
    if adapter is not None and adapter not in known:
        has = f"has {listed(known)}" if known else "is that of one adapter, without names of adapters"
        raise UsageError(f"{option('adapter_name', adapter)}: there is no adapter {adapter!r}; the checkpoint {has}")
    if adapter is None and len(known) > 1:
        raise UsageError(f"there are several adapters ({listed(known)}); {advice}")
    wanted = adapter if adapter is not None else next(iter(known), None)
    is_state = wanted is not None
    own = {name: read for name, read in names.items() if read.adapter == wanted}
    if not is_state:
        return own
    own = {name: read for name, read in own.items() if read.role in (Role.LORA, Role.SAVED)}
    modules = {bare_module(read.name) for read in own.values() if read.role is Role.LORA}
    biases = {
        name: read
        for name, read in names.items()
        if read.role is Role.BASE
        and read.name.endswith("bias")
        and (config.bias == "all" or (config.bias == "lora_only" and read.name.removesuffix(".bias") in modules))
    }
    return own | biases


def _empty(names: Iterable[str]) -> str:
    if any(".linear_in." in name for name in names):
        return "it holds no lora_A and lora_B; adapters of Megatron (linear_in, linear_out) are not supported"
    return "it holds no adapter: no tensor is called lora_A or lora_B"


def read_adapter(manifest: Manifest, config: AdapterConfig, adapter: str | None, advice: str) -> Adapter:
    """The adapter in ``manifest``. Raises CkptError as ``chosen``, and for a name that appears twice."""
    alone, _ = without_wrappers(model_only(manifest, weights="master", asked=True)[0])
    keys = weight_keys(alone)
    parts: dict[str, dict[str, TensorEntry]] = {}
    saved: dict[str, TensorEntry] = {}
    for name, read in chosen(alone, config, adapter, advice).items():
        place, key = (parts.setdefault(read.name, {}), read.part) if read.role is Role.LORA else (saved, read.name)
        if key in place:
            raise UnsupportedError(f"the adapter has {read.in_file} twice", key=name)
        place[key] = alone.tensors[keys[name]]
    return Adapter(parts, saved)


def base_of(manifest: Manifest) -> Manifest:
    """The base model of a training state of PEFT, under its own names; any other manifest as it is."""
    names = named_weights(manifest)
    if all(read.role is Role.BASE and read.name == name for name, read in names.items()):
        return manifest
    kept = {name: read.name for name, read in names.items() if read.role in (Role.BASE, Role.ORIGINAL)}
    tensors = {key: entry for key, entry in manifest.tensors.items() if key.fqn in kept}
    aliases = {alias: owner for alias, owner in manifest.aliases.items() if alias in kept and owner in kept}
    alone = replace(manifest, tensors=tensors, aliases=aliases)
    return rename(alone, lambda name: kept[name])[0]


def adapter_names(names: Mapping[str, Named], own: Mapping[str, Named], config: AdapterConfig) -> dict[str, str]:
    """The names in an adapter's file of all that PEFT writes into it: of the adapter's ``own`` tensors among ``names``,
    and of embeddings that have an adapter, if ``target_modules`` names some as transformers calls them."""
    found = {name: name if read.role is Role.BASE else read.in_file for name, read in own.items()}
    if not config.saves_embeddings:
        return found
    embeddings = {
        bare_module(read.name)
        for read in own.values()
        if read.part in EMBEDDING or bare_module(read.name).rpartition(".")[2] in EMBEDDING_LAYERS
    }
    return found | {
        name: name
        for name, read in names.items()
        if read.role is Role.BASE and ".base_layer." in name and read.name.rpartition(".")[0] in embeddings
    }
