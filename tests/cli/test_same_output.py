"""What commands print, with their exit codes, is what is recorded: a change of it is meant, and for the changelog.

``pytest --write-pages tests/cli/test_same_output.py`` records what they print now.
"""

import difflib
import os
import re
import zipfile
from pathlib import Path

import pytest

from tests.support.commands import all_commands, run_command
from tests.support.pages import ROOT, WRITE_PAGES

RECORD = Path(__file__).with_suffix(".txt")
CHECKPOINTS = ("accelerate", "autoep", "dcp", "gguf", "legacy", "megatron", "meta", "nanotron")
COMMANDS = """
inspect dcp --json
inspect legacy/model.pt --json
inspect megatron --json
inspect meta --json
inspect nanotron --json
inspect gguf --json
inspect autoep --json
inspect accelerate --json
inspect missing --json
plan dcp out --to safetensors --json
plan meta out --to dcp --json
plan nanotron out --to dcp --world-size 2 --json
plan autoep out --to universal --json
plan megatron out --to zero3 --world-size 3 --json
convert dcp o1 --to safetensors --json
convert meta o2 --to dcp --json
convert nanotron o3 --to dcp --world-size 2 --json
convert legacy/model.pt o4.safetensors --json
convert accelerate o5 --to dcp --json
convert gguf o6 --to dcp --json
convert dcp o1 --to safetensors --json
convert dcp o7 --to nothing
convert dcp o7
verify o2 --json
verify meta o2 --json
verify nanotron o3 --json
diff meta o2 --json
diff dcp o1 --json
diff o1 o2 --json
checksum o2 --json
verify o2 --json
scan dcp --json
scan accelerate --json
scan legacy/model.pt --json
clean o1 --json
formats --json
cat dcp model.0.weight
make-loadable legacy/model.pt o8.pt --json
reshard autoep o9 --world-size 2 --json
consolidate meta o10 --json
""".strip()
VARYING = re.compile(r'("(?:seconds|bytes_read|peak_memory_bytes)": )[\d.e-]+')
"""Seconds, and figures that depend on the number of processors."""


def outputs() -> str:
    words = [*(f"{command} --help" for command in sorted(all_commands())), *COMMANDS.splitlines()]
    runs = [(each, run_command(*each.split())) for each in words]
    return "".join(f"$ {each}\nexit code {run.code}\n{run.out}{run.err}\n" for each, run in runs)


def test_every_help_and_the_json_of_forty_commands(tmp_path, monkeypatch):
    for name in CHECKPOINTS:
        with zipfile.ZipFile(ROOT / f"tests/corpus/{name}.zip") as archive:
            archive.extractall(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    found = VARYING.sub(r"\g<1>0", outputs()).replace(str(tmp_path), "FOLDER")
    if os.environ.get(WRITE_PAGES):
        RECORD.write_text(found)
    expected = RECORD.read_text()
    differences = difflib.unified_diff(expected.splitlines(), found.splitlines(), "recorded", "printed", lineterm="")
    if found != expected:
        pytest.fail("\n".join(differences))
