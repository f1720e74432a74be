"""Texts in configuration and in a checkpoint's settings, whose names a program may import, call or evaluate. Pure.

No list has all such programs. So a text is data only where a known program takes it as data: under the keys that
``known_keys.toml`` lists for a file of that name.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.values import DefaultDict, GlobalRef, Opaque, OrderedDict, StoredTensor, Value
from ckpt_tools.messages.wording import format_count
from ckpt_tools.verification.scan.findings import CouldRunError

UNREAD_SETTINGS_REASON = "a program that reads it may import or call names in it"
"""The reason for a file of settings in a form that is not read."""

_PLAIN_NAME = re.compile(r"[\w /-]*")
"""A key whose value is a number: with a dot, it may be the name of a function in some registry."""

_PICKLED_SUFFIX = "_extra_state"
"""The end of names of tensors of bytes that TransformerEngine unpickles (``set_extra_state`` of its modules)."""

_LETTER = re.compile(r"[^\W\d]")
_WORD = re.compile(r"(torch\.)?[\w+-]*|[\W\d]*")
"""A name without a module, the name of a dtype, or a text without letters, such as a version."""


@dataclass(frozen=True, slots=True)
class KnownFile:
    """The keys of a file that one ``program`` reads, as ``known_keys.toml`` explains them."""

    program: str
    names: re.Pattern[str]
    words: frozenset[str]
    texts: frozenset[str]
    objects: frozenset[str]
    tables: frozenset[str]
    patterns: Mapping[str, re.Pattern[str]]

    @classmethod
    def from_toml(cls, entry: Mapping[str, Any]) -> KnownFile:
        keys = {kind: frozenset(entry.get(kind, ())) for kind in ("words", "texts", "objects", "tables")}
        patterns = {key: re.compile(pattern) for key, pattern in entry.get("patterns", {}).items()}
        return cls(entry["program"], re.compile(entry["files"]), patterns=patterns, **keys)

    def is_data(self, key: str, texts: Iterable[str]) -> bool:
        """Whether ``texts``, which stand under ``key``, are data. The parts of a name may be a list."""
        if key in self.texts:
            return True
        if key in self.patterns:
            return self.patterns[key].fullmatch(".".join(texts)) is not None
        return key in self.words and all(map(_WORD.fullmatch, texts))


_UNKNOWN_FILE = KnownFile.from_toml({"program": "a program that reads it", "files": "", "objects": [""]})


@cache
def _load_known_keys() -> tuple[tuple[KnownFile, ...], frozenset[str]]:
    """The known files, and the keys of settings in pickles under which texts are data."""
    document = tomllib.loads((files(__package__) / "known_keys.toml").read_text())
    return tuple(map(KnownFile.from_toml, document["known"])), frozenset(document["settings"]["texts"])


def explain_unproved_names(path: str, document: Any) -> str | None:
    """The reason why the JSON ``document`` of the file ``path`` is not proved to name no code; None if it is."""
    name = path.rpartition("/")[2].removesuffix(".json")
    known_file = next((known for known in _load_known_keys()[0] if known.names.fullmatch(name)), _UNKNOWN_FILE)
    return _build_reason(known_file.program, list(_find_unlisted_keys(known_file, document)))


def explain_unproved_settings(value: Value, key: str = "") -> str | None:
    """The reason why the ``value`` of a pickle, which stands under ``key``, is not proved to name no code; None if its
    texts are words, or stand under keys of data."""
    return _build_reason("the program that wrote it", list(_find_unlisted_settings(value, key)))


def parse_item_key(fqn: str) -> str:
    """The key of an item of a DCP: the last part of its name, before what Megatron-Core adds for a shard."""
    return fqn.partition("/shard_")[0].rpartition(".")[2]


def explain_pickled_elements(tensors: Mapping[str, tuple[str, int]]) -> str | None:
    """The reason why ``tensors`` of safetensors, dtype and size in bytes by name, are not data; None if they are."""
    names = [
        name for name, (dtype, size) in tensors.items() if name.endswith(_PICKLED_SUFFIX) and dtype == "U8" and size
    ]
    return _build_reason("TransformerEngine", names)


def _build_reason(program: str, keys: list[str]) -> str | None:
    if not keys:
        return None
    others_text = f", and {format_count(len(keys) - 1, 'other')}" if len(keys) > 1 else ""
    return f"{program} may import or call names in it: {keys[0][:100]!r} is not known to hold data{others_text}"


def _find_unlisted_keys(known_file: KnownFile, document: Any) -> Iterator[str]:
    """The keys whose values are not known to be data. What stands in such a value is not examined."""
    pending: list[tuple[dict[str, Any], str | None]] = [({"": document}, None)]
    while pending:
        # ``table`` is the key that the entry stands under if its own keys are free.
        entry, table = pending.pop()
        for key, value in entry.items():
            leaves = list(_iter_leaves(value))
            texts = [leaf for leaf in leaves if isinstance(leaf, str) and _LETTER.search(leaf)]
            is_known = known_file.is_data(key, texts) or (table is not None and known_file.is_data(table, texts))
            if (texts and not is_known) or (table is None and not is_known and not _PLAIN_NAME.fullmatch(key)):
                yield key
            objects = [leaf for leaf in leaves if isinstance(leaf, dict)]
            if key in known_file.tables:
                pending += ((each, key) for each in objects)
            elif key in known_file.objects or table is not None:
                pending += ((each, None) for each in objects)
            elif objects:
                yield key


def _iter_leaves(value: Any) -> Iterator[Any]:
    """``value``, or the items of a list and of lists in it, in order."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += reversed(item)
        else:
            yield item


