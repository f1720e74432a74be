"""accelerate (1.15): ``Accelerator.save_state``, with the model and optimizer of the same number.

``save_state`` (checkpointing.py ``save_accelerator_state``, utils/fsdp_utils.py) numbers models and optimizers in the
order in which they were prepared, and pairs them by that number. With FSDP each is a DCP: ``pytorch_model_fsdp_1`` and
``optimizer_1``, or a file of each rank. Elsewhere each is a file, and the first has no number: ``model.safetensors``
and ``optimizer.bin``, ``model_1.safetensors`` and ``optimizer_1.bin``.

All that is asked of several models is asked of two answers: ``name_optimizer_folder`` names the optimizer of a DCP, and
``_number_models`` finds the models of a folder by their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.errors import SourceNotFoundError, UnsupportedError, UsageError
from ckpt_tools.messages.wording import format_ranks, join_names, natural_sort_key
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.record import ResumeRules, Trainer
from ckpt_tools.trainers.saved import SavedCheckpoint

MAX_CHOICES = 4
"""Paths that a message spells out."""

SCHEDULER = "scheduler.bin"
OPTIMIZER = "optimizer.bin"

_MODEL_FOLDER = re.compile(r"(?P<parent>(?:.*/)?)pytorch_model_fsdp_(?P<number>\d{1,9})")
_MODEL_FILE = re.compile(
    r"(?P<stem>model|pytorch_model|pytorch_model_fsdp)(?:_(?P<number>[1-9]\d{0,8}))?\.(?P<suffix>safetensors|bin)"
)
_TAGGED_STATES = re.compile(r"(pytorch_model(?:_[1-9]\d{0,8})?)/[^/]*_states\.pt")
_SEVERAL_SCHEDULERS = re.compile(r"(?:scheduler|optimizer)_[1-9]\d{0,8}\.bin")

_RANDOM_STATES = re.compile(r"random_states_(\d{1,9})\.pkl")
_ACCELERATE_FILE = re.compile(rf"(?:optimizer|scheduler|sampler)(?:_\d+)?\.bin|{_RANDOM_STATES.pattern}")

DCP_FOLDERS = r"(?:pytorch_model_fsdp|optimizer)_\d+"
"""Folders of the DCPs of models and optimizers, which are one checkpoint together."""

DEEPSPEED_TAGS = r"pytorch_model(?:_\d+)?"
"""Tags of DeepSpeed for several models."""

LEROBOT_FOLDERS = ("pretrained_model", "training_state")
"""Folders of a checkpoint of lerobot for model and optimizer, where accelerate's are beside each other."""

_SMALL_FILES = r"(?:sampler|dl_state_dict)(?:_\d+)?\.bin|scheduler_\d+\.bin|scaler\.pt|custom_checkpoint_\d+\.pkl"

RESUME_FILES = (_RANDOM_STATES.pattern, f"{_SMALL_FILES}|{re.escape(SCHEDULER)}")
"""Files that are copied into a folder that is written again."""

OpenUrl = Callable[[str], Source]
"""Opens what is at a URL. Raises SourceNotFoundError."""


def parse_scheduler(content: Any) -> Mapping[str, Any]:
    return {"lr_scheduler": content} if isinstance(content, dict) else {}


def find_problem(checkpoint: SavedCheckpoint) -> str | None:
    """Why the checkpoint is not complete: every rank writes the state of its random generators last. ``transformers``
    calls this for checkpoints without its own files, since its Trainer saves through accelerate."""
    if not any(map(_ACCELERATE_FILE.fullmatch, checkpoint.files)):
        return None
    ranks = {int(match[1]) for path in checkpoint.files if (match := _RANDOM_STATES.fullmatch(path))}
    if not ranks:
        return "no random_states_0.pkl, which accelerate writes last: the save did not finish"
    missing = set(range(max(ranks) + 1)) - ranks
    return f"the random states of {format_ranks(missing)} are missing" if missing else None


