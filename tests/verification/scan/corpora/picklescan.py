"""picklescan's test data (tests/data and tests/data2 of release 1.0.5), and three samples of its test_scanner.py."""

import io
from typing import Any

import numpy as np
import torch

from tests.serialization.archives import npy, saved, saved_legacy, zipped
from tests.serialization.hostile import TECHNIQUES
from tests.verification.scan.corpora.build import (
    Call,
    Global,
    Label,
    New,
    call,
    encrypted,
    entries,
    flagged,
    pickled,
    seven_zip,
)
from tests.verification.scan.generator import CODE, Files


def arrays(save: Any, **found: Any) -> bytes:
    stream = io.BytesIO()
    save(stream, **found)
    return stream.getvalue()


def _objects(value: Any) -> bytes:
    """An array of one object, in the file of numpy."""
    header = npy(np.array([None])).partition(b"\n")[0]
    return header + b"\n" + pickled(np.array([value], dtype=object))


EVAL = call("builtins:eval", CODE)
SYSTEM = call("posix:system", "x")
GET = call("requests.api:get", "https://localhost:9")
ABC = ["a", "b", "c"]

_CLOUD = "cloudpickle.cloudpickle"
_CODE_TYPE = (0, 0, 0, 0, 3, 0, b"\x97\x00", ("x", None), ("print",), (), "<x>", "<module>", "<module>", 1, b"", b"")

ADVISED: dict[str, Call] = {
    "GHSA-3gf5-cxq9-w223": call("idlelib.pyshell:ModifiedInterpreter.runcode", {}, CODE),
    "GHSA-3vg9-h568-4w9m": call("idlelib.debugobj:ObjectTreeItem.SetText", {}, CODE),
    "GHSA-4675-36f9-wf6r": call("ctypes:CDLL", None),
    "GHSA-49gj-c84q-6qm9": call("cProfile:run", CODE),
    "GHSA-4r9r-ch6f-vxmx": call("torch.utils.bottleneck.__main__:run_cprofile", CODE, {}),
    "GHSA-4whj-rm5r-c2v8": call("torch.utils.bottleneck.__main__:run_autograd_prof", CODE, {}),
    "GHSA-5qwp-399c-mjwf": call("trace:Trace.run", {}, CODE),
    "GHSA-6vqj-c2q5-j97w": call("profile:Profile.runctx", {}, CODE, {}, {}),
    "GHSA-6w4w-5w54-rjvr": call("idlelib.autocomplete:AutoComplete.get_entity", {}, CODE),
    "GHSA-7cq8-mj8x-j263": call("idlelib.autocomplete:AutoComplete.fetch_completions", {}, CODE, 0),
    "GHSA-7wx9-6375-f5wh": call("profile:run", CODE),
    "GHSA-84r2-jw7c-4r5q": call(call("operator:methodcaller", "system", "x"), call("pydoc:locate", "os")),
    "GHSA-86cj-95qr-2p4f": call("torch._dynamo.guards:GuardBuilder.get", {}, CODE),
    "GHSA-8r4j-24qv-fmq9": call("idlelib.calltip:Calltip.fetch_tip", {}, CODE),
    "GHSA-9w88-8rmg-7g2p": call("cProfile:runctx", CODE, None, None),
    "GHSA-9xph-j2h6-g47v": call("idlelib.calltip:get_entity", CODE),
    "GHSA-cj3c-v495-4xqh": call("code:InteractiveInterpreter.runcode", {}, CODE),
    "GHSA-f4x7-rfwp-v3xw": call(
        "torch.fx.experimental.symbolic_shapes:ShapeEnv.evaluate_guards_expression", {}, CODE, []
    ),
    "GHSA-f54q-57x4-jg88": call("lib2to3.pgen2.grammar:Grammar.loads", {}, b""),
    "GHSA-f745-w6jp-hpxx": call("torch.utils.collect_env:run", CODE),
    "GHSA-fqq6-7vqf-w3fg": call("doctest:debug_script", CODE, True),
    "GHSA-g344-hcph-8vgg": call("trace:Trace.runctx", {}, CODE, {}, {}),
    "GHSA-h3qp-7fh3-f8h4": call("torch.utils.data.datapipes.utils.decoder:basichandlers", "pickle", b""),
    "GHSA-j343-8v2j-ff7w": call("idlelib.pyshell:ModifiedInterpreter.runcommand", {}, CODE),
    "GHSA-jhph-76pp-mggw": call(
        "torch.utils.collect_env:run_and_read_all", Global("torch.utils.collect_env:run"), CODE
    ),
    "GHSA-m273-6v24-x4m4": call("distutils.file_util:write_file", "x.env", ["x"]),
    "GHSA-m869-42cg-3xwr": call("idlelib.run:Executive.runcode", {}, CODE),
    "GHSA-p9w7-82w4-7q8m": call("lib2to3.pgen2.pgen:ParserGenerator.make_label", None, {}, f'""+{CODE}'),
    "GHSA-q77w-mwjj-7mqx": call(
        "asyncio.unix_events:_UnixSubprocessTransport._start", {}, "x", True, None, None, None, 0
    ),
    "GHSA-r8g5-cgf2-4m4m": call("numpy.f2py.crackfortran:getlincoef", CODE, []),
    "GHSA-vqmv-47xg-9wpr": call("pty:spawn", ["/bin/sh", "-c", "x"]),
    "GHSA-vr7h-p6mm-wpmh": call("torch.jit.unsupported_tensor_ops:execWrapper", CODE, {}, {}),
    "GHSA-vv6j-3g6g-2pvj": call("torch.utils._config_module:ConfigModule.load_config", {}, b""),
    "GHSA-vvpj-8cmc-gx39": call("pkgutil:resolve_name", "os:system"),
    "GHSA-x696-vm39-cp64": call("profile:Profile.run", {}, CODE),
    "GHSA-xp4f-hrf8-rxw7": call("ensurepip:_run_pip", CODE),
    "GHSA-g38g-8gr9-h9xp-aix-support": call("_aix_support:_read_cmd_output", "x"),
    "GHSA-g38g-8gr9-h9xp-imaplib": call("imaplib:IMAP4_stream", "x"),
    "GHSA-g38g-8gr9-h9xp-osx-support": call("_osx_support:_read_output", "x"),
    "GHSA-g38g-8gr9-h9xp-pyrepl-pager": call("_pyrepl.pager:pipe_pager", "text", "x"),
    "GHSA-g38g-8gr9-h9xp-test": call("test.support.script_helper:assert_python_ok", "-c pass"),
    "GHSA-g38g-8gr9-h9xp-uuid": call("uuid:_get_command_stdout", "x"),
}
"""Files that are named after an advisory, and what they call."""

