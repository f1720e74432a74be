"""Options of each model, from the command line and from a file."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from ckpt_tools.errors import FormatError, SourceNotFoundError, UsageError
from inference.common.name_options import Reading
from inference.models.options import ModelOptions
from inference.serving.sources import KINDS, Source, source_of, sources_in

pytestmark = pytest.mark.quick

GIVEN = ModelOptions(architecture="ours", max_batch=4, reading=Reading(include=("a*",)))


def test_all_options_of_a_model_can_be_said():
    known = {each.name for kind in (ModelOptions, Reading) for each in fields(kind)} - {"reading"}
    assert KINDS.keys() == known


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run", Source("model", "run", GIVEN)),
        ("m=run", Source("m", "run", GIVEN)),
        ("m=s3://b/k?versionId=7", Source("m", "s3://b/k?versionId=7", GIVEN)),
        ("run?architecture=hf", Source("model", "run", replace(GIVEN, architecture="hf"))),
        (
            "m=s3://b/k?versionId=7?max_batch=2&embeddings=true",
            Source("m", "s3://b/k?versionId=7", replace(GIVEN, max_batch=2, embeddings=True)),
        ),
        (
            "m=run?architecture=timm:x?num_classes=3%26drop_rate=0.5&dtype=bfloat16",
            Source("m", "run", replace(GIVEN, architecture="timm:x?num_classes=3&drop_rate=0.5", dtype="bfloat16")),
        ),
        (
            "m=run?include=b*&include=c*&rename=^a[.]=",
            Source("m", "run", replace(GIVEN, reading=Reading(include=("b*", "c*"), rename=("^a[.]=",)))),
        ),
    ],
)  # fmt: skip
def test_the_options_follow_the_url(text, expected):
    assert source_of(text, GIVEN) == expected


def test_a_path_that_exists_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a?dtype=x", "b=c?d", "lr=1.safetensors"):
        Path(name).touch()
        assert source_of(name, GIVEN) == Source("model", name, GIVEN)
        assert source_of(f"m={name}", GIVEN) == Source("m", name, GIVEN)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("m=run?colour=red", "'colour' is not an option of a model; there are architecture"),
        ("m=s3://b/k?dtype=float16&colour=red", "'colour' is not an option of a model"),
        ("run?dtype=float16&hf", "'hf' is not OPTION=VALUE; write & within a value as %26"),
        ("run?dtype=a&dtype=b", "dtype is given twice"),
        ("run?max_batch=many", "max_batch is a number, not 'many'"),
        ("run?max_batch=0", "a forward pass has at least one row, not 0"),
        ("run?max_new_tokens=0", "at least one token is generated, not 0"),
        ("run?embeddings=yes", "embeddings is true or false, not 'yes'"),
        ("run?exact=nearly", "exact is buckets, full or off, not nearly"),
        ("run?architecture=resnet18", "resnet18 is not an architecture"),
    ],
)
def test_what_is_no_option_is_refused_by_name(text, sentence):
    with pytest.raises(UsageError, match=sentence):
        source_of(text, GIVEN)


def test_a_file_has_a_table_for_each_model(tmp_path):
    (tmp_path / "models.toml").write_text(
        '[a]\nurl = "s3://b/k?x=1?dtype=float16"\n'
        '[b]\nurl = "run"\nmax_batch = 2\nrename = ["^a[.]="]\nembeddings = true\n'
    )
    reading = Reading(include=("a*",), rename=("^a[.]=",))
    assert sources_in(tmp_path / "models.toml", GIVEN) == [
        Source("a", "s3://b/k?x=1?dtype=float16", GIVEN),
        Source("b", "run", replace(GIVEN, reading=reading, max_batch=2, embeddings=True)),
    ]


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        ("[a", FormatError, "is not TOML"),
        ("a = 3", UsageError, "a is not a table with a url"),
        ("[a]\ndtype = 'float16'", UsageError, "a is not a table with a url"),
        ("['a b']\nurl = 'x'", UsageError, "a b is not a name of a model"),
        ("[a]\nurl = 'x'\ncolour = 'red'", UsageError, "a: 'colour' is not an option of a model"),
        ("[a]\nurl = 'x'\nmax_batch = '2'", UsageError, "a: max_batch is a number, not '2'"),
        ("[a]\nurl = 'x'\nmax_batch = true", UsageError, "a: max_batch is a number, not True"),
        ("[a]\nurl = 'x'\nrename = 'b='", UsageError, "a: rename is a list of texts, not 'b='"),
    ],
)
def test_a_file_that_is_not_usable_is_one_sentence(text, kind, sentence, tmp_path):
    (tmp_path / "models.toml").write_text(text)
    with pytest.raises(kind, match=sentence):
        sources_in(tmp_path / "models.toml", GIVEN)
    with pytest.raises(SourceNotFoundError, match="there is no file"):
        sources_in(tmp_path / "none.toml", GIVEN)
