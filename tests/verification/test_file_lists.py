"""Lists of other tools: what coreutils, Megatron-Core and huggingface_hub write, and how files differ from them."""

import hashlib
import json
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt_tools
from ckpt_tools.errors import CkptError, MalformedError, UnsafeError, UnsupportedError, UsageError
from ckpt_tools.verification.file_lists import parse_hub_digest, parse_hub_metadata, parse_integrity, parse_sums
from tests.support.commands import run_command as command
from tests.support.hub_server import running_hub
from tests.support.refusals import refusal_test

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path):
    """A folder of two shards of transformers' form, with a configuration."""
    run = tmp_path / "run"
    run.mkdir()
    for number, name in enumerate(SHARDS):
        save_file({f"layers.{number}.w": np.arange(200, dtype=np.float32) + number}, run / name)
    weights = {f"layers.{number}.w": name for number, name in enumerate(SHARDS)}
    (run / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    (run / "config.json").write_text('{"model_type": "llama"}\n')
    return run


def coreutils(folder: Path, command: str, *files: str, output: Path) -> None:
    with output.open("wb") as out:
        subprocess.run([*command.split(), *files], cwd=folder, stdout=out, check=True)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def wrong(report: Any) -> dict[str, str]:
    assert not report.equal
    return {each.key.fqn: each.what for each in report.differences}


FORMS = ("md5sum", "sha1sum -b", "sha224sum", "sha256sum --tag", "sha384sum", "sha512sum", "b2sum", "b2sum --tag",
         "b2sum --tag -l 256", "cksum -a sha256", "cksum -a blake2b --untagged")  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_coreutils(form, folder, tmp_path):
    names = sorted(each.name for each in folder.iterdir())
    coreutils(folder, form, *names, output=tmp_path / "list.txt")
    report = ckpt_tools.verify(folder, digests=tmp_path / "list.txt")
    assert (report.equal, report.num_files, report.num_tensors, report.notes) == (True, 4, 2, ())
    flip(folder / SHARDS[1])
    report = ckpt_tools.verify(folder, digests=tmp_path / "list.txt")
    assert list(wrong(report)) == [SHARDS[1]]
    assert (report.num_wrong_files, report.num_differing) == (1, 0)


def test_a_list_in_the_folder_is_found_and_names_what_it_leaves_out(folder):
    coreutils(folder, "sha256sum", *SHARDS, output=folder / "SHA256SUMS")
    code, out, _ = command("verify", folder)
    assert code == 0
    assert "; 2 files are as SHA256SUMS says" in out
    assert "not compared: config.json, model.safetensors.index.json (SHA256SUMS does not name it)" in out
    (folder / SHARDS[0]).unlink()
    code, out, _ = command("verify", folder)
    assert code == 6
    assert f"{SHARDS[0]}: it is missing; SHA256SUMS names it" in out
    assert "1 of 2 files is not as SHA256SUMS says; no tensor was read" in out


def test_the_list_of_one_file_is_found_beside_it(folder):
    name = SHARDS[0]
    shutil.copy(folder / name, folder.parent / "m.safetensors")
    digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder.parent / "m.safetensors.sha256").write_text(digest + "\n")
    assert ckpt_tools.verify(folder.parent / "m.safetensors").lists == ("m.safetensors.sha256",)
    flip(folder.parent / "m.safetensors")
    assert list(wrong(ckpt_tools.verify(folder.parent / "m.safetensors"))) == ["m.safetensors"]


