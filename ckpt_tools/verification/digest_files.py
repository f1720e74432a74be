"""The files with lists of digests: in the folder of a checkpoint, or beside its single file.

The list of a conversion is computed from the output, read back by the reader of the format. If a destination can be
read before it is published, as a local one can, the list is published with it: in the folder, or, for a file, just
after the file. Elsewhere it follows the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_tools.arguments import public
from ckpt_tools.core.manifest import MASTER, WEIGHT, Manifest
from ckpt_tools.core.option_names import option
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import CkptError, DestinationExistsError, SourceNotFoundError, UsageError
from ckpt_tools.reading.checkpoint import read_source
from ckpt_tools.runs.opening import named, read_checkpoint
from ckpt_tools.stores.destination import Claim, Destination, Place
from ckpt_tools.stores.marker_files import DIGESTS_NAME, DIGESTS_SUFFIX
from ckpt_tools.stores.present import NOTHING
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import StorageOptions, check_storage_options, open_place, open_source
from ckpt_tools.trainers.names import is_optimizer
from ckpt_tools.verification import digests
from ckpt_tools.verification.digests import Digest, Digests

OnTotal = Callable[[int], digests.OnBytes]
"""Told how many bytes there are to hash, gives what is to hear of them."""


def read_digests(url: str | Path, storage_options: StorageOptions = None) -> Digests:
    """The list of digests at ``url``. Raises as ``digests.loads`` does, and SourceNotFoundError."""
    source = open_source(url, storage_options)
    if len(source.files) != 1:
        raise UsageError(f"{url} is not a file of digests")
    return digests.read_list(source, next(iter(source.files)))


def digests_of_files(source: Source, manifest: Manifest) -> dict[str, Digests]:
    """The lists beside single files of a folder, by the file with tensors that each describes. Raises as
    ``digests.loads``."""
    if is_one_file(source):
        return {}
    lists = {file: file + DIGESTS_SUFFIX for file in sorted(manifest.stored_files)}
    return {file: digests.read_list(source, path) for file, path in lists.items() if path in source.files}


def stored_digests(source: Source, manifest: Manifest, storage_options: StorageOptions = None) -> Digests | None:
    """The digests that lie with a checkpoint: in its folder, or beside its one file. Raises as ``digests.loads``."""
    if not is_one_file(source):
        inside = digests.place_in(manifest)
        return digests.read_list(source, inside) if inside in source.files else None
    try:
        return read_digests(digests_url(source, manifest), storage_options)
    except SourceNotFoundError:
        return None


@public
def recorded_digests(src: str | Path, *, storage_options: Mapping[str, Any] | None = None) -> Mapping[str, Digest]:
    """The digests of the weights that lie with the checkpoint at ``src``, as ``checksum`` and ``convert`` with
    ``checksum`` write them. Nothing is compared; ``verify`` does that.

    Args:
        src, storage_options: As for ``inspect``.

    Returns:
        By name, ``Digest`` objects with ``dtype``, ``shape``, ``xxh3_128`` and ``blake3``: of the fp32 master, if the
        weight has one. Empty if there is no list. For a file at a web address it is not looked for.

    Raises:
        CkptError: As ``inspect`` does; or the list cannot be read.

    Example:
        >>> import ckpt_tools
        >>> _ = ckpt_tools.checksum("model.safetensors")
        >>> digest = ckpt_tools.recorded_digests("model.safetensors")["encoder.weight"]
        >>> digest.shape, len(digest.xxh3_128)
        ((4, 8), 32)
    """
    check_storage_options(storage_options, src)
    url = named(src, storage_options)
    files = open_source(url, storage_options).files
    has_list = any(path.rpartition("/")[2] == DIGESTS_NAME for path in files)
    if str(url).startswith(("http://", "https://")) if len(files) == 1 else not has_list:
        return {}
    source, manifest = read_checkpoint(url, ReadOptions(), storage_options=storage_options)
    listed = digests.one_copy(stored_digests(source, manifest, storage_options) or {}, weights=MASTER)
    return {key.fqn: digest for key, digest in listed.items() if key.slot == WEIGHT}


def digests_url(source: Source, manifest: Manifest) -> str:
    """Location of a checkpoint's digests, if it has any."""
    if is_one_file(source):
        return source.store.url + DIGESTS_SUFFIX
    return f"{source.store.url.rstrip('/')}/{digests.place_in(manifest)}"


