"""Is a checkpoint of a run complete, by the marker of the trainer that wrote it?

Each rule is a small function over the names and sizes of the checkpoint's files and a few header reads. It gives a
sentence if the save did not finish, or if a file is missing or cut off, and None otherwise or if the rule is about
another trainer's checkpoints. No tensor is read, so a damaged element is not found here: ``verify`` finds it.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.core.run_folders import ITSELF, Member, is_carrier, parent_of
from ckpt_tools.core.wording import listed
from ckpt_tools.errors import FormatError, UnsafeError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.tag_files import missing as missing_file
from ckpt_tools.formats.deepspeed.common.tag_files import model_parallel_size
from ckpt_tools.formats.deepspeed.names import is_layer
from ckpt_tools.reading.trainer_files import marks_unfinished
from ckpt_tools.serialization.pickle.dcp_metadata import Metadata
from ckpt_tools.serialization.pickle.load import loads
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.serialization.torch_zip import open_archive
from ckpt_tools.serialization.zip_archive import read_directory
from ckpt_tools.stores.source import Source, checked_name
from ckpt_tools.trainers.rank_names import MANAGER, says_its_rank

MAX_METADATA_BYTES = 4 << 30
MAX_JSON_BYTES = 256 << 20
MAX_NAME_BYTES = 4096
TAIL_BYTES = 4096

_DATA = re.compile(r"__(\d+)_\d+\.distcp")
_METADATA = re.compile(r"\.metadata|__\d+\.metadata")
_MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM_STATES = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_OF_RANKS = re.compile(r"(?P<stem>.+)_world_size_(?P<size>\d{1,9})_rank_(?P<rank>\d{1,9})\.pt")
_OF_RANK = re.compile(r"(?P<stem>pytorch_model_fsdp(?:_\d+)?|optimizer(?:_\d+)?)_rank(?P<rank>\d{1,9})\.bin")
_RNG = re.compile(r"(?:random_states|rng_state)_(\d{1,9})\.(?:pkl|pth)")
_LEGACY_MEGATRON = re.compile(r"mp_rank_\d+(?:_\d+)*/(?:model_optim_rng|distrib_optim)\.pt")

_AUTOMODEL = re.compile(r"model/shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
_MANAGED = re.compile(r"(?:model|optimizer)_(\d{1,9})\.(?:pt|safetensors)")

_WITHOUT_WEIGHTS = re.compile(
    r"(?:optimizer|optim|scheduler|lr_scheduler|sampler|dl_state_dict|scaler|rng_state|rng|data|train_state|meta|optimizer_state)(?:_\d+)?"
    r"\.(?:pt|pth|bin)|training_args\.bin"
)

TRACKER = "latest_checkpointed_iteration.txt"
"""Of Megatron-LM and verl: the step of the last save that finished."""

RECORD = "checkpoint_manager_snapshot.json"
"""Ray Train's record of a run, written after each checkpoint."""

_OF_TORCH_DIST = frozenset(["metadata.json", "common.pt"])
"""Of Megatron-Core, beside ``.metadata``."""

_TRAINER_STATE = "trainer_state.json"
"""transformers' Trainer writes it last."""