def test_names_begin_in_the_folder_or_with_its_name(folder, tmp_path):
    coreutils(tmp_path, "sha256sum", *(f"./run/{name}" for name in SHARDS), output=tmp_path / "all.txt")
    assert ckpt_tools.verify(folder, digests=tmp_path / "all.txt").num_files == 2
    coreutils(folder, "sha256sum", *SHARDS, output=tmp_path / "inner.txt")
    assert ckpt_tools.verify(folder, digests=tmp_path / "inner.txt").num_files == 2
    save_file({"w": np.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match=r"does not name other\.safetensors"):
        ckpt_tools.verify(tmp_path / "other.safetensors", digests=tmp_path / "inner.txt")
    with pytest.raises(UsageError, match="state"):
        ckpt_tools.verify(folder, digests=tmp_path / "inner.txt", state="model")


def test_names_with_escapes_are_those_of_coreutils(folder):
    odd = "two\nlines *and a space.txt"
    (folder / odd).write_text("x")
    for form in ("sha256sum", "sha256sum --tag"):
        coreutils(folder, form, odd, output=folder / "SHA256SUMS")
        assert (folder / "SHA256SUMS").read_bytes().startswith(b"\\")
        assert ckpt_tools.verify(folder).num_files == 1
    flip(folder / odd)
    assert list(wrong(ckpt_tools.verify(folder))) == [odd]


HEX = "a" * 64
COMMIT = "c" * 40


MALFORMED = {
    "nothing": "",
    "a comment": "# a comment\n",
    "no name": f"{HEX}\n",
    "a short digest": f"{HEX[1:]}  a\n",
    "noise": f"{HEX}  a\nnoise\n",
    "a file twice": f"{HEX}  a\n{'b' * 64}  ./a\n",
    "a digest of another length": f"SHA512 (a) = {HEX}\n",
    "an unknown algorithm": f"CRC32 (a) = {HEX}\n",
    "an odd length": f"BLAKE2b-260 (a) = {HEX}a\n",
    "an unknown escape": f"\\{HEX}  a\\tb\n",
}
UNSAFE = {
    "the folder above": f"{HEX}  ../a\n",
    "an absolute path": f"{HEX}  /etc/passwd\n",
    "the folder above, in between": f"{HEX}  a/../../b\n",
    "a zero": f"{HEX}  a\0b\n",
}
INTEGRITY: dict[str, tuple[Any, type[CkptError]]] = {
    "a list": ([], MalformedError),
    "nothing": ({}, MalformedError),
    "no files": ({"files": {}}, MalformedError),
    "a number": ({"files": {"a": 1}}, MalformedError),
    "a short digest": ({"files": {"a": "a" * 40}}, MalformedError),
    "another algorithm": ({"algorithm": "md5", "files": {"a": HEX}}, UnsupportedError),
    "the folder above": ({"files": {"../a": HEX}}, UnsafeError),
}


def of_list(text: str, folder: Path) -> None:
    save_file({"w": np.ones(1)}, folder / "w.safetensors")
    (folder / "SHA256SUMS").write_text(text)
    ckpt_tools.verify(folder)


test_malformed_lists_are_refused = refusal_test(
    *((name, partial(of_list, text), MalformedError, "SHA256SUMS") for name, text in MALFORMED.items()),
    *((name, partial(of_list, text), UnsafeError, "SHA256SUMS") for name, text in UNSAFE.items()),
    *(
        (
            f"integrity: {name}", partial(lambda document, _: parse_integrity(document, "integrity.json"), document),
            error, r"integrity\.json",
        )
        for name, (document, error) in INTEGRITY.items()
    ),
    *(
        (f"of the hub: {data!r}", partial(lambda data, _: parse_hub_metadata(data, "m"), data), MalformedError, ".")
        for data in (b"", b"x\ny\nz\n", COMMIT.encode())
    ),
)  # fmt: skip


def test_what_parses_pure():
    both = parse_sums(f"# made by hand\r\n\r\n{HEX.upper()} *a/./b\r\n{'0' * 128}  c d\n".encode(), "sums.txt")
    assert {name: (each.digest, each.algorithms) for name, each in both.items()} == {
        "a/b": (HEX, ("sha256",)),
        "c d": ("0" * 128, ("sha512", "blake2b-512")),
    }
    assert parse_sums(f"{'0' * 128}  c\n".encode(), "x/B2SUMS")["c"].algorithms == ("blake2b-512",)
    assert parse_sums(f"{HEX}  c\n".encode(), "b3sums.txt")["c"].algorithms == ("blake3",)
    assert parse_hub_metadata(f"{COMMIT}\n{HEX}\n1.5\n".encode(), "m") == parse_hub_digest(HEX)
    assert parse_hub_metadata(f"{COMMIT}\n1\n1.5\n".encode(), "m") is None


def integrity(folder: Path) -> dict[str, Any]:
    """As ``save_integrity_manifest`` of Megatron-Core writes it: the files of the folder itself."""
    files = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in sorted(folder.iterdir())}
    return {"algorithm": "sha256", "files": files}


def test_integrity_of_megatron(folder):
    (folder / "integrity.json").write_text(json.dumps(integrity(folder), indent=2))
    (folder / "sub").mkdir()
    (folder / "sub" / "later.txt").write_text("not in its folder")
    report = ckpt_tools.verify(folder)
    assert (report.num_files, report.lists, report.notes) == (4, ("integrity.json",), ())
    assert ckpt_tools.verify(folder, digests=folder / "integrity.json").num_files == 4
    flip(folder / "config.json")
    assert list(wrong(ckpt_tools.verify(folder))) == ["config.json"]


