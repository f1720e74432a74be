"""What a pickle would have a loader run: the same machine, which records instead of refusing.

``pickles.loads`` may refuse whatever no genuine checkpoint holds; here every pickle that CPython's unpickler takes has
to be followed to where it does its harm, and what it does there is written down as the call that it is. Values are kept
only as far as calls need them to be shown: what was made of a name is a ``Made``, dicts and sets are lists that nothing
is ever looked up in, so that no key is hashed. What cannot be followed ends the recording with its reason; the caller
takes that for a finding too.

A call of a harmless name (``harmless``) is none, unless its arguments make it one. A name that is not harmless is a
finding as soon as it stands there: a loader imports its module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.containers.unpickler.harmless import may_be_called, may_be_named
from ckpt_tools.containers.unpickler.machine import Language, Machine, Step, Stop
from ckpt_tools.containers.unpickler.macros import MACROS
from ckpt_tools.containers.unpickler.opcodes import STEPS, read_line, read_span
from ckpt_tools.errors import MalformedError
from ckpt_tools.values import GlobalRef, Value

MAX_USES = 100
"""Calls of one pickle that are written out; more are counted."""

MAX_SHOWN_CHARS = 200
"""Length of a call as it is shown."""

_MAX_STRING_CHARS = 100
_MAX_LONG_BYTES = 16
_MAX_SHOWN_ITEMS = 8
_MAX_SHOWN_DEPTH = 4

_HOOKS = frozenset({"__setstate__", "append", "extend", "add"})
"""Attributes of an object itself that unpicklers call (Modules/_pickle.c load_build, do_append, load_additems)."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a loader would run or import at byte ``at`` of the data: ``os.system('id')``, or a bare name."""

    at: int
    shown: str


@dataclass(frozen=True, slots=True)
class Recording:
    """What one pickle would do.

    ``uses`` are the first ``MAX_USES`` of ``num_uses``; ``stop`` is where its last opcode ended; ``failure`` says why
    it could not be followed further, ``is_cut`` that the data ended too early; ``nested`` are byte strings it gives to
    something that may unpickle them, ``persistent_ids`` what it asks its loader for, ``value`` what it holds.
    """

    uses: tuple[Use, ...]
    num_uses: int
    stop: int
    failure: str | None
    is_cut: bool
    nested: tuple[bytes, ...]
    persistent_ids: tuple[Value, ...]
    value: Value


class Made:
    """What a loader would have made of a name or of another object; ``hooks`` are attributes that it would call."""

    __slots__ = ("args", "form", "hooks", "of")

    def __init__(self, of: Value, args: tuple[Value, ...], form: str = "") -> None:
        self.of = of
        self.args = args
        self.form = form
        self.hooks: dict[str, Value] | None = None


class Pairs(list[Value]):
    """A dict: keys and values in turn."""


class Elements(list[Value]):
    """A set."""


@dataclass(frozen=True, slots=True)
class Number:
    """An integer too long to be worth making."""

    num_bytes: int


