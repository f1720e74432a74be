"""The options of a conversion, parsed and checked against each other before anything is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.format_names import FORMAT_BY_FILE_SUFFIX
from ckpt_tools.core.option_names import (
    DEFAULT_IO,
    DEFAULT_MEMORY,
    DEFAULT_RUNNER,
    DEFAULT_WEIGHTS,
    DTYPE_NAMES,
    IO_MODES,
    QUANTIZATIONS,
    READ_FORMATS,
    STATES,
    WEIGHTS,
    WRITTEN_FORMATS,
    format_option,
    format_with_aliases,
)
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy as np
    import torch

    from ckpt_tools.core.averages import Averaging
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.name_files import ParamOrder
    from ckpt_tools.core.option_names import (
        DTypeAlias,
        DTypeName,
        FormatAlias,
        Io,
        Quantization,
        ReadFormat,
        Runner,
        State,
        Weights,
        WrittenFormat,
    )
    from ckpt_tools.core.part_number import PartNumber
    from ckpt_tools.messages.progress import ProgressCallback

    DTypeLike: TypeAlias = DTypeName | DTypeAlias | torch.dtype | np.dtype[Any] | type[np.generic]
    """A dtype that weights can be cast to, by its name or as torch, numpy or ml_dtypes has it."""

_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgtp", 1):
    _UNITS |= {f"{_prefix}b": 1000**_power, f"{_prefix}ib": 1024**_power}


def parse_size(text: str | int) -> int:
    """Bytes of ``512MiB``, ``5GB`` or a plain number. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(f"{text!r} is not a size; write for example 512MiB, 5GB or 1048576")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise UsageError(f"{text!r}: a size must be positive")
    return size


@dataclass(frozen=True, slots=True)
class OptionText:
    """The text of an option on the command line: ``help``, under ``heading``, with ``metavar`` for its value."""

    heading: str
    help: str
    metavar: str | None = None


READING, NAMES, OUTPUT, RUNNING, SAFETY = (
    "What to read",
    "Names and selection",
    "Output",
    "Running",
    "Safety",
)
"""Headings of the help and of the docstring of ``convert``."""


def _option(default: Any, heading: str, help_text: str, metavar: str | None = None) -> Any:
    """A field of the table of options: its name is the keyword in Python, its type decides how its text is parsed."""
    return field(default=default, metadata={"text": OptionText(heading, help_text, metavar)})


# Which keywords a function takes, as a type checker has to know them. What each means is in the fields below.


class ReadModelKeywords(TypedDict, total=False):
    """Keywords of every function that reads the weights of a checkpoint."""

    from_: ReadFormat | FormatAlias | None
    tag: str | None
    model_key: str | None
    optim_key: str | None
    storage_options: Mapping[str, Any] | None


class ReadKeywords(ReadModelKeywords, total=False):
    """Keywords of every function that opens a checkpoint."""

    param_order: str | Path | None
    optimizer_file: str | Path | None


class NamingKeywords(TypedDict, total=False):
    """Keywords that select, rename and map tensors."""

    include: Sequence[str]
    exclude: Sequence[str]
    rename: Sequence[str]
    key_map: str | Path | None
    weights: Weights | None
    strip: str | None
    recipe: str | Path | None
    inverse: bool
    config: str | Path | None


class SelectKeywords(ReadKeywords, NamingKeywords, total=False):
    """Keywords of every function that selects, renames and maps tensors of a checkpoint."""

    dequantize: bool


class RepeatableKeywords(TypedDict, total=False):
    """Keywords about the writing of one checkpoint, or of several one after another."""

    memory: str | int | None
    workers: int | None
    runner: Runner
    address: str | None
    io: Io
    on_progress: ProgressCallback | None
    resume: bool
    strict: bool
    fsync: bool
    checksum: bool


class ExecutionKeywords(RepeatableKeywords, total=False):
    """Keywords about the writing itself."""

    part: str | None
    overwrite: bool


class LoadableKeywords(TypedDict, total=False):
    """Keywords of ``make_loadable``."""

    overwrite: bool
    strict: bool
    fsync: bool
    on_progress: ProgressCallback | None
    storage_options: Mapping[str, Any] | None


class DeltaKeywords(TypedDict, total=False):
    """Keywords of ``delta``."""

    workers: int | None
    fsync: bool
    on_progress: ProgressCallback | None
    storage_options: Mapping[str, Any] | None


