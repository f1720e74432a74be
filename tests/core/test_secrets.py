"""Credentials in URLs are shown nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.cli.main import main
from ckpt_tools.core.wording import printable
from ckpt_tools.credentials import without_secrets
from ckpt_tools.errors import StoreError
from ckpt_tools.stores.fsspec import store
from ckpt_tools.stores.retry import RetryPolicy

pytestmark = pytest.mark.quick

SECRET = st.text(
    st.characters(codec="ascii", exclude_characters=" \t\r\n'\"@?#\x0b\x0c\x1c\x1d\x1e\x1f\x85"), min_size=6
).map(lambda text: f"S3CR{text}T")
HOSTS = st.sampled_from(["bucket", "host:8080", "127.0.0.1:9", "a.b.example"])
SCHEMES = st.sampled_from(["s3", "https", "http", "gs", "simplecache::s3", "az", "hdfs"])


@given(SCHEMES, st.sampled_from(["", "user:", "AKIA4711:"]), SECRET, HOSTS)
def test_before_the_host(scheme, user, secret, host):
    if not user:
        secret = secret.replace("/", "_").replace(":", "_")
    url = f"{scheme}://{user}{secret}@{host}/run/step-1"
    for text in (url, f"it failed: {url}: no answer", f"['{url}']", f"{url} and {url}"):
        assert secret not in without_secrets(text)
        assert f"{host}/run/step-1" in without_secrets(text)
        assert secret not in str(StoreError(text, path=url)) + printable(text)


@given(SCHEMES, SECRET, st.sampled_from(["token", "X-Amz-Signature", "sig"]), st.sampled_from("?#"))
def test_behind_the_path(scheme, secret, name, mark):
    url = f"{scheme}://host/a/model.pt{mark}x=1&{name}={secret}"
    for text in (url, f"it failed: {url}: no answer", f"URL('{url}')"):
        assert secret.rstrip(".,:;)]") not in without_secrets(text)
        assert "://host/a/model.pt" in without_secrets(text)


@given(SCHEMES, SECRET, SECRET, HOSTS)
def test_before_the_host_and_behind_the_path(scheme, password, token, host):
    password, token = password.replace("/", "_").replace(":", "_"), token.rstrip(".,:;)]")
    shown = without_secrets(f"it failed: {scheme}://user:{password}@{host}/a/model.pt?token={token}")
    assert password not in shown and token not in shown
    assert f"{host}/a/model.pt" in shown


@given(st.text())
def test_it_stays_as_it_is_the_second_time(text):
    assert without_secrets(without_secrets(f"s3://{text}")) == without_secrets(f"s3://{text}")


@pytest.mark.parametrize(
    "text",
    ["s3://bucket/run@latest", "http://host:8080/run@latest", "/data/run@10", "a: b@c", "s3://bucket/a b?c", "C:\\run"],
)
def test_what_is_no_secret_stays(text):
    assert without_secrets(text) == text


SHOWN = "s3cr3t-of-mine"
URLS = [
    f"s3://KEY:{SHOWN}@bucket/run",
    f"s3://KEY:{SHOWN}/with/slashes@bucket/run",
    f"https://user:{SHOWN}@127.0.0.1:9/model.pt",
    f"https://127.0.0.1:9/model.pt?X-Amz-Signature={SHOWN}&token={SHOWN}",
    f"memory://user:{SHOWN}@x/y",
    f"nothing://user:{SHOWN}@x/y",
]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt_tools", *arguments]
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", **environment}
    return subprocess.run(
        command,
        capture_output=True,
        encoding=environment.get("PYTHONIOENCODING", "utf-8"),
        check=False,
        timeout=120,
        env=environment,
    )


@pytest.mark.parametrize("url", URLS)
def test_no_command_shows_one(url, tmp_path, monkeypatch, capsys):
    """Nor do the lines about another attempt, of which there is one here."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setattr(store, "_POLICY", RetryPolicy(attempts=2))
    options = ["--storage-option", f"endpoint_url=http://user:{SHOWN}@127.0.0.1:9"] if url.startswith("s3") else []
    for words in (["inspect", url], ["inspect", url, "--verbose"], ["convert", url, str(tmp_path / "out.safetensors")]):
        with pytest.raises(SystemExit) as ended:
            main([*words, *options])
        assert ended.value.code not in (0, 1)
        said = "".join(capsys.readouterr())
        assert SHOWN not in said
        assert "trying again" in said or not url.startswith("https")


def test_a_process_shows_none_when_it_ends():
    done = run("inspect", URLS[0], "--storage-option", f"endpoint_url=http://user:{SHOWN}@127.0.0.1:9")
    assert done.returncode not in (0, 1), done.stderr
    assert SHOWN not in done.stdout + done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_names_that_a_terminal_cannot_show_are_escaped(encoding, tmp_path):
    import torch

    torch.save({"wörter.\u4e2d.\u20ac": torch.ones(2)}, tmp_path / "m\u4e2d.pt")
    for options in (["--tensors"], []):
        done = run("inspect", str(tmp_path / "m\u4e2d.pt"), *options, PYTHONIOENCODING=encoding)
        assert done.returncode == 0, done.stderr
    done = run("inspect", str(tmp_path / "m\u4e2d.pt"), "--json", PYTHONIOENCODING=encoding)
    assert json.loads(done.stdout)["source"].endswith("m\u4e2d.pt")
    assert "\\u4e2d" in run("inspect", str(tmp_path / "no\u4e2d.pt"), PYTHONIOENCODING=encoding).stderr


@pytest.mark.parametrize("part", ["a", "a://x:", "a://?", "a://x", "http://x?....", "a:/x:", "?token=x&"])
def test_time_is_linear_in_the_text(part):
    """A checkpoint may choose a megabyte of a message."""
    started = time.process_time()
    str(StoreError(f"{part * (1 << 20)}:/"))
    assert time.process_time() - started < 5
