"""safetensors: the rules of the format, texts in the header, a whole state, and files that are no model. The library
itself is the judge."""

import base64
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.format_names import HEADER_ENTRY
from ckpt_tools.core.manifest import Kind, Manifest, StateKey
from ckpt_tools.core.notes import Outcome
from ckpt_tools.core.options import ReadOptions, WriteOptions
from ckpt_tools.core.values import StorageRef, StoredTensor
from ckpt_tools.errors import (
    FormatError,
    IncompleteError,
    LossError,
    MalformedError,
    SeveralCheckpointsError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_tools.formats.builtin import FORMATS, SafetensorsFormat
from ckpt_tools.formats.safetensors.files import STATE_KEY
from ckpt_tools.runs.opening import open_checkpoint
from ckpt_tools.serialization.pickle.dump import dumps
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source
from tests.support.every_verb import refusal
from tests.support.refusals import refusal_test


def packed(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def info(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read(files: dict[str, bytes]) -> Manifest:
    store = MemoryStore({name: bytearray(data) for name, data in files.items()})
    return SafetensorsFormat().read(Source.open(store), ReadOptions())


def read_one(header: object, data: bytes = b"") -> Manifest:
    return read({"model.safetensors": packed(header, data)})


def layout_of(manifest: Manifest, max_shard_bytes: int | None = None) -> Any:
    options = WriteOptions() if max_shard_bytes is None else WriteOptions(max_shard_bytes=max_shard_bytes)
    return SafetensorsFormat().layout(manifest, options)


# The rules


NAN = b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}'
OVERLAPPING = {"a": info(), "b": info(offsets=[4, 12])}
RULES: list[tuple[bytes, type[FormatError], str]] = [
    (b"abc", IncompleteError, "3 bytes"),
    (struct.pack("<Q", 100_000_001) + b"{}", MalformedError, "100,000,001"),
    (struct.pack("<Q", 50) + b"{}", IncompleteError, "does not fit"),
    (packed(b"{"), MalformedError, "JSON"),
    (packed(b"\xff\xfe{}"), MalformedError, "JSON"),
    (packed([1]), MalformedError, "not a JSON object"),
    (packed({"a": {"dtype": "F32"}}), MalformedError, "needs dtype"),
    (packed({"a": {**info(), "more": 1}}, bytes(8)), MalformedError, "nothing else"),
    (packed({"a": info("F31")}, bytes(8)), UnsupportedError, "F31"),
    (packed({"a": info(["F32"])}, bytes(8)), UnsupportedError, "F32"),
    (packed({"a": info(shape=[-2])}, bytes(8)), MalformedError, "are not valid"),
    (packed({"a": info(shape=[2.0])}, bytes(8)), MalformedError, "are not valid"),
    (packed({"a": info(shape=[True, 2])}, bytes(8)), MalformedError, "are not valid"),
    (packed({"a": info(offsets=[8, 0])}, bytes(8)), MalformedError, "are not valid"),
    (packed({"a": info(offsets=[0, 4])}, bytes(4)), MalformedError, "cannot hold"),
    (packed({"a": info(shape=[1 << 62, 1 << 62])}, bytes(8)), MalformedError, "cannot hold"),
    (packed(OVERLAPPING, bytes(12)), MalformedError, "overlaps"),
    (packed({"a": info(offsets=[4, 12])}, bytes(12)), MalformedError, "gap"),
    (packed({"a": info()}, bytes(9)), MalformedError, "no tensor has the 1 byte after"),
    (packed({"a": info()}, bytes(7)), IncompleteError, "truncated"),
    (packed(b'{"a":{},"a":{}}'), MalformedError, "twice"),
    (packed({"__metadata__": {"n": 1}}), MalformedError, "__metadata__"),
    (packed(NAN, bytes(8)), MalformedError, "NaN"),
    # A second tensor whose type is equal to the first's, which was checked already, and is not the same.
    (packed({"a": info(shape=[2]), "b": info(shape=[2.0], offsets=[8, 16])}, bytes(16)), MalformedError, "not valid"),
    (
        packed({"a": info(shape=[1, 2]), "b": info(shape=[True, 2], offsets=[8, 16])}, bytes(16)),
        MalformedError,
        "not valid",
    ),
    (packed({"a": info(), "b": info(offsets=[8.0, 16.0])}, bytes(16)), MalformedError, "not valid"),
    (packed({"a": info(), "b": info(offsets=[8, 16, 24])}, bytes(16)), MalformedError, "not valid"),
    (packed({"a": info(), "b": info(offsets=[16, 8])}, bytes(16)), MalformedError, "not valid"),
    (packed({"a": info(), "b": info(offsets=[8, 12])}, bytes(12)), MalformedError, "cannot hold"),
    (packed({"a": info(), "b": info(offsets=[-8, 0])}, bytes(8)), MalformedError, "not valid"),
    (packed({"a": info(), "b": info(offsets=[2**63 - 8, 2**63])}, bytes(8)), MalformedError, "not valid"),
    (
        packed(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        MalformedError,
        "twice",
    ),
    (packed(b'{"a":{"dtype":"F32","shape":[2],"shape":[2]}}', bytes(8)), MalformedError, "twice"),
]


def indexed(weight_map: object, **files: bytes) -> dict[str, bytes]:
    index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return {"model.safetensors.index.json": index, **{f"{name}.safetensors": data for name, data in files.items()}}


ONE, TWO = packed({"a": info()}, bytes(8)), packed({"b": info()}, bytes(8))
FOLDERS: list[tuple[dict[str, bytes], type[Any], str]] = [
    (indexed({"a": "x.safetensors"}), IncompleteError, "missing"),
    (indexed({"a": "../x.safetensors"}), UnsafeError, "outside"),
    (indexed({"a": "/x.safetensors"}), UnsafeError, "outside"),
    (indexed(["a"]), MalformedError, "weight_map"),
    (indexed({"z": "x.safetensors"}, x=ONE), IncompleteError, "'z'"),
    ({"a.safetensors": ONE, "b.safetensors": TWO}, SeveralCheckpointsError, "several models"),
    ({"m-00001-of-00003.safetensors": ONE, "m-00003-of-00003.safetensors": TWO}, IncompleteError, "missing"),
    ({"m-00001-of-00002.safetensors": ONE, "m-00002-of-00002.safetensors": ONE}, MalformedError, "two files"),
]


def read_wide() -> None:
    manifest = read_one({"a": info("C64", [1], [0, 8])}, bytes(8))
    wide = {StateKey("a"): replace(manifest.tensors[StateKey("a")], dtype=DType.COMPLEX128)}
    layout_of(Manifest("x", wide))


test_refused = refusal_test(
    *((f"rule {n}", lambda _, data=data: read({"model.safetensors": data}), error, words) for n,
        (data, error, words) in enumerate(RULES)),
    *((f"folder {n}", lambda _, files=files: read(files), error, words) for n,
        (files, error, words) in enumerate(FOLDERS)),
    ("a type that has no name here", lambda _: read_wide(), UnsupportedError, "complex128"),
)  # fmt: skip


def test_the_fields_of_a_tensor_may_be_in_any_order():
    fields = info(offsets=[8, 16])
    reversed_fields = dict(reversed(fields.items()))
    made = read_one({"a": info(), "b": reversed_fields}, bytes(16))
    assert [*made.tensors[StateKey("b")].shards] == [
        *read_one({"a": info(), "b": fields}, bytes(16)).tensors[StateKey("b")].shards
    ]


def test_shards_without_an_index_are_one_model_if_complete():
    assert read({"m-00001-of-00002.safetensors": ONE, "m-00002-of-00002.safetensors": TWO}).fqns == {"a", "b"}


# Texts in the header say how the tensors are meant: they are carried, or a note names them

TORCHAO = {
    "format": "pt",
    "tensor_names": '["0.weight"]',
    "0.weight": '{"_type": "Int8Tensor", "_data": {"block_size": [1, 64]}}',
}
HEADERS = {
    "torchao": TORCHAO,
    "diffusers": {"format": "pt", "lora_adapter_metadata": '{"unet.r": 4, "unet.lora_alpha": 16}'},
    "kohya": {"ss_network_alpha": "16", "ss_network_dim": "4", "modelspec.title": "a b"},
    "comfyui": {"format": "pt", "_quantization_metadata": '{"layers": {"0": {"format": "float8_e4m3fn"}}}'},
    "mlx": {"format": "mlx"},
    "a tie": {"format": "pt", "tied.weight": "0.weight", "said": "x"},
}
CARRYING = ("dcp", "zero1", "zero2", "zero3", "universal", "megatron", "sharded", "safetensors", "torch")


def save(path: Path, header: dict[str, str], *, names: tuple[str, ...] = ("0.weight", "1.weight")) -> Path:
    path.parent.mkdir(exist_ok=True)
    save_file({name: torch.arange(6.0).reshape(2, 3) + n for n, name in enumerate(names)}, path, metadata=header)
    return path


def header(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


@pytest.mark.parametrize("said", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("state", [None, "all"])
def test_a_file_keeps_its_header(said, state, tmp_path):
    source, out = save(tmp_path / "a.safetensors", said), tmp_path / "b.safetensors"
    report = ckpt_tools.convert(source, out, state=state, strict=True)
    assert header(out) == {"format": "pt"} | said
    assert not report.notes
    assert ckpt_tools.verify(source, out).equal
    if "said" in said:
        assert ckpt_tools.open(source).extras == {HEADER_ENTRY: {"said": "x"}}


@pytest.mark.parametrize("to", [form.name for form in FORMATS.values() if form.writes and form.name != "peft"])
def test_every_format_carries_a_header_or_names_it(to, tmp_path):
    source, there = save(tmp_path / "a.safetensors", TORCHAO), tmp_path / "there"
    report = ckpt_tools.convert(source, there, to=to, state="all" if to in CARRYING else None)
    named = [note.what for note in report.notes if note.outcome is Outcome.DROPPED]
    assert named == ([] if to in CARRYING else [HEADER_ENTRY])
    assert ckpt_tools.verify(source, there).equal
    ckpt_tools.convert(there, tmp_path / "b.safetensors")
    assert header(tmp_path / "b.safetensors") == (TORCHAO if to in CARRYING else {"format": "pt"})
    if to not in CARRYING:
        with pytest.raises(LossError, match=HEADER_ENTRY):
            ckpt_tools.convert(source, tmp_path / "strict", to=to, strict=True)


def test_shards_have_one_header_and_what_they_do_not_share_is_named(tmp_path):
    both, source = {"format": "pt", "tensor_names": "[]"}, tmp_path / "m"
    said = {**both, "a": "1", "part": "0"}, {**both, "b": "2", "part": "1"}
    files = {f"{n}.weight": f"model-0000{n + 1}-of-00002.safetensors" for n in range(2)}
    for (name, file), each in zip(files.items(), said, strict=True):
        save(source / file, each, names=(name,))
    index = {"metadata": {"total_size": 48, "mergekit_version": "0.1"}, "weight_map": files}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    report = ckpt_tools.convert(source, tmp_path / "o", to="safetensors", max_shard_size="24")
    found = [header(file) for file in (tmp_path / "o").glob("*.safetensors")]
    assert found == [{**both, "a": "1", "b": "2"}] * 2
    lost = {note.what for note in report.notes if note.is_loss}
    assert lost == {f"{HEADER_ENTRY}.part", "mergekit_version in model.safetensors.index.json"}
    with pytest.raises(LossError, match="part"):
        ckpt_tools.convert(source, tmp_path / "strict.safetensors", strict=True)


@pytest.mark.parametrize("options", [{"rename": ["^0=2"]}, {"dtype": "bfloat16"}, {"exclude": ["1.*"]}])
def test_a_note_says_that_a_header_may_not_hold_any_more(options, tmp_path):
    source, out = save(tmp_path / "a.safetensors", TORCHAO), tmp_path / "b.safetensors"
    report = ckpt_tools.convert(source, out, **options)
    assert header(out) == TORCHAO
    assert [note.what for note in report.notes if note.outcome is Outcome.KEPT] == [HEADER_ENTRY]


@pytest.mark.parametrize("other", [{"format": "pt"}, {**TORCHAO, "tensor_names": "[]"}, {**TORCHAO, "more": ""}])
def test_verify_compares_headers(other, tmp_path):
    source, out = save(tmp_path / "a.safetensors", TORCHAO), save(tmp_path / "b.safetensors", other)
    report = ckpt_tools.verify(source, out)
    assert report.num_differing == 0
    assert {each.key.fqn.split(".")[0] for each in report.differences} == {HEADER_ENTRY}


# A whole state, in which the user's tensors stay the user's

RNG = torch.arange(5, dtype=torch.uint8)
PATHS = {"w": ("w",), "optim.state.w.exp_avg": ("optim", "state", "w", "exp_avg"), "rng": ("rng",)}
PATHS |= {"optim.param_groups.0.params": ("optim", "param_groups", 0, "params"), "seeds": ("seeds",)}
OBJECTS: dict[str, Any] = {"optim.param_groups.0.params": ["w"], "seeds": [1]}


def opened(path: Path) -> Manifest:
    return open_checkpoint(path, ReadOptions()).manifest


def names(manifest: Manifest) -> set[str]:
    return {key.fqn for key in manifest.select_kinds(Kind.PARAMETER, Kind.BUFFER)}


def with_state(folder: Path, **changes: Any) -> Manifest:
    tensors = {"w": torch.ones(2), "optim.state.w.exp_avg": torch.zeros(2), "rng": RNG}
    text = dumps({"paths": PATHS, "objects": OBJECTS, **changes})
    save_file(tensors, folder / "x.safetensors", metadata={STATE_KEY: base64.b64encode(text).decode()})
    return opened(folder / "x.safetensors")


def test_a_file_of_an_older_version_opens_as_it_did(tmp_path):
    """It does not say which tensors are the user's, so that all at the top are weights."""
    manifest = with_state(tmp_path)
    assert names(manifest) == {"w", "rng"}
    assert manifest.extra == {"seeds": [1]} and StateKey("w", "exp_avg") in manifest.tensors
    # Names that are no tensors mean nothing.
    assert names(with_state(tmp_path, own=["rng", "other", "seeds"])) == {"w"}


def _tensor(name: str, dtype: DType = DType.UINT8, numel: int = 5) -> StoredTensor:
    return StoredTensor(StorageRef.of_elements(name, dtype, numel), dtype, 0, (numel,), (1,))


@pytest.mark.parametrize(
    "changed",
    [
        {"own": "rng"},
        {"own": [1]},
        *({"own": ["rng"], "objects": {**OBJECTS, "seeds": [each]}} for each in (_tensor("absent"),
            _tensor("rng", numel=4), _tensor("rng", DType.INT8))),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_file_is_an_error(changed, tmp_path):
    with pytest.raises(FormatError):
        with_state(tmp_path, **changed)


# Files that are no model: one file a rank of tensor parallelism, and what a trainer publishes of its changes

OF_RANKS = {
    "vllm": ["model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors"],
    "vllm, two parts": [f"model-rank-{rank}-part-{part}.safetensors" for rank in range(2) for part in range(2)],
    "deepseek": ["model0-mp2.safetensors", "model1-mp2.safetensors"],
    "tensorrt-llm": ["rank0.safetensors", "rank1.safetensors"],
    "neuronx": ["tp_rank_00_pp_rank_00.safetensors", "tp_rank_01_pp_rank_00.safetensors"],
    "neuronx, data parallel": [f"dp_rank_00_tp_rank_0{rank}_pp_rank_00.safetensors" for rank in range(2)],
}
CUT = "of a model that tensor parallelism cut"


def merging(base: Path, out: Path) -> str:
    with pytest.raises(UnsupportedError) as found:
        ckpt_tools.merge_lora(base, base, out, to="safetensors")
    return str(found.value)


def problem(folder: Path) -> str | None:
    (found,) = ckpt_tools.ls(folder).checkpoints
    return found.problem


def saved(folder: Path, names: list[str]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for number, name in enumerate(names):
        save_file({"up.weight": torch.full((3, 2), float(number)), "norm.weight": torch.ones(2)}, folder / name)
    return folder


@pytest.mark.parametrize("kind", OF_RANKS)
def test_a_file_a_rank_is_no_model(kind, tmp_path):
    folder = saved(tmp_path / "run", OF_RANKS[kind])
    for src in (folder, folder / OF_RANKS[kind][0]):
        for more in ({}, {"from_": "safetensors"}):
            code, sentence = refusal(src, tmp_path / "out", **more)
            assert code == 4 and CUT in sentence
    # vLLM copies the index of the model that it cut.
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"up.weight": "model-1.safetensors"}}')
    for sentence in (refusal(folder, tmp_path / "out")[1], problem(folder), merging(folder, tmp_path / "out")):
        assert sentence is not None and "tensor parallelism cut" in sentence


def test_shards_with_the_names_of_others_are_no_model(tmp_path):
    """Mistral numbers its ranks as others number their shards."""
    folder = saved(tmp_path / "run", [f"consolidated-0000{number}-of-00002.safetensors" for number in (1, 2)])
    assert "this tensor is in two files" in refusal(folder, tmp_path / "out")[1]
    assert "this is one file of a checkpoint" in refusal(min(folder.glob("*.safetensors")), tmp_path / "out")[1]
    assert "are in two files" in str(problem(folder))


@pytest.mark.parametrize(("encoding", "num_files"), [("xor", 1), ("overwrite", 2)])
def test_a_published_delta_alone_is_no_model(encoding, num_files, tmp_path):
    """As slime publishes it (update_weight_from_disk_delta.py): tensors are compressed changes, and the files count
    from 0."""
    folder, weight_map = tmp_path / "disk" / "weight_v000002", {}
    folder.mkdir(parents=True)
    for number in range(num_files):
        name = f"model-{number:05d}-of-{num_files:05d}.safetensors"
        changes = {f"layers.{number}.{part}": np.frombuffer(b"(\xb5/\xfd change", np.uint8) for part in ("up", "down")}
        (folder / name).write_bytes(safetensors.numpy.save(changes, metadata=dict.fromkeys(changes, "1a2b3c4d")))
        weight_map |= dict.fromkeys(changes, name)
    metadata = {"version": "000002", "base_version": "000001", "delta_encoding": encoding, "compression_format": "zstd"}
    index = {"metadata": metadata | {"checksum_format": "adler32"}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    code, sentence = refusal(folder, tmp_path / "out")
    assert code == 4 and "weight_v000001: weight_v000002 is a delta against this version, which is missing" in sentence
    assert "it is a delta against an earlier version" in str(problem(folder.parent))
    with pytest.raises(IncompleteError, match="is a delta against this version"):
        merging(folder, tmp_path / "out")
    (folder / "model.safetensors.index.json").unlink()
    for src in (folder, min(folder.glob("*.safetensors"))) if num_files == 1 else ():
        assert "it is a delta" in refusal(src, tmp_path / "out", from_="safetensors")[1]