_OF_TRAINER = re.compile(r"trainer_state\.json|training_args\.bin|rng_state(?:_\d+)?\.pth")
_OF_ACCELERATE = re.compile(r"random_states_\d+\.pkl|(?:optimizer|scheduler|sampler)(?:_\d+)?\.bin")


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint in its run. ``files`` are its files by their paths below ``root``, a folder of the run."""

    run: Source
    root: str
    files: Mapping[str, int]
    is_finished: bool
    name: str
    """Its path in the run."""
    title: str
    step: int | None
    is_remote: bool

    @classmethod
    def of(cls, run: Source, member: Member, *, is_remote: bool) -> Saved:
        root = member.folder
        files = {path[len(root) + 1 :] if root else path: size for path, size in member.files.items()}
        return cls(run, root, files, member.is_finished, member.name, member.title, member.step, is_remote)

    def path(self, inside: str) -> str:
        return f"{self.root}/{inside}" if self.root else inside

    def read(self, inside: str, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
        return self.run.read_all(self.path(inside), limit_bytes=limit_bytes)

    def part(self, inside: str) -> tuple[Callable[[int, int], bytes], int, str]:
        path = self.path(inside)
        return (lambda start, stop: self.run.read(path, start, stop)), self.files[inside], inside

    def beside(self, name: str) -> str | None:
        """A file next to the checkpoint, if it is there."""
        folder = parent_of(self.name)
        path = f"{folder}/{name}" if folder else name
        return path if path in self.run.files and self.name != ITSELF else None

    @property
    def names(self) -> frozenset[str]:
        """The names of its files without their folders."""
        return frozenset(path.rpartition("/")[2] for path in self.files)


def problem_of(saved: Saved) -> str | None:
    """Why it is not complete, in words; None if it is. Raises StoreError."""
    try:
        return next((text for rule in _RULES if (text := rule(saved)) is not None), None)
    except (FormatError, UnsafeError) as error:
        return str(error)


def is_shown_by_reading(saved: Saved) -> bool:
    """Whether only its reader sees that a layer is missing: without ZeRO the model files of a pipeline do not name the
    parameters of its layers."""
    stages = [path for path in saved.files if _MODEL_STATES.fullmatch(path.rpartition("/")[2])]
    if not stages or not any(is_layer(path.rpartition("/")[2]) for path in saved.files):
        return False
    head = open_archive(*saved.part(min(stages))).value
    return isinstance(head, dict) and not head.get("param_shapes")


def format_of(saved: Saved) -> str:
    """How its files are laid out. Formats that ckpt-tools reads have the names that ``inspect`` reports."""
    names = saved.names
    if any(name == "manifest.ocdbt" or name.startswith("_CHECKPOINT_METADATA") for name in names):
        return "orbax"
    if any(_METADATA.fullmatch(name) or _DATA.fullmatch(name) for name in names):
        return "megatron" if _is_torch_dist(saved) else "dcp"
    if any(path.endswith("/fp32.pt") for path in saved.files):
        return "universal"
    if any(name.endswith("_states.pt") for name in names):
        return "deepspeed"
    if _is_legacy(saved):
        return "megatron"
    if MANAGER in names or any(map(says_its_rank, names)):
        return "sharded"
    for name in ("gguf", "npz"):
        if any(each.endswith(f".{name}") for each in names):
            return name
    return "safetensors" if any(name.endswith(".safetensors") for name in names) else "torch"


def _is_legacy(saved: Saved) -> bool:
    """Whether Megatron-LM wrote it in its older format, a file for each tensor and pipeline parallel rank."""
    return any(_LEGACY_MEGATRON.search(path) for path in saved.files)


def world_size_of(saved: Saved) -> int | None:
    """The number of ranks that wrote it, as the names of its files say."""
    if cut := _numbers((path.rpartition("/")[2] for path in saved.files), _OPTIM_STATES):
        return (max(rank for rank, _ in cut) + 1) * (max(part for _, part in cut) + 1)
    numbers: list[int] = []
    for path in saved.files:
        name = path.rpartition("/")[2]
        if (of := _OF_RANKS.fullmatch(name)) is not None:
            return int(of["size"])
        numbers += [int(match[1]) for form in (_DATA, _RNG) if (match := form.fullmatch(name))]
        managed = _MANAGED.fullmatch(path) if MANAGER in saved.files else None
        numbers += [] if managed is None else [int(managed[1])]
        numbers += [int(match["rank"]) for match in [_OF_RANK.fullmatch(name)] if match]
    return max(numbers) + 1 if numbers else None


def _name(saved: Saved) -> str | None:
    if saved.is_finished:
        return None
    return f"the name {saved.name.rpartition('/')[2]} says that the save did not finish, or is under way"


def _marker(saved: Saved) -> str | None:
    found = next((path for path in saved.files if marks_unfinished(path.rpartition("/")[2])), None)
    return None if found is None else f"the file {found} marks it as unfinished"


def _weightless(saved: Saved) -> str | None:
    """What is left of a checkpoint whose weights are gone, or were not written yet."""
    if format_of(saved) not in ("torch", "safetensors"):
        return None
    held = [path for path in saved.files if is_carrier(path) and not path.endswith(".index.json")]
    is_left = all(_WITHOUT_WEIGHTS.fullmatch(path.rpartition("/")[2]) for path in held)
    return "no file that holds the model's weights" if is_left else None


def _empty(saved: Saved) -> str | None:
    """Files that hold tensors are never empty."""
    endings = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".distcp", ".metadata", ".json")
    found = next((path for path, size in saved.files.items() if not size and path.endswith(endings)), None)
    return None if found is None else f"{found} is empty: the save or a copy of it did not finish"


def _orbax(saved: Saved) -> str | None:
    pending = next((path for path in saved.files if ".orbax-checkpoint-tmp" in path), None)
    if pending is not None:
        return f"{pending.partition('.orbax-checkpoint-tmp')[0]} is a temporary folder: the save did not finish"
    if format_of(saved) != "orbax" or {"_CHECKPOINT_METADATA", "_METADATA"} & saved.files.keys():
        return None
    return "no _CHECKPOINT_METADATA: the save did not finish"


def _orbax_commit(saved: Saved) -> str | None:
    """Object stores cannot rename, so a file says that all others are there. Other checkpoints show whether it is
    used."""
    marker = "commit_success.txt"
    if format_of(saved) != "orbax" or marker in saved.files or not saved.root:
        return None
    folder = parent_of(saved.root)
    is_used = any(path.endswith(f"/{marker}") and parent_of(parent_of(path)) == folder for path in saved.run.files)
    return f"no {marker}, which other checkpoints of the run have: the save did not finish" if is_used else None


def _is_torch_dist(saved: Saved) -> bool:
    """Whether Megatron-Core wrote it, perhaps into a folder of it. Newer versions leave out ``common.pt``."""
    is_iteration = re.fullmatch(r"iter_\d{7}", saved.title) is not None
    return is_iteration or bool(_OF_TORCH_DIST & saved.names)


def _automodel(saved: Saved) -> str | None:
    """NeMo Automodel writes the model, then the optimizer."""
    is_automodel = re.fullmatch(r"epoch_\d+_step_\d+", saved.title) and any(map(_AUTOMODEL.fullmatch, saved.files))
    if not is_automodel or any(path.startswith("optim/") for path in saved.files):
        return None
    return "no optim/, which is written after model/: the save did not finish"


def _nemo(saved: Saved) -> str | None:
    """NeMo lays a file beside a checkpoint while it writes it."""
    path = saved.beside(f"{saved.title}-unfinished")
    return None if path is None else f"the file {path} marks it as unfinished"


def _torch_dist(saved: Saved) -> str | None:
    if format_of(saved) != "megatron" or "metadata.json" in saved.names or _is_legacy(saved):
        return None
    return "no metadata.json, which Megatron-Core writes last: the save did not finish"


def _tracker(saved: Saved) -> str | None:
    """verl, and Megatron-LM's older format, have no other marker than the number of the last save that finished."""
    path = saved.beside(TRACKER)
    if path is None or saved.step is None or "metadata.json" in saved.files:
        return None
    text = saved.run.read_all(path, limit_bytes=MAX_NAME_BYTES).decode(errors="replace").strip()
    if not text.isdecimal() or saved.step <= int(text):
        return None
    return f"{TRACKER} names step {text}: this save did not finish, or the run went back to that step"


