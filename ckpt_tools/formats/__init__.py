"""One package a format: headers to a manifest, a manifest to a layout.

``ckpt_tools.formats`` is also a verb of the public API, so this package can be called. Python puts a package in the
place of a function of the same name as soon as somebody imports it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt_tools.formats.registry import FormatInfo


class _Callable(ModuleType):
    def __call__(self) -> tuple[FormatInfo, ...]:
        from ckpt_tools.formats.registry import table

        return table()


sys.modules[__name__].__class__ = _Callable
