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

from ckpt_tools.arguments import public, written_out
from ckpt_tools.core import transforms
from ckpt_tools.core.applicability import OF_RECIPES, Case, check
from ckpt_tools.core.apply_options import apply_options
from ckpt_tools.core.literals import literal_number
from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest, ParamGroup, StateKey, TensorRef
from ckpt_tools.core.names import bare_names, is_extra_state
from ckpt_tools.core.options import ConvertOptions, SelectKeywords
from ckpt_tools.core.value_refs import references
from ckpt_tools.core.wording import listed
from ckpt_tools.errors import UnsafeError, UsageError
from ckpt_tools.formats.state_dict.from_deepspeed import user_entries
from ckpt_tools.reading.checkpoint import check_reading, recipe_step
from ckpt_tools.runs.opening import named, read_checkpoint
from ckpt_tools.stores.urls import check_storage_options
from ckpt_tools.torch.dtensors import local_parts
from ckpt_tools.torch.fill import SCRATCH_BYTES, TensorFill, fill_all, read_whole
from ckpt_tools.torch.revive import revive
from ckpt_tools.transfer.computing import with_made_files
from ckpt_tools.transfer.equality import check_equal
from ckpt_tools.transfer.tensor_reader import TensorReader

if TYPE_CHECKING:
    import torch

KEPT_OPTIONS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Options of a param group that depend on the job's device and not on the checkpoint."""

DEEPSPEED_OPTIONS = frozenset({"bias_correction", "step"})
"""Options of a param group that only DeepSpeed's own Adams keep."""

BITSANDBYTES_STATE = "__bnb_optimizer_quant_state__"
"""Where the optimizers of bitsandbytes put quantized state in their state dicts (optim/optimizer.py)."""

MAX_NAMED = 5
"""Names that an error lists of each kind."""


@public
@written_out(SelectKeywords, ConvertOptions)
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
    chosen = ConvertOptions(**given)
    options = replace(chosen.reading, state="model" if optimizer is None else "all")
    stores = chosen.storage_options
    check_storage_options(stores, url)
    check([OF_RECIPES], chosen.given, Case(has_recipe=chosen.needs_config))
    url = named(url, stores)
    source, manifest = read_checkpoint(url, options, format_name=chosen.from_, storage_options=stores)
    check_reading(manifest, options)
    recipe = recipe_step(url, source, manifest, chosen)
    if optimizer is None and recipe is None:
        manifest = replace(manifest, parted="")  # The weights alone.
    manifest, _ = transforms.without_wrappers(manifest)
    manifest = apply_options(manifest, chosen, whole=True, holds_masters=False, recipe=recipe).manifest
    if manifest.tree is not None:  # A job has masters where it saved them.
        tensors = {StateKey(key.fqn, manifest.tree.slot_name(key.slot)): e for key, e in manifest.tensors.items()}
        manifest = replace(manifest, tensors=tensors)
    store = with_made_files(source.store, manifest)
    check_equal(manifest, store)
    others = frozenset(manifest.aliases.get(name, name) for name in elsewhere)
    loader = _Loader(manifest, TensorReader(store, SCRATCH_BYTES), _Problems(), others.union(elsewhere), dry_run)
    targets = list(loader.model_targets(model))
    extra_states = list(loader.extra_states(model))
    loader.problems.check()
    if dry_run:
        return {}
    if optimizer is not None:
        _OptimizerLoader(loader, optimizer, _parameter_names(model)).load(model)
    loader.fill(targets)
    for module, value in extra_states:
        module.set_extra_state(value)
    extras, _ = user_entries(manifest)
    loader.tensor_reader.finish()
    return {name: revive(value, tensor=loader.whole, unknown=lambda inert: inert) for name, value in extras.items()}


