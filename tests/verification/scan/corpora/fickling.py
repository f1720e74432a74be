"""What fickling's tests judge (test/ at commit 854c99a, 19 commits after release 0.1.12).

Pickles that several of its tests build are here once. Its tests of limits count opcodes of the same pickles.
"""

import marshal
import pickle
from typing import Any

import numpy as np
import torch

from tests.serialization.archives import npy, saved, saved_legacy, tarred, zipped
from tests.serialization.hostile import TECHNIQUES
from tests.verification.scan.corpora.build import Global, Label, call, entries, framed, pickled, raw, seven_zip
from tests.verification.scan.generator import CODE, Files

GETATTR = "builtins:getattr"
_PRINT = marshal.dumps(compile("x = 1", "<x>", "exec"))

ADVISED: dict[str, tuple[Any, str]] = {
    "missing pty": (call("pty:spawn", "x", state="x"), "GHSA-r7v6-mfhq-g3m2"),
    "missing marshal and types": (
        call(call("types:FunctionType", call("marshal:loads", _PRINT), {}), state="x"),
        "GHSA-565g-hwwr-4pp3",
    ),
    "missing runpy": (call("runpy:run_path", "/tmp/x.py"), "GHSA-wfq2-52f7-7qvj"),
    "missing cProfile": (call("cProfile:run", CODE), "GHSA-p523-jq9w-64x9"),
    "missing ctypes": (call(call(GETATTR, call("ctypes:CDLL", "libc.so.6"), "system"), b"x"), "GHSA-q5qq-mvfm-j35x"),
    "missing pydoc": (call(call("pydoc:locate", "os.system"), "x"), "GHSA-5hvc-6wx8-mvv4"),
    "missing importlib": (
        call(call(GETATTR, call("importlib:import_module", "os"), "system"), "x"),
        "GHSA-q5qq-mvfm-j35x",
    ),
    "missing code": (
        call(call(GETATTR, call("code:InteractiveInterpreter"), "runsource"), CODE),
        "GHSA-q5qq-mvfm-j35x",
    ),
    "missing multiprocessing": (
        call("multiprocessing.util:spawnv_passfds", b"/bin/sh", [b"/bin/sh", b"-c", b"x"], ()),
        "GHSA-q5qq-mvfm-j35x",
    ),
    "operator methodcaller": (
        call(call("_operator:methodcaller", "system", "x"), call("builtins:__import__", "os")),
        "GHSA-955r-x9j8-7rhh",
    ),
    "distutils write_file": (call("distutils.file_util:write_file", "x.txt", ["x"]), "GHSA-m273-6v24-x4m4"),
    "numpy f2py getlincoef": (call("numpy.f2py.crackfortran:getlincoef", CODE, {}), "GHSA-r8g5-cgf2-4m4m"),
    "asyncio subprocess": (
        call("asyncio.unix_events:_UnixSubprocessTransport._start", {}, "x", True, None, None, None, 0),
        "GHSA-f7qq-56ww-84cr",
    ),
    "missing uuid": (call("uuid:_get_command_stdout", "echo", "x"), "GHSA-5hwf-rc88-82xm"),
    "missing aix_support": (call("_aix_support:_read_cmd_output", "x"), "GHSA-5hwf-rc88-82xm"),
    "missing osx_support": (call("_osx_support:_find_build_tool", "x"), "GHSA-5hwf-rc88-82xm"),
    "dotted attribute of a stdlib module": (call("pathlib:os.system"), "GHSA-5j3x-jp52-966f"),
    "a name outside of the ML allowlist": (Global("ast:parse"), "GHSA-cffv-grgg-g429"),
    "private interpreters": (call("_interpreters:create"), "GHSA-6ggj-6f2q-f7mx"),
    "private subinterpreters": (call("_xxsubinterpreters:create"), "GHSA-6ggj-6f2q-f7mx"),
}
"""What was reported, and by which advisory."""

