"""Costs of the batch command, the service and `load_model`: `python -m benchmarks.inference`, and in `make bench`.

- `batch`: images of a dataset, against a loop that calls the model on batches which are ready
- `files`: images on the disk, against torch's DataLoader with two workers that open them with Pillow
- `serve`: the service under 64, 8 and 1 clients of `wrk`, against a loop as that of `batch`, LitServe, BentoML and a
  FastAPI endpoint
- `load`: a DCP of 4 ranks, against `safetensors.torch.load_file` and `load_state_dict` into a model that is there;
  ours builds the model too, or fills one that is there; from the page cache, and from the disk

The first three are the model of `make demo`, on 10,000 images (as many as FashionMNIST holds out) and on posted ones,
with the same threads and batches, and take turns. The model is loaded once, and its time does not count. Loading is in
processes of its own. Processor time counts too, because other programs of the machine lengthen wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.caching import cool, warm
from benchmarks.inputs import WEIGHT_BYTES, Cache, Llama
from benchmarks.journal import Journal, Record
from benchmarks.machine import ROOT, code
from benchmarks.measure import measured
from benchmarks.serving import BINARY, EIGHT, JSON, LOOP, NUM_CLIENTS, ONE, PNG, ROW, Turn, missing, take_turns_serving
from benchmarks.suite import Settings, check_time, say
from benchmarks.turns import Taken, markdown, ratio, take_turns

NUM_IMAGES, NUM_WORKERS, SIDE = 10_000, 2, 28
BATCH, FILES, LOAD, SERVE = "batch", "files", "load", "serve"
INTO_LOAD, COLD_LOAD = f"{LOAD}, the model is there", f"{LOAD}, from the disk"
WORKS = (BATCH, FILES, LOAD, SERVE)
PROMISED = {BATCH: 0.95, FILES: 0.9, LOAD: 1 / 1.2, INTO_LOAD: 1 / 1.2, COLD_LOAD: 1 / 1.2}
"""Least ratios of the rival's time to ours."""

SERVE_TO_PEER = 1.5
"""Least ratio of the service's answers a second to those of each peer."""

SERVE_TO_LOOP = {JSON: 0.85, BINARY: 0.85, PNG: 0.6}
"""Least ratios of answers a second to those of the loop, under 64 clients."""

EIGHT_TO_ONE = 3.0
"""Least ratio of answers a second to those that one client gets."""

ONE_TIMES, ONE_MORE_SECONDS = 2.0, 0.003
"""One client waits at most so many times as long as the loop takes for one row, and so many seconds more."""

MORE_BYTES_THAN_LITSERVE = 100_000_000

TURN_SECONDS = 8.0

MAX_EXTRA_BYTES = 256_000_000
"""Memory above the model's own while it is loaded, and above that of a process that only imported the libraries."""

LOAD_BYTES = 1_000_000_000
TIME_LIMIT = 600.0


def timed(function: Callable[[], object]) -> Taken:
    wall, cpu = time.perf_counter(), _cpu_seconds()
    function()
    return Taken(time.perf_counter() - wall, _cpu_seconds() - cpu)


def _cpu_seconds() -> float:
    """Processor time of this process and of the workers that it has waited for."""
    return sum(os.times()[:4])


def make_images(folder: Path) -> None:
    """A model, images in the files of FashionMNIST, and the same ones as PNG."""
    import numpy as np
    import torch
    from PIL import Image
    from safetensors.torch import save_file

    from training.models.image_models import build_model

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


