"""Files that a pickle can lie in. Imports no torch, which starts programs: ``strace`` sees nothing but the commands."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import ckpt_tools
from ckpt_tools.errors import CkptError
from ckpt_tools.serialization.pickle.dcp_metadata import BytesStorageMetadata, MetadataIndex, StorageInfo
from ckpt_tools.serialization.pickle.dump import dumps
from ckpt_tools.serialization.pickle.load import loads
from tests.serialization.archives import legacy, oldest, torch_zip
from tests.verification.scan.generator import TRICKS

HOSTS = {
    "torch": ("torch", "model.pt", "zip"),
    "torch, legacy": ("torch", "model.pt", "legacy"),
    "torch, tar": ("torch", "model.pt", "tar"),
    "companion": ("dcp", "scheduler.bin", "zip"),
    "pickled companion": ("dcp", "random_states_0.pkl", "raw"),
    "DCP metadata": ("dcp", ".metadata", "raw"),
    "DCP object": ("dcp", "__9_0.distcp", "item"),
    "ZeRO model": ("zero2-fp32", "*/mp_rank_00_model_states.pt", "zip"),
    "ZeRO optimizer": ("zero2-fp32", "*/*_optim_states.pt", "zip"),
    "ZeRO-3 model": ("zero3-fp32", "*/zero_pp_rank_0_*_model_states.pt", "zip"),
    "ZeRO-3 optimizer": ("zero3-fp32", "*/*_optim_states.pt", "zip"),
    "universal model": ("universal", "*/mp_rank_00_model_states.pt", "zip"),
    "universal tensor": ("universal", "*/zero/*/fp32.pt", "zip"),
}
"""Every file that a pickle can lie in: the checkpoint, the file whose place a sample takes, and how it holds it."""


FORMS: dict[str, Callable[[bytes], bytes]] = {"raw": bytes, "zip": torch_zip, "legacy": legacy, "tar": oldest}


def put(kind: str, folder: Path, data: bytes) -> None:
    """The pickle takes its place. One in an item is the first object of a DCP, in a file of its own."""
    _, file, form = HOSTS[kind]
    if form != "item":
        path = min(folder.glob(file), default=folder / file)
        path.write_bytes(FORMS[form](data))
        return
    metadata, item = loads((folder / ".metadata").read_bytes(), path="x"), torch_zip(data)
    fqn = next(fqn for fqn, kind in metadata.state_dict_metadata.items() if isinstance(kind, BytesStorageMetadata))
    metadata.storage_data[MetadataIndex(fqn)] = StorageInfo(file, 0, len(item))
    (folder / ".metadata").write_bytes(dumps(metadata))
    (folder / file).write_bytes(item)


def read_payloads(work: str) -> None:
    """Each payload in a file of one kind, the next kind with those that follow it, by three commands."""
    for number, kind in enumerate(HOSTS):
        folder = Path(work, kind)
        for _, data in TRICKS[number :: len(HOSTS)]:
            put(kind, folder, data)
            for read in (ckpt_tools.scan, ckpt_tools.inspect, lambda src: ckpt_tools.convert(src, f"{work}/out.pt")):
                with contextlib.suppress(CkptError):
                    read(folder)
