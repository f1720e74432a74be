"""accelerate (1.15): ``Accelerator.save_state``, with the model and optimizer of the same number.

``save_state`` (checkpointing.py ``save_accelerator_state``, utils/fsdp_utils.py) numbers models and optimizers in the
order in which they were prepared, and pairs them by that number. With FSDP each is a DCP: ``pytorch_model_fsdp_1`` and
``optimizer_1``, or a file of each rank. Elsewhere each is a file, and the first has no number: ``model.safetensors``
and ``optimizer.bin``, ``model_1.safetensors`` and ``optimizer_1.bin``.
"""

from __future__ import annotations

import re
from collections import defaultdict
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

_MODEL = "pytorch_model_fsdp_"
_MODEL_FOLDER = re.compile(rf"{_MODEL}(\d{{1,9}})")
_TAGGED_STATES = re.compile(r"(pytorch_model(?:_[1-9]\d{0,8})?)/[^/]*_states\.pt")
_MODEL_FILE = re.compile(r"(model|pytorch_model|pytorch_model_fsdp)(?:_([1-9]\d{0,8}))?\.(safetensors|bin)")
_SEVERAL_SCHEDULERS = re.compile(r"(?:scheduler|optimizer)_[1-9]\d{0,8}\.bin")

_RANDOM_STATES = re.compile(r"random_states_(\d{1,9})\.pkl")
_ACCELERATE_FILE = re.compile(rf"(?:optimizer|scheduler|sampler)(?:_\d+)?\.bin|{_RANDOM_STATES.pattern}")

DCP_FOLDERS = r"(?:pytorch_model_fsdp|optimizer)_\d+"
"""Folders of the DCPs of models and optimizers, which are one checkpoint together."""

DEEPSPEED_TAGS = r"pytorch_model(?:_\d+)?"
"""Tags of DeepSpeed for several models."""

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
    models_by_folder: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for path in source.files:
        folder, name, number = _parse_model_path(path)
        if number is not None:
            models_by_folder[folder].setdefault(number, f"{folder}{name}")
    if len(models_by_folder) == 1 and len(models := next(iter(models_by_folder.values()))) > 1:
        url = source.store.url.rstrip("/")
        choices = [f"{url}/{models[number]}" for number in sorted(models)]
        raise UnsupportedError(
            f"there are several models here ({join_names([models[number] for number in sorted(models)])}); name one of "
            f"them, which is read with its own optimizer: {' or '.join(choices[:MAX_CHOICES])}"
        )


def _parse_model_path(path: str) -> tuple[str, str, int | None]:
    """The prefix of a model's folder, the model's name, and its number; None if ``path`` is not a file of a model."""
    folder, _, name = path.rpartition("/")
    outer_folder, _, folder_name = folder.rpartition("/")
    if name == ".metadata" and (match := _MODEL_FOLDER.fullmatch(folder_name)) is not None:
        return outer_folder and f"{outer_folder}/", folder_name, int(match[1])
    file_match = _MODEL_FILE.fullmatch(name) if not folder else None
    return "", name, int(file_match[2] or 0) if file_match is not None else None


def join_optimizer(url: str, source: Source, open_url: OpenUrl) -> tuple[Source, tuple[Note, ...]]:
    """``source`` with the optimizer of the same number, or a note that it is missing, if ``url`` names the DCP of a
    model or the file of one of several models. The file of the only model is read alone."""
    base, _, name = url.rstrip("/").removesuffix("/.metadata").rpartition("/")
    folder_match, file_match = _MODEL_FOLDER.fullmatch(name), _MODEL_FILE.fullmatch(name)
    if base and folder_match is not None and ".metadata" in source.files:
        return _join_optimizer_folder(base, name, int(folder_match[1]), source, open_url)
    if base and file_match is not None and list(source.files) == [name]:
        return _join_optimizer_file(base, file_match, source, open_url)
    return source, ()


