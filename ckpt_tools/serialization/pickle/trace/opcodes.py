"""The opcodes of a recording: as lenient as CPython's unpickler is, where ``opcodes`` is strict.

What CPython refuses ends a recording too: nothing after it runs.
"""

from __future__ import annotations

from collections.abc import Callable

from ckpt_tools.core.values import GlobalRef, Value
from ckpt_tools.errors import MalformedError
from ckpt_tools.serialization.pickle.dcp_macros import RECORD_MACROS
from ckpt_tools.serialization.pickle.machine import Language, Machine, Step
from ckpt_tools.serialization.pickle.opcodes import STEPS, read_line, read_span
from ckpt_tools.serialization.pickle.trace import lenient
from ckpt_tools.serialization.pickle.trace.call_text import Elements, Made, Number, Pairs, shown
from ckpt_tools.serialization.pickle.trace.calls import called, hook, instance, made, set_state
from ckpt_tools.serialization.pickle.trace.recorder import Recorder

MAX_LONG_BYTES = 16
"""Width of integers that are made: the widest that means anything is the magic number of legacy torch files."""


def _stack_global(machine: Machine, at: int) -> int:
    """A name that is computed is none of the harmless ones."""
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) not in (str, Made) or type(module) not in (str, Made):
        machine.fail("a name that is not a string")
    machine.stack.append(machine.name(_part(module), _part(name)))
    return at


def _part(value: Value) -> str:
    return value if type(value) is str else f"({shown(value, 1)})"


def _reduce(machine: Machine, at: int) -> int:
    args, function = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(called(_recorder(machine), function, args))
    return at


def _recorder(machine: Machine) -> Recorder:
    assert isinstance(machine, Recorder), "these steps are in the language of a recorder alone"
    return machine


def _newobj(machine: Machine, at: int) -> int:
    args, kind = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(made(_recorder(machine), kind, args))
    return at


def _newobj_ex(machine: Machine, at: int) -> int:
    kwargs, args, kind = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.stack.append(made(_recorder(machine), kind, args, kwargs))
    return at


def _inst(machine: Machine, at: int) -> int:
    module, at = read_line(machine, at)
    name, at = read_line(machine, at)
    args = tuple(machine.pop_mark())
    machine.stack.append(instance(_recorder(machine), machine.name(module.decode(), name.decode()), args))
    return at


def _obj(machine: Machine, at: int) -> int:
    kind, *args = machine.pop_mark()
    machine.stack.append(instance(_recorder(machine), kind, tuple(args)))
    return at


def _extension(width: int) -> Step:
    def step(machine: Machine, at: int) -> int:
        code = int.from_bytes(machine.data[at : at + width], "little")
        machine.stack.append(machine.name("copyreg", f"_inverted_registry[{code}]"))
        return at + width

    return step


def _build(machine: Machine, at: int) -> int:
    state = machine.stack.pop()
    set_state(_recorder(machine), machine.stack[-1], state)
    return at


def _persistent_line(machine: Machine, at: int) -> int:
    pid, at = read_line(machine, at)
    _asked(_recorder(machine), pid.decode("ascii"))
    return at


def _persistent(machine: Machine, at: int) -> int:
    _asked(_recorder(machine), machine.stack.pop())
    return at


def _asked(machine: Recorder, pid: Value) -> None:
    machine.spend(4)
    machine.persistent_ids.append(pid)
    machine.stack.append(Made(_PERSISTENT_LOAD, (pid,)))


_PERSISTENT_LOAD = GlobalRef("Unpickler", "persistent_load")

# Containers: dicts and sets are lists, since nothing is looked up and keys are not to be hashed.


def _empty(kind: Callable[[], Value]) -> Step:
    def step(machine: Machine, at: int) -> int:
        machine.spend(1)
        machine.stack.append(kind())
        return at

    return step


def _listed(kind: Callable[[list[Value]], Value]) -> Step:
    def step(machine: Machine, at: int) -> int:
        items = machine.pop_mark()
        machine.stack.append(kind(items))
        return at

    return step


def _pairs(items: list[Value]) -> Pairs:
    if len(items) % 2:
        raise MalformedError("a key without a value")
    return Pairs(items)


def _append(machine: Machine, at: int) -> int:
    item = machine.stack.pop()
    _add(_recorder(machine), [item], "append", "extend")
    return at


