"""Costs of the batch command and `load_model`.

- `predict`: images of a dataset, against a loop that calls the model on batches which are ready; and images on the
  disk, against torch's DataLoader with two workers that open them with Pillow
- `load`: a DCP of 4 ranks, against `safetensors.torch.load_file` and `load_state_dict` into a model that is there;
  ours builds the model too, or fills one that is there; from the page cache, and from the disk

The model of `predict` is that of `make demo`, with the same threads and batches for both, on 10,000 images, as many as
FashionMNIST holds out. It is loaded once, and its time does not count. Loading is in processes of its own. Processor
time counts too, because other programs of the machine lengthen wall time.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from benchmarks.builders import empty_model
from benchmarks.caching import drop_from_cache, read_into_cache
from benchmarks.inputs import WEIGHT_BYTES, InputCache, fit_llama
from benchmarks.runner import CKPT_TOOLS, RunSettings, printed_lines
from benchmarks.turns import Taken, compare_with_promises, take_turns
from ckpt_tools import load_into
from inference.batch.inputs import InputOptions, find_inputs
from inference.batch.model_setup import ModelSetup, choose_columns
from inference.batch.output import OutputFile, RunDigests, open_output
from inference.batch.pipeline import predict_items
from inference.batch.report import Tally
from inference.models import hugging_face
from inference.models.architectures import Architecture
from inference.models.loading import load_model
from inference.models.options import ModelOptions
from training.data import datasets as data
from training.loop import evaluation
from training.models.image_models import build_model

OURS, OTHER = "ours", "other"
NUM_IMAGES, NUM_WORKERS, SIDE = 10_000, 2, 28
BATCH, FILES, LOAD = "batch", "files", "load"
INTO_LOAD, COLD_LOAD = f"{LOAD}, the model is there", f"{LOAD}, from the disk"
PROMISED = {BATCH: 1 / 0.95, FILES: 1 / 0.9, LOAD: 1.2, INTO_LOAD: 1.2, COLD_LOAD: 1.2}
"""Largest ratios of our time to the other's."""


def time_call(function: Callable[[], object]) -> Taken:
    wall, cpu = time.perf_counter(), _cpu_seconds()
    function()
    return Taken(time.perf_counter() - wall, _cpu_seconds() - cpu)


def _cpu_seconds() -> float:
    """Processor time of this process and of the workers that it has waited for."""
    return sum(os.times()[:4])


def make_images(folder: Path) -> None:
    """A model, images in the files of FashionMNIST, and the same ones as PNG."""
    torch.manual_seed(0)
    save_file(build_model().state_dict(), folder / "model.safetensors")
    pixels = np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, SIDE, SIDE), np.uint8)
    raw = folder / "data" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        header = struct.pack(">4i", 0x803, NUM_IMAGES, SIDE, SIDE)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, NUM_IMAGES) + bytes(NUM_IMAGES))
    (folder / "images").mkdir()
    for number, each in enumerate(pixels):
        Image.fromarray(each).save(folder / "images" / f"{number:05d}.png")


