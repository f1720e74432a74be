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
from ckpt_tools.core.wording import format_ranks, join_names, natural_sort_key
from ckpt_tools.errors import SourceNotFoundError, UnsupportedError, UsageError
from ckpt_tools.stores.source import Source
from ckpt_tools.trainers.record import Returned, Trainer
from ckpt_tools.trainers.saved import Saved

MAX_CHOICES = 4
"""Paths that a message spells out."""

SCHEDULER = "scheduler.bin"
OPTIMIZER = "optimizer.bin"

_MODEL = "pytorch_model_fsdp_"
_FOLDER = re.compile(rf"{_MODEL}(\d{{1,9}})")
_TAGGED = re.compile(r"(pytorch_model(?:_[1-9]\d{0,8})?)/[^/]*_states\.pt")
_FILE = re.compile(r"(model|pytorch_model|pytorch_model_fsdp)(?:_([1-9]\d{0,8}))?\.(safetensors|bin)")
_SEVERAL_SCHEDULERS = re.compile(r"(?:scheduler|optimizer)_[1-9]\d{0,8}\.bin")

_STATES = re.compile(r"random_states_(\d{1,9})\.pkl")
_SIGN = re.compile(rf"(?:optimizer|scheduler|sampler)(?:_\d+)?\.bin|{_STATES.pattern}")

PARTS = r"(?:pytorch_model_fsdp|optimizer)_\d+"
"""Folders of the DCPs of models and optimizers, which are one checkpoint together."""

TAGS = r"pytorch_model(?:_\d+)?"
"""Tags of DeepSpeed for several models."""

_SMALL = r"(?:sampler|dl_state_dict)(?:_\d+)?\.bin|scheduler_\d+\.bin|scaler\.pt|custom_checkpoint_\d+\.pkl"

RETURNED = (_STATES.pattern, f"{_SMALL}|{re.escape(SCHEDULER)}")
"""Files that are copied into a folder that is written again."""

Look = Callable[[str], Source]
"""Opens what is at a URL. Raises SourceNotFoundError."""


def scheduler(content: Any) -> Mapping[str, Any]:
    return {"lr_scheduler": content} if isinstance(content, dict) else {}


def problem(saved: Saved) -> str | None:
    """Every rank writes the state of its random generators last. ``transformers`` calls this for what it did not
    write: its Trainer saves through accelerate, and has no such files."""
    if not any(map(_SIGN.fullmatch, saved.files)):
        return None
    ranks = {int(match[1]) for path in saved.files if (match := _STATES.fullmatch(path))}
    if not ranks:
        return "no random_states_0.pkl, which accelerate writes last: the save did not finish"
    missing = set(range(max(ranks) + 1)) - ranks
    return f"the random states of {format_ranks(missing)} are missing" if missing else None


ACCELERATE = Trainer(
    name="accelerate",
    reads={SCHEDULER: scheduler},
    own=f"{_SMALL}|{_STATES.pattern}",
    optimizer=r"optimizer(?:_\d{1,9})?\.bin",
    rank_file=r"(?P<item>pytorch_model_fsdp|optimizer)(?:_(?P<index>\d{1,9}))?_rank(?P<rank>\d{1,9})\.bin",
    others=r"(?:pytorch_model_fsdp|optimizer)(?:_\d+)?(?:_rank\d+)?\.bin",
    folders=f"{PARTS}|{TAGS}",
    last=_STATES.pattern,
    returned=Returned(
        parts=PARTS,
        files=RETURNED,
        resume="accelerator.load_state({path})",
        without_ranks="accelerate resumes without them, with generators as your script seeds them",
    ),
)


def refuse_several(source: Source, tag: str | None) -> None:
    """Raises UnsupportedError if ``source`` holds several models of accelerate, and ``tag`` chooses none."""
    # With DeepSpeed each model has its own tag, and ``latest`` names the last one (accelerator.py ``save_state``).
    tags = sorted(
        {match[1] for path in source.files if (match := _TAGGED.fullmatch(path)) is not None}, key=natural_sort_key
    )
    if tag is None and len(tags) > 1:
        options = " or ".join(format_option("tag", each) for each in tags[:MAX_CHOICES])
        raise UnsupportedError(f"there are several models ({join_names(tags)}); choose one with {options}")
    found: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for path in source.files:
        folder, name, number = _model_of(path)
        if number is not None:
            found[folder].setdefault(number, f"{folder}{name}")
    if len(found) == 1 and len(models := next(iter(found.values()))) > 1:
        url = source.store.url.rstrip("/")
        choices = [f"{url}/{models[number]}" for number in sorted(models)]
        raise UnsupportedError(
            f"there are several models here ({join_names([models[number] for number in sorted(models)])}); name one of "
            f"them, which is read with its own optimizer: {' or '.join(choices[:MAX_CHOICES])}"
        )


def _model_of(path: str) -> tuple[str, str, int | None]:
    """The prefix of a model's folder, the model's name, and its number; None if ``path`` is not a file of a model."""
    folder, _, name = path.rpartition("/")
    above, _, last = folder.rpartition("/")
    if name == ".metadata" and (match := _FOLDER.fullmatch(last)) is not None:
        return above and f"{above}/", last, int(match[1])
    file = _FILE.fullmatch(name) if not folder else None
    return "", name, int(file[2] or 0) if file is not None else None


