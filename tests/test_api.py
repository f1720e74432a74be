"""The public API: its names, its keywords, how it spells options, and how results show themselves."""

import inspect
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, is_typeddict

import click
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ckpt_tools
from ckpt_tools import api, errors
from ckpt_tools.core import option_names, options
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import expand_option_template, format_option
from ckpt_tools.core.options import get_dtype_name
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.formats.builtin import FORMATS
from ckpt_tools.messages.showing import DisplayableResult, ItemCount
from ckpt_tools.stores.publishing import CleanReport
from ckpt_tools.verification.report import Aspect
from ckpt_tools.verification.signing import SignReport
from tests.support.commands import WITHOUT_FUNCTION, all_commands, function_of, run_command

PAGE = (Path(__file__).parent.parent / "docs" / "python.md").read_text()
BY_NAME = all_commands()
COMMANDS = [name for name in BY_NAME if name not in WITHOUT_FUNCTION]


VERBS: dict[str, Callable[..., Any]] = {name: getattr(api, function_of(name)) for name in [*COMMANDS, "open"]}
"""By command."""
BESIDE_COMMANDS = ("load_into", "storage_reader", "claim", "fingerprint", "recorded_digests")
FUNCTIONS = {**VERBS, **{name: getattr(ckpt_tools, name) for name in BESIDE_COMMANDS}}

ONLY_PRINTED = {
    *(
        "form",
        "as_json",
        "shows_card",
        "quiet",
        "progress",
        "log_format",
        "tensors",
        "tree",
        "depth",
        "dry_run",
        "script",
        "then",
        "top",
        "list_all",
    )
}
"""Options of commands about how a result is printed; ``convert --dry-run`` is ``plan``."""

ONLY_IN_PYTHON = {
    "reshard": {
        *("state", "dtype", "weights", "max_shard_size", "include", "exclude", "rename", "key_map", "buffers"),
        *("strip", "recipe", "inverse", "dequantize", "config", "like", "untie", "drop", "fill"),
    },
    "consolidate": {"world_size"},
    "convert-run": {"on_checkpoint"},
    "plan": {"runner", "address", "resume", "fsync"},
}


def parameters(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(FUNCTIONS[name]).parameters)


def test_every_public_name_resolves_and_is_documented_and_nothing_else_is_public():
    for name in ckpt_tools.__all__:
        assert getattr(ckpt_tools, name) is not None
        assert name == "__version__" or re.search(rf"`(ckpt_tools\.)?{name}[`(]", PAGE), f"docs/python.md lacks {name}"
    assert dir(ckpt_tools) == sorted(ckpt_tools.__all__)
    found = {name for name, value in vars(ckpt_tools).items() if not isinstance(value, types.ModuleType)}
    public = {name for name in found if not name.startswith("_")}
    assert public - {"annotations", "TYPE_CHECKING"} <= set(ckpt_tools.__all__)
    with pytest.raises(AttributeError, match="no attribute 'convrt'"):
        ckpt_tools.convrt  # noqa: B018