_PORTS = {
    "smtplib:SMTP": 25,
    "imaplib:IMAP4": 143,
    "ftplib:FTP": 21,
    "poplib:POP3": 110,
    "telnetlib:Telnet": 23,
    "nntplib:NNTP": 119,
}
_LISTED = """
    torch.hub:dangerous torch._dynamo:dangerous torch._inductor:dangerous torch.jit:dangerous torch.compile:dangerous
    numpy.f2py:dangerous numpy.distutils:dangerous torch:load torch:compile torch.storage:_load_from_bytes
    torch.utils._config_module:ConfigModule torch.distributed.elastic.rendezvous.api:basichandlers
    numpy.testing._private.utils:runstring _io:FileIO _io:open io:FileIO io:open
    fickling.hook:remove_hook fickling.hook:deactivate_safe_ml_environment fickling:some_func picklescan:some_func
    modelscan:some_func model_unpickler:some_func saferpickle:some_func modelaudit:some_func
"""
"""Names of fickling's own lists, and functions of scanners; each is called without arguments."""

CALLS: dict[str, Any] = {
    **{name: found for name, (found, _) in ADVISED.items()},
    **{f"network: {name}": call(name, "127.0.0.1", port, state={}) for name, port in _PORTS.items()},
    **{f"listed: {name}": call(name) for name in _LISTED.split()},
    "builtin getattr": call(GETATTR, "os", "system"),
    "builtin eval": call("builtins:eval", CODE),
    "_io FileIO": call("_io:FileIO", "/etc/passwd"),
    "__future__, and a name of another module": Global("__future__:_ssl.RAND_bytes"),
    "payload": call("posix:system", "x"),
    "nested in torch.storage": call(
        "_pickle:loads",
        pickled(call("torch.storage:_load_from_bytes", pickled(call("posix:system", "x")))),
    ),
    "name made by itemgetter and join": call(
        call(GETATTR, "", "join"), call(call("operator:itemgetter", 0, 1), "osytem")
    ),
}

_EVAL = call("builtins:eval", CODE)
_HIDDEN = b"cos\nsystem\nVx\n\x85R"
_LIST = pickled([1, 2, 3, 4])
_ITEMS = raw([1, 2, 3, 4])

_NUMPY = (
    b"\x80\x04(\x8c\x05numpy\x8c\x06poly1d\x93\x94\x8c\x05numpy\x8c\x04size\x93\x94\x8c\x05numpy\x8c\x0c__builtins__\x93\x94"
    b"h\x00N\x85R\x94h\x03\x94h\x02\x94h\x04(\x8c\x05shapeh\x05dbh\x01h\x04\x8c\x04eval\x86RV%b\n\x85R1N."
    % CODE.encode()
)
"""``numpy.size`` takes ``eval`` out of the builtins of numpy, which are set as the shape of an object."""

FORGED: dict[str, bytes] = {
    "OBJ": TECHNIQUES["OBJ"]("pty", "spawn", ("x",)),
    "OBJ of os.system": TECHNIQUES["OBJ"]("os", "system", ("x",)),
    "OBJ and POP": b"\x80\x04(\x8c\x07smtplib\x8c\x04SMTP\x93\x8c\x09127.0.0.1o0N.",
    "remove_hook by GLOBAL": b"cfickling.hook\nremove_hook\n)R.",
    "import by GLOBAL, dropped and kept in the memo": (
        b"cbuiltins\n__import__\nS'os'\n\x85Rp0\n0cbuiltins\ngetattr\ng0\nS'system'\n\x86Rp1\n0g1\nS'x'\n\x85R."
    ),
    "POP_MARK": _NUMPY,
    "a frame that ends within bytes": (
        b"\x80\x05NV"
        + b"a" * (8192 * 16 - 17)
        + b"\n0(\x95\x02\0\0\0\0\0\0\0B\x07\x01\0\0\0\0"
        + (_HIDDEN + b"(").ljust(261, b"N")
        + b"1."
    ),
    "a frame within BINBYTES": framed(b"B\x14\0\0\0" + b"A" * 20 + b".", 5),
    "a frame within SHORT_BINUNICODE": framed(b"\x8c\x14" + b"A" * 20 + b".", 3),
    "a frame within the module of GLOBAL": framed(b"cmacos\nsystem\n.", 4),
    "a frame within the name of GLOBAL": framed(b"cos\nsystem\n.", 7),
    "a frame within UNICODE": framed(b"Vhello world\n.", 5),
    "a frame within BININT": framed(b"J\x07\0\0\0.", 2),
    "a frame within a frame": framed(b"N\x95\x02\0\0\0\0\0\0\0N.", 30),
    "eval inserted first": b"\x80\x04" + raw(_EVAL, b"0", _ITEMS, b"."),
    "eval inserted last": b"\x80\x04" + raw(_ITEMS, _EVAL, b"0."),
    "eval replaces the value": b"\x80\x04" + raw(_ITEMS, b"0", _EVAL, b"."),
    "eval in the second of three pickles": _LIST + pickled(_EVAL) + pickled(1234567),
    "eval in a pickle behind": _LIST + pickled(_EVAL),
    "eval as protocol 0 writes it": pickled(_EVAL, 0),
    "further protocols": _LIST[:-1] + b"\x80\x01\x80\x02.",
    "a TUPLE without a MARK": b"\x80\x04t.",
    "a dict as its own key": b"\x80\x02}\x94g0\n\x8c\x05values.",
    "a set in itself": b"\x80\x04\x8f\x94(g0\n\x90.",
    "items by 60 GETs": b"\x80\x04]\x94" + b"h\x00a" * 60 + b".",
    "items by 200 GETs": b"\x80\x04]\x94" + b"h\x00a" * 200 + b".",
    "150 DUPs": b"\x80\x04]" + b"2" * 150 + b".",
    "lists of DUPs": b"\x80\x04(((\x8c\x03lol222l222l222l.",
    "lists of GETs": b"\x80\x04(((\x8c\x03lolq\x00h\x00h\x00h\x00lq\x01h\x01h\x01h\x01lq\x02h\x02h\x02h\x02l.",
}  # fmt: skip
"""Pickles that no pickler writes."""

