"""Tells frozen parameters and buffers apart, where the source does not.

DeepSpeed refuses, in stage 3, a frozen parameter that is stored as a buffer and the other way round: the module of a
rank has the one cut and the other whole. A DCP, a torch file and safetensors call every floating-point tensor a
parameter. A tensor that the optimizer knows is one, and a name that the user calls a buffer is one. The rest is decided
by evidence, the best first:

1. a tensor without dims is a buffer: neither FSDP2 nor DeepSpeed trains with a 0-d parameter;
2. FSDP2 cuts every parameter, frozen ones too, into as many pieces as there are ranks, and no buffer (Megatron cuts
   some parameters, and buffers that are stacked; tensor and expert parallelism without FSDP2 cut some parameters);
3. a model computes in one type, so that a tensor of another type is a buffer;
4. a module's parameters are saved before its buffers, so that a tensor before a parameter of its module is a parameter,
   and one after a buffer is a buffer;
5. parameters are named ``weight`` or ``bias``, and layers are frozen as a whole: another name beside a parameter is a
   buffer, and one without parameters beside it is frozen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import Kind, Manifest, TensorEntry
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.messages.wording import join_names

_DEEPSPEED_FORMATS = ("zero", "universal")

_PARAMETER_ENDINGS = ("weight", "bias")


def is_from_deepspeed(manifest: Manifest) -> bool:
    """Whether DeepSpeed made the source, so that it tells everything as DeepSpeed wants it."""
    return manifest.format.startswith(_DEEPSPEED_FORMATS)


@dataclass(frozen=True, slots=True)
class UntrainedTensors:
    """Tensors that no optimizer knows, in the model's order. Only rules 4 and 5 decided on the names in
    ``guessed_names``."""

    frozen: Mapping[str, TensorEntry]
    buffers: Mapping[str, TensorEntry]
    guessed_names: tuple[str, ...]


def classify_untrained(manifest: Manifest, trained_names: Collection[str]) -> UntrainedTensors:
    """The weights and buffers of ``manifest`` that are not among ``trained_names``.

    Without an optimizer nothing is frozen: untrained tensors are stored whole, as buffers are, since such a checkpoint
    is loaded as weights alone, and then DeepSpeed asks for no fragments.
    """
    model_tensors = manifest.weights
    forced_kind = None if manifest.groups else Kind.BUFFER
    kinds = {
        name: Kind.PARAMETER if name in trained_names else forced_kind or entry.kind
        for name, entry in model_tensors.items()
    }
    evidence = _TrainedEvidence.of(
        [model_tensors[name] for name in trained_names], cuts_all=manifest.format != "megatron"
    )
    unclassified = [name for name, kind in kinds.items() if kind is Kind.PARAMETER and name not in trained_names]
    decided_kinds = {
        name: evidence.decide_kind(model_tensors[name]) for name in unclassified if not is_from_deepspeed(manifest)
    }
    guessed_names = tuple(name for name, kind in decided_kinds.items() if kind is None)
    kinds |= {name: kind for name, kind in decided_kinds.items() if kind is not None}
    kinds |= _guess_kinds(kinds, trained_names, set(guessed_names))
    frozen_names = [name for name, kind in kinds.items() if kind is Kind.PARAMETER and name not in trained_names]
    # A buffer is not cast with the weights: it is read as it is stored.
    buffers = {
        name: TensorEntry(entry.shape, entry.shards.dtype, Kind.BUFFER, entry.shards)
        for name, entry in model_tensors.items()
        if kinds[name] is Kind.BUFFER
    }
    return UntrainedTensors({name: model_tensors[name] for name in frozen_names}, buffers, guessed_names)


def note_guesses(
    guessed_names: Collection[str], frozen_names: Collection[str], buffer_names: Collection[str]
) -> list[Note]:
    """Notes on names that only rules 4 and 5 decided."""
    why = "the source does not distinguish frozen parameters, tied names and buffers; they were guessed, and "
    why += f"{format_option('buffers')} says which are buffers"
    notes = []
    for what, group in (("frozen parameters", frozen_names), ("buffers", buffer_names)):
        if names := [name for name in guessed_names if name in group]:
            notes.append(Note(Outcome.DEFAULTED, f"{join_names(names)} taken as {what}", why, len(names)))
    return notes


@dataclass(frozen=True, slots=True)
class _TrainedEvidence:
    """Facts about the trained parameters: whether the source cuts some of them, whether it cuts all that have two rows
    or more, and in which types it stores them."""

    cuts_some: bool
    cuts_all: bool
    dtypes: frozenset[DType]

    @classmethod
    def of(cls, trained: Sequence[TensorEntry], *, cuts_all: bool) -> _TrainedEvidence:
        # cuts_some: a trained parameter has several shards, so that several shards prove a parameter.
        # cuts_all:  none with two rows or more is in one shard, so that one shard proves a buffer.
        # Megatron cuts buffers too, so that neither holds there.
        cuts_some = cuts_all and any(len(entry.shards) > 1 for entry in trained)
        keeps_some = any(len(entry.shards) == 1 and entry.shape[0] > 1 for entry in trained if entry.shape)
        return cls(cuts_some, cuts_some and not keeps_some, frozenset(e.shards.dtype for e in trained))

    def decide_kind(self, entry: TensorEntry) -> Kind | None:
        """The kind of a tensor by rules 1 to 3; None if none of them decides."""
        if not entry.shape:
            return Kind.BUFFER
        if self.cuts_some and len(entry.shards) > 1:
            return Kind.PARAMETER
        if self.cuts_all:
            return Kind.BUFFER
        return None if entry.shards.dtype in self.dtypes else Kind.BUFFER


def _guess_kinds(
    kinds: Mapping[str, Kind], trained_names: Collection[str], guessed_names: Collection[str]
) -> dict[str, Kind]:
    """The kinds of ``guessed_names`` by rules 4 and 5."""
    names_by_module: defaultdict[str, list[str]] = defaultdict(list)
    for name in kinds:
        names_by_module[name.rpartition(".")[0]].append(name)
    guessed_kinds: dict[str, Kind] = {}
    for names in names_by_module.values():
        known_kinds = {
            name: Kind.PARAMETER if name in trained_names or name.endswith(_PARAMETER_ENDINGS) else kinds[name]
            for name in names
            if name not in guessed_names or name.endswith(_PARAMETER_ENDINGS)
        }
        for position, name in enumerate(names):
            if name in guessed_names:
                comes_before_parameter = any(known_kinds.get(each) is Kind.PARAMETER for each in names[position:])
                comes_after_known = any(each in known_kinds for each in names[:position])
                is_buffer = comes_after_known and not comes_before_parameter
                guessed_kinds[name] = Kind.BUFFER if is_buffer else Kind.PARAMETER
    return guessed_kinds
