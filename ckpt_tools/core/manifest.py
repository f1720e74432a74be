"""A checkpoint as data: every logical tensor, and where its bytes are.

A ``Manifest`` maps ``StateKey(fqn, slot)`` to a ``TensorEntry``: shape, dtype and a ``ShardTable`` that says which
region of the tensor lies in which bytes of which file. Optimizer state is not special: the weight, its fp32 master
and each moment are slots of one fqn. Readers build manifests from headers alone; transforms rewrite them; planning
intersects them with a layout.

Shards are columns of numpy arrays, one row a shard, because a trillion-parameter checkpoint has millions of them: 50
bytes a row instead of 500 for objects. A table's geometry is the tensor's shape or its flattening ``(numel,)``: a
flat ZeRO interval stays one row until boxes are needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckpt_tools.core.boxes import Box, Shape, split_dims
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.notes import Note, merge_notes
from ckpt_tools.core.shards import ByteRange, ShardTable, check_exact_cover
from ckpt_tools.core.step_claims import StepClaim, check_same_save
from ckpt_tools.core.trainer_folder import TrainerFolder
from ckpt_tools.errors import MalformedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

WEIGHT = "weight"
"""Slot of the tensor that the model itself holds: a parameter in the model's dtype, or a buffer."""

MOMENTS = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta", "grad_avg")
)
"""Slots of torch's optimizers that have the shape of their parameter, and begin as zeros."""

MASTER = "master"
"""Slot of the fp32 copy of a parameter that the optimizer updates, where a checkpoint holds one."""

EXTRA_SLOT = "extra"
"""Slot of a tensor that is neither of the model nor of its optimizer: of user entries and of other state."""


class StateKey(NamedTuple):
    """One logical tensor: the fully qualified name of its parameter or buffer, and its slot."""

    fqn: str
    slot: str = WEIGHT

    def __str__(self) -> str:
        return self.fqn if self.slot == WEIGHT else f"{self.fqn} ({self.slot})"