_EXTENSIONS = {
    "EXT1": b"\x80\x02\x82\x2a)R.",
    "EXT2": b"\x80\x02\x83\xe8\x03)R.",
    "EXT4": b"\x80\x02\x84\xa0\x86\x01\0)R.",
    "EXT1 of a function": b"\x80\x02\x82\xc8\x8c\x01/\x8c\x01x\x86R.",
}
"""They call what the loading process has registered under a number."""

_MODEL = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
_SCRIPT = {
    "model/constants.pkl": pickled((), 2),
    "model/code/__torch__/model.py": b"class M(Module):\n  __parameters__ = []\n",
    "model/version": b"3\n",
}
_SCRIPTED = zipped({"model/data.pkl": pickled(call("__torch__.model:M", state={"training": True}), 2), **_SCRIPT})

ARCHIVED: dict[str, bytes | Files] = {
    "a payload in a zip": {"x.zip": zipped({"model.pkl": pickled(CALLS["payload"])})},
}

_FRAMED = {
    "small list": [1, 2, 3, 4],
    "large bytes": b"x" * 100_000,
    "framed and not framed": [1, b"y" * 100_000, 2],
    "several full frames": list(range(200_000)),
    "nested": {"a": [1, 2, {"b": (3, 4)}], "c": [5, 6]},
}
_VALUES = {
    "int": 1337,
    "list": [1, 2, 3, 4, 5],
    "tuple": (1, 2, 3, 4, 5),
    "dict": {"a": 1, "b": 2},
    "text": "abcdefg",
    "bytes": b"abcdefg",
    "long list": list(range(100)),
    "list of a dict": [1, 2, 3, {"key": "value"}],
    "name: deque": Global("collections:deque"),
    "name: Iterable": Global("collections.abc:Iterable"),
    "name: _codecs.encode": Global("_codecs:encode"),
    "name: __future__.annotations": Global("__future__:annotations"),
    "OrderedDict()": call("collections:OrderedDict"),
    "dict()": call("builtins:dict"),
    "len([])": call("builtins:len", []),
}
_PARAMETERS = b"""\x80\x02}q\x00X\x0c\x00\x00\x00string_paramq\x01ctorch.nn.modules.container
ParameterDict
q\x02)\x81q\x03}q\x04X\x05\x00\x00\x00_keysq\x05}q\x06X\x01\x00\x00\x00*q\x07Nssbs."""