class OutputKeywords(TypedDict, total=False):
    """Keywords about the tensors and files that are written."""

    dtype: DTypeLike | None
    buffers: Sequence[str]
    max_shard_size: str | int | None
    untie: bool


class WriteKeywords(SelectKeywords, ExecutionKeywords, OutputKeywords, total=False):
    """Keywords of every function that writes a checkpoint from another."""


class QuantizationKeywords(TypedDict, total=False):
    """Keywords about quantized output."""

    quantize: Quantization | None
    keep: Sequence[str]


class SurgeryKeywords(TypedDict, total=False):
    """Keywords that leave tensors of the source out, and take others from a second checkpoint."""

    drop: Sequence[str]
    fill: str | Path | None


class RunKeywords(SelectKeywords, RepeatableKeywords, OutputKeywords, QuantizationKeywords, total=False):
    """Keywords of ``convert_run``: those of ``convert`` that are for several checkpoints."""

    like: str | Path | None
    to: WrittenFormat | FormatAlias | None
    world_size: int | None
    state: State | None


class ReshardKeywords(WriteKeywords, SurgeryKeywords, total=False):
    """Keywords of every function that converts."""

    like: str | Path | None


class MergeKeywords(WriteKeywords, total=False):
    """Keywords of ``merge_lora``."""

    to: WrittenFormat | FormatAlias | None
    world_size: int | None
    adapter_name: str | None
    allow_missing: bool


class AverageKeywords(ReadModelKeywords, NamingKeywords, ExecutionKeywords, OutputKeywords, total=False):
    """Keywords of ``average``: those of one conversion of weights, except what would be of one of the sources."""

    to: WrittenFormat | FormatAlias | None
    world_size: int | None


class ConsolidateKeywords(ReshardKeywords, QuantizationKeywords, total=False):
    to: WrittenFormat | FormatAlias | None
    world_size: int | None


class ConvertKeywords(ConsolidateKeywords, total=False):
    state: State | None


