"""Paths and URLs that a user types: which store each is, and which format the name of a file implies."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote, urlsplit

from ckpt_tools.core.applicability import STORE_RULES, OptionContext, check_applicability
from ckpt_tools.core.format_names import FORMAT_BY_FILE_SUFFIX
from ckpt_tools.errors import DestinationExistsError, SourceNotFoundError, StoreError, UnsupportedError, UsageError
from ckpt_tools.stores.local.store import LocalStore
from ckpt_tools.stores.marker_files import MARKERS, is_marker
from ckpt_tools.stores.source import Source

if TYPE_CHECKING:
    from ckpt_tools.stores.destination import Place

_FOREIGN = """
    npy ggml ggmf ggjt h5 hdf5 keras onnx tflite pb msgpack mlmodel mlpackage engine plan joblib pkl pickle
    nemo mar ot pdparams pdopt safetensor tensors distcp metadata json yaml yml csv parquet arrow zarr zip tar tgz gz
    bz2 xz zst 7z rar txt md
"""

FOREIGN_SUFFIXES = frozenset(f".{name}" for name in _FOREIGN.split())
"""Suffixes of files in formats that are not written: a folder of such a name is probably a mistake."""

FILES_OR_FOLDERS = {".ckpt": ("safetensors", "torch")}
"""Lightning's ending of a torch file, and of the folder of a sharded checkpoint: refused for formats that could be one
file."""

_FILE = "file://"

ELSEWHERE = "choose another destination"
"""The end of messages about a destination that is refused."""

StorageOptions: TypeAlias = Mapping[str, Any] | None
"""Options for reaching remote stores: credentials, an endpoint. One call uses the same for every store."""


def check_storage_options(storage_options: StorageOptions, *urls: str | Path | None) -> None:
    """Raises UsageError if there are storage options, and all of ``urls`` are local."""
    case = OptionContext(is_remote=any(url is not None and is_remote(url) for url in urls))
    check_applicability(STORE_RULES, {"storage_options": storage_options}, case)


def is_remote(url: str | Path) -> bool:
    """True for a URL of another scheme than ``file``."""
    return "://" in str(url) and len(scheme := urlsplit(str(url)).scheme) > 1 and scheme != "file"


def local_path(url: str | Path) -> Path:
    """The path of a path or ``file://`` URL.

    Raises:
        UnsupportedError: the URL has another scheme. UsageError: its path is not absolute.
    """
    if is_remote(url):
        raise UnsupportedError(f"{url}: only local paths and file:// URLs are supported here")
    if not str(url).startswith(_FILE):
        return Path(url).expanduser()
    path = Path(unquote(str(url).removeprefix(_FILE).removeprefix("localhost")))
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
    if name in MARKERS and folder:
        return _open(folder, storage_options)
    if not name.endswith(".index.json"):
        return _open(url, storage_options)
    source = _open(folder if is_remote(url) else local_path(url).parent, storage_options)
    if name not in source.files:
        raise SourceNotFoundError(f"there is no file {url}")
    others = {path for path in source.files if path.endswith(".index.json") and path != name}
    return replace(source, files={path: size for path, size in source.files.items() if path not in others})


def open_run(url: str | Path, storage_options: StorageOptions = None) -> Source:
    """Like ``open_source``, for a folder of one or more checkpoints, with the files in hidden folders: savers
    write unfinished checkpoints there.

    Raises:
        SourceNotFoundError: nothing is there. StoreError: it cannot be reached.
    """
    source = _open(url, storage_options)
    return replace(source, files={**source.files, **source.store.hidden()})


def _open(url: str | Path, storage_options: StorageOptions) -> Source:
    if is_remote(url):
        from ckpt_tools.stores.remote import open_remote_source

        return open_remote_source(str(url), storage_options or {})
    path = local_path(url)
    try:
        is_there, is_folder = path.exists(), path.is_dir()
    except OSError as error:
        raise StoreError(f"opening failed: {error.strerror}", path=str(path)) from error
    if not is_there:
        raise SourceNotFoundError(f"there is no file or folder {path}")
    if is_folder or path.name in MARKERS:
        return Source.open(LocalStore(path if is_folder else path.parent))
    return Source.open(LocalStore(path.parent, only=path.name))


def open_place(url: str | Path, storage_options: StorageOptions = None) -> Place:
    """Place of an output, one file if the name implies it; nothing is touched.

    Raises:
        UsageError: nothing can be written there.
    """
    place: Place
    if is_remote(url):
        from ckpt_tools.stores.remote import open_remote_place

        place = open_remote_place(str(url), storage_options or {})
    else:
        from ckpt_tools.stores.local.place import LocalPlace

        place = LocalPlace(local_path(url))
    return place if implied_format(place.name) is None else place.as_file()


def check_apart(src: str | Path, dst: str | Path, storage_options: StorageOptions = None) -> None:
    """Raises DestinationExistsError if one of the two is the other, or is inside it: a reader could take the output
    for a part of the source."""
    (service, source), (other, target) = _whereabouts(src, storage_options), _whereabouts(dst, storage_options)
    if service != other:
        return
    is_same = _same_file if service == "file" else PurePosixPath.__eq__
    if is_same(source, target):
        raise DestinationExistsError(f"{dst} is the source itself and is not replaced; {ELSEWHERE}")
    for inner, outer, verb in ((source, target, "contains"), (target, source, "is inside")):
        if any(is_same(outer, parent) for parent in inner.parents):
            raise DestinationExistsError(f"{dst} {verb} the source {src}, which is not changed; {ELSEWHERE}")


def _same_file(one: PurePosixPath, other: PurePosixPath) -> bool:
    with suppress(OSError):
        return one == other or Path(one).samefile(other)
    return False


def _whereabouts(url: str | Path, storage_options: StorageOptions = None) -> tuple[str, PurePosixPath]:
    """The service of ``url`` and its absolute path there, with links followed and ``..`` resolved.

    For a file that stands for its folder, such as ``.metadata`` or an index, it is the path of the folder.
    """
    if is_remote(url):
        from ckpt_tools.stores.remote import located

        service, name = located(str(url), storage_options or {})
    else:
        service, name = "file", str(local_path(url))
    path = PurePosixPath(os.path.realpath(name) if service == "file" else posixpath.normpath(f"/{name}"))
    return service, path.parent if is_marker(path.name) else path


def implied_format(name: str) -> str | None:
    """The format that a destination's name implies, where it is one file."""
    return FORMAT_BY_FILE_SUFFIX.get(PurePosixPath(name).suffix)


def check_ending(name: str, to: str | None) -> None:
    """Raises UsageError where ``name`` looks like a file of a format that is not written, whatever ``to`` says."""
    suffix = PurePosixPath(name).suffix
    *first, last = FORMAT_BY_FILE_SUFFIX
    as_file = to is None or to in FILES_OR_FOLDERS.get(suffix.lower(), ())
    is_foreign = suffix.lower() in FOREIGN_SUFFIXES or (suffix.lower() in FILES_OR_FOLDERS and as_file)
    if is_foreign or (suffix not in FORMAT_BY_FILE_SUFFIX and suffix.lower() in FORMAT_BY_FILE_SUFFIX):
        raise UsageError(
            f"{name}: files that end in {suffix} are not written; name a file that ends in {', '.join(first)} or {last}"
            ", or a folder without such an ending"
        )