_ALIKE = {
    "GHSA-46h3-79wf-xr6c": call(call("_operator:attrgetter", "system"), call("builtins:__import__", "os")),
    "GHSA-955r-x9j8-7rhh": call(call("_operator:methodcaller", "system", "x"), call("builtins:__import__", "os")),
}

_LOAD = Global("torch.serialization:load")
_MAKE = call(
    f"{_CLOUD}:_make_function",
    call(call(f"{_CLOUD}:_builtin_type", "CodeType"), *_CODE_TYPE),
    {"__name__": "f"},
    "f",
    None,
    (call(f"{_CLOUD}:_make_empty_cell"), call(f"{_CLOUD}:_make_cell", "x")),
)
_SPACE = call("__builtin__:globals")
_BDB: dict[str, Any] = {"skip": None, "breaks": {}, "fncache": {}, "frame_returning": None}

CALLS: dict[str, tuple[Any, int]] = {
    "malicious0.pkl": (
        [
            call("__builtin__:eval", call("__builtin__:compile", "x = 1", "", "exec"), _SPACE),
            call("__builtin__:apply", call("__builtin__:getattr", Global("__builtin__:dict"), "get"), [_SPACE, "x"]),
        ],
        0,
    ),
    "malicious1_v0.pkl": (call("__builtin__:eval", CODE), 0),
    "malicious1_v3.pkl": (EVAL, 3),
    "malicious1_v4.pkl": (EVAL, 4),
    "malicious2_v0.pkl": (SYSTEM, 0),
    "malicious2_v3.pkl": (SYSTEM, 3),
    "malicious2_v4.pkl": (SYSTEM, 4),
    "malicious3.pkl": (call("httplib:HTTPSConnection", "localhost"), 0),
    "malicious4.pickle": (GET, 4),
    "malicious5.pickle": (call("aiohttp.client:ClientSession"), 4),
    "malicious7.pkl": (call("socket:create_connection", ("localhost", 9)), 4),
    "malicious8.pkl": (call("subprocess:run", ["ls", "-l"]), 4),
    "malicious9.pkl": (call("sys:exit", 0), 4),
    "malicious12.pkl": (call(call(call("operator:attrgetter", "system"), call("builtins:__import__", "os")), "x"), 4),
    "malicious13a.pkl": (call("pickle:loads", call("_codecs:encode", "I12345\n.", "latin1")), 0),
    "malicious13b.pkl": (call("_pickle:loads", b"I12345\n."), 4),
    "malicious14.pkl": (call("runpy:_run_code", CODE), 4),
    "malicious15a.pkl": (
        call(call("__builtin__:getattr", Global("bdb:Bdb"), "run"), New(Global("bdb:Bdb"), (), _BDB), CODE),
        2,
    ),
    "malicious15b.pkl": (call("bdb:Bdb.run", New(Global("bdb:Bdb"), (), _BDB), CODE), 4),
    "malicious16.pkl": (call("pip:main", ["install", "x", "-q", "--isolated"]), 0),
    "malicious17.pkl": (call("torch._inductor.codecache:compile_file", "", "", ["sh", "-c", "x"]), 4),
    "malicious18.pkl": (call("pydoc:pipepager", "", "x"), 4),
    "malicious19.pkl": (
        call(call("functools:partial", _LOAD, state=(_LOAD, ("x.bin",), {"weights_only": False}, None))),
        4,
    ),
    "malicious20.pkl": (call("venv:create", "venv", False, False, True, False, "$(x)"), 4),
    "malicious21.pkl": (call("timeit:timeit", "", CODE), 4),
    "malicious22.pkl": (call("numpy.testing._private.utils:runstring", CODE, {}), 4),
    "GHSA-jgw4-cr84-mqxg.bin": (ADVISED["GHSA-q77w-mwjj-7mqx"], 4),
    "cloudpickle_codeinjection.pkl": (
        [
            call(f"{_CLOUD}:_function_setstate", _MAKE, ({}, {"__globals__": call(f"{_CLOUD}:subimport", "builtins")})),
            call(_MAKE, CODE),
        ],
        5,
    ),
    "io_FileIO.pkl": (call("_io:FileIO", "/etc/hosts", "r"), 4),
    "logging_FileHandler.pkl": (call("logging:FileHandler", "x.log"), 4),
    "types_CodeType.pkl": (call("types:CodeType", *_CODE_TYPE, (), ()), 4),
    "urllib_request_urlopen.pkl": (call("urllib.request:urlopen", "https://localhost:9"), 4),
    **{f"{name}.pkl": (found, 4) for name, found in ADVISED.items()},
    **{f"{name}.pkl": (found, 0) for name, found in _ALIKE.items()},
}
"""Pickles as a pickler writes them, by their file: the value, and the protocol."""

