"""Options from the environment and from a settings file: which wins, what is refused, and what does not apply."""

import json
import os
import re
from pathlib import Path
from unittest.mock import patch

import click
import numpy as np
import pytest
import safetensors.numpy

from ckpt_tools.cli.beside import ExternalCommand
from ckpt_tools.cli.settings import DESTRUCTIVE_OPTIONS, OPTIONS_WITHOUT_SETTINGS
from tests.support.commands import Done, all_commands, run_command

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory, with ``m.safetensors`` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    tensors = {"a": np.arange(8, dtype=np.float32), "b": np.ones(2, np.float32)}
    safetensors.numpy.save_file(tensors, tmp_path / "m.safetensors")


def run(*words: str, **variables: str) -> Done:
    """The command line, with these variables of the environment."""
    with patch.dict(os.environ, {f"CKPT_TOOLS_{name}": text for name, text in variables.items()}):
        return run_command(*words)


def own_file(text: str) -> None:
    folder = Path("config/ckpt-tools")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.toml").write_text(text)


def written(*words: str, **variables: str) -> str:
    """The format that ``plan`` says it would write."""
    code, out, err = run("plan", "m.safetensors", "out", "--json", *words, **variables)
    assert code == 0, err
    return str(json.loads(out)["target_format"])


def test_the_command_line_beats_the_environment_and_that_the_file():
    own_file('to = "npz"\n[plan]\nto = "universal"\n')
    assert written() == "universal"
    assert written(TO="torch") == "torch"
    assert written("--to", "dcp", TO="torch") == "dcp"
    own_file('to = "torch"\n[convert]\nto = "universal"\n')
    assert written() == "torch"


def test_a_file_that_is_named_comes_instead_of_the_own():
    own_file('to = "torch"\n')
    Path("named.toml").write_text('to = "dcp"\n')
    assert written(SETTINGS="named.toml") == "dcp"
    code, out, _ = run("--settings", "named.toml", "plan", "m.safetensors", "out", "--json", SETTINGS="none.toml")
    assert (code, json.loads(out)["target_format"]) == (0, "dcp")
    assert run("inspect", "m.safetensors", SETTINGS="none.toml")[0] == 2
    assert run("--settings", "/dev/null", "plan", "m.safetensors", "out")[2].startswith("Error: choose a format")


def test_aliases_flags_numbers_and_lists():
    given = {"TO": "fsdp2", "DTYPE": "bf16", "WORLD_SIZE": "2", "INCLUDE": "a\nb\n", "STRICT": "true", "CHECKSUM": "0"}
    assert run("convert", "m.safetensors", "out", "-q", **given)[0] == 0
    assert len(list(Path("out").glob("*.distcp"))) == 2
    found = json.loads(run("inspect", "out", "--tensors", JSON="1")[1])
    assert {each["dtype"] for each in found["tensors"]} == {"bfloat16"}
    own_file('include = ["a"]\nworkers = 1\nquiet = true\n')
    assert json.loads(run("plan", "m.safetensors", "x.pt", "--json")[1])["num_tensors"] == 1


REFUSED: list[tuple[str, dict[str, str], str]] = [
    ("", {"MEMRY": "1GiB"}, "CKPT_TOOLS_MEMRY is not the variable of an option; the nearest is CKPT_TOOLS_MEMORY"),
    ("", {"HELP": "1"}, "CKPT_TOOLS_HELP is not the variable of an option"),
    ("", {"FROM": ""}, "CKPT_TOOLS_FROM is empty"),
    ("", {"STORAGE_OPTION": "a=b\n\nc=d"}, "CKPT_TOOLS_STORAGE_OPTION contains an empty text"),
    ("", {"JSON": "yes"}, "CKPT_TOOLS_JSON is 1, 0, true or false"),
    ("", {"SETTINGS": ""}, "CKPT_TOOLS_SETTINGS is empty"),
    ("memry = 1", {}, "memry is not an option or a command; the nearest is memory"),
    ("[ls]\nmemory = 1", {}, "ls.memory is not an option of ls"),
    ("[train]\nout = 1", {}, "train is not an option or a command"),
    ("max_shard_size = 1", {}, "max_shard_size is not an option or a command; the nearest is max-shard-size"),
    ("overwrite = true", {}, "overwrite is for the table of one command"),
    ('json = "true"', {}, "json in .*settings.toml is true or false"),
    ('storage-option = "a=b"', {}, "is a list of strings"),
    ("from = true", {}, "is a string or a number"),
    ('from = ""', {}, "from in .*settings.toml is empty"),
    ("= 1", {}, "is not TOML"),
]


@pytest.mark.parametrize(("file", "variables", "said"), REFUSED)
def test_what_is_refused_by_name(file, variables, said):
    own_file(file)
    code, _, err = run("inspect", "m.safetensors", **variables)
    assert code == 2
    assert re.search(said, err), err


