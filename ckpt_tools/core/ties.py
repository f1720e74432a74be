"""Embeddings and head of a model that are one tensor: whether ``config.json`` ties them, and what follows. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from ckpt_tools.core.manifest import EqualPair, Kind, Manifest, StateKey, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.errors import UnsupportedError, UsageError

TIE_FLAG = "tie_word_embeddings"

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "shared", "tokens_embed")
"""Last modules of the names of input embeddings."""

_HEAD_NAMES = (
    "lm_head.weight",
    "embed_out.weight",
    "proj_out.weight",
    "output_projection.weight",
    "predictions.decoder.weight",
)

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")

_DECODER_EMBEDDINGS = re.compile(r"(?:model|transformer|model\.(?:language_model|text_model|decoder))\.\w+\.weight")
"""Embeddings whose head is ``lm_head.weight``, and which are tied to nothing else."""

_TIED_MODEL_TYPES = """
aya_vision bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom camembert
cohere cohere2 cohere2_moe cohere2_vision ctrl data2vec-text electra ernie ernie4_5 ernie4_5_moe falcon falcon_mamba
gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gpt-sw3 gpt2 gpt_bigcode gpt_neo
gpt_neox_japanese jetmoe led lfm2 lfm2_moe longt5 m2m_100 mamba marian mbart megatron-bert minicpm3 mpt mt5 mvp
nllb-moe openai-gpt opt paligemma pegasus pegasus_x plbart prophetnet recurrent_gemma roberta roberta-prelayernorm
roc_bert roformer shieldgemma2 smollm3 starcoder2 switch_transformers t5 t5gemma trocr umt5 vaultgemma whisper xglm
xlm xlm-roberta xlm-roberta-xl xlnet xmod youtu zamba zamba2
"""

TIED_BY_DEFAULT = frozenset(_TIED_MODEL_TYPES.split())
"""``model_type`` of transformers (5.23) whose head is tied where ``config.json`` does not say. Of models of several
parts only those whose published weights are: the others' defaults are not what their weights are."""

_COMPUTE_BY_FLAG = ("longt5", "mt5", "pop2piano", "switch_transformers", "t5", "t5gemma", "udop", "umt5")
"""Models that scale their outputs, or have another head, by the flag itself."""


def read_tie_flag(config: Mapping[str, Any], by_default: Collection[str] = TIED_BY_DEFAULT) -> bool | None:
    """Whether the model of ``config.json`` ties its head: the flag of the model or of its part for text, else True for
    a ``model_type`` that is among those tied ``by_default``; None if neither tells."""
    stated_flags = _read_stated_flags(config)
    return stated_flags[0] if stated_flags else (True if config.get("model_type") in by_default else None)


def _read_stated_flags(config: Mapping[str, Any]) -> list[bool]:
    """The flag of the whole model, then of its part for text, which may contradict it."""
    parts = [config, *(config.get(name) for name in _TEXT_CONFIGS)]
    return [part[TIE_FLAG] for part in parts if isinstance(part, Mapping) and isinstance(part.get(TIE_FLAG), bool)]


def make_untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of the same model whose head is a tensor of its own. Raises UnsupportedError if it would compute
    something else."""
    if config.get("model_type") in _COMPUTE_BY_FLAG:
        untie, kind = format_option("untie", True), config["model_type"]
        raise UnsupportedError(f"{untie} would change what a {kind} computes, by {TIE_FLAG} itself")
    parts = {
        name: {**part, TIE_FLAG: False}
        for name, part in config.items()
        if isinstance(part, dict) and part.get(TIE_FLAG)
    }
    return {**config, **parts, TIE_FLAG: False}


def iter_head_embedding_pairs(
    weights: Mapping[str, TensorEntry], aliases: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Names of a head and of the embeddings that it may be tied to, where both are names of the model."""
    shapes = {name: entry.shape for name, entry in weights.items()}
    shapes |= {alias: shapes[owner] for alias, owner in aliases.items() if owner in shapes}
    embeddings = list(filter(is_embedding, shapes))
    for head in [name for name in shapes if is_head(name)]:
        candidates = [name for name in embeddings if shapes[name] == shapes[head] and name.endswith(".weight")]
        if candidates:
            owner = max(candidates, key=lambda name: (_count_shared_modules(head, name), "shared" in name, -len(name)))
            yield head, owner


