"""From one manifest to another under other names: rules of renaming, prefixes and wrappers that are taken off."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ckpt_tools.core import matching, quantized
from ckpt_tools.core.manifest import Kind, Manifest, ParamGroup, StateKey
from ckpt_tools.core.names import collect_model_names, map_to_bare_model_names, may_have_wrappers
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.transforms import TransformResult, rename_values
from ckpt_tools.errors import UsageError


def rename_tensors(manifest: Manifest, new_name: Callable[[str], str]) -> TransformResult:
    """The manifest with every fqn through ``new_name``: of weights, optimizer state, ties and groups. A weight and
    state under another name may come to have one name.

    Raises:
        UsageError: two names become one, one becomes empty, or a quantized weight is parted from its scales.
    """
    names = {name: new_name(name) for name in sorted(collect_model_names(manifest))}
    keys = [key for key, entry in manifest.tensors.items() if entry.kind is not Kind.EXTRA]
    old_name_by_key: dict[StateKey, str] = {}
    for old, slot in sorted((*keys, *map(StateKey, manifest.aliases))):
        new = StateKey(names[old], slot)
        if not new.fqn or new in old_name_by_key:
            other = f" as does {old_name_by_key[new]!r}" if new in old_name_by_key else ""
            raise UsageError(f"renaming makes {old!r} into {new.fqn!r}{other}; names must stay distinct")
        old_name_by_key[new] = old
    quantized.check_companions_renamed(manifest, names)
    renamed = replace(
        manifest,
        tensors={
            key if entry.kind is Kind.EXTRA else StateKey(names[key.fqn], key.slot): entry
            for key, entry in manifest.tensors.items()
        },
        aliases={names[alias]: names[owner] for alias, owner in manifest.aliases.items()},
        groups=tuple(_rename_group(group, names) for group in manifest.groups),
        values=rename_values(manifest, names),
    )
    return renamed, ()


def _rename_group(group: ParamGroup, names: Mapping[str, str]) -> ParamGroup:
    """The group with new names, also among its options: torch's ``param_names``."""
    params = tuple(names.get(name, name) for name in group.params)
    renamed_options = {"param_names": list(params)} if "param_names" in group.options and params != group.params else {}
    return replace(group, params=params, options={**group.options, **renamed_options})


def find_changed_names(manifest: Manifest, new_name: Callable[[str], str]) -> dict[str, str]:
    """The names that ``rename_tensors`` changes, and what they become."""
    return {old: new for old in sorted(collect_model_names(manifest)) if (new := new_name(old)) != old}


def check_renaming(manifest: Manifest, rules: Iterable[str], key_map: Mapping[str, str]) -> TransformResult:
    """The manifest unchanged. Raises UsageError for a rule or a key of the map that matches none of its names."""
    matching.check_renaming(sorted(collect_model_names(manifest)), rules=parse_rename_rules(rules), key_map=key_map)
    return manifest, ()


def make_renamer(rules: Iterable[str], key_map: Mapping[str, str]) -> Callable[[str], str]:
    """The renaming that ``--key-map`` and then each ``--rename REGEX=REPL`` describe.

    Raises:
        UsageError: a rule is not ``REGEX=REPL``, or its regular expression is not valid.
    """
    compiled_rules = parse_rename_rules(rules)

    def new_name(name: str) -> str:
        name = key_map.get(name, name)
        for _, pattern, replacement in compiled_rules:
            name = pattern.sub(replacement, name)
        return name

    return new_name


def parse_rename_rules(rules: Iterable[str]) -> list[tuple[str, re.Pattern[str], str]]:
    """Each ``REGEX=REPL`` with its two halves. Raises UsageError."""
    rename_rules = []
    for rule in rules:
        regex, separator, replacement = rule.rpartition("=")
        if not separator:
            raise UsageError(f"{format_option('rename', rule)} is not REGEX=REPLACEMENT")
        if not regex:
            empty = "has an empty REGEX, which matches between all letters of a name"
            raise UsageError(f"{format_option('rename', rule)} {empty}")
        try:
            pattern = re.compile(regex)
            pattern.sub(replacement, "")
        except (re.error, IndexError) as error:
            raise UsageError(f"{format_option('rename', rule)}: {error}") from error
        rename_rules.append((rule, pattern, replacement))
    return rename_rules


def strip_wrappers(manifest: Manifest) -> TransformResult:
    """The manifest with the names of the bare model: without the parts that wrappers put in, and without ``module.``
    and ``model0.`` where all names begin with them."""
    if not may_have_wrappers(collect_model_names(manifest)):
        return manifest, ()
    bare_name_by_name = map_to_bare_model_names(manifest)
    if all(name == old for old, name in bare_name_by_name.items()):
        return manifest, ()
    return rename_tensors(manifest, bare_name_by_name.__getitem__)


def strip_prefix(manifest: Manifest, prefix: str) -> TransformResult:
    """The manifest with names without ``prefix``, where they begin with it; the dot that ends it need not be given.

    Raises:
        UsageError: no name begins with it, or two names become one.
    """
    dotted_prefix = f"{prefix.removesuffix('.')}."
    names = collect_model_names(manifest)
    if not any(name.startswith(dotted_prefix) for name in names):
        raise UsageError(
            f"{format_option('strip', prefix)} is the prefix of no tensor; "
            f"{matching.suggest_names(dotted_prefix, names)}"
        )
    return rename_tensors(manifest, lambda name: name.removeprefix(dotted_prefix))
