"""No output of a command or function has a credential, wherever in a URL, an option or the environment it stands."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save

import ckpt_tools
from ckpt_tools.process import credentials
from ckpt_tools.stores.fsspec import store
from ckpt_tools.stores.retry import RetryPolicy
from inference.batch.rows import OutputColumns, OutputRow
from tests.stores.test_http import serving
from tests.support.canaries import CANARIES, ENCODED, MISTYPED, OPTIONS, PORT, RAW, URLS, Given, leaks, shown_by
from tests.support.commands import run_command
from training.launchers.failures import RankFailure
from training.loop.result import RunResult

SAMPLE = 60

TRAIN = ("train", "--strategy", "full_shard")


def _typed(line: str, *, out: bool = False) -> Callable[[str, str], list[str]]:
    """A command of a URL, and of an output if it has one, with these options."""
    verb, *options = line.split()
    return lambda url, place: [verb, url, *([place] if out else []), *options]


LINES: dict[str, Callable[[str, str], list[str]]] = {
    **{line: _typed(line) for line in ("inspect", "inspect --json", "inspect --verbose", "ls", "verify", "scan",
                                       "scan --format sarif", "check", "checksum", "sign", "clean",
                                       "prune --keep-last 1", "serve --port 0")},
    **{line: _typed(line, out=True) for line in ("plan", "convert --checksum", "reshard --world-size 2", "consolidate",
                                                 "make-loadable", "diff")},
    "plan to": lambda url, out: ["plan", out, url, "--to", "dcp"],
    "convert to": lambda url, out: ["convert", out, url, "--to", "dcp"],
    "convert both": lambda url, out: ["convert", url, url, "--to", "dcp"],
    "verify with": lambda url, out: ["verify", out, url],
    "train --resume": lambda url, out: [*TRAIN, "--out", out, "--launcher", "torchrun", "--resume", url],
    "train --storage": lambda url, out: [*TRAIN, "--out", out, "--storage", url, "--resume", "latest"],
    "predict": lambda url, out: ["predict", "--model", url, "--input", "digits", "--output", f"{out}.jsonl"],
    "predict --output": lambda url, out: ["predict", "--model", out, "--input", "digits", "--output", f"{url}.jsonl"],
    "serve named": lambda url, _: ["serve", "--model", f"a={url}", "--port", "0"],
}  # fmt: skip

WITHOUT_OPTIONS = {line for line in LINES if line.startswith(("train", "predict", "serve"))}
"""Commands that take URLs, and no options of stores."""


def claimed(url: str, more: dict[str, Any]) -> object:
    with ckpt_tools.claim(url, **more) as held:
        return held


FUNCTIONS: dict[str, Callable[[str, str, dict[str, Any]], object]] = {
    **{
        name: lambda url, _, more, name=name: getattr(ckpt_tools, name)(url, **more)
        for name in ("inspect", "open", "ls", "verify", "check", "scan", "checksum", "sign", "clean",
                     "recorded_digests", "fingerprint")
    },
    **{
        name: lambda url, out, more, name=name: getattr(ckpt_tools, name)(url, out, **more)
        for name in ("plan", "convert", "consolidate", "make_loadable")
    },
    "convert to": lambda url, out, more: ckpt_tools.convert(out, url, to="dcp", **more),
    "reshard": lambda url, out, more: ckpt_tools.reshard(url, out, world_size=2, **more),
    "diff": lambda url, out, more: ckpt_tools.diff(out, url, **more),
    "prune": lambda url, _, more: ckpt_tools.prune(url, keep_last=1, **more),
    "claim": lambda url, _, more: claimed(url, more),
    "load_into": lambda url, _, more: ckpt_tools.load_into(torch.nn.Linear(2, 2), None, url, **more),
    "storage_reader": lambda url, _, more: ckpt_tools.storage_reader(url, **more).read_metadata(),
    "Path": lambda url, out, more: ckpt_tools.convert(Path(url), out, **more),
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Nothing is remembered from another test; a store that does not answer is asked once again at most."""
    monkeypatch.setattr(store, "_POLICY", RetryPolicy(attempts=2, base_seconds=0))
    for name, value in {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    _forget()
    yield
    _forget()
    fsspec.filesystem("memory").store.clear()


def _forget() -> None:
    credentials._remembered_secrets.clear()
    credentials._secrets_longest_first = ()


def _cases(kinds: Mapping[str, Callable[[str], Given]], canaries: Mapping[str, str]) -> list[tuple[str, str, Given]]:
    return [
        (f"{kind}: {name}", canary, make(canary)) for kind, make in kinds.items() for name, canary in canaries.items()
    ]


# A short name alone before @ may be that of a user, or of a run.
NO_SECRET = "name alone, mistyped: short"

CASES = [
    *_cases(URLS, CANARIES | RAW),
    *(case for case in _cases(ENCODED, CANARIES) if case[0] != NO_SECRET),
    *_cases(OPTIONS, {name: canary for name, canary in (CANARIES | RAW).items() if name != "short"}),
]
LINE_CASES = [*CASES, *_cases(MISTYPED, CANARIES | RAW)]


def _sampled(pairs: list[Any], request: pytest.FixtureRequest) -> list[Any]:
    return pairs if request.config.getoption("--soak") else random.Random(4711).sample(pairs, SAMPLE)


@contextmanager
def _environment(given: Given) -> Iterator[None]:
    _forget()
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in given.environment.items():
            patch.setenv(variable, value)
        yield


def _says(words: list[str]) -> tuple[int, str]:
    """Exit code and output of a command line in this process."""
    done = run_command(*words)
    return done.code, done.out + done.err


def test_no_command_shows_one(request, tmp_path):
    pairs = [(line, *case) for line in LINES for case in LINE_CASES if line not in WITHOUT_OPTIONS or not case[2].typed]
    for line, name, canary, given in _sampled(pairs, request):
        words = [*LINES[line](given.url, str(tmp_path / "out")), *given.typed]
        with _environment(given):
            code, said = _says(words)
        assert not leaks(canary, said), (line, name, said)
        assert "run again with --verbose" not in said, (line, name, said)
        assert code != 0 or given.url == "s3://bucket/run" or line == "clean", (line, name, said)


@pytest.mark.parametrize("place", ["//user:{}@host/x", "//{}@host/x", "user:{}@host/x"])
def test_a_destination_without_its_scheme_is_refused_and_not_made(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(save({"a": torch.ones(2)}))
    (tmp_path / "b.safetensors").write_bytes(save({"a": torch.zeros(2)}))
    (tmp_path / "run/step-1").mkdir(parents=True)
    (tmp_path / "run/step-1/model.safetensors").write_bytes(save({"a": torch.ones(2)}))
    before, out = sorted(tmp_path.rglob("*")), place.format(CANARIES["plain"])
    for words in (
        ["convert", "a.safetensors", out, "--to", "dcp"],
        ["plan", "a.safetensors", f"{out}.safetensors"],
        ["average", "a.safetensors", "b.safetensors", out, "--to", "dcp"],
        ["delta", "a.safetensors", "b.safetensors", f"{out}/weight_v000001"],
        ["convert-run", "run", f"{out}/{{step}}", "--to", "dcp"],
        ["checksum", "a.safetensors", "--output", f"{out}.json"],
        ["samples", out],
        [*TRAIN, "--out", out],
    ):
        code, said = _says(words)
        assert (code, said.count("looks like a URL without its scheme")) == (2, 1), (words, said)
        assert not leaks(CANARIES["plain"], said), (words, said)
    assert sorted(tmp_path.rglob("*")) == before and not Path(out.partition("@")[0] + "@host").exists()
    assert _says(["convert", "a.safetensors", f"./{out}", "--to", "dcp"])[0] == 0


def test_no_function_shows_one(request, tmp_path):
    """Neither its error nor those behind it."""
    pairs = [(function, *case) for function in FUNCTIONS for case in CASES]
    for function, name, canary, given in _sampled(pairs, request):
        more = {"storage_options": given.options} if given.options else {}
        with _environment(given):
            try:
                shown = repr(FUNCTIONS[function](given.url, str(tmp_path / "out"), more))
            except Exception as error:
                shown = shown_by(error)
        assert not leaks(canary, shown), (function, name, shown)


def test_no_result_shows_one(tmp_path):
    """Commands that succeed, on a store that takes anything for a path; nor the files that they write."""
    canary = (CANARIES | RAW)["slashes"]
    url = f"memory://user:{canary}@x/run"
    torch.save({"model": {"a": torch.ones(4, 4), "b": torch.ones(3)}, "step": 3}, tmp_path / "step_3.pt")
    done = [
        ["convert", "step_3.pt", f"{url}/step_3", "--to", "safetensors", "--checksum"],
        *(["inspect", f"{url}/step_3", *more] for more in ([], ["--json"], ["--tensors"])),
        *(["ls", url, *more] for more in ([], ["--json"])),
        *(["plan", f"{url}/step_3", "out", "--to", "dcp", *more] for more in ([], ["--json"])),
        *(["convert", f"{url}/step_3", f"{url}/{to}", "--to", to, "--json", "--checksum"] for to in ("dcp", "zero2")),
        ["convert", f"{url}/step_3", "out", "--to", "dcp", "--checksum", "--resume"],
        *(["verify", f"{url}/step_3", "out", "--format", form] for form in ("text", "json", "markdown", "sarif")),
        *(["diff", f"{url}/step_3", "out", "--format", form] for form in ("text", "json", "markdown")),
        *(["scan", f"{url}/dcp", "--format", form] for form in ("text", "json", "markdown", "sarif")),
        ["checksum", f"{url}/step_3", "--output", "digests.json"],
        ["clean", f"{url}/step_3", "--json"],
        ["prune", url, "--keep-last", "1"],
    ]
    for words in done:
        code, said = _says(words)
        assert code in (0, 7) and not leaks(canary, said), (words, said)
    opened = ckpt_tools.open(f"{url}/step_3")
    for result in (opened, ckpt_tools.inspect(f"{url}/step_3"), ckpt_tools.ls(url), ckpt_tools.scan(f"{url}/dcp")):
        assert not leaks(canary, repr(result) + result._repr_html_())
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    kept = [bytes(file.getbuffer()) for file in fsspec.filesystem("memory").store.values()]
    assert len(written) > 3 and len(kept) > 3
    for data in (*written, *kept):
        assert not leaks(canary, data.decode("latin-1"))


def test_a_signed_address_is_in_no_file(tmp_path):
    """Neither in the output nor in what is beside it while the command runs, nor in its result."""
    canary = CANARIES["encoded"]
    with serving(save({"w": torch.ones(300, 300)})) as server:
        url = server.url(f"m.safetensors?X-Amz-Signature={canary}")
        found: dict[Path, bytes] = {}

        def look(*_: int) -> None:
            found.update({path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()})

        report = ckpt_tools.convert(url, tmp_path / "out", to="dcp", checksum=True, resume=True, on_progress=look)
        look()
        for words in (["inspect", url, "--json"], ["convert", url, "m.npz", "--json"], ["verify", url, "out"]):
            assert _says(words)[0] == 0
            assert not leaks(canary, _says([*words, "--verbose"])[1])
    assert any(b'"plan"' in data for data in found.values()), "no journal was seen"
    assert not any(leaks(canary, f"{path} {data.decode('latin-1')}") for path, data in found.items())
    assert not leaks(canary, repr(report) + json.dumps(report.to_json()))


PRINTING = """
import logging, sys, warnings
from ckpt_tools.process.credentials import mask_output, remember_secrets

mask_output()
url = sys.argv[1]
remember_secrets([url])
print("it is", url, flush=True)
sys.stderr.writelines([url + "\\n"])
logging.warning("the url is %s", url)
warnings.warn(url)
try:
    raise KeyError(url.partition("://")[2])
except KeyError as error:
    raise ValueError(url) from error
"""


def test_a_process_masks_what_libraries_print():
    """Also in a traceback that ends it."""
    canary = (CANARIES | RAW)["quotes"]
    words = [sys.executable, "-c", PRINTING, f"nothing://user:{canary}@host/x"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and said.count("***@host/x") == 6, said
    assert not leaks(canary, said)


def test_the_result_of_a_run_has_none(tmp_path):
    """Nor has the log of a rank that failed."""
    canary = CANARIES["encoded"]
    credentials.remember_secrets([f"ftp://user:{canary}@host/run"])
    result = RunResult(**{each.name: None for each in fields(RunResult)})  # type: ignore[arg-type]
    replace(result, checkpoint=f"ftp://user:{canary}@host/run/epoch_0001").write(tmp_path)
    failure = RankFailure(0, "ValueError", canary, f"ValueError: {canary}")
    error = failure.to_error(tmp_path)
    assert "ftp://***@host/run/epoch_0001" in (tmp_path / "result.json").read_text()
    assert "***" in (tmp_path / "error.log").read_text()
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert not leaks(canary, written + shown_by(error))


def test_rows_of_predictions_have_none():
    """Their names are those of the files that were read."""
    canary = CANARIES["encoded"]
    row = OutputRow(f"https://{PORT}/image.png?token={canary}", None, None, f"https://user:{canary}@host/x is no image")
    assert not leaks(canary, OutputColumns("label", None, 1).to_line(row).decode())


@credentials.mask_raised_errors()
def failing(canary: str) -> None:
    try:
        try:
            raise OSError(5, "failed", f"/x/{canary}")
        except OSError as error:
            raise KeyError("harmless") from error
    except KeyError as error:
        raise ValueError(f"it is {canary}") from error


def test_errors_behind_an_error_are_replaced_only_if_they_show_one():
    canary = CANARIES["plain"]
    credentials.remember_secrets(storage_options={"secret": canary})
    with pytest.raises(ValueError, match=r"\*\*\*") as raised:
        failing(canary)
    behind = raised.value.__cause__
    assert type(behind) is KeyError and type(behind.__cause__) is credentials.LibraryError
    assert not leaks(canary, shown_by(raised.value))


def test_the_oldest_are_forgotten():
    """A service that opens signed addresses all day does not grow."""
    for number in range(credentials.MAX_REMEMBERED + 10):
        credentials.remember_secrets(storage_options={"secret": f"Canary{number:09d}"})
    assert len(credentials._remembered_secrets) == credentials.MAX_REMEMBERED
    assert credentials.mask_secrets("Canary000000000 Canary000001000") == "Canary000000000 ***"
