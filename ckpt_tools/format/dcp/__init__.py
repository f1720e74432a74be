"""PyTorch Distributed Checkpoint. ``docs/formats/dcp.md`` says what its files hold."""

from ckpt_tools.format.dcp.reader import DcpReader
from ckpt_tools.format.dcp.writer import DcpWriter

__all__ = ["DcpReader", "DcpWriter"]
