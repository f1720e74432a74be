"""Findings in every form: folded lines of text, Markdown as a reader of Markdown shows it, and SARIF 2.1.0."""

import json
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from markdown_it import MarkdownIt
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.cli import output
from ckpt_tools.cli.output import MAX_TABLE_ROWS, escape_markdown, find_source_folder
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.verification.deviation import Deviation
from ckpt_tools.verification.report import Aspect, Difference, fold_rows, summarize_differences
from tests.support.commands import run_command


def cast(name: str, apart: Deviation, slot: str = "weight") -> Difference:
    key = StateKey(name, slot)
    return Difference(key, Aspect.DTYPE, f"the words of {name}", apart, "float32 -> bfloat16")


EQUAL = [cast(f"{name}.weight", Deviation()) for name in "abcdef"]
BOTH = [cast(name, Deviation(), slot) for name in "ab" for slot in ("weight", "master")]
APART = cast("z", Deviation(num_differing=2, num_one_nan=1, max_abs=0.5, max_rel=0.25))
OTHERS = [
    *(
        Difference(StateKey(name), Aspect.VALUES, f"by {size}", Deviation(num_differing=1, max_abs=size))
        for name, size in (("small", 1), ("large", 9), ("same", 1))
    ),
    Difference(StateKey("n"), Aspect.UNEXPECTED, "only in B"),
    *(Difference(StateKey(name), Aspect.MISSING, "only in A") for name in ("x", "y")),
    *(Difference(StateKey(name, "entry"), Aspect.ENTRY, "3 in A, 4 in B") for name in ("step", "epoch")),
]


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        (
            EQUAL,
            "6 tensors: float32 -> bfloat16, equal as numbers (a.weight, b.weight, c.weight, d.weight and 2 more)",
        ),
        (EQUAL[:1], "a.weight: the words of a.weight"),
        (
            [EQUAL[0], APART],
            "2 tensors: float32 -> bfloat16, 2 elements differ as numbers, by at most 0.5 (relative 0.25); "
            "1 NaN on one side only (z, a.weight)",
        ),
        (BOTH, "4 tensors: float32 -> bfloat16, equal as numbers (a (weight and master), b (weight and master))"),
        (
            OTHERS,
            "n: only in B\n2 tensors: only in A (x, y)\nstep: 3 in A, 4 in B\nepoch: 3 in A, 4 in B\n"
            "large: by 9\nsmall: by 1\nsame: by 1",
        ),
    ],
    ids=["equal reasons", "one alone", "apart as numbers", "weights and masters", "other reasons"],
)
def test_equal_reasons_are_one_line_and_values_keep_their_order(differences, said):
    assert [f"{row.name}: {row.what}" for row in fold_rows(summarize_differences(differences).rows)] == said.split("\n")


ODD = "a|b`c*d_e_ <b>x</b> [l](https://x.y) \\| &amp; @you #1 $x$ ~~s~~ ![i](u) www.z.com _f_ __init__ :smile:"


def table(text: str) -> list[list[str]]:
    """The cells of the one table of a Markdown text, as they are shown."""
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(text)
    assert sum(each.type == "table_open" for each in tokens) == 1
    rows: list[list[str]] = []
    for number, token in enumerate(tokens):
        if token.type == "tr_open":
            rows.append([])
        elif token.type in ("td_open", "th_open"):
            inner = tokens[number + 1].children or []
            assert {each.type for each in inner} <= {"text", "text_special"}
            rows[-1].append("".join(each.content for each in inner))
    return rows


