"""Text that makes objects or is a pickle is a finding. Pictures are proved by structure, and a PDF has no actions."""

import io
import random
import zlib
from typing import Any, ClassVar

import matplotlib.figure
import pytest
import yaml
from PIL import Image

import ckpt_tools
from tests.serialization.archives import zipped
from tests.verification.scan.generator import OWN
from tests.verification.scan.polyglots import DOCUMENTS
from tests.verification.scan.scanner import is_clean

pytestmark = pytest.mark.quick

OBJECTS = {
    **DOCUMENTS,
    "encoded whole": f"a: !!{''.join(f'%{ord(c):02X}' for c in 'python/object/apply:os.system')} ['x']\n",
    "a name": "{a: [!!python/name:os.system '']}\n",
    "a name in a key": "? !!python/name:os.system ''\n: 1\n",
    "a name behind a mark of order": "\ufeff%TAG !e! tag:yaml.org,2002:python/\n---\n!e!name:os.system ''\n",
    "a module": "!!python/module:antigravity ''\n",
}


class _Recorder(yaml.UnsafeLoader):
    """PyYAML's unsafe loader, which notes what it would make of Python."""

    made: ClassVar[list[str]] = []


_Recorder.yaml_multi_constructors = {}
_Recorder.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: _Recorder.made.append(suffix))


@pytest.mark.parametrize("label", OBJECTS)
def test_a_tag_that_makes_an_object_is_a_finding(label, tmp_path):
    _Recorder.made.clear()
    list(yaml.load_all(OBJECTS[label], Loader=_Recorder))
    assert _Recorder.made
    for file in ("config.yaml", "CONFIG.YML", "vocab.txt", "README.md", "a.cfg"):
        (tmp_path / file).write_bytes(OBJECTS[label].encode())
        (found,) = ckpt_tools.scan(tmp_path).findings
        assert found.danger in ("could run", "not understood"), file
        (tmp_path / file).unlink()


HARMLESS = {
    "README.md": "Hello!! python is fine<br>\n!<a href='x'>\nchecks\n",
    "vocab.txt": "!\n!!\n!!!\n#\nthe\n",
    "a.csv": "col_a,col_b\n1,2\n",
    "notes.txt": "cat dog\nbird\nR\n",
    "latest": "checkpoint-500\n",
    "commit.txt": "cafe12\n",
    "state.txt": "completed",
    "b.log": "[handlers] none\n",
}  # fmt: skip


@pytest.mark.parametrize("file", HARMLESS)
def test_other_text_is_clean(file, tmp_path):
    (tmp_path / file).write_text(HARMLESS[file])
    assert ckpt_tools.scan(tmp_path).findings == ()


PICKLES = {
    "a module with hyphens": "cmy-module\nrun\n(tR.",
    "an attribute of any name": "cmodule\nrun it now!\n.",
    "a module with spaces that is called": "cmy module\nrun it\n(tR.",
    "a module with a slash": "ca/b\nrun\n(tR.",
    "an instance": "(imy module\nrun it\n.",
    "a storage of torch, and then a call": "cany thing\nFloatStorage\n0cos\nsystem\n(S'x'\ntR.",
    "behind lines": "V one\n0I1\n0S'x'\n0cos\nsystem\n(S'x'\ntR.",
    "a module of Python alone": "cantigravity\n",
    "so at the end": "(iantigravity_",
    "a name of two strings": "Vos\nVsystem\n\x93(S'x'\ntR.",
}


@pytest.mark.parametrize("label", PICKLES)
def test_text_that_is_a_pickle_is_a_finding(label, tmp_path):
    (tmp_path / "vocab.txt").write_text(PICKLES[label], encoding="latin-1" if "\x93" in PICKLES[label] else "utf-8")
    (found,) = ckpt_tools.scan(tmp_path).findings
    assert found.danger == "runs"


@pytest.mark.parametrize(
    "text",
    ["[loggers]\nkeys=root\n[handlers]\nkeys=h\n[handler_h]\nclass=StreamHandler\nargs=(os.system('x'),)\n",
     "[handlers]\rkeys=h\r[handler_h]\rCLASS=os.system\r", "  [ formatters ]\nclass = m.F\n"],
)  # fmt: skip
@pytest.mark.parametrize("file", ["logging.ini", "a.cfg", "a.txt"])
def test_a_configuration_of_logging_is_a_finding(file, text, tmp_path):
    (tmp_path / file).write_bytes(text.encode())
    assert [each.danger for each in ckpt_tools.scan(tmp_path).findings] == ["could run"]


# Pictures: nothing stands before or behind them