ACCELERATE = Trainer(
    name="accelerate",
    entry_parsers={SCHEDULER: parse_scheduler},
    own=f"{_SMALL_FILES}|{_RANDOM_STATES.pattern}",
    optimizer=r"optimizer(?:_\d{1,9})?\.bin",
    rank_file=r"(?P<item>pytorch_model_fsdp|optimizer)(?:_(?P<index>\d{1,9}))?_rank(?P<rank>\d{1,9})\.bin",
    others=r"(?:pytorch_model_fsdp|optimizer)(?:_\d+)?(?:_rank\d+)?\.bin",
    folders=f"{DCP_FOLDERS}|{DEEPSPEED_TAGS}",
    last=_RANDOM_STATES.pattern,
    resume_rules=ResumeRules(
        dcp_folders=DCP_FOLDERS,
        copied_files=RESUME_FILES,
        resume_code="accelerator.load_state({path})",
        note_without_rank_files="accelerate resumes without them, with generators as your script seeds them",
    ),
)


def refuse_several_models(source: Source, tag: str | None) -> None:
    """Raises UnsupportedError if ``source`` holds several models of accelerate, and ``tag`` chooses none."""
    # With DeepSpeed each model has its own tag, and ``latest`` names the last one (accelerator.py ``save_state``).
    tags = sorted(
        {match[1] for path in source.files if (match := _TAGGED_STATES.fullmatch(path)) is not None},
        key=natural_sort_key,
    )
    if tag is None and len(tags) > 1:
        options = " or ".join(format_option("tag", each) for each in tags[:MAX_CHOICES])
        raise UnsupportedError(f"there are several models ({join_names(tags)}); choose one with {options}")
    models_by_folder = _number_models(source.files)
    if len(models_by_folder) == 1 and len(models := next(iter(models_by_folder.values()))) > 1:
        paths, url = [models[number] for number in sorted(models)], source.store.url.rstrip("/")
        raise UnsupportedError(
            f"there are several models here ({join_names(paths)}); name one of them, which is read with its own "
            f"optimizer: {' or '.join(f'{url}/{path}' for path in paths[:MAX_CHOICES])}"
        )


def _number_models(files: Collection[str]) -> dict[str, dict[int, str]]:
    """The paths of models by the folder that holds them, and by their numbers."""
    models_by_folder: dict[str, dict[int, str]] = {}
    for path in files:
        match = _MODEL_FOLDER.fullmatch(path.removesuffix("/.metadata")) if path.endswith("/.metadata") else None
        parent = match["parent"] if match is not None else ""
        match = match or _MODEL_FILE.fullmatch(path)
        if match is not None:
            models_by_folder.setdefault(parent, {}).setdefault(
                int(match["number"] or 0), path.removesuffix("/.metadata")
            )
    return models_by_folder


def find_last_model_number(files: Collection[str]) -> int | None:
    """The largest number of a model in a folder; None if there is no model."""
    return max((number for models in _number_models(files).values() for number in models), default=None)


def name_optimizer_folder(folder: str) -> str | None:
    """The folder of the optimizer of the model whose DCP is ``folder``; None if that is of no model. Items of ranks'
    files have such names too."""
    match = _MODEL_FOLDER.fullmatch(folder)
    if match is None:
        return None
    parent, model_folder = match["parent"], f"{LEROBOT_FOLDERS[0]}/"
    if f"/{parent}".endswith(f"/{model_folder}"):
        parent = f"{parent.removesuffix(model_folder)}{LEROBOT_FOLDERS[1]}/"
    return f"{parent}optimizer_{match['number']}"


def join_optimizer(url: str, source: Source, open_url: OpenUrl) -> tuple[Source, tuple[Note, ...]]:
    """``source`` with the optimizer of the same number, or a note that it is missing, if ``url`` names the DCP of a
    model or the file of one of several models. The file of the only model is read alone."""
    base, _, name = url.rstrip("/").removesuffix("/.metadata").rpartition("/")
    optimizer, file_match = name_optimizer_folder(name), _MODEL_FILE.fullmatch(name)
    if base and optimizer is not None and ".metadata" in source.files:
        if _open_if_exists(open_url, f"{base}/{optimizer}") is None:
            return source, (_note_missing_optimizer(optimizer, name),)
        # The folder above, without the other models and optimizers.
        base_source, parts = open_url(base), (f"{name}/", f"{optimizer}/")
        files = {path: size for path, size in base_source.files.items() if path.startswith(parts) or "/" not in path}
        return replace(base_source, files=files), ()
    if base and file_match is not None and list(source.files) == [name]:
        return _join_optimizer_file(base, file_match, source, open_url)
    return source, ()


