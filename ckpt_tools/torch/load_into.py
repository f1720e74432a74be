"""Loads a checkpoint of any format into a torch model and its optimizer, in place.

Every rank calls ``load_into`` with its own part of the model, plain tensors or DTensors on any mesh, and reads the
elements of that part and no others. The optimizer makes its own state, as torch has it do before loading; moments,
steps and hyperparameters of the checkpoint then take the place of what it holds. What does not fit is found before
anything is loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ckpt_tools.arguments import api_function, expand_keywords
from ckpt_tools.core import renaming
from ckpt_tools.core.applicability import RECIPE_CONFIG_RULE, OptionContext, check_applicability
from ckpt_tools.core.apply_options import apply_options
from ckpt_tools.core.literals import read_literal_number
from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest, ParamGroup, StateKey, TensorRef
from ckpt_tools.core.names import is_extra_state, map_to_bare_names
from ckpt_tools.core.options import ConvertOptions, SelectKeywords
from ckpt_tools.core.value_refs import iter_tensor_refs
from ckpt_tools.errors import UnsafeError, UsageError
from ckpt_tools.messages.wording import join_names
from ckpt_tools.reading.checkpoint import make_recipe_step
from ckpt_tools.runs.opening import open_checkpoint
from ckpt_tools.state_tree.from_deepspeed import collect_user_entries
from ckpt_tools.torch.dtensors import iter_local_views
from ckpt_tools.torch.fill import SCRATCH_BYTES, TensorFill, fill_targets, read_tensor
from ckpt_tools.torch.revive import revive_value
from ckpt_tools.transfer.computing import add_generated_files
from ckpt_tools.transfer.tensor_checks import check_required_equal
from ckpt_tools.transfer.tensor_reader import TensorReader

if TYPE_CHECKING:
    import torch

DEVICE_OPTIONS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Options of a param group that depend on the job's device and not on the checkpoint."""

DEEPSPEED_OPTIONS = frozenset({"bias_correction", "step"})
"""Options of a param group that only DeepSpeed's own Adams keep."""

BITSANDBYTES_STATE = "__bnb_optimizer_quant_state__"
"""Where the optimizers of bitsandbytes put quantized state in their state dicts (optim/optimizer.py)."""

MAX_LISTED_NAMES = 5
"""Names that an error lists of each kind."""


