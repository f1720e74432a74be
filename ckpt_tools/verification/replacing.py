"""``--overwrite`` replaces the files of the one checkpoint at the destination itself, and nothing else.

Each reader says which files are those of the checkpoint that it reads; our list of digests and a signature may lie with
them. Where anything else is there, nothing is replaced: a folder is never removed because there is a checkpoint in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import UNREADABLE, DestinationExistsError
from ckpt_tools.formats.index import find_format, read_manifest
from ckpt_tools.reading.model_files import is_copied_file
from ckpt_tools.stores.output_names import SIGNATURE_NAME, is_visible_file
from ckpt_tools.stores.publishing import NO_FILES, DestinationContents, OutputLocation, format_names
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import CHOOSE_ANOTHER_DESTINATION
from ckpt_tools.trainers.transformers import ADAPTER_CONFIG_FILE
from ckpt_tools.verification.digests import is_digest_list, locate_digest_list
from ckpt_tools.verification.signing import is_signature

MAX_SIGNATURE_BYTES = 512 << 20
"""It lists every file of a folder with its digest."""


def list_replaced_files(destination: OutputLocation, written: Iterable[str]) -> Mapping[str, int]:
    """The names and sizes of the files at ``destination`` that an output of the files ``written`` replaces.

    Raises:
        DestinationExistsError: something is there that is not of one checkpoint. StoreError: looking failed.
    """
    destination.check_free(overwrite=True)
    contents = destination.list_contents()
    if contents is None:
        return NO_FILES
    own_files = _find_checkpoint_files(contents, destination.url)
    if own_files:
        # What says what the model is, if the output has the same: no such file is removed without a new one.
        own_files |= {path for path in written if is_copied_file(path) or path == ADAPTER_CONFIG_FILE}
    files = {path: size for path, size in contents.files.items() if path in own_files}
    unexpected = contents.find_unexpected_files(files)
    if unexpected and not files:
        raise DestinationExistsError(
            f"{destination.url} is not a checkpoint itself but contains one ({format_names(unexpected)}); "
            f"{format_option('overwrite', True)} does not replace a folder that contains other files; "
            f"{CHOOSE_ANOTHER_DESTINATION}"
        )
    if unexpected:
        raise DestinationExistsError(
            f"{destination.url} contains files that are not part of its checkpoint: {format_names(unexpected)}; "
            f"{format_option('overwrite', True)} replaces only the checkpoint: move the other files away, or "
            f"{CHOOSE_ANOTHER_DESTINATION}"
        )
    # In formats that keep each checkpoint in a folder of its own, only the one of the same name is replaced.
    new_folders = _list_top_folders(written)
    if new_folders and (lost_folders := sorted(_list_top_folders(files) - new_folders)):
        raise DestinationExistsError(
            f"{destination.url} holds {lost_folders[0]} too, which replacing it would delete; "
            f"{CHOOSE_ANOTHER_DESTINATION}"
        )
    return files


def _find_checkpoint_files(contents: DestinationContents, url: str) -> frozenset[str]:
    """The names of the files of the checkpoint at ``url``, and of our own files with it."""
    source = Source(contents.store, {path: size for path, size in contents.files.items() if is_visible_file(path)})
    try:
        reader = find_format(source)
        manifest = read_manifest(reader, source, ReadOptions())
        own_files = reader.own_files(source, manifest)
        if own_files and manifest.trainer is not None:
            own_files |= manifest.trainer.sources
        return own_files | _find_companion_files(source, locate_digest_list(manifest)) if own_files else own_files
    except UNREADABLE as error:
        listed_names = format_names(sorted([*contents.files, *contents.others]))
        raise DestinationExistsError(
            f"{url} is not a checkpoint that can be read, so it is not replaced: {error} (it holds {listed_names}); "
            f"name the place of one checkpoint, or {CHOOSE_ANOTHER_DESTINATION}"
        ) from error


def _find_companion_files(source: Source, digests_path: str) -> frozenset[str]:
    """The paths of the list of digests and of signatures with a checkpoint, if their contents are what their names
    say."""
    folder = digests_path.rpartition("/")[0]
    paths = {SIGNATURE_NAME, f"{folder}/{SIGNATURE_NAME}"} & source.files.keys()
    signatures = {path for path in paths if is_signature(source.read_all(path, limit_bytes=MAX_SIGNATURE_BYTES))}
    has_digests = digests_path in source.files and is_digest_list(source, digests_path)
    return frozenset(signatures | ({digests_path} if has_digests else set()))


def _list_top_folders(paths: Iterable[str]) -> set[str]:
    return {path.partition("/")[0] for path in paths if "/" in path}