class Kind(Enum):
    """The role of a tensor in training."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    STATE = "state"
    """Optimizer state of a parameter, its fp32 master included."""
    EXTRA = "extra"
    """A tensor of the user's or the framework's own: RNG state, a scheduler's tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorEntry:
    """One logical tensor.

    ``dtype`` is the type of the elements after reading; ``shards.dtype`` the stored one. Where they differ, reading
    casts, as it does for a bf16 weight if only its fp32 master is stored. ``plus`` is added to each element before the
    cast, in fp32.

    Raises:
        MalformedError: two shards overlap.
        IncompleteError: elements are in no shard.
    """

    shape: Shape
    dtype: DType
    kind: Kind
    shards: ShardTable
    plus: int = 0

    def __post_init__(self) -> None:
        shape = self.shards.shape
        if shape != self.shape and shape != (prod(self.shape),) and not self._has_split_dims():
            raise MalformedError(f"shards of shape {list(self.shards.shape)} for a tensor of shape {list(self.shape)}")
        check_exact_cover(self.shards)

    def _has_split_dims(self) -> bool:
        try:
            return bool(split_dims(self.shape, self.shards.shape)) or not self.shape
        except ValueError:
            return False

    @property
    def is_as_stored(self) -> bool:
        """True if reading gives the stored bits."""
        return self.dtype is self.shards.dtype and not self.plus

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the logical tensor, row-major, as ``dtype``."""
        return self.numel * self.dtype.item_bytes

    def with_file_prefix(self, prefix: str) -> TensorEntry:
        """The same tensor, whose files have ``prefix`` in front of their names."""
        return replace(self, shards=self.shards.with_file_prefix(prefix))

    def cast_to(self, dtype: DType) -> TensorEntry:
        """The same tensor, read as ``dtype``."""
        return self if dtype is self.dtype else replace(self, dtype=dtype)


@dataclass(frozen=True, slots=True, eq=False)
class ComputedTensor(ABC):
    """A tensor of ``shape`` whose elements are computed as ``dtype`` from those of ``operands`` when they are read.

    It is a file that is nowhere, as a literal is: ``Manifest.computed`` has it by name, and it holds the elements of
    the tensor, row-major. The shards of an entry name it like any other file, so that selecting, renaming, casting,
    recipes, planning and comparing know nothing of it. ``transfer.computing`` has the store that makes it, piece by
    piece. Its repr must tell everything that the elements depend on but the operands: ``--resume`` compares it.
    """

    shape: Shape
    dtype: DType
    operands: tuple[TensorEntry, ...] = field(repr=False)

    @abstractmethod
    def compute_piece(self, box: Box, read_operand: OperandReader, out: NDArray[Any]) -> None:
        """Compute the elements of ``box`` into ``out``, which has its shape. If ``can_cast``, ``out`` may be of another
        type than ``dtype``."""

    @property
    def is_kept(self) -> bool:
        """True if pieces are kept once they are computed: they are few and small beside what they are made of."""
        return False

    @property
    def can_cast(self) -> bool:
        """True if ``compute_piece`` casts to the type of ``out``, to the bits that casting its result would give."""
        return False

    @property
    def piece_numel(self) -> int:
        """Elements that are computed at once, ``max_piece_numel`` at most: whole rows, matrices and so on, where they
        fit."""
        unit = 1
        for extent in reversed(self.shape):
            if not 0 < unit * extent <= self.max_piece_numel:
                break
            unit *= extent
        return self.max_piece_numel // unit * unit

    @property
    def max_piece_numel(self) -> int:
        """The most elements that are computed at once."""
        return MAX_PIECE

    @property
    def working_bytes(self) -> int:
        """The most memory that computing a piece of ``max_piece_numel`` elements takes, with its parts and a piece that
        is kept."""
        return 6 << 20

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.item_bytes

    @property
    def read_amplification(self) -> float:
        """Bytes of the operands for each byte of the result."""
        return sum(each.shards.num_bytes for each in self.operands) / max(1, self.num_bytes)

    def make_table(self, name: str) -> ShardTable:
        """The computed file ``name`` as the one shard of a tensor."""
        return ShardTable.whole(self.shape, self.dtype, ByteRange(name, 0, self.num_bytes))


@dataclass(frozen=True, slots=True, eq=False)
class RegionwiseTensor(ComputedTensor):
    """A computed tensor whose boxes each need one region of each operand."""

    @abstractmethod
    def get_operand_regions(self, box: Box) -> Sequence[Box]:
        """The regions of the operands that the elements of ``box`` need, one for each operand."""

    @abstractmethod
    def compute_box(self, box: Box, operand_values: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        """Compute the elements of ``box`` into ``out`` as ``compute_piece`` does. ``operand_values`` are the regions of
        the operands, which may be used again: they must not be changed."""

    def compute_piece(self, box: Box, read_operand: OperandReader, out: NDArray[Any]) -> None:
        regions = enumerate(self.get_operand_regions(box))
        self.compute_box(box, [read_operand(number, region) for number, region in regions], out)


OperandReader: TypeAlias = "Callable[[int, Box], NDArray[Any]]"
"""Reads a region of the operand of a number. The values must not be changed, and the next region of this operand may
take their place."""


MAX_PIECE = 1 << 18
"""The most elements of a tensor that are computed at once: 1 MiB in float32, which the processor's cache still holds.
"""


def make_computed_file_name(name: str) -> str:
    """The name of the computed file that is called ``name``; no file of a store has it."""
    return f"computed:{name}"


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A group of the optimizer: the fqns of its parameters in order, and its hyperparameters by name."""

    params: tuple[str, ...]
    options: Mapping[str, Any]

    def rename_params(self, new_names: Mapping[str, str]) -> ParamGroup:
        """The group with other names for some parameters; of those that become one name, the first counts."""
        return replace(self, params=tuple(dict.fromkeys(new_names.get(name, name) for name in self.params)))


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A leaf of ``Manifest.extra`` whose value is a tensor of the manifest."""

    key: StateKey


@dataclass(frozen=True, slots=True, eq=False)
class EqualPair:
    """Two tensors of one shape and dtype that become one, so that their bits must be equal. ``what`` names both in a
    message, ``advice`` is what the user can do if they differ."""

    what: str
    first: TensorEntry
    second: TensorEntry
    advice: str = ""


TreePath = tuple[str | int, ...]
"""From the root of a tree of state to one of its leaves: keys of dicts, and positions in lists as int."""


def join_path(path: Iterable[str | int]) -> str:
    """The path as one name, as DCP flattens it."""
    return ".".join(map(str, path))


@dataclass(frozen=True, slots=True)
class StateTree:
    """Paths of model, optimizer and entries in a source that is a tree, so that it can be written back as it was."""

    model: TreePath
    optim: TreePath | None
    """None where there was no optimizer."""
    is_flattened: bool = False
    """True if optimizer state had one key each: ``state.<fqn>.<slot>`` and ``param_groups.<fqn>.<option>``."""
    extras: Mapping[str, TreePath] = field(default_factory=dict)
    """The paths of the entries in ``Manifest.extra``, by their names at its top."""
    masters: str = ""
    """The slot of the optimizer's state that has the fp32 masters."""
    numbers: tuple[int, ...] = ()
    """The numbers of the optimizer's parameters, in the order of ``Manifest.groups``; empty where it named them."""
    changed: tuple[str, ...] = ()
    """Parts that are written in another form, in words."""

    def get_slot_name(self, slot: str) -> str:
        """The name that the tree has for a slot of a parameter's state."""
        return self.masters or slot if slot == MASTER else slot


