"""Networks for :mod:`.tensors`: a user's own, programs, and models of libraries.

Names, dtypes and shapes of tensors come from the program, from the model's class and configuration, or from a few lines
beside the user's function::

    inputs = {"image": ("FP32", [-1, 3, 224, 224])}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import Parameter, signature
from itertools import chain
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from ckpt_tools.errors import FormatError, UsageError

from .passes import Passes
from .positions import num_positions
from .programs import SCRIPTED
from .results import BATCH, Array, TensorSpec
from .tensors import DATATYPES, TORCH_DTYPES, Files, Network, Shapes, Tensors, named, tensors_of

EXAMPLE = 'inputs = {"image": ("FP32", [-1, 3, 224, 224])}'


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """Description of a network in a module of the user's: ``inputs`` and ``outputs`` with datatype and shape by name,
    and the functions ``decode`` and ``encode``; each may be missing."""

    name: str = ""
    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None
    files: Files = field(default_factory=Files)

    @classmethod
    def of(cls, module: ModuleType) -> Description:
        """Raises UsageError if ``inputs`` or ``outputs`` is something else."""
        files = Files(_function(module, "decode"), _function(module, "encode"))
        return cls(module.__name__, _specs(module, "inputs"), _specs(module, "outputs"), files)

    def needed_inputs(self) -> tuple[TensorSpec, ...]:
        """Raises UsageError if there are none."""
        if self.inputs is None:
            raise UsageError(f"{self.name} does not say what its network takes; add a line such as {EXAMPLE}")
        return self.inputs

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.outputs or ())


def _function(module: ModuleType, name: str) -> Callable[..., Any] | None:
    found = getattr(module, name, None)
    if found is not None and not callable(found):
        raise UsageError(f"{name} of {module.__name__} is a {type(found).__name__}, not a function")
    return found


def _specs(module: ModuleType, attribute: str) -> tuple[TensorSpec, ...] | None:
    given = getattr(module, attribute, None)
    if given is None:
        return None
    if not isinstance(given, Mapping) or not given:
        raise UsageError(f"{attribute} of {module.__name__} is not a dictionary such as {EXAMPLE}")
    return tuple(_spec(f"{attribute} of {module.__name__}", name, each) for name, each in given.items())


def _spec(where: str, name: object, given: object) -> TensorSpec:
    match given:
        case (str(datatype), [-1, *sizes]) if datatype in TORCH_DTYPES:
            known = tuple(size for size in sizes if type(size) is int and (size > 0 or size == BATCH))
            if len(known) == len(sizes):
                return TensorSpec(str(name), datatype, (BATCH, *known))
    raise UsageError(
        f"{where} has {given!r} for {name}; it is a datatype ({', '.join(TORCH_DTYPES)}) and a shape that begins with "
        f"-1, the batch, as in {EXAMPLE}"
    )


def of_user(model: nn.Module, description: Description, passes: Passes, dtype: torch.dtype | None) -> Tensors:
    """A network of the user's, which gets its inputs in the order of ``description``. Floats are cast to ``dtype`` if
    it is given. Raises UsageError if it does not take them, or gives something else than tensors."""
    inputs = description.needed_inputs()
    network = Network(inputs, _in_order(model), _device(model), dtype, description.names)
    return tensors_of(network, passes, declared=description.outputs, files=description.files)


def of_script(model: nn.Module, description: Description | None, passes: Passes) -> Tensors:
    """A TorchScript archive, which knows no shapes. Raises UsageError as ``of_user``; or without a description."""
    if description is None:
        raise UsageError(
            f"{SCRIPTED} does not say the shapes of its inputs; write {SCRIPTED}:MODULE, and in this module of yours a "
            f"line such as {EXAMPLE}"
        )
    return of_user(model, description, passes, None)


def _in_order(model: nn.Module) -> Callable[[Mapping[str, Tensor]], Any]:
    return lambda given: model(*given.values())


def _device(model: nn.Module) -> torch.device:
    return next((each.device for each in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def of_export(
    program: ExportedProgram, device: str | torch.device, description: Description | None, passes: Passes
) -> Tensors:
    """A program of torch.export, which knows its tensors. Raises UsageError if one has no batch, or ``description`` has
    other inputs."""
    said, signed = description or Description(), Signature.of(program)
    inputs = signed.specs(signed.inputs)
    if not inputs:
        raise UsageError("the program takes no tensor")
    if said.inputs not in (None, inputs):
        raise UsageError(f"inputs of {said.name} is not what the program takes: {_shown(inputs)}")
    least, most = signed.batch()
    full = max(least, min(passes.full, most))
    network = Network(
        inputs,
        partial(_called, program.module(), program, signed),
        torch.device(device),
        None,
        said.names,
        (signed.example(), signed.example()),
        check=signed.check,
        is_listed=False,
    )
    outputs = said.outputs or signed.specs(signed.outputs)
    return tensors_of(network, Passes(full, passes.exact, least), declared=outputs, files=said.files)


def _called(module: nn.Module, program: ExportedProgram, signed: Signature, given: Mapping[str, Tensor]) -> Any:
    leaves = [given[each] if isinstance(each, str) else each.value for each in signed.leaves]
    args, kwargs = pytree.tree_unflatten(leaves, program.call_spec.in_spec)
    return module(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Constant:
    """An argument of a program that is not a tensor."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """Tensors of a program by name, without elements: sizes are numbers or symbols. ``leaves`` are its arguments in
    order, a name for each tensor. ``ranges`` has the least and the most of a symbol."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    leaves: tuple[str | Constant, ...]
    ranges: Mapping[Any, Any]

    @classmethod
    def of(cls, program: ExportedProgram) -> Signature:
        """Raises UsageError if an input or an output is a number that changes."""
        nodes = {node.name: node for node in program.graph.nodes}
        leaves = [each.arg for each in program.graph_signature.input_specs if each.kind.name == "USER_INPUT"]
        results = [each.arg for each in program.graph_signature.output_specs if each.kind.name == "USER_OUTPUT"]
        constants = [_constant(each) for each in leaves]
        inputs = {
            each.name: nodes[each.name].meta["val"]
            for each, constant in zip(leaves, constants, strict=True)
            if constant is None
        }
        values = [nodes[each.name].meta["val"] if _constant(each) is None else each.value for each in results]
        outputs = named(pytree.tree_unflatten(values, program.call_spec.out_spec))
        known = tuple(constant or each.name for each, constant in zip(leaves, constants, strict=True))
        return cls(inputs, outputs, known, program.range_constraints)

    def specs(self, tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
        """Raises UsageError if the first dimension of one is not the batch, or its dtype is none of the protocol."""
        return tuple(self._spec(name, each) for name, each in tensors.items())

    def _spec(self, name: str, tensor: Tensor) -> TensorSpec:
        if tensor.dtype not in DATATYPES:
            raise UsageError(f"the program's {name} is of {tensor.dtype}, which the protocol does not have")
        if not tensor.dim() or _expression(tensor.shape[0]) not in self._batches():
            raise UsageError(
                f"the program's {name} is {list(tensor.shape)}; the first dimension of every input and output has to "
                "be the batch"
            )
        if any(self._batches() & _symbols(size) for size in tensor.shape[1:]):
            raise UsageError(
                f"the program's {name} is {list(tensor.shape)}; the batch has to be its first dimension alone"
            )
        sizes = (size if isinstance(size, int) else BATCH for size in tensor.shape[1:])
        return TensorSpec(name, DATATYPES[tensor.dtype], (BATCH, *sizes))

    def _batches(self) -> set[Any]:
        """First dimensions of the inputs: one number, or symbols."""
        found = {_expression(each.shape[0]) for each in self.inputs.values() if each.dim()}
        is_fixed = len(found) == 1 and all(isinstance(each, int) for each in found)
        return found if is_fixed or all(_is_symbol(each) for each in found) else set()

    def batch(self) -> tuple[int, int]:
        """The least and the most rows."""
        bounds = [self._bounds(each) for each in self._batches()]
        return max(1, *(int(low) for low, _ in bounds)), min(_number(high) for _, high in bounds)

    def _bounds(self, size: Any) -> tuple[Any, Any]:
        return (size, size) if isinstance(size, int) else (self.ranges[size].lower, self.ranges[size].upper)

    def example(self) -> Shapes:
        """The shapes of a row that the program was made with."""
        return tuple(tuple(_hint(size) for size in each.shape[1:]) for each in self.inputs.values())

    def check(self, row: Mapping[str, Array]) -> None:
        """Raises FormatError for sizes that the program does not take, alone or together."""
        bound: dict[Any, int] = {}
        sizes = list(self._sizes(row))
        for name, have, want in (each for each in sizes if _is_symbol(each[2])):
            low, high = self._bounds(want)
            if not low <= have <= high:
                raise FormatError(f"{name} has the size {have}; the program takes {low} to {high}")
            if bound.setdefault(want, have) != have:
                raise FormatError(f"{name} has the size {have}, and another tensor {bound[want]}; they must be equal")
        for name, have, want in sizes:
            if (wanted := want.subs(bound)) != have:
                raise FormatError(f"{name} has the size {have}; the program takes {wanted}")

    def _sizes(self, row: Mapping[str, Array]) -> Iterator[tuple[str, int, Any]]:
        """Each dimension of a row that is a symbol or is computed from some."""
        for name, values in row.items():
            wanted: Sequence[Any] = self.inputs[name].shape[1:]
            for place, (have, want) in enumerate(zip(values.shape, wanted, strict=True)):
                if not isinstance(want, int):
                    yield f"dimension {place + 1} of {name}", have, _expression(want)


def _constant(argument: Any) -> Constant | None:
    """The value of a constant; None for a tensor. Raises UsageError for a number that changes."""
    kind = type(argument).__name__
    if kind == "ConstantArgument":
        return Constant(argument.value)
    if kind != "TensorArgument":
        raise UsageError(f"the program's {argument.name} is not a tensor; export it with tensors and constants alone")
    return None


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _is_symbol(expression: Any) -> bool:
    return getattr(expression, "is_Symbol", False)


def _symbols(size: Any) -> set[Any]:
    return set() if isinstance(size, int) else set(size.node.expr.free_symbols)


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _number(bound: Any) -> int:
    """A bound as a number; infinity is some large one."""
    return int(bound) if bound < 2**31 else 2**31


def _shown(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in specs)


OF_TORCHVISION: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "ObjectDetection": (("image",), (3, BATCH, BATCH)),
    "SemanticSegmentation": (("image",), (3, BATCH, BATCH)),
    "OpticalFlow": (("image1", "image2"), (3, BATCH, BATCH)),
    "StereoMatching": (("left_image", "right_image"), (3, BATCH, BATCH)),
    "VideoClassification": (("video",), (3, BATCH, BATCH, BATCH)),
}
"""Names and row shape of the inputs of torchvision's models, by the class that prepares them."""


