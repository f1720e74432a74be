"""A conversion in parts: the bits of one process, published once, in any order, after kills and repeats."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest

from ckpt_tools.cli.main import group
from ckpt_tools.errors import CkptError, DestinationExistsError, UsageError
from tests.end_to_end.crashes.cases import CASES

COUNT = 3


def write_part(case, part, *words):
    group.main([*map(str, case.words), "--part", str(part), *words], standalone_mode=False)


def start_part(case, number, count=COUNT):
    words = [sys.executable, "-m", "ckpt_tools", *map(str, case.words), "--part", f"{number}/{count}", "--json"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def staging_of(case):
    return case.folder / f".{case.name}.ckpt-tools-partial"


def assert_published(case):
    assert case.visible() == case.expected
    assert [path.name for path in case.folder.iterdir()] == [case.name]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_parts_one_after_the_other_make_the_same_bits(name, order, made_case):
    case = made_case(name)
    for number in order:
        assert case.visible() == {}
        write_part(case, f"{number}/{COUNT}")
    assert_published(case)


@pytest.mark.parametrize("name", ["dcp", "torch", "universal"])
def test_parts_at_once_publish_once(name, made_case):
    case = made_case(name)
    processes = [start_part(case, number) for number in range(1, COUNT + 1)]
    reports = []
    for process in processes:
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        reports.append(json.loads(out))
    assert any(report["missing_parts"] == [] for report in reports)
    assert sum(report["bytes_written"] for report in reports) == case.num_bytes
    assert_published(case)


def test_more_parts_than_tasks(made_case):
    case = made_case("dcp")
    for number in range(1, 101):
        write_part(case, f"{number}/100")
    assert_published(case)


def test_a_part_that_is_done_is_not_written_again(made_case, capsys):
    case = made_case("torch")
    write_part(case, "2/3")
    capsys.readouterr()
    write_part(case, "2/3", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["bytes_written"] == 0 < report["bytes_recovered"]
    assert report["missing_parts"] == [1, 3]


def test_a_late_part_changes_nothing(made_case):
    case = made_case("torch")
    for number in (1, 2, 3):
        write_part(case, f"{number}/{COUNT}")
    with pytest.raises(DestinationExistsError):
        write_part(case, "2/3")
    assert_published(case)


def refused(case, part, kind, words, *more):
    with pytest.raises(kind, match=words):
        write_part(case, part, *more)


def test_what_does_not_fit_the_other_parts_is_refused(made_case):
    case = made_case("safetensors")
    write_part(case, "1/3")
    before = {path.name for path in staging_of(case).iterdir()}
    refused(case, "2/4", UsageError, "in 3 parts, and not in 4")
    refused(case, "2/3", UsageError, "part 1 has another source, other options", "--dtype", "bf16")
    assert before == {path.name for path in staging_of(case).iterdir()}
    write_part(case, "2/3")
    write_part(case, "3/3")
    assert_published(case)


def test_one_number_is_written_by_one_process(made_case):
    import fcntl

    case = made_case("safetensors")
    write_part(case, "1/3")
    with (staging_of(case) / "2-of-3.log").open("w") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        refused(case, "2/3", DestinationExistsError, "another process is writing part 2/3")
    for number in (2, 3):
        write_part(case, f"{number}/3")
    assert_published(case)


@pytest.mark.parametrize("option", ["--overwrite", "--checksum", "--runner=ray"])
def test_what_one_process_alone_can_do_is_refused(made_case, option):
    refused(made_case("dcp"), "1/3", UsageError, "the parts write a new output together", option)


def test_parts_and_runs_without_parts_keep_out_of_each_others_way(made_case):
    case = made_case("dcp")
    write_part(case, "1/3")
    group.main(["clean", str(case.target)], standalone_mode=False)
    assert list(case.folder.iterdir()) == []
    (staging_of(case) / "output").mkdir(parents=True)
    (staging_of(case) / "names").write_text("")
    refused(case, "1/3", DestinationExistsError, "is what a run without part= left.*ckpt-tools clean")


def test_a_disk_that_processes_do_not_share_is_refused(made_case):
    case = made_case("dcp")
    words = [*map(str, case.words)]
    words[2] = "memory://out"
    with pytest.raises(CkptError, match="a disk that all processes share or to s3://"):
        group.main([*words, "--memory", "512MiB", "--part", "1/3"], standalone_mode=False)


KILLS_IN_SAMPLE, KILLS = 6, 60


@pytest.mark.parametrize("name", ["dcp", "torch"])
@pytest.mark.timeout(3600)
def test_killed_at_random_and_run_again(name, made_case, soak):
    """Each round starts all parts, kills some at a random moment, and runs them all until it is published."""
    random_times, kills, wanted = random.Random(name), 0, (KILLS if soak else KILLS_IN_SAMPLE) // 2
    while kills < wanted:
        case = made_case(name)
        while case.visible() != case.expected:
            assert case.visible() == {}
            processes = [start_part(case, number) for number in range(1, COUNT + 1)]
            time.sleep(random_times.uniform(0.2, 1.2))
            for process in random_times.sample(processes, random_times.randint(0, COUNT)):
                process.send_signal(signal.SIGKILL)
            for process in processes:
                _, error = process.communicate(timeout=120)
                assert process.returncode in (0, 8, -9), error
                assert process.returncode != 8 or "exists" in error or "wait for it" in error
                kills += process.returncode == -9
        if staging_of(case).exists():  # killed after it published, and before it cleaned up
            group.main(["clean", str(case.target)], standalone_mode=False)
        assert_published(case)


def test_what_was_removed_before_it_was_published_is_not_called_written(made_case, monkeypatch):
    from ckpt_tools.conversion import write_part as module

    case = made_case("dcp")
    write_part(case, "1/3")
    write_part(case, "2/3")
    real_publish = module._publish_parts

    def clean_first(*args):
        group.main(["clean", str(case.target)], standalone_mode=False)
        real_publish(*args)

    monkeypatch.setattr(module, "_publish_parts", clean_first)
    refused(case, "3/3", CkptError, "was removed meanwhile; run all parts again")
    assert list(case.folder.iterdir()) == []
