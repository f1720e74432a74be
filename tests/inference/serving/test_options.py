"""Options of each model, from a file; and starts of the service that are refused."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from ckpt_tools.errors import FormatError, SourceNotFoundError, UsageError
from inference.models.options import ModelOptions, TensorOptions
from inference.serving.sources import KINDS, NamedSource, parse_source, read_sources
from tests.inference.serving.helpers import run_serve, write_certificate
from tests.support.refusals import refusal_test

pytestmark = pytest.mark.quick

GIVEN = ModelOptions(architecture="ours", max_batch=4, reading=TensorOptions(include=("a*",)))


def test_all_options_of_a_model_can_be_said():
    known = {each.name for kind in (ModelOptions, TensorOptions) for each in fields(kind)} - {"reading"}
    assert KINDS.keys() == known


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        ("run", "model", "run"),
        ("m=run", "m", "run"),
        ("m=s3://b/k?versionId=7", "m", "s3://b/k?versionId=7"),
        ("s3://b/k?versionId=7", "model", "s3://b/k?versionId=7"),
    ],
)
def test_a_name_may_stand_before_the_url(text, name, url):
    assert parse_source(text, GIVEN) == NamedSource(name, url, GIVEN)


def test_a_path_that_exists_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a?dtype=x", "b=c?d", "lr=1.safetensors"):
        Path(name).touch()
        assert parse_source(name, GIVEN) == NamedSource("model", name, GIVEN)
        assert parse_source(f"m={name}", GIVEN) == NamedSource("m", name, GIVEN)


def test_a_file_has_a_table_for_each_model(tmp_path):
    (tmp_path / "models.toml").write_text(
        '[a]\nurl = "s3://b/k?x=1?dtype=float16"\n'
        '[b]\nurl = "run"\nmax_batch = 2\nrename = ["^a[.]="]\nembeddings = true\n'
    )
    reading = TensorOptions(include=("a*",), rename=("^a[.]=",))
    assert read_sources(tmp_path / "models.toml", GIVEN) == [
        NamedSource("a", "s3://b/k?x=1?dtype=float16", GIVEN),
        NamedSource("b", "run", replace(GIVEN, reading=reading, max_batch=2, embeddings=True)),
    ]


def sources_of(text: str, folder: Path) -> list[NamedSource]:
    (folder / "models.toml").write_text(text)
    return read_sources(folder / "models.toml", GIVEN)


test_what_is_no_option_of_a_model_is_refused_by_name = refusal_test(
    ("m=", lambda _: parse_source("m=", GIVEN), UsageError, "m= has an empty URL; it is NAME=URL"),
    *(
        (text, lambda folder, text=text: sources_of(text, folder), kind, words)
        for text, kind, words in (
            ("[a", FormatError, "is not TOML"),
            ("['a b']\nurl = 'x'", UsageError, "a b is not a name of a model"),
            ("[a]\nurl = 'x'\nrename = 'b='", UsageError, "a: rename is a list of texts, not 'b='"),
            ("[a]\nurl = 'x'\ncolour = 'red'", UsageError, "'colour' is not an option of a model; there are architec"),
            ("[a]\nurl = 'x'\nmax_batch = 'many'", UsageError, "max_batch is a number, not 'many'"),
            ("[a]\nurl = 'x'\nembeddings = 'yes'", UsageError, "embeddings is true or false, not 'yes'"),
        )
    ),
    ("no file", lambda folder: read_sources(folder / "none.toml", GIVEN), SourceNotFoundError, "there is no file"),
)


# --- starts


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Tokens that can be one and that cannot, and a certificate."""
    folder = write_certificate(tmp_path_factory.mktemp("files"))
    for name, text in {"ask": "ask", "change": "change", "two": "two words"}.items():
        (folder / name).write_text(text)
    return folder


UNKNOWN = "the host {} cannot be found ("
NOT_FOR_RAY = "{} does not go with --runner ray"


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("MODEL --host=no-such-host.invalid", 5, UNKNOWN.format("no-such-host.invalid")),
        ("MODEL --host=192.0.2.1 --port=0", 5, "cannot listen on host 192.0.2.1, port 0: "),
        ("none.pt", 3, "there is no file or folder none.pt\n"),
        ("--port=0", 2, "there is no model to serve; name one, as MODEL or by --model NAME=URL\n"),
        ("MODEL --runner=ray --grpc-port=0", 2, NOT_FOR_RAY.format("--grpc-port") + ": Ray's proxy speaks HTTP"),
        ("MODEL --runner=ray --replicas=2 --max-replicas=3", 2, "--replicas is a fixed number"),
        ("MODEL --token=FILES/none", 3, "--token: there is no file"),
        ("MODEL --token=FILES/two", 4, "--token: "),
        ("MODEL --control-token=FILES/change", 2, "--control-token needs --model-control explicit"),
        (
            "MODEL --model-control=explicit --token=FILES/ask --control-token=FILES/ask",
            *(2, "--control-token and --token have the same word"),
        ),
        ("MODEL --certfile=FILES/none.pem", 5, "--certfile or --keyfile cannot be read"),
        ("MODEL --certfile=FILES/key.pem", 4, "--certfile and --keyfile are not a certificate and its key"),
    ],
)
def test_a_start_that_makes_no_sense_is_one_sentence(words, code, sentence, files, forms, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_serve(*words.replace("MODEL", str(forms / "model.pt")).replace("FILES", str(files)).split())
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
    assert done.stderr.startswith(f"Error: {sentence}")


@pytest.mark.parametrize("words", ["--port=99999", "--threads=0", "--timeout=0", "--watch=-1", "--replicas=0"])
def test_a_number_out_of_range_is_refused_by_click(words):
    done = run_serve("model.pt", words)
    assert done.exit_code == 2
    assert f"Error: Invalid value for '{words.partition('=')[0]}'" in done.stderr