def test_markdown_shows_every_character_of_a_name(tmp_path):
    save_file({ODD: torch.ones(2), "v": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({ODD: torch.zeros(2), "v": torch.ones(2)}, tmp_path / "b.safetensors")
    pair = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    code, out, _ = run_command("diff", *pair, "--format", "markdown")
    assert code == 6
    assert table(out) == [["name", "difference"], [ODD, "2 of 2 elements differ, by at most 1 (relative 1)"]]
    bare = re.sub(r"&#\d+;", "", escape_markdown(ODD))
    assert not set(bare) & set("|<>`*[]@#$~!&\\")
    assert "https:" not in escape_markdown(ODD) and "www." not in escape_markdown(ODD)
    assert escape_markdown("self_attn.q_proj: 3") == "self_attn.q_proj: 3"
    code, out, _ = run_command("verify", pair[0], "--format", "markdown")
    assert (code, "all are whole" in out, "| ---" in out) == (0, True, False)


def test_markdown_has_some_hundred_rows(capsys):
    output.print_markdown("t", [], ["n"], [[f"row {number}"] for number in range(MAX_TABLE_ROWS + 5)])
    out = capsys.readouterr().out
    assert len(table(out)) == MAX_TABLE_ROWS + 1
    assert out.endswith("and 5 more\n\n")


class Harm:
    def __reduce__(self) -> Any:
        return os.getpid, ()


def sarif(*words: str | Path) -> list[dict[str, Any]]:
    """The runs of a log, whose results have a text each and are of a rule."""
    _, out, _ = run_command(*words, "--format", "sarif")
    log = json.loads(out)
    assert log["version"] == "2.1.0"
    for each in log["runs"]:
        rules = {rule["id"] for rule in each["tool"]["driver"]["rules"]}
        assert {result["ruleId"] for result in each["results"]} <= rules
        assert all(result["message"]["text"] for result in each["results"])
    return list(log["runs"])


def places(run: dict[str, Any]) -> list[tuple[str, Any]]:
    found = [each["locations"][0]["physicalLocation"] for each in run["results"]]
    return [(each["artifactLocation"]["uri"], each.get("region")) for each in found]


def test_sarif_has_the_bytes_of_an_opcode(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    torch.save({"w": torch.ones(3), "x": Harm()}, "models/zip file.pt")
    torch.save({"w": torch.ones(3), "x": Harm()}, "models/old.pt", _use_new_zipfile_serialization=False)
    Path("models/plain.pkl").write_bytes(pickle.dumps({"x": Harm()}))
    np.save("models/objects.npy", np.array([Harm()], dtype=object), allow_pickle=True)
    np.savez("models/stored.npz", a=np.array([Harm()], dtype=object))
    np.savez_compressed("models/deflated.npz", a=np.array([Harm()], dtype=object))
    Path("models/noise.pt").write_bytes(b"noise")
    (result,) = sarif("scan", "models")
    found = dict(places(result))
    assert set(found) == {
        *("models/zip%20file.pt", "models/old.pt", "models/plain.pkl", "models/objects.npy"),
        *("models/stored.npz", "models/deflated.npz", "models/noise.pt"),
    }
    for uri, region in found.items():
        if uri in ("models/deflated.npz", "models/noise.pt"):
            assert region is None
        else:
            data = Path(uri.replace("%20", " ")).read_bytes()
            before = data[: region["byteOffset"] + region["byteLength"]]
            assert before.endswith(pickle.REDUCE)
            assert b"getpid" in before[-60:]
    with zipfile.ZipFile("models/zip file.pt") as archive:
        record = next(each for each in archive.infolist() if each.filename.endswith("/data.pkl"))
        data = archive.read(record)
    start = Path("models/zip file.pt").read_bytes().index(data)
    assert start < found["models/zip%20file.pt"]["byteOffset"] < start + len(data)


@pytest.mark.filterwarnings("ignore")
def test_sarif_has_the_bytes_of_an_item(tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.ones(4), "b": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    file = next(tmp_path.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    start = data.index(b"PK\x03\x04", 100)
    while b"data.pkl" not in data[start : start + 80]:
        start = data.index(b"PK\x03\x04", start + 1)
    data[start + 40] ^= 1
    file.write_bytes(data)
    (result,) = sarif("scan", tmp_path)
    ((uri, region),) = places(result)
    assert uri == file.name
    assert region == {"byteOffset": start, "byteLength": len(data) - start}


def test_several_sources_are_several_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    for path in ("a/x.pkl", "y.pkl"):
        Path(path).write_bytes(pickle.dumps(Harm()))
    Path("ok.pkl").write_bytes(pickle.dumps({}))
    words = ("scan", "a/x.pkl", "ok.pkl", "y.pkl")
    first, second, third = sarif(*words)
    assert [places(each)[0][0] for each in (first, third)] == ["a/x.pkl", "y.pkl"]
    assert second["results"] == []
    assert [each["clean"] for each in json.loads(run_command(*words, "--json")[1])] == [False, True, False]
    code, out, error = run_command(*words)
    assert (code, out.count("it calls"), "a/x.pkl (byte" in out) == (7, 2, True)
    assert "a/x.pkl, y.pkl is not proved to be safe: 2 findings" in error
    code, out, _ = run_command(*words, "--format", "markdown")
    assert [row[:2] for row in table(out)] == [["danger", "file"], ["runs", "a/x.pkl"], ["runs", "y.pkl"]]


def test_sarif_of_verify_names_files_and_tensors(tmp_path):
    save_file({"w": torch.ones(4)}, tmp_path / "m.safetensors")
    ckpt_tools.checksum(tmp_path / "m.safetensors")
    save_file({"w": torch.zeros(4)}, tmp_path / "m.safetensors")
    (result,) = sarif("verify", tmp_path / "m.safetensors")
    (found,) = result["results"]
    assert (found["ruleId"], found["locations"]) == ("digest", [{"logicalLocations": [{"fullyQualifiedName": "w"}]}])
    (tmp_path / "m.safetensors.sha256").write_text("0" * 64)
    (result,) = sarif("verify", tmp_path / "m.safetensors")
    assert places(result) == [("m.safetensors", None)]


@pytest.mark.parametrize(
    ("source", "folder"),
    [
        ("a/b.pt", "a"),
        ("./a/b.pt", "a"),
        ("b.pt", ""),
        (".", ""),
        ("/a/b.pt", ""),
        ("../a/b.pt", ""),
        ("s3://bucket/a", ""),
    ],
)
def test_names_begin_at_the_working_directory(source, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_source_folder(source) == folder
    Path("a").mkdir()
    assert find_source_folder("a") == "a"
