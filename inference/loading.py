"""From a checkpoint of any format to a model that can predict: consolidated or sharded, local or remote.

The weights are read straight into the module, each byte once, and no pickle is executed. Names and shapes are strict:
a tensor too many or too few is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ckpt_tools
from ckpt_tools.errors import FormatError, UsageError

from .architectures import architecture_of
from .beside import folder_beside

if TYPE_CHECKING:
    import torch
    from torch import nn


def load_model(
    url: str | Path,
    *,
    architecture: str | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    storage_options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The model with the weights of the checkpoint at ``url``, in evaluation mode.

    Args:
        url: A path, or a URL of a store: a safetensors or torch file, a Hugging Face folder, or any sharded checkpoint.
        architecture: Which module the weights belong in, as :mod:`inference.architectures` has it. Default: what
            ``config.json`` beside the weights says, else the training package's own model.
        dtype: Of the parameters. Default: the architecture's own. Values are cast.
        device: Where the model is to be.
        storage_options: How the store is reached (credentials, ``endpoint_url``). Only for URLs.

    Raises:
        UsageError: there is no such architecture. FormatError: the checkpoint cannot be read, or is of another model.
        CkptError: as ``ckpt_tools.load_into`` says.
    """
    with folder_beside(url, storage_options) as folder:
        built = architecture_of(architecture, folder).build(folder, dtype)
    return filled(built.to(device=device), url, storage_options)


def filled(model: nn.Module, url: str | Path, storage_options: Mapping[str, Any] | None) -> nn.Module:
    """A model like ``model``, which may be that very one, with the weights of the checkpoint at ``url``. Raises as
    ``load_model``."""
    try:
        ckpt_tools.load_into(model, None, url, storage_options=storage_options)
    except UsageError as error:
        renamed = _by_names_of_transformers(model, url, storage_options)
        if renamed is None:
            raise FormatError(f"{url}: {error.message}") from error
        return renamed
    return model.eval()


def _by_names_of_transformers(
    model: Any, url: str | Path, storage_options: Mapping[str, Any] | None
) -> nn.Module | None:
    """The model, if its weights are there by the names that transformers writes, and all of them.

    These differ from the names of the modules where a class was rewritten after its first checkpoints. transformers
    has the rules. It takes the tensors that are given to it without copying them.
    """
    if not hasattr(model, "_from_config"):
        return None
    with ckpt_tools.open(url, storage_options=storage_options) as checkpoint:
        found = {name: checkpoint[name].torch() for name in checkpoint}
    made, report = type(model).from_pretrained(
        None, config=model.config, state_dict=found, dtype=model.dtype, output_loading_info=True
    )
    if any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")):
        return None
    return made.to(device=model.device).eval()
