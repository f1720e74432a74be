"""The halves of a checkpoint with weights in safetensors, and the optimizer in another folder: a DCP or a file."""

from __future__ import annotations

from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.record import CheckpointHalves


def find_weights_beside_dcp(
    source: Source, format_name: str | None, *, weights_folder: str, optimizer_folder: str
) -> CheckpointHalves | None:
    """The halves of the one checkpoint in ``source``, which is to be read as the format of that name; None if these
    folders of it are not a model and the only DCP. Folders are prefixes, which end in a slash unless they are empty."""
    index_path = f"{optimizer_folder}.metadata"
    indexes = [path for path in source.files if f"/{path}".endswith("/.metadata")]
    if format_name not in (None, "dcp") or len(indexes) != 1 or not f"/{indexes[0]}".endswith(f"/{index_path}"):
        return None
    base_folder = indexes[0].removesuffix(index_path)
    model_folder = f"{base_folder}{weights_folder}"
    if not _has_weights(source, model_folder):
        return None
    return CheckpointHalves(
        format="dcp",
        index_path=indexes[0],
        base_folder=base_folder,
        weights_folder=model_folder,
        weights_format="safetensors",
        optimizer_folder=f"{base_folder}{optimizer_folder}",
    )


def make_halves_of_files(
    source: Source, base_folder: str, weights_folder: str, optimizer_file: str
) -> CheckpointHalves | None:
    """The halves in ``base_folder``, with the optimizer in a file; None if there are no weights in their folder."""
    model_folder = f"{base_folder}{weights_folder}"
    if not _has_weights(source, model_folder):
        return None
    return CheckpointHalves(
        format="safetensors",
        index_path=f"{base_folder}{optimizer_file}",
        base_folder=base_folder,
        weights_folder=model_folder,
        weights_format="safetensors",
        optimizer_folder=None,
    )


def _has_weights(source: Source, folder: str) -> bool:
    names = (path.removeprefix(folder) for path in source.select_below(folder).files)
    return any(name.endswith(".safetensors") and "/" not in name for name in names)