def is_one_file(source: Source) -> bool:
    """True if the source is a file, or a file with its optimizer's, and not the folder around it."""
    others = source.files.keys() - {source.store.url.rpartition("/")[2]}
    return len(others) < len(source.files) and all(is_optimizer(name) for name in others)


def put(destination: Destination, path: str, data: bytes) -> None:
    """A file of a few known bytes, in one part. Raises StoreError."""
    handle = destination.begin(path, len(data))
    destination.finish(path, handle, [destination.write(path, handle, 0, 0, data)])


def check_list(place: Place) -> Mapping[str, int]:
    """The name and size of the list at ``place``, which may be replaced; nothing where nothing is there.

    Raises:
        DestinationExistsError: it is something else than a list of digests.
    """
    present = place.as_file().present()
    if present is None:
        return NOTHING
    if present.others or not digests.is_list(Source(present.store, present.files), place.name):
        raise DestinationExistsError(
            f"{place.url} is not a list of digests, so it is not replaced; remove it yourself, or choose another "
            f"{option('output')}"
        )
    return present.files


def write_list(place: Place, make: Callable[[], Digests], *, overwrite: bool) -> Digests:
    """A list as a file of its own; ``make`` is called once it is known that it can be written.

    Raises:
        DestinationExistsError: something is there, and it is not a list, or ``overwrite`` is False. CkptError: as
        ``make`` and the place say.
    """
    place = place.as_file()
    place.check_free(overwrite=overwrite)
    replaced = check_list(place)
    with place.claim(overwrite=overwrite, resume=False) as claim:
        found = make()
        put(claim.destination, place.name, digests.dumps(found))
        claim.publish([place.name], replaced)
    return found


@dataclass(frozen=True, slots=True)
class OutputDigests:
    """The list of digests of the output of ``claim``, which is read back with ``options``."""

    claim: Claim
    place: Place
    format_name: str
    options: ReadOptions
    num_workers: int
    on_total: OnTotal
    storage_options: StorageOptions = None

    def write_staged(self) -> list[str]:
        """Write the list of finished output that is not published yet; its path, to be published before the output's
        own. No path where the output cannot be read yet. Raises CkptError."""
        finished = self.claim.finished
        if finished is None:
            return []
        source, manifest = read_source(Source.open(finished), self.options, format_name=self.format_name)
        path = self.place.form.digests_path(digests.place_in(manifest))
        put(self.claim.destination, path, self._computed(source, manifest))
        return [path]

    def publish(self, staged: list[str]) -> str:
        """URL of the list. It is written now, of output that ``claim`` has just published, if it is not ``staged``.

        Raises:
            CkptError: it cannot be read or written; the checkpoint itself is whole.
        """
        place, stores = self.place, self.storage_options
        if staged:
            return place.form.url_of(place.url, staged[0])
        try:
            source, manifest = read_checkpoint(
                place.url, self.options, format_name=self.format_name, storage_options=stores
            )
            path = place.form.digests_path(digests.place_in(manifest))
            url = place.form.url_of(place.url, path)
            check_list(open_place(url, stores))
            put(self.claim.destination, path, self._computed(source, manifest))
            self.claim.add(path)
        except CkptError as error:
            error.message += f"; {place.url} is written, but its digests are not"
            raise
        return url

    def _computed(self, source: Source, manifest: Manifest) -> bytes:
        on_bytes = self.on_total(digests.num_bytes(manifest))
        return digests.dumps(
            digests.digests_of(source.store, manifest, num_workers=self.num_workers, on_bytes=on_bytes)
        )