@api_function
@expand_keywords(SelectKeywords, ConvertOptions)
def load_into(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    url: str | Path,
    *,
    elsewhere: Collection[str] = (),
    dry_run: bool = False,
    **given: Unpack[SelectKeywords],
) -> dict[str, Any]:
    """Load the checkpoint at ``url`` into ``model`` and ``optimizer``, in place, and return everything else in it.

    Every rank of a job calls it, and reads its own part of the model alone.

    Args:
        model: A module with plain tensors or DTensors. Parameters and buffers keep their dtypes; values are cast.
        optimizer: Its state and hyperparameters are loaded too. None loads the model alone.
        url: A path, or a URL of a store, of a checkpoint of any format.
        from_: The format of the checkpoint. Default: detected.
        tag: Which checkpoint of a DeepSpeed folder. Default: the tag that its file ``latest`` names.
        model_key: Where the model is in a tree, such as ``"app.model"``. Default: found by its content.
        optim_key: Where the optimizer is in a tree. Default: found by its content.
        param_order: A file of parameter names, as for ``inspect``.
        optimizer_file: The file of ``torch.save`` with the optimizer, if it is apart from the model.
        weights: Which copy of a weight, if the checkpoint has both: the fp32 ``"master"``, or the ``"model"``'s own.
            Default: ``"master"``.
        elsewhere: Names of parameters and buffers that only other ranks have, such as those of the other stages of a
            pipeline. These, and their optimizer state, may be in the checkpoint and not in ``model``.
        dry_run: Only check names and shapes of the model, which may be on the meta device. Nothing is loaded, and the
            result is empty.
        include, exclude, rename, key_map: Which parameters of the checkpoint are loaded, and their names in the model;
            as for ``convert``.
        strip, recipe, inverse, dequantize, config: A prefix to take off, and a recipe that maps the checkpoint's
            tensors to the model's; whether quantized weights are dequantized; as for ``convert``.
        storage_options: How the store is reached (credentials, ``endpoint_url``). Only for URLs.

    Returns:
        The scheduler's state, the step and the user's own entries by name, as plain objects. An object that only
        code of the checkpoint's choosing could make stays an inert ``ckpt_tools.core.values.Opaque``.

    Raises:
        UsageError: model, optimizer and checkpoint do not fit; nothing was loaded.
        DifferenceError: tensors that a recipe makes one differ; nothing was loaded.
        CkptError: the checkpoint cannot be read.

    Example:
        >>> import ckpt_tools, torch
        >>> model = torch.nn.ModuleDict({"encoder": torch.nn.Linear(8, 4)})
        >>> extras = ckpt_tools.load_into(model, None, "run")
        >>> model["encoder"].weight[1, :3].tolist()
        [8.0, 9.0, 10.0]
    """
    convert_options = ConvertOptions(**given)
    read_options = replace(convert_options.read_options, state="model" if optimizer is None else "all")
    storage_options = convert_options.storage_options
    check_applicability(
        [RECIPE_CONFIG_RULE], convert_options.values_by_name, OptionContext(has_recipe=convert_options.needs_config)
    )
    opened = open_checkpoint(
        url,
        read_options,
        format_name=convert_options.from_,
        storage_options=storage_options,
        config_folder=convert_options.config,
        checks_options=True,
    )
    manifest, recipe = opened.manifest, make_recipe_step(opened, convert_options)
    if optimizer is None and recipe is None:
        manifest = replace(manifest, unjoined_state="")  # The weights alone.
    manifest, _ = renaming.strip_wrappers(manifest)
    manifest = apply_options(
        manifest, convert_options, writes_all_state=True, holds_masters=False, recipe=recipe
    ).manifest
    if manifest.tree is not None:  # A job has masters where it saved them.
        tensors = {StateKey(key.fqn, manifest.tree.get_slot_name(key.slot)): e for key, e in manifest.tensors.items()}
        manifest = replace(manifest, tensors=tensors)
    store = add_generated_files(opened.source.store, manifest)
    check_required_equal(manifest, store)
    elsewhere_owners = frozenset(manifest.aliases.get(name, name) for name in elsewhere)
    loader = _CheckpointLoader(
        manifest, TensorReader(store, SCRATCH_BYTES), _MismatchCollector(), elsewhere_owners.union(elsewhere), dry_run
    )
    targets = list(loader.find_model_targets(model))
    extra_states = list(loader.find_extra_states(model))
    loader.problems.raise_if_any()
    if dry_run:
        return {}
    if optimizer is not None:
        _OptimizerLoader(loader, optimizer, _map_parameter_names(model)).load_state(model)
    loader.fill_targets(targets)
    for module, value in extra_states:
        module.set_extra_state(value)
    extras, _ = collect_user_entries(manifest)
    loader.tensor_reader.check_remaining_records()
    return {
        name: revive_value(value, load_tensor=loader.read_tensor, handle_unknown=lambda inert: inert)
        for name, value in extras.items()
    }


@dataclass(frozen=True, slots=True)
class _MismatchCollector:
    names_by_problem: dict[str, list[str]] = field(default_factory=dict)

    def add_names(self, kind: str, names: Iterable[str]) -> None:
        self.names_by_problem.setdefault(kind, []).extend(names)

    def raise_if_any(self) -> None:
        parts = [
            f"{kind}: {join_names(names, MAX_LISTED_NAMES)}" for kind, names in self.names_by_problem.items() if names
        ]
        if parts:
            raise UsageError(f"the checkpoint does not fit the model: {'; '.join(parts)}")


@dataclass(frozen=True, slots=True)
class _LoadTarget:
    """A tensor of the job, and the tensor of the checkpoint that it takes."""

    tensor: torch.Tensor
    key: StateKey
    name: str


