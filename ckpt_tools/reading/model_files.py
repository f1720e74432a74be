"""``config.json`` and the other files of a model, copied so that ``from_pretrained`` opens the output.

They are beside the weights, in a folder ``huggingface`` there, or in the folder above, and go into a folder of weights
in safetensors or torch files. A model's own folder gives all its small files but weights and what is a trainer's, code
too, which is copied and never run. Elsewhere it is the names that are known. Only the dtype in ``config.json`` is
changed, to that of the written weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_tools.core.copied_files import make_file_copy, make_file_entry, make_file_key
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import FileLayout, FileSpec, Layout, Literal
from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ConvertOptions
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
from ckpt_tools.errors import CkptError, MalformedError, SourceNotFoundError, StoreError, UsageError
from ckpt_tools.formats.base import Format
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.stores.marker_files import MARKER_NAMES
from ckpt_tools.stores.output_form import OutputForm, SingleFileForm
from ckpt_tools.stores.source import Source, Store
from ckpt_tools.stores.urls import StorageOptions, is_remote, open_source
from ckpt_tools.stores.wrappers import RedirectingStore
from ckpt_tools.trainers.names import is_beside, marks_unfinished
from ckpt_tools.trainers.transformers import ARGUMENTS, COMPANIONS, CONFIG, PREPARATION, STATE, TOKENIZER, TRANSFORMERS
from ckpt_tools.trainers.verl import HUGGING_FACE

MAX_CONFIG_BYTES = 16 << 20
MAX_FILE_BYTES = 256 << 20
"""The largest vocabularies have about 35 MB."""

_SIGNS = ("model_type", "architectures", "architecture", "_class_name", CONFIG_KEY)
"""Keys of a ``config.json`` of transformers, of our training runs, of diffusers or of a quantizer; others' have none of
them."""

_DTYPE_KEYS = ("dtype", "torch_dtype")
"""Of transformers 5, and before."""

_EXTRA = re.compile(r"chat_templates/[\w.-]+\.jinja")

_NOT_CARRIED = re.compile(
    r"(?:.*/)?(?:\..*|.*\.(?:safetensors|bin|pth?|ckpt|gguf|np[yz]|h5|msgpack|onnx(?:_data)?|ot|pkl|distcp|nemo|index\.json"
    r"|zip|gz|sig|digests\.json|md5|sha\d+(?:sum)?|b[23])|(?:md5|sha\d+|b[23])sums?(?:\.txt)?)",
    re.IGNORECASE,
)
"""Hidden files, weights, and what was stated of the bytes of other files."""

SETTINGS_OF_WEIGHTS = ("hf_quant_config.json", "quantize_config.json")
"""Files that say how weights are quantized, of ModelOpt and of GPTQ's and AWQ's own tools."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files of a model: ``config`` is the content of ``config.json``, ``files`` are the others by name. Their sources
    are names in ``store``. ``is_above`` if they were found in the folder above the source, ``is_of_reference`` if they
    are those of a model that the output is like."""

    store: Store
    config: Mapping[str, Any]
    config_source: str
    files: Mapping[str, CompanionFile]
    is_above: bool = False
    is_of_reference: bool = False

    @property
    def sources(self) -> frozenset[str]:
        return frozenset([self.config_source, *(file.source for file in self.files.values())])


def is_model_file(path: str) -> bool:
    """Whether a path in the folder of the weights is one of these files, by the names that are known."""
    return path in (CONFIG, *COMPANIONS) or _EXTRA.fullmatch(path) is not None


def is_carried(path: str) -> bool:
    """Whether a path in a model's own folder is of a file that is copied: not in a folder, and nobody else's."""
    is_others = is_beside(path) or marks_unfinished(path) or path in MARKER_NAMES
    return is_model_file(path) or not ("/" in path or is_others or _NOT_CARRIED.fullmatch(path))


def find_model_files(
    url: str | Path,
    source: Source,
    manifest: Manifest,
    *,
    config: str | Path | None,
    storage_options: StorageOptions,
) -> ModelFiles | None:
    """Files in the folder ``config`` that the user names, else beside the checkpoint ``source`` at ``url``.

    Raises:
        UsageError: ``config`` has no ``config.json`` of a model. SourceNotFoundError: there is no such folder.
        CkptError: a file that was found cannot be read.
    """
    if config is not None:
        return _files_in_named_folder(config, source, storage_options)
    weights = _files_of_weights(manifest)
    for prefix in folders_around(weights):
        is_own = manifest.format in ("safetensors", "torch") and any(path.startswith(prefix) for path in weights)
        found = _files_in(
            source, prefix, is_carried if is_own or prefix.endswith(f"{HUGGING_FACE}/") else is_model_file
        )
        if found is not None:
            return found
    return _files_nearby(url, source, storage_options)


def find_config(
    url: str | Path, source: Source, manifest: Manifest, options: ConvertOptions
) -> Mapping[str, Any] | None:
    """The content of the ``config.json`` that ``find_model_files`` finds; None if there is none. Raises as that."""
    stores = options.storage_options
    found = find_model_files(url, source, manifest, config=options.config, storage_options=stores)
    return None if found is None else found.config


def config_beside(source: Source, manifest: Manifest) -> Mapping[str, Any]:
    """The content of ``config.json`` in the folder ``source`` of ``manifest``; empty if there is none, or it cannot be
    read."""
    for prefix in folders_around(_files_of_weights(manifest)):
        with suppress(CkptError):
            found = config_in(source, prefix)
            if found is not None:
                return found
    return {}


def config_in(source: Source, prefix: str = "") -> Mapping[str, Any] | None:
    """The content of ``config.json`` in the folder ``prefix`` of ``source``; None if there is none of a model.

    Raises:
        FormatError: it is not JSON.
    """
    path = prefix + CONFIG
    if path not in source.files:
        return None
    found = parse_json(source.read_all(path, limit_bytes=MAX_CONFIG_BYTES), path)
    return found if isinstance(found, dict) and any(sign in found for sign in _SIGNS) else None


def with_model_files(layout: Layout, found: ModelFiles, manifest: Manifest) -> Layout:
    """The layout with the files in front of the weights: the index or the only file of weights still comes last."""
    found, notes = fitted(found, manifest)
    text = json.dumps(found.config, indent=2, ensure_ascii=False) + "\n"
    files: list[FileSpec] = [FileLayout(CONFIG, (Literal(text.encode()),))]
    files += [make_file_copy(name, file) for name, file in sorted(found.files.items())]
    copied = {make_file_key(name): make_file_entry(file) for name, file in found.files.items()}
    return replace(
        layout,
        files=[*files, *layout.files],
        notes=(*layout.notes, *notes),
        copied_files={**(layout.copied_files or {}), **copied},
        config=found.config,
    )


def takes_model_files(writer: Format, form: OutputForm) -> bool:
    """Whether an output is a folder that ``from_pretrained`` opens, with all files of a model."""
    return (
        "config" in writer.writing_options and not writer.asks_adapter_config and not isinstance(form, SingleFileForm)
    )


def with_stated_ties(
    manifest: Manifest, files: ModelFiles, *, untie: bool
) -> tuple[Manifest, ModelFiles, tuple[Note, ...]]:
    """The manifest and ``config.json`` with embeddings and head tied as ``config.json`` says, or with ``untie`` as two
    tensors, and notes. Raises CkptError."""
    manifest, notes = match_ties_to_config(manifest, files.config, untie=untie)
    return manifest, replace(files, config=make_untied_config(files.config)) if untie else files, notes


def fitted(found: ModelFiles, manifest: Manifest) -> tuple[ModelFiles, tuple[Note, ...]]:
    """The files as they are written beside the weights of ``manifest``, and notes."""
    dtype, notes = _written_dtype(manifest), tuple(_notes_on_quantization(found, manifest))
    gone = {note.what for note in notes if note.outcome is Outcome.DROPPED}
    if f"{CONFIG_KEY} in {CONFIG}" in gone:
        found = replace(found, config=drop_quantization_config(found.config))
    found = replace(found, files={name: file for name, file in found.files.items() if name not in gone})
    notes += tuple(_notes(found, dtype))
    return replace(found, config=_with_dtype(found.config, dtype)), notes


def missing_note(source: Source, manifest: Manifest) -> Note | None:
    """Note on a missing ``config.json`` if transformers made the source."""
    names = {path.rpartition("/")[2] for path in source.files}
    is_transformers = manifest.trainer is not None and manifest.trainer.trainer == TRANSFORMERS.name
    if not is_transformers and not names & {*COMPANIONS, ARGUMENTS, STATE}:
        return None
    why = f"not found beside the source, and from_pretrained needs it; name its folder with {format_option('config')}"
    return Note(Outcome.MISSING, CONFIG, why)


def _files_of_weights(manifest: Manifest) -> frozenset[str]:
    """Files of the store that hold weights; if these are computed, or there are none, those of all tensors."""
    found = (entry.shards.files for key, entry in manifest.tensors.items() if key.slot == WEIGHT)
    return frozenset().union(*found) & manifest.stored_files or manifest.stored_files


def folders_around(files: Iterable[str]) -> Iterator[str]:
    """The folder that holds all the files, and those above it, the nearest first; of each also ``huggingface``."""
    folders = [path.split("/")[:-1] for path in files]
    common = []
    for parts in zip(*folders, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    for depth in range(len(common), -1, -1):
        base = "".join(f"{part}/" for part in common[:depth])
        yield base
        yield f"{base}{HUGGING_FACE}/"


def _files_in(source: Source, prefix: str, is_chosen: Callable[[str], bool]) -> ModelFiles | None:
    """Files in a folder of ``source`` whose names are chosen."""
    content = config_in(source, prefix)
    if content is None:
        return None
    names = (path.removeprefix(prefix) for path in source.files if path.startswith(prefix))
    chosen = [name for name in names if name != CONFIG and is_chosen(name)]
    files = {name: CompanionFile(prefix + name, source.files[prefix + name]) for name in chosen}
    return ModelFiles(source.store, content, prefix + CONFIG, _small(files))


def _small(files: Mapping[str, CompanionFile]) -> Mapping[str, CompanionFile]:
    """The files, of which those that only a model's own folder gives may be too large and are left."""
    for name, file in files.items():
        if file.num_bytes > MAX_FILE_BYTES and is_model_file(name):
            raise MalformedError(f"{file.num_bytes:,} bytes are too many for a {name}", path=file.source)
    return {name: file for name, file in files.items() if file.num_bytes <= MAX_FILE_BYTES}