def of_torchvision(model: nn.Module, transforms: Any, passes: Passes) -> Tensors:
    """A model of torchvision for another task than to classify images, by what ``transforms`` would give it. Raises
    UsageError if the task is unknown."""
    kind = type(transforms).__name__
    if kind not in OF_TORCHVISION:
        raise UsageError(f"a model of torchvision that is prepared by {kind} is not known here; {HOW_TO_BUILD}")
    names, shape = OF_TORCHVISION[kind]
    inputs = tuple(TensorSpec(name, "FP32", (BATCH, *shape)) for name in names)
    is_listed = kind == "ObjectDetection"
    call = (lambda given: model(list(given["image"]))) if is_listed else _in_order(model)
    examples: tuple[Shapes, Shapes] = ((), ())
    if kind == "VideoClassification":
        (size,) = {*transforms.crop_size}
        # A clip is as much work as many images.
        examples, passes = (((3, 16, size, size),),) * 2, replace(passes, full=1)
    network = Network(inputs, call, _device(model), _dtype(model), (), examples, is_listed=is_listed or None)
    return tensors_of(network, passes)


HOW_TO_BUILD = "build it in a function of yours, as module:function, with inputs beside it"


def of_timm(model: nn.Module, passes: Passes) -> Tensors:
    """A model of timm without classes, of images of the size of its configuration."""
    from timm import data

    size = data.resolve_model_data_config(model)["input_size"]
    inputs = (TensorSpec("image", "FP32", (BATCH, *size)),)
    return tensors_of(Network(inputs, _in_order(model), _device(model), _dtype(model)), passes)


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def of_transformers(model: Any, passes: Passes) -> Tensors:
    """A model of transformers, by the arguments of its own ``forward``; outputs are the tensors of its answer. Raises
    UsageError if it needs others than are known here."""
    taken, kind = signature(model.forward).parameters, type(model).__name__
    facts = Facts.of(model.config)
    inputs = tuple(facts.inputs(taken))
    facts = facts.counted(model, [spec.name for spec in inputs])
    names = {spec.name for spec in inputs}
    required = [each.name for each in taken.values() if each.default is Parameter.empty and each.kind.name[:3] != "VAR"]
    missing = [name for name in (*required, model.main_input_name) if name not in names]
    if missing:
        raise UsageError(f"a {kind} takes {missing[0]}, which is not known here; {HOW_TO_BUILD}")
    settings = {"return_dict": True} | ({"use_cache": False} if "use_cache" in taken else {})

    def call(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: each for name, each in model(**given, **settings).items() if isinstance(each, Tensor)}

    # Random boxes would have their corners in the wrong order.
    below = {**facts.below, "bbox": 1}
    network = Network(inputs, call, _device(model), model.dtype, below=below, check=facts.check, is_listed=False)
    return tensors_of(network, passes)


