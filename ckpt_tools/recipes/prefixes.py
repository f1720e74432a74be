"""Names without the prefixes that wrappers put before them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ckpt_tools.core import transforms
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.names import MODEL, is_of_model, model_names
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import option
from ckpt_tools.core.transforms import Transformed

AUTO = "auto"


def strip(manifest: Manifest, prefix: str, is_known: Callable[[Collection[str]], bool]) -> Transformed:
    """Names without ``prefix``; for ``auto`` without the parts of wrappers, and without a ``model.`` that all names
    share if the model's own names do not have it.

    Raises:
        UsageError: no name has the prefix.
    """
    if prefix != AUTO:
        return transforms.without_prefix(manifest, prefix)
    bare, _ = transforms.without_wrappers(manifest)
    if not is_of_model(model_names(bare), is_known):
        return bare, ()
    why = f"all names begin with it; {option('strip', AUTO)} takes it off"
    return transforms.without_prefix(bare, MODEL)[0], (Note(Outcome.DROPPED, f"the prefix {MODEL}", why, asked=True),)
