"""YAML that makes objects is a finding, in files of any text, and so is text that is a pickle."""

from __future__ import annotations

import pytest
import yaml

import ckpt_tools

pytestmark = pytest.mark.quick

CALL = "['x']"
OBJECTS = {
    "a tag": f"a: !!python/object/apply:os.system {CALL}\n",
    "verbatim": f"a: !<tag:yaml.org,2002:python/object/apply:os.system> {CALL}\n",
    "verbatim, colons encoded": f"a: !<tag%3Ayaml.org,2002%3Apython/object/apply%3Aos.system> {CALL}\n",
    "encoded": f"a: !!%70ython/object/apply:os.system {CALL}\n",
    "encoded whole": f"a: !!{''.join(f'%{ord(c):02X}' for c in 'python/object/apply:os.system')} {CALL}\n",
    "a handle": f"%TAG !e! tag:yaml.org,2002:python/object/apply:\n---\na: !e!os.system {CALL}\n",
    "a handle of one mark": f"%TAG ! tag:yaml.org,2002:python/object/apply:\n---\na: !os.system {CALL}\n",
    "a handle behind a return": f"# x\r%TAG !e! tag:yaml.org,2002:python/\r---\ra: !e!object/apply:os.system {CALL}\r",
    "a handle behind a mark of order": "\ufeff%TAG !e! tag:yaml.org,2002:python/\n---\n!e!name:os.system ''\n",
    "in flow": "{a: [!!python/name:os.system '']}\n",
    "in a key": "? !!python/name:os.system ''\n: 1\n",
    "in a second document": "a: 1\n---\n!!python/name:os.system ''\n",
    "new": "!!python/object/new:os.system [x]\n",
    "module": "!!python/module:antigravity ''\n",
}  # fmt: skip


class _Recorder(yaml.UnsafeLoader):
    pass


def makes_an_object(text: str) -> bool:
    """True if PyYAML's unsafe loader would make something of Python."""
    made: list[str] = []
    _Recorder.yaml_multi_constructors = {}
    for tag in ("tag:yaml.org,2002:python/",):
        _Recorder.add_multi_constructor(tag, lambda loader, suffix, node: made.append(suffix))
    list(yaml.load_all(text, Loader=_Recorder))
    return bool(made)


@pytest.mark.parametrize("file", ["config.yaml", "CONFIG.YML", "vocab.txt", "README.md", "a.cfg"])
@pytest.mark.parametrize("label", OBJECTS)
def test_a_tag_that_makes_an_object_is_a_finding(label, file, tmp_path):
    assert makes_an_object(OBJECTS[label])
    (tmp_path / file).write_bytes(OBJECTS[label].encode())
    (found,) = ckpt_tools.scan(tmp_path).findings
    assert found.danger in ("could run", "not understood")


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