def _appends(machine: Machine, at: int) -> int:
    items = machine.pop_mark()
    _add(_recorder(machine), items, "extend", "append")
    return at


def _additems(machine: Machine, at: int) -> int:
    items = machine.pop_mark()
    _add(_recorder(machine), items, "add", "update")
    return at


def _add(machine: Recorder, items: list[Value], *methods: str) -> None:
    target = machine.stack[-1]
    if isinstance(target, list):
        target.extend(items)
    elif type(target) is GlobalRef:
        machine.use(target, lambda: f"{target}.{methods[0]}({shown(items, 1)})")
    elif type(target) is not Made:
        machine.fail(f"it adds to a {type(target).__name__}")
    else:
        any(hook(machine, target, method, items if method == "extend" else items[0]) for method in methods if items)


def _setitem(machine: Machine, at: int) -> int:
    value, key = machine.stack.pop(), machine.stack.pop()
    _insert(_recorder(machine), [key, value])
    return at


def _setitems(machine: Machine, at: int) -> int:
    items = machine.pop_mark()
    _insert(_recorder(machine), items)
    return at


def _insert(machine: Recorder, items: list[Value]) -> None:
    target = machine.stack[-1]
    if type(target) is Pairs:
        target.extend(_pairs(items))
    elif type(target) is GlobalRef:
        machine.use(target, lambda: f"{target}[...] = {shown(items[1:2], 1)}")
    elif isinstance(target, list):
        target.extend(items[1::2])
    elif type(target) is not Made:
        machine.fail(f"it sets items of a {type(target).__name__}")


# Scalars of which unpicklers take more than genuine pickles hold


def _py2_text(width: int) -> Step:
    """A byte string of Python 2, in whatever encoding the loader was told."""

    def step(machine: Machine, at: int) -> int:
        start, stop = read_span(machine, at, width)
        machine.stack.append(machine.data[start:stop].decode("utf-8", "surrogateescape"))
        return stop

    return step


def _long(width: int, strict: Step) -> Step:
    def step(machine: Machine, at: int) -> int:
        start, stop = read_span(machine, at, width)
        if stop - start <= MAX_LONG_BYTES:
            return strict(machine, at)
        machine.stack.append(Number(stop - start))
        return stop

    return step


def _bytes(width: int) -> Step:
    def step(machine: Machine, at: int) -> int:
        start, stop = read_span(machine, at, width)
        machine.stack.append(machine.data[start:stop])
        _recorder(machine).strings.append(machine.stack[-1])
        return stop

    return step


_STEPS: list[Step] = list(STEPS)
for _opcode, _step in {
    b"\x80": lenient.proto,
    b"\x95": lenient.frame,
    b"I": lenient.int_line,
    b"L": lenient.long_line,
    b"F": lenient.float_line,
    b"S": lenient.quoted_line,
    b"V": lenient.unicode_line,
    b"2": lenient.dup,
    b"\x94": lenient.memoize,
    b"q": lenient.binput,
    b"r": lenient.long_binput,
    b"p": lenient.put_line,
    b"g": lenient.get_line,
    b"j": lenient.long_binget,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _newobj,
    b"\x92": _newobj_ex,
    b"i": _inst,
    b"o": _obj,
    b"b": _build,
    b"P": _persistent_line,
    b"Q": _persistent,
    b"\x82": _extension(1),
    b"\x83": _extension(2),
    b"\x84": _extension(4),
    b"T": _py2_text(4),
    b"U": _py2_text(1),
    b"\x8a": _long(1, STEPS[0x8A]),
    b"\x8b": _long(4, STEPS[0x8B]),
    b"C": _bytes(1),
    b"B": _bytes(4),
    b"\x8e": _bytes(8),
    b"}": _empty(Pairs),
    b"\x8f": _empty(Elements),
    b"d": _listed(_pairs),
    b"\x91": _listed(Elements),
    b"a": _append,
    b"e": _appends,
    b"\x90": _additems,
    b"s": _setitem,
    b"u": _setitems,
}.items():
    _STEPS[_opcode[0]] = _step

TRACING = Language(_STEPS, {}, RECORD_MACROS, leaves_out=False)
"""What a recorder understands."""