NAMED_IN_MEMO = b"Vos\np2\n0Vsystem\np3\n0Vtorch\np0\n0VLongStorage\np1\n0g2\ng3\n\x93(Vx\ntR."
"""``os.system`` by entries of the memo, beside those of a harmless name that is not used."""

_MODULE_STATE = (
    b"\x80\x04Vtorch._utils\n\x94V_rebuild_tensor\n\x94\x93\x940Vtorch\nV_utils\n\x93\x940"
    b"h\x03}h\x01Vbuiltins\nsb0h\x00h\x01\x93h\x03}h\x01Veval\nsb0h\x00h\x01\x93\x93V%b\n\x85R." % CODE.encode()
)
"""BUILD on a module sets an attribute of it to a text, so that a harmless name gives another name."""

_FIRST = b"\x80\x04cos\nsystem\nVx\n\x85R0"

FORGED: dict[str, bytes] = {
    "broken_model.pkl": b"cbuiltins\nexec\n(X>\nx = 1tRX.",
    "malicious6.pkl": pickled(ABC) + pickled(GET),
    "malicious10.pkl": TECHNIQUES["INST"]("__builtin__", "exec", (CODE,)),
    "malicious11.pkl": NAMED_IN_MEMO,
    "malicious-invalid-bytes.pkl": NAMED_IN_MEMO + b"\n\n\t\t",
    "malicious23.pkl": b"S'os'\nS'system'\n\x93S'x'\n\x85R.",
    "sys_module_override_sploit.pkl": _MODULE_STATE,
    "keyerror-exploit.pkl": _FIRST + b"\x8c\x02os\x94h\x03h\x00\x93KB.",
    "type-confusion-exploit.pkl": _FIRST + b"K\x2a\x94\x8c\x02os\x94h\x00h\x01\x93KB.",
    "pytorch_magic_bypass.pt": b"".join(
        pickled(each, 2)
        for each in (call("__builtin__:eval", "0x1950A86A20F9469CFC6C"), 1001, {}, [], SYSTEM, None)
    ),
    "dns_exfiltration.npy": _objects(call("ssl:get_server_certificate", ("localhost", 9))),
}  # fmt: skip