def make_contestants(folder: Path, threads: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Each work by our function and by another."""
    torch.set_num_threads(threads)
    predictor: Any = ModelSetup(str(folder / "model.safetensors"), ModelOptions(), threads=threads).load_predictor()
    predict = partial(_predict_to_file, predictor, choose_columns(predictor, 5), out=folder / "out.jsonl")
    forward = evaluation.plain_logits(predictor.task.model)
    pixels = data.load_dataset("fashion-mnist", "held-out", folder / "data").pixels
    ready = [data.to_input(chunk) for chunk in torch.split(pixels, evaluation.CHUNK)]
    names = sorted(map(str, (folder / "images").iterdir()))

    def load_and_forward() -> None:
        files: Any = names
        batches = torch.utils.data.DataLoader(files, evaluation.CHUNK, num_workers=NUM_WORKERS, collate_fn=_open_images)
        for batch in batches:
            forward(data.to_input(batch))

    return {
        BATCH: (
            lambda: predict(InputOptions("fashion-mnist", data_root=folder / "data")),
            lambda: [forward(batch) for batch in ready],
        ),
        FILES: (lambda: predict(InputOptions(str(folder / "images"))), load_and_forward),
    }


def _open_images(names: list[str]) -> torch.Tensor:
    images = []
    for name in names:
        with Image.open(name) as image:
            images.append(torch.from_numpy(np.array(image.convert("L"))))
    return torch.stack(images)


def _predict_to_file(predictor: Any, columns: Any, wanted: Any, out: Path) -> None:
    """The command's work once the model is loaded, from finding the input to showing the output."""
    tally = Tally()
    with open_output(OutputFile(str(out), overwrite=True)) as writer:
        inputs = find_inputs(wanted)
        writer.begin_run(RunDigests("model", inputs.digest, ""), columns, tally.add_written)
        for rows in predict_items(inputs.items(), predictor):
            writer.write(rows)
            for row in rows:
                tally.add_row(row)
    assert (tally.num_rows, tally.num_bad) == (NUM_IMAGES, 0)


def measure_predicting(name: str, settings: RunSettings) -> list[str]:
    """Pair by pair: what follows a DataLoader finds its memory shared with processes that have ended, which costs a
    fault a page."""
    with tempfile.TemporaryDirectory() as temporary:
        make_images(Path(temporary))
        works = make_contestants(Path(temporary), os.cpu_count() or 1)
        pairs = {}
        for work, (ours, other) in works.items():
            turns = take_turns({OURS: partial(time_call, ours), OTHER: partial(time_call, other)}, settings.runs)
            pairs[work] = turns[OURS], turns[OTHER]
        return compare_with_promises(pairs, PROMISED)


def time_loading(how: str, folder: Path) -> Taken:
    """The time of one way of loading, and its memory above the model's own and that of the libraries."""
    # What the functions import when they are called is not measured.
    from transformers import LlamaForCausalLM  # noqa: F401

    import ckpt_tools.formats.dcp.reader
    import ckpt_tools.serialization.torch_zip
    import ckpt_tools.torch.load_into  # noqa: F401

    bytes_before, models = resident_bytes("VmRSS"), list[Any]()
    if how != "load_model":
        models.append(hugging_face.build_model(Architecture("hf"), folder / "dcp", None))
    ways: dict[str, Callable[[], object]] = {
        "load_model": lambda: models.append(load_model(folder / "dcp")),
        "load_into": lambda: load_into(models[0], None, folder / "dcp"),
        "load_state_dict": lambda: models[0].load_state_dict(load_file(folder / "model.safetensors")),
    }
    taken = time_call(ways[how])
    model_bytes = sum(parameter.numel() * parameter.element_size() for parameter in models[0].parameters())
    return replace(taken, extra_bytes=resident_bytes("VmHWM") - bytes_before - model_bytes)


LOADERS = (
    (LOAD, "load_model", read_into_cache),
    (INTO_LOAD, "load_into", read_into_cache),
    (COLD_LOAD, "load_model", drop_from_cache),
)
"""Works, our way of loading, and the preparation of the files."""


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_loading(name: str, settings: RunSettings) -> list[str]:
    inputs = settings.data / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=inputs) as temporary:
        folder = Path(temporary)
        make_checkpoints(folder, settings)

        def load(how: str, prepare: Callable[[Path], object]) -> Taken:
            prepare(folder)
            command = [sys.executable, "-m", "benchmarks.inference", how, str(folder)]
            return Taken(**json.loads(printed_lines(command, settings)[-1]))

        pairs = {}
        for work, ours, prepare in LOADERS:
            turns = take_turns({how: partial(load, how, prepare) for how in (ours, "load_state_dict")}, settings.runs)
            pairs[work] = turns[ours], turns["load_state_dict"]
        return compare_with_promises(pairs, PROMISED)


def make_checkpoints(folder: Path, settings: RunSettings) -> None:
    """`dcp` with its config.json, and the same weights as one safetensors file."""
    source = InputCache(settings.data / "inputs").get("dcp-weights", settings.size_bytes)
    (folder / "dcp").mkdir()
    for path in source.iterdir():
        # A symbolic link would lead out of the checkpoint, which is refused.
        (folder / "dcp" / path.name).hardlink_to(path)
    config: Any = empty_model(fit_llama(settings.size_bytes // WEIGHT_BYTES)).config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "dcp")
    printed_lines([*CKPT_TOOLS, "convert", str(source), str(folder / "model.safetensors"), "--quiet"], settings)


if __name__ == "__main__":
    print(json.dumps(asdict(time_loading(sys.argv[1], Path(sys.argv[2])))))
