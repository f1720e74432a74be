"""Signatures: made and checked by model-signing, over every file, and over digests that hold in other formats."""

import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from model_signing import verifying

import ckpt_tools
from ckpt_tools.errors import DestinationExistsError, DifferenceError, SourceNotFoundError, UnsupportedError, UsageError
from tests.support.commands import run_command as command


def make_key(path: Path) -> None:
    """A private key at ``path`` and its public one at ``path`` with the suffix ``.pub``."""
    key = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


@pytest.fixture
def key(tmp_path):
    make_key(tmp_path / "key.pem")
    return tmp_path / "key.pem"


@pytest.fixture
def dcp(tmp_path):
    """A small DCP, which has a hidden file."""
    torch.save({"w": torch.arange(6.0)}, tmp_path / "m.pt")
    ckpt_tools.convert(tmp_path / "m.pt", tmp_path / "dcp", to="dcp", world_size=2)
    return tmp_path / "dcp"


def test_a_signed_folder_is_whole_and_the_tool_itself_says_so(dcp, key):
    report = ckpt_tools.sign(dcp, private_key=key)
    assert report.signature == str(dcp / "model.sig")
    verified = ckpt_tools.verify(dcp, public_key=key.with_suffix(".pub"))
    assert (verified.equal, verified.signature) == (True, report.signature)
    tool = verifying.Config().use_elliptic_key_verifier(public_key=key.with_suffix(".pub"))
    tool.verify(dcp, dcp / "model.sig")


def other_bytes(dcp: Path) -> None:
    file = dcp / ".metadata"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


CHANGES: dict[str, Callable[[Path], object]] = {
    "other bytes": other_bytes,
    "one more": lambda dcp: (dcp / ".hidden").write_text(""),
    "one more in a folder": lambda dcp: ((dcp / "sub").mkdir(), (dcp / "sub" / ".hidden").write_text("")),
    "one less": lambda dcp: (dcp / "__1_0.distcp").unlink(),
    "another name": lambda dcp: (dcp / "__1_0.distcp").rename(dcp / "__2_0.distcp"),
    "another signature": lambda dcp: (dcp / "model.sig").write_text("{}"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_after_signing_is_found(change, dcp, key):
    ckpt_tools.sign(dcp, private_key=key)
    CHANGES[change](dcp)
    with pytest.raises(DifferenceError, match="is not the signature of"):
        ckpt_tools.verify(dcp, public_key=key.with_suffix(".pub"))


def test_the_signature_of_somebody_else_and_a_key_that_is_none(dcp, key, tmp_path):
    ckpt_tools.sign(dcp, private_key=key)
    make_key(tmp_path / "other.pem")
    with pytest.raises(DifferenceError, match="Key mismatch"):
        ckpt_tools.verify(dcp, public_key=tmp_path / "other.pub")
    with pytest.raises(UsageError, match="cannot be used: Unable to load PEM file") as refused:
        ckpt_tools.verify(dcp, public_key=dcp / ".metadata")
    assert "http" not in str(refused.value)


def test_signed_digests_speak_of_the_tensors_in_every_format(dcp, key, tmp_path):
    ckpt_tools.checksum(dcp, output=tmp_path / "d.json")
    ckpt_tools.sign(tmp_path / "d.json", private_key=key)
    ckpt_tools.convert(dcp, tmp_path / "m.safetensors")
    options: dict[str, Any] = {"digests": tmp_path / "d.json", "public_key": key.with_suffix(".pub")}
    assert ckpt_tools.verify(tmp_path / "m.safetensors", **options).num_digests == 1
    (tmp_path / "d.json").write_text((tmp_path / "d.json").read_text() + "\n")
    with pytest.raises(DifferenceError, match=r"d\.json\.sig is not the signature"):
        ckpt_tools.verify(tmp_path / "m.safetensors", **options)


def test_usage(dcp, key, tmp_path):
    public = key.with_suffix(".pub")
    with pytest.raises(SourceNotFoundError, match=r"model\.sig"):
        ckpt_tools.verify(dcp, public_key=public)
    with pytest.raises(UsageError, match="private key"):
        ckpt_tools.sign(dcp, private_key=public)
    with pytest.raises(UsageError, match="one checkpoint"):
        ckpt_tools.verify(dcp, dcp, public_key=public)
    ckpt_tools.sign(dcp, private_key=key, signature=tmp_path / "s.sig")
    with pytest.raises(DestinationExistsError):
        ckpt_tools.sign(dcp, private_key=key, signature=tmp_path / "s.sig")
    ckpt_tools.sign(dcp, private_key=key, signature=tmp_path / "s.sig", overwrite=True)
    assert ckpt_tools.verify(dcp, public_key=public, signature=tmp_path / "s.sig").equal
    with pytest.raises(UsageError, match="public key"):
        ckpt_tools.verify(dcp, public_key=key, signature=tmp_path / "s.sig")
    with pytest.raises(UnsupportedError):
        ckpt_tools.sign("s3://bucket/model", private_key=key)


def test_without_the_package_one_sentence_says_what_to_install(dcp, key, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "model_signing"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "model_signing", None)
    code, _, error = command("sign", dcp, "--private-key", key)
    assert code == 2
    assert "pip install 'ckpt-tools[sign]'" in error and error.count("\n") == 1


def test_the_commands(dcp, key):
    assert command("sign", dcp, "--private-key", key) == (0, f"{dcp}/model.sig\n", "")
    words = ("verify", dcp, "--public-key", key.with_suffix(".pub"))
    for more in ((), ("--format", "markdown")):
        code, out, _ = command(*words, *more)
        assert code == 0 and f"the signature {dcp}/model.sig is by the private key" in " ".join(out.split())
    before = sha256((dcp / ".metadata").read_bytes()).hexdigest()
    other_bytes(dcp)
    code, _, error = command(*words)
    assert code == 6 and "is not the signature of" in error
    assert f"Expected '{before}', Actual '{sha256((dcp / '.metadata').read_bytes()).hexdigest()}'" in error


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "key.pem", "link", "folder"])
def test_a_signature_replaces_signatures_alone(name, dcp, key):
    """A link is no signature either: what it leads to would be written."""
    ckpt_tools.sign(dcp, private_key=key)
    (dcp / "link").symlink_to("model.sig")
    (dcp / "folder").mkdir()
    target = key if name == "key.pem" else dcp / name
    before = {path: path.read_bytes() for path in [key, *dcp.iterdir()] if path.is_file()}
    with pytest.raises(DestinationExistsError, match="is not a signature"):
        ckpt_tools.sign(dcp, private_key=key, signature=target, overwrite=True)
    assert {path: path.read_bytes() for path in [key, *dcp.iterdir()] if path.is_file()} == before
    (dcp / "link").unlink()
    ckpt_tools.sign(dcp, private_key=key, overwrite=True)
