"""Credentials in URLs and options are shown nowhere."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.errors import StoreError
from ckpt_tools.messages.wording import escape_unprintable
from ckpt_tools.process import credentials
from ckpt_tools.process.credentials import mask_secrets, remember_secrets_in_words

pytestmark = pytest.mark.quick

SECRET = st.text(
    st.characters(codec="ascii", exclude_characters=" \t\r\n'\"@?#\x0b\x0c\x1c\x1d\x1e\x1f\x85"), min_size=6
).map(lambda text: f"S3CR{text}T")
half = settings(max_examples=50, deadline=None)
HOSTS = st.sampled_from(["bucket", "host:8080", "127.0.0.1:9", "a.b.example"])
SCHEMES = st.sampled_from(["s3", "https", "http", "gs", "simplecache::s3", "az", "hdfs"])


@half
@given(SCHEMES, st.sampled_from(["", "user:", "AKIA4711:"]), SECRET, HOSTS)
def test_before_the_host(scheme, user, secret, host):
    if not user:
        secret = secret.replace("/", "_").replace(":", "_")
    url = f"{scheme}://{user}{secret}@{host}/run/step-1"
    for text in (url, f"it failed: {url}: no answer", f"['{url}']", f"{url} and {url}"):
        assert secret not in mask_secrets(text)
        assert f"{host}/run/step-1" in mask_secrets(text)
        assert secret not in str(StoreError(text, path=url)) + escape_unprintable(text)


@half
@given(SCHEMES, SECRET, st.sampled_from(["token", "X-Amz-Signature", "sig"]), st.sampled_from("?#"))
def test_behind_the_path(scheme, secret, name, mark):
    url = f"{scheme}://host/a/model.pt{mark}x=1&{name}={secret}"
    for text in (url, f"it failed: {url}: no answer", f"URL('{url}')"):
        assert secret.rstrip(".,:;)]") not in mask_secrets(text)
        assert "://host/a/model.pt" in mask_secrets(text)


@half
@given(st.text())
def test_it_stays_as_it_is_the_second_time(text):
    assert mask_secrets(mask_secrets(f"s3://{text}")) == mask_secrets(f"s3://{text}")


@pytest.mark.parametrize(
    "text",
    ["s3://bucket/run@latest", "http://host:8080/run@latest", "/data/run@10", "a: b@c", "s3://bucket/a b?c", "C:\\run"],
)
def test_what_is_no_secret_stays(text):
    assert mask_secrets(text) == text


WORD = "s3cr3t-word-of-mine"
NAMES = ("jsessionid", "JSESSIONID", "PHPSESSID", "session", "sessionid", "session_id", "token", "access_token")
FLAGS = ("--token", "--control-token", "--private-key", "--password", "--api-key", "--secret", "--access-token")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(credentials, "_remembered_secrets", {})
    monkeypatch.setattr(credentials, "_secrets_longest_first", ())


@pytest.mark.parametrize("name", [*NAMES, "sid_token"])
@pytest.mark.parametrize(
    "url", ["https://host/a;{}={}", "https://host/a;v=1;{}={}/b.pt", "s3://bucket/a;{}={}?x=1", "http://h/;{}={}#top"]
)
def test_a_parameter_of_a_path(url, name):
    address = url.format(name, WORD)
    assert WORD not in mask_secrets(f"it failed: {address}: no answer")
    remember_secrets_in_words(["inspect", address])
    assert WORD not in mask_secrets(f"nothing at {WORD}")


@pytest.mark.parametrize("flag", FLAGS)
def test_an_option_that_is_the_name_of_a_secret(flag):
    for words in (["serve", flag, WORD], [f"{flag}={WORD}"]):
        credentials._remembered_secrets.clear()
        remember_secrets_in_words(words)
        assert mask_secrets(f"{flag}: there is no file {WORD}") == f"{flag}: there is no file ***"


def test_files_and_other_parameters_and_options_are_shown(tmp_path):
    file = tmp_path / "file-of-a-token"
    file.write_text(WORD)
    text = f"a-model-key-of-mine in s3://bucket/a;version=20261128-of-mine; {file} cannot be read"
    remember_secrets_in_words(["--token", str(file), "--model-key", "a-model-key-of-mine", *text.split()[2:3]])
    assert mask_secrets(text) == text


def process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt_tools", *map(str, arguments)]
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, encoding=encoding, check=False, timeout=120, env=environment)


def test_names_that_a_terminal_cannot_show_are_escaped(tmp_path):
    file = tmp_path / "m\u4e2d.safetensors"
    safetensors.numpy.save_file({"w\xf6rter.\u4e2d.\u20ac": np.ones(2)}, file)
    done = process("inspect", file, "--tensors", PYTHONIOENCODING="latin-1")
    assert done.returncode == 0 and "w\xf6rter.\\u4e2d.\\u20ac" in done.stdout, done.stderr
    done = process("inspect", file, "--json", PYTHONIOENCODING="ascii")
    assert json.loads(done.stdout)["source"].endswith("m\u4e2d.safetensors")
    assert "\\u4e2d" in process("inspect", tmp_path / "no\u4e2d.pt", PYTHONIOENCODING="ascii").stderr


@pytest.mark.parametrize("part", ["a", "a://x:", "a://?", "a://x", "http://x?....", "a:/x:", "?token=x&"])
def test_time_is_linear_in_the_text(part):
    """A checkpoint may choose a megabyte of a message."""
    started = time.process_time()
    str(StoreError(f"{part * (1 << 17)}:/"))
    assert time.process_time() - started < 5
