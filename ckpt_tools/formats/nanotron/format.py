"""Checkpoints of nanotron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.formats.base import Format, import_when_called

if TYPE_CHECKING:
    from ckpt_tools.stores.source import Source
    from ckpt_tools.trainers.saved import SavedCheckpoint


class NanotronFormat(Format):
    """Reads the folder of a step, or of a run, whose ``latest.txt`` chooses one."""

    name = "nanotron"
    about = "nanotron: a folder with checkpoint_metadata.json, a file for each tensor, and files of the optimizer"
    holds = "whole state"

    def detect(self, source: Source) -> bool:
        from ckpt_tools.formats.nanotron.names import METADATA_FILE

        return any(path.rpartition("/")[2] == METADATA_FILE for path in source.files)

    read = import_when_called("nanotron.reader:read", takes=1)
    own_files = import_when_called("nanotron.reader:own_files", takes=1)

    def problem(self, saved: SavedCheckpoint) -> str | None:
        from ckpt_tools.formats.nanotron.names import METADATA_FILE

        is_begun = any(path.startswith("model/") for path in saved.files) and "model_config.json" in saved.files
        return f"no {METADATA_FILE}: the save did not finish" if is_begun and METADATA_FILE not in saved.files else None

    def is_named(self, saved: SavedCheckpoint) -> bool:
        from ckpt_tools.formats.nanotron.names import METADATA_FILE

        return METADATA_FILE in saved.files
