"""A conversion to S3 in parts: the objects of one process, published once, after kills and repeats."""

import random
import signal
import subprocess
import sys
import time

import pytest
import torch

import ckpt_tools
from ckpt_tools.cli.main import group
from ckpt_tools.errors import DestinationExistsError, UsageError
from tests.support.files import files_below
from tests.support.s3_server import BUCKET

COUNT, PARTIAL = 3, "ckpt-tools-partial"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """48 MB, of which each of 4 ranks' files takes two parts of an upload."""
    path = tmp_path_factory.mktemp("s3") / "weights.pt"
    torch.save({name: torch.rand(4, 3 << 18) for name in "abcd"}, path)
    return path


@pytest.fixture(scope="module")
def expected(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected") / "out"
    ckpt_tools.convert(weights, folder, to="dcp", world_size=4)
    return files_below(folder)


@pytest.fixture
def site(s3_server, monkeypatch):
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    prefix = s3_server.new_prefix()
    return Site(s3_server, prefix)


class Site:
    """A prefix in which nothing but an output is."""

    def __init__(self, server, prefix):
        self.server, self.prefix, self.url = server, prefix, f"s3://{BUCKET}/{prefix.rstrip('/')}"

    def words(self, weights, part):
        words = ["convert", str(weights), self.url, "--to", "dcp", "--world-size", "4", "--quiet"]
        return [*words, "--part", part]

    def write(self, weights, part, *more):
        group.main([*self.words(weights, part), *more], standalone_mode=False)

    def start(self, weights, part):
        words = [sys.executable, "-m", "ckpt_tools", *self.words(weights, part)]
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def visible(self):
        return {path: data for path, data in self.server.files(self.prefix).items() if PARTIAL not in path}

    def assert_published(self, expected):
        files = self.server.files(self.prefix)
        assert files == expected
        assert self.server.open_uploads(self.prefix) == []


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_parts_one_after_the_other_make_the_same_objects(order, site, weights, expected):
    for number in order:
        assert site.visible() == {}
        site.write(weights, f"{number}/{COUNT}")
    site.assert_published(expected)


def test_parts_at_once_publish_once(site, weights, expected):
    processes = [site.start(weights, f"{number}/{COUNT}") for number in range(1, COUNT + 1)]
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    site.assert_published(expected)


def test_what_does_not_fit_the_other_parts_is_refused(site, weights, expected):
    site.write(weights, "1/3")
    with pytest.raises(UsageError, match="in 3 parts, and not in 4"):
        site.write(weights, "2/4")
    with pytest.raises(UsageError, match="part 1 has another source, other options"):
        site.write(weights, "2/3", "--dtype", "bf16")
    for number in (2, 3):
        site.write(weights, f"{number}/3")
    with pytest.raises(DestinationExistsError):
        site.write(weights, "3/3")
    site.assert_published(expected)


def test_clean_removes_what_parts_wrote(site, weights):
    site.write(weights, "1/3")
    group.main(["clean", site.url], standalone_mode=False)
    assert site.server.files(site.prefix) == {}
    assert site.server.open_uploads(site.prefix) == []


KILLS_IN_SAMPLE, KILLS = 3, 60


@pytest.mark.extended
@pytest.mark.timeout(3600)
def test_killed_at_random_and_run_again(site, weights, expected, pytestconfig):
    kills, wanted = 0, KILLS if pytestconfig.getoption("--soak") else KILLS_IN_SAMPLE
    random_times = random.Random(7)
    while kills < wanted:
        round_site = Site(site.server, site.server.new_prefix())
        while round_site.visible() != expected:
            processes = [round_site.start(weights, f"{number}/{COUNT}") for number in range(1, COUNT + 1)]
            time.sleep(random_times.uniform(0.4, 2.5))
            for process in random_times.sample(processes, random_times.randint(0, COUNT)):
                process.send_signal(signal.SIGKILL)
            for process in processes:
                _, error = process.communicate(timeout=300)
                assert process.returncode in (0, 8, -9), error
                kills += process.returncode == -9
        group.main(["clean", round_site.url], standalone_mode=False)
        round_site.assert_published(expected)