def _files_in_named_folder(folder: str | Path, source: Source, storage_options: StorageOptions) -> ModelFiles:
    opened = open_source(folder, storage_options)
    found = _files_in(opened, "", is_carried)
    if found is None:
        raise UsageError(f"{format_option('config', folder)} has no {CONFIG} of a model")
    return _joined(source, found, {name: (opened.store, file.source) for name, file in found.files.items()})


def _files_nearby(url: str | Path, source: Source, storage_options: StorageOptions) -> ModelFiles | None:
    """Files in the folder of a single file, or above a folder: looked up by name, because that folder may be large."""
    base, is_above = folder_near(url, source)
    if base is None:
        return None

    def look(name: str) -> Source | None:
        try:
            return open_source(f"{base}/{name}", storage_options)
        except (SourceNotFoundError, StoreError):
            return None

    opened, content = look(CONFIG), None
    with suppress(CkptError):  # it may belong to something else
        content = None if opened is None else config_in(opened)
    if content is None:
        return None
    others = {name: found for name in COMPANIONS if (found := look(name)) is not None and name in found.files}
    files = {name: CompanionFile(name, found.files[name]) for name, found in others.items()}
    near = ModelFiles(source.store, content, CONFIG, _small(files), is_above)
    return _joined(source, near, {name: (found.store, name) for name, found in others.items()})


