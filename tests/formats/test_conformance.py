"""Built-in formats inherit the suite that formats of plug-ins inherit."""

from __future__ import annotations

from ckpt_tools.core.dtypes import DType
from ckpt_tools.formats.dcp.reader import DcpReader
from ckpt_tools.formats.dcp.writer import DcpWriter
from ckpt_tools.formats.megatron.folders import TRACKER
from ckpt_tools.formats.megatron.reader import MegatronReader
from ckpt_tools.formats.megatron.writer import MegatronWriter
from ckpt_tools.formats.safetensors.files import SafetensorsReader, SafetensorsWriter
from ckpt_tools.formats.torch_save import TorchReader, TorchWriter
from ckpt_tools.testing.formats import FormatTests


class TestSafetensors(FormatTests):
    reader, writer = SafetensorsReader(), SafetensorsWriter()
    unsupported_dtypes = (DType.COMPLEX32, DType.COMPLEX128)
    keeps_user_tensors = False


class TestTorch(FormatTests):
    reader, writer = TorchReader(), TorchWriter()


class TestDcp(FormatTests):
    reader, writer = DcpReader(), DcpWriter()


class TestMegatron(FormatTests):
    reader, writer = MegatronReader(), MegatronWriter()
    optional_files = (TRACKER,)
