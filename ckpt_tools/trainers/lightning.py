"""Lightning: the scheduler of a ``.ckpt`` or ``meta.pt``."""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.core.manifest import Manifest


def with_scheduler(manifest: Manifest) -> Manifest:
    """``manifest`` with the scheduler of Lightning, which keeps a list of them, under the name that others give it."""
    schedulers = manifest.extra.get("lr_schedulers")
    is_lightning = "pytorch-lightning_version" in manifest.extra and "lr_scheduler" not in manifest.extra
    if not is_lightning or not isinstance(schedulers, list) or len(schedulers) != 1:
        return manifest
    extra = {name: value for name, value in manifest.extra.items() if name != "lr_schedulers"}
    return replace(manifest, extra={**extra, "lr_scheduler": schedulers[0]})
