"""As many ranks as were asked for, or an error with the largest useful number; never fewer in silence."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_tools
from ckpt_tools.core.option_names import WrittenFormat
from ckpt_tools.errors import UsageError
from tests.support.sweep import tiered

ROWS, COLUMNS = 10, 3
LIMITS: dict[WrittenFormat, int] = {
    "dcp": ROWS,
    "megatron": ROWS,
    "sharded": ROWS * COLUMNS,
    "zero1": ROWS * COLUMNS,
    "zero2": ROWS * COLUMNS,
    "zero3": ROWS * COLUMNS,
}


@pytest.fixture(scope="module", params=["weights", "training state"])
def source(request, tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("source"), torch.nn.Linear(COLUMNS, ROWS)
    if request.param == "weights":
        save_file(model.state_dict(), folder / "src.safetensors")
        return folder / "src.safetensors"
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, COLUMNS)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "src.pt")
    return folder / "src.pt"


def ranks_of(folder: Path) -> tuple[int | None, int | None]:
    """As ``inspect`` and ``ls`` say."""
    (listed,) = ckpt_tools.ls(folder).checkpoints
    assert listed.is_complete
    return ckpt_tools.inspect(folder).world_size, listed.world_size


@pytest.mark.parametrize("to", tiered(LIMITS, test=LIMITS.keys() - {"sharded"}, extended=["sharded"]))
def test_the_limit_and_one_above(to, source, tmp_path):
    limit = LIMITS[to]
    ckpt_tools.convert(source, tmp_path / "out", to=to, world_size=limit)
    assert ranks_of(tmp_path / "out") == (limit, limit)
    assert ckpt_tools.verify(source, tmp_path / "out").equal
    for call, asked in ((ckpt_tools.convert, limit + 1), (ckpt_tools.plan, 10**18)):
        with pytest.raises(UsageError, match=rf"^world_size={asked}: the largest useful .* is {limit},"):
            call(source, tmp_path / "more", to=to, world_size=asked)
    with pytest.raises(UsageError, match=f"the largest useful number of ranks for this checkpoint is {limit}, "):
        ckpt_tools.reshard(tmp_path / "out", tmp_path / "more", world_size=limit + 1)
    assert not (tmp_path / "more").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_what_ranks_without_an_element_wrote(source, tmp_path):
    ckpt_tools.convert(source, tmp_path / "out", to="dcp", state="model", world_size=7)
    files = {path.name for path in (tmp_path / "out").glob("*.distcp")}
    assert files == {f"__{rank}_0.distcp" for rank in range(7)}
    state = {"weight": torch.zeros(ROWS, COLUMNS), "bias": torch.zeros(ROWS)}
    is_tree = "model.weight" in dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    tree = {"model": state} if is_tree else state
    dcp.load(tree, checkpoint_id=tmp_path / "out", no_dist=True)
    with ckpt_tools.open(source) as expected:
        for name, tensor in state.items():
            assert torch.equal(tensor, expected[name].torch())


@pytest.mark.parametrize("to", ["dcp", "megatron", pytest.param("sharded", marks=pytest.mark.extended)])
def test_the_ranks_of_the_source_are_never_too_many(to, source, tmp_path):
    """A job that has more ranks than the model has rows saves and loads as any other."""
    ckpt_tools.convert(source, tmp_path / "zero", to="zero2", world_size=12)
    for options in ({}, {"world_size": 12}):
        out = tmp_path / f"out-{len(options)}"
        ckpt_tools.convert(tmp_path / "zero", out, to=to, **options)  # type: ignore[arg-type]
        assert ranks_of(out) == (12, 12)
        assert ckpt_tools.verify(tmp_path / "zero", out).equal
    if to != "sharded":
        with pytest.raises(UsageError, match="is 12, the number of ranks of the source"):
            ckpt_tools.convert(tmp_path / "zero", tmp_path / "more", to=to, world_size=13)
