"""Checkpoints of which one file is of another save, of another rank or damaged: the sets of the table in docs/trust."""

import json
import logging
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ckpt_tools
from ckpt_tools.errors import CkptError
from tests.support.every_verb import READING, USING

SAVES: Mapping[str, tuple[int, int]] = {"one": (0, 3), "later": (0, 7), "other": (1, 3)}
"""The seed and the number of steps of each save: a later one of the same run, and one of another run."""

DAMAGES = ("two steps", "two runs", "swapped rank", "flipped bit")


@dataclass(frozen=True, slots=True)
class Row:
    """A file that is exchanged: a format, a pattern of names, and of which of them it is the last."""

    form: str
    file: str

    def __str__(self) -> str:
        return f"{self.form}{self.file}"

    def files(self, folder: Path) -> list[Path]:
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return [path for path in paths if fnmatchcase(f"/{path.relative_to(folder).as_posix()}", f"*{self.file}")]


PAGE = Path(__file__).parents[2] / "docs" / "trust.md"
CELLS = re.findall(r"^\| `?(\w+)`? \| `([^`]+)` \|(.+)\|$", PAGE.read_text(), re.MULTILINE)
ROWS = {Row(form, file): [cell.strip() for cell in cells.split("|")] for form, file, cells in CELLS}
"""The rows of the table, and what it says of each of ``DAMAGES``."""


def trained(seed: int, num_steps: int) -> dict[str, Any]:
    """The state of a small run of torch's own AdamW, scheduled by each step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
        "global_step": num_steps,
    }


def make_saves(folder: Path) -> Path:
    """Every save in every format: ``folder/SAVE/FORMAT``."""
    for name, (seed, num_steps) in SAVES.items():
        made, state = folder / name, trained(seed, num_steps)
        made.mkdir()
        source = made / "state.pt"
        torch.save(state, source)
        for form in ("zero1", "zero2", "zero3", "dcp", "megatron", "sharded"):
            ckpt_tools.convert(source, made / form, to=form, world_size=2)  # type: ignore[arg-type]
        ckpt_tools.convert(source, made / "universal", to="universal")
        for form in ("safetensors", "torch"):
            ckpt_tools.convert(source, made / form, to=form, state="model", max_shard_size=200)  # type: ignore[arg-type]
        trainer = made / "Trainer"
        ckpt_tools.convert(source, trainer, to="safetensors", state="model")
        for file, key in (("optimizer.pt", "optim"), ("scheduler.pt", "lr_scheduler")):
            torch.save(state[key], trainer / file)
        (trainer / "trainer_state.json").write_text(json.dumps({"global_step": num_steps, "epoch": 0.5}))
        _make_nanotron(made / "nanotron", name, num_steps)
        _extract("meta", made / "meta")
        for path in (made / "meta").glob("*.pth"):
            tensors = torch.load(path)
            torch.save({key: tensor + seed + num_steps for key, tensor in tensors.items()}, path)
    return folder


def _extract(name: str, folder: Path) -> None:
    zipfile.ZipFile(Path(__file__).parent.parent / "corpus" / f"{name}.zip").extractall(folder)


def _make_nanotron(folder: Path, name: str, num_steps: int) -> None:
    """The small checkpoint of step 3 in the corpus, and what it would be later or of another run."""
    _extract("nanotron", folder)
    if name == "one":
        return
    about = folder / "checkpoint_metadata.json"
    content = json.loads(about.read_text())
    content["metas"]["last_train_step"] = num_steps
    about.write_text(json.dumps(content))
    for path in folder.rglob("optimizer_*.pt"):
        state = torch.load(path, weights_only=False)
        for slots in state["state"].values():
            slots["step"].fill_(num_steps)
            slots["exp_avg"].add_(1)
        torch.save(state, path)
    for path in folder.rglob("*.safetensors"):
        flip(path)


def flip(path: Path) -> None:
    """Flip a bit of the elements of a tensor: of a zip's largest record, or the last byte of a safetensors file."""
    data = bytearray(path.read_bytes())
    at = len(data) - 1
    if path.suffix != ".safetensors":
        with zipfile.ZipFile(path) as archive:
            record = max((each for each in archive.infolist() if "/data/" in each.filename), key=lambda r: r.file_size)
        name, extra = struct.unpack_from("<HH", data, record.header_offset + 26)
        at = record.header_offset + 30 + name + extra
    data[at] ^= 1
    path.write_bytes(data)


def damage(row: Row, what: str, saves: Path, folder: Path) -> bool:
    """Make ``folder`` the first save of a row's format, damaged; False if that is no damage, or none of this kind."""
    shutil.copytree(saves / "one" / row.form, folder)
    files = row.files(folder)
    path, before = files[-1], files[-1].read_bytes()
    if what == "swapped rank":
        if len(files) < 2:
            return False
        path.write_bytes(files[0].read_bytes())
        files[0].write_bytes(before)
    elif what == "flipped bit":
        if path.suffix == ".json" or not (path.suffix == ".safetensors" or _holds_tensors(path)):
            return False
        flip(path)
    else:
        other = saves / {"two steps": "later", "two runs": "other"}[what] / row.form
        path.write_bytes(row.files(other)[-1].read_bytes())
    return path.read_bytes() != before


def _holds_tensors(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return any("/data/" in each.filename and each.file_size for each in archive.infolist())


VERBS = {
    name: verb
    for name, verb in (READING | USING).items()
    if name in ("inspect", "open", "plan", "convert to torch", "verify", "diff", "checksum", "load_into")
}


def said(source: Path, out: Path, *verbs: str) -> dict[str, str]:
    """What each verb says of ``source``: ``error``, ``warning``, or nothing. A model that fits nothing is no error."""
    found: dict[str, str] = {}
    for name in verbs:
        with heard() as records:
            try:
                VERBS[name](source, out / name.replace(" ", "_"), {})
                found[name] = "warning" if records else ""
            except CkptError as error:
                is_of_model = name == "load_into" and not isinstance(error, ckpt_tools.FormatError)
                found[name] = ("warning" if records else "") if is_of_model else "error"
    return found


@contextmanager
def heard() -> Iterator[list[str]]:
    """The warnings that the library logs while inside."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ckpt_tools")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def is_refused(call: Callable[[], Any]) -> bool:
    try:
        return not call().equal
    except CkptError:
        return True


def outcome(row: Row, what: str, saves: Path, folder: Path) -> str:
    """Who sees a damage: all commands refuse or warn, ``verify`` finds it alone, or with digests, or nobody does."""
    source = folder / row.form
    if not damage(row, what, saves, source):
        return "-"
    if any(said(source, folder, "inspect").values()):
        answers = said(source, folder, *VERBS)
        assert all(answers.values()), answers
        return "refused" if set(answers.values()) == {"error"} else "warned"
    if is_refused(partial(ckpt_tools.verify, source)):
        return "verify"
    listed = saves / f"{row.form}.digests.json"
    if not listed.exists():
        ckpt_tools.checksum(saves / "one" / row.form, output=listed)
    return "digests" if is_refused(partial(ckpt_tools.verify, source, digests=listed)) else "unseen"
