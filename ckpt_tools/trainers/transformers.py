"""transformers' Trainer, which saves through accelerate and adds its own files, and the files of a pretrained model.

A model of a ``DistributedConfig`` (5.23, distributed/checkpoint.py) is saved by ``HuggingFaceStorageWriter``, and its
optimizer by ``save_optimizer_distributed`` as a DCP ``{"optimizer"}`` in a folder that the job names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from ckpt_tools.errors import FormatError
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.trainers import accelerate
from ckpt_tools.trainers.halves import find_weights_beside_dcp
from ckpt_tools.trainers.record import BestCheckpoints, MetricItems, ResumeRules, Trainer
from ckpt_tools.trainers.saved import SavedCheckpoint

STATE_FILE = "trainer_state.json"
OPTIMIZER = "optimizer.pt"
OPTIMIZER_FOLDER = "optimizer"
"""Where a job puts the DCP of ``save_optimizer_distributed`` beside the model."""

ARGUMENTS_FILE = "training_args.bin"

CONFIG_FILE = "config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
COMPANION_FILES = ("generation_config.json", *TOKENIZER_FILES, *PROCESSOR_FILES)
"""Files beside ``config.json`` that ``from_pretrained`` reads."""

_MODEL_FILES = "|".join(map(re.escape, (CONFIG_FILE, ADAPTER_CONFIG_FILE, *COMPANION_FILES)))
_RANDOM_STATES = r"rng_state(?:_(\d{1,9}))?\.pth"
_TRAINER_FILES = f"{re.escape(ARGUMENTS_FILE)}|{_RANDOM_STATES}"


def parse_counters(content: Any) -> Mapping[str, Any]:
    names = ("global_step", "epoch")
    return {name: content[name] for name in names if name in content} if isinstance(content, dict) else {}


def read_trainer_state(checkpoint: SavedCheckpoint) -> Mapping[str, Any]:
    """Content of ``trainer_state.json``; empty if it cannot be read."""
    return _read_state_file(checkpoint, checkpoint.path_in_run(STATE_FILE)) if STATE_FILE in checkpoint.files else {}


def _read_state_file(checkpoint: SavedCheckpoint, path: str) -> Mapping[str, Any]:
    try:
        state = json.loads(checkpoint.read_run_file(path))
    except (FormatError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def _find_problem(checkpoint: SavedCheckpoint) -> str | None:
    """Why the checkpoint is not complete: the Trainer writes ``trainer_state.json`` last."""
    own_file = re.compile(f"{re.escape(STATE_FILE)}|{_TRAINER_FILES}")
    has_own_name = re.fullmatch(r"checkpoint-\d+", checkpoint.base_name) is not None and OPTIMIZER in checkpoint.files
    if not has_own_name and not any(map(own_file.fullmatch, checkpoint.files)):
        return accelerate.find_problem(checkpoint)
    if STATE_FILE not in checkpoint.files:
        return f"no {STATE_FILE}, which the Trainer writes last: the save did not finish"
    parse_json(checkpoint.read_file(STATE_FILE), STATE_FILE)
    return None


def _read_metrics(checkpoint: SavedCheckpoint) -> MetricItems:
    log = read_trainer_state(checkpoint).get("log_history")
    for entry in log if isinstance(log, list) else ():
        if isinstance(entry, dict):
            step = entry.get("step")
            if not isinstance(step, int) or checkpoint.step is None or step <= checkpoint.step:
                yield from entry.items()


def _read_best(checkpoint: SavedCheckpoint) -> BestCheckpoints | None:
    """The best by the Trainer's state in the checkpoint, or by the run's if ``save_state`` wrote a later step there."""
    states = [(f"{STATE_FILE} of {checkpoint.base_name}", read_trainer_state(checkpoint))]
    if (run_state_file := checkpoint.find_sibling(STATE_FILE)) is not None:
        states.append((run_state_file, _read_state_file(checkpoint, run_state_file)))
    record, state = max(states, key=lambda each: step if type(step := each[1].get("global_step")) is int else -1)
    path, best_step = state.get("best_model_checkpoint"), state.get("best_global_step")
    if isinstance(path, str) and path:
        return BestCheckpoints(record, [path])
    if type(best_step) is int and best_step:
        return BestCheckpoints(record, [f"checkpoint-{best_step}"])
    return BestCheckpoints(record, []) if state else None


TRANSFORMERS = Trainer(
    name="transformers' Trainer",
    entry_parsers={"scheduler.pt": accelerate.parse_scheduler, STATE_FILE: parse_counters},
    own=_TRAINER_FILES,
    optimizer=re.escape(OPTIMIZER),
    others=_MODEL_FILES,
    folders=f"tokenizer|processor|{OPTIMIZER_FOLDER}|consolidated",
    last=re.escape(STATE_FILE),
    resume_rules=ResumeRules(
        dcp_folders=accelerate.DCP_FOLDERS,
        marker_file=STATE_FILE,
        resume_code="trainer.train(resume_from_checkpoint={path})",
        copied_files=(
            _RANDOM_STATES,
            f"{re.escape(ARGUMENTS_FILE)}|{re.escape(STATE_FILE)}|scheduler\\.pt|{_MODEL_FILES}|tokenizer[^/]*|README\\.md",
            *accelerate.RESUME_FILES,
        ),
        note_without_rank_files="the Trainer resumes without them, with generators as its seed sets them",
    ),
    find_halves=partial(find_weights_beside_dcp, weights_folder="", optimizer_folder=f"{OPTIMIZER_FOLDER}/"),
    find_problem=_find_problem,
    read_metrics=_read_metrics,
    read_best=_read_best,
)
