"""Names of torch's classes and functions in pickles, as ``torch.save`` writes them."""

from __future__ import annotations

from typing import Final

from ckpt_tools.core.values import GlobalRef

REBUILD_TENSOR_V2: Final = GlobalRef("torch._utils", "_rebuild_tensor_v2")
REBUILD_TENSOR_V3: Final = GlobalRef("torch._utils", "_rebuild_tensor_v3")
"""Since torch 2.1, for a tensor of another dtype than its storage."""
REBUILD_META_TENSOR: Final = GlobalRef("torch._utils", "_rebuild_meta_tensor_no_storage")
REBUILD_PARAMETER: Final = GlobalRef("torch._utils", "_rebuild_parameter")
REBUILD_PARAMETER_WITH_STATE: Final = GlobalRef("torch._utils", "_rebuild_parameter_with_state")
REBUILD_FROM_TYPE: Final = GlobalRef("torch._tensor", "_rebuild_from_type_v2")
"""``(function, class, arguments, state)``: what the function makes, as a tensor of the class with attributes."""
REBUILD_WRAPPER_SUBCLASS: Final = GlobalRef("torch._utils", "_rebuild_wrapper_subclass")
"""The function of a tensor that consists of others: ``DTensor``, ``ShardedTensor``."""

DTENSOR_PACKAGE: Final = "torch.distributed.tensor"
OLD_DTENSOR_PACKAGE: Final = "torch.distributed._tensor"
"""Before torch 2.5."""
SHARD_PACKAGE: Final = "torch.distributed._shard"

DTENSORS: Final = tuple(
    GlobalRef(module, "DTensor")
    for module in (DTENSOR_PACKAGE, f"{DTENSOR_PACKAGE}._api", OLD_DTENSOR_PACKAGE, f"{OLD_DTENSOR_PACKAGE}.api")
)
SHARDED_TENSOR: Final = GlobalRef(f"{SHARD_PACKAGE}.sharded_tensor.api", "ShardedTensor")
PROCESS_GROUP_STATE: Final = "ProcessGroupState"
"""A class within ``ShardedTensor``."""
