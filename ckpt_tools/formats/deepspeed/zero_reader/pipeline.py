"""A run of ``PipelineModule``: the manifests of its stages as the one of the whole model.

A stage has a model file without a model and its own optimizer, cut over the data-parallel ranks of the stage. Names
and order are those of the same ``PipelineModule`` with one stage: tied modules first, then layers by number. Of a tied
parameter each stage has an optimizer state; all are the same, and the first is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckpt_tools.core import transforms
from ckpt_tools.core.boxes import Shape
from ckpt_tools.core.manifest import Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.names import collect_model_names
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.values import format_brief
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import File, ModelStates, OptimStates
from ckpt_tools.formats.deepspeed.common.model_file import check_experts, check_parts
from ckpt_tools.formats.deepspeed.common.tensor_parallel import Rules, whole_extra
from ckpt_tools.formats.deepspeed.zero_reader import missing_layers, stage0
from ckpt_tools.formats.deepspeed.zero_reader.contents import Contents
from ckpt_tools.formats.deepspeed.zero_reader.joining import Joining, check_alike, comparable, differing
from ckpt_tools.formats.deepspeed.zero_reader.layers import TIED, Known, Layers
from ckpt_tools.formats.deepspeed.zero_reader.locate import TagFiles
from ckpt_tools.formats.deepspeed.zero_reader.missing_layers import UNTOLD
from ckpt_tools.formats.deepspeed.zero_reader.ranks import Mapped, read_partitions, slice_mappings
from ckpt_tools.stores.source import Source


@dataclass(frozen=True, slots=True)
class Stage:
    """The files of one stage, without its layers. ``zero`` has the optimizer of a run with ZeRO; without, ``saved`` is
    the optimizer, if it has names for its parameters. ``part`` sets what is read apart from other stages."""

    part: str
    path: str
    model: ModelStates
    zero: Contents | None = None
    is_mapped: bool = False
    saved: stage0.Saved | None = None

    @classmethod
    def of(cls, source: Source, number: int, files: TagFiles) -> Stage:
        """Raises FormatError where a file is missing or damaged."""
        part, path = f"stage{number}." if number else "", files.models(0)[0]
        model = ModelStates.of_stage(File.open(source, path))
        check_experts(model)
        if model.file.content.get("module") is not None:
            raise MalformedError("it holds a model, but there are files of a pipeline's layers beside it", path=path)
        if not files.optim:
            return cls(part, path, model)
        optim = OptimStates.of(File.open(source, files.optim[0]))
        if optim.stage > 1:
            raise MalformedError(f"it is of ZeRO-{optim.stage}, which no pipeline has", path=optim.file.path)
        zero = Contents(source, model, optim, (path,), read_partitions(source, files.optim, optim), part=part)
        if model.param_shapes:
            return cls(part, path, model, zero)
        mapped = [slice_mappings(File.open(source, each)) for each in files.optim]
        model = replace(model, param_shapes=_flat_shapes(mapped))
        zero = replace(zero, model=model)
        _check_mapped(zero, mapped)
        return cls(part, path, model, zero, is_mapped=True)

    def known(self) -> Known:
        """The parameters that the files of the stage state."""
        trainable = self.model.trainable
        shapes: dict[str, Shape | None] = {name: None if self.is_mapped else shape for name, shape in trainable.items()}
        masters = {}
        if self.zero is not None:
            table = self.zero.partitions.masters.table
            masters = {name: table(each) for name, each in self.zero.pieces.items() if name.startswith(TIED)}
        return Known(self.model, shapes, {name: prod(shape) for name, shape in trainable.items()}, masters)

    def manifest(self, model: ModelStates) -> Manifest:
        """The stage with its layers, as a checkpoint of its own."""
        if self.zero is not None:
            return replace(self.zero, model=model).manifest()
        if self.saved is None:
            return stage0.Contents(model, stage0.Saved(model.file)).manifest()
        found = stage0.Contents(model, self.saved, part=self.part).manifest()
        if not found.groups:
            raise MalformedError("the shapes of its optimizer's state are not those of the layers", path=self.path)
        return found


def _check_mapped(zero: Contents, mapped: Sequence[Sequence[Mapped]]) -> None:
    said: set[tuple[str, int, int, int, int]] = set()
    for rank, groups in enumerate(mapped):
        for group, found in enumerate(groups):
            said |= {(name, rank, group, numel, start) for name, (numel, start) in found.items() if numel}
    wanted = {(name, *row) for name, each in zero.pieces.items() for row in each.rows()}
    if said != wanted:
        name, rank, *_ = min(said ^ wanted)
        message = "its param_slice_mappings do not fit the partitions"
        raise MalformedError(message, path=zero.partitions.masters.files[rank], key=name)


def read(
    source: Source,
    tags: Sequence[TagFiles],
    layers: Sequence[Mapping[int, str]],
    check: Callable[[TagFiles, ModelStates, OptimStates], object],
) -> Manifest:
    """The whole model. ``layers`` are those of each tensor-parallel rank. ``check`` looks whether a stage's files are
    all there.

    The topologies of DeepSpeed and Megatron number the tensor-parallel ranks of a stage one after the other. Raises
    FormatError if a file is missing or damaged, or does not fit the others.
    """
    cut = len(layers)
    stages = [Stage.of(source, number // cut, files) for number, files in enumerate(tags)]
    first = stages[0].model
    check_parts(first, len(stages))
    if len(stages) % cut:
        raise MalformedError(
            f"the layers are cut into {cut} parts, and the {len(stages)} parts of the model are not a multiple of it",
            path=stages[0].path,
        )
    for stage, files in zip(stages, tags, strict=True):
        if stage.zero is not None:
            check(files, stage.model, stage.zero.optim)
        elif stages[0].zero is not None or stage.model.file.content.get("param_shapes") is not None:
            raise IncompleteError("the optimizer's file of this stage is missing", path=stage.path)
    if cut == 1:
        return _whole_names(_read_rank(source, _named(stages), layers[0]), first.file.path)
    rules = Rules.of(first.file.content.get("universal_checkpoint_info"), stages[0].path)
    if stages[0].zero is None:
        raise UnsupportedError(
            "it is of a pipeline without ZeRO that tensor parallelism cuts too, and no file says which of its layers "
            "are tied, by whose names the parts are joined; resume the run and save it with ZeRO stage 1",
            path=stages[0].path,
        )
    parts = [_read_rank(source, stages[rank::cut], layers[rank], rules) for rank in range(cut)]
    return _whole_names(Joining(parts, rules).manifest(), first.file.path)


def _read_rank(
    source: Source, stages: Sequence[Stage], layers: Mapping[int, str], rules: Rules | None = None
) -> Manifest:
    """The model of one tensor-parallel rank. ``rules`` join it with others."""
    opened = {number: File.open(source, path) for number, path in layers.items()}
    found = Layers(source, opened, [stage.known() for stage in stages])
    models = found.models()
    if stages[0].zero is None and stages[0].saved is None:
        buffers = [stage.model.buffers for stage in stages]
        saved = [stage0.Saved.of(stage.model.file) for stage in stages]
        missing_layers.check(
            [missing_layers.Layer.of(number, file, buffers) for number, file in opened.items()],
            [(stage.path, missing_layers.parameters(source, own)) for stage, own in zip(stages, saved, strict=True)],
        )
    if rules is not None and rules.mention(TIED.rstrip(".")):
        for file in found.unnamed():
            raise UnsupportedError(
                "it has only frozen parameters, so that no file states whether it is a tied layer, by whose name "
                "its tensor-parallel parts would be joined",
                path=file.path,
            )
    parts = [stage.manifest(model) for stage, model in zip(stages, models, strict=True)]
    return Stages(parts, list(layers), stages[0].path).whole()


def _named(stages: Sequence[Stage]) -> Sequence[Stage]:
    """The stages of a run without ZeRO with their optimizers, if each was made of named parameters."""
    if stages[0].zero is not None:
        return stages
    saved = [stage0.Saved.of(stage.model.file) for stage in stages]
    found = []
    for stage, each in zip(stages, saved, strict=True):
        shapes = each.named_shapes()
        if shapes is None:
            return stages
        found.append(replace(stage, model=replace(stage.model, param_shapes=shapes), saved=each))
    return found


def _flat_shapes(ranks: Sequence[Sequence[Mapped]]) -> tuple[dict[str, Shape], ...]:
    """The parameters of each group in its order, flat, from the places that each rank states.

    A bf16 run without ZeRO has BF16_Optimizer's partitions and no param_shapes.
    """
    groups: list[dict[str, int]] = []
    for mappings in ranks:
        for number, mapped in enumerate(mappings):
            if number == len(groups):
                groups.append({})
            for name, (numel, _) in sorted(mapped.items(), key=lambda item: item[1][1]):
                groups[number][name] = groups[number].get(name, 0) + numel
    return tuple({name: (numel,) for name, numel in group.items()} for group in groups)


@dataclass
class Stages:
    """The manifests of all stages while they are joined; ``path`` is a file for messages."""

    parts: Sequence[Manifest]
    layers: Sequence[int]
    path: str
    notes: list[Note] = field(default_factory=list)

    def whole(self) -> Manifest:
        """Raises MalformedError where the stages do not fit each other."""
        first = self.parts[0]
        check_alike(
            ("ZeRO stage", [part.format for part in self.parts]),
            ("data-parallel world size", [part.world_size for part in self.parts]),
            of="stage",
            path=self.path,
        )
        tensors = self._tensors()
        groups = tuple(self._groups())
        self.notes += differing(list(map(_rest, self.parts)), "the stages of the pipeline", "stages")
        is_numbered = first.format == "zero0" and not first.groups
        if is_numbered:
            why = (
                "a pipeline without ZeRO numbers the parameters of each stage, and no file has their names; "
                "save with ZeRO stage 1, or with an optimizer that was made from model.named_parameters()"
            )
            self.notes.append(Note(Outcome.DROPPED, "optimizer state", why))
            why = "without ZeRO no file says which layers are tied (tied_modules)"
            self.notes.append(Note(Outcome.DEFAULTED, "names of tied layers are the numbers of the layers", why))
        self.notes.append(missing_layers.untold(self.layers, is_numbered=is_numbered))
        return Manifest(
            format=first.format,
            tensors=tensors,
            aliases={alias: owner for part in self.parts for alias, owner in part.aliases.items()},
            groups=groups,
            literals={name: data for part in self.parts for name, data in part.literals.items()},
            extra=self._extra(),
            step=first.step,
            step_claims=tuple(claim for part in self.parts for claim in part.step_claims),
            world_size=None if first.world_size is None else first.world_size * len(self.parts),
            notes=(*dict.fromkeys(note for part in self.parts for note in part.notes), *self.notes),
        )

    def _tensors(self) -> dict[StateKey, TensorEntry]:
        """Tied modules first; what the user keeps is the first stage's, but for what layers keep."""
        found: dict[StateKey, TensorEntry] = {}
        for stage, part in enumerate(self.parts):
            for key, entry in part.tensors.items():
                is_ours = entry.kind is not Kind.EXTRA or not stage or key.fqn.startswith("module.")
                first = found.setdefault(key, entry) if is_ours else entry
                if (entry.shape, entry.dtype) != (first.shape, first.dtype):
                    message = "two stages have it in different shapes or dtypes"
                    raise MalformedError(message, path=self.path, key=str(key))
        return {key: found[key] for key in sorted(found, key=lambda key: not key.fqn.startswith(TIED))}

    def _groups(self) -> Iterator[ParamGroup]:
        """The groups of the stages, number by number; stage by stage where they differ."""
        first = self.parts[0].groups
        options = [[comparable(group.options) for group in part.groups] for part in self.parts]
        if all(each == options[0] for each in options):
            for number, group in enumerate(first):
                members = [part.groups[number].params for part in self.parts]
                names = dict.fromkeys(name for names in members for name in names)
                yield replace(group, params=tuple(sorted(names, key=lambda name: not name.startswith(TIED))))
            return
        why = "the stages of the pipeline differ in them, so each stage's are groups of their own"
        self.notes.append(Note(Outcome.DEFAULTED, "parameter groups", why))
        seen: set[str] = set()
        for part in self.parts:
            for group in part.groups:
                params = tuple(name for name in group.params if name not in seen)
                seen.update(params)
                if params:
                    yield replace(group, params=params)

    def _extra(self) -> dict[str, Any]:
        """The entries of the first stage, with those of the modules of all stages."""
        extra = whole_extra(self.parts[0].extra)
        kept = {name: value for part in self.parts for name, value in _own(part).get("module", {}).items()}
        return {**extra, "deepspeed": {**extra.get("deepspeed", {}), "module": kept}} if kept else extra


