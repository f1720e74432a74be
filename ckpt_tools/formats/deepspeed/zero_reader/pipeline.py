"""A run of ``PipelineModule``: joins the manifests of its stages to that of the whole model.

A stage has a model file without a model and its own optimizer, cut over the data-parallel ranks of the stage. Names
and order are those of the same ``PipelineModule`` with one stage: tied modules first, then layers by number. Every
stage that uses a tied parameter has optimizer state of it; all are the same, and the first is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_tools.core import renaming
from ckpt_tools.core.manifest import Kind, Manifest, ParamGroup, StateKey, TensorEntry
from ckpt_tools.core.names import collect_model_names
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.values import as_dict, format_brief
from ckpt_tools.errors import IncompleteError, MalformedError, UnsupportedError
from ckpt_tools.formats.deepspeed.common.files import DeepSpeedFile
from ckpt_tools.formats.deepspeed.common.model_file import check_model_parts
from ckpt_tools.formats.deepspeed.common.tensor_parallel import MergeRules, drop_partition_entries
from ckpt_tools.formats.deepspeed.zero_reader import missing_layers
from ckpt_tools.formats.deepspeed.zero_reader.contents import ZeroManifestBuilder
from ckpt_tools.formats.deepspeed.zero_reader.joining import (
    ManifestMerger,
    check_equal_parts,
    note_differences,
    to_comparable_text,
)
from ckpt_tools.formats.deepspeed.zero_reader.missing_layers import UNLISTED_LAYERS
from ckpt_tools.formats.deepspeed.zero_reader.ranks import check_model_file, check_rank_count
from ckpt_tools.formats.deepspeed.zero_reader.stage0 import SavedOptimizer, Stage0ManifestBuilder
from ckpt_tools.formats.deepspeed.zero_reader.stages import TIED_PREFIX, PipelineLayers, StageFiles
from ckpt_tools.formats.deepspeed.zero_reader.tag_files import TagFiles
from ckpt_tools.stores.source import Source


def read(source: Source, mp_ranks: Sequence[TagFiles], layers_by_tp_rank: Sequence[Mapping[int, str]]) -> Manifest:
    """The whole model. ``layers_by_tp_rank`` are the files of layers, by number, of each tensor-parallel rank.

    The topologies of DeepSpeed and Megatron number the tensor-parallel ranks of a stage one after the other. Raises
    FormatError if a file is missing or damaged, or does not fit the others.
    """
    num_tp_ranks = len(layers_by_tp_rank)
    stages = [StageFiles.of(source, number // num_tp_ranks, files) for number, files in enumerate(mp_ranks)]
    first_model = stages[0].model
    check_model_parts(first_model, len(stages))
    if len(stages) % num_tp_ranks:
        raise MalformedError(
            f"the layers are cut into {num_tp_ranks} parts, and the {len(stages)} parts of the model are not a "
            "multiple of it",
            path=stages[0].path,
        )
    has_zero = isinstance(stages[0].builder, ZeroManifestBuilder)
    for stage, files in zip(stages, mp_ranks, strict=True):
        if isinstance(stage.builder, ZeroManifestBuilder):
            check_rank_count(files.optim_paths, stage.builder.optim)
            check_model_file(stage.model, stage.builder.optim)
            stage.builder.check_partitions()  # This tells more than a layer that does not fit the shapes.
        elif has_zero or stage.model.file.content.get("param_shapes") is not None:
            raise IncompleteError("the optimizer's file of this stage is missing", path=stage.path)
    if num_tp_ranks == 1:
        return apply_whole_names(
            _read_tp_rank(source, stages if has_zero else _attach_named_optimizers(stages), layers_by_tp_rank[0]),
            first_model.file.path,
        )
    rules = MergeRules.of(first_model.file.content.get("universal_checkpoint_info"), stages[0].path)
    if not has_zero:
        raise UnsupportedError(
            "it is of a pipeline without ZeRO that tensor parallelism cuts too, and no file says which of its layers "
            "are tied, by whose names the parts are joined; resume the run and save it with ZeRO stage 1",
            path=stages[0].path,
        )
    parts = [
        _read_tp_rank(source, stages[rank::num_tp_ranks], layer_paths, rules)
        for rank, layer_paths in enumerate(layers_by_tp_rank)
    ]
    return apply_whole_names(ManifestMerger(parts, rules).merge_manifests(), first_model.file.path)


def _read_tp_rank(
    source: Source, stages: Sequence[StageFiles], layer_paths: Mapping[int, str], rules: MergeRules | None = None
) -> Manifest:
    """The manifest of one tensor-parallel rank. ``stages`` are its parts of all stages, ``layer_paths`` its files of
    layers by number. ``rules`` are those for joining it with other ranks."""
    layer_files = dict(zip(layer_paths, source.map_files(DeepSpeedFile.open, layer_paths.values()), strict=True))
    pipeline_layers = PipelineLayers(source, layer_files, stages)
    models = pipeline_layers.build_models()
    builder = stages[0].builder
    if isinstance(builder, Stage0ManifestBuilder) and not builder.optimizer.groups:
        buffers = [stage.model.buffers for stage in stages]
        optimizers = [SavedOptimizer.of(stage.model.file) for stage in stages]
        missing_layers.check_no_layer_missing(
            [missing_layers.LayerShapes.of(number, file, buffers) for number, file in layer_files.items()],
            [
                (stage.path, missing_layers.list_parameters(source, own))
                for stage, own in zip(stages, optimizers, strict=True)
            ],
        )
    if rules is not None and rules.does_mention(TIED_PREFIX.rstrip(".")):
        for file in pipeline_layers.find_unnamed_files():
            raise UnsupportedError(
                "it has only frozen parameters, so that no file states whether it is a tied layer, by whose name "
                "its tensor-parallel parts would be joined",
                path=file.path,
            )
    parts = [stage.build_manifest(model) for stage, model in zip(stages, models, strict=True)]
    return StageMerger(parts, list(layer_paths), stages[0].path).merge_stages()


def _attach_named_optimizers(stages: Sequence[StageFiles]) -> Sequence[StageFiles]:
    """``stages`` of a run without ZeRO with their optimizers, if every one was made of named parameters; otherwise
    unchanged."""
    optimizers = [SavedOptimizer.of(stage.model.file) for stage in stages]
    named_stages = []
    for stage, each in zip(stages, optimizers, strict=True):
        shapes = each.find_named_shapes()
        if shapes is None:
            return stages
        model = replace(stage.model, param_shapes=shapes)
        builder = Stage0ManifestBuilder(model, each, literal_prefix=stage.builder.literal_prefix)
        named_stages.append(StageFiles(builder))
    return named_stages


@dataclass
class StageMerger:
    """Joins the manifests of all stages; ``path`` is a file for messages."""

    parts: Sequence[Manifest]
    layer_numbers: Sequence[int]
    path: str
    notes: list[Note] = field(default_factory=list)

    def merge_stages(self) -> Manifest:
        """The manifest of all stages. Raises MalformedError if they do not fit each other."""
        first = self.parts[0]
        check_equal_parts(
            ("ZeRO stage", [part.format for part in self.parts]),
            ("data-parallel world size", [part.world_size for part in self.parts]),
            part_name="stage",
            path=self.path,
        )
        tensors = self._merge_tensors()
        groups = tuple(self._merge_groups())
        self.notes += note_differences(list(map(_flatten_entries, self.parts)), "the stages of the pipeline", "stages")
        is_numbered = first.format == "zero0" and not first.groups
        if is_numbered:
            why = (
                "a pipeline without ZeRO numbers the parameters of each stage, and no file has their names; "
                "save with ZeRO stage 1, or with an optimizer that was made from model.named_parameters()"
            )
            self.notes.append(Note(Outcome.DROPPED, "optimizer state", why))
            why = "without ZeRO no file says which layers are tied (tied_modules)"
            self.notes.append(Note(Outcome.DEFAULTED, "names of tied layers are the numbers of the layers", why))
        self.notes.append(missing_layers.note_unlisted_layers(self.layer_numbers, is_numbered=is_numbered))
        return Manifest(
            format=first.format,
            tensors=tensors,
            aliases={alias: owner for part in self.parts for alias, owner in part.aliases.items()},
            groups=groups,
            literals={name: data for part in self.parts for name, data in part.literals.items()},
            extra=self._merge_extra(),
            step=first.step,
            step_claims=tuple(claim for part in self.parts for claim in part.step_claims),
            world_size=None if first.world_size is None else first.world_size * len(self.parts),
            notes=(*dict.fromkeys(note for part in self.parts for note in part.notes), *self.notes),
        )

    def _merge_tensors(self) -> dict[StateKey, TensorEntry]:
        """The tensors of all stages, tied modules first. A tied one is the first stage's that has it. Of the tensors in
        extras only the first stage's are kept, and those in values of modules."""
        entry_by_key: dict[StateKey, TensorEntry] = {}
        for stage, part in enumerate(self.parts):
            for key, entry in part.tensors.items():
                is_kept = entry.kind is not Kind.EXTRA or not stage or key.fqn.startswith("module.")
                first = entry_by_key.setdefault(key, entry) if is_kept else entry
                if (entry.shape, entry.dtype) != (first.shape, first.dtype):
                    message = "two stages have it in different shapes or dtypes"
                    raise MalformedError(message, path=self.path, key=str(key))
        return dict(sorted(entry_by_key.items(), key=lambda item: not item[0].fqn.startswith(TIED_PREFIX)))

    def _merge_groups(self) -> Iterator[ParamGroup]:
        """Joins the groups of the stages, number by number, if these have the same hyperparameters. Otherwise each
        stage's groups stay groups of their own, and a tied parameter is in the first."""
        first = self.parts[0].groups
        options = [[to_comparable_text(group.options) for group in part.groups] for part in self.parts]
        if all(each == options[0] for each in options):
            for number, group in enumerate(first):
                members = [part.groups[number].params for part in self.parts]
                names = dict.fromkeys(name for names in members for name in names)
                yield replace(group, params=tuple(sorted(names, key=lambda name: not name.startswith(TIED_PREFIX))))
            return
        why = "the stages of the pipeline differ in them, so each stage's are groups of their own"
        self.notes.append(Note(Outcome.DEFAULTED, "parameter groups", why))
        seen_names: set[str] = set()
        for part in self.parts:
            for group in part.groups:
                params = tuple(name for name in group.params if name not in seen_names)
                seen_names.update(params)
                if params:
                    yield replace(group, params=params)

    def _merge_extra(self) -> dict[str, Any]:
        """The extras of the first stage, with the values of the modules of all stages."""
        extra = drop_partition_entries(self.parts[0].extra)
        values: dict[str, Any] = {}
        for part in self.parts:
            values |= as_dict(part.extra.get("deepspeed")).get("module", {})
        return {**extra, "deepspeed": {**extra.get("deepspeed", {}), "module": values}} if values else extra


