"""``config.json`` and the other files of a model, copied so that ``from_pretrained`` opens the output.

They go into a folder of weights in safetensors or torch files. A model's own folder gives all its small
files but weights and what is a trainer's, code too, which is copied and never run. Elsewhere it is the names that are
known. Only the dtype in ``config.json`` is changed, to that of the written weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import FileLayout, FileSpec, Layout, Literal, make_file_copy, make_file_entry, make_file_key
from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.quantized import (
    CONFIG_KEY,
    KNOWN_METHODS,
    drop_quantization_config,
    get_quant_method,
    get_quantization_config,
    has_quantized_weight,
)
from ckpt_tools.core.ties import make_untied_config, match_ties_to_config
from ckpt_tools.core.trainer_folder import CompanionFile
from ckpt_tools.errors import CkptError, MalformedError, UsageError
from ckpt_tools.formats.base import Format
from ckpt_tools.reading.companions import MAX_CONFIG_BYTES, Companion, iter_folders_around, list_weight_files
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.output_names import MARKER_NAMES, OutputForm
from ckpt_tools.stores.source import Source, Store
from ckpt_tools.stores.wrappers import RedirectingStore
from ckpt_tools.trainers.names import is_companion_file, is_unfinished_marker
from ckpt_tools.trainers.transformers import (
    ARGUMENTS_FILE,
    COMPANION_FILES,
    CONFIG_FILE,
    PROCESSOR_FILES,
    STATE_FILE,
    TOKENIZER_FILES,
    TRANSFORMERS,
)
from ckpt_tools.trainers.verl import HUGGING_FACE_FOLDER

MAX_FILE_BYTES = 256 << 20
"""The largest vocabularies have about 35 MB."""

_MODEL_CONFIG_KEYS = ("model_type", "architectures", "architecture", "_class_name", "input_features", CONFIG_KEY)
"""Keys of a ``config.json`` of transformers, of our training runs, of diffusers, of lerobot or of a quantizer; others'
have none of them."""

_DTYPE_KEYS = ("dtype", "torch_dtype")
"""Of transformers 5, and before."""

_CHAT_TEMPLATE_FILE = re.compile(r"chat_templates/[\w.-]+\.jinja")

_NOT_COPIED = re.compile(
    r"(?:.*/)?(?:\..*|.*\.(?:safetensors|bin|pth?|ckpt|gguf|np[yz]|h5|msgpack|onnx(?:_data)?|ot|pkl|distcp|nemo|index\.json"
    r"|zip|gz|sig|digests\.json|md5|sha\d+(?:sum)?|b[23])|(?:md5|sha\d+|b[23])sums?(?:\.txt)?)",
    re.IGNORECASE,
)
"""Hidden files, weights, and what was stated of the bytes of other files."""

QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json")
"""Files that say how weights are quantized, of ModelOpt and of GPTQ's and AWQ's own tools."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files of a model: ``config`` is the content of ``config.json``, ``files`` are the others by name. Their sources
    are names in the source, or in ``locations``: names that no file of the source has, each with a store and the name
    there. ``is_from_parent`` if they were found in the folder above the source, ``is_from_reference`` if they are those
    of a model that the output is like."""

    config: Mapping[str, Any]
    config_source: str
    files: Mapping[str, CompanionFile]
    locations: Mapping[str, tuple[Store, str]] = field(default_factory=dict)
    is_from_parent: bool = False
    is_from_reference: bool = False

    @property
    def sources(self) -> frozenset[str]:
        return frozenset([self.config_source, *(file.source for file in self.files.values())])

    def join_to(self, store: Store) -> Store:
        """``store``, the source's, with the files that lie elsewhere."""
        return RedirectingStore(store, self.locations) if self.locations else store


def is_model_file(path: str) -> bool:
    """Whether a path in the folder of the weights is one of these files, by the names that are known."""
    return path in (CONFIG_FILE, *COMPANION_FILES) or _CHAT_TEMPLATE_FILE.fullmatch(path) is not None


def is_copied_file(path: str) -> bool:
    """Whether a path in a model's own folder is of a file that is copied: not in a folder, and of no other owner."""
    is_other_file = is_companion_file(path) or is_unfinished_marker(path) or path in MARKER_NAMES
    return is_model_file(path) or not ("/" in path or is_other_file or _NOT_COPIED.fullmatch(path))


def choose_model_files(
    companions: Iterable[Companion], source: Source, manifest: Manifest, config_folder: str | Path | None
) -> ModelFiles | None:
    """The files in the folder of the first of ``companions``, called ``config.json``, that is of a model. Raises as
    ``OpenedCheckpoint.find_model_files``."""
    for each in takewhile(lambda each: each.place == "named" or config_folder is None, companions):
        config = None
        # One beside or above the source may belong to something else.
        with suppress(CkptError) if each.open_sibling is not None else nullcontext():
            config = read_model_config(each.source, each.prefix)
        if config is not None:
            return _collect_model_files(each, config, source, manifest)
    if config_folder is not None:
        raise UsageError(f"{format_option('config', config_folder)} has no {CONFIG_FILE} of a model")
    return None


