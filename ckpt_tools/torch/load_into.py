"""Loads a checkpoint of any format into a torch model and its optimizer, in place.

Every rank calls ``load_into`` with its own part of the model, plain tensors or DTensors on any mesh, and reads the
elements of that part and no others. The optimizer makes its own state, as torch has it do before loading; moments,
steps and hyperparameters of the checkpoint then take the place of what it holds. What does not fit is found before
anything is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ckpt_tools.arguments import public, written_out
from ckpt_tools.core import transforms
from ckpt_tools.core.applicability import OF_RECIPES, Case, check
from ckpt_tools.core.apply_options import apply_options
from ckpt_tools.core.manifest import WEIGHT, Kind, Manifest, ParamGroup, StateKey, TensorRef
from ckpt_tools.core.names import bare_names
from ckpt_tools.core.options import ConvertOptions, SelectKeywords
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
    options, stores = chosen.reading, chosen.storage_options
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
    store = with_made_files(source.store, manifest)
    check_equal(manifest, store)
    others = frozenset(manifest.aliases.get(name, name) for name in elsewhere)
    loader = _Loader(manifest, TensorReader(store, SCRATCH_BYTES), _Problems(), others.union(elsewhere), dry_run)
    targets = list(loader.model_targets(model))
    loader.problems.check()
    if dry_run:
        return {}
    if optimizer is not None:
        _OptimizerLoader(loader, optimizer, _parameter_names(model)).load(model)
    loader.fill(targets)
    extras, _ = user_entries(manifest)
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
        self.problems.add("not in the model", [key.fqn for key in stored if key.fqn not in known])

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
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), (value, []))[1].append(name)
    return list(found.values())


def _parameter_names(model: torch.nn.Module) -> dict[int, list[str]]:
    named = dict(model.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in zip(bare_names(named).values(), named.values(), strict=True):
        names.setdefault(id(parameter), []).append(name)
    return names


@dataclass(frozen=True, slots=True)
class _Slot:
    """One value of an optimizer's state: ``holder[key]``, and the tensor of the checkpoint that it takes."""

    holder: dict[Any, Any]
    key: Any
    stored: StateKey


@dataclass(frozen=True, slots=True)
class _OptimizerLoader:
    """Loads the state of one optimizer; ``names`` are those of the model's parameters by id."""

    loader: _Loader
    optimizer: torch.optim.Optimizer
    names: Mapping[int, list[str]]

    def load(self, model: torch.nn.Module) -> None:
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        options = [self._options(number, group) for number, group in enumerate(groups)]
        self.loader.problems.check()
        self._initialize(model)
        slots = list(self._slots())
        values = [(slot.holder[slot.key], slot.stored) for slot in slots]
        tensors = [(value, stored) for value, stored in values if not isinstance(value, int | float)]
        targets = [target for each in tensors for target in self.loader.target(*each, str(each[1]))]
        self._check_left(slots)
        self.loader.problems.check()
        self.loader.fill(targets)
        for slot in slots:
            self._set_number(slot)
        for group, found in zip(groups, options, strict=True):
            self._set_options(group, found)

    def _initialize(self, model: torch.nn.Module) -> None:
        """Have the optimizer make its state. torch does it with a step of no gradient at a learning rate of zero."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        if not self.optimizer.state and any(p.grad is not None for p in self._parameters()):
            raise UsageError("the optimizer has no state yet but there are gradients; load before backward()")
        get_optimizer_state_dict(model, self.optimizer)

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _slots(self) -> Iterator[_Slot]:
        for parameter in self._parameters():
            names = self.names[id(parameter)]
            for holder, key, slot in _leaves(self.optimizer.state.get(parameter, {}), ""):
                stored = self.loader.key(names, slot)
                if stored is not None:
                    yield _Slot(holder, key, stored)
                elif parameter.numel():
                    self.loader.problems.add("optimizer state not in the checkpoint", [f"{names[0]} ({slot})"])

    def _check_left(self, slots: list[_Slot]) -> None:
        """State that the optimizer does not take is the state of another one."""
        taken = {slot.stored for slot in slots}
        stored = self.loader.manifest.of_kind(Kind.STATE)
        left = [str(key) for key in stored if key not in taken and key.fqn not in self.loader.elsewhere]
        self.loader.problems.add("not in the optimizer", left)

    def _set_number(self, slot: _Slot) -> None:
        value = slot.holder[slot.key]
        if isinstance(value, int | float):
            slot.holder[slot.key] = type(value)(self.loader.whole(TensorRef(slot.stored)).item())

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
            if isinstance(current, torch.Tensor):
                current.fill_(found)
            else:
                group[name] = found.item() if isinstance(found, torch.Tensor) and current is not None else found


def _leaves(state: dict[Any, Any], prefix: str) -> Iterator[tuple[dict[Any, Any], Any, str]]:
    """Tensors and numbers of a parameter's state with their slots; nested dicts join their keys with dots."""
    import torch

    for key, value in state.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor | int | float):
            yield state, key, f"{prefix}{key}"


def _refuse(value: Any) -> Any:
    raise UnsafeError("a hyperparameter is an object that only code named in the checkpoint could create")
