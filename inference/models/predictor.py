"""Predictors: a loaded model with its preprocessing, used by the batch command and the service.

A :class:`Predictor` has the inputs, outputs and weights of a model; its :class:`Task` maps inputs to predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

import ckpt_tools
from ckpt_tools.arguments import api_function, expand_keywords
from ckpt_tools.errors import UsageError

from ..common.errors import translate_file_errors
from ..common.garbage_collection import collect_rarely
from .architectures import Architecture, find_architecture, refuse_tensor_options, refuse_unnamed_program
from .checkpoint_files import CheckpointFiles, read_consistently
from .config_folder import open_config_folder
from .loading import fill_model, view_bytes
from .options import ExactMode, ModelOptions, TensorKeywords, TensorOptions
from .results import BYTES, ModelInput, split_predictions
from .results import Prediction as Prediction
from .results import TensorSpec as TensorSpec
from .task import Task as Task
from .task import TaskOptions, check_length, import_model_source

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Identity of the loaded weights. ``digest`` is of names, dtypes, shapes and bytes of the loaded model, equal for
    every format it was stored in. ``step`` and ``world_size`` are None if the checkpoint does not record them."""

    digest: str
    source: str
    format: str
    step: int | None
    world_size: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Predictor:
    """A loaded model and its name. One in another process (``is_elsewhere``) takes inputs while it is busy. ``files``
    is the state of the files that it was loaded from."""

    name: str
    identity: ModelIdentity
    task: Task
    is_elsewhere: bool = False
    files: CheckpointFiles | None = None

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.task.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.task.outputs

    @property
    def labels(self) -> tuple[str, ...] | None:
        return self.task.labels

    @property
    def max_batch(self) -> int:
        return self.task.max_batch

    @property
    def is_exact(self) -> bool:
        """Whether an answer has the same bits whatever else is in the batch."""
        return self.task.is_exact

    @property
    def batch_sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Sizes of forward passes by the shape of an input, for shapes that were predicted."""
        return self.task.batch_sizes

    def decode(self, data: bytes, name: str) -> ModelInput:
        """Decode an image file or a text in UTF-8 to one input of the model, an array.

        Raises:
            FormatError: the bytes are not such a thing, or too many. One sentence, which begins with ``name``.
        """
        check_length(len(data), self.task.max_bytes, name)
        return self.task.decode(data, name)

    def predict(self, inputs: Sequence[ModelInput]) -> list[Prediction]:
        """Predict each input, in order. An input is a result of ``decode``, or a row of an array or CPU tensor of
        ``inputs``; of a model with several, a tuple of rows.

        Raises:
            FormatError: an input has another shape or dtype than the model takes.
        """
        # Stacked rows keep their strides, and a library may sum in another order over another layout.
        rows = [
            tuple(map(_to_c_order, each)) if isinstance(each, tuple) else _to_c_order(np.asarray(each))
            for each in inputs
        ]
        return list(split_predictions(self.task.predict(rows))) if rows else []


def _to_c_order(value: Any) -> Any:
    return np.asarray(value, order="C") if isinstance(value, np.ndarray) else value


@api_function
@expand_keywords(TensorKeywords, TensorOptions)
def load_predictor(
    url: str | Path,
    *,
    name: str | None = None,
    architecture: str | None = None,
    labels: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    exact: ExactMode = "full",
    max_batch: int | None = None,
    embeddings: bool = False,
    max_new_tokens: int | None = None,
    max_pixels: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Unpack[TensorKeywords],
) -> Predictor:
    """The model of the checkpoint at ``url``, ready to answer.

    Args:
        url: A path, or a URL of a store: as for :func:`inference.load_model`.
        name: Name of the model. Default: the last part of ``url``, without its suffix.
        architecture: As for ``load_model``. Default: as the files beside the weights say. The module of
            ``"module:function"`` has to say by ``inputs`` what the network takes. ``"torchscript:MODULE"`` and
            ``"torch.export:MODULE"`` name such a module for a program.
        labels: Class names in order. Default: those that come with the model, if any.
        dtype: dtype of the parameters. Default: the architecture's own.
        device: Device of the model.
        exact: ``"full"`` fills each forward pass to ``max_batch`` inputs, so that an answer has the same bits whatever
            else is predicted with it. ``"buckets"`` also uses smaller passes, of sizes that gave the same bits for
            random inputs. ``"off"`` has passes of any size; the last bits may depend on the other inputs.
        max_batch: The most inputs of a forward pass. Default: as many as training evaluates with, or 8. Another number
            may change the last bits of all answers.
        embeddings: Give embeddings: the input of a classifier's last layer, or the pooled output of an encoder of
            transformers without a head, else the mean over its tokens.
        max_new_tokens: Maximum number of generated tokens. Default: what ``generation_config.json``
            says, else 64.
        max_pixels: Largest image file, in pixels. Default: 4096 x 4096, or 64 times what the model takes if that is
            more. A JPEG file of more is decoded at a half, a fourth or an eighth of its size.
        model_key, include, exclude, rename, key_map, recipe, inverse, dequantize, config: As for ``load_model``.
        storage_options: Options of the store (credentials, ``endpoint_url``). Only for URLs.

    Raises:
        UsageError: there is no such architecture. FormatError: the checkpoint cannot be read, or is of another model.
        CkptError: as ``ckpt_tools.load_into`` says.
    """
    model_options = ModelOptions(
        architecture,
        str(device),
        TensorOptions(**options),
        exact,
        max_batch,
        None if dtype is None else str(dtype).removeprefix("torch."),
        embeddings,
        max_new_tokens,
        max_pixels,
    )
    name, class_names = name or name_model(url), None if labels is None else tuple(labels)
    return load_with_options(url, name, model_options, labels=class_names, storage_options=storage_options)


@collect_rarely()
def load_with_options(
    url: str | Path,
    name: str,
    options: ModelOptions,
    *,
    labels: tuple[str, ...] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Predictor:
    """The result of :func:`load_predictor`. Raises UsageError too if the dtype or the device is none of torch's."""
    dtype, device, config = options.get_torch_dtype(), options.get_torch_device(), options.reading.config
    user_architecture = None if options.architecture is None else Architecture.parse(options.architecture)
    reading = options.reading.to_keywords()

    def load_once(files: CheckpointFiles) -> Predictor:
        if user_architecture is not None and user_architecture.is_program:
            from .programs import load_program, make_program_task

            program = load_program(user_architecture.library, url, device, storage_options)
            identity = ModelIdentity(program.digest, str(url).partition("?")[0], user_architecture.library, None, None)
            program_task = make_program_task(program, device, TaskOptions(user_architecture, None, labels, options))
            return Predictor(name, identity, _apply_options(program_task, options), files=files)
        from .users_code import read_description

        summary = ckpt_tools.inspect(files.weights.url, storage_options=storage_options)
        with open_config_folder(summary.source, storage_options, config) as folder:
            architecture = find_architecture(options.architecture, folder, summary.source, storage_options)
            task_options = TaskOptions(architecture, folder, labels, options)
            if (description := read_description(architecture)) is not None:
                description.require_inputs()  # before weights are read
            architecture.check_not_quantized(folder, dequantize=options.reading.dequantize)
            source = import_model_source(architecture)
            empty_model = source.build_model(architecture, folder, dtype).to(device=device)
            is_assumed = architecture.is_assumed
            model = fill_model(empty_model, summary.source, storage_options, reading, is_assumed=is_assumed)
            digest = digest_model(model)
            with translate_file_errors("the files beside the weights do not fit the model"):
                task = _apply_options(source.make_task(model, task_options), options)
        identity = ModelIdentity(digest, summary.source, summary.format, summary.step, summary.world_size)
        return Predictor(name, identity, task, files=files)

    if user_architecture is not None and user_architecture.is_program:
        refuse_tensor_options(user_architecture.library, reading, dtype)
    else:
        refuse_unnamed_program(url)
    return read_consistently(url, storage_options, load_once, config)


