"""YAML that makes objects is a finding, in files of any text, and so is text that is a pickle."""

from __future__ import annotations

from typing import ClassVar

import pytest
import yaml

import ckpt_tools
from tests.verification.scan.polyglots import DOCUMENTS

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
