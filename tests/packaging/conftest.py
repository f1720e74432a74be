"""The distributions of this tree, built once, and something to try them on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from PIL import Image
from safetensors.torch import save_file

import ckpt_tools
from tests.packaging.distributions import Built, build
from tests.packaging.documented import Material
from tests.support.s3_server import S3Server
from training.models import build_model


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Material:
    folder = tmp_path_factory.mktemp("material")
    torch.manual_seed(1)
    save_file(build_model().state_dict(), folder / "model.safetensors")
    ckpt_tools.convert(folder / "model.safetensors", folder / "dcp", to="dcp", world_size=2)
    (folder / "images").mkdir()
    Image.new("L", (28, 28), 99).save(folder / "images" / "one.png")
    private, public = _keys(folder)
    return Material(folder / "model.safetensors", folder / "dcp", folder / "images", private, public, s3_server)


def _keys(folder: Path) -> tuple[Path, Path]:
    """An elliptic-curve key as openssl makes it, and its public half."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / "key.pem", folder / "key.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public
