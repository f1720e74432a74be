"""Which calls a recording notes: those of a name that the closed list does not know, or of what another call gave.

Some names call one of their arguments, or are listed with a few arguments alone: each has a rule here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckpt_tools.core.values import GlobalRef, Value
from ckpt_tools.serialization.pickle.closed_list import is_listed, may_be_called
from ckpt_tools.serialization.pickle.trace.call_text import Made, Pairs, call_text, items_of, shown
from ckpt_tools.serialization.pickle.trace.recorder import Recorder

_HOOKS = frozenset({"__setstate__", "append", "extend", "add"})
"""Attributes of an object itself that unpicklers call (Modules/_pickle.c load_build, do_append, load_additems)."""


def called(machine: Recorder, function: Value, args: Value) -> Value:
    machine.spend(4)
    if type(args) is Made:
        args = (args,)
    if type(args) is not tuple:
        machine.fail("arguments that are not a tuple")
    if type(function) is GlobalRef:
        rule = _RULES.get(function)
        if rule is not None:
            return rule(machine, args)
        if not may_be_called(function.module, function.name):
            _use_of(machine, function, args)
    elif type(function) is Made:
        _use_of(machine, function, args)
    else:
        machine.fail(f"a {type(function).__name__} is called")
    return Made(function, args)


def _use_of(machine: Recorder, function: Value, args: tuple[Value, ...]) -> None:
    machine.use(function, lambda: call_text(function, args))
    machine.bury(args)


def made(machine: Recorder, kind: Value, args: Value, kwargs: Value = None) -> Value:
    machine.spend(4)
    if type(args) is not tuple:
        args = (args,)
    if type(kwargs) is Pairs and kwargs:
        machine.copied(args)
        args = (*args, kwargs)
    if type(kind) not in (GlobalRef, Made):
        machine.fail(f"an object of a {type(kind).__name__}, which is not a class")
    if not _may_be_made(kind, args):
        machine.use(kind, lambda: call_text(kind, args, ".__new__"))
        machine.bury(args)
    return Made(kind, args, ".__new__")


def _may_be_made(kind: Value, args: tuple[Value, ...]) -> bool:
    """With arguments, ``__new__`` may do what a call does."""
    if type(kind) is not GlobalRef:
        return False
    return may_be_called(kind.module, kind.name) or (not args and is_listed(kind.module, kind.name))


def _encode(machine: Recorder, args: tuple[Value, ...]) -> Value:
    """``_codecs.encode(text, "latin1")`` is how protocol 2 writes bytes; others import the codec they name."""
    machine.copied(args)
    if len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1"):
        machine.strings.append(args[0].encode("latin-1"))
        return machine.strings[-1]
    return _reported(machine, _ENCODE, args)


def _bytearray(machine: Recorder, args: tuple[Value, ...]) -> Value:
    machine.copied(args)
    return bytearray(args[0]) if len(args) == 1 and type(args[0]) is bytes else Made(_BYTEARRAY, args)


def _reported(machine: Recorder, function: GlobalRef, args: tuple[Value, ...]) -> Value:
    _use_of(machine, function, args)
    return Made(function, args)


def _getattr(machine: Recorder, args: tuple[Value, ...]) -> Value:
    """``OneCycleLR`` of torch before 2.4 kept its annealing function, which protocols below 4 look up."""
    if len(args) == 2 and args[0] == _ONE_CYCLE and args[1] in ("_annealing_cos", "_annealing_linear"):
        return Made(_GETATTR, args)
    return _reported(machine, _GETATTR, args)


def _from_type(machine: Recorder, args: tuple[Value, ...]) -> Value:
    """``_rebuild_from_type_v2(function, kind, args, state)``: a call, and a state for what it gives."""
    function, kind, inner, state = args
    if type(inner) is list:
        machine.copied(inner)
        inner = tuple(inner)
    value = called(machine, function, inner if type(inner) is tuple else (inner,))
    return _with_state(machine, Made(_FROM_TYPE, (value, kind)), state)


def _parameter_with_state(machine: Recorder, args: tuple[Value, ...]) -> Value:
    data, requires_grad, hooks, state = args
    return _with_state(machine, Made(_PARAMETER_WITH_STATE, (data, requires_grad, hooks)), state)


def _with_state(machine: Recorder, target: Made, state: Value) -> Made:
    set_state(machine, target, state)
    return target


def _from_bytes(machine: Recorder, args: tuple[Value, ...]) -> Value:
    """``torch.load`` of the bytes: how storages are pickled outside of torch.save."""
    if len(args) != 1 or type(args[0]) is not bytes:
        return _reported(machine, _FROM_BYTES, args)
    return Made(_FROM_BYTES, args)


def _reconstructor(machine: Recorder, args: tuple[Value, ...]) -> Value:
    """``base.__new__(kind, state)``, then ``base.__init__`` with it where that is another than ``object``'s."""
    kind, base, state = args
    if base != _OBJECT:
        called(machine, base, (state,))
    return made(machine, kind, ())


