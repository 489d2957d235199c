"""A model small enough for the emulator, and the executors and engines that run it."""

from __future__ import annotations

import torch
import transformers
from cpu_device import CpuDevice

from chairlift import LLM
from chairlift.gpu import CudaExecutor, CudaExecutorConfig
from chairlift.testing import ByteTokenizer
from chairlift.torch_executor import TorchExecutor, TorchExecutorConfig

BLOCK = 8
CHUNK = 64
VOCAB = 258
LAYERS = 2
HEAD_DIM = 64
LENGTHS = (1, 5, 16, 61, 90)
LIMITS = {"block_size": BLOCK, "num_kv_blocks": 40, "max_num_seqs": 8}


def make_model(directory):
    """A small random model with norms of q and k, grouped heads and sharp logits."""
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=160,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    model.save_pretrained(directory)
    return directory


def block_bytes(dtype):
    """Of one block in all layers, K and V."""
    return 2 * LAYERS * HEAD_DIM * BLOCK * dtype.itemsize


def on_cuda(directory, device=None, **settings):
    settings = LIMITS | {
        "dtype": "float32",
        "chunk_tokens": CHUNK,
        "max_num_batched_tokens": 64,
        **settings,
    }
    return CudaExecutor(
        CudaExecutorConfig(model_dir=directory, **settings),
        CpuDevice() if device is None else device,
    )


def on_cpu(directory, **settings):
    return TorchExecutor(TorchExecutorConfig(directory, "float32", **LIMITS, **settings))


def engine_on(executor, **options):
    """An engine that speaks bytes, on one of these executors."""
    return LLM(
        executor=executor,
        tokenizer=ByteTokenizer(),
        max_model_len=128,
        block_size=BLOCK,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        **options,
    )
