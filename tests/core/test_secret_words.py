"""Words that are secrets by the option or the parameter of a path before them."""

from __future__ import annotations

import pytest

from ckpt_tools import credentials
from ckpt_tools.cli.main import main
from ckpt_tools.credentials import remember_words, without_secrets

pytestmark = pytest.mark.quick

WORD = "s3cr3t-word-of-mine"
NAMES = (
    "jsessionid",
    "JSESSIONID",
    "PHPSESSID",
    "session",
    "sessionid",
    "session_id",
    "token",
    "access_token",
    "sid_token",
)
FLAGS = ("--token", "--control-token", "--private-key", "--password", "--api-key", "--secret", "--access-token")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(credentials, "_remembered", {})
    monkeypatch.setattr(credentials, "_longest_first", ())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "url", ["https://host/a;{}={}", "https://host/a;v=1;{}={}/b.pt", "s3://bucket/a;{}={}?x=1", "http://h/;{}={}#top"]
)
def test_a_parameter_of_a_path(url, name):
    address = url.format(name, WORD)
    assert WORD not in without_secrets(f"it failed: {address}: no answer")
    remember_words(["inspect", address])
    assert WORD not in without_secrets(f"nothing at {WORD}")


@pytest.mark.parametrize("flag", FLAGS)
def test_an_option_that_is_the_name_of_a_secret(flag):
    for words in (["serve", flag, WORD], [f"{flag}={WORD}"]):
        credentials._remembered.clear()
        remember_words(words)
        assert without_secrets(f"{flag}: there is no file {WORD}") == f"{flag}: there is no file ***"


def test_a_file_is_shown(tmp_path):
    file = tmp_path / "file-of-a-token"
    file.write_text(WORD)
    remember_words(["--token", str(file)])
    assert str(file) in without_secrets(f"{file} cannot be read")


def test_other_parameters_and_options_are_shown():
    remember_words(["--model-key", "a-model-key-of-mine", "s3://bucket/a;version=20261128-of-mine"])
    text = "a-model-key-of-mine in s3://bucket/a;version=20261128-of-mine"
    assert without_secrets(text) == text


@pytest.mark.parametrize("words", [["sign", "x", "--private-key", WORD], ["inspect", "x", "--token", WORD]])
def test_no_command_repeats_it(words, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert WORD not in capsys.readouterr().err