INNOCUOUS: dict[str, bytes | Files] = {
    name: {"x.pkl": data}
    for name, data in {
        **{name: pickled(value) for name, value in _VALUES.items()},
        **{
            f"{name}, protocol {protocol}": pickle.dumps(value, protocol)
            for name, value in _FRAMED.items()
            for protocol in (2, 4, 5)
        },
        "two pickles": _LIST + pickled([5, 6, 7, 8]),
        "a list in itself": b"\x80\x02]\x94g0\na.",
        "a dict in itself": b"\x80\x02}\x94\x8c\x04selfg0\ns.",
        "Decimal in a state": b"\x80\x02]\x8c\x07decimal\x8c\x07Decimal\x93)R\x85b.",
        "Decimal as a key": b"\x80\x02}\x8c\x01a\x8c\x011s\x8c\x07decimal\x8c\x07Decimal\x93\x8c\x011\x85R\x8c\x012s.",
        "the dtype of an array, in pickle.loads": pickled(call("_pickle:loads", pickle.dumps(np.dtype(">i4")))),
        "a ParameterDict, as diffusers saves it": _PARAMETERS,
        "tuple in place of the value": b"\x80\x04" + raw(_ITEMS, b"0", call("builtins:tuple", [1, ["a"]]), b"."),
        "INST of int": TECHNIQUES["INST"]("builtins", "int", ("1234",)),
        "a magic number before the value": b"\x80\x04J\xef\xbe\xad\x5e0" + raw(_ITEMS, b"."),
        **_EXTENSIONS,
    }.items()
}

INNOCUOUS |= {
    "PyTorch v1.3": {"model_v1_3.pth": saved(_MODEL)},
    "PyTorch v0.1.10": {"model_legacy_pickle.pth": saved_legacy(_MODEL)},
    "TorchScript v1.4": {"torchscript.pt": _SCRIPTED},
    "torch and TorchScript in one zip": {
        "test_polyglot.pt": zipped({"model/data.pkl": pickled({"x": 1}, 2), "model/data/0": bytes(8), **_SCRIPT})
    },
    "not_pickle.npy": npy([1, 2, 3]),
    "pickle.npy": npy(np.array({"test": [1, 2, 3]}, dtype=object)),
    "testtar.anything": tarred({"pickle.npy": npy(np.array({"test": [1, 2, 3]}, dtype=object))}),
    "testzip.anything": zipped({"pickle.npy": npy(np.array({"test": [1, 2, 3]}, dtype=object))}),
    "test7z.anything": seven_zip("pickle.npy", npy(np.array({"test": [1, 2, 3]}, dtype=object))),
    "a text beside a pickle in a zip": {"x.zip": zipped({"readme.txt": b"hello", "model.pkl": pickled([1, 2, 3])})},
    "all endings in a zip": {"x.zip": zipped({f"model.{ending}": pickled(42) for ending in ("pkl", "pickle", "bin")})},
    "a dict in a zip": {"x.zip": zipped({"data.pkl": pickled({"key": "value"})})},
}

_TEXT = zipped({"data.pkl": b"test pickle data"})
_CRC_AT = _TEXT.index(b"PK\x01\x02") + 16

NO_MODEL: dict[str, bytes | Files] = {
    "corrupted": {"x.pkl": b"\x00\x01\x02\x03corrupt"},
    "a broken pickle in a zip": {"x.zip": zipped({"good.pkl": pickled([1]), "bad.pkl": b"\0\x01corrupt"})},
    "no zip": {"x.zip": b"not a zip file at all"},
    "a zip with a wrong checksum": {"x.zip": _TEXT[:_CRC_AT] + b"\xef\xbe\xad\xde" + _TEXT[_CRC_AT + 4 :]},
    "test_random.zip": b"rTkd8sJ2mQw0XzLpV5bN" + zipped({"x.tmp": bytes(range(256)) * 4}),
    "model_legacy_tar.pth": tarred({"pickle": b"dummy content", "storages/": b"", "tensors/": b""}),
}

ADVISORIES = {
    **{name: advisory for name, (_, advisory) in ADVISED.items()},
    "import by GLOBAL, dropped and kept in the memo": "GHSA-h4rm-mm56-xf63",
    "OBJ and POP": "GHSA-mxhj-88fx-4pcv",
}

ENTRIES = [
    *entries(Label.MALICIOUS, {name: {"x.pkl": pickled(found)} for name, found in CALLS.items()}, ADVISORIES),
    *entries(Label.MALICIOUS, {name: {"x.pkl": data} for name, data in FORGED.items()}, ADVISORIES),
    *entries(Label.MALICIOUS, ARCHIVED),
    *entries(Label.INNOCUOUS, INNOCUOUS),
    *entries(Label.NO_MODEL, NO_MODEL),
]
