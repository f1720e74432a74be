"""Loading: from a checkpoint of any format, consolidated or sharded, local or remote, to a module with its weights.

The weights are read straight into the module, each byte once, and no pickle is executed. Names and shapes are strict:
a tensor too many or too few is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import ckpt_tools
from ckpt_tools.arguments import api_function, expand_keywords
from ckpt_tools.errors import FormatError, UnsupportedError, UsageError

from ..common.garbage_collection import collect_rarely
from .architectures import (
    ASSUMED_NOTICE,
    SCRIPTED,
    Architecture,
    find_architecture,
    is_program,
    refuse_tensor_options,
    refuse_unnamed_program,
)
from .checkpoint_files import CheckpointFiles, read_consistently
from .config_folder import open_config_folder, refuse_adapter
from .options import TensorKeywords, TensorOptions
from .task import import_model_source

if TYPE_CHECKING:
    import torch
    from torch import nn

ADAPTER_NAME_PART = ".lora_A."
QUANTIZED_NAMES = re.compile(r"[._](weight_scale|scale_inv|qweight|qzeros|weight_packed|proj_blocks|absmax|SCB)\b")
"""Names of the tensors without which quantized weights have no meaning, by the libraries that quantize."""


@api_function
@expand_keywords(TensorKeywords, TensorOptions)
@collect_rarely()
def load_model(
    url: str | Path,
    *,
    model: str | nn.Module | None = None,
    architecture: str | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    storage_options: Mapping[str, Any] | None = None,
    **options: Unpack[TensorKeywords],
) -> nn.Module:
    """The model with the weights of the checkpoint at ``url``, in evaluation mode.

    Each byte of a weight is read once, straight into the model. Every name and every shape has to fit.

    Args:
        url: A path, or a URL of a store: a safetensors or torch file, a Hugging Face folder, or a sharded checkpoint.
        model: The module that the weights belong in. A text names it: ``"timm:NAME"``, ``"hf"``, ``"ours"``,
            ``"torchvision:resnet18?num_classes=10"``, or a function of yours as ``"module:function"``. A module, also
            one on the meta device, is filled itself. ``"torch.export"`` and ``"torchscript"`` say that the file at
            ``url`` is such a program, and that you trust it: it is run. Default: what ``config.json`` beside the
            weights says, else the training package's own model.
        architecture: A text as for ``model``, by the name that it has in ``load_predictor`` and in the commands.
        dtype: dtype of the parameters. Default: the architecture's own. Values are cast.
        device: Device of the model.
        model_key: Key of the model in a tree, such as ``"app.model"``. Default: found by its content.
        include, exclude, rename, key_map: Which tensors of the checkpoint are taken, and their names in the model; as
            for ``ckpt_tools.convert``. ``rename="^model[.]="`` takes a prefix off.
        recipe, inverse: A recipe that maps the checkpoint's tensors to the model's; as for ``ckpt_tools.convert``.
        dequantize: Make floating-point weights of quantized ones; as for ``ckpt_tools.convert``. Without it, these are
            refused.
        config: A folder with ``config.json`` and its companions. Default: found beside the weights.
        storage_options: Options of the store (credentials, ``endpoint_url``). Only for URLs.

    Returns:
        The module. Parameters and buffers have the shapes that the architecture gives them, and are on ``device``.

    Raises:
        UsageError: there is no such architecture, its package is not installed, or options do not fit.
        FormatError: the checkpoint cannot be read, or is of another model: names of tensors that are missing, that the
            model does not have, or that have another shape are listed.
        StoreError: files of the checkpoint changed while they were read, each time of several.
        CkptError: as ``ckpt_tools.load_into`` says.

    Example:
        >>> import inference, torch
        >>> model = inference.load_model("run", model=torch.nn.ModuleDict({"encoder": torch.nn.Linear(8, 4)}))
        >>> model["encoder"].weight[1, :3].tolist()
        [8.0, 9.0, 10.0]
    """
    if architecture is not None:
        if model is not None:
            raise UsageError("give either model or architecture")
        model = architecture
    reading, config = TensorOptions(**options).to_keywords(), options.get("config")
    if isinstance(model, str) and is_program(model):
        from .programs import load_program

        kind = Architecture.parse(model).library
        refuse_tensor_options(kind, reading, dtype)
        return read_consistently(
            url, storage_options, lambda _: load_program(kind, url, device, storage_options).module
        )
    refuse_unnamed_program(url)

    def load_once(files: CheckpointFiles) -> nn.Module:
        source, is_assumed = files.weights.url, False
        if model is None or isinstance(model, str):
            with open_config_folder(source, storage_options, config) as folder:
                parsed_architecture = find_architecture(model, folder, source, storage_options)
                is_assumed = parsed_architecture.is_assumed
                parsed_architecture.check_not_quantized(folder, dequantize=options.get("dequantize", False))
                model_source = import_model_source(parsed_architecture)
                empty_model = model_source.build_model(parsed_architecture, folder, dtype).to(device=device)
        else:
            from .uninitialized import allocate_meta_tensors

            empty_model = allocate_meta_tensors(model, device).to(device=device, dtype=dtype)
        return fill_model(empty_model, source, storage_options, reading, is_assumed=is_assumed)

    return read_consistently(url, storage_options, load_once, config)


def fill_model(
    model: nn.Module,
    url: str | Path,
    storage_options: Mapping[str, Any] | None,
    reading: Mapping[str, Any] | None = None,
    *,
    is_assumed: bool = False,
) -> nn.Module:
    """``model`` (or a copy, if transformers has to rename tensors) with the weights of the checkpoint at ``url``.
    ``reading`` are options of ``ckpt_tools.load_into``. Raises as ``load_model``."""
    try:
        ckpt_tools.load_into(model, None, url, storage_options=storage_options, **(reading or {}))
    except UsageError as error:
        if "does not fit the model" not in error.message:
            raise
        refuse_adapter(url, storage_options)
        renamed = None if reading else _load_by_transformers_names(model, url, storage_options)
        if renamed is None:
            advice = _advise_on_names(error.message) or (f"; {ASSUMED_NOTICE}" if is_assumed else "")
            raise FormatError(f"{url}: {error.message}{advice}") from error
        return renamed
    except UnsupportedError as error:
        if "TorchScript" in error.message:
            error.message += f"; or name {SCRIPTED} as its architecture if you trust it, which runs it"
        raise
    if not reading:
        _check_digests(model, url, storage_options)
    return model.eval()


def _check_digests(model: nn.Module, url: str | Path, storage_options: Mapping[str, Any] | None) -> None:
    """Raises FormatError if a tensor is not that of the list of digests that lies with the checkpoint. One that was
    cast is not compared. XXH3 takes 25 GB a second; nothing is read again."""
    from xxhash import xxh3_128_hexdigest

    recorded = ckpt_tools.recorded_digests(url, storage_options=storage_options)
    for name, tensor in model.state_dict().items() if recorded else ():
        wanted = recorded.get(name)
        if wanted is None or (f"torch.{wanted.dtype.value}", wanted.shape) != (str(tensor.dtype), tuple(tensor.shape)):
            continue
        if xxh3_128_hexdigest(view_bytes(tensor)) != wanted.xxh3_128:
            raise FormatError(
                f"{url}: {name} is not as the list of digests says that lies with it; ckpt-tools verify compares all"
            )


def view_bytes(tensor: torch.Tensor) -> Any:
    """The elements of a tensor, row-major, as an array of bytes."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _advise_on_names(message: str) -> str:
    """The end of an error whose names are known: those of an adapter, or of quantized weights."""
    if ADAPTER_NAME_PART in message:
        return "; they are those of an adapter of PEFT, which ckpt-tools merge-lora merges into its base model"
    is_quantized = QUANTIZED_NAMES.search(message) is not None
    return "; they are those of quantized weights; load them with --dequantize" if is_quantized else ""


def _load_by_transformers_names(
    model: Any, url: str | Path, storage_options: Mapping[str, Any] | None
) -> nn.Module | None:
    """The model loaded by transformers, if all weights have the names that transformers writes. Those differ from the
    modules' names where a class was rewritten after its first checkpoints. transformers has the rules, and takes the
    given tensors without copying them."""
    if not hasattr(model, "_from_config"):
        return None
    with ckpt_tools.open(url, storage_options=storage_options) as checkpoint:
        # transformers would cast these as well, without their scales.
        if any(each.dtype_name.startswith(("float8", "float6", "float4", "int8")) for each in checkpoint.values()):
            return None
        tensors = {name: checkpoint[name].torch() for name in checkpoint}
    loaded, report = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=tensors,
        dtype=model.dtype,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    if any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")):
        return None
    return loaded.to(device=model.device).eval()