def test_integrity_of_the_iteration_that_a_run_of_megatron_names(folder, tmp_path):
    ckpt_tools.convert(folder, tmp_path / "megatron", to="megatron")
    (iteration,) = (tmp_path / "megatron").glob("iter_*")
    document = integrity(iteration)
    assert ".metadata" in document["files"]
    (iteration / "integrity.json").write_text(json.dumps(document))
    for source in (tmp_path / "megatron", iteration):
        assert ckpt_tools.verify(source).num_files == len(document["files"])
    flip(next(iteration.glob("*.distcp")))
    for source in (tmp_path / "megatron", iteration):
        assert len(wrong(ckpt_tools.verify(source))) == 1


def test_a_list_in_a_store_is_found(folder):
    coreutils(folder, "sha256sum", *SHARDS, output=folder / "SHA256SUMS")
    files = fsspec.filesystem("memory")
    files.put(str(folder), "/of-lists", recursive=True)
    try:
        assert ckpt_tools.verify("memory://of-lists").num_files == 2
        assert ckpt_tools.verify("memory://of-lists", digests="memory://of-lists/SHA256SUMS").num_files == 2
        files.pipe("/of-lists/SHA256SUMS", f"{HEX}  {SHARDS[0]}\n".encode())
        assert list(wrong(ckpt_tools.verify("memory://of-lists"))) == [SHARDS[0]]
    finally:
        files.rm("/of-lists", recursive=True)


@pytest.fixture
def hub(folder, tmp_path):
    """The URL of a hub that has the folder as ``org/model``."""
    root = tmp_path / "hub"
    (root / "org").mkdir(parents=True)
    shutil.copytree(folder, root / "org" / "model")
    with running_hub(root) as found:
        yield found.endpoint


def downloaded(hub: str, **where: Path) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download("org/model", endpoint=hub, **where))


def test_a_download_is_checked_against_the_hashes_of_the_hub(hub, tmp_path):
    local = downloaded(hub, local_dir=tmp_path / "local")
    report = ckpt_tools.verify(local)
    assert (report.equal, report.num_files, report.notes) == (True, 4, ())
    assert ckpt_tools.scan(local).findings == ()
    assert ckpt_tools.verify(local / SHARDS[0], from_="safetensors").num_files == 1
    (local / "config.json").write_text("{}")
    (local / SHARDS[1]).unlink()
    (local / "mine.txt").write_text("added")
    report = ckpt_tools.verify(local)
    found = wrong(report)
    assert set(found) == {"config.json", SHARDS[1]}
    assert "git's SHA-1" in found["config.json"] and "missing" in found[SHARDS[1]]
    assert [note.what for note in report.notes] == ["mine.txt"]


def test_the_cache_of_the_hub_is_checked_by_the_names_of_its_blobs(hub, tmp_path):
    snapshot = downloaded(hub, cache_dir=tmp_path / "cache")
    assert (snapshot / SHARDS[0]).is_symlink()
    assert ckpt_tools.verify(snapshot).num_files == 4
    assert ckpt_tools.verify(snapshot / SHARDS[0], from_="safetensors").num_files == 1
    flip((snapshot / SHARDS[0]).resolve())
    (snapshot / SHARDS[1]).resolve().unlink()
    found = wrong(ckpt_tools.verify(snapshot))
    assert set(found) == set(SHARDS)
    assert "SHA256" in found[SHARDS[0]] and "missing" in found[SHARDS[1]]


def test_a_large_file_is_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("ckpt_tools.verification.file_checks.BLOCK_BYTES", 1000)
    save_file({"w": np.arange(5000)}, tmp_path / "w.safetensors")
    coreutils(tmp_path, "sha256sum", "w.safetensors", output=tmp_path / "SHA256SUMS")
    seen: list[tuple[int, int]] = []
    size = (tmp_path / "w.safetensors").stat().st_size
    assert ckpt_tools.verify(tmp_path, on_progress=lambda done, total: seen.append((done, total))).equal
    assert seen[: -(-size // 1000)][-1] == (size, size)


def test_json_names_lists_and_files(folder):
    coreutils(folder, "sha256sum", *SHARDS, output=folder / "SHA256SUMS")
    flip(folder / SHARDS[0])
    code, out, _ = command("verify", folder, "--format", "json")
    found = json.loads(out)
    assert (code, found["lists"], found["num_files"], found["num_wrong_files"]) == (6, ["SHA256SUMS"], 2, 1)
    (difference,) = found["differences"]
    assert (difference["aspect"], difference["key"]["fqn"]) == ("file", SHARDS[0])
