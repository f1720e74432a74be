"""Hypothesis strategies for damaged checkpoints: what fails is made small by hypothesis itself."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from tests.end_to_end.fuzzing import corpus
from tests.end_to_end.fuzzing.mutations import mutated

Files = Mapping[str, bytes]


def checkpoints() -> st.SearchStrategy[Files]:
    """A genuine checkpoint after changes of its structure, or a few bytes under a name that some reader takes."""
    changed = st.builds(mutated, st.sampled_from(list(corpus.seeds().values())), st.randoms(use_true_random=False))
    return st.one_of(changed, changed, changed, st.dictionaries(names, st.binary(max_size=300), max_size=3))


names = st.sampled_from(
    [
        "model.safetensors",
        "model.safetensors.index.json",
        "model.pt",
        "pytorch_model.bin.index.json",
        ".metadata",
        "latest",
        "latest_universal",
        "t/mp_rank_00_model_states.pt",
        "t/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "t/zero/w/fp32.pt",
        "__0_0.distcp",
        "trainer_state.json",
    ]
)
"""Names by which formats are known."""
