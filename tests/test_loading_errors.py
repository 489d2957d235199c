"""A model directory that cannot be loaded: one clear sentence for each way."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift.errors import (
    ChairliftError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightsError,
)
from chairlift.models.config import ModelConfig
from chairlift.models.llama import LlamaModel
from chairlift.models.weights import Checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def tensors():
    shapes = {"model.embed_tokens": (32, 16), "lm_head": (32, 16), "model.norm": (16,)}
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes[layer + "input_layernorm"] = shapes[layer + "post_attention_layernorm"] = (16,)
        shapes[layer + "self_attn.q_proj"] = shapes[layer + "self_attn.o_proj"] = (16, 16)
        shapes[layer + "self_attn.k_proj"] = shapes[layer + "self_attn.v_proj"] = (8, 16)
        shapes[layer + "mlp.gate_proj"] = shapes[layer + "mlp.up_proj"] = (24, 16)
        shapes[layer + "mlp.down_proj"] = (16, 24)
    return {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


def configure(directory, **changes):
    values = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
    (directory / "config.json").write_text(json.dumps(values))


def load(directory):
    config = ModelConfig.from_directory(directory)
    return LlamaModel(config, Checkpoint(directory, torch.float32), 64)


def refused(directory, kind, *parts):
    with pytest.raises(kind) as caught:
        load(directory)
    assert isinstance(caught.value, ChairliftError)
    message = str(caught.value)
    for part in parts:
        assert part in message
    assert "\n" not in message
    return message


def test_a_good_directory_loads(directory):
    load(directory)


def test_missing_directory(tmp_path):
    refused(tmp_path / "nowhere", ModelNotFoundError, "nowhere' does not exist")


def test_missing_and_broken_configuration(directory):
    path = directory / "config.json"
    path.write_text('{"architectures": ')
    refused(directory, ModelFileError, str(path), "cannot be read", "fetch it again")
    path.write_text("[]")
    refused(directory, ModelFileError, "does not hold a JSON object")
    path.unlink()
    refused(directory, ModelFileError, "has no config.json", "Hugging Face's format")


def test_other_architectures_are_listed_against_the_supported(directory):
    configure(directory, architectures=["GPT2LMHeadModel"])
    refused(
        directory,
        UnsupportedModelError,
        "architecture GPT2LMHeadModel is not supported; supported are",
        "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
    )
    configure(directory, architectures=None, model_type="mamba")
    refused(directory, UnsupportedModelError, "architecture of type mamba is not supported")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "a quantised checkpoint (gptq)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"head_dim": 20}, "head_dim 20 (only multiples of 8)"),
        ({"hidden_size": 24}, "head_dim 12 (only multiples of 8)"),
        ({"num_attention_heads": 32}, "head_dim 0 (only multiples of 8)"),
    ],
)
def test_settings_that_are_not_supported(directory, changes, said):
    configure(directory, **changes)
    refused(directory, UnsupportedModelError, said, "is not supported")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "hidden_size is missing; it must be a positive integer"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; it must be a positive integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must be a divisor of 2 heads"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; it must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "original_max_position_embeddings is missing",
        ),
    ],
)
def test_values_that_cannot_be(directory, changes, said):
    configure(directory, **changes)
    refused(directory, ModelFileError, said)


def test_no_safetensors(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    refused(
        directory,
        ModelFileError,
        "neither model.safetensors nor model.safetensors.index.json (it has pytorch_model.bin)",
    )


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_safetensors(directory, kept):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    size = f"{path.stat().st_size:,} bytes"
    refused(directory, ModelFileError, str(path), size, "truncated", "fetch it again")


def shard(directory):
    parts = dict(enumerate(sorted(tensors().items())))
    shards = {0: {}, 1: {}}
    for index, (name, tensor) in parts.items():
        shards[index % 2][name] = tensor
    weight_map = {}
    for index, content in shards.items():
        file = f"model-{index}.safetensors"
        save_file(content, directory / file)
        weight_map |= dict.fromkeys(content, file)
    (directory / "model.safetensors").unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_missing_shard_and_broken_index(directory):
    index = shard(directory)
    load(directory)
    (directory / "model-1.safetensors").unlink()
    refused(directory, ModelFileError, "lacks 1 of the 2 files", "(model-1.safetensors)")
    index.write_text("{}")
    refused(directory, ModelFileError, str(index), "cannot be read")


def change_tensors(directory, change):
    path = directory / "model.safetensors"
    content = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(content)
    save_file(content, path)


def test_missing_tensor(directory):
    name = "model.layers.1.self_attn.v_proj.weight"
    change_tensors(directory, lambda tensors: tensors.pop(name))
    refused(directory, WeightsError, f"has no tensor {name} (of shape [8, 16])")


def test_wrong_shape(directory):
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(directory, lambda tensors: tensors.update({name: torch.zeros(25, 16)}))
    refused(directory, WeightsError, f"tensor {name}", "has shape [25, 16]", "asks for [24, 16]")


def test_unexpected_tensors(directory):
    extra = {f"model.layers.{i}.self_attn.q_norm.weight": torch.zeros(8) for i in range(5)}
    change_tensors(directory, lambda tensors: tensors.update(extra))
    message = refused(directory, WeightsError, "holds 5 tensors", "has no place for")
    assert "model.layers.0.self_attn.q_norm.weight" in message
    assert "model.layers.3.self_attn.q_norm.weight" not in message


def test_tensors_known_to_be_superfluous_are_left_out(directory):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    change_tensors(directory, lambda tensors: tensors.update(extra))
    load(directory)
    configure(directory, tie_word_embeddings=True)  # lm_head.weight is there all the same
    load(directory)


def test_integer_tensors(directory):
    name = "model.norm.weight"
    whole = {name: torch.zeros(16, dtype=torch.int8)}
    change_tensors(directory, lambda tensors: tensors.update(whole))
    refused(directory, WeightsError, f"tensor {name}", "torch.int8", "floating point")