def _flatten_entries(part: Manifest) -> dict[str, Any]:
    """The extras of a stage as one level of entries, without the values of modules: those of ``deepspeed`` under names
    such as ``deepspeed.ds_config``."""
    deepspeed_entries = as_dict(part.extra.get("deepspeed"))
    other_entries = {name: value for name, value in part.extra.items() if name != "deepspeed"}
    return other_entries | {f"deepspeed.{name}": value for name, value in deepspeed_entries.items() if name != "module"}


PIPELINE_NAMES_ENTRY = "pipeline_names"
"""Entry of the client state with the names of layers in the whole model, which no file of DeepSpeed's has because
``PipelineModule`` numbers layers. For each layer with tensors, by the pipeline's name for it (``"1"``,
``"tied_modules.embed"``), it has the names of that module in the whole model; a tied one has several."""

LayerNames = Mapping[str, tuple[str, ...]]


def apply_whole_names(manifest: Manifest, path: str) -> Manifest:
    """The manifest under the names of the whole model, if the client state has ``PIPELINE_NAMES_ENTRY``; otherwise
    unchanged. ``path`` is a file for messages. Raises MalformedError if the entry is malformed, or does not name each
    layer once; IncompleteError if there is no tensor of a layer that it names."""
    client_state = manifest.extra.get("client_state")
    if not isinstance(client_state, Mapping) or PIPELINE_NAMES_ENTRY not in client_state:
        return manifest
    names = _parse_layer_names(client_state[PIPELINE_NAMES_ENTRY], path)
    layers = {fqn: _find_layer(fqn) for fqn in collect_model_names(manifest)}
    _check_layer_names(names, layers, path)
    name_by_fqn = {fqn: names[layer][0] + fqn.removeprefix(layer) for fqn, layer in layers.items()}
    if len({*name_by_fqn.values()}) < len(name_by_fqn):
        raise MalformedError(f"client_state.{PIPELINE_NAMES_ENTRY} gives two tensors one name", path=path)
    renamed, _ = renaming.rename_tensors(manifest, name_by_fqn.__getitem__)
    # The entry is in the names now, and would be wrong beside a model without layers of a pipeline.
    other_entries = {name: value for name, value in client_state.items() if name != PIPELINE_NAMES_ENTRY}
    extra = {name: value for name, value in manifest.extra.items() if name != "client_state"}
    owner_by_alias = {
        other + fqn.removeprefix(layer): name_by_fqn[fqn] for fqn, layer in layers.items() for other in names[layer][1:]
    }
    return replace(
        renamed,
        aliases={**renamed.aliases, **owner_by_alias},
        extra=extra | ({"client_state": other_entries} if other_entries else {}),
        notes=tuple(note for note in manifest.notes if note.what != UNLISTED_LAYERS),
    )


