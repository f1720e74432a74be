"""Checks that every name and pattern in the options matches a tensor. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from ckpt_tools.core.option_names import option
from ckpt_tools.core.wording import listed, nearest
from ckpt_tools.errors import UsageError


def is_chosen(fqn: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a name matches a glob of ``include`` (none: any does) and none of ``exclude``."""
    wanted = not include or any(fnmatchcase(fqn, glob) for glob in include)
    return wanted and not any(fnmatchcase(fqn, glob) for glob in exclude)


def check_globs(names: Collection[str], *, include: Iterable[str], exclude: Iterable[str]) -> None:
    """Raises UsageError for a glob that matches none of ``names``."""
    for name, globs in (("include", include), ("exclude", exclude)):
        for glob in globs:
            if not any(fnmatchcase(each, glob) for each in names):
                raise _matches_nothing(name, glob, _letters(glob), names)


def check_buffers(names: Collection[str], globs: Iterable[str], trained: Collection[str]) -> None:
    """Raises UsageError for a glob that matches none of ``names``, or one that is ``trained``."""
    for glob in globs:
        matches = [name for name in names if fnmatchcase(name, glob)]
        if not matches:
            raise _matches_nothing("buffers", glob, _letters(glob), names)
        wrong = next((name for name in matches if name in trained), None)
        if wrong is not None:
            raise UsageError(f"{option('buffers', glob)} matches {wrong}, a parameter that the optimizer trains")


def check_renaming(
    names: Collection[str], *, rules: Sequence[tuple[str, re.Pattern[str], str]], key_map: Mapping[str, str]
) -> None:
    """Check the keys of a key map, then each rule, which applies to names as earlier rules have changed them.

    Raises:
        UsageError: a key is not one of ``names``, or a rule matches nothing.
    """
    known = set(names) if key_map else frozenset[str]()
    unknown = [old for old in key_map if old not in known]
    if unknown:
        quoted = [f"'{old}'" for old in unknown]
        text = f"{option('key_map')} renames {listed(quoted)}, which the checkpoint does not hold"
        raise UsageError(f"{text}; {nearest_names(unknown[0], names)}")
    current = [key_map.get(name, name) for name in names] if rules else []
    for text, pattern, replacement in rules:
        if not any(pattern.search(name) for name in current):
            raise _matches_nothing("rename", text, _letters(pattern.pattern), current)
        current = [pattern.sub(replacement, name) for name in current]


def _matches_nothing(name: str, pattern: str, letters: str, names: Collection[str]) -> UsageError:
    return UsageError(f"{option(name, pattern)} matches no tensor; {nearest_names(letters, names)}")


def nearest_names(wanted: str, names: Collection[str]) -> str:
    """The end of a message about a name that no tensor has."""
    if not names:
        return "there is no weight that it could name"
    found = nearest(wanted, names)
    return f"the nearest {'name is' if len(found) == 1 else 'names are'} {', '.join(found)} (see {option('tensors')})"


def _letters(pattern: str) -> str:
    """A pattern without the signs of globs and regular expressions, to compare it with names."""
    return re.sub(r"[\\^$*+?()\[\]{}|]", "", pattern)