def _find_unlisted_settings(root: Value, root_key: str) -> Iterator[str]:
    """The key of each text that is not known to be data. Keys themselves are names of parameters.

    A word can name an installed module, or a function that is called without arguments; Python has modules that act
    when they are imported.
    """
    data_keys = _load_known_keys()[1]
    seen_ids, pending = set[int](), [(root_key, root)]
    while pending:
        key, value = pending.pop()
        if key in data_keys:
            continue
        if isinstance(value, str):
            if not _WORD.fullmatch(value) or value in sys.stdlib_module_names:
                yield key
        elif key.endswith(_PICKLED_SUFFIX) and _has_bytes(value):
            yield key
        elif id(value) not in seen_ids:
            seen_ids.add(id(value))
            named_children, children = _split_children(value)
            pending += ((key, item) for item in children)
            pending += ((name if isinstance(name, str) else key, item) for name, item in named_children)


def _has_bytes(value: Value) -> bool:
    """Whether it is a tensor of bytes, or a file of them."""
    if isinstance(value, StoredTensor):
        return value.dtype is DType.UINT8 and value.numel > 0
    if isinstance(value, Opaque) and str(value.ref) in ("io.BytesIO", "_io.BytesIO"):
        return any(isinstance(part, bytes) and part for part in (*value.args, *(value.state or ())))
    return isinstance(value, bytes) and bool(value)


def _split_children(value: Value) -> tuple[Iterable[tuple[Value, Value]], Iterable[Value]]:
    """The named and the other values in ``value``."""
    if isinstance(value, dict):
        attributes = value.attributes if isinstance(value, OrderedDict) else None
        return [*value.items(), *(attributes or {}).items()], (value.factory,) if isinstance(value, DefaultDict) else ()
    if isinstance(value, list | tuple | set | frozenset):
        return (), value
    if isinstance(value, StoredTensor):
        return value.state.items() if isinstance(value.state, dict) else (), ()
    if not isinstance(value, Opaque):
        return (), ()
    if isinstance(value.ref, GlobalRef) and _OPAQUE_TEXT_MODULES.match(value.ref.module):
        # An array of objects has a list of them in its state.
        return (), [part for part in value.state if isinstance(part, list)] if isinstance(value.state, tuple) else ()
    return [*value.pairs, *(value.kwargs or {}).items()], [*value.args, *value.items, value.state]


_OPAQUE_TEXT_MODULES = re.compile(
    r"(torch|numpy|pathlib|datetime|decimal|transformers|accelerate|deepspeed|megatron)\b"
)
"""Modules of the closed list whose objects hold texts of their own form, which these modules do not import: parts of a
path, names of devices, arguments of a Trainer."""


_HYPERPYYAML_TAGS = ("new", "apply", "name", "module")
"""Tags of hyperpyyaml, which SpeechBrain reads."""


def _build_word_pattern(word: str) -> str:
    """A pattern for ``word`` with any of its characters percent-encoded, as tags of YAML may be."""
    return "".join(f"(?:{character}|%{ord(character):02x})" for character in word)


_OBJECT_TAG_PATTERNS = (
    "!!" + _build_word_pattern("python"),
    "!<" + _build_word_pattern("tag:"),
    *(f"!{_build_word_pattern(word)}:" for word in _HYPERPYYAML_TAGS),
)
_OBJECT_TAG = re.compile("|".join(_OBJECT_TAG_PATTERNS), re.I)
_TAG_DIRECTIVE = re.compile(r"%TAG\s+!")


_LOGGING_SECTION = re.compile(r"^[ \t]*\[[ \t]*(handlers|formatters|loggers)[ \t]*\]", re.M)
_LOGGING_CALL_KEY = re.compile(r"^[ \t]*(args|class|kwargs)[ \t]*[=:]", re.M | re.I)


def check_makes_no_objects(text: str) -> None:
    """Raises CouldRunError if a loader of YAML, or of a configuration of logging, would make objects of ``text``. They
    read any text, whatever its name is."""
    if _OBJECT_TAG.search(text) or _TAG_DIRECTIVE.search(text):
        raise CouldRunError("it holds a tag of YAML that makes objects of Python")
    lines = text.replace("\r", "\n")
    if _LOGGING_SECTION.search(lines) and _LOGGING_CALL_KEY.search(lines):
        raise CouldRunError("it is a configuration of logging, whose classes and arguments logging.config evaluates")
