"""Texts of configuration are a verdict of their own, unless a known program takes all of them as data."""

import argparse
import collections
import io
import json
import pickle
import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import safetensors.torch
import tokenizers
import torch
import torch.distributed.checkpoint as dcp
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import ckpt_tools
from tests.verification.scan.corpora.build import Global, New, pickled

pytestmark = pytest.mark.quick

CODE = "os.system('x')"

HOSTILE: dict[str, tuple[str, Any]] = {
    "transformers": ("config.json", {"auto_map": {"AutoModel": "modeling.Model"}}),
    "transformers, a pair": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["t.T", None]}}),
    "transformers, pipelines": ("config.json", {"custom_pipelines": {"x": {"impl": "my.Pipe"}}}),
    "transformers, a kernel of the hub": ("config.json", {"attn_implementation": "evil/kernel"}),
    "transformers, of another case": ("Config.json", {"hidden_act": "os.system"}),
    "diffusers": ("model_index.json", {"unet": ["antigravity", "Unet"]}),
    "diffusers, own code": ("model_index.json", {"_class_name": ["pipeline", "Pipe"]}),
    "hydra, at the top": ("config.json", {"_target_": "os.system"}),
    "latent diffusion": ("config.json", {"model": {"target": "os.system", "params": {}}}),
    "a target without a class": ("train.json", {"target": "module.no-such"}),
    "logging, a factory": ("a.json", {"handlers": {"a": {"()": "os.system"}}}),
    "logging": ("a.json", {"version": 1, "handlers": {"a": {"class": "m.Handler"}}}),
    "Keras 3": ("config.json", {"module": "os", "class_name": "system", "config": {}}),
    "PEFT": ("adapter_config.json", {"auto_mapping": {"parent_library": "antigravity"}}),
    "PEFT, Megatron": ("adapter_config.json", {"megatron_core": "antigravity"}),
    "PEFT, a file": ("adapter_config.json", {"prompt_tuning_init_state_dict_path": "x.pt"}),
    "sentence-transformers": ("modules.json", [{"idx": 0, "type": "os.system"}]),
    "sentence-transformers, a layer": ("2_Dense/config.json", {"activation_function": "os.abort"}),
    "Ray Tune": ("experiment_state-1.json", {"_type": "CLOUDPICKLE_FALLBACK", "value": "80"}),
    "MONAI": ("bundle.json", {"imports": ["$import os"], "x": f"$__import__('os') and {CODE}"}),
    "zarr": (".zarray", {"filters": [{"id": "pickle"}], "dtype": "|O"}),
    "a plug-in that is a key": ("config.json", {"plugins": {"antigravity": 1}}),
    "a file of a model": ("config.json", {"model_file": "evil.py"}),
    "a key with a dot": ("config.json", {"os.system": 1}),
    "a text alone": ("a.json", "os.system"),
    "lists in lists": ("config.json", {"layer_types": [[["os.system"]]]}),
    "a vocabulary of texts": ("vocab.json", {"_target_": "os.system"}),
    "a normalizer of Python": ("tokenizer.json", {"normalizer": {"custom": "os.system"}}),
    "an index": ("model.safetensors.index.json", {"metadata": {}, "weight_map": {}, "loader": CODE}),
    "a line of JSON": ("a.jsonl", {"_target_": "os.system"}),
    "a state of the Trainer": ("trainer_state.json", {"stateful_callbacks": {"X": {"args": {"_target_": "a.b"}}}}),
}


@pytest.mark.parametrize("label", HOSTILE)
def test_names_in_json_are_configuration(label, tmp_path):
    file, document = HOSTILE[label]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(document))
    check_configuration(tmp_path, file)


def check_configuration(folder: Path, file: str) -> None:
    """One file is a finding of configuration, and only counted if it is allowed."""
    report = ckpt_tools.scan(folder)
    assert [(each.file, str(each.danger)) for each in report.findings] == [(file, "configuration")]
    assert (report.clean, report.num_configurations) == (False, 1)
    allowed = ckpt_tools.scan(folder, allow_configuration=True)
    assert (allowed.clean, allowed.num_configurations, allowed.num_files) == (True, 1, report.num_files)


SETTINGS = {
    "a.yaml": "model:\n  _target_: os.system\n",
    "merged twice.yml": "a: &a {x: 1}\nb:\n  <<: *a\n  <<: {_target_: os.system}\n",
    "plain.yaml": "lr: 0.1\n",
    "not.yaml": "a: [\n",
    "train.toml": "[model]\ntarget = 'os.system'\n",
    "train.ini": "[model]\nclass=os.system\n",
    "setup.cfg": "[options.entry_points]\nx = os:abort\n",
    "model.gin": "import os\n",
    "log.conf": "[loggers]\n",
}  # fmt: skip