def picture(form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image = Image.effect_noise((40, 30), 60)
    (image if form == "GIF" else image.convert("RGB")).save(stream, form, **options)
    return stream.getvalue()


def drawn(form: str) -> bytes:
    stream = io.BytesIO()
    figure = matplotlib.figure.Figure((2, 2))
    figure.subplots().plot([1, 2])
    figure.savefig(stream, format=form)
    return stream.getvalue()


FRAMES = [Image.effect_noise((40, 30), 60) for _ in range(2)]
PICTURES: dict[str, bytes] = {
    "a.png": picture("PNG"),
    "A.PNG": picture("PNG", optimize=True),
    "drawn.png": drawn("png"),
    "a.jpg": picture("JPEG"),
    "progressive.jpeg": picture("JPEG", progressive=True, optimize=True),
    "restarts.jpg": picture("JPEG", restart_marker_blocks=2, comment=b"text"),
    "a.gif": picture("GIF"),
    "moving.gif": picture("GIF", save_all=True, append_images=FRAMES),
    "a.webp": picture("WEBP"),
    "lossless.webp": picture("WEBP", lossless=True),
    "moving.webp": picture("WEBP", save_all=True, append_images=FRAMES),
    "a.pdf": picture("PDF"),
    "drawn.pdf": drawn("pdf"),
    "without an ending": picture("PNG"),
    "pytorch_model.bin": picture("JPEG"),
}
KINDS = ("a.png", "a.jpg", "a.gif", "a.webp", "a.pdf")


def test_what_programs_write_is_proved(tmp_path):
    for name, data in PICTURES.items():
        (tmp_path / name).write_bytes(data)
    report = ckpt_tools.scan(tmp_path)
    assert (report.findings, report.num_files) == ((), len(PICTURES))


ADDED = {"a pickle": OWN, "a zip": zipped({"archive/data.pkl": OWN}), "a byte": b"\0", "a picture": b""}


@pytest.mark.parametrize("what", ADDED)
@pytest.mark.parametrize("name", KINDS)
def test_what_stands_before_or_behind_it_is_a_finding(name, what):
    data = PICTURES[name]
    added = ADDED[what] or (b"%PDF-0" if name == "a.pdf" else data)
    assert not is_clean({name: added + data})
    assert not is_clean({name: data + added})


@pytest.mark.parametrize("name", KINDS)
def test_no_part_of_one_is_proved_and_no_other_byte_of_a_png(name):
    data = PICTURES[name]
    sizes = random.Random(name).sample(range(8, len(data) - 6), 20)
    assert [size for size in sizes if is_clean({name: data[:size]})] == []
    middle = len(data) // 2
    changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    assert name != "a.png" or not is_clean({name: changed})


def pdf(*objects: bytes) -> bytes:
    return b"%PDF-1.7\n" + b"\n".join(b"1 0 obj\n" + each + b"\nendobj" for each in objects) + b"\n%%EOF\n"


def packed(content: bytes, *, name: bytes = b"/ObjStm", filters: bytes = b"/FlateDecode") -> bytes:
    body = zlib.compress(content)
    head = b"<< /Type %s /N 1 /Filter %s /Length %d >>\nstream\n" % (name, filters, len(body))
    return head + body + b"\nendstream"


ACTION = b"<< /S /JavaScript /JS (app.alert(1)) >>"
HOSTILE = {
    "a script": pdf(ACTION),
    "a script, encoded": pdf(ACTION.replace(b"/JavaScript", b"/Java#53cript")),
    "a script, encoded whole": pdf(ACTION.replace(b"JavaScript", b"".join(b"#%02x" % c for c in b"JavaScript"))),
    "a script in packed objects": pdf(packed(ACTION)),
    "in packed objects of an encoded name": pdf(packed(ACTION, name=b"/Obj#53tm")),
    "in packed objects, twice compressed": pdf(packed(zlib.compress(ACTION), filters=b"[/FlateDecode /FlateDecode]")),
    "in packed objects of another filter": pdf(packed(ACTION, filters=b"/LZWDecode")),
    "a program": pdf(b"<< /S /Launch /F (x.exe) >>"),
    "a file": pdf(b"<< /Type /EmbeddedFile >>"),
    "a form": pdf(b"<< /XFA 2 0 R >>"),
    "another file": pdf(b"<< /S /GoToR /F (x.pdf) >>"),
    "data that is sent": pdf(b"<< /S /SubmitForm /F (x) >>"),
    "encrypted": pdf(b"<< /Encrypt 2 0 R >>"),
    "damaged packed objects": pdf(packed(ACTION)[:-20] + b"endstream"),
}


@pytest.mark.parametrize("label", HOSTILE)
def test_a_pdf_that_may_act_is_a_finding(label):
    assert not is_clean({"a.pdf": HOSTILE[label]})
    assert is_clean({"a.pdf": pdf(b"<< /S /URI /URI (https://x) >>", packed(b"<< /OpenAction [0 /Fit] >>"))})


def test_files_that_are_excluded_are_counted_and_not_read(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("logo.svg", "sub/logo.svg", "sub/run.py", "notes.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "pipe.svg").symlink_to("nothing")
    assert ckpt_tools.scan(tmp_path).num_findings == 4
    report = ckpt_tools.scan(tmp_path, exclude=["*.svg", "sub/run.py"])
    assert (report.clean, report.num_files) == (True, 1)
    assert sorted(report.excluded) == ["logo.svg", "pipe.svg", "sub/logo.svg", "sub/run.py"]
    assert ckpt_tools.scan(tmp_path, exclude=["*"]).num_files == 0
