"""Genuine small checkpoints, made by the libraries that own the formats; ``python -m tests.end_to_end.fuzzing.seeds``
writes them to ``tests/corpus``, from which the fuzzer reads them without torch.

A checkpoint here is a mapping of relative names to bytes. Each holds a few tensors of different kinds, so that a
mutation has something to hit and an execution costs little.
"""

import base64
import io
import json
import pickle
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from safetensors.torch import save as safetensors_bytes
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from fixtures.corpus import make
from tests.end_to_end.fuzzing import corpus
from tests.formats import test_meta
from tests.formats.deepspeed import zero_files

Files = dict[str, bytes]


def torch_bytes(value: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def tensors() -> dict[str, Tensor]:
    """Two matrices, a vector, a scalar, and one without elements."""
    return {
        "a.weight": torch.arange(12, dtype=torch.float32).reshape(4, 3),
        "a.bias": torch.arange(4, dtype=torch.bfloat16),
        "b.weight": torch.arange(6, dtype=torch.float64).reshape(3, 2),
        "count": torch.tensor(2**53 + 1),
        "empty": torch.empty(0, 3),
    }


# safetensors


def safetensors() -> Files:
    return {"model.safetensors": safetensors_bytes(tensors(), {"format": "pt", "head.weight": "a.weight"})}


def sharded(stem: str, suffix: str, save: Callable[[Any], bytes]) -> Files:
    """Two files and their index."""
    parts = [dict(list(tensors().items())[:2]), dict(list(tensors().items())[2:])]
    named = {f"{stem}-0000{n}-of-00002{suffix}": part for n, part in enumerate(parts, 1)}
    index = {"metadata": {"total_size": 112}, "weight_map": {name: file for file in named for name in named[file]}}
    return {file: save(part) for file, part in named.items()} | {
        f"{stem}{suffix}.index.json": json.dumps(index).encode()
    }


def safetensors_sharded() -> Files:
    return sharded("model", ".safetensors", lambda part: safetensors_bytes(part, {"format": "pt"}))


def safetensors_pieces() -> Files:
    """As ``HuggingFaceStorageWriter(save_distributed=True)`` leaves them."""
    found = {}
    for rank in range(2):
        pieces = {name: tensor[2 * rank : 2 * rank + 2].clone() for name, tensor in list(tensors().items())[:2]}
        places = {name: {"saved_offsets": [2 * rank] + [0] * (t.dim() - 1)} for name, t in pieces.items()}
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0"}
        found[f"shard-0000{rank + 1}-model-00001-of-00001.safetensors"] = safetensors_bytes(pieces, metadata)
    return found


def safetensors_state() -> Files:
    """A whole training state, whose tree is a pickle in the metadata."""
    model = dict(list(tensors().items())[:2])
    moments = {f"optim.state.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in model.items()}
    paths = {f"model.{name}": ("model", name) for name in model}
    paths |= {key: ("optim", *key.split(".", 2)[1:2], key[12:-8], "exp_avg") for key in moments}
    paths |= {"optim.param_groups.0.lr": ("optim", "param_groups", 0, "lr"), "epoch": ("epoch",)}
    paths["optim.param_groups.0.params"] = ("optim", "param_groups", 0, "params")
    objects = {"optim.param_groups.0.lr": 0.1, "epoch": 3, "optim.param_groups.0.params": list(model)}
    state = base64.b64encode(pickle.dumps({"paths": paths, "objects": objects}, protocol=4)).decode()
    named = {f"model.{name}": tensor for name, tensor in model.items()}
    return {"state.safetensors": safetensors_bytes({**named, **moments}, {"format": "pt", "ckpt_tools.state": state})}


def safetensors_companions() -> Files:
    """A model with what a Trainer leaves beside it."""
    scheduler = torch_bytes({"base_lrs": [0.1], "last_epoch": 4, "verbose": False})
    state = json.dumps({"global_step": 4, "epoch": 1.0, "log_history": [{"loss": 1.0, "step": 1}]})
    return {"model.safetensors": safetensors_bytes(tensors()), "scheduler.pt": scheduler} | {
        "trainer_state.json": state.encode()
    }


# torch.save


def torch_model() -> Files:
    value = OrderedDict(tensors())
    value["tied"] = value["a.weight"]
    value["turned"] = value["b.weight"].t()
    value["row"] = torch.arange(8.0)[2:5]
    return {"model.pt": torch_bytes(value)}


def training_state() -> dict[str, Any]:
    """As a plain loop saves it: parameters by number, a scheduler, counts."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state()[:16].clone(),
        "epoch": 3,
        "betas": (0.9, 0.95),
    }


def torch_training() -> Files:
    return {"state.pt": torch_bytes(training_state())}


def torch_sharded() -> Files:
    return sharded("pytorch_model", ".bin", torch_bytes)


# DCP


class DcpFolder:
    """A DCP being made, item by item, with torch's own metadata classes."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.metadata = dcp.Metadata({}, {}, {}, dcp.StorageMeta())

    def add_tensor(self, path: tuple[Any, ...], tensor: Tensor, rows: list[int]) -> None:
        """``rows`` are where the chunks begin; chunk i goes to rank i's file."""
        fqn, chunks = ".".join(map(str, path)), []
        for rank, (start, stop) in enumerate(
            zip(rows, [*rows[1:], tensor.shape[0] if tensor.dim() else 1], strict=True)
        ):
            piece = tensor[start:stop].clone() if tensor.dim() else tensor
            offsets = torch.Size([start] + [0] * (tensor.dim() - 1) if tensor.dim() else [])
            chunks.append(dcp.ChunkStorageMetadata(offsets, piece.shape))
            self._store(dcp.MetadataIndex(fqn, offsets, rank), torch_bytes(piece), rank)
        properties = dcp.TensorProperties(dtype=tensor.dtype)
        self.metadata.state_dict_metadata[fqn] = dcp.TensorStorageMetadata(properties, tensor.shape, chunks)
        self.metadata.planner_data[fqn] = path

    def add_object(self, path: tuple[Any, ...], value: Any) -> None:
        self.add_raw(path, torch_bytes(value))

    def add_raw(self, path: tuple[Any, ...], item: bytes) -> None:
        """An object whose item is ``item``, whatever that is."""
        fqn = ".".join(map(str, path))
        self._store(dcp.MetadataIndex(fqn), item, 0)
        self.metadata.state_dict_metadata[fqn] = dcp.BytesStorageMetadata()
        self.metadata.planner_data[fqn] = path

    def _store(self, index: dcp.MetadataIndex, item: bytes, rank: int) -> None:
        file = self.files.setdefault(f"__{rank}_0.distcp", bytearray())
        self.metadata.storage_data[index] = _StorageInfo(f"__{rank}_0.distcp", len(file), len(item))
        file += item

    def saved(self) -> Files:
        return {**{name: bytes(data) for name, data in self.files.items()}, ".metadata": pickle.dumps(self.metadata)}


def dcp_folder() -> DcpFolder:
    """Rows over two ranks, an optimizer of groups, a 0-d tensor, and objects, one of them with a tensor inside."""
    folder = DcpFolder()
    for name, tensor in list(tensors().items())[:2]:
        folder.add_tensor(("model", name), tensor, [0, 2])
        folder.add_tensor(("optim", "state", name, "exp_avg"), torch.ones_like(tensor), [0, 3])
    folder.add_tensor(("optim", "state", "a.weight", "step"), torch.tensor(4.0), [0])
    folder.add_object(("optim", "param_groups", 0, "params"), ["a.weight", "a.bias"])
    folder.add_object(("optim", "param_groups", 0, "lr"), 0.1)
    folder.add_object(("client",), {"epoch": 3, "inner": torch.arange(3.0)})
    return folder


def dcp_groups() -> Files:
    return dcp_folder().saved()


def dcp_flattened() -> Files:
    """As torchtitan flattens it: one key for each option of each parameter."""
    folder = DcpFolder()
    for name, tensor in list(tensors().items())[:2]:
        folder.add_tensor((name,), tensor, [0, 1])
        folder.add_tensor((f"state.{name}.exp_avg",), torch.ones_like(tensor), [0])
        folder.add_object((f"param_groups.{name}.lr",), 0.1)
        folder.add_object((f"param_groups.{name}.betas",), (0.9, 0.95))
    return folder.saved()


# DeepSpeed

GROUPS: list[Mapping[str, tuple[int, ...]]] = [{"a.weight": (4, 3), "a.bias": (5,)}, {"b.weight": (3, 2)}]


def zero(stage: int) -> zero_files.Files:
    files = zero_files.build(stage, 2, GROUPS, {"frozen": (2, 3)} if stage > 1 else None)
    model = files[zero_files.MODEL if stage < 3 else zero_files.rank_model(0)]
    model |= {"lr_scheduler": {"last_epoch": 7, "base_lrs": [0.1]}, "client": {"epoch": 2, "seen": torch.arange(3)}}
    return files


def saved(files: Mapping[str, Any]) -> Files:
    return {path: bytes(data) for path, data in zero_files.store_of(dict(files)).files.items()}


def universal() -> zero_files.Files:
    """As ds_to_universal leaves it from stage 1."""
    tag = zero_files.TAG
    files: dict[str, Any] = {"latest_universal": tag, zero_files.MODEL: zero(1)[zero_files.MODEL]}
    groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
    files[f"{tag}/zero/optimizer_state.pt"] = {"optimizer_state_dict": {"param_groups": groups, "state": {}}}
    files[f"{tag}/zero/optimizer_state.pt"] |= {"param_groups": groups, "zero_stage": 1}
    for name, tensor in zero_files.values_of(GROUPS).items():
        files[f"{tag}/zero/{name}/fp32.pt"] = {"param": tensor, "cat_dim": 0}
        files[f"{tag}/zero/{name}/exp_avg.pt"] = {"param": tensor + 1, "cat_dim": 0}
        files[f"{tag}/zero/{name}/step.pt"] = torch.tensor(7.0)
    return files


def universal_from_stage3() -> zero_files.Files:
    """Flat tensors, one model file a rank, and steps by sub-group."""
    tag = zero_files.TAG
    native = zero(3)
    files: dict[str, Any] = {"latest_universal": tag}
    files |= {zero_files.rank_model(rank): native[zero_files.rank_model(rank)] for rank in range(2)}
    state = {n: {"step": torch.tensor(7.0)} for n in range(2)}
    inner = {"param_groups": [{"lr": 0.1, "params": [0, 1]}], "state": state}
    files[f"{tag}/zero/optimizer_state.pt"] = {"optimizer_state_dict": inner, "zero_stage": 3}
    for name, tensor in zero_files.values_of(GROUPS).items():
        files[f"{tag}/zero/{name}/fp32.pt"] = tensor.flatten()
        files[f"{tag}/zero/{name}/exp_avg.pt"] = tensor.flatten() + 1
    return files


# Other carriers


def torch_legacy() -> Files:
    """The stream of torch before 1.6: pickles one behind the other, and then the storages."""
    return {"model.pt": torch_bytes(training_state(), _use_new_zipfile_serialization=False)}


def npz() -> Files:
    out = io.BytesIO()
    arrays = {name: tensor.numpy() for name, tensor in tensors().items() if tensor.dtype is not torch.bfloat16}
    np.savez(out, **arrays)
    return {"model.npz": out.getvalue()}


def gguf() -> Files:
    """As the library of llama.cpp writes it: two matrices, and values of several types."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        writer = GGUFWriter(path, "llama")
        writer.add_name("small")
        writer.add_block_count(2)
        writer.add_token_list(["a", "b"])
        for name in ("a.weight", "b.weight"):
            writer.add_tensor(name, tensors()[name].float().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return {"model.gguf": path.read_bytes()}


def meta() -> Files:
    parts = test_meta.cut(test_meta.model(), 2, 1)
    with tempfile.TemporaryDirectory() as folder:
        return files_in(test_meta.write(Path(folder), parts))


def of_corpus(name: str) -> Files:
    """What a framework wrote for the corpus of layouts."""
    return files_in(make(name).source)


def files_in(folder: Path) -> Files:
    """All files but programs and pages, which no reader opens."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in (".py", ".md")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


SEEDS: dict[str, Callable[[], Files]] = {
    "safetensors": safetensors, "safetensors_sharded": safetensors_sharded, "safetensors_pieces": safetensors_pieces,
    "safetensors_state": safetensors_state, "safetensors_companions": safetensors_companions, "torch": torch_model,
    "torch_training": torch_training, "torch_sharded": torch_sharded, "dcp": dcp_groups,
    "dcp_flattened": dcp_flattened, "zero1": lambda: saved(zero(1)), "zero2": lambda: saved(zero(2)),
    "zero3": lambda: saved(zero(3)), "universal": lambda: saved(universal()),
    "universal_stage3": lambda: saved(universal_from_stage3()),
}  # fmt: skip
"""A checkpoint of each format and flavour."""

FUZZED: dict[str, Callable[[], Files]] = {
    **SEEDS, "legacy": torch_legacy, "npz": npz, "gguf": gguf, "sharded": lambda: of_corpus("verl"),
    "megatron": lambda: of_corpus("megatron-weights"), "zstd": lambda: of_corpus("dcp-zstd"),
    "accelerate": lambda: of_corpus("accelerate-ddp-bin"), "meta": meta, "nanotron": lambda: of_corpus("nanotron"),
    "autoep": lambda: of_corpus("deepspeed-autoep-zero2-fp32"), "peft": lambda: of_corpus("hf-peft-lora"),
    "orbax": lambda: of_corpus("orbax"),
}  # fmt: skip
"""Those, and other carriers, which the fuzzer changes."""


def main() -> None:
    torch.manual_seed(0)
    for name, made in FUZZED.items():
        corpus.pack(corpus.FOLDER / f"{name}.zip", made())


if __name__ == "__main__":
    main()