class Recorder(Machine):
    """A machine that notes what is not harmless, with the position at which it happens."""

    __slots__ = ("called", "imported", "nested", "num_uses", "persistent_ids", "uses")

    def __init__(self, data: bytes) -> None:
        super().__init__(data, _LANGUAGE, None)
        self.uses: list[Use] = []
        self.num_uses = 0
        self.imported: dict[GlobalRef, Use] = {}
        self.called: set[GlobalRef] = set()
        self.nested: list[bytes] = []
        self.persistent_ids: list[Value] = []

    def record(self) -> Recording:
        """Follow the pickle up to STOP. Raises MemoryError only."""
        steps, data, position, failure = self.language.steps, self.data, 0, None
        try:
            while True:
                self.position = position
                position = steps[data[position]](self, position + 1)
        except Stop:
            failure = None if self.stack else f"the pickle is malformed at byte {position:,}: it ends without a value"
        except MalformedError as error:
            failure = error.message
        except MemoryError:
            raise
        except Exception as error:
            # An opcode without its operands meets an empty stack, a short slice or a wrong type.
            reason = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
            failure = f"the pickle is malformed at byte {self.position:,}: {reason}"
        return self._recording(failure)

    def _recording(self, failure: str | None) -> Recording:
        imports = [use for ref, use in self.imported.items() if ref not in self.called]
        uses = sorted(self.uses + imports, key=lambda use: use.at)
        return Recording(
            uses=tuple(uses[:MAX_USES]),
            num_uses=self.num_uses + len(imports),
            stop=self.position + 1,
            failure=failure,
            is_cut=failure is not None and _is_cut(self.data, self.position),
            nested=tuple(self.nested),
            persistent_ids=tuple(self.persistent_ids),
            value=self.stack[-1] if failure is None and self.stack else None,
        )

    def name(self, module: str, name: str) -> GlobalRef:
        """As the machine's; one that is not harmless is noted where it is first met."""
        ref = super().name(module, name)
        if not may_be_named(ref.module, ref.name) and ref not in _RULES and ref not in self.imported:
            self.imported[ref] = Use(self.position, _cut(str(ref)))
        return ref

    def use(self, shown: str, *refs: Value) -> None:
        """Note a call; the names that it shows need not be noted by themselves."""
        self.num_uses += 1
        self.called.update(ref for ref in refs if type(ref) is GlobalRef)
        if len(self.uses) < MAX_USES:
            self.uses.append(Use(self.position, _cut(shown)))

    def bury(self, values: Iterable[Value]) -> None:
        """Keep the byte strings among ``values``, which may be pickles that what gets them reads."""
        found = [bytes(value) for value in values if type(value) in (bytes, bytearray) and len(value) > 1]
        self.copied(found)
        self.nested.extend(found[: MAX_USES - len(self.nested)])


# Calls


def called(machine: Recorder, function: Value, args: Value) -> Value:
    machine.spend(4)
    if type(args) is Made:
        args = (args,)
    if type(args) is not tuple:
        machine.fail("arguments that are no tuple")
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
    machine.use(_call(function, args), function, *_names_in(function))
    machine.bury(args)


def _names_in(function: Value) -> Sequence[Value]:
    """The names that a computed function is shown with: those of one ``getattr``, for example."""
    return function.args[:_MAX_SHOWN_ITEMS] if type(function) is Made else ()


def made(machine: Recorder, kind: Value, args: Value, kwargs: Value = None) -> Value:
    machine.spend(4)
    if type(args) is not tuple:
        args = (args,)
    if type(kwargs) is Pairs and kwargs:
        args = (*args, kwargs)
    if type(kind) not in (GlobalRef, Made):
        machine.fail(f"an object of a {type(kind).__name__}, which is no class")
    if not _may_be_made(kind, args):
        machine.use(_call(kind, args, ".__new__"), kind)
        machine.bury(args)
    return Made(kind, args, ".__new__")


def _may_be_made(kind: Value, args: tuple[Value, ...]) -> bool:
    """With arguments, ``__new__`` may do what a call does."""
    if type(kind) is not GlobalRef:
        return False
    return may_be_called(kind.module, kind.name) or (not args and may_be_named(kind.module, kind.name))


def _encode(machine: Recorder, args: tuple[Value, ...]) -> Value:
    """``_codecs.encode(text, "latin1")`` is how protocol 2 writes bytes; others import the codec they name."""
    machine.copied(args)
    if len(args) == 2 and type(args[0]) is str and args[1] in ("latin1", "latin-1"):
        return args[0].encode("latin-1")
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
    value = called(machine, function, inner)
    return _with_state(machine, Made(_FROM_TYPE, (value, kind)), state)


