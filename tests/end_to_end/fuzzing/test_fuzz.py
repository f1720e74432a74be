"""A sample of ``make fuzz``, and the inputs that once broke a reader."""

import gc
import signal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.end_to_end.fuzzing import corpus, runner
from tests.end_to_end.fuzzing.runner import run_batch
from tests.end_to_end.fuzzing.target import execute

pytestmark = pytest.mark.extended

SAMPLE = 1000
"""Executions; a million take a quarter of an hour."""


@pytest.fixture
def timed():
    """The timer that sees a hang, given back afterwards. It does not run while Python looks through what other tests of
    this process left: that took more than a second once."""
    before = signal.getsignal(signal.SIGVTALRM)
    gc.collect()
    gc.freeze()
    runner.watch_time()
    yield
    signal.signal(signal.SIGVTALRM, before)
    gc.unfreeze()


@pytest.mark.usefixtures("timed")
def test_a_sample_ends_with_a_manifest_or_a_named_error():
    tally = run_batch((0, SAMPLE, ()))
    assert tally.failures == []
    assert tally.executions == SAMPLE and len(tally.outcomes) > 5 and tally.outcomes["read"] > SAMPLE / 50


NAMES = ("model.safetensors", "model.safetensors.index.json", "model.pt", "pytorch_model.bin.index.json", ".metadata",
         "latest", "latest_universal", "t/mp_rank_00_model_states.pt", "t/zero_pp_rank_0_mp_rank_00_optim_states.pt",
         "t/zero/w/fp32.pt", "__0_0.distcp", "trainer_state.json")  # fmt: skip
"""Names by which formats are known."""


@given(files=st.dictionaries(st.sampled_from(NAMES), st.binary(max_size=300), max_size=3))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_few_bytes_under_a_known_name_are_a_named_error(files):
    execute(files)


@pytest.mark.parametrize("name", corpus.crashers())
def test_what_once_broke_a_reader(name):
    execute(corpus.crashers()[name])


def test_the_corpus_is_small_and_readable():
    files = [*corpus.FOLDER.glob("*.zip"), *corpus.CRASHERS.iterdir()]
    assert sum(path.stat().st_size for path in files) < 400_000
    assert all(execute(files).error is None for files in corpus.seeds().values())
