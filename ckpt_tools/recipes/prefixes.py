"""Names without the prefixes that wrappers put before them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ckpt_tools.core import renaming
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.names import MODEL_PREFIX, collect_model_names, has_model_attribute_prefix
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.transforms import TransformResult

AUTO_PREFIX = "auto"


def strip_prefix(manifest: Manifest, prefix: str, are_known: Callable[[Collection[str]], bool]) -> TransformResult:
    """Names without ``prefix``; for ``auto`` without the parts of wrappers, and without a ``model.`` that all names
    share if the model's own names do not have it.

    Raises:
        UsageError: no name has the prefix.
    """
    if prefix != AUTO_PREFIX:
        return renaming.strip_prefix(manifest, prefix)
    bare, _ = renaming.strip_wrappers(manifest)
    if not has_model_attribute_prefix(collect_model_names(bare), are_known):
        return bare, ()
    why = f"all names begin with it; {format_option('strip', AUTO_PREFIX)} takes it off"
    return renaming.strip_prefix(bare, MODEL_PREFIX)[0], (
        Note(Outcome.DROPPED, f"the prefix {MODEL_PREFIX}", why, asked=True),
    )