@dataclass(frozen=True, slots=True)
class _CheckpointLoader:
    manifest: Manifest
    tensor_reader: TensorReader
    problems: _MismatchCollector
    elsewhere: frozenset[str]
    dry_run: bool

    def find_model_targets(self, model: torch.nn.Module) -> Iterator[_LoadTarget]:
        """Every tensor that the model saves, each once, whatever its names."""
        known_names = set(self.elsewhere)
        for tensor, names in _list_saved_tensors(model):
            key = self.find_key(names, WEIGHT)
            known_names.update(names)
            if key is None:
                self.problems.add_names("not in the checkpoint", names[:1])
            else:
                known_names.add(key.fqn)
                yield from self.match_target(tensor, key, names[0])
        stored = self.manifest.select_kinds(Kind.PARAMETER, Kind.BUFFER)
        unexpected = [key.fqn for key in stored if key.fqn not in known_names and not is_extra_state(key.fqn)]
        self.problems.add_names("not in the model", unexpected)

    def find_extra_states(self, model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
        """Each module with a ``get_extra_state`` of its own, and what it returned when it was saved."""
        paths_by_name = {
            bare: path for path, bare in map_to_bare_names(model.state_dict()).items() if is_extra_state(bare)
        }
        values = {key.fqn: value for key, value in self.manifest.values.items() if key.slot == WEIGHT}
        tensors = {
            key.fqn: TensorRef(key) for key in self.manifest.select_kinds(Kind.BUFFER) if is_extra_state(key.fqn)
        }
        stored = {**values, **tensors}
        self.problems.add_names("not in the checkpoint", [name for name in paths_by_name if name not in stored])
        self.problems.add_names(
            "not in the model", [name for name in stored if name not in {*paths_by_name, *self.elsewhere}]
        )
        for name in paths_by_name.keys() & stored.keys():
            module = model.get_submodule(paths_by_name[name].rpartition(".")[0])
            yield (
                module,
                None
                if self.dry_run
                else revive_value(stored[name], load_tensor=self.read_tensor, handle_unknown=_refuse_object),
            )

    def find_key(self, names: Iterable[str], slot: str) -> StateKey | None:
        candidates = (StateKey(self.manifest.aliases.get(name, name), slot) for name in names)
        return next((key for key in candidates if key in self.manifest.tensors), None)

    def match_target(self, tensor: torch.Tensor, key: StateKey, name: str) -> Iterator[_LoadTarget]:
        shape = self.manifest.tensors[key].shape
        if tuple(tensor.shape) != shape:
            self.problems.add_names(
                "shape mismatch", [f"{name} (checkpoint {list(shape)}, model {list(tensor.shape)})"]
            )
        elif tensor.device.type == "meta" and not self.dry_run:
            self.problems.add_names("still on the meta device", [name])
        else:
            yield _LoadTarget(tensor, key, name)

    def fill_targets(self, targets: Iterable[_LoadTarget]) -> None:
        fills = (
            TensorFill(local_view, self.manifest.tensors[target.key], box, target.name)
            for target in targets
            for local_view, box in iter_local_views(target.tensor)
        )
        fill_targets(fills, self.tensor_reader)

    def read_tensor(self, ref: TensorRef) -> torch.Tensor:
        return read_tensor(self.manifest.tensors[ref.key], self.tensor_reader, name=str(ref.key))


def _list_saved_tensors(model: torch.nn.Module) -> list[tuple[torch.Tensor, list[str]]]:
    """Parameters and persistent buffers, each with all its names."""
    import torch

    tensors_by_id: dict[int, tuple[torch.Tensor, list[str]]] = {}
    state_dict = model.state_dict(keep_vars=True)
    for name, value in zip(map_to_bare_names(state_dict).values(), state_dict.values(), strict=True):
        if isinstance(value, torch.Tensor) and not is_extra_state(name):
            tensors_by_id.setdefault(id(value), (value, []))[1].append(name)
    return list(tensors_by_id.values())


def _map_parameter_names(model: torch.nn.Module) -> dict[int, list[str]]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in zip(map_to_bare_names(parameters).values(), parameters.values(), strict=True):
        names.setdefault(id(parameter), []).append(name)
    return names


NewValue = tuple[dict[Any, Any], Any, Any]
"""The state of a parameter, a key of it, and the number or object that this key gets."""


@dataclass(frozen=True, slots=True)
class _OptimizerLoader:
    """Loads the state of one optimizer; ``parameter_names`` are those of the model's parameters by id."""

    loader: _CheckpointLoader
    optimizer: torch.optim.Optimizer
    parameter_names: Mapping[int, list[str]]
    targets: list[_LoadTarget] = field(default_factory=list)

    def load_state(self, model: torch.nn.Module) -> None:
        # Nothing of the checkpoint is loaded until all checks have passed: options of groups and new values are
        # computed first, and tensors that are filled in place are collected in `targets`; then problems raise; then all
        # are set.
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        options_by_group = [self._find_group_options(number, group) for number, group in enumerate(groups)]
        self.loader.problems.raise_if_any()
        is_initialized = self._initialize_state(model)
        stored_state = self._collect_stored_state()
        new_values = [
            value
            for parameter in self._iter_parameters()
            for value in self._iter_new_values(parameter, stored_state, is_initialized)
        ]
        unexpected = [
            f"{fqn} ({slot})"
            for fqn, slots in stored_state.items()
            if fqn not in self.loader.elsewhere
            for slot in slots
        ]
        self.loader.problems.add_names("not in the optimizer", unexpected)
        self.loader.problems.raise_if_any()
        self.loader.fill_targets(self.targets)
        for holder, key, value in new_values:
            holder[key] = value
        for group, group_options in zip(groups, options_by_group, strict=True):
            self._set_options(group, group_options)

    def _initialize_state(self, model: torch.nn.Module) -> bool:
        """Have the optimizer make its state, and return whether it could: a step that needs a closure, as that of
        LBFGS, cannot be tried. torch does it with a step of no gradient at a learning rate of zero. Optimizers count
        their steps in attributes too."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        if self.optimizer.state:
            return True
        if any(p.grad is not None for p in self._iter_parameters()):
            raise UsageError("the optimizer has no state yet but there are gradients; load before backward()")
        closure = signature(self.optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is Parameter.empty:
            return False
        step_counts = {name: value for name, value in vars(self.optimizer).items() if isinstance(value, int | float)}
        try:
            get_optimizer_state_dict(model, self.optimizer)
        except Exception as error:
            raise UsageError(
                f"{type(self.optimizer).__name__} cannot make its state by a step without gradients "
                f"({type(error).__name__}: {error}); step it once before its state is loaded"
            ) from error
        vars(self.optimizer).update(step_counts)
        return True

    def _iter_parameters(self) -> Iterator[torch.Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _collect_stored_state(self) -> dict[str, dict[str, Any]]:
        """The checkpoint's values of each parameter's state by slot, those that bitsandbytes packs like all others."""
        manifest, state_by_name = self.loader.manifest, defaultdict[str, dict[str, Any]](dict)
        referenced_keys = {ref.key for ref in iter_tensor_refs(list(manifest.values.values()))}
        for key in manifest.select_kinds(Kind.STATE):
            if key not in referenced_keys:
                state_by_name[key.fqn][key.slot] = TensorRef(key)
        for key, value in manifest.values.items():
            if key.slot != WEIGHT:
                state_by_name[key.fqn].update(value if key.slot == BITSANDBYTES_STATE else {key.slot: value})
        return state_by_name

    def _iter_new_values(
        self, parameter: torch.Tensor, stored_state: Mapping[str, dict[str, Any]], is_initialized: bool
    ) -> Iterator[NewValue]:
        """The values that are not filled in place. Takes what the parameter has out of ``stored_state``."""
        aliases = self.loader.manifest.aliases
        fqns = [aliases.get(name, name) for name in self.parameter_names[id(parameter)]]
        stored_slots: dict[str, Any] = next((stored_state[fqn] for fqn in fqns if fqn in stored_state), {})
        live_state = self.optimizer.state.get(parameter, {}) if is_initialized else dict.fromkeys(stored_slots)
        for key, value in live_state.items():
            if str(key) in stored_slots:
                new_value = self._merge_value(value, stored_slots.pop(str(key)), parameter)
                if new_value is not value or not is_initialized:
                    yield self.optimizer.state[parameter], key, new_value
            elif parameter.numel():
                self.loader.problems.add_names("optimizer state not in the checkpoint", [f"{fqns[0]} ({key})"])

    def _merge_value(self, live: Any, stored: Any, parameter: torch.Tensor) -> Any:
        """The value to keep: ``live``, whose tensors are to be filled in place, or one made of ``stored``."""
        import torch
        from torch.distributed.tensor import DTensor

        if isinstance(stored, TensorRef):
            if isinstance(live, torch.Tensor):
                self.targets.extend(self.loader.match_target(live, stored.key, str(stored.key)))
                return live
            number = read_literal_number(self.loader.manifest, self.loader.manifest.tensors[stored.key])
            if number is not None or isinstance(live, int | float):
                number = self.loader.read_tensor(stored).item() if number is None else number
                return type(live)(number) if isinstance(live, int | float) else number
            if isinstance(parameter, DTensor):
                self.loader.problems.add_names(
                    "optimizer state that the job has not made and whose placement is unknown", [str(stored.key)]
                )
                return live
            return self.loader.read_tensor(stored).to(parameter.device)
        if isinstance(live, list) and isinstance(stored, list) and len(live) == len(stored):
            return [self._merge_value(*pair, parameter) for pair in zip(live, stored, strict=True)]
        if isinstance(live, dict) and isinstance(stored, dict) and set(map(str, live)) == set(map(str, stored)):
            stored_by_text = {str(key): value for key, value in stored.items()}
            return {key: self._merge_value(value, stored_by_text[str(key)], parameter) for key, value in live.items()}
        return revive_value(
            stored, load_tensor=lambda ref: self._merge_value(None, ref, parameter), handle_unknown=_refuse_object
        )

    def _find_group_options(self, group_index: int, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hyperparameters of the checkpoint's group that the parameters of a group are in."""
        problems, manifest = self.loader.problems, self.loader.manifest
        if any(id(parameter) not in self.parameter_names for parameter in group["params"]):
            problems.add_names("parameters not in the model", [f"group {group_index}"])
        if not manifest.groups and not manifest.select_kinds(Kind.STATE):
            problems.add_names("not in the checkpoint", ["the state of an optimizer"])
        names = {name for parameter in group["params"] for name in self.parameter_names.get(id(parameter), [])}
        matching_options = [theirs.options for theirs in manifest.groups if names & self._find_group_members(theirs)]
        if any(options != matching_options[0] for options in matching_options):
            problems.add_names("groups that mix different hyperparameters of the checkpoint", [f"group {group_index}"])
        return matching_options[0] if matching_options else {}

    def _find_group_members(self, group: ParamGroup) -> set[str]:
        aliases = self.loader.manifest.aliases
        owners = {aliases.get(name, name) for name in group.params}
        return owners | {alias for alias, owner in aliases.items() if owner in owners}

    def _set_options(self, group: dict[str, Any], options: Mapping[str, Any]) -> None:
        import torch

        for name, value in options.items():
            revived = revive_value(value, load_tensor=self.loader.read_tensor, handle_unknown=_refuse_object)
            current = group.get(name)
            if name in DEVICE_OPTIONS or (name in DEEPSPEED_OPTIONS and name not in group):
                continue
            if (
                isinstance(current, torch.Tensor)
                and isinstance(revived, torch.Tensor)
                and revived.numel() == current.numel()
            ):
                current.copy_(revived.reshape(current.shape))
            elif isinstance(current, torch.Tensor) and isinstance(revived, int | float):
                current.fill_(revived)
            else:
                is_number = (
                    isinstance(current, int | float) and isinstance(revived, torch.Tensor) and revived.numel() == 1
                )
                group[name] = revived.item() if is_number else revived


def _refuse_object(value: Any) -> Any:
    raise UnsafeError("an optimizer or extra state holds an object that only code named in the checkpoint could create")
