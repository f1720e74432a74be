"""Paths and URLs that a user types: which store each is, and which format the name of a file implies."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

from ckpt_tools.arguments import check_has_scheme, is_remote
from ckpt_tools.core.format_names import FORMAT_BY_FILE_SUFFIX
from ckpt_tools.errors import DestinationExistsError, SourceNotFoundError, StoreError, UnsupportedError, UsageError
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.output_names import MARKER_NAMES, is_marker
from ckpt_tools.stores.source import Source

if TYPE_CHECKING:
    from ckpt_tools.stores.publishing import OutputLocation

_FOREIGN_SUFFIX_NAMES = """
    npy ggml ggmf ggjt h5 hdf5 keras onnx tflite pb msgpack mlmodel mlpackage engine plan joblib pkl pickle
    nemo mar ot pdparams pdopt safetensor tensors distcp metadata json yaml yml csv parquet arrow zarr zip tar tgz gz
    bz2 xz zst 7z rar txt md
"""

FOREIGN_SUFFIXES = frozenset(f".{name}" for name in _FOREIGN_SUFFIX_NAMES.split())
"""Suffixes of files in formats that are not written: a folder of such a name is probably a mistake."""

AMBIGUOUS_SUFFIXES = {".ckpt": ("safetensors", "torch")}
"""Lightning's ending of a torch file, and of the folder of a sharded checkpoint: refused for formats that could be one
file."""

_FILE_SCHEME = "file://"

CHOOSE_ANOTHER_DESTINATION = "choose another destination"
"""The end of messages about a destination that is refused."""

StorageOptions: TypeAlias = Mapping[str, Any] | None
"""Options for reaching remote stores: credentials, an endpoint. One call uses the same for every store."""


def local_path(url: str | Path) -> Path:
    """The path of a path or ``file://`` URL.

    Raises:
        UnsupportedError: the URL has another scheme. UsageError: its path is not absolute.
    """
    if is_remote(url):
        raise UnsupportedError(f"{url}: only local paths and file:// URLs are supported here")
    if not str(url).startswith(_FILE_SCHEME):
        return Path(url).expanduser()
    path = Path(unquote(str(url).removeprefix(_FILE_SCHEME).removeprefix("localhost")))
    if not path.is_absolute():
        raise UsageError(f"{url}: the path of a file:// URL is absolute; write file:///FOLDER, or a path alone")
    return path


def open_source(url: str | Path, storage_options: StorageOptions = None) -> Source:
    """Source at ``url``: a folder, or one file as a store of that file alone.

    An index stands for its shards, and ``.metadata`` or ``latest`` for the folder.

    Raises:
        SourceNotFoundError: nothing is there. StoreError: it cannot be reached.
    """
    folder, _, name = str(url).rpartition("/") if is_remote(url) else ("", "", local_path(url).name)
    if name in MARKER_NAMES and folder:
        return _open_any_source(folder, storage_options)
    if not name.endswith(".index.json"):
        return _open_any_source(url, storage_options)
    source = _open_any_source(folder if is_remote(url) else local_path(url).parent, storage_options)
    if name not in source.files:
        raise SourceNotFoundError(f"there is no file {url}")
    other_indexes = {path for path in source.files if path.endswith(".index.json") and path != name}
    return replace(source, files={path: size for path, size in source.files.items() if path not in other_indexes})


def open_run_source(url: str | Path, storage_options: StorageOptions = None) -> Source:
    """Like ``open_source``, for a folder of one or more checkpoints, with the files in hidden folders: savers
    write unfinished checkpoints there.

    Raises:
        SourceNotFoundError: nothing is there. StoreError: it cannot be reached.
    """
    source = _open_any_source(url, storage_options)
    return replace(source, files={**source.files, **source.store.list_hidden()})


def _open_any_source(url: str | Path, storage_options: StorageOptions) -> Source:
    if is_remote(url):
        from ckpt_tools.stores.remote import open_remote_source

        return open_remote_source(str(url), storage_options or {})
    path = local_path(url)
    try:
        path_exists, is_folder = path.exists(), path.is_dir()
    except OSError as error:
        raise StoreError(f"opening failed: {error.strerror}", path=str(path)) from error
    if not path_exists:
        raise SourceNotFoundError(f"there is no file or folder {path}")
    if is_folder or path.name in MARKER_NAMES:
        return Source.open(LocalStore(path if is_folder else path.parent))
    return Source.open(LocalStore(path.parent, only_file=path.name))


def open_output_location(url: str | Path, storage_options: StorageOptions = None) -> OutputLocation:
    """Location of an output, one file if the name implies it; nothing is read or written.

    Raises:
        UsageError: the URL is read-only, or has no scheme.
    """
    location: OutputLocation
    if is_remote(url):
        from ckpt_tools.stores.remote import open_remote_location

        location = open_remote_location(str(url), storage_options or {})
    else:
        from ckpt_tools.stores.local.location import LocalOutputLocation

        check_has_scheme(url)
        location = LocalOutputLocation(local_path(url))
    return location if find_format_by_suffix(location.name) is None else location.as_single_file()


def check_not_nested(src: str | Path, dst: str | Path, storage_options: StorageOptions = None) -> None:
    """Raises DestinationExistsError if one of the two is the other, or is inside it: a reader could take the output
    for a part of the source."""
    source_service, source_path = _service_and_path(src, storage_options)
    target_service, target_path = _service_and_path(dst, storage_options)
    if source_service != target_service:
        return
    is_same_path = _is_same_file if source_service == "file" else PurePosixPath.__eq__
    if is_same_path(source_path, target_path):
        raise DestinationExistsError(f"{dst} is the source itself and is not replaced; {CHOOSE_ANOTHER_DESTINATION}")
    for inner, outer, verb in ((source_path, target_path, "contains"), (target_path, source_path, "is inside")):
        if any(is_same_path(outer, parent) for parent in inner.parents):
            raise DestinationExistsError(
                f"{dst} {verb} the source {src}, which is not changed; {CHOOSE_ANOTHER_DESTINATION}"
            )


def _is_same_file(left: PurePosixPath, right: PurePosixPath) -> bool:
    with suppress(OSError):
        return left == right or Path(left).samefile(right)
    return False


def _service_and_path(url: str | Path, storage_options: StorageOptions = None) -> tuple[str, PurePosixPath]:
    """The service of ``url`` and its absolute path there, with links followed and ``..`` resolved.

    For a file that stands for its folder, such as ``.metadata`` or an index, it is the path of the folder.
    """
    if is_remote(url):
        from ckpt_tools.stores.remote import locate_on_service

        service, path_on_service = locate_on_service(str(url), storage_options or {})
    else:
        service, path_on_service = "file", str(local_path(url))
    path = PurePosixPath(
        os.path.realpath(path_on_service) if service == "file" else posixpath.normpath(f"/{path_on_service}")
    )
    return service, path.parent if is_marker(path.name) else path


def find_format_by_suffix(name: str) -> str | None:
    """The format that a destination's name implies, where it is one file."""
    return FORMAT_BY_FILE_SUFFIX.get(PurePosixPath(name).suffix)


def check_destination_suffix(name: str, to: str | None) -> None:
    """Raises UsageError where ``name`` looks like a file of a format that is not written, whatever ``to`` says."""
    suffix = PurePosixPath(name).suffix
    *other_suffixes, last_suffix = FORMAT_BY_FILE_SUFFIX
    is_single_file = to is None or to in AMBIGUOUS_SUFFIXES.get(suffix.lower(), ())
    is_foreign = suffix.lower() in FOREIGN_SUFFIXES or (suffix.lower() in AMBIGUOUS_SUFFIXES and is_single_file)
    if is_foreign or (suffix not in FORMAT_BY_FILE_SUFFIX and suffix.lower() in FORMAT_BY_FILE_SUFFIX):
        raise UsageError(
            f"{name}: files that end in {suffix} are not written; name a file that ends in {', '.join(other_suffixes)} "
            f"or {last_suffix}, or a folder without such an ending"
        )
