"""The folders of trainers that save through DCP: which files lie there, and what the trainer needs to resume. Pure.

Lightning's ``FSDPStrategy`` and ``ModelParallelStrategy`` keep everything that is not a tensor in ``meta.pt`` beside
``.metadata``, and take a folder without it for no checkpoint (lightning 2.6.6, fabric/strategies/fsdp.py
``_is_sharded_checkpoint``). accelerate keeps two DCPs side by side and its small files above them (1.15,
checkpointing.py); transformers' Trainer saves through accelerate and adds its own. OLMo-core keeps one DCP in
``model_and_optim`` (train/checkpoint.py ``Checkpointer``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.core.trainer_folder import BesideFile, TrainerFolder
from ckpt_tools.stores.marker_files import DIGESTS_NAME, SIGNATURE_NAME


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer by its files: ``part`` matches the folders of its DCPs, ``sign`` is a file or nothing, ``files`` match
    those that are copied, with a group where a name tells the rank."""

    name: str
    part: re.Pattern[str]
    sign: str | None
    files: re.Pattern[str]
    without_ranks: str = ""
    first_is_enough: bool = False


_ACCELERATE = (
    r"scheduler(?:_\d+)?\.bin|sampler(?:_\d+)?\.bin|dl_state_dict(?:_\d+)?\.bin|scaler\.pt"
    r"|custom_checkpoint_\d+\.pkl|random_states_(?P<rank>\d{1,9})\.pkl"
)

_TRANSFORMERS = (
    r"trainer_state\.json|training_args\.bin|scheduler\.pt|rng_state(?:_(?P<of>\d{1,9}))?\.pth"
    r"|(?:generation_)?config\.json"
    r"|tokenizer[^/]*|special_tokens_map\.json|added_tokens\.json|vocab\.(?:json|txt)|merges\.txt|spiece\.model"
    r"|chat_template\.(?:jinja|json)|(?:pre)?processor_config\.json|adapter_config\.json|README\.md"
)

_FSDP_PARTS = re.compile(r"(?:pytorch_model_fsdp|optimizer)_\d+")

_TRAINERS = (
    Trainer(
        "transformers' Trainer",
        _FSDP_PARTS,
        "trainer_state.json",
        re.compile(f"{_ACCELERATE}|{_TRANSFORMERS}"),
        "the Trainer resumes without them, with generators as its seed sets them",
    ),
    Trainer(
        "accelerate",
        _FSDP_PARTS,
        None,
        re.compile(_ACCELERATE),
        "accelerate resumes without them, with generators as your script seeds them",
    ),
    Trainer("Lightning", re.compile(""), "meta.pt", re.compile(r"meta\.pt")),
    Trainer(
        "OLMo-core",
        re.compile("model_and_optim"),
        None,
        re.compile(r"config\.json|\.metadata\.json|data_paths\.txt|train/rank(?P<rank>\d{1,9})\.pt"),
        "OLMo-core gives every rank the state of rank 0 then",
        first_is_enough=True,
    ),
)


def trainer_folder(
    files: Mapping[str, int],
    metadata: Sequence[str],
    tops: Mapping[str, Collection[str]],
    is_of_dcp: Callable[[str], bool],
) -> TrainerFolder | None:
    """The folder of a trainer in which the DCPs lie that the files ``metadata`` describe; None where it is of nobody.

    ``tops`` has the names at the top of the tree of each. ``files`` are those of the source, with their sizes.
    ``is_of_dcp`` says whether a name is one of torch's in a DCP.
    """
    folders = {path.rpartition("/")[0]: path for path in metadata}
    for trainer in _TRAINERS:
        base = _base(trainer, folders, files)
        if base is not None:
            parts = {folder[len(base) :]: tops[path] for folder, path in folders.items()}
            found = _copied(trainer, base, files)
            known = {file.source for file in found.values()}
            around = (path for path in files if _is_in(path, base) and not is_of_dcp(path[len(base) :]))
            unknown = frozenset(path for path in around if path not in known)
            return TrainerFolder(trainer.name, parts, found, trainer.without_ranks, trainer.first_is_enough, unknown)
    return None


def _is_in(path: str, base: str) -> bool:
    """Whether a file lies in the folder itself and is not ours."""
    name = path[len(base) :]
    is_ours = name in (SIGNATURE_NAME, DIGESTS_NAME)
    return path.startswith(base) and "/" not in name and not is_ours


def _base(trainer: Trainer, folders: Iterable[str], files: Mapping[str, int]) -> str | None:
    """The prefix of the folder that holds the DCPs, if it is of this trainer."""
    prefixes = set()
    for folder in folders:
        parent, _, name = folder.rpartition("/")
        above, last = (parent, name) if trainer.part.pattern else (folder, "")
        if trainer.part.fullmatch(last) is None:
            return None
        prefixes.add(f"{above}/" if above else "")
    base = prefixes.pop()
    return base if not prefixes and (trainer.sign is None or f"{base}{trainer.sign}" in files) else None


def _copied(trainer: Trainer, base: str, files: Mapping[str, int]) -> dict[str, BesideFile]:
    found = {}
    for path, size in files.items():
        match = trainer.files.fullmatch(path[len(base) :]) if path.startswith(base) else None
        if match is not None:
            found[path[len(base) :]] = BesideFile(path, size, _rank(match))
    return found


def _rank(match: re.Match[str]) -> int | None:
    """The rank to which a file belongs; without a number ``rng_state.pth`` is that of a run of one."""
    if match[0] == "rng_state.pth":
        return 0
    rank = next((number for number in match.groupdict().values() if number is not None), None)
    return None if rank is None else int(rank)