def test_a_value_is_checked_where_it_is_from_and_breaks_no_help():
    words = ("convert", "m.safetensors", "out")
    assert "CKPT_TOOLS_WORKERS: 'x' is not a valid integer" in run(*words, WORKERS="x", TO="dcp")[2]
    assert (
        "'5XB' is not a size; write for example 512MiB, 5GB or 1048576 (--memory is from CKPT_TOOLS_MEMORY)"
        in (run(*words, MEMORY="5XB", TO="dcp")[2])
    )
    assert "CKPT_TOOLS_DTYPE: 'int8' is not one of" in run(*words, DTYPE="int8", TO="dcp")[2]
    assert "Example:" in run("convert", "--help", NONE="1").out


INAPPLICABLE: list[tuple[list[str], dict[str, str]]] = [
    (["inspect", "m.safetensors"], {"STORAGE_OPTION": "endpoint_url=http://h", "TAG": "t", "WORLD_SIZE": "4"}),
    (["convert", "m.safetensors", "o.pt"], {"WORLD_SIZE": "4", "TAG": "t", "MODEL_KEY": "m", "ADDRESS": "auto"}),
    (["convert", "m.safetensors", "memory://settings/o", "--to", "dcp"], {"RESUME": "1"}),
    (["verify", "m.safetensors"], {"DTYPE": "bf16", "STATE": "model", "INVERSE": "1", "SIGNATURE": "s"}),
    (["diff", "m.safetensors", "m.safetensors", "--all"], {"TOP": "5", "CONFIG": "."}),
    (["recipes", "show", "mixtral"], {"JSON": "1", "MEMORY": "1GiB"}),
]


@pytest.mark.parametrize(("words", "variables"), INAPPLICABLE)
def test_a_setting_that_does_not_apply_is_left_out(words, variables):
    code, _, err = run(*words, **variables)
    assert (code, err) == (0, "")
    flags = [f"--{name.lower().replace('_', '-')}" for name, text in variables.items() if text != "1"]
    if words[0] == "convert" and flags:
        assert run(*words, "--overwrite", flags[0], variables["WORLD_SIZE"])[0] == 2


def test_verbose_says_where_values_are_from():
    own_file("workers = 1\n[convert]\nworld-size = 4\n")
    given = {"MEMORY": "1GiB", "STORAGE_OPTION": "key=very-secret-value"}
    code, _, err = run("-v", "convert", "m.safetensors", "o.pt", **given)
    assert code == 0
    assert "--memory 1GiB is from CKPT_TOOLS_MEMORY\n" in err
    assert "--storage-option is from CKPT_TOOLS_STORAGE_OPTION\n" in err
    assert "very-secret-value" not in err
    assert re.search(r"--workers 1 is from workers in \S+settings.toml\n", err)
    assert re.search(r"--world-size from \[convert\] world-size in \S+settings.toml does not apply here\n", err)
    assert "safetensors to torch: " in err
    assert run("convert", "m.safetensors", "p.pt", **given)[2] == ""


def test_what_replaces_files_is_said():
    own_file("[convert]\noverwrite = true\n")
    for number in range(2):
        code, _, err = run("convert", "m.safetensors", "o.pt", "-q")
        assert code == 0
        assert re.search(r"--overwrite is from \[convert\] overwrite in", err), number
    assert run("consolidate", "m.safetensors", "o.pt")[0] == 8
    assert run("convert", "m.safetensors", "o.pt", OVERWRITE="0")[0] == 8


OPTIONS = {
    name: [each for each in command.params if isinstance(each, click.Option)]
    for name, command in all_commands().items()
    if not isinstance(command, ExternalCommand)
}


def test_options_that_remove_or_vouch_are_known_to_settings():
    names = {each.name for found in OPTIONS.values() for each in found}
    assert names >= DESTRUCTIVE_OPTIONS
    assert not names & OPTIONS_WITHOUT_SETTINGS


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"completion"}))
def test_every_option_has_a_variable_and_a_key(name):
    """Each is known, empty or not: its value is checked before anything else is done."""
    command = all_commands()[name]
    places = ["x" for each in command.params if isinstance(each, click.Argument)]
    for option in [] if isinstance(command, click.Group) else OPTIONS[name]:
        key = max(option.opts, key=len).removeprefix("--")
        variable = key.upper().replace("-", "_")
        needed = [max(each.opts, key=len) for each in OPTIONS[name] if each.required and each is not option]
        words = [*name.split(), *places, *(word for each in needed for word in (each, "1"))]
        own_file("")
        code, _, err = run(*words, **{variable: ""})
        assert (code, f"CKPT_TOOLS_{variable} is" in err) == (2, True), err
        own_file(f"[{'.'.join(name.split())}]\n{key} = 1979-05-27\n")
        code, _, err = run(*words)
        assert (code, f"{key} in" in err) == (2, True), err
