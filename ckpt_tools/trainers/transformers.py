"""transformers' Trainer, which saves through accelerate and adds its own files, and the files of a pretrained model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ckpt_tools.errors import FormatError
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.trainers import accelerate
from ckpt_tools.trainers.record import Metrics, Named, Returned, Trainer
from ckpt_tools.trainers.saved import Saved

STATE = "trainer_state.json"
OPTIMIZER = "optimizer.pt"
ARGUMENTS = "training_args.bin"

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
TOKENIZER = (
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
PREPARATION = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
COMPANIONS = ("generation_config.json", *TOKENIZER, *PREPARATION)
"""Files beside ``config.json`` that ``from_pretrained`` reads."""

_MODEL_FILES = "|".join(map(re.escape, (CONFIG, ADAPTER, *COMPANIONS)))
_STATES = r"rng_state(?:_(\d{1,9}))?\.pth"
_OWN = f"{re.escape(ARGUMENTS)}|{_STATES}"


def counts(content: Any) -> Mapping[str, Any]:
    names = ("global_step", "epoch")
    return {name: content[name] for name in names if name in content} if isinstance(content, dict) else {}


def trainer_state(saved: Saved) -> Mapping[str, Any]:
    """Content of ``trainer_state.json``; empty if it cannot be read."""
    return _state_at(saved, saved.path(STATE)) if STATE in saved.files else {}


def _state_at(saved: Saved, path: str) -> Mapping[str, Any]:
    try:
        found = json.loads(saved.text(path))
    except (FormatError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_ours(saved: Saved) -> bool:
    is_named = re.fullmatch(r"checkpoint-\d+", saved.title) is not None
    own = re.compile(f"{re.escape(STATE)}|{_OWN}")
    return any(map(own.fullmatch, saved.files)) or (is_named and OPTIMIZER in saved.files)


def _problem(saved: Saved) -> str | None:
    """The Trainer writes ``trainer_state.json`` last."""
    if not _is_ours(saved):
        return accelerate.problem(saved)
    if STATE not in saved.files:
        return f"no {STATE}, which the Trainer writes last: the save did not finish"
    parse_json(saved.read(STATE), STATE)
    return None


def _metrics(saved: Saved) -> Metrics:
    log = trainer_state(saved).get("log_history")
    for entry in log if isinstance(log, list) else ():
        if isinstance(entry, dict):
            step = entry.get("step")
            if not isinstance(step, int) or saved.step is None or step <= saved.step:
                yield from entry.items()


def _best(saved: Saved) -> Named | None:
    """By the Trainer's state in the checkpoint, or in the run's folder if that is of a later step: ``save_state``."""
    found = [(f"{STATE} of {saved.title}", trainer_state(saved))]
    if (beside := saved.beside(STATE)) is not None:
        found.append((beside, _state_at(saved, beside)))
    record, state = max(found, key=lambda each: _number(each[1].get("global_step")))
    path, step = state.get("best_model_checkpoint"), state.get("best_global_step")
    if isinstance(path, str) and path:
        return Named(record, [path])
    if type(step) is int and step:
        return Named(record, [f"checkpoint-{step}"])
    return Named(record, []) if state else None


def _number(value: Any) -> int:
    return value if type(value) is int else -1


TRANSFORMERS = Trainer(
    name="transformers' Trainer",
    reads={"scheduler.pt": accelerate.scheduler, STATE: counts},
    own=_OWN,
    optimizer=re.escape(OPTIMIZER),
    others=_MODEL_FILES,
    folders="tokenizer|processor",
    last=re.escape(STATE),
    returned=Returned(
        parts=accelerate.PARTS,
        sign=STATE,
        resume="trainer.train(resume_from_checkpoint={path})",
        files=(
            _STATES,
            f"{re.escape(ARGUMENTS)}|{re.escape(STATE)}|scheduler\\.pt|{_MODEL_FILES}|tokenizer[^/]*|README\\.md",
            *accelerate.RETURNED,
        ),
        without_ranks="the Trainer resumes without them, with generators as its seed sets them",
    ),
    problem=_problem,
    metrics=_metrics,
    best=_best,
)