@dataclass(frozen=True, eq=False, kw_only=True)
class ConvertOptions:
    """Everything that decides what is read, written or compared, with the same meaning in every function.

    The fields of this class and of ``ConvertRequest`` are the table of options: the command line, its settings and its
    help are made of them.

    Raises:
        UsageError: a value is not among those allowed.
    """

    from_: str | None = _option(
        None,
        READING,
        f"The source's format: {format_with_aliases('from_', READ_FORMATS)}, or a plug-in's. Default: detected.",
        "FORMAT",
    )
    tag: str | None = _option(
        None, READING, "The checkpoint of a DeepSpeed folder. Default: the tag named in the file latest."
    )
    model_key: str | None = _option(
        None, READING, "The key of the model in a DCP tree, e.g. app.model. Default: detected."
    )
    optim_key: str | None = _option(None, READING, "The key of the optimizer in a DCP tree. Default: detected.")
    param_order: str | Path | None = _option(
        None,
        READING,
        "Parameter names in the optimizer's order or in the model's, if it numbers its parameters.",
        "FILE",
    )
    optimizer_file: str | Path | None = _option(
        None, READING, "The file of torch.save with the optimizer, if it is apart from the model in SRC.", "FILE"
    )
    storage_options: Mapping[str, Any] | None = _option(
        None, READING, "An option of the store, e.g. endpoint_url=http://host:9000. Repeatable.", "KEY=VALUE"
    )
    include: Sequence[str] = _option((), NAMES, "Take only tensors whose names match. Repeatable.", "GLOB")
    exclude: Sequence[str] = _option((), NAMES, "Leave out tensors whose names match. Repeatable.", "GLOB")
    drop: Sequence[str] = _option(
        (),
        NAMES,
        "Leave out tensors of SRC whose names match, as inspect shows them, before all other options. Repeatable.",
        "GLOB",
    )
    rename: Sequence[str] = _option(
        (), NAMES, "Rename tensors. Several rules apply in the given order. Repeatable.", "REGEX=REPL"
    )
    key_map: str | Path | None = _option(None, NAMES, "A JSON file that maps old names to new names.", "FILE")
    strip: str | None = _option(
        None,
        NAMES,
        "Take a prefix off the names of the source, before all other options: auto for those of wrappers.",
        "auto|PREFIX",
    )
    recipe: str | Path | None = _option(
        None,
        NAMES,
        "Map tensors to another model layout, by a built-in recipe (see recipes) or a TOML file. "
        "The options above name the tensors that it makes.",
        "NAME|FILE",
    )
    inverse: bool = _option(False, NAMES, "Read the recipe from right to left.")
    weights: Weights | None = _option(
        None,
        NAMES,
        f"The copy of a weight to use: its fp32 master if there is one, or the model's. Default: {DEFAULT_WEIGHTS}.",
    )
    state: State | None = _option(
        None, NAMES, "Write the weights alone, or the whole training state. Default: all if the format can hold it."
    )
    dequantize: bool = _option(
        False,
        OUTPUT,
        "Make floating-point weights of quantized ones, as quantization_config in config.json says. "
        "Comes before all other options that name tensors.",
    )
    dtype: DTypeLike | None = _option(
        None,
        OUTPUT,
        f"Cast the weights to this type, and nothing else: {format_with_aliases('dtype', DTYPE_NAMES)}.",
        "DTYPE",
    )
    quantize: Quantization | None = _option(
        None,
        OUTPUT,
        "Quantize the layers of a language model, for safetensors: fp8-block in blocks of 128 x 128 as DeepSeek does, "
        "fp8 and int8 by row as compressed-tensors does. --dtype is for all other weights.",
        "METHOD",
    )
    keep: Sequence[str] = _option((), OUTPUT, "Weights that --quantize leaves as they are. Repeatable.", "GLOB")
    buffers: Sequence[str] = _option((), OUTPUT, "Tensors that are buffers of the model. Repeatable.", "GLOB")
    world_size: int | None = _option(
        None,
        OUTPUT,
        "The number of ranks to write for, in formats with files for each rank. Default: that of the source.",
        "N",
    )
    max_shard_size: str | int | None = _option(
        None, OUTPUT, "Split safetensors or torch output into files of at most this size.", "SIZE"
    )
    untie: bool = _option(
        False,
        OUTPUT,
        "Write embeddings and head as two tensors, and tie_word_embeddings in config.json as false.",
    )
    config: str | Path | None = _option(
        None,
        OUTPUT,
        "The folder with config.json, for sizes of the recipe too, and tokenizer and preprocessor files for the "
        "output. Default: beside SRC.",
        "DIR",
    )
    like: str | Path | None = _option(
        None,
        OUTPUT,
        "A model that the output is to be like: its names, shapes, dtypes, files and config.json, and the recipe that "
        "leads to them.",
        "DIR",
    )
    fill: str | Path | None = _option(
        None,
        OUTPUT,
        "Take the weights that the output lacks, under its names, from this checkpoint; with --like those that it "
        "names.",
        "CHECKPOINT",
    )
    names: Mapping[str, str] = field(default_factory=dict, init=False)
    order: ParamOrder | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        dtype = get_dtype_name(self.dtype)
        object.__setattr__(self, "dtype", dtype)
        for name in ("include", "exclude", "drop", "rename", "buffers", "keep"):
            # One string is one pattern, and not one for each of its letters.
            patterns = getattr(self, name)
            object.__setattr__(self, name, (patterns,) if isinstance(patterns, str) else tuple(patterns))
        _check_choice("state", self.state, STATES)
        _check_choice("dtype", dtype, DTYPE_NAMES)
        _check_choice("weights", self.weights, WEIGHTS)
        _check_choice("quantize", self.quantize, QUANTIZATIONS)
        if self.keep and self.quantize is None:
            raise UsageError.of("keep", f"{format_option('keep')} is for {format_option('quantize')}")
        if self.quantize is not None and self.state == "all":
            quantize, state = format_option("quantize", self.quantize), format_option("state", "all")
            raise UsageError.of("quantize", f"{quantize} writes weights alone, and {state} all state")
        if self.inverse and self.recipe is None:
            inverse = format_option("inverse", True)
            raise UsageError.of("inverse", f"{inverse} is for a recipe; name it with {format_option('recipe')}")
        if self.world_size is not None and self.world_size < 1:
            raise UsageError(f"{format_option('world_size', self.world_size)}: at least one rank is needed")
        implied_by_like = {
            "dtype": "the dtype of each weight",
            "quantize": "the dtype of each weight",
            "config": "where config.json comes from",
            "untie": "what is tied",
        }
        for name, why in implied_by_like.items():
            if self.like is not None and getattr(self, name):
                contradiction = f"{format_option(name)} contradicts {format_option('like')}"
                raise UsageError.of(name, f"{contradiction}, which says {why}; drop one of them")
        if self.rename:
            from ckpt_tools.core.renaming import parse_rename_rules

            parse_rename_rules(self.rename)
        if self.key_map is not None or self.param_order is not None:
            self._read_name_files()

    def _read_name_files(self) -> None:
        from ckpt_tools.core.name_files import read_key_map, read_param_order  # for the few that name a file

        if self.key_map is not None:
            object.__setattr__(self, "names", read_key_map(Path(self.key_map)))
        if self.param_order is not None:
            object.__setattr__(self, "order", read_param_order(Path(self.param_order)))

    @property
    def needs_config(self) -> bool:
        """Whether ``config.json`` of the source tells what becomes of its tensors."""
        return self.recipe is not None or self.dequantize

    def choose_weight_copy(self, *manifests: Manifest) -> str:
        """The copy of a weight to use: the master unless the user chose, so that no precision is lost; the model's own
        where that is newer."""
        return self.weights or ("model" if any(each.masters_are_outdated for each in manifests) else DEFAULT_WEIGHTS)

    @property
    def values_by_name(self) -> Mapping[str, Any]:
        """Every option by name; one that was not given is empty."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init}

    @property
    def target_dtype(self) -> DType | None:
        return DType(str(self.dtype)) if self.dtype else None

    @property
    def max_shard_bytes(self) -> int | None:
        return None if self.max_shard_size is None else parse_size(self.max_shard_size)

    @property
    def read_options(self) -> ReadOptions:
        """Options of the reader. With a recipe or dequantizing, globs are of names that the reader does not know, but
        for those of ``drop``."""
        has_own_names = not self.needs_config
        return ReadOptions(
            tag=self.tag,
            model_key=self.model_key,
            optim_key=self.optim_key,
            param_order=self.order,
            optimizer_file=self.optimizer_file,
            include=tuple(self.include) if has_own_names else (),
            exclude=(*self.drop, *(self.exclude if has_own_names else ())),
            state=self.state,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class ConvertRequest(ConvertOptions):
    """One conversion, with all checks that do not open ``src`` or ``dst``.

    With ``keeps_format`` the format of the source is written, and ``to`` is not given. ``adapter`` is merged into what
    is written. With ``averaging``, ``src`` is the last of the sources.
    """

    src: str | Path
    dst: str | Path
    keeps_format: bool = False
    adapter: str | Path | None = None
    averaging: Averaging | None = None
    on_progress: ProgressCallback | None = None
    to: str | None = _option(
        None,
        OUTPUT,
        f"The format to write: {format_with_aliases('to', WRITTEN_FORMATS)}, or a plug-in's. "
        f"Default: by the ending of DST ({', '.join(FORMAT_BY_FILE_SUFFIX)}); with --like, safetensors.",
        "FORMAT",
    )
    adapter_name: str | None = _option(
        None, NAMES, "The name of the adapter, if the training state has several.", "NAME"
    )
    memory: str | int | None = _option(
        None,
        RUNNING,
        f"Peak memory of the whole process. Default: {DEFAULT_MEMORY}, or more if the index needs more.",
        "SIZE",
    )
    workers: int | None = _option(None, RUNNING, "Number of threads. Default: one for each processor.", "N")
    runner: Runner = _option(
        DEFAULT_RUNNER,
        RUNNING,
        "Run in threads of this process, or in processes of a Ray cluster. Each process has --memory.",
    )
    address: str | None = _option(
        None, RUNNING, "The address of the Ray cluster. Default: start one on this machine.", "ADDR"
    )
    io: Io = _option(
        DEFAULT_IO,
        RUNNING,
        "Move bytes past the page cache, or through it. auto: past it with --part, and where they are more than half "
        "of the free memory.",
    )
    part: str | None = _option(
        None,
        RUNNING,
        "Write part I of N, beside N - 1 other processes, to a shared disk or S3; the last to end publishes DST. auto: "
        "as torchrun or SLURM number this process.",
        "I/N",
    )
    overwrite: bool = _option(False, SAFETY, "Replace the checkpoint at DST, and nothing else.")
    resume: bool = _option(
        False, SAFETY, "Continue a killed run of the same conversion. If this run fails too, keep its output."
    )
    strict: bool = _option(False, SAFETY, "Fail if something would be dropped.")
    fsync: bool = _option(False, SAFETY, "Wait until the output is safe from a power failure.")
    checksum: bool = _option(False, SAFETY, "Also write the digests of the output, for verify.")
    allow_missing: bool = _option(False, SAFETY, "Merge an adapter that lacks parts which adapter_config.json names.")

    def __post_init__(self) -> None:
        ConvertOptions.__post_init__(self)
        _ = self.memory_bytes, self.max_shard_bytes
        _check_choice("io", self.io, IO_MODES)
        if self.part is not None:
            self._check_part()

    def _check_part(self) -> None:
        """Raises UsageError for a number that is none, and for options of one process that has the output alone."""
        _ = self.part_number
        for name, is_given in (
            ("overwrite", self.overwrite),
            ("checksum", self.checksum),
            ("runner", self.runner != DEFAULT_RUNNER),
        ):
            if is_given:
                raise UsageError(
                    f"{format_option('part', self.part)} does not go with {format_option(name)}: the parts write a new "
                    "output together, and none has it alone"
                )

    @property
    def other_sources(self) -> tuple[str | Path, ...]:
        """Sources beside ``src``: an adapter, or the earlier ones of an average. Weights alone are written."""
        adapters = () if self.adapter is None else (self.adapter,)
        return adapters if self.averaging is None else self.averaging.earlier

    @property
    def source_urls(self) -> tuple[str | Path, ...]:
        """All places that are read."""
        return (self.src, *self.other_sources, *(() if self.fill is None else (self.fill,)))

    @property
    def part_number(self) -> PartNumber | None:
        from ckpt_tools.core.part_number import PartNumber

        return None if self.part is None else PartNumber.parse(self.part, os.environ)

    @property
    def memory_bytes(self) -> int:
        return parse_size(DEFAULT_MEMORY if self.memory is None else self.memory)


def get_dtype_name(dtype: Any) -> str | None:
    """The name of a dtype, given as one or as torch, numpy or ml_dtypes has it: ``bfloat16`` of ``torch.bfloat16``."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).removeprefix("torch.")