def _newobj(machine: Recorder, args: tuple[Value, ...]) -> Value:
    machine.copied(args)
    return made(machine, args[0], args[1:])


_ENCODE = GlobalRef("_codecs", "encode")
_BYTEARRAY = GlobalRef("builtins", "bytearray")
_GETATTR = GlobalRef("builtins", "getattr")
_OBJECT = GlobalRef("builtins", "object")
_ONE_CYCLE = GlobalRef("torch.optim.lr_scheduler", "OneCycleLR")
_FROM_TYPE = GlobalRef("torch._tensor", "_rebuild_from_type_v2")
_PARAMETER_WITH_STATE = GlobalRef("torch._utils", "_rebuild_parameter_with_state")
_FROM_BYTES = GlobalRef("torch.storage", "_load_from_bytes")

_RULES: Mapping[GlobalRef, Callable[[Recorder, tuple[Value, ...]], Value]] = {
    _ENCODE: _encode,
    _BYTEARRAY: _bytearray,
    _GETATTR: _getattr,
    _FROM_TYPE: _from_type,
    GlobalRef("torch._tensor", "_rebuild_from_type"): _from_type,
    _PARAMETER_WITH_STATE: _parameter_with_state,
    _FROM_BYTES: _from_bytes,
    GlobalRef("copyreg", "_reconstructor"): _reconstructor,
    GlobalRef("copyreg", "__newobj__"): _newobj,
    GlobalRef("copyreg", "__newobj_ex__"): lambda machine, args: made(machine, *args),
}
"""Calls that depend on their arguments, or that call one of them."""


def instance(machine: Recorder, kind: Value, args: tuple[Value, ...]) -> Value:
    """An old-style instance: a call. Without arguments, a class is made without one, but a function is called."""
    if args or not _may_be_made(kind, args):
        return called(machine, kind, args)
    return made(machine, kind, args)


def set_state(machine: Recorder, target: Value, state: Value) -> None:
    if type(target) is GlobalRef:
        machine.use(target, lambda: f"{target}.__setstate__({shown(state, 1)})")
    elif type(target) is Made:
        _set_hooks(machine, target, state)


def _set_hooks(machine: Recorder, target: Made, state: Value) -> None:
    if target.hooks and "__setstate__" in target.hooks:
        hook(machine, target, "__setstate__", state)
    for part in state if type(state) is tuple and len(state) == 2 else (state,):
        if type(part) is Pairs:
            machine.copied(part)
            found = {key: value for key, value in items_of(part) if type(key) is str and key in _HOOKS}
            target.hooks = {**(target.hooks or {}), **found} or None


def hook(machine: Recorder, target: Made, name: str, argument: Value) -> bool:
    """Call what an object was given as its attribute ``name``; False where it was given nothing."""
    if not target.hooks or name not in target.hooks:
        return False
    called(machine, target.hooks[name], (argument,))
    return True
