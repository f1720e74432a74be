"""A name of code in JSON or YAML that a documented loader would import or call is a finding, and can be allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tools

pytestmark = pytest.mark.quick

HOSTILE: dict[str, tuple[str, Any, str]] = {
    "transformers": ("config.json", {"auto_map": {"AutoModel": "modeling.Model"}}, "modeling.Model"),
    "transformers, nested": ("config.json", {"text_config": [{"auto_map": {"AutoModel": "m.M"}}]}, "m.M"),
    "transformers, a pair": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["t.T", None]}}, "t.T"),
    "transformers, a remote one": ("config.json", {"auto_map": {"AutoModel": "user/repo--m.M"}}, "user/repo--m.M"),
    "transformers, pipelines": ("config.json", {"custom_pipelines": {"x": {"impl": "my.Pipe"}}}, "my.Pipe"),
    "diffusers": ("model_index.json", {"unet": ["antigravity", "Unet"]}, "antigravity.Unet"),
    "diffusers, own code": ("model_index.json", {"_class_name": ["pipeline", "Pipe"]}, "pipeline.Pipe"),
    "hydra": ("config.json", {"model": {"_target_": "os.system"}}, "os.system"),
    "hydra, not a text": ("config.json", {"_target_": ["os.system"]}, "something that is not a text"),
    "torchtune": ("config.json", {"model": {"_component_": "os.system"}}, "os.system"),
    "LightningCLI": ("config.json", {"model": {"class_path": "os.system"}}, "os.system"),
    "latent diffusion": ("config.json", {"model": {"target": "os.system", "params": {}}}, "os.system"),
    "logging, a factory": ("a.json", {"handlers": {"a": {"()": "os.system"}}}, "os.system"),
    "logging": ("a.json", {"version": 1, "handlers": {"a": {"class": "m.Handler"}}}, "logging.config"),
    "Keras": ("model.json", {"config": {"layers": [{"class_name": "Lambda", "config": {}}]}}, "keras.Lambda"),
    "Keras 3": ("config.json", {"module": "os", "class_name": "system", "config": {}}, "os.system"),
    "PEFT": ("adapter_config.json", {"auto_mapping": {"parent_library": "antigravity"}}, "antigravity"),
    "sentence-transformers": ("modules.json", [{"idx": 0, "type": "os.system"}], "os.system"),
    "sentence-transformers, a layer": ("2_Dense/config.json", {"activation_function": "os.abort"}, "os.abort"),
    "Ray Tune": ("experiment_state-1.json", {"_type": "CLOUDPICKLE_FALLBACK", "value": "80"}, "cloudpickle.loads"),
}


@pytest.mark.parametrize("label", HOSTILE)
def test_a_name_of_code_is_a_finding_unless_it_is_allowed(label: str, tmp_path: Path) -> None:
    file, document, name = HOSTILE[label]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(document))
    report = ckpt_tools.scan(tmp_path)
    assert [(each.file, str(each.danger)) for each in report.findings] == [(file, "could run")]
    assert report.names == (name,)
    allowed = ckpt_tools.scan(tmp_path, allow=[name])
    assert (allowed.clean, allowed.allowed) == (True, (name,))


YAML = {
    "plain": "model:\n  _target_: os.system\n",
    "quoted": 'model: {"_target_": os.system}\n',
    "escaped": '"_t\\x61rget_": os.system\n',
    "explicit": "? _target_\n: os.system\n",
    "by an alias": "a: &a _target_\nmodel:\n  *a : os.system\n",
    "a value by an alias": "a: &a os.system\nmodel:\n  _target_: *a\n",
    "in the second document": "a: 1\n---\n_target_: os.system\n",
    "below a merged mapping": "a: &a {_target_: os.system}\nb:\n  <<: *a\n",
    "in a list": "- - _target_: os.system\n",
    "folded": "model:\n  _target_: >-\n    os.system\n",
}


@pytest.mark.parametrize("label", YAML)
def test_so_is_one_in_yaml_however_it_is_written(label: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(YAML[label])
    assert ckpt_tools.scan(tmp_path).names == ("os.system",)


HARMLESS = {
    "config.json": {"activation_function": "gelu_new", "architectures": ["M"], "target_modules": ["q.proj"]},
    "adapter_config.json": {"auto_mapping": {"parent_library": "transformers.models.llama.modeling_llama"}},
    "modules.json": [{"idx": 0, "type": "sentence_transformers.models.Transformer"}],
    "2_Dense/config.json": {"activation_function": "torch.nn.modules.activation.Tanh"},
    "model_index.json": {"_class_name": "P", "unet": ["diffusers", "U"], "safety_checker": [None, None]},
    "keras/config.json": {"module": "keras.layers", "class_name": "Dense", "config": {}},
    "files.json": {"target": "model.safetensors"},
}


@pytest.mark.parametrize("file", HARMLESS)
def test_a_name_of_a_library_or_a_file_is_not(file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(HARMLESS[file]))
    assert ckpt_tools.scan(tmp_path).findings == ()


def test_an_object_of_aliases_is_looked_at_once(tmp_path: Path) -> None:
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 40))
    (tmp_path / "config.yaml").write_text(f"a0: &a0 [x]\n{levels}")
    assert ckpt_tools.scan(tmp_path).findings == ()


@pytest.mark.parametrize("name", ["os.system", "lightning.pytorch.cli.instantiate_module.x", 3])
def test_the_instantiator_of_lightning_is_its_own(name: Any, tmp_path: Path) -> None:
    torch.save({"hyper_parameters": {"_instantiator": name}}, tmp_path / "a.ckpt")
    assert [each.danger for each in ckpt_tools.scan(tmp_path).findings] == ["could run"]
    own = "lightning.pytorch.cli.instantiate_module"
    torch.save({"hyper_parameters": {"_instantiator": own}}, tmp_path / "a.ckpt")
    assert ckpt_tools.scan(tmp_path).findings == ()


@pytest.mark.parametrize("file", ["x-1.0.dist-info/entry_points.txt", "x.egg-info/PKG-INFO.txt", "pyvenv.cfg"])
def test_a_file_of_an_installed_package_is_a_finding(file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("[torch.backends]\nx = os:abort\n")
    assert [each.danger for each in ckpt_tools.scan(tmp_path).findings] == ["could run"]