def _join_optimizer_folder(
    base: str, name: str, number: int, source: Source, open_url: OpenUrl
) -> tuple[Source, tuple[Note, ...]]:
    """The folder above, without the other models and optimizers."""
    optimizer = f"optimizer_{number}"
    if _open_if_exists(open_url, f"{base}/{optimizer}") is None:
        return source, (_note_missing_optimizer(optimizer, name),)
    base_source = open_url(base)
    parts = (f"{name}/", f"{optimizer}/")
    files = {path: size for path, size in base_source.files.items() if path.startswith(parts) or "/" not in path}
    return replace(base_source, files=files), ()


def _join_optimizer_file(
    base: str, file_match: re.Match[str], source: Source, open_url: OpenUrl
) -> tuple[Source, tuple[Note, ...]]:
    number = int(file_match[2] or 0)
    if not number and _open_if_exists(open_url, f"{base}/{file_match[1]}_1.{file_match[3]}") is None:
        return source, ()
    name = f"optimizer_{number}.bin" if number else "optimizer.bin"
    optimizer_source = _open_if_exists(open_url, f"{base}/{name}")
    if optimizer_source is not None and list(optimizer_source.files) == [name]:
        return join_file(source, optimizer_source, name), ()
    others = ("optimizer.bin", "optimizer_1.bin")
    has_others = any(_open_if_exists(open_url, f"{base}/{other}") is not None for other in others)
    return source, (_note_missing_optimizer(name, file_match[0]),) if has_others else ()


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
    numbers = {folder: match[1] for folder in folders if (match := _MODEL_FOLDER.fullmatch(folder.rpartition("/")[2]))}
    optimizers = {
        folder: f"{folder.removesuffix(_MODEL + number)}optimizer_{number}" for folder, number in numbers.items()
    }
    return tuple(_note_missing_optimizer(each, folder) for folder, each in optimizers.items() if each not in folders)


def find_last_model_number(files: Collection[str]) -> int:
    """The largest number of a model in a folder."""
    return max((number for path in files if (number := _parse_model_path(path)[2]) is not None), default=0)


def refuse_several_rank_models(labels: Collection[str], *, model_key: str | None, optim_key: str | None) -> None:
    """Raises UnsupportedError if the items ``labels`` of ranks' files are several models, and the keys do not choose a
    model and its optimizer. The labels of the first are ``model`` and ``optimizer``."""
    models = {label: match[1] for label in labels if (match := _MODEL_FOLDER.fullmatch(label)) is not None}
    optimizers = {model: f"optimizer_{number}" for model, number in models.items()}
    if "model" in labels:
        optimizers = {"model": "optimizer", **optimizers}
    is_chosen = model_key is not None and (optim_key is not None or not {*optimizers.values()} & {*labels})
    if len(optimizers) > 1 and not is_chosen:
        choices = [
            " ".join(
                [format_option("model_key", model), *([format_option("optim_key", each)] if each in labels else [])]
            )
            for model, each in optimizers.items()
        ]
        raise UnsupportedError(
            f"there are several models ({join_names([*optimizers])}); choose one with "
            f"{' or '.join(choices[:MAX_CHOICES])}"
        )


def is_model_with_optimizer(folders: Collection[str]) -> bool:
    """Whether two DCPs are a model and its optimizer in the same folder."""
    parents = {folder.rpartition("/")[0] for folder in folders}
    names = {folder.rpartition("/")[2] for folder in folders}
    numbers = [match[1] for name in names if (match := _MODEL_FOLDER.fullmatch(name)) is not None]
    is_pair = len(numbers) == 1 and names == {f"{_MODEL}{numbers[0]}", f"optimizer_{numbers[0]}"}
    return len(parents) == 1 and len(folders) == 2 and is_pair


def find_numbered_model(folders: Collection[str]) -> str:
    """The folder of a model that is not the first, if ``folders`` are its own and its optimizer's; else empty."""
    models = [folder for folder in folders if (match := _MODEL_FOLDER.fullmatch(folder)) is not None and int(match[1])]
    return models[0] if len(models) == 1 and len(folders) == 2 else ""


def has_several_schedulers(files: Collection[str]) -> bool:
    """Whether ``scheduler.bin`` can be another model's: schedulers are numbered by themselves."""
    names = {path.rpartition("/")[2] for path in files}
    return any(map(_SEVERAL_SCHEDULERS.fullmatch, names)) or find_last_model_number(files) > 0
