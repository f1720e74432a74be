"""Files beside weights that describe the model: ``config.json``, tokenizer, image preprocessing.

They are read from a local folder. Those of a remote checkpoint are copied into a temporary one first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any

from blake3 import blake3

from ckpt_tools.errors import FormatError, SourceNotFoundError, StoreError, UnsupportedError

from ..common.errors import describe_error
from ..common.urls import find_file_system, is_url

CONFIG = "config.json"
CONFIG_PLACES = ("", "huggingface", "..")
"""Folders to look in, relative to the folder of the weights; verl uses ``huggingface``."""

ADAPTER_CONFIG = "adapter_config.json"
OWN_FOLDER = ("",)

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
MODELOPT_CONFIG = "hf_quant_config.json"

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja")
MAX_BYTES = 64 * 2**20  # limit of one file; the largest tokenizers have some 35 MB


@contextmanager
def open_companion_folder(
    url: str | Path, options: Mapping[str, Any] | None, *, name: str = CONFIG, places: Sequence[str] = CONFIG_PLACES
) -> Iterator[Path | None]:
    """A local folder with the file ``name`` and its companions, within the block; None if there is none. ``places`` are
    looked through in turn. Raises StoreError if a remote one cannot be read."""
    fs, path = find_file_system(str(url), options)
    with ExitStack() as stack:
        try:
            folder = _find_folder(fs, path, name, places)
            if folder is not None and is_url(url):
                temporary = stack.enter_context(TemporaryDirectory(prefix="ckpt-tools-config-"))
                _copy_small_files(fs, folder, Path(temporary))
                folder = temporary
        except OSError as error:
            raise StoreError(f"{url}: the files beside the weights cannot be read ({error})") from error
        yield None if folder is None else Path(folder)


@contextmanager
def open_config_folder(
    url: str | Path, options: Mapping[str, Any] | None, config: str | Path | None
) -> Iterator[Path | None]:
    """The folder ``config``, or the one that :func:`open_companion_folder` finds for the weights at ``url``. Raises
    SourceNotFoundError if ``config`` has no ``config.json``, and as ``open_companion_folder``."""
    with open_companion_folder(config or url, options, places=OWN_FOLDER if config else CONFIG_PLACES) as folder:
        if config and folder is None:
            raise SourceNotFoundError(f"--config {config} is not a folder with {CONFIG}")
        yield folder


def _find_folder(fs: Any, path: str, name: str, places: Sequence[str]) -> str | None:
    is_file = fs.isfile(path)
    base = path.rpartition("/")[0] if is_file else path
    for place in places:
        if place == ".." and is_file:
            continue  # the folder above a single file's own says nothing of it
        folder = base.rpartition("/")[0] if place == ".." else f"{base}/{place}".rstrip("/")
        if fs.isfile(f"{folder}/{name}"):
            return folder
    return None


def _copy_small_files(fs: Any, folder: str, into: Path) -> None:
    for entry in fs.ls(folder, detail=True):
        name = entry["name"].rstrip("/").rpartition("/")[2]
        if entry["type"] == "file" and name.endswith(COMPANION_SUFFIXES) and entry["size"] <= MAX_BYTES:
            (into / name).write_bytes(fs.cat_file(entry["name"]))


def read_config(folder: Path | None, name: str = CONFIG) -> dict[str, Any]:
    """The JSON object in the file ``name`` of ``folder``, empty if there is none. Raises FormatError."""
    if folder is None or not (folder / name).is_file():
        return {}
    try:
        entries = json.loads((folder / name).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{folder / name} cannot be read ({describe_error(error)})") from error
    if not isinstance(entries, dict):
        raise FormatError(f"{folder / name} is not a JSON object")
    return entries


def refuse_adapter(url: str | Path, options: Mapping[str, Any] | None) -> None:
    """Raises UnsupportedError if the weights at ``url`` are an adapter of PEFT, with ``adapter_config.json`` beside."""
    last = str(url).rstrip("/").rpartition("/")[2]
    if last.endswith(WEIGHT_SUFFIXES) and not last.startswith("adapter_model."):
        return
    with open_companion_folder(url, options, name=ADAPTER_CONFIG, places=OWN_FOLDER) as folder:
        settings = read_config(folder, ADAPTER_CONFIG)
    if not settings:
        return
    kind, base = settings.get("peft_type"), settings.get("base_model_name_or_path") or "BASE"
    advice = "merge it with PEFT first"
    if kind == "LORA":
        src = str(url)[: -len(last)].rstrip("/") if last.endswith(WEIGHT_SUFFIXES) else str(url)
        advice = f"merge it first: ckpt-tools merge-lora {quote(str(base))} {quote(src or '.')} OUT --to safetensors"
    raise UnsupportedError(f"{url} is an adapter of {base} (PEFT {kind}); {advice}")


def find_quantization(folder: Path | None) -> str | None:
    """The entry in ``folder`` that says how the weights are quantized; None if there is none."""
    config = read_config(folder)
    text_config = config.get("text_config")
    parts = [config, text_config] if isinstance(text_config, dict) else [config]
    entry = next((f"{key} in {CONFIG}" for part in parts for key in QUANTIZATION_KEYS if part.get(key)), None)
    if entry is None and folder is not None and (folder / MODELOPT_CONFIG).is_file():
        return MODELOPT_CONFIG
    return entry


def refuse_quantized(folder: Path | None) -> None:
    """Raises UnsupportedError if the files in ``folder`` say that the weights are quantized."""
    entry = find_quantization(folder)
    if entry is not None:
        raise UnsupportedError(
            f"{entry} beside the weights says that they are quantized; load them with --dequantize, or write "
            "floating-point weights first: ckpt-tools convert SRC DST --dequantize"
        )


def digest_config_folder(
    url: str | Path, options: Mapping[str, Any] | None = None, config: str | Path | None = None
) -> str | None:
    """BLAKE3 of the files of :func:`open_config_folder`, which decide how inputs are prepared. None if there are none.
    Raises as ``open_config_folder``."""
    with open_config_folder(url, options, config) as folder:
        if folder is None:
            return None
        digest = blake3()
        for file in sorted(folder.iterdir()):
            if file.suffix in COMPANION_SUFFIXES and file.is_file() and file.stat().st_size <= MAX_BYTES:
                digest.update(f"{file.name}\0{blake3(file.read_bytes()).hexdigest()}\0".encode())
        return f"blake3:{digest.hexdigest()}"