def _check_encodable(names: Iterable[str]) -> None:
    """Raises MalformedError for half a surrogate pair: pickles and folders can hold one, and nothing can print it."""
    for name in names:
        if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
            raise MalformedError(f"the name {name[:200]!r} is not text")


def _freeze_mapping(values: Mapping[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(dict(values))


@dataclass(frozen=True, slots=True, eq=False)
class _CheckedTensors:
    """The tensors of a manifest, which cannot change, with their fqns and the files of their shards."""

    tensors: Mapping[StateKey, TensorEntry]
    fqns: frozenset[str]
    files: frozenset[str]

    @classmethod
    def of(cls, tensors: Mapping[StateKey, TensorEntry]) -> _CheckedTensors:
        """Raises MalformedError if a name is not text."""
        fqns = frozenset(key.fqn for key in tensors)
        _check_encodable(chain(fqns, {key.slot for key in tensors}))
        files = frozenset(file for entry in tensors.values() for file in entry.shards.files)
        return cls(_freeze_mapping(tensors), fqns, files)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint.

    Raises:
        MalformedError: an alias or a group names a tensor that is not there, a name is not text, or two ranks make
            different claims of the step.
    """

    format: str
    tensors: Mapping[StateKey, TensorEntry]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """The fqn that owns the bytes, by the name of each tensor that is tied to it."""
    groups: tuple[ParamGroup, ...] = ()
    literals: Mapping[str, bytes] = field(default_factory=dict)
    """Files that are nowhere but here, such as those of plain numbers: bytes by name."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What is not a tensor: global step, scheduler, loss scaler, the user's entries."""
    values: Mapping[StateKey, Any] = field(default_factory=dict)
    """Optimizer state and results of ``get_extra_state`` that are no tensors: by parameter and slot, or by the name of
    the module's entry."""
    step: int | None = None
    """The step that the source states."""
    world_size: int | None = None
    """The number of ranks that the source states."""
    tree: StateTree | None = None
    """None if the source has no tree made by its user."""
    notes: tuple[Note, ...] = ()
    """What reading could not settle, and what was left out since; one for each item."""
    decoding_bytes: int = 0
    """Memory that reading elements takes besides buffers, where they are compressed."""
    trainer: TrainerFolder | None = None
    """The folder of a trainer in which the checkpoint lies, if it lies in one."""
    unreadable_names: frozenset[str] = frozenset()
    """Names of tensors that cannot be read, and that the options did not choose."""
    archives: tuple[ByteRange, ...] = ()
    """Zips within files, in which tensors lie as in a file of their own: the objects of a DCP."""
    must_equal: tuple[EqualPair, ...] = ()
    """Pairs to compare before anything is written."""
    computed: Mapping[str, ComputedTensor] = field(default_factory=dict)
    """Files that are nowhere, whose elements are computed when they are read."""
    unjoined_state: str = ""
    """Empty, or where weights are and where optimizer state is under other names than theirs: a recipe joins them."""
    is_quantized: bool = False
    """True if a ``config.json`` beside the weights states it."""
    unread_files: tuple[str, ...] = ()
    """Files in the folders of the weights that were neither read nor noted."""
    masters_are_outdated: bool = False
    """True if the model's own weights are newer than the masters."""
    unnamed_optimizer: str = ""
    """Empty, or which entry is an optimizer whose parameters are not known, and why."""
    stored_bytes: int = 0
    """Bytes of all files of the source."""
    step_claims: tuple[StepClaim, ...] = ()
    """What single files state of the step."""
    quantization_config: Mapping[str, Any] = field(default_factory=dict)
    """What ``config.json`` of the output has to say of weights that the conversion quantizes; empty if it does not."""
    _checked: _CheckedTensors | None = field(default=None, repr=False, compare=False)
    """What is known of ``tensors``, so that ``replace`` of another field need not find it out again."""

    def __post_init__(self) -> None:
        check_same_save(self.step_claims)
        if self._checked is None or self._checked.tensors is not self.tensors:
            object.__setattr__(self, "_checked", _CheckedTensors.of(self.tensors))
            object.__setattr__(self, "tensors", self._known.tensors)
        object.__setattr__(self, "aliases", _freeze_mapping(self.aliases))
        object.__setattr__(self, "extra", _freeze_mapping(self.extra))
        object.__setattr__(self, "values", _freeze_mapping(self.values))
        object.__setattr__(self, "literals", _freeze_mapping(self.literals))
        object.__setattr__(self, "computed", _freeze_mapping(self.computed))
        object.__setattr__(self, "notes", merge_notes(self.notes))
        names = self.fqns
        _check_encodable(chain(self.aliases, map(str, self.extra), chain.from_iterable(self.values)))
        for alias, owner in self.aliases.items():
            if owner not in names or alias in names:
                why = "which is not a tensor of the checkpoint" if owner not in names else "and has state of its own"
                raise MalformedError(f"{alias!r} is tied to {owner!r}, {why}")
        for name in chain.from_iterable(group.params for group in self.groups):
            if name not in names and name not in self.aliases:
                raise MalformedError(f"a parameter group names {name!r}, but there is no such tensor")

    @property
    def _known(self) -> _CheckedTensors:
        assert self._checked is not None, "a manifest checks its tensors when it is made"
        return self._checked

    @property
    def files(self) -> frozenset[str]:
        """The files that hold bytes of tensors; of ``literals`` and ``computed`` too, which are files nowhere."""
        return self._known.files

    @property
    def stored_files(self) -> frozenset[str]:
        """The files of the store that hold bytes of tensors, or of what they are computed from."""
        operands = (entry for each in self.computed.values() for entry in each.operands)
        files = self.files.union(file for entry in operands for file in entry.shards.files)
        return files - self.literals.keys() - self.computed.keys()

    @property
    def keeps_masters(self) -> bool:
        """Whether the source's optimizer has the masters in a slot of its own: every format writes them there."""
        return self.tree is not None and bool(self.tree.masters)

    @property
    def computed_in_order(self) -> tuple[Mapping[str, ComputedTensor], ...]:
        """``computed`` in steps, each made of stored tensors and of those before it: of a dequantized weight the mean
        of its rows, and of both the sum with an adapter."""
        depth_by_file: dict[str, int] = {}
        steps: list[dict[str, ComputedTensor]] = []
        # A tensor is made after those that it is computed from.
        for file, computed_tensor in self.computed.items():
            operand_files = {each for entry in computed_tensor.operands for each in entry.shards.files}
            depth = max((depth_by_file[each] + 1 for each in operand_files & depth_by_file.keys()), default=0)
            depth_by_file[file] = depth
            if depth == len(steps):
                steps.append({})
            steps[depth][file] = computed_tensor
        return tuple(steps)

    @property
    def fqns(self) -> frozenset[str]:
        return self._known.fqns

    @property
    def weights(self) -> dict[str, TensorEntry]:
        """Parameters and buffers by fqn, in their order."""
        return {key.fqn: e for key, e in self.tensors.items() if key.slot == WEIGHT and e.kind is not Kind.EXTRA}

    @property
    def weight_dtypes(self) -> dict[str, DType]:
        """The dtype of each tensor in the slot ``WEIGHT``, by fqn."""
        return {key.fqn: entry.dtype for key, entry in self.tensors.items() if key.slot == WEIGHT}

    def select_kinds(self, *kinds: Kind) -> dict[StateKey, TensorEntry]:
        """The tensors of these kinds, in order."""
        return {key: entry for key, entry in self.tensors.items() if entry.kind in kinds}


ROLES = ("weights", "masters", "optimizer", "others")
"""A tensor is a parameter or buffer, an fp32 master, a moment or step of the optimizer, or one of the entries. A tied
weight is one tensor."""


def count_tensors_by_role(tensors: Mapping[StateKey, TensorEntry]) -> dict[str, int]:
    """The number of ``tensors`` in each of ``ROLES``."""
    counts = Counter(_get_role(key, entry) for key, entry in tensors.items())
    return {role: counts[role] for role in ROLES}


def _get_role(key: StateKey, entry: TensorEntry) -> str:
    if key.slot == MASTER:
        return "masters"
    if entry.kind is Kind.STATE:
        return "optimizer"
    return "others" if entry.kind is Kind.EXTRA or key.slot != WEIGHT else "weights"
