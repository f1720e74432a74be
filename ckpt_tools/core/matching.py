"""Checks that every name and pattern in the options matches a tensor. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import UsageError
from ckpt_tools.messages.wording import find_nearest, join_names


def is_selected(fqn: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a name matches a glob of ``include`` (none: any does) and none of ``exclude``."""
    is_included = not include or any(fnmatchcase(fqn, glob) for glob in include)
    return is_included and not any(fnmatchcase(fqn, glob) for glob in exclude)


def check_globs_match(names: Collection[str], **globs_by_option: Iterable[str]) -> None:
    """Raises UsageError for a glob that matches none of ``names``."""
    for name, globs in globs_by_option.items():
        for glob in globs:
            if not any(fnmatchcase(each, glob) for each in names):
                raise _make_no_match_error(name, glob, _strip_pattern_syntax(glob), names)


def check_buffer_globs(names: Collection[str], globs: Iterable[str], trained: Collection[str]) -> None:
    """Raises UsageError for a glob that matches none of ``names``, or one that is ``trained``."""
    for glob in globs:
        matches = [name for name in names if fnmatchcase(name, glob)]
        if not matches:
            raise _make_no_match_error("buffers", glob, _strip_pattern_syntax(glob), names)
        trained_match = next((name for name in matches if name in trained), None)
        if trained_match is not None:
            raise UsageError(
                f"{format_option('buffers', glob)} matches {trained_match}, a parameter that the optimizer trains; "
                f"leave the optimizer out by {format_option('state', 'model')} or the format of {format_option('to')}"
            )


def check_renaming(
    names: Collection[str], *, rules: Sequence[tuple[str, re.Pattern[str], str]], key_map: Mapping[str, str]
) -> None:
    """Check the keys of a key map, then each rule, which applies to names as earlier rules have changed them.

    Raises:
        UsageError: a key is not one of ``names``, or a rule matches nothing.
    """
    known_names = set(names) if key_map else frozenset[str]()
    unknown = [old for old in key_map if old not in known_names]
    if unknown:
        quoted = [f"'{old}'" for old in unknown]
        text = f"{format_option('key_map')} renames {join_names(quoted)}, which the checkpoint does not hold"
        raise UsageError(f"{text}; {suggest_names(unknown[0], names)}")
    current_names = [key_map.get(name, name) for name in names] if rules else []
    for text, pattern, replacement in rules:
        if not any(pattern.search(name) for name in current_names):
            raise _make_no_match_error("rename", text, _strip_pattern_syntax(pattern.pattern), current_names)
        current_names = [pattern.sub(replacement, name) for name in current_names]


def _make_no_match_error(name: str, pattern: str, plain_pattern: str, names: Collection[str]) -> UsageError:
    return UsageError(f"{format_option(name, pattern)} matches no tensor; {suggest_names(plain_pattern, names)}")


def suggest_names(unknown_name: str, names: Collection[str]) -> str:
    """The end of a message about a name that no tensor has."""
    if not names:
        return "there is no weight that it could name"
    suggestions = find_nearest(unknown_name, names)
    names_are = "name is" if len(suggestions) == 1 else "names are"
    return f"the nearest {names_are} {', '.join(suggestions)} (see {format_option('tensors')})"


def _strip_pattern_syntax(pattern: str) -> str:
    """A pattern without the signs of globs and regular expressions, to compare it with names."""
    return re.sub(r"[\\^$*+?()\[\]{}|]", "", pattern)