def folder_near(url: str | Path, source: Source) -> tuple[str | None, bool]:
    """The folder, and whether it is the one above a folder."""
    text = str(url).rstrip("/") if is_remote(url) else str(Path(url).expanduser().absolute())
    base, _, name = text.rpartition("/")
    if not base or base.endswith(":/"):
        return None, False
    is_file = set(source.files) == {name} or name.endswith(".index.json")
    if name in MARKER_NAMES and not is_file:
        base = base.rpartition("/")[0]
    return base, not is_file


def _joined(source: Source, found: ModelFiles, others: Mapping[str, tuple[Store, str]]) -> ModelFiles:
    """``found`` with its files under names that no file of the source has."""
    prefix = "beside/"
    while any(path.startswith(prefix) for path in source.files):
        prefix = f"_{prefix}"
    store = RedirectingStore(source.store, {prefix + name: where for name, where in others.items()})
    files = {name: replace(file, source=prefix + name) for name, file in found.files.items()}
    return replace(found, store=store, files=files, config_source=prefix + CONFIG)


def _written_dtype(manifest: Manifest) -> DType | None:
    """The dtype of most bytes of the floating-point weights; None if there are none."""
    sizes: dict[DType, int] = {}
    for key, entry in manifest.tensors.items():
        if key.slot == WEIGHT and entry.kind is Kind.PARAMETER and entry.dtype.value in _NAMES:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


