"""Open two checkpoints as models of transformers, one after the other, and compute the same inputs with both.

Everything is computed in fp32: without rounding of its own, the same weights give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ckpt_tools
from ckpt_tools.arguments import api_function
from ckpt_tools.errors import FormatError, UnsupportedError, UsageError

from ..common.errors import translate_file_errors
from ..common.garbage_collection import collect_rarely
from ..models.architectures import HUGGING_FACE
from ..models.config_folder import CONFIG, find_quantization, open_config_folder, read_config
from ..models.hugging_face import ConfigSizes
from ..models.loading import load_model
from ..models.options import DEFAULT_READING, ModelOptions, TensorOptions
from .report import DifferenceLimits, ForwardReport, LayerOutputs, make_report

NUM_ROWS, NUM_TOKENS, SEED = 4, 32, 0
COMPARED_ENTRIES = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers")
"""Entries of ``config.json`` that two models must share, so that one can be compared with the other."""

DEFAULT_LIMITS = DifferenceLimits()


@api_function
@collect_rarely()
def compare_forward(
    src: str | Path,
    dst: str | Path,
    *,
    reading: TensorOptions = DEFAULT_READING,
    limits: DifferenceLimits = DEFAULT_LIMITS,
    device: str | None = "cpu",
) -> ForwardReport:
    """Compute the same random inputs with the models of two checkpoints, and say how far the results lie apart.

    The inputs are 4 rows of 32 tokens, or 4 images, drawn with a fixed seed. One model is in memory at a time, in fp32.
    Weights that ``config.json`` calls quantized are dequantized.

    Args:
        src: The checkpoint that is taken for right, in any format.
        dst: The other one. Both need a ``config.json`` of transformers beside them.
        reading: How the tensors of ``src`` are named and chosen, as for ``load_model``. Its ``config`` is the folder of
            ``config.json`` for each of the two that has none of its own.
        limits: The most by which they may differ.
        device: The torch device. None: the first GPU if there is one, else the CPU.

    Raises:
        UsageError: the models are different ones. UnsupportedError: they are not models of transformers with logits.
        FormatError: there is no ``config.json``, ``src`` computes no numbers, or as ``load_model``.

    Example:
        >>> from inference.forward.compare import compare_forward
        >>> report = compare_forward("hub", "hub")  # doctest: +SKIP
        >>> report.same, report.noise  # doctest: +SKIP
        (True, 0.0)
    """
    sides = [ComparedModel.find(src, reading), ComparedModel.find(dst, TensorOptions(config=reading.config))]
    for name in COMPARED_ENTRIES:
        first, second = (side.config.get(name) for side in sides)
        if first != second:
            raise UsageError(
                f"{src} and {dst} are different models, which cannot be compared: {name} in {CONFIG} is {first} and "
                f"{second}"
            )
    torch_device = ModelOptions(device=device).get_torch_device()
    model = sides[0].load(torch_device)
    kind, inputs = type(model).__name__, draw_inputs(model)
    reference, again = run_model(model, inputs), run_model(model, inputs)
    del model
    other = run_model(sides[1].load(torch_device), inputs)
    shapes = ", ".join(f"{name} {list(each.shape)}" for name, each in inputs.items())
    return make_report(kind, shapes, reference, again, other, limits)


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """A checkpoint, how it is read, and the entries of its ``config.json``, with those of its text model."""

    url: str
    reading: TensorOptions
    config: Mapping[str, Any]

    @classmethod
    def find(cls, url: str | Path, reading: TensorOptions) -> ComparedModel:
        """Raises FormatError if there is no ``config.json``, UnsupportedError if it is not one of transformers, and
        CkptError if there is no checkpoint."""
        source = ckpt_tools.inspect(url).source
        with open_config_folder(source, None, None) as folder:
            if folder is not None:
                reading = replace(reading, config=None)
        with open_config_folder(source, None, reading.config) as folder:
            if folder is None:
                raise FormatError(
                    f"there is no {CONFIG} beside {url}, which says what the model is; give its folder with --config"
                )
            config = read_config(folder)
            if "model_type" not in config:
                raise UnsupportedError(
                    f"{CONFIG} of {url} names the architecture {config.get('architecture')!r}; only models of "
                    "transformers have layers and logits that can be compared"
                )
            text_config = config.get("text_config")
            # Quantized or not, its forward pass is that of floating-point weights.
            plain = replace(reading, dequantize=reading.dequantize or find_quantization(folder) is not None)
        return cls(source, plain, {**text_config, **config} if isinstance(text_config, dict) else config)

    def load(self, device: torch.device) -> Any:
        """The model in fp32. Raises as ``load_model``."""
        keywords = {name: getattr(self.reading, name) for name in TensorOptions.__dataclass_fields__}
        return load_model(self.url, architecture=HUGGING_FACE, dtype=torch.float32, device=device, **keywords)


def draw_inputs(model: Any) -> dict[str, Tensor]:
    """Random inputs: ``input_ids`` int64 [4, 32], fewer if the model has fewer positions, or ``pixel_values`` fp32
    [4, channels, height, width]. Raises UnsupportedError for a model that takes others."""
    sizes = ConfigSizes.from_config(model.config)
    name, kind = model.main_input_name, type(model).__name__
    specs = {spec.name: spec for spec in sizes.list_input_specs(signature(model.forward).parameters)}
    generator = torch.Generator().manual_seed(SEED)
    shape = specs[name].shape[1:] if name in specs else ()
    if name == "pixel_values" and min(shape, default=0) > 0:
        return {name: torch.randn(NUM_ROWS, *shape, generator=generator)}
    if name != "input_ids" or model.config.is_encoder_decoder or name not in sizes.bounds:
        raise UnsupportedError(f"a {kind} is not a model of tokens, or of images of one size, alone")
    limit = sizes.with_positions(model, [name]).max_tokens.get(name, NUM_TOKENS)
    token_shape = (NUM_ROWS, min(NUM_TOKENS, limit))
    return {name: torch.randint(sizes.bounds[name], token_shape, generator=generator)}


def run_model(model: Any, inputs: Mapping[str, Tensor]) -> LayerOutputs:
    """One forward pass. Raises UnsupportedError if it gives no states of layers, or no logits."""
    call: Callable[..., Any] = model
    device_inputs = {name: each.to(model.device) for name, each in inputs.items()}
    settings = {"use_cache": False} if "use_cache" in signature(model.forward).parameters else {}
    with translate_file_errors("the model cannot be run"), torch.inference_mode():
        answer = call(**device_inputs, output_hidden_states=True, return_dict=True, **settings)
    states, logits = answer.get("hidden_states"), answer.get("logits")
    if not states or logits is None:
        raise UnsupportedError(f"a {type(model).__name__} gives no {'logits' if states else 'states of its layers'}")
    return LayerOutputs(tuple(each.float().cpu() for each in states), logits.float().cpu())
