"""The names of files by which the index knows that a format need not be imported."""

from itertools import product

import pytest

from ckpt_tools.core.format_names import BUILTIN_FORMATS
from ckpt_tools.formats.builtin import FORMATS
from ckpt_tools.formats.index import has_sign
from ckpt_tools.stores.memory import MemoryStore
from ckpt_tools.stores.source import Source

pytestmark = pytest.mark.quick

FOLDERS = ("", "tag/", "zero/w/", "tag/zero/layers.0.weight/", "pytorch_model_fsdp_0/")

NAMES = (
    ".metadata", "__0.metadata", "__0_0.distcp", "x.metadata", "metadata",
    "fp32.pt", "exp_avg.pt", "step.pt", "optimizer_state.pt", "latest", "latest_universal",
    "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "zero_pp_rank_0_mp_rank_00optim_states.pt",
    "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
    "model.pt", "model.pth", "pytorch_model.bin", "last.ckpt", "pytorch_model.bin.index.json",
    "consolidated.00.pth", "consolidated.01.pth",
    "config.json", "README.md", "model.gguf", "model-00001-of-00002.gguf", "model.npz", "weights.npz",
    "_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt", "mp_rank_00/model_optim_rng.pt", "distrib_optim.pt",
    "checkpoint_metadata.json",
)  # fmt: skip

RANKS = ("model_world_size_2_rank_{}.pt", "pytorch_model_fsdp_0_rank{}.bin")
"""Names that say of which rank a file is; one alone could be a whole state."""

DETECTED = [name for name, entry in BUILTIN_FORMATS.items() if entry.signs]

SOURCES = [Source.open(MemoryStore({folder + name: bytearray()})) for folder, name in product(FOLDERS, NAMES)]
SOURCES += [Source.open(MemoryStore({name.format(rank): bytearray() for rank in range(2)})) for name in RANKS]


@pytest.mark.parametrize("name", DETECTED)
def test_a_format_is_asked_about_every_source_that_it_would_claim(name):
    claimed = [source for source in SOURCES if FORMATS[name].detect(source)]
    assert len(claimed) >= 2
    assert all(has_sign(source, name) for source in claimed)
