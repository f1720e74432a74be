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

from ckpt_tools.arguments import api_function
from ckpt_tools.core.manifest import MASTER, WEIGHT, Manifest
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import CkptError, DestinationExistsError, SourceNotFoundError, UsageError
from ckpt_tools.reading.checkpoint import read_source
from ckpt_tools.runs.opening import open_checkpoint, resolve_checkpoint_url
from ckpt_tools.stores.destination import Destination
from ckpt_tools.stores.output_names import DIGESTS_NAME, DIGESTS_SUFFIX
from ckpt_tools.stores.publishing import NO_FILES, Claim, OutputLocation
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import StorageOptions, open_output_location, open_source
from ckpt_tools.trainers.names import is_optimizer_file
from ckpt_tools.verification import digests
from ckpt_tools.verification.digests import Digest, Digests

MakeByteCallback = Callable[[int], digests.OnBytes]
"""Takes the number of bytes to hash, and gives the callback for the bytes that were hashed."""


def read_digests(url: str | Path, storage_options: StorageOptions = None) -> Digests:
    """The list of digests at ``url``. Raises as ``digests.parse_digest_list`` does, and SourceNotFoundError."""
    source = open_source(url, storage_options)
    if len(source.files) != 1:
        raise UsageError(f"{url} is not a file of digests")
    return digests.read_digest_list(source, next(iter(source.files)))


def read_companion_digests(source: Source, manifest: Manifest) -> dict[str, Digests]:
    """The lists beside single files of a folder, by the file with tensors that each describes. Raises as
    ``digests.parse_digest_list``."""
    if is_single_file(source):
        return {}
    list_paths = {file: file + DIGESTS_SUFFIX for file in sorted(manifest.stored_files)}
    return {file: digests.read_digest_list(source, path) for file, path in list_paths.items() if path in source.files}


def read_stored_digests(source: Source, manifest: Manifest, storage_options: StorageOptions = None) -> Digests | None:
    """The digests that lie with a checkpoint: in its folder, or beside its one file. Raises as
    ``digests.parse_digest_list``."""
    if not is_single_file(source):
        list_path = digests.locate_digest_list(manifest)
        return digests.read_digest_list(source, list_path) if list_path in source.files else None
    try:
        return read_digests(get_digests_url(source, manifest), storage_options)
    except SourceNotFoundError:
        return None


@api_function
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
    url = resolve_checkpoint_url(src, storage_options)
    files = open_source(url, storage_options).files
    has_list = any(path.rpartition("/")[2] == DIGESTS_NAME for path in files)
    if str(url).startswith(("http://", "https://")) if len(files) == 1 else not has_list:
        return {}
    opened = open_checkpoint(url, ReadOptions(), storage_options=storage_options)
    stored = read_stored_digests(opened.source, opened.manifest, storage_options) or {}
    stored = digests.select_one_copy(stored, weights=MASTER)
    return {key.fqn: digest for key, digest in stored.items() if key.slot == WEIGHT}


def get_digests_url(source: Source, manifest: Manifest) -> str:
    """Location of a checkpoint's digests, if it has any."""
    if is_single_file(source):
        return source.store.url + DIGESTS_SUFFIX
    return f"{source.store.url.rstrip('/')}/{digests.locate_digest_list(manifest)}"


def is_single_file(source: Source) -> bool:
    """True if the source is a file, or a file with its optimizer's, and not the folder around it."""
    other_files = source.files.keys() - {source.store.url.rpartition("/")[2]}
    return len(other_files) < len(source.files) and all(is_optimizer_file(name) for name in other_files)


def write_small_file(destination: Destination, path: str, data: bytes) -> None:
    """A file of a few known bytes, in one part. Raises StoreError."""
    file_handle = destination.begin_file(path, len(data))
    destination.finish_file(path, file_handle, [destination.write_part(path, file_handle, 0, 0, data)])


def check_replaceable_list(destination: OutputLocation) -> Mapping[str, int]:
    """The name and size of the list at ``destination``, which may be replaced; empty if nothing is there.

    Raises:
        DestinationExistsError: it is something else than a list of digests.
    """
    contents = destination.as_single_file().list_contents()
    if contents is None:
        return NO_FILES
    if contents.others or not digests.is_digest_list(Source(contents.store, contents.files), destination.name):
        raise DestinationExistsError(
            f"{destination.url} is not a list of digests, so it is not replaced; remove it yourself, or choose another "
            f"{format_option('output')}"
        )
    return contents.files


def write_digest_list(destination: OutputLocation, compute: Callable[[], Digests], *, overwrite: bool) -> Digests:
    """Write a list as a file of its own; ``compute`` is called once it is known that the file can be written.

    Raises:
        DestinationExistsError: something is there, and it is not a list, or ``overwrite`` is False. CkptError: as
        ``compute`` and the place say.
    """
    destination = destination.as_single_file()
    destination.check_free(overwrite=overwrite)
    replaced = check_replaceable_list(destination)
    with destination.claim(overwrite=overwrite, resume=False) as claim:
        computed_digests = compute()
        write_small_file(claim.destination, destination.name, digests.format_digest_list(computed_digests))
        claim.publish_files([destination.name], replaced)
    return computed_digests


@dataclass(frozen=True, slots=True)
class OutputDigests:
    """The list of digests of the output of ``claim``, which is read back with ``options``."""

    claim: Claim
    destination: OutputLocation
    format_name: str
    options: ReadOptions
    num_workers: int
    on_total: MakeByteCallback
    storage_options: StorageOptions = None

    def write_staged_list(self) -> list[str]:
        """Write the list of finished output that is not published yet; its path, to be published before the output's
        own. No path where the output cannot be read yet. Raises CkptError."""
        finished_files = self.claim.finished_store
        if finished_files is None:
            return []
        source, manifest = read_source(Source.open(finished_files), self.options, format_name=self.format_name)
        list_path = self.destination.form.digests_path(digests.locate_digest_list(manifest))
        write_small_file(self.claim.destination, list_path, self._compute_list(source, manifest))
        return [list_path]

    def publish_list(self, staged_paths: list[str]) -> str:
        """URL of the list. It is written now, of output that ``claim`` has just published, if it is not
        ``staged_paths``.

        Raises:
            CkptError: it cannot be read or written; the checkpoint itself is whole.
        """
        destination, storage_options = self.destination, self.storage_options
        if staged_paths:
            return destination.form.file_url(destination.url, staged_paths[0])
        try:
            opened = open_checkpoint(
                destination.url, self.options, format_name=self.format_name, storage_options=storage_options
            )
            list_path = destination.form.digests_path(digests.locate_digest_list(opened.manifest))
            list_url = destination.form.file_url(destination.url, list_path)
            check_replaceable_list(open_output_location(list_url, storage_options))
            write_small_file(self.claim.destination, list_path, self._compute_list(opened.source, opened.manifest))
            self.claim.publish_companion_file(list_path)
        except CkptError as error:
            error.message += f"; {destination.url} is written, but its digests are not"
            raise
        return list_url

    def _compute_list(self, source: Source, manifest: Manifest) -> bytes:
        on_bytes = self.on_total(digests.count_hashed_bytes(manifest))
        return digests.format_digest_list(
            digests.compute_digests(source.store, manifest, num_workers=self.num_workers, on_bytes=on_bytes)
        )
