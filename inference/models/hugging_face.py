"""Models of transformers: the class that ``config.json`` names, and the task that fits it.

No code of the folder is run (``trust_remote_code``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ckpt_tools.errors import FormatError, UsageError

from ..common.errors import translate_file_errors
from .architectures import Architecture, import_library
from .config_folder import CONFIG, read_config
from .positions import list_position_limits
from .prediction import find_device
from .results import BATCH, Array, TensorSpec
from .task import Task, TaskOptions
from .tensors import HOW_TO_BUILD, Network, TensorTask, make_tensor_task
from .uninitialized import SkipInitialisation

SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "image_size", "patch_size")
"""Sizes in the configurations of transformers, under their common names."""


def build_model(architecture: Architecture, folder: Path | None, dtype: torch.dtype | None) -> nn.Module:
    """The class in ``architectures`` of ``config.json``, with transformers' defaults and without weights."""
    config_entries = read_config(folder)
    if folder is None or "model_type" not in config_entries:
        raise FormatError(f"there is no {CONFIG} of transformers beside the weights, which says what the model is")
    transformers = import_library("transformers", "transformers")
    names = config_entries.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        way = 'add it there, such as "architectures": ["LlamaForCausalLM"]'
        raise FormatError(f"{folder / CONFIG} does not name one class in architectures; {way}")
    model_class = getattr(transformers, str(names[0]), None)
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        raise FormatError(
            f"{folder / CONFIG} names {names[0]}, which this version of transformers does not have; a class that "
            "comes with the checkpoint is code, and is not run"
        )
    with translate_file_errors(f"{folder / CONFIG} is not usable"):
        config = transformers.AutoConfig.from_pretrained(folder)
        _check_sizes(config)
        with SkipInitialisation():
            # As transformers: a later cast would change tables that it keeps in fp32.
            return cast(Any, model_class)._from_config(config, **({} if dtype is None else {"dtype": dtype}))


def _check_sizes(config: Any) -> None:
    """Raises ValueError for a size that makes a model of no use, which transformers may build."""
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        for name in SIZES:
            value = getattr(part, name, None)
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, str) or (isinstance(each, int | float) and each <= 0):
                    raise ValueError(f"{name} is {value!r}, and not a number from 1")


def make_task(model: Any, options: TaskOptions) -> Task:
    from . import encoders, image_classifiers, texts

    kind, folder = type(model).__name__, options.folder
    assert folder is not None
    if options.model.embeddings and kind.endswith("Model") and not kind.endswith("LMHeadModel"):
        return encoders.make_encoder_task(model, folder, passes=options.make_passes())
    if kind.endswith("ForImageClassification"):
        return image_classifiers.make_hf_classifier(model, folder, options.labels, passes=options.make_passes())
    if kind.endswith("ForSequenceClassification"):
        return texts.TextClassifier.from_folder(model, folder, options.labels, passes=options.make_passes())
    if kind.endswith(("ForCausalLM", "LMHeadModel")):
        return texts.TokenGenerator.from_folder(
            model, folder, options.make_passes(), max_new_tokens=options.model.max_new_tokens
        )
    return _make_tensor_task(model, options)


def _make_tensor_task(model: Any, options: TaskOptions) -> TensorTask:
    """Any other model, by the arguments of its own ``forward``; outputs are the tensors of its answer. Raises
    UsageError if it needs others than are known here."""
    args, kind = signature(model.forward).parameters, type(model).__name__
    sizes = ConfigSizes.from_config(model.config)
    inputs = tuple(sizes.list_input_specs(args))
    sizes = sizes.with_positions(model, [spec.name for spec in inputs])
    names = {spec.name for spec in inputs}
    required = [each.name for each in args.values() if each.default is Parameter.empty and each.kind.name[:3] != "VAR"]
    missing = [name for name in (*required, model.main_input_name) if name not in names]
    if missing:
        raise UsageError(f"a {kind} takes {missing[0]}, which is not known here; {HOW_TO_BUILD}")
    settings = {"return_dict": True} | ({"use_cache": False} if "use_cache" in args else {})

    def call(arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: each for name, each in model(**arguments, **settings).items() if isinstance(each, Tensor)}

    # Random boxes would have their corners in the wrong order.
    bounds = {**sizes.bounds, "bbox": 1}
    network = Network(
        inputs, call, find_device(model), model.dtype, bounds=bounds, check_row=sizes.check_row, gives_list=False
    )
    return make_tensor_task(network, options.make_passes())


TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Inputs with one number for each token of one text."""


@dataclass(frozen=True, slots=True)
class ConfigSizes:
    """Sizes of a configuration of transformers. ``bounds`` is what integers are below, ``max_tokens`` the most
    tokens; both by the name of an input."""

    config: Any
    vision: Any
    bounds: Mapping[str, int]
    max_tokens: Mapping[str, int]

    @classmethod
    def from_config(cls, config: Any) -> ConfigSizes:
        text = getattr(config, "text_config", config)
        decoder = getattr(config, "decoder", text)
        ids = ("input_ids", text, "max_position_embeddings"), ("decoder_input_ids", decoder, "max_target_positions")
        words = {name: getattr(each, "vocab_size", None) for name, each, _ in ids}
        words["token_type_ids"] = getattr(text, "type_vocab_size", None)
        words["bbox"] = getattr(text, "max_2d_position_embeddings", None)
        limits = {
            name: getattr(each, limit, None) or getattr(each, "max_position_embeddings", None)
            for name, each, limit in ids
        }
        bounds, max_tokens = ({name: size for name, size in sizes.items() if size} for sizes in (words, limits))
        return cls(config, getattr(config, "vision_config", config), bounds, max_tokens)

    def with_positions(self, model: Any, names: Sequence[str]) -> ConfigSizes:
        """With the number of positions in the tables of a model of one text, which may begin behind the padding."""
        if "input_ids" not in names or not set(names) <= set(TOKEN_INPUTS):
            return self
        stated = [self.max_tokens["input_ids"]] if "input_ids" in self.max_tokens else []
        limits = [*stated, *list_position_limits(model, names)]
        return replace(self, max_tokens={**self.max_tokens, "input_ids": min(limits)}) if limits else self

    def list_input_specs(self, parameters: Mapping[str, object]) -> Iterator[TensorSpec]:
        has_types = self.bounds.get("token_type_ids", 0) > 1
        for name in parameters:
            is_of_text = name in TOKEN_INPUTS and "input_ids" in parameters and (name != "token_type_ids" or has_types)
            if is_of_text or (name == "decoder_input_ids" and self.config.is_encoder_decoder):
                yield TensorSpec(name, "INT64", (BATCH, BATCH))
            elif name == "bbox":
                yield TensorSpec(name, "INT64", (BATCH, BATCH, 4))
            elif name == "pixel_values":
                yield TensorSpec(name, "FP32", (BATCH, getattr(self.vision, "num_channels", 3), *self._image_size))
            elif name == "input_values":
                yield TensorSpec(name, "FP32", (BATCH, BATCH))
            elif name == "input_features":
                yield TensorSpec(name, "FP32", (BATCH, *self._sound_size))

    @property
    def _image_size(self) -> tuple[int, ...]:
        size = getattr(self.vision, "image_size", None)
        if size is None:
            return (BATCH, BATCH)
        return (size, size) if isinstance(size, int) else tuple(size)

    @property
    def _sound_size(self) -> tuple[int, int]:
        """Whisper's frames are two for each position of its encoder."""
        if hasattr(self.config, "num_mel_bins") and hasattr(self.config, "max_source_positions"):
            return self.config.num_mel_bins, 2 * self.config.max_source_positions
        return (BATCH, BATCH)

    def check_row(self, row: Mapping[str, Array]) -> None:
        """Raises FormatError for tokens that the model has no place for, which on a GPU would end the process."""
        for name, most in self.bounds.items():
            if name in row and not 0 <= row[name].min() <= row[name].max() < most:
                raise FormatError(f"{name} has numbers that are not from 0 to {most - 1}")
        for name, most in self.max_tokens.items():
            if name in row and len(row[name]) > most:
                raise FormatError(f"{name} has {len(row[name]):,} tokens; the model takes at most {most:,}")
        lengths = {name: len(row[name]) for name in (*TOKEN_INPUTS, "bbox") if name in row}
        if len({*lengths.values()}) > 1:
            raise FormatError(f"{' and '.join(lengths)} have different numbers of tokens")
