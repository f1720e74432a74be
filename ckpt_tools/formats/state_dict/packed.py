"""A tree of state for a format that can store tensors by name and a text, and nothing else.

The text is base64 of a pickle of inert values: where each entry stood in the tree, and the entries that are not
tensors. Reading it runs nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.core.value_refs import references
from ckpt_tools.errors import MalformedError
from ckpt_tools.formats.state_dict.build import Entries
from ckpt_tools.formats.state_dict.parse import MAX_PATH_PARTS, Leaves, TensorLeaf, manifest_of
from ckpt_tools.serialization.pickle.load import dumps, loads


def packed(entries: Entries) -> tuple[str, tuple[Note, ...]]:
    """All of ``entries`` but their tensors as a text. Objects that hold tensors inside have no form here."""
    lost = [name for name, value in entries.objects.items() if next(references(value), None) is not None]
    objects = {name: value for name, value in entries.objects.items() if name not in lost}
    data = dumps({"paths": dict(entries.paths), "objects": objects})
    notes = (Note(Outcome.DROPPED, ", ".join(lost), "it contains tensors; torch and dcp keep it", len(lost)),)
    return base64.b64encode(data).decode(), notes if lost else ()


def unpacked(
    text: str,
    tensors: Mapping[str, TensorLeaf],
    ties: Mapping[str, str],
    options: ReadOptions,
    *,
    format_name: str,
    where: str,
) -> Manifest:
    """The manifest of ``tensors`` and of the ``text`` that ``packed`` made. ``ties`` maps other names of tensors to
    their names in ``tensors``; ``where`` names the text in messages.

    Raises:
        FormatError: ``packed`` did not make this text, or it does not fit the tensors. UsageError: a key of ``options``
        leads nowhere.
    """
    paths, objects = _parts(text, where)
    for alias, owner in ties.items():
        if owner not in tensors or alias in tensors or alias in objects:
            raise MalformedError(f"it is tied to {owner!r}, which cannot be", key=alias)
    names = dict.fromkeys((*tensors, *ties))
    paths = {name: path for name, path in paths.items() if name in names or name in objects}
    paths |= {name: (name,) for name in names if name not in paths}
    return manifest_of(
        Leaves(paths, tensors, objects),
        format_name=format_name,
        model_key=options.model_key,
        optim_key=options.optim_key,
        ties=ties,
    )


def _parts(text: str, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        found = loads(base64.b64decode(text, validate=True), path=where)
    except ValueError as error:
        raise MalformedError(f"its {where} is not valid base64") from error
    paths, objects = [found.get(part) if isinstance(found, dict) else None for part in ("paths", "objects")]
    if not isinstance(paths, dict) or not isinstance(objects, dict) or not objects.keys() <= paths.keys():
        raise MalformedError(f"its {where} does not contain a state tree")
    if not all(type(name) is str for name in paths) or not all(map(_is_path, paths.values())):
        raise MalformedError(f"its {where} contains names or paths of the wrong type")
    return paths, objects


def _is_path(path: Any) -> bool:
    is_tuple = isinstance(path, tuple) and 0 < len(path) <= MAX_PATH_PARTS
    return is_tuple and all(type(part) in (str, int) for part in path)
