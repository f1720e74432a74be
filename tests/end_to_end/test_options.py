"""Nothing that a user asked for is ignored in silence: every option of every command applies, or is an error."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import ckpt_tools
from ckpt_tools.core import applicability
from ckpt_tools.core.option_names import format_flag
from ckpt_tools.errors import SourceNotFoundError, UsageError
from ckpt_tools.formats.applicability import COMPARING_RULES, DIFFING_RULES, WRITING_RULES
from tests.support.commands import all_commands, run_command

Paths = Mapping[str, Path]

APPLY_ALWAYS = {
    *("from_", "to", "state", "optimizer_file", "memory", "workers", "strict", "resume", "overwrite", "allow_less"),
    *(
        "fsync",
        "part",
        "script",
        "shows_card",
        "io",
        "checksum",
        "dry_run",
        "output",
        "private_key",
        "runner",
        "adapter_name",
        *("coefficients", "decay", "last", "every"),
        "allow_missing",
        "untie",
    ),
    *("as_json", "quiet", "progress", "log_format", "tensors", "tree", "depth", "stats", "slot", "top", "list_all"),
    *(
        "keep_last",
        "keep_every",
        "keep_best",
        "healthy",
        "against",
        "ignore",
        "incomplete",
        "yes",
        "allow",
        "allow_configuration",
        "form",
        "verbose",
    ),
    *("version", "help", "steps", "every", "last", "follow", "until", "poll", "then"),
}
"""Options that have no case in which they could be ignored: they name a reader or writer, bound any command, say how a
result is printed, or are an error where they do not fit."""

MATCHED = {"include", "exclude", "drop", "rename", "key_map", "inverse"}
"""Options whose values have to match something; ``inverse`` needs a recipe."""


def commands() -> Iterator[tuple[str, click.Option]]:
    for name, command in all_commands().items():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                yield name, parameter


def rules() -> list[applicability.ApplicabilityRule]:
    by_command = itertools.chain.from_iterable(applicability.COMMAND_RULES.values())
    return [*WRITING_RULES, *COMPARING_RULES, *DIFFING_RULES, *by_command]


def test_every_option_is_in_the_table_or_always_applies():
    ruled = {option for rule in rules() for option in rule.options} | {"address", "storage_options"}
    found = {option.name for _, option in commands()}
    assert found - APPLY_ALWAYS - ruled - MATCHED == set()


@pytest.fixture(scope="module")
def made(tmp_path_factory, checkpoint):
    """A checkpoint of each kind; ``zero2`` keeps fp32 masters beside bf16 weights."""
    folder = tmp_path_factory.mktemp("made")
    torch.save({"a.w": torch.ones(4, 4), "a.b": torch.zeros(4)}, folder / "torch.pt")
    ckpt_tools.convert(folder / "torch.pt", folder / "safetensors.safetensors")
    ckpt_tools.checksum(folder / "torch.pt", output=folder / "digests.json")
    dcp = checkpoint("fsdp2", "plain", 2).checkpoint
    ckpt_tools.convert(dcp, folder / "zero2", to="zero2", world_size=2, dtype="bfloat16")
    ckpt_tools.convert(dcp, folder / "universal", to="universal")
    (folder / "map.json").write_text('{"a.w": "a.v"}')
    ckpt_tools.checksum(folder / "zero2", output=folder / "zero2.json")
    names = ("zero2", "universal", "map.json", "digests.json", "zero2.json")
    files = {"torch": folder / "torch.pt", "safetensors": folder / "safetensors.safetensors", "dcp": dcp}
    return {**files, **{name: folder / name for name in names}}


CONVERSIONS: list[tuple[str, str, dict[str, Any], str]] = [
    ("torch", "safetensors", {"world_size": 4}, "zero1, zero2, zero3, meta and sharded.*writes safetensors"),
    ("dcp", "universal", {"world_size": 4}, "writes universal"),
    ("dcp", "dcp", {"max_shard_size": "1MB"}, "safetensors and torch.*writes dcp"),
    ("dcp", "dcp", {"tag": "t"}, "DeepSpeed.*reads dcp and writes dcp"),
    ("safetensors", "torch", {"model_key": "model"}, "trees.*reads safetensors and writes torch"),
    ("safetensors", "dcp", {"optim_key": "optim"}, "optimizer state to dcp"),
    ("zero2", "zero3", {"weights": "model"}, "one copy of each weight.*zero3 keeps"),
    ("dcp", "universal", {"config": "."}, "for sizes of a recipe.*writes universal"),
    ("dcp", "dcp", {"inverse": True}, "recipe"),
    ("dcp", "dcp", {"dequantize": True}, "needs the quantization_config of the model's config.json"),
    ("dcp", "dcp", {"address": "auto"}, r"runner[ =]'?ray"),
    ("dcp", "dcp", {"storage_options": {"key": "x"}}, "s3://"),
    ("dcp", "dcp", {"runner": "spark"}, "spark' is not one of '?threads'?, '?ray"),
    ("dcp", "dcp", {"workers": 0}, "workers.*(at least one|x>=1)"),
]


@pytest.mark.parametrize(("source", "to", "options", "said"), CONVERSIONS)
def test_conversions_refuse_what_does_not_apply(source, to, options, said, made, tmp_path):
    with pytest.raises(UsageError, match=said):
        ckpt_tools.plan(made[source], tmp_path / "out", to=to, **options)
    # And so does the command line.
    (name, value), *_ = options.items()
    words = [] if value is True else ["key=x" if isinstance(value, dict) else str(value)]
    given = ["convert", str(made[source]), str(tmp_path / "out"), "--to", to, format_flag(name), *words]
    done = run_command(*given)
    assert done.code == 2 and re.search(said, " ".join(done.err.split()))


FITTING: list[tuple[str, str, dict[str, Any]]] = [
    ("dcp", "dcp", {"world_size": 3}),
    ("dcp", "zero1", {"world_size": 3, "tag": "mine"}),
    ("dcp", "safetensors", {"max_shard_size": "1MB", "weights": "model"}),
    ("safetensors", "dcp", {"model_key": "net"}),
    ("zero2", "dcp", {"model_key": "net", "optim_key": "opt", "weights": "model"}),
    ("zero2", "zero3", {"weights": "master"}),
    ("zero2", "zero3", {"weights": None, "world_size": None, "include": ()}),
    ("dcp", "zero2", {"weights": "model"}),
]


@pytest.mark.parametrize(("source", "to", "options"), FITTING)
def test_what_applies_is_taken(source, to, options, made, tmp_path):
    assert ckpt_tools.plan(made[source], tmp_path / "out", to=to, **options).files


OF_TWO = ({"state": "model"}, {"weights": "master"}, {"include": ["*"]}, {"exclude": ["a.b"]}, {"rename": ["a=b"]},
          {"key_map": "map.json"})  # fmt: skip
COMPARISONS: list[tuple[str, list[str], dict[str, Any], str]] = [
    ("inspect", ["dcp"], {"tag": "t"}, "DeepSpeed"),
    ("inspect", ["zero2"], {"model_key": "model"}, "trees"),
    ("open", ["safetensors"], {"optim_key": "optim"}, "trees"),
    ("checksum", ["safetensors"], {"tag": "t", "output": "-"}, "DeepSpeed"),
    ("checksum", ["safetensors"], {"overwrite": True, "output": "-"}, "not written"),
    ("verify", ["torch"], {"dtype": "bfloat16"}, "with dst;"),
    *(("verify", ["torch"], options, "dst or digests=") for options in OF_TWO),
    ("verify", ["torch"], {"recipe": "mixtral"}, "with dst;"),
    ("verify", ["torch"], {"digests": "digests.json", "recipe": "mixtral"}, "before a recipe"),
    ("diff", ["torch", "safetensors"], {"config": "."}, "no recipe is named"),  # verify compares its files
    ("diff", ["torch", "safetensors"], {"inverse": True}, "is for a recipe"),
    ("verify", ["torch"], {"signature": "x.sig"}, "public_key="),
    ("verify", ["torch"], {"digests": "digests.json", "dtype": "bfloat16"}, "before a cast"),
    ("verify", ["torch"], {"digests": "digests.json", "include": ["no.*"]}, "nearest"),
    ("verify", ["torch"], {"digests": "digests.json", "rename": ["^no="]}, "nearest"),
    ("verify", ["zero2"], {"digests": "zero2.json", "weights": "model"}, "both keep them"),
    ("verify", ["torch", "safetensors"], {"digests": "digests.json"}, "one checkpoint"),
    ("verify", ["torch", "safetensors"], {"public_key": "k"}, "one checkpoint"),
    ("verify", ["torch", "safetensors"], {"tag": "t"}, "DeepSpeed"),
    ("diff", ["torch", "safetensors"], {"tag": "t"}, "DeepSpeed"),
    ("diff", ["safetensors", "torch"], {"model_key": "t"}, "trees"),
    ("diff", ["zero2", "zero2"], {"weights": "model"}, "both keep them"),
    *(
        (verb, ["torch"], {"storage_options": {"key": "x"}}, "s3://")
        for verb in ("inspect", "open", "scan", "checksum", "verify", "clean")
    ),
    ("diff", ["torch", "safetensors"], {"storage_options": {"key": "x"}}, "s3://"),
]


@pytest.mark.parametrize(("verb", "sources", "options", "said"), COMPARISONS)
def test_other_verbs_refuse_what_does_not_apply(verb, sources, options, said, made):
    files = {name: made[value] for name, value in options.items() if isinstance(value, str) and value in made}
    with pytest.raises(UsageError, match=said):
        getattr(ckpt_tools, verb)(*(made[source] for source in sources), **{**options, **files})


def test_a_storage_option_given_twice_is_refused():
    done = run_command("inspect", "s3://b/k", "--storage-option", "key=1", "--storage-option", "key=2")
    assert done.code == 2 and "'key' is given twice" in done.err


def test_the_tag_and_keys_that_are_not_of_the_source_are_of_the_destination(made, tmp_path):
    ckpt_tools.convert(made["dcp"], tmp_path / "zero", to="zero2", tag="mine")
    assert ckpt_tools.verify(made["dcp"], tmp_path / "zero", tag="mine").equal
    with pytest.raises(SourceNotFoundError, match="no tag 'other'"):
        ckpt_tools.verify(made["dcp"], tmp_path / "zero", tag="other")
    ckpt_tools.convert(made["zero2"], tmp_path / "dcp", to="dcp", model_key="net", optim_key="opt")
    assert ckpt_tools.verify(made["zero2"], tmp_path / "dcp", model_key="net", optim_key="opt").equal
    with pytest.raises(UsageError, match="does not exist"):
        ckpt_tools.verify(made["zero2"], tmp_path / "dcp", model_key="other")


MATCHLESS: list[tuple[dict[str, Any], str]] = [
    ({"rename": ["^a=b", "^c="]}, r"rename='\^c=' matches no tensor; the nearest names are "),
    ({"rename": ["^a[.]v=b"]}, "the nearest names are a.w, a.b "),
    ({"exclude": ["a.w", "a.x"]}, "exclude='a.x' matches no tensor"),
    ({"include": ["a.w", "a.x"]}, "include='a.x' matches no tensor; the nearest names are a.w, a.b "),
    ({"key_map": {"a.w": "x", "a.ww": "y"}}, "key_map= renames 'a.ww', which the checkpoint does not hold"),
    ({"key_map": {}}, "is empty"),
]


@pytest.mark.parametrize(("options", "said"), MATCHLESS)
@pytest.mark.parametrize("verb", ["convert", "verify", "diff"])
def test_what_matches_nothing_is_refused(verb, options, said, made, tmp_path):
    if "key_map" in options:
        (tmp_path / "map.json").write_text(json.dumps(options["key_map"]))
        options = {"key_map": tmp_path / "map.json"}
    is_pair = verb in ("verify", "diff")
    with pytest.raises(UsageError, match=said):
        getattr(ckpt_tools, verb)(
            made["torch"], made["safetensors"] if is_pair else tmp_path / "x.safetensors", **options
        )


def test_a_plan_reports_what_is_renamed(made, tmp_path):
    """A map of the whole model fits a part of it, and a rule sees what earlier ones made."""
    (tmp_path / "map.json").write_text('{"a.w": "v", "a.b": "c"}')
    for options, renamed in (
        ({"include": ["a.w"], "key_map": tmp_path / "map.json"}, {"a.w": "v"}),
        ({"rename": ["^a=b", "^b=c"]}, {"a.b": "c.b", "a.w": "c.w"}),
        ({"rename": ["a=a"]}, {}),
        ({}, {}),
    ):
        report = ckpt_tools.plan(made["torch"], tmp_path / "x.pt", **options)
        assert report.renamed == report.to_json()["renamed"] == renamed