@pytest.mark.parametrize("file", SETTINGS)
def test_other_forms_of_settings_are_configuration_whatever_they_hold(file, tmp_path):
    (tmp_path / file).write_text(SETTINGS[file])
    check_configuration(tmp_path, file)


def _with_attributes() -> Any:
    found: Any = collections.OrderedDict(w=torch.ones(1))
    found.note = CODE
    return found


def _noted() -> torch.Tensor:
    tensor: Any = torch.nn.Parameter(torch.ones(2))
    tensor.note = CODE
    return tensor


PICKLED: dict[str, Any] = {
    "the configuration of MMEngine": {"meta": {"cfg": f"custom_imports = 1\n{CODE}\n"}},
    "an instantiator of Lightning": {"hyper_parameters": {"_instantiator": "os.system"}},
    "in an ordered dict": {"hyper_parameters": collections.OrderedDict(_instantiator="os.system")},
    "in a namespace": {"args": argparse.Namespace(spec="my.module")},
    "in a list": {"config": ["a", ["os.system"]]},
    "in a tuple": {"config": ("a", ("os.system",))},
    "in a set": {"config": {"os.system"}},
    "in a default dict": {"config": collections.defaultdict(list, x=["os.system"])},
    "in a deque": {"config": collections.deque(["os.system"])},
    "in an attribute of a dict": _with_attributes(),
    "in a text file": {"config": io.StringIO("import os\n")},
    "an expression of MONAI": {"epoch": "$__import__('os')"},
    "a layer of Ultralytics": {"yaml": {"backbone": [[-1, 1, "eval(1)", []]]}},
    "behind a number": {7: "os.system"},
    "an array of texts": {"names": np.array([{"x": "os.system"}], dtype=object)},
    "alone": "os.system",
    "a module of pyannote alone": {"pyannote.audio": {"architecture": {"module": "antigravity"}}},
    "a state of a tensor": {"w": _noted()},
}


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize("label", PICKLED)
def test_names_in_the_settings_of_a_checkpoint_are_configuration(label, form, tmp_path):
    value = PICKLED[label]
    if label == "an array of texts":
        value = {"config": value["names"]}
    if form == "pickle":
        (tmp_path / "a.pkl").write_bytes(pickle.dumps(value))
    else:
        torch.save(value, tmp_path / "a.pkl", _use_new_zipfile_serialization=form == "zip")
    check_configuration(tmp_path, "a.pkl")


def test_so_are_those_in_omegaconf(tmp_path):
    node = New(Global("omegaconf.nodes:AnyNode"), (), {"_metadata": None, "_val": "os.system"})
    config = New(Global("omegaconf.dictconfig:DictConfig"), (), {"_content": {"_target_": node}})
    (tmp_path / "a.pkl").write_bytes(pickled({"hyper_parameters": config}))
    check_configuration(tmp_path, "a.pkl")


def test_so_are_those_in_items_of_a_dcp(tmp_path):
    """Also if an item of the same bytes has a name of data."""
    for name in ("params", "config"):
        with warnings.catch_warnings(action="ignore"):
            dcp.save({"optim": {name: "os.system"}, "w": torch.ones(2)}, checkpoint_id=tmp_path / name, no_dist=True)
    assert ckpt_tools.scan(tmp_path / "params").clean
    check_configuration(tmp_path / "config", "__0_0.distcp")
    with warnings.catch_warnings(action="ignore"):
        both = {"a": {"params": "os.system"}, "b": {"config": "os.system"}}
        dcp.save(both, checkpoint_id=tmp_path / "both", no_dist=True)
    check_configuration(tmp_path / "both", "__0_0.distcp")


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors", "DCP"])
def test_so_is_a_tensor_that_transformer_engine_unpickles(form, tmp_path):
    name = "layers.0.mlp._extra_state"
    state = {
        "a": torch.zeros(40, dtype=torch.uint8),
        name: torch.frombuffer(bytearray(b"cos\n" * 10), dtype=torch.uint8),
    }
    for folder, tensors in {"full": state, "empty": {**state, name: torch.zeros(0, dtype=torch.uint8)}}.items():
        place = tmp_path / folder
        place.mkdir()
        if form == "safetensors":
            safetensors.torch.save_file(tensors, place / "model.safetensors")
        elif form == "DCP":
            with warnings.catch_warnings(action="ignore"):
                dcp.save(tensors, checkpoint_id=place, no_dist=True)
        else:
            torch.save(tensors, place / "model.pt", _use_new_zipfile_serialization=form == "zip")
    (file,) = (path.name for path in (tmp_path / "full").iterdir() if path.name != ".metadata")
    check_configuration(tmp_path / "full", file)
    assert ckpt_tools.scan(tmp_path / "empty").clean