def _ranks(saved: Saved) -> str | None:
    """Files of single ranks: each of the same number of ranks, or numbered from 0."""
    stems: dict[str, tuple[set[int], int | None]] = {}
    for path in saved.files:
        folder, name = parent_of(path), path.rpartition("/")[2]
        match = _OF_RANKS.fullmatch(name) or _OF_RANK.fullmatch(name)
        if match is not None:
            size = int(match["size"]) if "size" in match.groupdict() else None
            key = f"{folder}/{match['stem']}" if folder else match["stem"]
            stems.setdefault(key, (set(), size))[0].add(int(match["rank"]))
    for stem, (ranks, size) in stems.items():
        model = f"{parent_of(stem)}/model".lstrip("/")
        if size is not None and model not in stems:
            return f"no {model}_world_size_{size}_rank_0.pt: the save did not finish"
        missing = sorted(set(range(max(ranks) + 1 if size is None else size)) - ranks)
        if missing:
            return f"{stem} lacks the files of {_of_ranks(missing)}: the save did not finish"
    return None


def _of_ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed([str(rank) for rank in ranks])}"


def _torch_checkpointing(saved: Saved) -> str | None:
    """``metadata.pkl`` says the number of ranks, and lists items that can be resharded. Each item has a file a rank."""
    if "metadata.pkl" not in saved.files:
        is_bare = {"model", "optimizer"} <= {path.partition("_")[0] for path in saved.files if _MANAGED.fullmatch(path)}
        return "no metadata.pkl: the save did not finish" if is_bare else None
    found: Any = loads(saved.read("metadata.pkl", MAX_METADATA_BYTES), path="metadata.pkl")
    size = found.get("world_size") if isinstance(found, dict) else None
    items = found.get("metadata") if isinstance(found, dict) else None
    if type(size) is not int or not 0 < size <= 1 << 24 or not isinstance(items, dict):
        return "metadata.pkl does not list the items of a checkpoint"
    held: dict[str, set[int]] = {str(item): set() for item in items}
    for path in saved.files:
        match = re.fullmatch(r"([^/]+)_(\d{1,9})\.pt", path)
        if match is not None and int(match[2]) < size:
            held.setdefault(match[1], set()).add(int(match[2]))
    for item, ranks in held.items():
        missing = sorted(set(range(size)) - ranks)
        if ranks and missing:
            return f"{item} lacks the files of {_of_ranks(missing)}: the save did not finish"
    return None