def _parameter_with_state(machine: Recorder, args: tuple[Value, ...]) -> Value:
    return _with_state(machine, Made(_PARAMETER_WITH_STATE, args[:-1]), args[-1])


def _with_state(machine: Recorder, target: Made, state: Value) -> Made:
    _set_state(machine, target, state)
    return target


def _from_bytes(machine: Recorder, args: tuple[Value, ...]) -> Value:
    """``torch.load`` of the bytes: how storages are pickled outside of torch.save."""
    if len(args) != 1 or type(args[0]) is not bytes:
        return _reported(machine, _FROM_BYTES, args)
    machine.bury(args)
    return Made(_FROM_BYTES, args)


def _reconstructor(machine: Recorder, args: tuple[Value, ...]) -> Value:
    """``base.__new__(kind, state)``, then ``base.__init__`` with it where that is another than ``object``'s."""
    kind, base, state = args
    if base != _OBJECT:
        called(machine, base, (state,))
    return made(machine, kind, ())


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
    GlobalRef("copyreg", "__newobj__"): lambda machine, args: made(machine, args[0], args[1:]),
    GlobalRef("copyreg", "__newobj_ex__"): lambda machine, args: made(machine, *args),
}
"""Calls that depend on their arguments, or that call one of them."""

# Opcodes


def _stack_global(machine: Machine, at: int) -> int:
    """A name that is computed is none of the harmless ones."""
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) not in (str, Made) or type(module) not in (str, Made):
        machine.fail("a name that is no string")
    machine.stack.append(machine.name(_part(module), _part(name)))
    return at


def _part(value: Value) -> str:
    return value if type(value) is str else f"({_shown(value, 1)})"


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
    machine.stack.append(_instance(_recorder(machine), machine.name(module.decode(), name.decode()), args))
    return at


def _obj(machine: Machine, at: int) -> int:
    kind, *args = machine.pop_mark()
    machine.stack.append(_instance(_recorder(machine), kind, tuple(args)))
    return at


def _instance(machine: Recorder, kind: Value, args: tuple[Value, ...]) -> Value:
    """An old-style instance: a call. Without arguments, a class is made without one, but a function is called."""
    if args or not _may_be_made(kind, args):
        return called(machine, kind, args)
    return made(machine, kind, args)


def _extension(width: int) -> Step:
    def step(machine: Machine, at: int) -> int:
        code = int.from_bytes(machine.data[at : at + width], "little")
        machine.stack.append(machine.name("copyreg", f"_inverted_registry[{code}]"))
        return at + width

    return step


def _build(machine: Machine, at: int) -> int:
    state = machine.stack.pop()
    _set_state(_recorder(machine), machine.stack[-1], state)
    return at


def _set_state(machine: Recorder, target: Value, state: Value) -> None:
    if type(target) is GlobalRef:
        machine.use(f"{target}.__setstate__({_shown(state, 1)})", target)
    elif type(target) is Made:
        _set_hooks(machine, target, state)


def _set_hooks(machine: Recorder, target: Made, state: Value) -> None:
    if target.hooks and "__setstate__" in target.hooks:
        _hook(machine, target, "__setstate__", state)
    for part in state if type(state) is tuple and len(state) == 2 else (state,):
        if type(part) is Pairs:
            found = {key: value for key, value in _items(part) if type(key) is str and key in _HOOKS}
            target.hooks = {**(target.hooks or {}), **found} or None


def _items(pairs: Pairs) -> Iterable[tuple[Value, Value]]:
    return zip(pairs[::2], pairs[1::2], strict=True)


