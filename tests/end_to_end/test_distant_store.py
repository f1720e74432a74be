"""Requests to a distant store: how many there are, and how many wait for others, counted at a proxy with a latency."""

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tools
from benchmarks.distance import count_rounds, find_longest_chain, running_distant_server
from tests.support.files import files_below
from tests.support.s3_server import BUCKET

LATENCY_SECONDS, BYTES_PER_SECOND = 0.05, 1e9
MAX_EXTRA_ROUNDS = 8
"""3 on a machine that does nothing else: threads that are not woken in time look as if they waited."""

LAYOUTS = {
    "files of each parameter": ("universal", {}, {}),
    "shards": ("safetensors", {"max_shard_size": "1KB"}, {"max_shard_size": "1KB"}),
    "files of ranks": ("zero3", {"world_size": 2}, {"world_size": 24}),
    "sharded": ("sharded", {"world_size": 2}, {"world_size": 24}),
    "headers in one file": ("torch", {}, {}),
}
"""A format, and options for few and for many files."""


@pytest.fixture(scope="module")
def distant(s3_server):
    with running_distant_server(s3_server.port, LATENCY_SECONDS, BYTES_PER_SECOND) as running:
        yield running


def make_model(folder, num_tensors, num_elements=64):
    path = folder / f"{num_tensors}.safetensors"
    save_file({f"layers.{number}.weight": torch.rand(num_elements) for number in range(num_tensors)}, path)
    return path


def log_requests(distant, call):
    distant.requests.clear()
    call({"endpoint_url": distant.endpoint})
    return list(distant.requests)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_headers_of_many_files_are_read_together(layout, s3, distant, tmp_path):
    target, few_options, many_options = LAYOUTS[layout]
    num_elements = 64 if target != "torch" else 8192  # far enough from each other to be read one by one
    logs = {}
    for count, options in ((10, few_options), (120, many_options)):
        folder = tmp_path / f"{count}.out"
        out = folder / "model.pt" if target == "torch" else folder
        folder.mkdir() if target == "torch" else None
        ckpt_tools.convert(make_model(tmp_path, count, num_elements), out, to=target, **options)
        prefix = s3.new_prefix()
        s3.upload(prefix, folder)
        url = f"s3://{BUCKET}/{prefix.rstrip('/')}"
        logs[count] = log_requests(distant, lambda where, url=url: ckpt_tools.inspect(url, storage_options=where))
    few, many = logs.values()
    assert count_rounds(many) <= count_rounds(few) + MAX_EXTRA_ROUNDS
    assert find_longest_chain(many) <= find_longest_chain(few) + len(many) // 4


def test_a_small_file_is_written_by_one_request(s3, distant, tmp_path):
    logs = {}
    for count in (10, 200):
        source, prefix = make_model(tmp_path, count), s3.new_prefix()
        ckpt_tools.convert(source, tmp_path / f"{count}", to="universal")
        out, url = tmp_path / f"{count}", f"s3://{BUCKET}/{prefix}out"
        logs[count] = log_requests(
            distant,
            lambda where, source=source, url=url: ckpt_tools.convert(
                source, url, to="universal", storage_options=where
            ),
        )
        assert s3.files(f"{prefix}out/") == files_below(out)
    few, many = logs.values()
    assert len(many) - len(few) == 200 - 10
    assert count_rounds(many) <= count_rounds(few) + MAX_EXTRA_ROUNDS
    assert find_longest_chain(many) <= find_longest_chain(few) + len(many) // 4
