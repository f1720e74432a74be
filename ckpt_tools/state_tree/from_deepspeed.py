"""Parameter groups and client state of a DeepSpeed checkpoint, as a tree of torch has them. Uses the manifest alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.notes import Note, Outcome

ADAM_OPTIONS: Mapping[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
"""What torch's Adam and AdamW keep in a group and DeepSpeed's own Adams do not, at torch's defaults (2.15.0): that is
how DeepSpeed computes."""


def convert_group_for_torch(
    options: Mapping[str, Any], number: int, decoupled_decay: bool
) -> tuple[dict[str, Any], list[Note]]:
    """A group of DeepSpeed as one of torch, which asks for every option of its own.

    ``bias_correction`` is DeepSpeed's, and torch always does it.
    """
    torch_options = dict(options)
    notes = []
    if torch_options.pop("bias_correction", True) is not True:
        what = f"bias_correction of parameter group {number}"
        notes.append(Note(Outcome.DROPPED, what, "torch's Adam always corrects the bias"))
    if {"betas", "eps"} <= torch_options.keys():
        missing = {name: value for name, value in ADAM_OPTIONS.items() if name not in torch_options}
        missing |= {} if "decoupled_weight_decay" in torch_options else {"decoupled_weight_decay": decoupled_decay}
        if missing:
            what = f"{', '.join(missing)} of parameter group {number}"
            why = "torch's Adam keeps them and the source's does not"
            notes.append(Note(Outcome.DEFAULTED, what, why, len(missing)))
        torch_options |= missing
    return torch_options, notes


def has_decoupled_decay(extra: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed's Adam was an AdamW: ``adam_w_mode`` of its config, true unless it says otherwise."""
    config_node: Any = extra.get("deepspeed", {})
    for name in ("ds_config", "optimizer", "params", "adam_w_mode"):
        config_node = config_node.get(name) if isinstance(config_node, dict) else None
    return config_node is not False


def collect_user_entries(manifest: Manifest) -> tuple[dict[str, Any], list[Note]]:
    """The entries beside model and optimizer: in a tree the user's own; else DeepSpeed's client state among the neutral
    ones, without what only DeepSpeed can use."""
    extra = dict(manifest.extra)
    if manifest.tree is not None:
        return extra, []
    client_state = extra.pop("client_state", {})
    deepspeed_entries = extra.pop("deepspeed", {})
    notes = []
    if deepspeed_entries:
        notes.append(Note(Outcome.DROPPED, f"DeepSpeed's own {', '.join(deepspeed_entries)}", "only DeepSpeed uses it"))
    scheduler = extra.get("lr_scheduler")
    if isinstance(scheduler, dict) and "last_batch_iteration" in scheduler and "last_epoch" not in scheduler:
        why = "it is of a scheduler of DeepSpeed's, which counts last_batch_iteration; one of torch's starts afresh"
        notes.append(Note(Outcome.KEPT, "lr_scheduler", why))
    for name, value in client_state.items():
        if str(name) in extra:
            notes.append(Note(Outcome.DROPPED, f"client_state.{name}", "another entry of the checkpoint has this name"))
        else:
            extra[str(name)] = value
    if extra.get("global_step", 0) is None:
        del extra["global_step"]
    return extra, notes
