"""Built-in formats inherit the suite that formats of plug-ins inherit."""

import re

import pytest
import torch

import ckpt_tools
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.manifest import StateKey
from ckpt_tools.errors import FormatError
from ckpt_tools.formats.builtin import (
    DcpFormat,
    GgufFormat,
    MegatronFormat,
    MetaFormat,
    NpzFormat,
    SafetensorsFormat,
    ShardedFormat,
    TorchFormat,
)
from ckpt_tools.formats.gguf.header import DTYPES
from ckpt_tools.formats.megatron.folders import TRACKER_FILE
from ckpt_tools.testing.formats import FormatTests


class LongTests(FormatTests):
    @pytest.mark.extended
    def test_tensors_of_the_user_are_no_weights(self):
        super().test_tensors_of_the_user_are_no_weights()


class TestSafetensors(LongTests):
    format = SafetensorsFormat()
    unsupported_dtypes = (DType.COMPLEX32, DType.COMPLEX128)


class TestTorch(LongTests):
    format = TorchFormat()


class TestDcp(FormatTests):
    format = DcpFormat()


class TestGguf(FormatTests):
    format = GgufFormat()
    unsupported_dtypes = tuple(dtype for dtype in DType if dtype not in DTYPES.values())
    keeps_state, keeps_user_tensors, keeps_ties = False, False, False
    own_entries = ("gguf",)


class TestMeta(FormatTests):
    format = MetaFormat()
    keeps_state, keeps_user_tensors, keeps_ties = False, False, False


class TestNpz(FormatTests):
    format = NpzFormat()
    unsupported_dtypes = (
        DType.BFLOAT16,
        DType.COMPLEX32,
        *(dtype for dtype in DType if re.match("float[468]_", dtype.value)),
    )
    keeps_state, keeps_user_tensors, keeps_ties = False, False, False


class TestMegatron(LongTests):
    format = MegatronFormat()
    optional_files = (TRACKER_FILE,)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_an_empty_parameter_gets_no_master(self, dtype, tmp_path):
        """As every other parameter: it has no item of a DCP that its master could share."""
        model = torch.nn.ParameterDict({"empty": torch.zeros(0, dtype=dtype), "b": torch.ones(2, dtype=dtype)})
        optimizer = torch.optim.Adam(model.parameters())
        sum(each.sum() for each in model.values()).backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
        ckpt_tools.convert(tmp_path / "in.pt", tmp_path / "out", to="megatron", state="all")
        read, given = (ckpt_tools.open(tmp_path / name).manifest.tensors.keys() for name in ("out", "in.pt"))
        assert read == given


class TestSharded(LongTests):
    format = ShardedFormat()

    def test_a_missing_or_short_file_is_a_format_error(self):
        """Without the optimizer's files and the small ones it is another whole checkpoint, as verl can be told to save
        it; the model's is needed."""
        files = self.example()
        for path, data in files.items():
            others = {name: each for name, each in files.items() if name != path}
            damaged = [{**others, path: part} for part in (data[:0], data[:-1], data[: len(data) // 2])]
            for each in damaged:
                with pytest.raises(FormatError):
                    self._read_manifest(each)
            if path.startswith("model_"):
                with pytest.raises(FormatError):
                    self._read_manifest(others)
            else:
                assert StateKey("w") in self._read_manifest(others)[1].tensors