def _own(part: Manifest) -> dict[str, Any]:
    own = part.extra.get("deepspeed")
    return own if isinstance(own, dict) else {}


def _rest(part: Manifest) -> dict[str, Any]:
    """The extras without what modules keep, entry by entry of DeepSpeed's own."""
    own = _own(part)
    rest = {name: value for name, value in part.extra.items() if name != "deepspeed"}
    return rest | {f"deepspeed.{name}": value for name, value in own.items() if name != "module"}


ENTRY = "pipeline_names"
"""Entry of the client state with the names of layers in the whole model, which no file of DeepSpeed's has because
``PipelineModule`` numbers layers. For each layer with tensors, by the pipeline's name for it (``"1"``,
``"tied_modules.embed"``), it has the names of that module in the whole model; a tied one has several."""

Names = Mapping[str, tuple[str, ...]]


def _whole_names(manifest: Manifest, path: str) -> Manifest:
    """The manifest under the names of the whole model, if the run states them. ``path`` is a file for messages. Raises
    MalformedError if the entry is not of that form, or does not name each layer once; IncompleteError if there is no
    tensor of a layer that it names."""
    client_state = manifest.extra.get("client_state")
    if not isinstance(client_state, Mapping) or ENTRY not in client_state:
        return manifest
    names = _parsed(client_state[ENTRY], path)
    layers = {fqn: _layer(fqn) for fqn in collect_model_names(manifest)}
    _check(names, layers, path)
    owners = {fqn: names[layer][0] + fqn.removeprefix(layer) for fqn, layer in layers.items()}
    if len({*owners.values()}) < len(owners):
        raise MalformedError(f"client_state.{ENTRY} gives two tensors one name", path=path)
    renamed, _ = transforms.rename_tensors(manifest, owners.__getitem__)
    # The entry is in the names now, and would be wrong beside a model without layers of a pipeline.
    rest = {name: value for name, value in client_state.items() if name != ENTRY}
    extra = {name: value for name, value in manifest.extra.items() if name != "client_state"}
    tied = {other + fqn.removeprefix(layer): owners[fqn] for fqn, layer in layers.items() for other in names[layer][1:]}
    return replace(
        renamed,
        aliases={**renamed.aliases, **tied},
        extra=extra | ({"client_state": rest} if rest else {}),
        notes=tuple(note for note in manifest.notes if note.what != UNTOLD),
    )


