"""From a checkpoint to predictions: load it, predict with it in batches, serve it over HTTP and gRPC.

``load_model`` and ``load_predictor`` are for your own code; the commands are ``inference.batch`` and
``inference.serve``. Nothing of torch is imported before one of them is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loading import load_model as load_model
    from .predictor import load_predictor as load_predictor

__all__ = ["load_model", "load_predictor"]


def __getattr__(name: str) -> Any:
    if name == "load_model":
        from .loading import load_model

        return load_model
    if name == "load_predictor":
        from .predictor import load_predictor

        return load_predictor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