IDS = ("input_ids", "attention_mask", "token_type_ids")
"""Inputs with one number for each token of one text."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Sizes of a configuration of transformers. ``below`` bounds the values of integers, ``tokens`` the number of
    tokens."""

    config: Any
    vision: Any
    below: Mapping[str, int]
    tokens: Mapping[str, int]

    @classmethod
    def of(cls, config: Any) -> Facts:
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
        below, tokens = ({name: size for name, size in found.items() if size} for found in (words, limits))
        return cls(config, getattr(config, "vision_config", config), below, tokens)

    def counted(self, model: Any, names: Sequence[str]) -> Facts:
        """With the number of positions in the tables of a model of one text, which may begin behind the padding."""
        if "input_ids" not in names or not set(names) <= set(IDS):
            return self
        rows = np.stack([np.full(8, name == "attention_mask", np.int64) for name in names])
        rows[list(names).index("input_ids")] = np.arange(2, 10)
        known = [self.tokens[name] for name in ("input_ids",) if name in self.tokens]
        counts = [*known, *num_positions(model, rows, names)]
        return replace(self, tokens={**self.tokens, "input_ids": min(counts)}) if counts else self

    def inputs(self, taken: Mapping[str, object]) -> Iterator[TensorSpec]:
        has_types = self.below.get("token_type_ids", 0) > 1
        for name in taken:
            is_of_text = name in IDS and "input_ids" in taken and (name != "token_type_ids" or has_types)
            if is_of_text or (name == "decoder_input_ids" and self.config.is_encoder_decoder):
                yield TensorSpec(name, "INT64", (BATCH, BATCH))
            elif name == "bbox":
                yield TensorSpec(name, "INT64", (BATCH, BATCH, 4))
            elif name == "pixel_values":
                yield TensorSpec(name, "FP32", (BATCH, getattr(self.vision, "num_channels", 3), *self._image_size()))
            elif name == "input_values":
                yield TensorSpec(name, "FP32", (BATCH, BATCH))
            elif name == "input_features":
                yield TensorSpec(name, "FP32", (BATCH, *self._sound_size()))

    def _image_size(self) -> tuple[int, ...]:
        size = getattr(self.vision, "image_size", None)
        if size is None:
            return (BATCH, BATCH)
        return (size, size) if isinstance(size, int) else tuple(size)

    def _sound_size(self) -> tuple[int, int]:
        """Whisper's frames are two for each position of its encoder."""
        if hasattr(self.config, "num_mel_bins") and hasattr(self.config, "max_source_positions"):
            return self.config.num_mel_bins, 2 * self.config.max_source_positions
        return (BATCH, BATCH)

    def check(self, row: Mapping[str, Array]) -> None:
        """Raises FormatError for tokens that the model has no place for, which on a GPU would end the process."""
        for name, most in self.below.items():
            if name in row and not 0 <= row[name].min() <= row[name].max() < most:
                raise FormatError(f"{name} has numbers that are not from 0 to {most - 1}")
        for name, most in self.tokens.items():
            if name in row and len(row[name]) > most:
                raise FormatError(f"{name} has {len(row[name]):,} tokens; the model takes at most {most:,}")
        lengths = {name: len(row[name]) for name in (*IDS, "bbox") if name in row}
        if len({*lengths.values()}) > 1:
            raise FormatError(f"{' and '.join(lengths)} have different numbers of tokens")