def _apply_options(task: Task, options: ModelOptions) -> Task:
    """The task with the options that are for all kinds of models."""
    task = remove_head(task) if options.embeddings else task
    task = task if options.max_pixels is None else _limit_pixels(task, options.max_pixels)
    if options.exact == "buckets":
        _measure_passes(task)
    return task


def _limit_pixels(task: Task, max_pixels: int) -> Task:
    """The task with another limit of pixels. Raises UsageError if it takes no images."""
    from .image_classifiers import ImageClassifier
    from .training_models import GreyImageClassifier

    if not isinstance(task, ImageClassifier | GreyImageClassifier):
        raise UsageError("--max-pixels is for a model that takes images")
    return replace(task, max_pixels=max_pixels)


def _measure_passes(task: Task) -> None:
    """Predict once, so that the sizes of forward passes are known before the first request. Rows of any size are
    measured when the first one of each shape comes."""
    from .tensors import TensorTask

    if isinstance(task, TensorTask):
        task.measure_passes()
        return
    (spec,) = task.inputs
    task.predict([task.decode(b"a", "a text") if spec.datatype == BYTES else spec.make_zeros()])


def remove_head(task: Task) -> Task:
    """The task with the last layer of its model taken out. A task that gives embeddings stays the same. Raises
    UsageError if the model has no linear layer that gives its classes."""
    from .image_classifiers import ImageClassifier
    from .texts import TextClassifier
    from .training_models import GreyImageClassifier

    if not isinstance(task, ImageClassifier | GreyImageClassifier | TextClassifier):
        raise UsageError("--embeddings is for a model that tells classes apart, and for an encoder without a head")
    if task.num_features is not None:
        return task
    num_classes = next(spec.shape[1] for spec in task.outputs if spec.name == "probabilities")
    num_features = _remove_last_layer(task.model, num_classes)
    return replace(task, num_features=num_features, labels=None, passes=replace(task.passes))


def _remove_last_layer(model: nn.Module, num_classes: int) -> int:
    """Replace the last linear layer by an identity; returns the number of features that go into it."""
    from torch import nn

    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == num_classes
    ]
    if not layers:
        raise UsageError("the model does not end in a linear layer, so it is not clear what an embedding is")
    name, head = layers[-1]
    model.set_submodule(name, nn.Identity())
    return head.in_features


def digest_model(model: nn.Module) -> str:
    """BLAKE3 of the state dict, sorted by name: name, dtype, shape and bytes of each tensor."""
    from blake3 import blake3

    digest = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(view_bytes(tensor))
    return f"blake3:{digest.hexdigest()}"


def name_model(url: str | Path) -> str:
    """Last part of a path or URL, without the suffix of a weights file."""
    last = str(url).rstrip("/").rpartition("/")[2]
    stem, _, suffix = last.rpartition(".")
    return stem if stem and suffix in {"safetensors", "pt", "pth", "bin", "ckpt"} else last or "model"