def _find_layer(fqn: str) -> str:
    """The layer of a tensor: ``1`` of ``1.norm.weight``, ``tied_modules.embed`` of ``tied_modules.embed.weight``."""
    parts = 2 if fqn.startswith(TIED_PREFIX) else 1
    return ".".join(fqn.split(".")[:parts])


def _parse_layer_names(entry: Any, path: str) -> LayerNames:
    if not isinstance(entry, Mapping) or not all(
        _is_name(layer) and isinstance(names, list | tuple) and names and all(map(_is_name, names))
        for layer, names in entry.items()
    ):
        why = f"is to have a list of names for each layer, and is {format_brief(entry)}"
        raise MalformedError(f"client_state.{PIPELINE_NAMES_ENTRY} {why}", path=path)
    return {layer: tuple(names) for layer, names in entry.items()}


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _check_layer_names(names: LayerNames, layers: Mapping[str, str], path: str) -> None:
    saved_layers = {*layers.values()}
    if unnamed_layers := sorted(saved_layers - names.keys()):
        why = f"client_state.{PIPELINE_NAMES_ENTRY} has no name for this layer"
        raise MalformedError(why, path=path, key=unnamed_layers[0])
    if absent_layers := sorted(names.keys() - saved_layers):
        why = f"client_state.{PIPELINE_NAMES_ENTRY} names this layer, and no file contains it"
        raise IncompleteError(why, path=path, key=absent_layers[0])
    counts = Counter(name for each in names.values() for name in each)
    if duplicate := next((name for name, number in counts.items() if number > 1), None):
        raise MalformedError(f"client_state.{PIPELINE_NAMES_ENTRY} gives this name twice", path=path, key=duplicate)
