"""``adapter_model.safetensors`` and ``adapter_config.json``, as PEFT's ``save_pretrained`` (0.21) writes them."""

from __future__ import annotations

from ckpt_tools.core.layout import FileLayout, Layout, Literal
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.notes import Note, Outcome
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import WriteOptions
from ckpt_tools.formats.safetensors.files import build_file_layout, get_header_texts
from ckpt_tools.lora.adapter import map_file_names, map_weight_keys, parse_weight_names, select_adapter_names
from ckpt_tools.lora.config import parse_config
from ckpt_tools.messages.loading_code import quote_literal
from ckpt_tools.messages.wording import format_count
from ckpt_tools.serialization.strict_json import parse_json
from ckpt_tools.trainers.transformers import ADAPTER_CONFIG_FILE

WEIGHTS_FILE = "adapter_model.safetensors"


def layout(manifest: Manifest, options: WriteOptions) -> Layout:
    """The adapter in ``manifest``, under the names that PEFT gives it in a file.

    Raises:
        UsageError: there is no adapter, or there are several. UnsupportedError: it is not of LoRA.
    """
    config = parse_config(parse_json(options.adapter_config, ADAPTER_CONFIG_FILE), ADAPTER_CONFIG_FILE)
    names = parse_weight_names(manifest)
    selected_adapter = select_adapter_names(
        manifest, config, None, f"leave out the others, such as with {format_option('exclude', '*.NAME.*')}"
    )
    keys = map_weight_keys(manifest)
    adapter_keys = {name: keys[old] for old, name in map_file_names(names, selected_adapter, config).items()}
    num_left_out = len(names) - len(adapter_keys)
    why = "the folder of an adapter holds nothing else"
    what = f"{format_count(num_left_out, 'tensor')} of the base model"
    notes = (Note(Outcome.DROPPED, what, why, num_left_out, asked=True),) if num_left_out else ()
    adapter_tensors = {name: (key, manifest.tensors[key]) for name, key in adapter_keys.items()}
    settings = FileLayout(ADAPTER_CONFIG_FILE, (Literal(options.adapter_config),))
    return Layout((settings, build_file_layout(WEIGHTS_FILE, adapter_tensors, {}, get_header_texts(manifest))), notes)


def loading(path: str, manifest: Manifest, layout: Layout, options: WriteOptions) -> str:
    return f"from peft import PeftModel\nmodel = PeftModel.from_pretrained(base_model, {quote_literal(path)})"