def test_every_error_and_every_result_is_public():
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, CkptError)}
    names = {re.split(r"[^A-Za-z]", str(inspect.signature(verb).return_annotation))[-1] for verb in VERBS.values()}
    assert kinds | {name for name in names if name} <= set(ckpt_tools.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_keyword_is_written_out_and_a_misspelt_one_is_an_error_of_the_function_itself(name):
    kinds = {each.kind for each in parameters(name).values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    required = [each.name for each in parameters(name).values() if each.default is each.empty]
    said = rf"^{function_of(name)}\(\) got an unexpected keyword argument 'storage_option'"
    with pytest.raises(TypeError, match=said):
        FUNCTIONS[name](**dict.fromkeys(required, "x"), storage_option={})


def test_a_type_checker_asks_for_none_of_the_shared_keywords():
    kinds = [kind for kind in vars(options).values() if is_typeddict(kind)]
    assert kinds and not frozenset().union(*(kind.__required_keys__ for kind in kinds))


def test_verbs_that_convert_take_the_same_keywords():
    whole = parameters("convert")
    assert parameters("plan") == whole
    assert parameters("consolidate") == {name: each for name, each in whole.items() if name != "state"}
    resharding = {name: each for name, each in whole.items() if name not in {"to", "world_size", "quantize", "keep"}}
    assert {name: each for name, each in parameters("reshard").items() if name != "world_size"} == resharding


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_and_its_function_have_the_same_options_choices_and_defaults(name):
    taken, options = parameters(name), BY_NAME[name].params
    given = {each.name for each in options if each.expose_value} - ONLY_PRINTED
    given |= {"dry_run"} if name == "clean" else set()
    assert taken.keys() - {"on_progress"} - given == ONLY_IN_PYTHON.get(name, set())
    assert given <= taken.keys()
    for each in options:
        if isinstance(each, click.Option) and isinstance(each.type, click.Choice) and each.name not in ONLY_PRINTED:
            annotation = str(taken[str(each.name)].annotation).split(" ")[0]
            accepted = getattr(option_names, annotation.replace("DTypeLike", "DTypeName"))
            assert tuple(each.type.choices) == get_args(accepted)
    needed = {"prune": ["--keep-last", "1"], "reshard": ["--world-size", "1"], "sign": ["--private-key", "k"]}
    places = ["x" for each in options if isinstance(each, click.Argument)]
    parsed = BY_NAME[name].make_context(name, [*places, *needed.get(name, [])]).params
    for each in taken.values():
        if each.default is not each.empty and each.name in parsed and each.name != "dst":
            assert (parsed[each.name] or None) == (each.default or None), each.name


def test_choices_are_those_of_the_index():
    assert set(get_args(option_names.WrittenFormat)) == {each.name for each in FORMATS.values() if each.writes}
    assert set(get_args(option_names.ReadFormat)) == {each.name for each in FORMATS.values() if each.reads}
    assert get_origin(option_names.WrittenFormat) is Literal


def test_dtypes_are_known_by_name():
    assert {get_dtype_name(each) for each in (torch.bfloat16, np.dtype(ml_dtypes.bfloat16), "bfloat16")} == {"bfloat16"}
    assert {get_dtype_name(each) for each in (torch.half, np.float16, np.half, np.dtype("<f2"))} == {"float16"}


@pytest.fixture
def made(tmp_path):
    tensors = {"a.w": np.arange(16, dtype=np.float32).reshape(4, 4), "a.b": np.zeros(4, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    ckpt_tools.convert(tmp_path / "model.safetensors", tmp_path / "dcp", to="dcp", world_size=2)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.bfloat16, np.float16])
def test_verbs_take_dtypes_of_libraries(dtype, made):
    source, out = made / "model.safetensors", made / "out.safetensors"
    assert ckpt_tools.plan(source, out, dtype=dtype).bytes_written < ckpt_tools.plan(source, out).bytes_written
    ckpt_tools.convert(source, out, dtype=dtype)
    assert ckpt_tools.open(out)["a.w"].dtype.name == get_dtype_name(dtype)
    assert ckpt_tools.verify(source, out, dtype=dtype).equal
    ckpt_tools.consolidate(made / "dcp", made / "one", dtype=dtype)
    ckpt_tools.reshard(made / "dcp", made / "three", world_size=3, dtype=dtype)
    assert ckpt_tools.diff(made / "one", made / "three").equal


@pytest.mark.parametrize("dtype", [torch.int8, np.float64, float, object()])
def test_other_dtypes_are_refused(dtype, made):
    with pytest.raises(UsageError, match=r"^dtype='.*' is not one of float32, bfloat16, float16$"):
        ckpt_tools.plan(made / "dcp", made / "x.pt", dtype=dtype)


MESSAGES: list[tuple[str, list[str], dict[str, Any], str, str]] = [
    ("convert", ["dcp", "model.safetensors"], {}, "overwrite=True", "--overwrite"),
    ("convert", ["dcp", "out"], {}, "choose a format with to=: safetensors (hf), torch (pt), dcp (fsdp2), zero1",
        "choose a format with --to"),
    ("plan", ["dcp", "x.pt"], {"to": "dcp"}, "which to='dcp' contradicts", "which --to dcp contradicts"),
    ("plan", ["dcp", "x.pt"], {"world_size": 2}, "world_size= is for", "--world-size is for"),
    ("plan", ["dcp", "x.pt"], {"include": ["c"]}, "(see inspect(...).tensors)", "(see inspect --tensors)"),
    ("plan", ["dcp", "x.pt"], {"rename": ["^c="]}, "rename='^c=' matches no", "--rename '^c=' matches no"),
    ("plan", ["dcp", "x.pt"], {"key_map": "no.json"}, "key_map='no.json': No such", "--key-map no.json: No such"),
    ("plan", ["dcp", "x.pt"], {"memory": "1kB"}, "raise memory= or lower w", "raise --memory or lower --w"),
    ("convert", ["dcp", "x.pt"], {"address": "a"}, "is for runner='ray'", "is for --runner ray"),
    ("verify", ["dcp"], {"state": "model"}, "verify with dst or digests=;", "verify with DST or --digests;"),
    ("checksum", ["dcp"], {"output": "-", "overwrite": True}, "with output='-' they", "with --output - they"),
    ("inspect", ["dcp"], {"tag": "t"}, "tag= is for", "--tag is for"),
    ("inspect", ["s3://b/k"], {"storage_options": {"what": "1"}}, "storage_options={'what': '...'}: s3:// knows",
        "--storage-option what=...: s3:// knows"),
]  # fmt: skip


@pytest.mark.parametrize(("verb", "places", "options", "python", "command_line"), MESSAGES)
def test_a_message_spells_options_for_its_reader(verb, places, options, python, command_line, made, monkeypatch):
    monkeypatch.chdir(made)
    said = run_command(verb, *places, *words(options)).err
    assert command_line in " ".join(said.split())
    with pytest.raises(CkptError, match=re.escape(python)):
        VERBS[verb](*places, **options)


def words(options: dict[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        yield option_names.format_flag(name)
        if isinstance(value, dict):
            yield from (f"{key}={each}" for key, each in value.items())
        elif value is not True:
            yield value[0] if isinstance(value, list) else str(value)


def test_templates_name_options_and_values():
    template = "for {dst}, {weights} or {state:model}"
    assert expand_option_template(template) == "for dst, weights= or state='model'"
    with option_names.use_command_line_spelling():
        assert expand_option_template(template) == "for DST, --weights or --state model"
        assert format_option("key_map", Path("a b.json")) == "--key-map 'a b.json'"
    assert format_option("from_") == "from_="


def reports(made: Path) -> list[Any]:
    """A result of every kind, with long names and many parts."""
    rename = [f"^a=<b>&{'long' * 50}"]
    (made / "odd\nname").mkdir()
    out = made / "odd\nname" / ("x" * 200)
    converted = ckpt_tools.convert(made / "dcp", out, to="safetensors", rename=rename, dtype="float16")
    differing = ckpt_tools.diff(made / "dcp", out)
    many = replace(differing, differences=differing.differences * 100_000)
    torch.save({"f": torch.nn.Linear(2, 2)}, made / "evil.pt")
    torch.save({"w": torch.ones(1), "class": torch.nn.Linear}, made / "foreign.pt")
    scanned = ckpt_tools.scan(made / "evil.pt")
    return [
        converted,
        converted.plan,
        *converted.plan.notes,
        many,
        replace(many.differences[0], key=StateKey("k" * 5000), aspect=Aspect.VALUES, what="w\n" * 5000),
        scanned,
        replace(scanned, findings=scanned.findings * 100_000),
        *scanned.findings,
        ckpt_tools.checksum(out),
        ckpt_tools.clean(out),
        replace(ckpt_tools.clean(out), destination="d" * 10_000),
        *ckpt_tools.list_formats(),
        *reports_of_a_recipe(made),
        ckpt_tools.inspect(out),
        *reports_of_a_run(made),
        ckpt_tools.make_loadable(made / "foreign.pt", made / "plain.pt"),
        ckpt_tools.delta(out, out, made / "weight_v000001"),
        SignReport("s" * 1000),
    ]


def reports_of_a_recipe(made: Path) -> list[Any]:
    line = """{left = {"a.w" = "(t:2 b:2) W"}, right = {"a.t" = "t W", "a.b.w" = "b W"}}"""
    (made / "halves.toml").write_text(f'others = "same"\nabout = "{"long" * 100}"\nmap = [{line}]\n')
    checked = ckpt_tools.check_recipe(made / "halves.toml", made / "dcp")
    shown = ckpt_tools.show_recipe(made / "halves.toml")
    return [checked, replace(checked, tensors=checked.tensors * 100_000), shown]


def reports_of_a_run(made: Path) -> list[Any]:
    for step in (1, 2):
        ckpt_tools.convert(made / "dcp", made / "run" / f"step_{step}", to="safetensors")
    save_file({"w": np.full(2, np.nan, np.float32)}, made / "nan.safetensors")
    checked = ckpt_tools.check(made / "nan.safetensors")
    listed, pruned = ckpt_tools.ls(made / "run"), ckpt_tools.prune(made / "run", keep_last=1)
    converted = ckpt_tools.convert_run(made / "run", str(made / "run-{step}.pt"))
    results = [listed, *listed.checkpoints, pruned, *pruned.checkpoints, checked, *checked.findings]
    return [*results, converted, *converted.checkpoints]


def test_results_show_attributes_in_one_short_line_or_a_small_table_and_a_collection_is_its_count(made):
    seen = set()
    for report in reports(made):
        line, drawn = repr(report), report._repr_html_()
        assert len(line) < 200 and "\n" not in line and line.startswith(f"{type(report).__name__}("), line
        assert drawn.startswith("<table>") and len(drawn) < 5000 and "<b>" not in drawn
        seen.add(type(report))
        for name, shown in report.shown().items():
            held = getattr(report, name)
            if isinstance(shown, ItemCount):
                assert shown == len(held) and repr(shown) == f"<{len(held)}>", (type(report), name)
            elif isinstance(held, float):
                assert shown == pytest.approx(held, rel=1e-5), (type(report), name)
            else:
                assert shown in (held, getattr(held, "value", held), str(held)), (type(report), name)
    public = {getattr(ckpt_tools, name) for name in ckpt_tools.__all__}
    assert {each for each in public if isinstance(each, type) and issubclass(each, DisplayableResult)} == seen
    assert {each.__qualname__ for each in DisplayableResult.__subclasses__()} == {each.__qualname__ for each in seen}
    assert "&lt;b&gt;bold" in CleanReport("<b>bold</b>", (), is_removed=True)._repr_html_()
    page = Note(Outcome.CAST, "x", "y", 1234567, 2048, asked=True)._repr_html_()
    assert all(f">{cell}<" in page for cell in ("1,234,567", "2.05 kB", "True")), page


def test_aliases_are_the_names_that_they_stand_for(made):
    source = made / "model.safetensors"
    plan = ckpt_tools.plan(source, made / "x", to="fsdp2", from_="hf", dtype="bf16")
    assert (plan.source_format, plan.target_format) == ("safetensors", "dcp")
    assert [note.asked for note in plan.notes if note.outcome is Outcome.CAST] == [True]
    assert plan == ckpt_tools.plan(source, made / "x", to="dcp", from_="safetensors", dtype="bfloat16")
    assert ckpt_tools.convert(source, made / "y", to="pt", dtype="fp16").to_json()["plan"]["target_format"] == "torch"
    assert ckpt_tools.inspect(made / "y", from_="pt").format == "torch"
    assert ckpt_tools.verify(source, made / "y", dtype="fp16").equal