_DATA = zipped({"data.pkl": pickled(EVAL)})
_CONFIG = zipped({"model/config.pkl": pickled(EVAL)})

ARCHIVED: dict[str, bytes | Files] = {
    "malicious1.zip": _DATA,
    "malicious1.7z": seven_zip("data.pkl", pickled(EVAL)),
    "malicious1_wrong_ext.zip": zipped({"data.txt": pickled(EVAL)}),
    "malicious1_central_directory.zip": _DATA.replace(b"data.pkl", b"datap.kl", 1),
    "malicious1_crc.zip": _DATA.replace(b"('x')", b"('y')", 1),
    **{f"malicious1_{hex(flag)}.zip": flagged(_CONFIG, flag) for flag in (0x1, 0x20, 0x40)},
    "test_scan_huggingface_model": {"pytorch_model.bin": zipped({"archive/data.pkl": pickled(EVAL)})},
}

STATE = {"embeddings.weight": torch.ones(4, 2), "embeddings.bias": torch.ones(2)}
_OBJECTS = {"a": np.array([0, 1, 2], dtype=object), "b": np.array([3, 4, 5], dtype=object)}
_NUMBERS = {"a": np.array([0, 1, 2]), "b": np.array([3, 4, 5])}

INNOCUOUS: dict[str, bytes | Files] = {
    **{f"benign0_v{protocol}.pkl": pickled(ABC, protocol) for protocol in (0, 3, 4)},
    "pytorch_model.bin": saved_legacy(STATE),
    "new_pytorch_model.bin": saved(STATE),
    "int_array.npy": npy(np.array([[1, 2], [3, 4]])),
    "object_array.npy": npy(np.array([[1, 2], [3, 4]], dtype=object)),
    "int_arrays.npz": arrays(np.savez, **_NUMBERS),
    "int_arrays_compressed.npz": arrays(np.savez_compressed, **_NUMBERS),
    "object_arrays.npz": arrays(np.savez, **_OBJECTS),
    "object_arrays_compressed.npz": arrays(np.savez_compressed, **_OBJECTS),
    "test_scan_pickle_bytes_strict": {"file.pkl": pickled(call("collections:Counter", [1, 2, 3]))},
    "test_scan_url": {"benign.zip": zipped({"data.pkl": pickled({"a": 0, "b": 1})})},
}

PNG = b"\x89PNG\r\n\x1a\n"

NO_MODEL: dict[str, bytes | Files] = {
    "bad_pytorch.pt": PNG,
    "not_a_pickle.bin": b"cmod\n\xf8\n",
    "benign_password_protected.zip": encrypted(),
}

ADVISORIES = {
    "dns_exfiltration.npy": "CVE-2025-46417",
    "malicious16.pkl": "CVE-2025-1716",
    "malicious21.pkl": "CVE-2025-71351",
    "malicious23.pkl": "GHSA-9gvj-pp9x-gcfr",
    "malicious1_0x1.zip": "CVE-2025-1945",
    "malicious1_0x20.zip": "CVE-2025-1945",
    "malicious1_0x40.zip": "CVE-2025-1945",
    "malicious1_central_directory.zip": "CVE-2025-1944",
    "malicious1_crc.zip": "CVE-2025-10156",
    "malicious1_wrong_ext.zip": "CVE-2025-1889",
    "cloudpickle_codeinjection.pkl": "GHSA-9m3x-qqw2-h32h",
    "io_FileIO.pkl": "GHSA-9726-w42j-3qjr",
    "logging_FileHandler.pkl": "GHSA-m7j5-r2p5-c39r",
    "pytorch_magic_bypass.pt": "GHSA-97f8-7cmv-76j2",
    "types_CodeType.pkl": "GHSA-9m3x-qqw2-h32h",
    "urllib_request_urlopen.pkl": "GHSA-9726-w42j-3qjr",
    **{name: name[:19] for name in CALLS if name.startswith("GHSA-")},
}

ENTRIES = [
    *entries(Label.MALICIOUS, {name: pickled(*found) for name, found in CALLS.items()}, ADVISORIES),
    *entries(Label.MALICIOUS, FORGED, ADVISORIES),
    *entries(Label.MALICIOUS, ARCHIVED, ADVISORIES),
    *entries(Label.INNOCUOUS, INNOCUOUS),
    *entries(Label.NO_MODEL, NO_MODEL),
]