def _hook(machine: Recorder, target: Made, name: str, argument: Value) -> bool:
    """Call what an object was given as its attribute ``name``; False where it was given nothing."""
    if not target.hooks or name not in target.hooks:
        return False
    called(machine, target.hooks[name], (argument,))
    return True


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
        machine.use(f"{target}.{methods[0]}({_shown(items, 1)})", target)
    elif type(target) is not Made:
        machine.fail(f"it adds to a {type(target).__name__}")
    else:
        any(_hook(machine, target, method, items if method == "extend" else items[0]) for method in methods if items)


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
        machine.use(f"{target}[...] = {_shown(items[1:2], 1)}", target)
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
        if stop - start <= _MAX_LONG_BYTES:
            return strict(machine, at)
        machine.stack.append(Number(stop - start))
        return stop

    return step


_STEPS: list[Step] = list(STEPS)
for _opcode, _step in {
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

_LANGUAGE = Language(_STEPS, {}, MACROS)

# Data that ends within an opcode

_LENGTHS = {b"U": 1, b"C": 1, b"\x8c": 1, b"\x8a": 1, b"T": 4, b"B": 4, b"X": 4, b"\x8b": 4, b"\x8d": 8, b"\x8e": 8,
            b"\x96": 8, b"\x95": 8}  # fmt: skip
_LINES = {b"I": 1, b"L": 1, b"F": 1, b"V": 1, b"S": 1, b"P": 1, b"p": 1, b"g": 1, b"c": 2, b"i": 2}
_LONGEST_FIXED_BYTES = 9


def _is_cut(data: bytes, position: int) -> bool:
    """Whether the opcode at ``position`` needs more than there is of ``data``."""
    opcode = data[position : position + 1]
    if opcode in _LENGTHS:
        start = position + 1 + _LENGTHS[opcode]
        return start > len(data) or start + int.from_bytes(data[position + 1 : start], "little") > len(data)
    if opcode in _LINES:
        return data.count(b"\n", position) < _LINES[opcode]
    return not opcode or (position + _LONGEST_FIXED_BYTES > len(data) and opcode in b"JKMGhjqr\x80\x82\x83\x84")


# Showing calls


def _call(function: Value, args: tuple[Value, ...], form: str = "", depth: int = 1) -> str:
    return f"{_shown(function, depth)}{form}({_listing(args, depth)})"


def _listing(values: Sequence[Value], depth: int) -> str:
    more = ", ..." if len(values) > _MAX_SHOWN_ITEMS else ""
    return ", ".join(_shown(value, depth + 1) for value in values[:_MAX_SHOWN_ITEMS]) + more


def _shown(value: Value, depth: int) -> str:
    """``value`` as Python code, cut where it gets long or deep."""
    if type(value) is GlobalRef:
        return str(value)
    if isinstance(value, str | bytes | bytearray):
        return repr(value[:_MAX_STRING_CHARS]) + ("..." if len(value) > _MAX_STRING_CHARS else "")
    if type(value) is Number:
        return f"<an integer of {value.num_bytes:,} bytes>"
    if value is None or isinstance(value, int | float):
        return repr(value) if type(value) is not int or abs(value) < 1 << 64 else "<a large integer>"
    return "..." if depth > _MAX_SHOWN_DEPTH else _compound(value, depth)


def _compound(value: Value, depth: int) -> str:
    if type(value) is Made:
        return _call(value.of, value.args, value.form, depth)
    if type(value) is Pairs:
        shown = [f"{_shown(key, depth + 1)}: {_shown(item, depth + 1)}" for key, item in _items(_head(value))]
        return "{" + ", ".join(shown) + (", ..." if len(value) > 2 * _MAX_SHOWN_ITEMS else "") + "}"
    if type(value) is tuple:
        return f"({_listing(value, depth)}{',' if len(value) == 1 else ''})"
    if type(value) is Elements:
        return "{" + _listing(value, depth) + "}" if value else "set()"
    return f"[{_listing(value, depth)}]" if type(value) is list else type(value).__name__


def _head(pairs: Pairs) -> Pairs:
    return Pairs(pairs[: 2 * _MAX_SHOWN_ITEMS])


def _cut(shown: str) -> str:
    """One line without anything that a terminal would obey."""
    short = shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in short)