def _deepspeed(saved: Saved) -> str | None:
    """All ranks' files are there, by the counts that a rank's model file states."""
    tags: dict[str, list[str]] = {}
    for path in saved.files:
        if path.endswith("_states.pt"):
            tags.setdefault(parent_of(path), []).append(path.rpartition("/")[2])
    found = (text for tag, names in tags.items() if (text := _tag(saved, tag, names)) is not None)
    return next(found, None)


def _tag(saved: Saved, tag: str, names: list[str]) -> str | None:
    models = sorted(name for name in names if _MODEL_STATES.fullmatch(name))
    if not models:
        return "no *_model_states.pt: the save did not finish"
    head = _head(saved, tag, models[0])
    if not isinstance(head, dict):
        return None
    dp, mp = head.get("dp_world_size"), model_parallel_size(head)
    if type(dp) is not int or type(mp) is not int or not 0 < dp * mp <= 1 << 24:
        return f"{models[0]} does not state the number of ranks"
    wanted = {(r, m) for r in range(dp) for m in range(mp)}
    is_zero3 = any(name.startswith("zero_pp_rank_") for name in models)
    optims = _numbers(names, _OPTIM_STATES)
    is_universal = any(path.startswith(f"{tag}/zero/" if tag else "zero/") for path in saved.files)
    if any(name.startswith(("layer_", "expp_")) for name in names) or head.get("num_experts"):
        if missing := {(0, m) for m in range(mp)} - _numbers(names, _MODEL_STATES):
            return f"model states of mp_rank_{min(missing)[1]:02d} are missing: the save did not finish"
        file = missing_file(names, filter(None, (_head(saved, tag, name) for name in models)))
        if file is not None:
            return f"{file} is missing: the save did not finish"
    if is_zero3 and (missing := wanted - _numbers(names, _MODEL_STATES)) and not is_universal:
        return f"model states of {_of_ranks(_ranks_of(missing))} are missing: the save did not finish"
    has_zero = head.get("param_shapes") is not None and not is_universal
    if (optims or has_zero) and (missing := wanted - optims):
        return f"optimizer states of {_of_ranks(_ranks_of(missing))} are missing: the save did not finish"
    return None


def _head(saved: Saved, tag: str, name: str) -> Any:
    return open_archive(*saved.part(f"{tag}/{name}" if tag else name)).value


def _numbers(names: Iterable[str], form: re.Pattern[str]) -> set[tuple[int, int]]:
    return {(int(match[1] or 0), int(match[2])) for name in names if (match := form.fullmatch(name))}


def _ranks_of(missing: Iterable[tuple[int, int]]) -> list[int]:
    return sorted({rank for rank, _ in missing})


def _latest(saved: Saved) -> str | None:
    """DeepSpeed writes ``latest`` after all ranks have saved: beside its tags, which are the run's checkpoints, or lie
    in a trainer's."""
    tags = {parent_of(path) for path in saved.files if path.endswith("_states.pt")} - {""}
    named = {"latest", "latest_universal"}
    if tags and not any(f"{parent_of(tag)}/{name}".lstrip("/") in saved.files for tag in tags for name in named):
        return "no file latest beside the folder of the tag: the save did not finish"
    path = saved.beside("latest")
    tag = saved.title
    if path is None or format_of(saved) != "deepspeed" or saved.step is None:
        return None
    text = saved.run.read_all(path, limit_bytes=MAX_NAME_BYTES).decode(errors="replace").strip().strip("/")
    pattern = r"(.*?)(\d+)"
    ours, theirs = re.fullmatch(pattern, tag), re.fullmatch(pattern, text)
    if ours is None or theirs is None or ours[1] != theirs[1] or int(ours[2]) <= int(theirs[2]):
        return None
    return f"the file latest names {text}: this save did not finish, or the run went back to that tag"