@dataclass(frozen=True, slots=True)
class _Problems:
    found: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, names: Iterable[str]) -> None:
        self.found.setdefault(kind, []).extend(names)

    def check(self) -> None:
        parts = [f"{kind}: {listed(names, MAX_NAMED)}" for kind, names in self.found.items() if names]
        if parts:
            raise UsageError(f"the checkpoint does not fit the model: {'; '.join(parts)}")


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor of the job, and the tensor of the checkpoint that it takes."""

    tensor: torch.Tensor
    key: StateKey
    name: str


@dataclass(frozen=True, slots=True)
class _Loader:
    manifest: Manifest
    tensor_reader: TensorReader
    problems: _Problems
    elsewhere: frozenset[str]
    dry_run: bool

    def model_targets(self, model: torch.nn.Module) -> Iterator[_Target]:
        """Every tensor that the model saves, each once, whatever its names."""
        known = set(self.elsewhere)
        for tensor, names in _saved_tensors(model):
            key = self.key(names, WEIGHT)
            known.update(names)
            if key is None:
                self.problems.add("not in the checkpoint", names[:1])
            else:
                known.add(key.fqn)
                yield from self.target(tensor, key, names[0])
        stored = self.manifest.of_kind(Kind.PARAMETER, Kind.BUFFER)
        left = [key.fqn for key in stored if key.fqn not in known and not is_extra_state(key.fqn)]
        self.problems.add("not in the model", left)

    def extra_states(self, model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
        """Each module with a ``get_extra_state`` of its own, and what it returned when it was saved."""
        paths = {bare: path for path, bare in bare_names(model.state_dict()).items() if is_extra_state(bare)}
        values = {key.fqn: value for key, value in self.manifest.values.items() if key.slot == WEIGHT}
        tensors = {key.fqn: TensorRef(key) for key in self.manifest.of_kind(Kind.BUFFER) if is_extra_state(key.fqn)}
        stored = {**values, **tensors}
        self.problems.add("not in the checkpoint", [name for name in paths if name not in stored])
        self.problems.add("not in the model", [name for name in stored if name not in {*paths, *self.elsewhere}])
        for name in paths.keys() & stored.keys():
            module = model.get_submodule(paths[name].rpartition(".")[0])
            yield module, None if self.dry_run else revive(stored[name], tensor=self.whole, unknown=_refuse)

    def key(self, names: Iterable[str], slot: str) -> StateKey | None:
        found = (StateKey(self.manifest.aliases.get(name, name), slot) for name in names)
        return next((key for key in found if key in self.manifest.tensors), None)

    def target(self, tensor: torch.Tensor, key: StateKey, name: str) -> Iterator[_Target]:
        shape = self.manifest.tensors[key].shape
        if tuple(tensor.shape) != shape:
            self.problems.add("shape mismatch", [f"{name} (checkpoint {list(shape)}, model {list(tensor.shape)})"])
        elif tensor.device.type == "meta" and not self.dry_run:
            self.problems.add("still on the meta device", [name])
        else:
            yield _Target(tensor, key, name)

    def fill(self, targets: Iterable[_Target]) -> None:
        fillings = (
            TensorFill(part, self.manifest.tensors[target.key], box, target.name)
            for target in targets
            for part, box in local_parts(target.tensor)
        )
        fill_all(fillings, self.tensor_reader)

    def whole(self, ref: TensorRef) -> torch.Tensor:
        return read_whole(self.manifest.tensors[ref.key], self.tensor_reader, name=str(ref.key))


def _saved_tensors(model: torch.nn.Module) -> list[tuple[torch.Tensor, list[str]]]:
    """Parameters and persistent buffers, each with all its names."""
    import torch

    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    state = model.state_dict(keep_vars=True)
    for name, value in zip(bare_names(state).values(), state.values(), strict=True):
        if isinstance(value, torch.Tensor) and not is_extra_state(name):
            found.setdefault(id(value), (value, []))[1].append(name)
    return list(found.values())


def _parameter_names(model: torch.nn.Module) -> dict[int, list[str]]:
    named = dict(model.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in zip(bare_names(named).values(), named.values(), strict=True):
        names.setdefault(id(parameter), []).append(name)
    return names


NewValue = tuple[dict[Any, Any], Any, Any]
"""The state of a parameter, a key of it, and the number or object that this key gets."""


@dataclass(frozen=True, slots=True)
class _OptimizerLoader:
    """Loads the state of one optimizer; ``names`` are those of the model's parameters by id."""

    loader: _Loader
    optimizer: torch.optim.Optimizer
    names: Mapping[int, list[str]]
    targets: list[_Target] = field(default_factory=list)

    def load(self, model: torch.nn.Module) -> None:
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        options = [self._options(number, group) for number, group in enumerate(groups)]
        self.loader.problems.check()
        is_initialized = self._initialize(model)
        stored = self._stored_state()
        values = [
            value for parameter in self._parameters() for value in self._new_values(parameter, stored, is_initialized)
        ]
        left = [
            f"{fqn} ({slot})" for fqn, slots in stored.items() if fqn not in self.loader.elsewhere for slot in slots
        ]
        self.loader.problems.add("not in the optimizer", left)
        self.loader.problems.check()
        self.loader.fill(self.targets)
        for holder, key, value in values:
            holder[key] = value
        for group, found in zip(groups, options, strict=True):
            self._set_options(group, found)

    def _initialize(self, model: torch.nn.Module) -> bool:
        """Have the optimizer make its state, and return whether it could: a step that needs a closure, as that of
        LBFGS, cannot be tried. torch does it with a step of no gradient at a learning rate of zero. Optimizers count
        their steps in attributes too."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        if self.optimizer.state:
            return True
        if any(p.grad is not None for p in self._parameters()):
            raise UsageError("the optimizer has no state yet but there are gradients; load before backward()")
        closure = signature(self.optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is Parameter.empty:
            return False
        counts = {name: value for name, value in vars(self.optimizer).items() if isinstance(value, int | float)}
        try:
            get_optimizer_state_dict(model, self.optimizer)
        except Exception as error:
            raise UsageError(
                f"{type(self.optimizer).__name__} cannot make its state by a step without gradients "
                f"({type(error).__name__}: {error}); step it once before its state is loaded"
            ) from error
        vars(self.optimizer).update(counts)
        return True

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _stored_state(self) -> dict[str, dict[str, Any]]:
        """The checkpoint's values of each parameter's state by slot, those that bitsandbytes packs like all others."""
        manifest, found = self.loader.manifest, defaultdict[str, dict[str, Any]](dict)
        inside = {ref.key for ref in references(list(manifest.values.values()))}
        for key in manifest.of_kind(Kind.STATE):
            if key not in inside:
                found[key.fqn][key.slot] = TensorRef(key)
        for key, value in manifest.values.items():
            if key.slot != WEIGHT:
                found[key.fqn].update(value if key.slot == BITSANDBYTES_STATE else {key.slot: value})
        return found

    def _new_values(
        self, parameter: torch.Tensor, stored: Mapping[str, dict[str, Any]], is_initialized: bool
    ) -> Iterator[NewValue]:
        """The values that are not filled in place. Takes what the parameter has out of ``stored``."""
        aliases = self.loader.manifest.aliases
        fqns = [aliases.get(name, name) for name in self.names[id(parameter)]]
        slots: dict[str, Any] = next((stored[fqn] for fqn in fqns if fqn in stored), {})
        live = self.optimizer.state.get(parameter, {}) if is_initialized else dict.fromkeys(slots)
        for key, value in live.items():
            if str(key) in slots:
                made = self._merge(value, slots.pop(str(key)), parameter)
                if made is not value or not is_initialized:
                    yield self.optimizer.state[parameter], key, made
            elif parameter.numel():
                self.loader.problems.add("optimizer state not in the checkpoint", [f"{fqns[0]} ({key})"])

    def _merge(self, live: Any, stored: Any, parameter: torch.Tensor) -> Any:
        """The value to keep: ``live``, whose tensors are to be filled in place, or one made of ``stored``."""
        import torch
        from torch.distributed.tensor import DTensor

        if isinstance(stored, TensorRef):
            if isinstance(live, torch.Tensor):
                self.targets.extend(self.loader.target(live, stored.key, str(stored.key)))
                return live
            number = literal_number(self.loader.manifest, self.loader.manifest.tensors[stored.key])
            if number is not None or isinstance(live, int | float):
                number = self.loader.whole(stored).item() if number is None else number
                return type(live)(number) if isinstance(live, int | float) else number
            if isinstance(parameter, DTensor):
                self.loader.problems.add(
                    "optimizer state that the job has not made and whose placement is unknown", [str(stored.key)]
                )
                return live
            return self.loader.whole(stored).to(parameter.device)
        if isinstance(live, list) and isinstance(stored, list) and len(live) == len(stored):
            return [self._merge(*pair, parameter) for pair in zip(live, stored, strict=True)]
        if isinstance(live, dict) and isinstance(stored, dict) and set(map(str, live)) == set(map(str, stored)):
            by_text = {str(key): value for key, value in stored.items()}
            return {key: self._merge(value, by_text[str(key)], parameter) for key, value in live.items()}
        return revive(stored, tensor=lambda ref: self._merge(None, ref, parameter), unknown=_refuse)

    def _options(self, number: int, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hyperparameters of the checkpoint's group that the parameters of a group are in."""
        problems, manifest = self.loader.problems, self.loader.manifest
        if any(id(parameter) not in self.names for parameter in group["params"]):
            problems.add("parameters not in the model", [f"group {number}"])
        if not manifest.groups and not manifest.of_kind(Kind.STATE):
            problems.add("not in the checkpoint", ["the state of an optimizer"])
        names = {name for parameter in group["params"] for name in self.names.get(id(parameter), [])}
        found = [theirs.options for theirs in manifest.groups if names & self._members(theirs)]
        if any(options != found[0] for options in found):
            problems.add("groups that mix different hyperparameters of the checkpoint", [f"group {number}"])
        return found[0] if found else {}

    def _members(self, group: ParamGroup) -> set[str]:
        aliases = self.loader.manifest.aliases
        owners = {aliases.get(name, name) for name in group.params}
        return owners | {alias for alias, owner in aliases.items() if owner in owners}

    def _set_options(self, group: dict[str, Any], options: Mapping[str, Any]) -> None:
        import torch

        for name, value in options.items():
            found = revive(value, tensor=self.loader.whole, unknown=_refuse)
            current = group.get(name)
            if name in KEPT_OPTIONS or (name in DEEPSPEED_OPTIONS and name not in group):
                continue
            if (
                isinstance(current, torch.Tensor)
                and isinstance(found, torch.Tensor)
                and found.numel() == current.numel()
            ):
                current.copy_(found.reshape(current.shape))
            elif isinstance(current, torch.Tensor) and isinstance(found, int | float):
                current.fill_(found)
            else:
                is_number = isinstance(current, int | float) and isinstance(found, torch.Tensor) and found.numel() == 1
                group[name] = found.item() if is_number else found


def _refuse(value: Any) -> Any:
    raise UnsafeError("an optimizer or extra state holds an object that only code named in the checkpoint could create")
