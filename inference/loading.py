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
    model = architecture_of(architecture, _folder(url)).build(_folder(url))
    model = model.to(device=device, dtype=dtype)
    try:
        ckpt_tools.load_into(model, None, url, storage_options=storage_options)
    except UsageError as error:
        raise FormatError(f"{url}: {error.message}") from error
    return model.eval()


def _folder(url: str | Path) -> Path | None:
    """The local folder of a checkpoint, or of its file. What lies beside a remote one is not looked at."""
    if "://" in str(url):
        return None
    path = Path(url)
    return path if path.is_dir() else path.parent