def _collect_model_files(
    companion: Companion, config: Mapping[str, Any], source: Source, manifest: Manifest
) -> ModelFiles:
    """The files beside a ``config.json``. Those outside of ``source`` get names that none of its files has."""
    home, prefix = companion.source, companion.prefix
    if companion.open_sibling is not None:
        opened_sources = {name: companion.open_sibling(name) for name in COMPANION_FILES}
        sources = {name: each for name, each in opened_sources.items() if each is not None}
    else:
        is_own_folder = manifest.format in ("safetensors", "torch") or prefix.endswith(f"{HUGGING_FACE_FOLDER}/")
        is_copied = is_copied_file if companion.place == "named" or is_own_folder else is_model_file
        names = (path.removeprefix(prefix) for path in home.select_below(prefix).files)
        sources = {name: home for name in names if name != CONFIG_FILE and is_copied(name)}
    files: dict[str, CompanionFile] = {}
    for name, each in sources.items():
        num_bytes = each.files[prefix + name]
        if num_bytes <= MAX_FILE_BYTES:
            files[name] = CompanionFile(prefix + name, num_bytes)
        elif is_model_file(name):  # others, which only a model's own folder gives, are left
            raise MalformedError(f"{num_bytes:,} bytes are too many for a {name}", path=prefix + name)
    if companion.place == "around":
        return ModelFiles(config, prefix + CONFIG_FILE, files)
    prefix = "beside/"
    while source.select_below(prefix).files:
        prefix = f"_{prefix}"
    return ModelFiles(
        config,
        prefix + CONFIG_FILE,
        {name: replace(file, source=prefix + name) for name, file in files.items()},
        {prefix + name: (sources[name].store, name) for name in files},
        is_from_parent=companion.place == "above",
    )


def read_nearest_config(source: Source, manifest: Manifest) -> Mapping[str, Any]:
    """The content of ``config.json`` in the folder ``source`` of ``manifest``; empty if there is none, or it cannot be
    read."""
    for prefix in iter_folders_around(list_weight_files(manifest)):
        with suppress(CkptError):
            config = read_model_config(source, prefix)
            if config is not None:
                return config
    return {}


def read_model_config(source: Source, prefix: str = "") -> Mapping[str, Any] | None:
    """The content of ``config.json`` in the folder ``prefix`` of ``source``; None if there is none of a model.

    Raises:
        FormatError: it is not JSON.
    """
    path = prefix + CONFIG_FILE
    if path not in source.files:
        return None
    content = parse_json(source.read_all(path, limit_bytes=MAX_CONFIG_BYTES), path)
    return content if isinstance(content, dict) and any(sign in content for sign in _MODEL_CONFIG_KEYS) else None


def add_model_files(layout: Layout, model_files: ModelFiles, manifest: Manifest) -> Layout:
    """The layout with the files in front of the weights: the index or the only file of weights still comes last."""
    model_files, notes = fit_to_output(model_files, manifest)
    text = json.dumps(model_files.config, indent=2, ensure_ascii=False) + "\n"
    files: list[FileSpec] = [FileLayout(CONFIG_FILE, (Literal(text.encode()),))]
    files += [make_file_copy(name, file) for name, file in sorted(model_files.files.items())]
    copied_entries = {make_file_key(name): make_file_entry(file) for name, file in model_files.files.items()}
    return replace(
        layout,
        files=[*files, *layout.files],
        notes=(*layout.notes, *notes),
        copied_files={**(layout.copied_files or {}), **copied_entries},
        config=model_files.config,
    )


def is_pretrained_folder(writer: Format, form: OutputForm) -> bool:
    """Whether an output is a folder that ``from_pretrained`` opens, with all files of a model."""
    return "config" in writer.writing_options and not writer.asks_adapter_config and form.file_name is None


def apply_config_ties(
    manifest: Manifest, files: ModelFiles, *, untie: bool
) -> tuple[Manifest, ModelFiles, tuple[Note, ...]]:
    """The manifest and ``config.json`` with embeddings and head tied as ``config.json`` says, or with ``untie`` as two
    tensors, and notes. Raises CkptError."""
    manifest, notes = match_ties_to_config(manifest, files.config, untie=untie)
    return manifest, replace(files, config=make_untied_config(files.config)) if untie else files, notes