def _universal(saved: Saved) -> str | None:
    """Each parameter has a folder with its fp32 values; the model's file is copied last."""
    folders = {parent_of(path) for path in saved.files if re.search(r"(?:^|/)zero/[^/]+/[^/]+\.pt$", path)}
    if not folders:
        return None
    bare = sorted(folder for folder in folders if f"{folder}/fp32.pt" not in saved.files)
    if bare:
        return f"{bare[0]} has no fp32.pt: the conversion to universal did not finish"
    return None if any(name.endswith("_model_states.pt") for name in saved.names) else "no *_model_states.pt"


def _dcp(saved: Saved) -> str | None:
    """``.metadata`` is written last, and names every file and how far it reaches."""
    indexes = {path for path in saved.files if _METADATA.fullmatch(path.rpartition("/")[2])}
    held = {parent_of(path) for path in indexes}
    bare = sorted({parent_of(path) for path in saved.files if _DATA.fullmatch(path.rpartition("/")[2])} - held)
    if bare:
        return f"no {bare[0] + '/' if bare[0] else ''}.metadata: the save did not finish"
    found = (text for path in sorted(indexes) if (text := _indexed(saved, path)) is not None)
    return next(found, None)


def _indexed(saved: Saved, path: str) -> str | None:
    metadata = loads(saved.read(path, MAX_METADATA_BYTES), path=path)
    if not isinstance(metadata, Metadata):
        return f"{path} is not the index of a DCP"
    ends: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    folder = parent_of(path)
    for name, end in ends.items():
        file = f"{folder}/{checked_name(name)}" if folder else checked_name(name)
        if file not in saved.files:
            return f"{file} is missing, which {path} names"
        if saved.files[file] < end:
            return f"{file} has {saved.files[file]:,} bytes instead of {end:,}: it is cut off"
    return None


def _olmo(saved: Saved) -> str | None:
    """OLMo-core writes ``.metadata.json`` last, and takes a folder for a checkpoint if these three files are there
    (train/checkpoint.py, ``dir_is_checkpoint``)."""
    if _OLMO_FILES[0] not in saved.files or not any(path.startswith("train/rank") for path in saved.files):
        return None
    missing = next((path for path in _OLMO_FILES if path not in saved.files), None)
    return None if missing is None else f"no {missing}: the save did not finish"


_OLMO_FILES = ("model_and_optim/.metadata", "train/rank0.pt", ".metadata.json")


def _trainer(saved: Saved) -> str | None:
    """transformers' Trainer writes ``trainer_state.json`` last."""
    if not _is_trainers(saved):
        return None
    if _TRAINER_STATE not in saved.files:
        return f"no {_TRAINER_STATE}, which the Trainer writes last: the save did not finish"
    parse_json(saved.read(_TRAINER_STATE), _TRAINER_STATE)
    return None


def _is_trainers(saved: Saved) -> bool:
    is_named = re.fullmatch(r"checkpoint-\d+", saved.title) is not None
    return any(map(_OF_TRAINER.fullmatch, saved.files)) or (is_named and "optimizer.pt" in saved.files)


def _accelerate(saved: Saved) -> str | None:
    """Every rank writes the state of its random generators last."""
    if _is_trainers(saved) or not any(map(_OF_ACCELERATE.fullmatch, saved.files)):
        return None
    ranks = {int(match[1]) for path in saved.files if (match := re.fullmatch(r"random_states_(\d{1,9})\.pkl", path))}
    if not ranks:
        return "no random_states_0.pkl, which accelerate writes last: the save did not finish"
    missing = sorted(set(range(max(ranks) + 1)) - ranks)
    return f"the random states of {_of_ranks(missing)} are missing" if missing else None