HARMLESS: dict[str, Any] = {
    "config.json": {"activation_function": "gelu_new", "architectures": ["M"], "torch_dtype": "bfloat16"},
    "adapter_config.json": {"auto_mapping": {"parent_library": "transformers.models.llama.modeling_llama"}},
    "modules.json": [{"idx": 0, "type": "sentence_transformers.models.Transformer", "path": "", "name": "0"}],
    "2_Dense/config.json": {"activation_function": "torch.nn.modules.activation.Tanh", "in_features": 3},
    "model_index.json": {"_class_name": "P", "_diffusers_version": "0.30.0.dev0", "unet": ["diffusers", "U"],
                         "safety_checker": [None, None], "requires_safety_checker": True},
    "unet/config.json": {"_class_name": "UNet2DConditionModel", "act_fn": "silu", "sample_size": 64,
                         "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"]},
    "scheduler/scheduler_config.json": {"_class_name": "DDIMScheduler", "beta_schedule": "scaled_linear"},
    "quantized/config.json": {"quantization_config": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}}},
    "vocab.json": {"Ġthe": 1, "os.system": 2},
    "model.safetensors.index.json": {"metadata": {"total_size": 4}, "weight_map": {"a.b": "model-00001.safetensors"}},
    "all_results.json": {"eval/loss": 0.1, "train_runtime": 3.0, "history": [1, [2]]},
    "special_tokens_map.json": {"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": "<pad>"},
    "trainer_state.json": {"best_model_checkpoint": "./out/checkpoint-5", "log_history": [{"loss": 1.0, "step": 5}],
                           "stateful_callbacks": {"TrainerControl": {"args": {}, "attributes": {}}}},
}  # fmt: skip


@pytest.mark.parametrize("file", HARMLESS)
def test_what_known_programs_take_as_data_is_proved(file, tmp_path):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(HARMLESS[file]))
    assert ckpt_tools.scan(tmp_path).findings == ()


def configurations(names: list[str]) -> Mapping[str, Any]:
    """Configurations of transformers with default values, those that can be made so."""
    found = {}
    for name in names:
        try:
            found[name] = json.loads(CONFIG_MAPPING[name]().to_json_string(use_diff=False))
        except (ValueError, TypeError, AttributeError, ImportError):
            continue
    return found


def test_every_key_of_transformers_is_known(tmp_path, request):
    """A sample of the models in ``make test``, all in ``make soak``."""
    names = sorted(CONFIG_MAPPING.keys())
    chosen = names if request.config.getoption("--soak") else random.Random("models").sample(names, 40)
    with warnings.catch_warnings(action="ignore"):
        found = configurations(chosen)
    assert len(found) > len(chosen) * 0.9
    for name, document in found.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(document))
    assert {each.what for each in ckpt_tools.scan(tmp_path).findings} == set()


def test_so_are_those_of_tokenizers_and_adapters(tmp_path):
    for name, model in {"bpe": tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]),
                        "piece": tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"),
                        "unigram": tokenizers.models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)}.items():  # fmt: skip
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.NFC(), tokenizers.normalizers.Replace(tokenizers.Regex(" +"), " ")]
        )
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [tokenizers.pre_tokenizers.Split(" ", "isolated"), tokenizers.pre_tokenizers.ByteLevel()]
        )
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A", pair="[CLS] $A $B", special_tokens=[("[CLS]", 0)]
        )
        tokenizer.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteLevel()])
        tokenizer.add_special_tokens(["<s>"])
        tokenizer.enable_padding(pad_token="<pad>")
        tokenizer.enable_truncation(8)
        (tmp_path / name).mkdir()
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", chat_template="{{ messages }}"
        )
        fast.save_pretrained(tmp_path / name / "saved")
    for kind, config in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items():
        if kind not in NEED_MORE:
            config(base_model_name_or_path="meta/llama").save_pretrained(tmp_path / str(kind))
    peft.LoraConfig(target_modules=["q_proj"], rank_pattern={"q.1": 4}).save_pretrained(tmp_path / "lora")
    transformers.GenerationConfig(eos_token_id=[1], stop_strings=["x y"]).save_pretrained(tmp_path)
    transformers.CLIPImageProcessor().save_pretrained(tmp_path)
    assert {(each.file, each.what) for each in ckpt_tools.scan(tmp_path).findings} == set()


NEED_MORE = {"XLORA", "ADALORA", "CPT", "SHADOW"}
"""Adapters that cannot be made of a base model alone, or that name a second model."""
