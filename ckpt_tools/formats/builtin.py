"""The built-in formats: what each is and takes, and which function does each thing.

Each command that reads a checkpoint imports this module, so it names functions as texts (``import_when_called``): a
format's own modules are imported when one of its functions is called, which takes 5 to 40 ms. ``ls`` calls ``problem``,
``is_empty``, ``is_named`` and ``world_size_of`` of every format: where the reader takes long to import, these are in
``names.py`` and ``complete.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt_tools.core.format_names import BUILTIN_FORMATS, HEADER_ENTRY
from ckpt_tools.formats.base import Format

if TYPE_CHECKING:
    from ckpt_tools.core.layout import Layout
    from ckpt_tools.core.manifest import Manifest
    from ckpt_tools.core.options import WriteOptions


def import_when_called(path: str) -> Any:
    """A method of a format that is the function ``path``, ``MODULE:NAME`` below ``ckpt_tools.formats``. The function
    takes the arguments of the method without ``self``."""
    module, _, name = path.partition(":")

    def call_function(self: Format, *args: Any) -> Any:
        return getattr(import_module(f"ckpt_tools.formats.{module}"), name)(*args)

    return call_function


class MegatronFormat(Format):
    """Reads an ``iter_`` folder, the folder of the run around it, or the folder of a NeMo 2 checkpoint. Writes the
    whole training state, as the distributed optimizer keeps it if it is fully reshardable."""

    name = "megatron"
    about = "Megatron-Core torch_dist: an iter_N folder of .metadata, common.pt and __R_N.distcp files"
    holds_masters = True
    writing_options = ("world_size",)

    detect = import_when_called("megatron.names:detect")
    read = import_when_called("megatron.reader:read")
    own_files = import_when_called("megatron.reader:own_files")
    problem = import_when_called("megatron.complete:problem")
    is_named = import_when_called("megatron.complete:is_megatron")
    layout = import_when_called("megatron.writer:layout")
    loading = import_when_called("megatron.writer:loading")


class DcpFormat(Format):
    """Reads the folder of ``.metadata``, one with such a folder below it, or with accelerate's two. Writes the whole
    training state, each weight once."""

    name = "dcp"
    about = "PyTorch Distributed Checkpoint: a .metadata file and __R_N.distcp files (FSDP2 and others)"
    holds_values = "always"
    reading_options = ("model_key", "optim_key")
    writing_options = ("model_key", "optim_key", "world_size")

    detect = import_when_called("dcp.names:detect")
    read = import_when_called("dcp.reader:read")
    own_files = import_when_called("dcp.names:own_files")
    problem = import_when_called("dcp.complete:problem")
    is_named = import_when_called("dcp.complete:is_dcp")
    world_size_of = import_when_called("dcp.complete:world_size")
    layout = import_when_called("dcp.writer:layout")
    loading = import_when_called("dcp.loading:loading")


class OrbaxFormat(Format):
    """Reads a local folder: one tree, or items with trees among them. tensorstore reads the arrays."""

    name = "orbax"
    about = "Orbax (JAX): a folder with _METADATA and arrays of OCDBT or Zarr; needs the extra ckpt-tools[orbax]"
    reading_options = ("model_key", "optim_key")
    holds = "weights, and the moments of Adam"

    detect = import_when_called("orbax.names:detect")
    read = import_when_called("orbax.reader:read")
    own_files = import_when_called("orbax.reader:own_files")
    served = import_when_called("orbax.reader:served")
    problem = import_when_called("orbax.complete:problem")
    is_named = import_when_called("orbax.complete:is_orbax")


class NanotronFormat(Format):
    """Reads the folder of a step, or of a run, whose ``latest.txt`` chooses one."""

    name = "nanotron"
    about = "nanotron: a folder with checkpoint_metadata.json, a file for each tensor, and files of the optimizer"
    holds = "whole state"

    detect = import_when_called("nanotron.names:detect")
    read = import_when_called("nanotron.reader:read")
    own_files = import_when_called("nanotron.reader:own_files")
    problem = import_when_called("nanotron.names:problem")
    is_named = import_when_called("nanotron.names:is_nanotron")


class UniversalFormat(Format):
    """Reads and writes a save directory with ``latest_universal``; reads a tag folder with ``zero/`` in it too."""

    name = "universal"
    about = "DeepSpeed universal: a tag folder with zero/<parameter>/fp32.pt, ..., and latest_universal"
    holds_masters = True
    reading_options = writing_options = ("tag",)

    detect = import_when_called("deepspeed.names:detect_universal")
    read = import_when_called("deepspeed.universal.reader:read")
    own_files = import_when_called("deepspeed.universal.reader:own_files")
    problem = import_when_called("deepspeed.complete:find_universal_problem")
    is_named = import_when_called("deepspeed.complete:has_universal_files")
    layout = import_when_called("deepspeed.universal.writer:layout")
    loading = import_when_called("deepspeed.loading:load_universal")


class DeepSpeedFormat(Format):
    """Reads native checkpoints of every ZeRO stage and of none, as ``save_checkpoint`` writes them: a save directory
    with ``latest``, or a tag folder."""

    name = "deepspeed"
    about = "DeepSpeed in any stage, also without ZeRO; the stage is detected"
    holds = "whole state"
    holds_masters = True
    reading_options = ("tag",)

    detect = import_when_called("deepspeed.names:detect_native")
    read = import_when_called("deepspeed.zero_reader.reader:read")
    own_files = import_when_called("deepspeed.zero_reader.reader:own_files")
    problem = import_when_called("deepspeed.complete:find_native_problem")
    is_named = import_when_called("deepspeed.complete:has_native_files")
    world_size_of = import_when_called("deepspeed.complete:count_ranks")


class ZeroFormat(DeepSpeedFormat):
    """Writes what ``load_checkpoint`` resumes in ZeRO ``stage`` 1, 2 or 3; reads every stage."""

    writing_options = ("tag", "world_size")

    def __init__(self, stage: int) -> None:
        self.stage, self.name = stage, f"zero{stage}"
        files = ": a tag folder of *_model_states.pt and *_optim_states.pt, and the file latest" if stage == 1 else ""
        self.about = f"DeepSpeed ZeRO-{stage}{files}"

    def layout(self, manifest: Manifest, options: WriteOptions) -> Layout:
        from ckpt_tools.formats.deepspeed.zero_writer.writer import layout

        return layout(manifest, options, self.stage)

    def loading(self, path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
        from ckpt_tools.formats.deepspeed.loading import load_zero

        return load_zero(path, layout, options, self.stage)


class SafetensorsFormat(Format):
    """Reads a file, or a folder with an index or a complete set of shards, whole tensors or pieces in each. Writes a
    model, or with ``state="all"`` the whole state in tensors and the metadata of the first file."""

    name = "safetensors"
    about = "one .safetensors file, or Hugging Face shards with their index"
    holds_optimizer = False
    holds_values = "with state"
    reading_options = ("model_key", "optim_key")
    writing_options = ("max_shard_size", "config", "quantize")
    kept_entries = (HEADER_ENTRY,)
    keeps_every_dtype = True

    detect = import_when_called("safetensors.files:detect")
    read = import_when_called("safetensors.files:read")
    own_files = import_when_called("safetensors.files:own_files")

    def reading_options_of(self, manifest: Manifest) -> tuple[str, ...]:
        """The keys mean something in a file with whole state alone."""
        return () if manifest.tree is None else self.reading_options

    problem = import_when_called("safetensors.complete:problem")
    is_empty = import_when_called("safetensors.complete:is_empty")
    layout = import_when_called("safetensors.files:layout")
    loading = import_when_called("safetensors.files:loading")


class MetaFormat(Format):
    """Reads all ``consolidated.NN.pth`` of a folder as one model. Writes weights into as many of them as there are
    ranks, and ``params.json``."""

    name = "meta"
    about = "Meta's consolidated.NN.pth of Llama, a file for each rank of model parallelism, with params.json"
    holds_optimizer = False
    is_weights_alone = True
    writing_options = ("world_size",)
    asks_model_type = True

    detect = is_named = import_when_called("meta.names:has_consolidated_files")
    read = import_when_called("meta.reader:read")
    own_files = import_when_called("meta.reader:own_files")
    layout = import_when_called("meta.writer:layout")
    loading = import_when_called("meta.writer:loading")


class ShardedFormat(Format):
    """Reads the folder that holds the files of all ranks, or one with such a folder below it. Writes the whole training
    state, each weight once."""

    name = "sharded"
    about = "a torch file a rank with its part of each tensor (DTensor): verl, SkyRL, accelerate, FSDP2"
    holds_values = "always"
    reading_options = ("model_key", "optim_key")
    writing_options = ("world_size",)

    detect = import_when_called("rank_files.detection:detect")
    read = import_when_called("rank_files.reader:read")
    own_files = import_when_called("rank_files.reader:own_files")
    problem = import_when_called("rank_files.complete:problem")
    is_named = import_when_called("rank_files.complete:is_sharded")
    world_size_of = import_when_called("rank_files.complete:world_size")
    layout = import_when_called("rank_files.writer:layout")
    loading = import_when_called("rank_files.writer:loading")


class TorchFormat(Format):
    """Reads a file, or a folder with one or with an index. Writes a model's state dict, in one file or in shards with
    their index, or with ``state="all"`` in one file the tree of a source in this format, and of any other the tree
    ``{"model", "optim", ...}`` of ``get_state_dict``."""

    name = "torch"
    about = "a full state dict of torch.save: .pt, .pth, .bin, or .bin shards with their index"
    holds_optimizer = False
    holds_values = "always"
    reading_options = ("model_key", "optim_key")
    writing_options = ("max_shard_size", "config")

    detect = import_when_called("torch.files:detect")
    read = import_when_called("torch.files:read")
    own_files = import_when_called("torch.files:own_files")
    problem = import_when_called("torch.complete:problem")
    is_empty = import_when_called("torch.complete:is_empty")
    layout = import_when_called("torch.files:layout")
    loading = import_when_called("torch.files:loading")


class PeftFormat(Format):
    """Writes the adapter of a training state as PEFT's ``save_pretrained`` does. Such a folder is safetensors, and is
    detected as that."""

    name = "peft"
    about = "a folder for PeftModel.from_pretrained: the adapter alone, out of a training state"
    holds_optimizer = False
    is_weights_alone = True
    writing_options = ("config",)
    asks_adapter_config = True
    kept_entries = (HEADER_ENTRY,)

    read = import_when_called("safetensors.files:read")
    layout = import_when_called("peft:layout")
    loading = import_when_called("peft:loading")


class GgufFormat(Format):
    """Reads one file, or a folder of one file or of all parts of one. Writes weights into one file of version 3, with
    the key-values of the GGUF that they came from."""

    name = "gguf"
    about = "a .gguf file of llama.cpp, or all its parts: tensors that are not quantized, and the key-values"
    holds_optimizer = False
    is_weights_alone = True
    kept_entries = ("gguf",)
    asks_model_type = True

    detect = import_when_called("gguf.files:detect")
    read = import_when_called("gguf.files:read")
    own_files = import_when_called("gguf.files:own_files")
    is_empty = import_when_called("gguf.header:is_empty")
    layout = import_when_called("gguf.files:layout")
    loading = import_when_called("gguf.files:loading")


class NpzFormat(Format):
    """Reads one file, or a folder of one. Writes weights as ``numpy.savez`` does."""

    name = "npz"
    about = "a .npz file of numpy or MLX: arrays that are not compressed"
    holds_optimizer = False
    is_weights_alone = True

    detect = import_when_called("npz.files:detect")
    read = import_when_called("npz.files:read")
    own_files = import_when_called("npz.files:own_files")
    is_empty = import_when_called("npz.files:is_empty")
    layout = import_when_called("npz.files:layout")
    loading = import_when_called("npz.files:loading")


FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        *(MegatronFormat(), DcpFormat(), OrbaxFormat(), NanotronFormat(), UniversalFormat(), DeepSpeedFormat()),
        *(ZeroFormat(1), ZeroFormat(2), ZeroFormat(3), SafetensorsFormat(), MetaFormat(), ShardedFormat()),
        *(TorchFormat(), PeftFormat(), GgufFormat(), NpzFormat()),
    )
}
"""The built-in formats by name, in the order of detection."""

assert [*FORMATS] == [*BUILTIN_FORMATS], "core.format_names has the same formats in the same order"