def contestants(folder: Path, threads: int) -> dict[str, Callable[[], object]]:
    """Functions by name: each work, and its rival."""
    import torch

    from inference.batch.inputs import Wanted
    from inference.batch.job import Job, columns_of
    from inference.models.options import ModelOptions
    from training.data import datasets as data
    from training.loop import evaluation

    torch.set_num_threads(threads)
    predictor: Any = Job(str(folder / "model.safetensors"), ModelOptions(), threads=threads).load()
    predict = partial(_predict, predictor, columns_of(predictor, 5), out=folder / "out.jsonl")
    forward = evaluation.plain_logits(predictor.task.model)
    pixels = data.load_dataset("fashion-mnist", "held-out", folder / "data").pixels
    ready = [data.to_input(chunk) for chunk in torch.split(pixels, evaluation.CHUNK)]
    names = sorted(map(str, (folder / "images").iterdir()))

    def loader() -> None:
        files: Any = _Files(names)
        for batch in torch.utils.data.DataLoader(files, evaluation.CHUNK, num_workers=NUM_WORKERS):
            forward(data.to_input(batch))

    return {
        BATCH: lambda: predict(Wanted("fashion-mnist", data_root=folder / "data")),
        f"{BATCH} rival": lambda: [forward(batch) for batch in ready],
        FILES: lambda: predict(Wanted(str(folder / "images"))),
        f"{FILES} rival": loader,
    }


@dataclass(frozen=True, slots=True)
class _Files:
    """A dataset for torch's DataLoader."""

    names: list[str]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> Any:
        import numpy as np
        import torch
        from PIL import Image

        with Image.open(self.names[number]) as image:
            return torch.from_numpy(np.array(image.convert("L")))


def _predict(predictor: Any, columns: Any, wanted: Any, out: Path) -> None:
    """The command's work once the model is loaded, from finding the input to showing the output."""
    from inference.batch.inputs import find_inputs
    from inference.batch.output import Output, Run, open_output
    from inference.batch.pipeline import predicted
    from inference.batch.report import Tally

    tally = Tally()
    with open_output(Output(out, overwrite=True)) as writer:
        inputs = find_inputs(wanted)
        writer.begin(Run("model", inputs.digest, ""), columns, tally.add_written)
        for rows in predicted(inputs.items(), predictor):
            writer.write(rows)
            for row in rows:
                tally.add(row)
    assert (tally.num_rows, tally.num_bad) == (NUM_IMAGES, 0)


def take_turns_predicting(rounds: int, threads: int) -> dict[str, list[Taken]]:
    """Pair by pair: what follows a DataLoader finds its memory shared with processes that have ended, which costs a
    fault a page."""
    with tempfile.TemporaryDirectory() as name:
        make_images(Path(name))
        running = contestants(Path(name), threads)
        found: dict[str, list[Taken]] = {}
        for work in (BATCH, FILES):
            pair = (work, f"{work} rival")
            found |= take_turns({who: partial(timed, running[who]) for who in pair}, rounds)
        return found


LOADING = """
import json, sys
from pathlib import Path
import ckpt_tools, ckpt_tools.formats.dcp.reader, ckpt_tools.serialization.torch_zip, ckpt_tools.torch.load_into
import safetensors.torch, torch, transformers
from benchmarks.inference import resident_bytes, timed
from inference.models.architectures import Architecture
from inference.models.loading import load_model
from transformers import LlamaForCausalLM
who, folder = sys.argv[1], Path(sys.argv[2])
before, found = resident_bytes("VmRSS"), []
if who == "load_model":
    taken = timed(lambda: found.append(load_model(folder / "dcp")))
else:
    found.append(Architecture("hf").build(folder / "dcp"))
    if who == "load_into":
        taken = timed(lambda: ckpt_tools.load_into(found[0], None, folder / "dcp"))
    else:
        taken = timed(lambda: found[0].load_state_dict(safetensors.torch.load_file(folder / "model.safetensors")))
size = sum(each.numel() * each.element_size() for each in found[0].parameters())
print(json.dumps([taken.wall, taken.cpu, resident_bytes("VmHWM") - before - size]))
"""