def _join_optimizer_file(
    base: str, model: re.Match[str], source: Source, open_url: OpenUrl
) -> tuple[Source, tuple[Note, ...]]:
    number = model["number"]
    if number is None and _open_if_exists(open_url, f"{base}/{model['stem']}_1.{model['suffix']}") is None:
        return source, ()
    name = OPTIMIZER if number is None else f"optimizer_{number}.bin"
    optimizer_source = _open_if_exists(open_url, f"{base}/{name}")
    if optimizer_source is not None and list(optimizer_source.files) == [name]:
        return join_file(source, optimizer_source, name), ()
    has_others = any(
        _open_if_exists(open_url, f"{base}/{other}") is not None for other in (OPTIMIZER, "optimizer_1.bin")
    )
    return source, (_note_missing_optimizer(name, model[0]),) if has_others else ()


def join_file(source: Source, file_source: Source, name: str) -> Source:
    """``source`` with the one file of ``file_source``, called ``name``. Raises UsageError if that is a folder."""
    from ckpt_tools.stores.wrappers import RedirectingStore

    if len(file_source.files) != 1:
        raise UsageError(f"{format_option('optimizer_file', file_source.store.url)} is not a file")
    path_there, size = next(iter(file_source.files.items()))
    files = {path: each for path, each in source.files.items() if path != path_there or len(source.files) == 1}
    return Source(RedirectingStore(source.store, {name: (file_source.store, path_there)}), {**files, name: size})


def _open_if_exists(open_url: OpenUrl, url: str) -> Source | None:
    try:
        return open_url(url)
    except SourceNotFoundError:
        return None


def _note_missing_optimizer(optimizer: str, model: str) -> Note:
    return Note(Outcome.MISSING, optimizer, f"it is not beside {model}, which is read without an optimizer")


def note_missing_optimizers(folders: Collection[str]) -> tuple[Note, ...]:
    """A note for each model among the DCPs in ``folders`` whose optimizer is not among them."""
    optimizers = {folder: each for folder in folders if (each := name_optimizer_folder(folder)) is not None}
    return tuple(_note_missing_optimizer(each, folder) for folder, each in optimizers.items() if each not in folders)


def refuse_several_rank_models(labels: Collection[str], *, model_key: str | None, optim_key: str | None) -> None:
    """Raises UnsupportedError if the items ``labels`` of ranks' files are several models, and the keys do not choose a
    model and its optimizer. The labels of the first are ``model`` and ``optimizer``."""
    optimizers = {label: each for label in labels if (each := name_optimizer_folder(label)) is not None}
    if "model" in labels:
        optimizers = {"model": "optimizer", **optimizers}
    is_chosen = model_key is not None and (optim_key is not None or not {*optimizers.values()} & {*labels})
    if len(optimizers) > 1 and not is_chosen:
        choices = [
            format_option("model_key", model) + (f" {format_option('optim_key', each)}" if each in labels else "")
            for model, each in optimizers.items()
        ]
        raise UnsupportedError(
            f"there are several models ({join_names([*optimizers])}); choose one with "
            f"{' or '.join(choices[:MAX_CHOICES])}"
        )


def is_model_with_optimizer(folders: Collection[str]) -> bool:
    """Whether two DCPs are a model and its optimizer in the same folder."""
    return len(folders) == 2 and any(name_optimizer_folder(each) in folders for each in folders)


def find_numbered_model(folders: Collection[str]) -> str:
    """The folder of a model that is not the first, if ``folders`` are its own and its optimizer's; else empty."""
    models = [each for each in folders if name_optimizer_folder(each) is not None and not each.endswith("_0")]
    return models[0] if len(models) == 1 and len(folders) == 2 else ""


def has_several_schedulers(files: Collection[str]) -> bool:
    """Whether ``scheduler.bin`` can be another model's: schedulers are numbered by themselves."""
    names = {path.rpartition("/")[2] for path in files}
    return any(map(_SEVERAL_SCHEDULERS.fullmatch, names)) or (find_last_model_number(files) or 0) > 0
