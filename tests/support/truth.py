"""Reading a truth and comparing tensors bit by bit, with numpy and ml_dtypes only: no torch, no ckpt_tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

Key = tuple[str, str]
WEIGHT, MASTER = "weight", "master"
_MAX_LINES = 12


@dataclass(frozen=True, slots=True)
class Truth:
    """A framework's own gathered state: `tensors` by (fqn, slot), `kinds` of weights by fqn, and the facts.

    `facts`: `ties` (alias -> owner), `groups` ([{fqns, options}]), `scheduler`, `global_step`, `epoch`,
    `client_state`, `losses` (of the next steps), `framework`, `world_size`; for DeepSpeed also `stage`,
    `skipped_steps`, `loss_scaler`.
    """

    tensors: Mapping[Key, np.ndarray]
    kinds: Mapping[str, str]
    facts: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path) -> Truth:
        """Read `truth.json` and `truth.bin` of a fixture's root, or of what a resume wrote."""
        facts = json.loads((folder / "truth.json").read_text())
        data = (folder / "truth.bin").read_bytes()
        entries = facts.pop("tensors")
        tensors = {(e["fqn"], e["slot"]): _tensor(e, data) for e in entries}
        kinds = {e["fqn"]: e["kind"] for e in entries if e["slot"] == WEIGHT}
        return cls(tensors, kinds, facts)

    def slot(self, name: str) -> dict[str, np.ndarray]:
        """All tensors of one slot, by fqn."""
        return {fqn: tensor for (fqn, slot), tensor in self.tensors.items() if slot == name}

    def best_weights(self) -> dict[str, np.ndarray]:
        """What an export holds by default: masters where there are any, under every alias too, else the weights."""
        masters = self.slot(MASTER)
        ties = self.facts["ties"]
        return {fqn: masters.get(ties.get(fqn, fqn), tensor) for fqn, tensor in self.slot(WEIGHT).items()}


def _tensor(entry: Mapping[str, Any], data: bytes) -> np.ndarray:
    return np.frombuffer(data[entry["start"] : entry["stop"]], dtype_of(entry["dtype"])).reshape(entry["shape"])


def dtype_of(name: str) -> np.dtype[Any]:
    """numpy's (or ml_dtypes') dtype for torch's name of one."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal shape, dtype and bytes: tells NaN payloads and -0.0 apart."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def assert_same_bits(want: Mapping[Any, np.ndarray], got: Mapping[Any, np.ndarray]) -> None:
    """Both mappings have the same keys, and under each the same shape, dtype and bytes; else says what differs."""
    lines = [f"missing: {key}" for key in want if key not in got]
    lines += [f"surplus: {key}" for key in got if key not in want]
    both = [key for key in want if key in got and not same_bits(want[key], got[key])]
    lines += [f"{key}: want {_shown(want[key])}, got {_shown(got[key])}" for key in both]
    assert not lines, "\n  ".join([f"{len(lines)} of {len(want)} tensors differ", *lines[:_MAX_LINES]])


def _shown(array: np.ndarray) -> str:
    return f"{array.dtype} {array.shape} 0x{array.tobytes()[:64].hex()}"
