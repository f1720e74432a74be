"""Pickles that call a function when a loader executes them, written opcode by opcode."""

import pickle
import struct
from collections.abc import Callable
from typing import Any


def arguments(args: tuple[Any, ...]) -> bytes:
    """The opcodes that push ``args`` as a tuple, in protocol 2."""
    return pushed(args)


def pushed(value: Any, *, protocol: int = 2) -> bytes:
    return pickle.dumps(value, protocol=protocol)[2:-1]


def first(args: tuple[Any, ...]) -> bytes:
    """The opcodes that push the first argument, if there is one."""
    return pushed(args[0] if args else None)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


Technique = Callable[[str, str, tuple[Any, ...]], bytes]

TECHNIQUES: dict[str, Technique] = {
    "GLOBAL REDUCE": lambda m, n, a: b"\x80\x02c%b\n%b\n%bR." % (m.encode(), n.encode(), arguments(a)),
    "STACK_GLOBAL REDUCE": lambda m, n, a: b"\x80\x04" + text(m) + text(n) + b"\x93" + arguments(a) + b"R.",
    "STACK_GLOBAL from memo": lambda m, n, a: (
        b"\x80\x04" + text(m) + b"\x940" + text(n) + b"\x940h\x00h\x01\x93" + arguments(a) + b"R."
    ),
    "INST": lambda m, n, a: b"(%bi%b\n%b\n." % (b"".join(map(pushed, a)), m.encode(), n.encode()),
    "OBJ": lambda m, n, a: b"(c%b\n%b\n%bo." % (m.encode(), n.encode(), b"".join(map(pushed, a))),
    "NEWOBJ": lambda m, n, a: b"\x80\x02c%b\n%b\n%b\x81." % (m.encode(), n.encode(), arguments(a)),
    "NEWOBJ_EX": lambda m, n, a: b"\x80\x04c%b\n%b\n%b}\x92." % (m.encode(), n.encode(), arguments(a)),
    "BUILD on the global": lambda m, n, a: b"c%b\n%b\n}Vx\nVy\nsb." % (m.encode(), n.encode()),
    "BUILD __setstate__": lambda m, n, a: (
        b"ccollections\nOrderedDict\n)R}V__setstate__\nc%b\n%b\nsb" % (m.encode(), n.encode()) + first(a) + b"b."
    ),
    "BUILD __setstate__ on a placeholder": lambda m, n, a: (
        b"csome\nClass\n)\x81}V__setstate__\nc%b\n%b\nsb" % (m.encode(), n.encode()) + first(a) + b"b."
    ),
    "slot state": lambda m, n, a: b"csome\nClass\n)\x81N}V__call__\nc%b\n%b\ns\x86b" % (m.encode(), n.encode()) + b".",
    "getattr chain": lambda m, n, a: (
        b"cbuiltins\ngetattr\n(cbuiltins\n__import__\nV%b\n\x85RV%b\ntR%bR." % (m.encode(), n.encode(), arguments(a))
    ),
    "inside torch.Size": lambda m, n, a: b"ctorch\nSize\nc%b\n%b\n%bR\x85R." % (m.encode(), n.encode(), arguments(a)),
    "in a rebuild": lambda m, n, a: (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(c%b\n%b\nctorch\nTensor\n%bNtR."
        % (m.encode(), n.encode(), arguments(a))
    ),
    "as a factory": lambda m, n, a: (
        b"ccollections\ndefaultdict\n(c%b\n%b\ntR%b0." % (m.encode(), n.encode(), arguments(a))
    ),
    "as a dict key": lambda m, n, a: b"}c%b\n%b\n%bRNs." % (m.encode(), n.encode(), arguments(a)),
    "APPENDS on the global": lambda m, n, a: b"c%b\n%b\n(NNe." % (m.encode(), n.encode()),
    "in a DCP record": lambda m, n, a: (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}Vstate_dict_metadata\nc%b\n%b\n%bRsb."
        % (m.encode(), n.encode(), arguments(a))
    ),
    "_reconstructor": lambda m, n, a: (
        b"ccopy_reg\n_reconstructor\n(c%b\n%b\ncbuiltins\nobject\nNtR." % (m.encode(), n.encode())
    ),
    "nested": lambda m, n, a: (
        b"\x80\x03cpickle\nloads\nC"
        + bytes([len(inner := b"c%b\n%b\n)R." % (m.encode(), n.encode()))])
        + inner
        + b"\x85R."
    ),
    "trailing": lambda m, n, a: b"N.c%b\n%b\n%bR." % (m.encode(), n.encode(), arguments(a)),
    "persistent id": lambda m, n, a: b"c%b\n%b\n%bRQ." % (m.encode(), n.encode(), arguments(a)),
    "attrgetter chain": lambda m, n, a: (
        b"coperator\nattrgetter\nV%b\n\x85Rcbuiltins\n__import__\nV%b\n\x85R\x85R%bR."
        % (n.encode(), m.encode(), arguments(a))
    ),
    "functools.partial": lambda m, n, a: (
        b"cfunctools\npartial\n(c%b\n%b\n%btR)R." % (m.encode(), n.encode(), b"".join(map(pushed, a)))
    ),
    "functools.reduce": lambda m, n, a: (
        b"cfunctools\nreduce\n(c%b\n%b\n(%bltR." % (m.encode(), n.encode(), b"".join(map(pushed, a)))
    ),
    "map in a list": lambda m, n, a: (
        b"cbuiltins\nlist\ncbuiltins\nmap\n(c%b\n%b\n(%bltR\x85R." % (m.encode(), n.encode(), first(a))
    ),
    "extension registry": lambda m, n, a: (
        b"\x80\x02ccopyreg\nadd_extension\n(V%b\nV%b\nK\xf0tR0\x82\xf0%bR." % (m.encode(), n.encode(), arguments(a))
    ),
    "append of its own": lambda m, n, a: (
        b"ccollections\nOrderedDict\n)R}Vappend\nc%b\n%b\nsb%ba." % (m.encode(), n.encode(), first(a))
    ),
    "extend of its own": lambda m, n, a: (
        b"ccollections\nOrderedDict\n)R}Vextend\nc%b\n%b\nsb(%be." % (m.encode(), n.encode(), first(a))
    ),
    "add of its own": lambda m, n, a: (
        b"\x80\x04ccollections\nOrderedDict\n)R}Vadd\nc%b\n%b\nsb(%b\x90." % (m.encode(), n.encode(), first(a))
    ),
    "__newobj__": lambda m, n, a: (
        b"ccopy_reg\n__newobj__\n(c%b\n%b\n%btR." % (m.encode(), n.encode(), b"".join(map(pushed, a)))
    ),
    "base of _reconstructor": lambda m, n, a: (
        b"ccopy_reg\n_reconstructor\n(cbuiltins\nobject\nc%b\n%b\n%btR." % (m.encode(), n.encode(), first(a))
    ),
    "rebuild with a list": lambda m, n, a: (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(c%b\n%b\nctorch\nTensor\n(%blNtR."
        % (m.encode(), n.encode(), b"".join(map(pushed, a)))
    ),
    "state of a rebuild": lambda m, n, a: (
        b"ctorch._utils\n_rebuild_parameter_with_state\n(NI01\nN}V__setstate__\nc%b\n%b\nstR%bb."
        % (m.encode(), n.encode(), first(a))
    ),
    "constructor of numpy": lambda m, n, a: (
        b"cnumpy.random._pickle\n__randomstate_ctor\n(%bc%b\n%b\ntR." % (first(a), m.encode(), n.encode())
    ),
    "numpy object": lambda m, n, a: (
        b"cnumpy._core.multiarray\nscalar\n(cnumpy\ndtype\n(VO\ntRc%b\n%b\n%bRtR."
        % (m.encode(), n.encode(), arguments(a))
    ),
    "wrapper of torch": lambda m, n, a: (
        b"ctorch._utils\n_rebuild_wrapper_subclass\n(c%b\n%b\n%bRNtR." % (m.encode(), n.encode(), arguments(a))
    ),
    "in _load_from_bytes": lambda m, n, a: _with_bytes(b"ctorch.storage\n_load_from_bytes\n", m, n, a),
    "in _pickle.loads": lambda m, n, a: _with_bytes(b"c_pickle\nloads\n", m, n, a),
    "twice nested": lambda m, n, a: _loading(_loading(TECHNIQUES["GLOBAL REDUCE"](m, n, a))),
    "after a first": lambda m, n, a: b"\x80\x04N.\x80\x02}." + TECHNIQUES["STACK_GLOBAL REDUCE"](m, n, a),
    "name from a call": lambda m, n, a: (
        b"\x80\x04cbuiltins\nstr\n(V%b\ntRV%b\n\x93%bR." % (m.encode(), n.encode(), arguments(a))
    ),
    "popped": lambda m, n, a: b"c%b\n%b\n%bR0N." % (m.encode(), n.encode(), arguments(a)),
    "cut off afterwards": lambda m, n, a: b"\x80\x02c%b\n%b\n%bR}" % (m.encode(), n.encode(), arguments(a)),
}


def _with_bytes(function: bytes, module: str, name: str, args: tuple[Any, ...]) -> bytes:
    return b"\x80\x03" + function + pushed(TECHNIQUES["GLOBAL REDUCE"](module, name, args), protocol=3) + b"\x85R."


def _loading(data: bytes) -> bytes:
    return b"\x80\x03cpickle\nloads\n" + pushed(data, protocol=3) + b"\x85R."