def _layer(fqn: str) -> str:
    """``1`` of ``1.norm.weight``, and ``tied_modules.embed`` of ``tied_modules.embed.weight``."""
    parts = 2 if fqn.startswith(TIED) else 1
    return ".".join(fqn.split(".")[:parts])


def _parsed(entry: Any, path: str) -> Names:
    if isinstance(entry, Mapping) and all(map(_is_name, entry)) and all(map(_are_names, entry.values())):
        return {layer: tuple(names) for layer, names in entry.items()}
    raise MalformedError(
        f"client_state.{ENTRY} is to have a list of names for each layer, and is {format_brief(entry)}", path=path
    )


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_name, value))


def _check(names: Names, layers: Mapping[str, str], path: str) -> None:
    found = {*layers.values()}
    if unnamed := sorted(found - names.keys()):
        raise MalformedError(f"client_state.{ENTRY} has no name for this layer", path=path, key=unnamed[0])
    if missing := sorted(names.keys() - found):
        why = f"client_state.{ENTRY} names this layer, and no file contains it"
        raise IncompleteError(why, path=path, key=missing[0])
    counts = Counter(name for each in names.values() for name in each)
    if twice := [name for name, number in counts.items() if number > 1]:
        raise MalformedError(f"client_state.{ENTRY} gives this name twice", path=path, key=twice[0])