def is_head(name: str) -> bool:
    return any(name == head or name.endswith(f".{head}") for head in _HEAD_NAMES)


def is_embedding(name: str) -> bool:
    return name.removesuffix(".weight").rpartition(".")[2] in EMBEDDINGS


def _count_shared_modules(one: str, other: str) -> int:
    """Modules at the beginning that both names have."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split("."), strict=False))))


def untie_heads(manifest: Manifest, *, is_tied: bool) -> TransformResult:
    """The manifest with each head as a tensor of its own: a copy of the embeddings where it has their bytes, or if
    ``is_tied`` where there is none.

    Raises:
        UsageError: the name of the head is not known.
    """
    weights, aliases, notes = manifest.weights, dict(manifest.aliases), list[Note]()
    heads = dict(iter_head_embedding_pairs(weights, aliases))
    if is_tied and not heads:
        names = list(filter(is_embedding, weights))
        heads = {"lm_head.weight": names[0]} if len(names) == 1 and _DECODER_EMBEDDINGS.fullmatch(names[0]) else {}
        if not heads:
            raise UsageError(f"{format_option('untie', True)}: the name of the model's head is not known")
    tensors, with_state = dict(manifest.tensors), {key.fqn for key in manifest.select_kinds(Kind.STATE)}
    for head, owner in heads.items():
        for name, source in ((head, aliases.get(head, owner)), (owner, aliases.get(owner, head))):
            if StateKey(name) not in tensors:
                tensors[StateKey(name)] = tensors[StateKey(source)]
                why = f"a copy of {source}: the model is not tied"
                why += f"; {source} alone has state of the optimizer" if source in with_state else ""
                notes.append(Note(Outcome.DEFAULTED, name, why, asked=True))
                aliases.pop(name, None)
    return replace(manifest, tensors=tensors, aliases=aliases), tuple(notes)


def match_ties_to_config(manifest: Manifest, config: Mapping[str, Any], *, untie: bool) -> TransformResult:
    """The manifest that is written beside ``config.json``: that of the source, or with ``untie`` that of
    ``make_untied_config``."""
    is_tied = read_tie_flag(config)
    if untie or is_tied is False:
        untied_manifest, notes = untie_heads(manifest, is_tied=untie and is_tied is True)
        why = f"false: {format_option('untie', True)}"
        flag_note = Note(Outcome.DEFAULTED, f"{TIE_FLAG} in config.json", why, asked=True)
        return untied_manifest, (*notes, *([flag_note] if untie and is_tied else []))
    if not is_tied or False in _read_stated_flags(config):
        return manifest, ()
    weights = manifest.weights
    owner_by_head = dict(iter_head_embedding_pairs(weights, {}))
    for head in sorted(filter(is_head, weights.keys() - owner_by_head.keys())):
        for owner in filter(is_embedding, weights):
            head_shape, owner_shape = weights[head].shape, weights[owner].shape
            if head_shape[1:] and head_shape[1:] == owner_shape[1:]:
                shapes = f"{list(head_shape)} and {list(owner_shape)}"
                both = f"{head} and {owner}, which config.json ties,"
                raise UnsupportedError(f"{both} are {shapes}; {_suggest_tie_fix()}")
    equal_pairs = [
        make_tied_pair(f"{a} and {b}, which config.json ties", weights[b], weights[a]) for a, b in owner_by_head.items()
    ]
    return replace(manifest, must_equal=(*manifest.must_equal, *equal_pairs)), ()


def make_tied_pair(what: str, first: TensorEntry, second: TensorEntry) -> EqualPair:
    """Two tensors of a tie, which must be equal."""
    return EqualPair(what, first, second, _suggest_tie_fix())


def _suggest_tie_fix() -> str:
    untie, exclude = format_option("untie", True), format_option("exclude")
    return f"{untie} writes both, and {TIE_FLAG} as false; or leave one out with {exclude}"
