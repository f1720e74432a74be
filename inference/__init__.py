"""From a checkpoint to predictions: load it, predict with it in batches, serve it over HTTP and gRPC.

``load_model``, ``load_predictor`` and ``create_app`` are for your own code; the commands are ``inference.batch`` and
``inference.serving``. torch is imported when one of the functions is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .models.loading import load_model as load_model
    from .models.predictor import load_predictor as load_predictor
    from .serving.__main__ import create_app as create_app

MODULES = {"create_app": "serving.__main__", "load_model": "models.loading", "load_predictor": "models.predictor"}

__all__ = ["create_app", "load_model", "load_predictor"]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
