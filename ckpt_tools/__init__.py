"""ckpt-tools: open any sharded training checkpoint and write any other.

The public API is the verbs of the command line, ``inspect``, ``plan``, ``convert``, ``reshard``, ``consolidate``,
``verify``, ``diff``, ``checksum``, ``sign``, ``scan``, ``clean`` and ``formats``, and the errors they raise. They are
loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_tools.api import (
        checksum,
        clean,
        consolidate,
        convert,
        diff,
        formats,
        inspect,
        open,
        plan,
        reshard,
        scan,
        sign,
        verify,
    )
    from ckpt_tools.errors import CkptError
    from ckpt_tools.stores.claims import claim
    from ckpt_tools.torch.load_into import load_into
    from ckpt_tools.torch.storage_reader import storage_reader

__version__ = "0.1.0"

_HOMES = {
    "CkptError": "ckpt_tools.errors",
    "claim": "ckpt_tools.stores.claims",
    "load_into": "ckpt_tools.torch.load_into",
    "storage_reader": "ckpt_tools.torch.storage_reader",
}
"""Where names are that are no verbs."""

__all__ = [
    "CkptError",
    "__version__",
    "checksum",
    "claim",
    "clean",
    "consolidate",
    "convert",
    "diff",
    "formats",
    "inspect",
    "load_into",
    "open",
    "plan",
    "reshard",
    "scan",
    "sign",
    "storage_reader",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "ckpt_tools.api")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
