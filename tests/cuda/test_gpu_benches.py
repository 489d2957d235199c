"""The benches of CUDA devices, tiny and on the emulator: what nobody runs rots."""

from __future__ import annotations

import pytest
import torch
from cpu_device import CpuDevice
from emulated_launcher import EmulatedLauncher, emulate

import gpu_attention
import gpu_engine
from chairlift import LLM
from chairlift.gpu import CudaExecutor
from chairlift.testing import ByteTokenizer


@pytest.fixture(autouse=True)
def launcher():
    launcher = EmulatedLauncher(guards=False)
    emulate(launcher)
    yield launcher
    emulate(None)


@pytest.mark.parametrize(
    "shape",
    [
        gpu_attention.Shape(3, 300, 1, 2, 4, 64),
        gpu_attention.Shape(1, 70, 70, 1, 4, 64),
    ],
    ids=["decode", "prefill"],
)
def test_attention_is_compared_with_torchs_own(shape):
    paged, dense, error = gpu_attention.compare(shape, torch.device("cpu"))
    assert paged.out.shape == dense().shape
    assert error <= 0.02  # bfloat16


def test_figures_of_a_shape():
    shape = gpu_attention.Shape(2, 10, 3, 2, 4, 64)
    assert shape.kv_bytes == 2 * 10 * 2 * 64 * 2 * 2
    assert shape.operations == 4 * 64 * 8 * 2 * (8 + 9 + 10)


def test_an_engine_of_random_weights():
    shape = gpu_engine.LLAMA_8B | {
        "vocab_size": 258,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 64,
    }
    limits = {"max_num_seqs": 2, "max_model_len": 64}
    executor = gpu_engine.random_executor(
        CudaExecutor, shape, CpuDevice(), dtype="float32", num_kv_blocks=20, **limits
    )
    with LLM(executor=executor, tokenizer=ByteTokenizer(), **limits) as llm:
        assert gpu_engine.tokens_per_second(llm, 2, prompt=5, output=4) > 0
    assert executor.graph_use.replays == 3
