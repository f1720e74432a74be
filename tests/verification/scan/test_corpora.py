"""What the test files of picklescan, fickling and modelscan hold, made again from what they say of them.

Their own files, and what the three scanners say of them, are in ``docs/scanning.md``.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt_tools
from tests.serialization.archives import zipped

ADVISED = """
    os.system posix.system builtins.eval builtins.exec builtins.compile builtins.getattr builtins.__import__
    builtins.eval.__call__ subprocess.run subprocess.Popen sys.exit socket.create_connection
    http.client.HTTPSConnection requests.api.get aiohttp.client.ClientSession urllib.request.urlopen
    ssl.get_server_certificate smtplib.SMTP ftplib.FTP imaplib.IMAP4 imaplib.IMAP4_stream telnetlib.Telnet
    poplib.POP3 nntplib.NNTP pickle.loads _pickle.loads marshal.loads types.FunctionType types.CodeType
    runpy._run_code runpy.run_path pty.spawn bdb.Bdb.run pip.main pydoc.pipepager pydoc.locate venv.create
    timeit.timeit cProfile.run cProfile.runctx profile.run profile.Profile.run profile.Profile.runctx
    trace.Trace.run trace.Trace.runctx doctest.debug_script ensurepip._run_pip ctypes.CDLL
    code.InteractiveInterpreter.runcode operator.attrgetter operator.methodcaller _operator.methodcaller
    pkgutil.resolve_name importlib.import_module uuid._get_command_stdout _aix_support._read_cmd_output
    _osx_support._read_output _pyrepl.pager.pipe_pager test.support.script_helper.assert_python_ok
    distutils.file_util.write_file io.FileIO _io.FileIO logging.FileHandler
    asyncio.unix_events._UnixSubprocessTransport._start multiprocessing.util.spawnv_passfds
    lib2to3.pgen2.grammar.Grammar.loads lib2to3.pgen2.pgen.ParserGenerator.make_label
    idlelib.debugobj.ObjectTreeItem.SetText idlelib.autocomplete.AutoComplete.get_entity
    idlelib.calltip.get_entity idlelib.run.Executive.runcode idlelib.pyshell.ModifiedInterpreter.runcode
    numpy.testing._private.utils.runstring numpy.f2py.crackfortran.getlincoef
    torch.utils.bottleneck.__main__.run_cprofile torch._dynamo.guards.GuardBuilder.get
    torch.utils.collect_env.run torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression
    torch.serialization.load torch.utils.data.datapipes.utils.decoder.basichandlers
    torch.jit.unsupported_tensor_ops.execWrapper torch.utils._config_module.ConfigModule.load_config
    torch._inductor.codecache.compile_file cloudpickle.cloudpickle._builtin_type
    cloudpickle.cloudpickle._make_function
"""
"""What the advisories of the three name. Where a name ends and its module begins, a pickle says in two ways."""


def call(module: str, name: str, protocol: int) -> bytes:
    """A call with a string, as a pickler of ``protocol`` would write it."""
    text = b"V__import__('os').system('x')\n"
    if protocol < 4:
        return (b"\x80\x02" if protocol else b"") + f"c{module}\n{name}\n(".encode() + text + b"tR."
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    return b"\x80\x04" + words + b"\x93" + text + b"\x85R."


def is_clean(name: str, data: bytes, folder: Path) -> bool:
    (folder / name).write_bytes(data)
    return ckpt_tools.scan(folder / name).clean


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_no_call_of_an_advisory_is_clean(protocol: int, tmp_path: Path) -> None:
    found = []
    for full in ADVISED.split():
        parts = full.split(".")
        for at in range(1, len(parts)):
            data = call(".".join(parts[:at]), ".".join(parts[at:]), protocol)
            found += [full for name in ("a.pkl", "a.pt") if is_clean(name, data, tmp_path)]
    assert found == []


def _zip(data: bytes, **changed: int) -> bytes:
    """With a bit of a flag set in the local header alone, as two of picklescan's files have it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("data.pkl", data)
    found = bytearray(stream.getvalue())
    found[6] |= changed.get("flags", 0)
    return bytes(found)


EVIL = call("os", "system", 4)
HOSTILE: dict[str, tuple[str, bytes]] = {
    "its name is looked up in a memo": ("a.pkl", b"Vos\np2\n0Vsystem\np3\n0g2\ng3\n\x93(Vid\ntR."),
    "bytes behind its end": ("a.pkl", b"\x80\x04N.\n\n\t\t"),
    "a second pickle": ("a.pkl", pickle.dumps(["a"]) + EVIL),
    "dropped, and another value kept": ("a.pkl", b"\x80\x05cpickle\nloads\nC%c" % len(EVIL) + EVIL + b"\x85R0N."),
    "injected before the value": ("a.npy", EVIL[:-1] + b"0" + pickle.dumps(np.ones(2))[2:]),
    "an old instance": ("a.pkl", b"(S'print(1)'\ni__builtin__\nexec\n."),
    "an object that is dropped": ("a.pkl", b"\x80\x04(\x8c\x07smtplib\x8c\x04SMTP\x93\x8c\x09127.0.0.1o0N."),
    "a memo entry that is missing": ("a.pkl", b"\x80\x04h\x05" + EVIL[2:]),
    "a frame that cuts an opcode": ("a.pkl", b"\x80\x04\x95" + struct.pack("<Q", 5) + EVIL[2:]),
    "a zip with flags that disagree": ("a.zip", _zip(EVIL, flags=0x20)),
    "a zip that seems encrypted": ("a.zip", _zip(EVIL, flags=1)),
    "a zip of another ending": ("a.txt", _zip(EVIL)),
    "a torch file": ("a.pt", zipped({"archive/data.pkl": EVIL, "archive/version": b"3\n"})),
    "a magic number that is computed": ("a.pt", call("builtins", "eval", 2) + EVIL),
    "a PNG image": ("a.pt", b"\x89PNG\r\n\x1a\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_no_form_of_the_corpora_is_clean(name: str, tmp_path: Path) -> None:
    assert not is_clean(*HOSTILE[name], tmp_path)


def _saved(save: Callable[[io.BytesIO], None]) -> bytes:
    stream = io.BytesIO()
    save(stream)
    return stream.getvalue()


MODEL = torch.nn.Linear(3, 2).state_dict()
OBJECTS = np.array([{"a": 1}, "b", None], dtype=object)
INNOCUOUS: dict[str, tuple[str, bytes]] = {
    **{f"a list, protocol {n}": ("a.pkl", pickle.dumps(["a", "b", "c"], n)) for n in range(6)},
    "a dict named dill": ("a.dill", pickle.dumps({"a": 0, "b": 1})),
    "a model": ("pytorch_model.bin", _saved(lambda out: torch.save(MODEL, out))),
    "an old model": ("a.bin", _saved(lambda out: torch.save(MODEL, out, _use_new_zipfile_serialization=False))),
    "an array": ("a.npy", _saved(lambda out: np.save(out, np.arange(6).reshape(2, 3)))),
    "arrays": ("a.npz", _saved(lambda out: np.savez(out, a=np.arange(3), b=np.ones(2)))),
    "an array of objects": ("a.npy", _saved(lambda out: np.save(out, OBJECTS, allow_pickle=True))),
    "arrays of objects": ("a.npz", _saved(lambda out: np.savez(out, a=OBJECTS, b=np.ones(2)))),
}


@pytest.mark.parametrize("name", INNOCUOUS)
def test_what_is_innocuous_in_the_corpora_is_clean(name: str, tmp_path: Path) -> None:
    assert is_clean(*INNOCUOUS[name], tmp_path)
