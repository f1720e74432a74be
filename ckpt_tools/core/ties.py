"""Embeddings and head of a model that are one tensor: whether ``config.json`` says so, and what follows. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from ckpt_tools.core.manifest import WEIGHT, Equal, Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import option
from ckpt_tools.core.transforms import Transformed
from ckpt_tools.errors import UnsupportedError, UsageError

FLAG = "tie_word_embeddings"

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "shared", "tokens_embed")
"""Last modules of the names of input embeddings."""

_HEADS = (
    "lm_head.weight",
    "embed_out.weight",
    "proj_out.weight",
    "output_projection.weight",
    "predictions.decoder.weight",
)

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")

_DECODER = re.compile(r"(?:model|transformer|model\.(?:language_model|text_model|decoder))\.\w+\.weight")
"""Embeddings whose head is ``lm_head.weight``, and which are tied to nothing else."""

_NAMES = """
aya_vision bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom camembert
cohere cohere2 cohere2_moe cohere2_vision ctrl data2vec-text electra ernie ernie4_5 ernie4_5_moe falcon falcon_mamba
gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gpt-sw3 gpt2 gpt_bigcode gpt_neo
gpt_neox_japanese jetmoe led lfm2 lfm2_moe longt5 m2m_100 mamba marian mbart megatron-bert minicpm3 mpt mt5 mvp
nllb-moe openai-gpt opt paligemma pegasus pegasus_x plbart prophetnet recurrent_gemma roberta roberta-prelayernorm
roc_bert roformer shieldgemma2 smollm3 starcoder2 switch_transformers t5 t5gemma trocr umt5 vaultgemma whisper xglm
xlm xlm-roberta xlm-roberta-xl xlnet xmod youtu zamba zamba2
"""

TIED_BY_DEFAULT = frozenset(_NAMES.split())
"""``model_type`` of transformers (5.23) whose head is tied where ``config.json`` does not say. Of models of several
parts only those whose published weights are: the others' defaults are not what their weights are."""

_COMPUTE_BY_FLAG = ("longt5", "mt5", "pop2piano", "switch_transformers", "t5", "t5gemma", "udop", "umt5")
"""Models that scale their outputs, or have another head, by the flag itself."""


def stated_tie(config: Mapping[str, Any], by_default: Collection[str] = TIED_BY_DEFAULT) -> bool | None:
    """Whether the model of ``config.json`` ties its head: as it or its part for text says, else as its class does; None
    for a class that is not among those ``by_default``."""
    found = _stated(config)
    return found[0] if found else (True if config.get("model_type") in by_default else None)


def _stated(config: Mapping[str, Any]) -> list[bool]:
    """The flag of the whole model, then of its part for text, which may contradict it."""
    parts = [config, *(config.get(name) for name in _TEXT_CONFIGS)]
    return [part[FLAG] for part in parts if isinstance(part, Mapping) and isinstance(part.get(FLAG), bool)]


def untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of the same model whose head is a tensor of its own. Raises UnsupportedError if it would compute
    something else."""
    if config.get("model_type") in _COMPUTE_BY_FLAG:
        kind = config["model_type"]
        raise UnsupportedError(f"{option('untie', True)} would change what a {kind} computes, by {FLAG} itself")
    parts = {name: {**part, FLAG: False} for name, part in config.items() if isinstance(part, dict) and part.get(FLAG)}
    return {**config, **parts, FLAG: False}


def pairs(weights: Mapping[str, TensorEntry], aliases: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names of a head and of the embeddings that it may be tied to, where both are names of the model."""
    shapes = {name: entry.shape for name, entry in weights.items()}
    shapes |= {alias: shapes[owner] for alias, owner in aliases.items() if owner in shapes}
    embeddings = list(filter(is_embedding, shapes))
    for head in [name for name in shapes if is_head(name)]:
        found = [name for name in embeddings if shapes[name] == shapes[head] and name.endswith(".weight")]
        if found:
            yield head, max(found, key=lambda name: (_shared_modules(head, name), "shared" in name, -len(name)))


def is_head(name: str) -> bool:
    return any(name == head or name.endswith(f".{head}") for head in _HEADS)


def is_embedding(name: str) -> bool:
    return name.removesuffix(".weight").rpartition(".")[2] in EMBEDDINGS


def _shared_modules(one: str, other: str) -> int:
    """Modules at the beginning that both names have."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split("."), strict=False))))


def untied(manifest: Manifest, *, is_tied: bool) -> Transformed:
    """The manifest with each head as a tensor of its own: a copy of the embeddings where it has their bytes, or if
    ``is_tied`` where there is none.

    Raises:
        UsageError: the name of the head is not known.
    """
    weights, aliases, notes = _weights(manifest), dict(manifest.aliases), list[Note]()
    heads = dict(pairs(weights, aliases))
    if is_tied and not heads:
        names = list(filter(is_embedding, weights))
        heads = {"lm_head.weight": names[0]} if len(names) == 1 and _DECODER.fullmatch(names[0]) else {}
        if not heads:
            raise UsageError(f"{option('untie', True)}: the name of the model's head is not known")
    tensors, with_state = dict(manifest.tensors), {key.fqn for key in manifest.of_kind(Kind.STATE)}
    for head, owner in heads.items():
        for name, source in ((head, aliases.get(head, owner)), (owner, aliases.get(owner, head))):
            if StateKey(name) not in tensors:
                tensors[StateKey(name)] = tensors[StateKey(source)]
                why = f"a copy of {source}: the model is not tied"
                why += f"; {source} alone has state of the optimizer" if source in with_state else ""
                notes.append(Note(Outcome.DEFAULTED, name, why, asked=True))
                aliases.pop(name, None)
    return replace(manifest, tensors=tensors, aliases=aliases), tuple(notes)


def with_ties(manifest: Manifest, config: Mapping[str, Any], *, untie: bool) -> Transformed:
    """The manifest that is written beside ``config.json``, which is as it was: with ``untie`` as ``untied_config``
    makes it."""
    is_tied = stated_tie(config)
    if untie or is_tied is False:
        made, notes = untied(manifest, is_tied=untie and is_tied is True)
        flag = Note(Outcome.DEFAULTED, f"{FLAG} in config.json", f"false: {option('untie', True)}", asked=True)
        return made, (*notes, *([flag] if untie and is_tied else []))
    if not is_tied or False in _stated(config):
        return manifest, ()
    weights = _weights(manifest)
    tied = dict(pairs(weights, {}))
    for head in sorted(filter(is_head, weights.keys() - tied.keys())):
        for owner in filter(is_embedding, weights):
            one, other = weights[head].shape, weights[owner].shape
            if one[1:] and one[1:] == other[1:]:
                shapes = f"{list(one)} and {list(other)}"
                raise UnsupportedError(f"{head} and {owner}, which config.json ties, are {shapes}; {_ways_out()}")
    equal = [tie(f"{a} and {b}, which config.json ties", weights[b], weights[a]) for a, b in tied.items()]
    return replace(manifest, must_equal=(*manifest.must_equal, *equal)), ()


def tie(what: str, first: TensorEntry, second: TensorEntry) -> Equal:
    """Two tensors of a tie, which must be equal."""
    return Equal(what, first, second, _ways_out())


def _ways_out() -> str:
    return f"{option('untie', True)} writes both, and {FLAG} as false; or leave one out with {option('exclude')}"


def _weights(manifest: Manifest) -> dict[str, TensorEntry]:
    return {key.fqn: e for key, e in manifest.tensors.items() if key.slot == WEIGHT and e.kind is not Kind.EXTRA}
