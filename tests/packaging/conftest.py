"""The distributions of this tree, built once, and something to try them on."""

from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from PIL import Image
from safetensors.torch import save_file

import ckpt_tools
from tests.packaging.documented import Material
from tests.packaging.environments import build
from training.models.image_models import build_model


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What installs much from the package index is for the soak alone."""
    return True if collection_path.name == "test_kserve.py" and not config.getoption("--soak") else None


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The folder of a model in both forms, an image, and a key as openssl makes it with its public half."""
    folder = tmp_path_factory.mktemp("material")
    torch.manual_seed(1)
    save_file(build_model().state_dict(), folder / "model.safetensors")
    ckpt_tools.convert(folder / "model.safetensors", folder / "dcp", to="dcp", world_size=2)
    (folder / "images").mkdir()
    Image.new("L", (28, 28), 99).save(folder / "images" / "one.png")
    key = ec.generate_private_key(ec.SECP256R1())
    (folder / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (folder / "key.pub").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return folder


@pytest.fixture
def material(files, request):
    """The S3 server is started by the first test that asks for it."""
    return Material(files, lambda: request.getfixturevalue("s3_server"))