def fit_to_output(model_files: ModelFiles, manifest: Manifest) -> tuple[ModelFiles, tuple[Note, ...]]:
    """The files as they are written beside the weights of ``manifest``, and notes."""
    dtype, notes = _find_main_dtype(manifest), tuple(_iter_quantization_notes(model_files, manifest))
    dropped_names = {note.what for note in notes if note.outcome is Outcome.DROPPED}
    config = model_files.config
    if f"{CONFIG_KEY} in {CONFIG_FILE}" in dropped_names:
        config = drop_quantization_config(config)
    files = {name: file for name, file in model_files.files.items() if name not in dropped_names}
    model_files = replace(model_files, config=config, files=files)
    notes += tuple(_iter_config_notes(model_files, dtype))
    config = _set_config_dtype(config, dtype)
    if manifest.quantization_config:
        config[CONFIG_KEY] = manifest.quantization_config
    return replace(model_files, config=config), notes


def note_missing_config(source: Source, manifest: Manifest) -> Note | None:
    """Note on a missing ``config.json`` if transformers made the source."""
    names = {path.rpartition("/")[2] for path in source.files}
    is_transformers = manifest.trainer is not None and manifest.trainer.trainer == TRANSFORMERS.name
    if not is_transformers and not names & {*COMPANION_FILES, ARGUMENTS_FILE, STATE_FILE}:
        return None
    why = f"not found beside the source, and from_pretrained needs it; name its folder with {format_option('config')}"
    return Note(Outcome.MISSING, CONFIG_FILE, why)


def _find_main_dtype(manifest: Manifest) -> DType | None:
    """The dtype of most bytes of the floating-point weights; None if there are none."""
    sizes: dict[DType, int] = {}
    for key, entry in manifest.tensors.items():
        if key.slot == WEIGHT and entry.kind is Kind.PARAMETER and entry.dtype.value in _FLOAT_DTYPES:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


_FLOAT_DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"})


def _set_config_dtype(config: Mapping[str, Any], dtype: DType | None) -> dict[str, Any]:
    """``config`` with the dtype under its own key, else under the one that every version of transformers reads. That
    of quantized weights is not the one for computing, which stays."""
    new_config = dict(config)
    if dtype is None or "quantization_config" in config or not {"model_type", "architectures"} & {*config}:
        return new_config
    for key in [key for key in _DTYPE_KEYS if key in config] or ["torch_dtype"]:
        new_config[key] = dtype.value
    nested = {key: value for key, value in config.items() if isinstance(value, dict) and {*_DTYPE_KEYS} & {*value}}
    for name, part in nested.items():
        new_config[name] = {key: dtype.value if key in _DTYPE_KEYS and value else value for key, value in part.items()}
    return new_config


def _iter_quantization_notes(model_files: ModelFiles, manifest: Manifest) -> Iterator[Note]:
    """``config.json`` says how weights are quantized. Where it names a method whose weights are known by their names
    and types, and there are none, as of a model that was trained from a quantized one, it does not say so any more."""
    is_anew, quantization = bool(manifest.quantization_config), get_quantization_config(model_files.config)
    is_quantized = not is_anew and has_quantized_weight(manifest)
    why = "weights are quantized anew" if is_anew else "no weight is quantized"
    if not is_quantized:
        dropped_files = (name for name in QUANTIZATION_FILES if name in model_files.files)
        yield from (Note(Outcome.DROPPED, name, why, asked=True) for name in dropped_files)
    if quantization is not None and not is_quantized and (is_anew or get_quant_method(quantization) in KNOWN_METHODS):
        yield Note(Outcome.DROPPED, f"{CONFIG_KEY} in {CONFIG_FILE}", why, asked=True)
    elif is_quantized and quantization is None:
        yield Note(Outcome.MISSING, f"{CONFIG_KEY} in {CONFIG_FILE}", "weights are quantized, and it does not say how")


def _iter_config_notes(model_files: ModelFiles, dtype: DType | None) -> Iterator[Note]:
    configs = (model_files.config, _set_config_dtype(model_files.config, dtype))
    old, new = (next((each[key] for key in _DTYPE_KEYS if each.get(key)), None) for each in configs)
    if old is not None and new != old:
        yield Note(Outcome.CAST, f"dtype in {CONFIG_FILE}", f"{old} to {new}, the dtype of the weights")
    if model_files.is_from_parent:
        yield Note(Outcome.KEPT, CONFIG_FILE, "found in the folder above the source and taken for this model's")
    if "architecture" not in model_files.config and not {*TOKENIZER_FILES, *PROCESSOR_FILES} & {*model_files.files}:
        advice = "" if model_files.is_from_reference else f"; name a folder that has one with {format_option('config')}"
        yield Note(Outcome.MISSING, "tokenizer or preprocessor", f"none found beside {CONFIG_FILE}{advice}")
    auto_map = model_files.config.get("auto_map")
    classes = [each for each in auto_map.values() if isinstance(each, str)] if isinstance(auto_map, dict) else []
    code_files = {f"{each.partition('.')[0]}.py" for each in classes if "--" not in each}
    missing_code = sorted(code_files - model_files.files.keys())
    yield from (Note(Outcome.MISSING, name, f"code that {CONFIG_FILE} names is not beside it") for name in missing_code)
