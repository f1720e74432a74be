"""``--overwrite`` replaces the files of the one checkpoint at the destination itself, and nothing else.

Each reader says which files are those of the checkpoint that it reads; our list of digests and a signature may lie with
them. Where anything else is there, nothing is replaced: a folder is never removed because there is a checkpoint in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpt_tools.core.option_names import option
from ckpt_tools.core.options import ReadOptions
from ckpt_tools.errors import CkptError, DestinationExistsError, StoreError
from ckpt_tools.formats.index import find_format, read_manifest
from ckpt_tools.reading.model_files import is_carried
from ckpt_tools.stores.destination import Place
from ckpt_tools.stores.marker_files import SIGNATURE_NAME, is_shown
from ckpt_tools.stores.present import NOTHING, Present, listed
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import ELSEWHERE
from ckpt_tools.trainers.transformers import ADAPTER
from ckpt_tools.verification.digests import is_list, place_in
from ckpt_tools.verification.signing import is_signature

MAX_SIGNATURE_BYTES = 512 << 20
"""It lists every file of a folder with its digest."""


def replaced_files(place: Place, written: Iterable[str]) -> Mapping[str, int]:
    """The names and sizes of what an output of the files ``written`` replaces at ``place``.

    Raises:
        DestinationExistsError: something is there that is not of one checkpoint. StoreError: looking failed.
    """
    place.check_free(overwrite=True)
    present = place.present()
    if present is None:
        return NOTHING
    own = _own_files(present, place.url)
    if own:
        # What says what the model is, if the output has the same: no such file is removed without a new one.
        own |= {path for path in written if is_carried(path) or path == ADAPTER}
    files = {path: size for path, size in present.files.items() if path in own}
    others = present.beyond(files)
    if others and not files:
        raise DestinationExistsError(
            f"{place.url} is not a checkpoint itself but contains one ({listed(others)}); "
            f"{option('overwrite', True)} does not replace a folder that contains other files; {ELSEWHERE}"
        )
    if others:
        raise DestinationExistsError(
            f"{place.url} contains files that are not part of its checkpoint: {listed(others)}; "
            f"{option('overwrite', True)} replaces only the checkpoint: move the other files away, or {ELSEWHERE}"
        )
    # In formats that keep each checkpoint in a folder of its own, only the one of the same name is replaced.
    new = _folders(written)
    if new and (old := sorted(_folders(files) - new)):
        raise DestinationExistsError(f"{place.url} holds {old[0]} too, which replacing it would delete; {ELSEWHERE}")
    return files


def _own_files(present: Present, url: str) -> frozenset[str]:
    """The names of the files of the checkpoint there, and of our own files with it."""
    source = Source(present.store, {path: size for path, size in present.files.items() if is_shown(path)})
    try:
        reader = find_format(source)
        manifest = read_manifest(reader, source, ReadOptions())
        own = reader.own_files(source, manifest)
        if own and manifest.trainer is not None:
            own |= manifest.trainer.sources
        return own | _beside(source, place_in(manifest)) if own else own
    except StoreError:
        raise
    except CkptError as error:
        names = listed(sorted([*present.files, *present.others]))
        raise DestinationExistsError(
            f"{url} is not a checkpoint that can be read, so it is not replaced: {error} (it holds {names}); name the "
            f"place of one checkpoint, or {ELSEWHERE}"
        ) from error


def _beside(source: Source, digests: str) -> frozenset[str]:
    """The list of digests and the signatures that lie with a checkpoint, if they are what their names say."""
    folder = digests.rpartition("/")[0]
    signatures = {SIGNATURE_NAME, f"{folder}/{SIGNATURE_NAME}"} & source.files.keys()
    found = {path for path in signatures if is_signature(source.read_all(path, limit_bytes=MAX_SIGNATURE_BYTES))}
    is_there = digests in source.files and is_list(source, digests)
    return frozenset(found | ({digests} if is_there else set()))


def _folders(paths: Iterable[str]) -> set[str]:
    return {path.partition("/")[0] for path in paths if "/" in path}
