"""Checks that there are files of all ranks of a run with ZeRO, and that the run is of a kind that is read."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.core.values import format_brief
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import ModelStates, OptimStates
from ckpt_tools.formats.deepspeed.common.model_file import check_experts
from ckpt_tools.formats.deepspeed.common.partition import is_muon
from ckpt_tools.formats.deepspeed.names import replace_rank
from ckpt_tools.formats.deepspeed.zero_reader.tag_files import TagFiles
from ckpt_tools.messages.wording import format_count

PARTITION_GROUPS_ENTRY = "ds_zero_partition_groups"
"""Entry of an optimizer's file in stage 3: for each sub-group the ranks over which it is cut, if experts are."""


def check_file_count(paths: Sequence[str], world_size: int) -> None:
    """Raises IncompleteError if a rank has no file, MalformedError where there are more files than ranks."""
    if len(paths) < world_size:
        missing = replace_rank(paths[0], len(paths))
        raise IncompleteError(f"the file of this rank, one of {world_size}, is missing", path=missing)
    if len(paths) > world_size:
        raise MalformedError(
            f"the checkpoint is of {format_count(world_size, 'rank')}; this file is of another one, perhaps from an "
            "earlier save",
            path=paths[world_size],
        )


def check_rank_count(paths: tuple[str, ...], optim: OptimStates) -> None:
    """Raises FormatError if ``paths`` are not one file a rank, or if the optimizer is of a run with experts."""
    if len(set(optim.partition_counts)) > 1:
        raise IncompleteError(
            "its param groups are cut into different numbers of partitions, as those of experts are, and there are no "
            "files of experts (layer_0_expert_0_mp_rank_00_model_states.pt) beside it",
            path=optim.file.path,
        )
    check_file_count(paths, optim.world_size)


def check_model_file(model: ModelStates, optim: OptimStates) -> None:
    """Raises FormatError if the run has experts that are not in the files, or if model and optimizer differ in the
    number of ranks."""
    check_experts(model)
    if optim.state_dict.get(PARTITION_GROUPS_ENTRY) is not None:
        raise UnsupportedError(
            "its experts are partitioned over groups of their own (AutoEP), and the model's file has no "
            "ds_autoep_layers",
            path=optim.file.path,
        )
    world_size = model.file.content.get("dp_world_size", optim.world_size)
    if world_size != optim.world_size:
        raise MalformedError(
            f"its dp_world_size is {format_brief(world_size)}, but that of the optimizer is {optim.world_size}",
            path=model.file.path,
        )


def check_expert_run(files: TagFiles, model: ModelStates, optim: OptimStates) -> None:
    """Checks a run with experts. Raises FormatError if the optimizer's files are not those of all ranks, or if the
    optimizer is one that is not read for such a run."""
    world_size, path = model.file.content.get("dp_world_size"), model.file.path
    if type(world_size) is not int or not 0 < world_size <= 1 << 24:
        raise MalformedError("it does not state the number of ranks (dp_world_size)", path=path)
    check_file_count(files.optim_paths, world_size)
    if len(optim.partition_counts) != len(optim.masters) or any(world_size % n for n in optim.partition_counts):
        raise MalformedError(
            f"its partition_count is {list(optim.partition_counts)}, but the run has "
            f"{format_count(world_size, 'rank')}",
            path=optim.file.path,
        )
    if any(is_muon(group.options) for group in optim.groups):
        raise UnsupportedError("it is of a run with experts and Muon, which is not supported", path=optim.file.path)