_NAMES = frozenset({"float64", "float32", "bfloat16", "float16"})


def _with_dtype(config: Mapping[str, Any], dtype: DType | None) -> dict[str, Any]:
    """``config`` with the dtype under its own key, else under the one that every version of transformers reads. That
    of quantized weights is not the one for computing, which stays."""
    found = dict(config)
    if dtype is None or "quantization_config" in config or not {"model_type", "architectures"} & {*config}:
        return found
    for key in [key for key in _DTYPE_KEYS if key in config] or ["torch_dtype"]:
        found[key] = dtype.value
    nested = {key: value for key, value in config.items() if isinstance(value, dict) and {*_DTYPE_KEYS} & {*value}}
    for name, part in nested.items():
        found[name] = {key: dtype.value if key in _DTYPE_KEYS and value else value for key, value in part.items()}
    return found


def _notes_on_quantization(found: ModelFiles, manifest: Manifest) -> Iterator[Note]:
    """``config.json`` says how weights are quantized. Where it names a method whose weights are known by their names
    and types, and there are none, as of a model that was trained from a quantized one, it does not say so any more."""
    is_quantized, said = has_quantized_weight(manifest), get_quantization_config(found.config)
    if not is_quantized:
        lost = (name for name in SETTINGS_OF_WEIGHTS if name in found.files)
        yield from (Note(Outcome.DROPPED, name, "no weight is quantized", asked=True) for name in lost)
    if said is not None and not is_quantized and get_quant_method(said) in KNOWN_METHODS:
        yield Note(Outcome.DROPPED, f"{CONFIG_KEY} in {CONFIG}", "no weight is quantized", asked=True)
    elif is_quantized and said is None:
        yield Note(Outcome.MISSING, f"{CONFIG_KEY} in {CONFIG}", "weights are quantized, and it does not say how")


def _notes(found: ModelFiles, dtype: DType | None) -> Iterator[Note]:
    before = next((found.config[key] for key in _DTYPE_KEYS if found.config.get(key)), None)
    now = next((value for key, value in _with_dtype(found.config, dtype).items() if key in _DTYPE_KEYS), before)
    if before is not None and now != before:
        yield Note(Outcome.CAST, f"dtype in {CONFIG}", f"{before} to {now}, the dtype of the weights")
    if found.is_above:
        why = "found in the folder above the source and taken for this model's"
        yield Note(Outcome.KEPT, CONFIG, why)
    if "architecture" not in found.config and not {*TOKENIZER, *PREPARATION} & {*found.files}:
        advice = "" if found.is_of_reference else f"; name a folder that has one with {format_option('config')}"
        yield Note(Outcome.MISSING, "tokenizer or preprocessor", f"none found beside {CONFIG}{advice}")
    named = found.config.get("auto_map")
    classes = [each for each in named.values() if isinstance(each, str)] if isinstance(named, dict) else []
    files = sorted({f"{each.partition('.')[0]}.py" for each in classes if "--" not in each} - {*found.files})
    yield from (Note(Outcome.MISSING, name, f"code that {CONFIG} names is not beside it") for name in files)
