"""A path of the local file system, as the location of an output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_tools.core.part_number import PartNumber
from ckpt_tools.stores.local.contents import check_path_free, list_contents_at, resolve_target
from ckpt_tools.stores.local.staging_folder import LocalStaging, remove_files_by_name
from ckpt_tools.stores.local.store import wrap_os_errors
from ckpt_tools.stores.publishing import DestinationContents, OutputLocation, already_exists_error

if TYPE_CHECKING:
    from ckpt_tools.stores.local.part_staging import LocalPartStaging


@dataclass(frozen=True, slots=True)
class LocalOutputLocation(OutputLocation):
    """A path of the local file system, as the location of an output."""

    path: Path

    @property
    def url(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    def list_contents(self) -> DestinationContents | None:
        """The contents of the place. An output that a killed run moved aside counts: the next claim puts it back."""
        with wrap_os_errors("looking failed", self.path):
            staging = self.stage()
            return list_contents_at(staging.aside_path if staging.is_target_moved_aside else staging.target, self.form)

    def check_free(self, *, overwrite: bool) -> None:
        with wrap_os_errors("looking failed", self.path):
            staging = self.stage()
            if not overwrite and staging.is_target_moved_aside:
                raise already_exists_error(str(staging.target))
            check_path_free(staging.target, self.form, overwrite=overwrite)

    def stage(self, *, resume: bool = False, fsync: bool = False) -> LocalStaging:
        return LocalStaging(resolve_target(self.path, self.form), self.form, fsync)

    def stage_part(self, part: PartNumber) -> LocalPartStaging:
        from ckpt_tools.stores.local.part_staging import LocalPartStaging

        return LocalPartStaging(resolve_target(self.path, self.form), self.form, fsync=True, part=part)

    def stage_both_forms(self) -> Sequence[LocalStaging]:
        """A link is followed for a folder alone; else both have one path."""
        stagings = [self.as_single_file().stage(), LocalOutputLocation(self.path).stage()]
        return [*{staging.target: staging for staging in stagings}.values()]

    def remove_files(self, batches: Sequence[Sequence[str]]) -> None:
        with wrap_os_errors("removing failed", self.path):
            target = resolve_target(self.path, self.form)
            root = target if self.form.file_name is None else target.parent
            remove_files_by_name(root, [name for batch in batches for name in batch])