def with_optimizer(url: str, source: Source, look: Look) -> tuple[Source, tuple[Note, ...]]:
    """``source`` with the optimizer of the same number, or a note that it is missing, if ``url`` names the DCP of a
    model or the file of one of several models. The file of the only model is read alone."""
    base, _, name = url.rstrip("/").removesuffix("/.metadata").rpartition("/")
    folder, file = _FOLDER.fullmatch(name), _FILE.fullmatch(name)
    if base and folder is not None and ".metadata" in source.files:
        return _both_folders(base, name, int(folder[1]), source, look)
    if base and file is not None and list(source.files) == [name]:
        return _both_files(base, file, source, look)
    return source, ()


def _both_folders(base: str, name: str, number: int, source: Source, look: Look) -> tuple[Source, tuple[Note, ...]]:
    """The folder above, without the other models and optimizers."""
    optimizer = f"optimizer_{number}"
    if _found(look, f"{base}/{optimizer}") is None:
        return source, (_missing(optimizer, name),)
    every = look(base)
    parts = (f"{name}/", f"{optimizer}/")
    files = {path: size for path, size in every.files.items() if path.startswith(parts) or "/" not in path}
    return replace(every, files=files), ()


def _both_files(base: str, file: re.Match[str], source: Source, look: Look) -> tuple[Source, tuple[Note, ...]]:
    number = int(file[2] or 0)
    if not number and _found(look, f"{base}/{file[1]}_1.{file[3]}") is None:
        return source, ()
    name = f"optimizer_{number}.bin" if number else "optimizer.bin"
    found = _found(look, f"{base}/{name}")
    if found is not None and list(found.files) == [name]:
        return with_file(source, found, name), ()
    others = ("optimizer.bin", "optimizer_1.bin")
    has_others = any(_found(look, f"{base}/{other}") is not None for other in others)
    return source, (_missing(name, file[0]),) if has_others else ()


def with_file(source: Source, other: Source, name: str) -> Source:
    """``source`` with the one file of ``other``, called ``name``. Raises UsageError if ``other`` is a folder."""
    from ckpt_tools.stores.wrappers import RedirectingStore

    if len(other.files) != 1:
        raise UsageError(f"{format_option('optimizer_file', other.store.url)} is not a file")
    own, size = next(iter(other.files.items()))
    files = {path: each for path, each in source.files.items() if path != own or len(source.files) == 1}
    return Source(RedirectingStore(source.store, {name: (other.store, own)}), {**files, name: size})


def _found(look: Look, url: str) -> Source | None:
    try:
        return look(url)
    except SourceNotFoundError:
        return None


def _missing(optimizer: str, model: str) -> Note:
    return Note(Outcome.MISSING, optimizer, f"it is not beside {model}, which is read without an optimizer")


def note_of_missing(folders: Collection[str]) -> tuple[Note, ...]:
    """A note for each model among the DCPs in ``folders`` whose optimizer is not among them."""
    numbers = {folder: match[1] for folder in folders if (match := _FOLDER.fullmatch(folder.rpartition("/")[2]))}
    optimizers = {
        folder: f"{folder.removesuffix(_MODEL + number)}optimizer_{number}" for folder, number in numbers.items()
    }
    return tuple(_missing(each, folder) for folder, each in optimizers.items() if each not in folders)


def last_model(files: Collection[str]) -> int:
    """The largest number of a model in a folder."""
    return max((number for path in files if (number := _model_of(path)[2]) is not None), default=0)


def refuse_several_of_ranks(labels: Collection[str], *, model_key: str | None, optim_key: str | None) -> None:
    """Raises UnsupportedError if the items ``labels`` of ranks' files are several models, and the keys do not choose a
    model and its optimizer. The labels of the first are ``model`` and ``optimizer``."""
    models = {label: match[1] for label in labels if (match := _FOLDER.fullmatch(label)) is not None}
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


def is_one_model(folders: Collection[str]) -> bool:
    """Whether two DCPs are a model and its optimizer in the same folder."""
    parents = {folder.rpartition("/")[0] for folder in folders}
    names = {folder.rpartition("/")[2] for folder in folders}
    numbers = [match[1] for name in names if (match := _FOLDER.fullmatch(name)) is not None]
    is_pair = len(numbers) == 1 and names == {f"{_MODEL}{numbers[0]}", f"optimizer_{numbers[0]}"}
    return len(parents) == 1 and len(folders) == 2 and is_pair


def numbered_model(folders: Collection[str]) -> str:
    """The folder of a model that is not the first, if ``folders`` are its own and its optimizer's; else empty."""
    found = [folder for folder in folders if (match := _FOLDER.fullmatch(folder)) is not None and int(match[1])]
    return found[0] if len(found) == 1 and len(folders) == 2 else ""


def has_several_schedulers(files: Collection[str]) -> bool:
    """Whether ``scheduler.bin`` can be another model's: schedulers are numbered by themselves."""
    names = {path.rpartition("/")[2] for path in files}
    return any(map(_SEVERAL_SCHEDULERS.fullmatch, names)) or last_model(files) > 0