def _check_choice(name: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise UsageError(f"{format_option(name, value)} is not one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of readers."""

    tag: str | None = None
    """Which of several checkpoints of a DeepSpeed folder."""
    model_key: str | None = None
    """The path of the model in a tree such as a DCP: ``app.model``."""
    optim_key: str | None = None
    """The path of the optimizer in the tree."""
    param_order: ParamOrder | None = None
    """Which parameters the numbers of an optimizer mean."""
    optimizer_file: str | Path | None = None
    """Where the optimizer of a model is, if it is apart."""
    include: tuple[str, ...] = ()
    """Globs of tensors. A reader that cannot read every tensor refuses only those that are chosen."""
    exclude: tuple[str, ...] = ()
    state: State | None = None
    """What is used of the checkpoint: weights alone need no choice of an optimizer, the whole state needs the weights
    that the optimizer belongs to. None: not known yet."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of writers."""

    file_name: str | None = None
    """Set if the destination is a single file."""
    max_shard_bytes: int | None = None
    world_size: int = 1
    tag: str | None = None
    """The folder of a DeepSpeed checkpoint. None, here and for the keys: the writer chooses."""
    model_key: str | None = None
    """Where a DCP keeps the model: ``app.model``."""
    optim_key: str | None = None
    """Where a DCP keeps the optimizer."""
    model_config: Mapping[str, Any] = field(default_factory=dict)
    """The content of ``config.json``, if the writer asks for it."""
    shard_map: Mapping[str, str] = field(default_factory=dict)
    """The file of each tensor in a folder of safetensors, by name; used if no size is given."""
    adapter_config: bytes = b""
    """The content of ``adapter_config.json``, if the writer asks for it."""

    @property
    def model_type(self) -> str | None:
        """``model_type`` of ``config.json``; None if it has none."""
        found = self.model_config.get("model_type")
        return found if isinstance(found, str) else None