def _record(saved: Saved) -> str | None:
    """Ray Train writes its record after every worker has uploaded its part. A run of ours that keeps its checkpoints on
    a disk renames a finished folder, which needs no record."""
    path = saved.beside(RECORD)
    name = saved.title
    if path is None or not (saved.is_remote or name.startswith("checkpoint_")):
        return None
    found = parse_json(saved.run.read_all(path, limit_bytes=MAX_JSON_BYTES), path)
    results = found.get("checkpoint_results") if isinstance(found, dict) else None
    if not isinstance(results, list):
        return None
    known = {each.get("checkpoint_dir_name") for each in results if isinstance(each, dict)}
    return None if name in known else f"{RECORD} does not name it: the save did not finish"


def _index(saved: Saved) -> str | None:
    """The shards of a Hugging Face model, as its index names them."""
    for path in saved.files:
        if path.endswith((".safetensors.index.json", ".bin.index.json")):
            found = parse_json(saved.read(path), path)
            names = found.get("weight_map", {}) if isinstance(found, dict) else {}
            folder = parent_of(path)
            for name in sorted({*names.values()}) if isinstance(names, dict) else []:
                file = f"{folder}/{name}" if folder else str(name)
                if file not in saved.files:
                    return f"{file} is missing, which {path} names"
    return None


def _shards(saved: Saved) -> str | None:
    """Shards that number themselves: ``model-00001-of-00003.safetensors``."""
    found: dict[tuple[str, int], set[int]] = {}
    for path in saved.files:
        match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.(?:safetensors|bin)", path)
        if match is not None:
            found.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, size), numbers in found.items():
        if missing := sorted(set(range(1, size + 1)) - numbers):
            return f"{stem}-{missing[0]:05d}-of-{size:05d} is missing"
    return None


def _meta(saved: Saved) -> str | None:
    """Lightning lays ``meta.pt`` beside its shards when they are there."""
    name = saved.title
    if not name.endswith(".ckpt") or saved.files.keys() == {name} or ".metadata" not in saved.files:
        return None
    return None if "meta.pt" in saved.files else "no meta.pt: the save did not finish"


def _ends(saved: Saved) -> str | None:
    """Every torch and safetensors file reaches to its end."""
    for path in saved.files:
        if path.endswith((".pt", ".pth", ".bin", ".ckpt")) and "/zero/" not in f"/{path}":
            text = _zip_end(saved, path)
        elif path.endswith(".safetensors"):
            text = _tensors_end(saved, path)
        else:
            continue
        if text is not None:
            return text
    return None


def _zip_end(saved: Saved, path: str) -> str | None:
    read, size, _ = saved.part(path)
    try:
        directory = read_directory(read, size, path, tail_bytes=TAIL_BYTES)
    except UnsupportedError:
        return None
    if directory is not None or not read(0, min(4, size)).startswith(b"PK"):
        return None
    return f"{path} has no end: it is cut off"


def _tensors_end(saved: Saved, path: str) -> str | None:
    read, size, _ = saved.part(path)
    if size < 8:
        return f"{path} is cut off"
    (length,) = struct.unpack("<Q", read(0, 8))
    if length > min(size - 8, 100_000_000):
        return f"{path} is cut off, or it is not a safetensors file"
    end = 8 + length + max(_stops(parse_json(read(8, 8 + length), path)), default=0)
    return None if size == end else f"{path} has {size:,} bytes instead of {end:,}: it is cut off or damaged"


def _stops(header: Any) -> Iterator[int]:
    for name, entry in header.items() if isinstance(header, dict) else ():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) and name != "__metadata__" else None
        if isinstance(offsets, list) and len(offsets) == 2 and type(offsets[1]) is int:
            yield offsets[1]


_RULES: tuple[Callable[[Saved], str | None], ...] = (
    _name, _marker, _nemo, _orbax, _orbax_commit, _automodel, _torch_dist, _dcp, _olmo, _meta, _ranks,
    _torch_checkpointing, _universal, _deepspeed, _latest, _tracker, _trainer, _accelerate, _record, _index,
    _shards, _weightless, _empty, _ends,
)  # fmt: skip
"""Those that say most about the trainer come first."""


def trainer_state(saved: Saved) -> Mapping[str, Any]:
    """What transformers' Trainer says of the run at this step; empty if it says nothing that can be read."""
    if _TRAINER_STATE not in saved.files:
        return {}
    try:
        found = json.loads(saved.read(_TRAINER_STATE))
    except (FormatError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