LOADERS = ((LOAD, "load_model", warm), (INTO_LOAD, "load_into", warm), (COLD_LOAD, "load_model", cool))
"""Works, our way of loading, and the preparation of the files."""


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def take_turns_loading(cache: Path, size: int, rounds: int) -> dict[str, list[Taken]]:
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        folder = Path(name)
        make_checkpoints(folder, cache, size)
        found: dict[str, list[Taken]] = {}
        for _ in range(rounds):
            for work, ours, prepare in LOADERS:
                for who, how in ((work, ours), (f"{work} rival", "load_state_dict")):
                    prepare(folder)
                    wall, cpu, extra = json.loads(_said([sys.executable, "-c", LOADING, how, name], folder / "log"))
                    found.setdefault(who, []).append(Taken(wall, cpu, extra))
        return found


def make_checkpoints(folder: Path, cache: Path, size: int) -> None:
    """`dcp` with its config.json, and the same weights as one safetensors file."""
    from benchmarks.builders import empty_model

    source = Cache(cache).get("dcp-weights", size)
    (folder / "dcp").mkdir()
    for path in source.iterdir():
        # A symbolic link would lead out of the checkpoint, which is refused.
        (folder / "dcp" / path.name).hardlink_to(path)
    config: Any = empty_model(Llama.of(size // WEIGHT_BYTES)).config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder / "dcp")
    out = str(folder / "model.safetensors")
    _said([sys.executable, "-m", "ckpt_tools", "convert", str(source), out, "--quiet"], folder / "log")


def _said(command: list[str], log: Path) -> str:
    """The last line that the command printed."""
    usage = measured(command, log, time_limit=TIME_LIMIT, cwd=ROOT)
    lines = log.read_text().strip().splitlines() or [""]
    if usage.exit_code or usage.timed_out:
        raise SystemExit(f"{command[:3]} failed: {lines[-1]}")
    return lines[-1]


def take_turns_under_load(rounds: int, threads: int) -> dict[str, list[Turn]]:
    """All use one thread fewer, the service's default."""
    import torch
    from safetensors.torch import save_file

    from training.models.image_models import build_model

    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        model = build_model()
        # torchvision begins with a head of zeros, which tells no image from another.
        torch.nn.init.normal_(model.heads[0].weight)
        save_file(model.state_dict(), Path(name) / "model.safetensors")
        return take_turns_serving(Path(name), rounds, TURN_SECONDS, max(1, threads - 1))


KIND = "inference"


def measure(settings: Settings, journal: Journal) -> None:
    """Measure the parts that are not in the journal. A part that was stopped begins again."""
    key: Record = {"code": code()}
    journal.forget(keep=key, kind=KIND)
    threads = os.cpu_count() or 1
    parts: dict[tuple[str, ...], Callable[[], Mapping[str, Sequence[Taken | Turn]]]] = {
        (BATCH, FILES): lambda: take_turns_predicting(settings.runs, threads),
        (SERVE,): lambda: take_turns_under_load(settings.runs, threads),
        (LOAD,): lambda: take_turns_loading(settings.data / "inputs", LOAD_BYTES, settings.runs),
    }
    for works, run in parts.items():
        if journal.find(kind=KIND, works=list(works)):
            continue
        check_time(settings)
        say(f"inference: {', '.join(works)}")
        found = {who: [asdict(each) for each in taken] for who, taken in run().items()}
        journal.add({"kind": KIND, **key, "works": list(works), "found": found, "missing": missing()})


def reported(journal: Journal) -> list[str]:
    """The tables of what is in the journal."""
    taken: dict[str, list[Taken]] = {}
    served: dict[str, list[Turn]] = {}
    absent: list[str] = []
    for record in journal.find(kind=KIND):
        absent = record["missing"]
        if record["works"] == [SERVE]:
            served = {who: [Turn(**each) for each in found] for who, found in record["found"].items()}
        else:
            taken |= {who: [Taken(**each) for each in found] for who, found in record["found"].items()}
    return [*(rows(taken) if taken else []), *(["", *serving_rows(served, absent)] if served else [])]


def rows(found: Mapping[str, list[Taken]]) -> list[str]:
    header = "work | wall, ours | rival | rival / ours | processor | promised | above the model"
    given = (_row(work, found[work], found[f"{work} rival"]) for work in PROMISED if work in found)
    return markdown(header, given)


def _row(work: str, ours: list[Taken], rival: list[Taken]) -> list[str]:
    ratios = [f"{ratio(field, rival, ours):.2f}" for field in ("wall", "cpu")]
    seconds = [f"{median(each.wall for each in taken):.2f} s" for taken in (ours, rival)]
    extra = max(each.extra_bytes for each in ours)
    memory = f"{extra / 1e6:.0f} MB (at most {MAX_EXTRA_BYTES / 1e6:.0f})" if extra else ""
    return [work, *seconds, *ratios, f"{PROMISED[work]:.2f}", memory]


def serving_rows(found: Mapping[str, Sequence[Turn]], absent: Sequence[str]) -> list[str]:
    """Each server, and then the promises."""
    header = f"{NUM_CLIENTS} clients | answers a second | p50 | p99 | processor | memory"
    lines = markdown(header, (_serving_row(who, taken) for who, taken in found.items()))
    lines += [f"| {who}: not installed | | | | | |" for who in absent]
    return [*lines, "", *markdown("promise | measured | promised", _promises(found))]


def _serving_row(who: str, taken: Sequence[Turn]) -> list[str]:
    p50, p99 = (f"{1000 * median(getattr(each, name) for each in taken):.1f} ms" for name in ("p50", "p99"))
    cpu = f"{1000 * median(each.cpu_per_answer for each in taken):.2f} ms"
    memory = _memory(taken)
    shown = f"{memory / 1e6:.0f} MB" if memory else ""
    return [who, f"{median(each.rate for each in taken):.0f}", p50, p99, cpu, shown]


def _memory(taken: Sequence[Turn]) -> int:
    return max(each.resident_bytes for each in taken)


def _promises(found: Mapping[str, Sequence[Turn]]) -> Iterator[list[str]]:
    for who, least in SERVE_TO_LOOP.items():
        yield [f"{who} / {LOOP}", f"{ratio('rate', found[who], found[LOOP]):.2f}", f"at least {least}"]
    for who in found.keys() - {LOOP, ROW, JSON, BINARY, PNG, EIGHT, ONE}:
        yield [f"{JSON} / {who}", f"{ratio('rate', found[JSON], found[who]):.2f}", f"at least {SERVE_TO_PEER}"]
    yield [f"{EIGHT} / {ONE}", f"{ratio('rate', found[EIGHT], found[ONE]):.2f}", f"at least {EIGHT_TO_ONE:g}"]
    row, one = (median(each.p50 for each in found[who]) for who in (ROW, ONE))
    most = ONE_TIMES * row + ONE_MORE_SECONDS
    yield [f"p50 of {ONE}", f"{1000 * one:.1f} ms", f"at most {1000 * most:.1f} ms"]
    if "LitServe" in found:
        more = _memory(found[JSON]) - _memory(found["LitServe"])
        yield ["memory above LitServe's", f"{more / 1e6:.0f} MB", f"at most {MORE_BYTES_THAN_LITSERVE / 1e6:.0f} MB"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.inference", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of a forward pass")
    parser.add_argument("--size", type=float, default=1.0, metavar="GB", help="size of the checkpoint")
    parser.add_argument("--works", default=",".join(WORKS), help=f"works to measure; default: {','.join(WORKS)}")
    parser.add_argument(
        "--data", type=Path, default=ROOT / ".cache" / "benchmarks" / "inputs", help="cache of checkpoints"
    )
    given = parser.parse_args()
    works = set(given.works.split(","))
    found = take_turns_predicting(given.rounds, given.threads) if works & {BATCH, FILES} else {}
    if LOAD in works:
        found |= take_turns_loading(given.data, int(given.size * 1e9), given.rounds)
    if found:
        print("\n".join(rows(found)))
    if SERVE in works:
        print("\n".join(serving_rows(take_turns_under_load(given.rounds, given.threads), missing())))


if __name__ == "__main__":
    main()
