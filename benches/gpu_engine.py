"""The engine on a CUDA device, with random weights of Llama-3.1-8B's shape.

    python benches/gpu_engine.py [--running 1 32 256] [--enforce-eager]

Output tokens a second with so many answers running, and how an iteration's time is made up: what
the device worked on the step, and the gap to the next one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from chairlift import LLM, SamplingParams
from chairlift.executor import StepPlan
from chairlift.gpu import CudaExecutor, CudaExecutorConfig
from chairlift.gpu.device import CudaDevice, Device
from chairlift.testing import ByteTokenizer

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}


class RandomWeights:
    """Takes the place of a checkpoint: every tensor is random, on the device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self._dtype = dtype

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(*shape, dtype=self._dtype, device=self.device)
        weight = torch.empty(*shape, dtype=self._dtype, device=self.device)
        return weight.normal_(std=shape[-1] ** -0.5)

    def take_rows(self, names: Sequence[str], rows: Sequence[int], columns: int) -> torch.Tensor:
        return self.take(names[0], (sum(rows), columns))

    def take_entries(self, names: Sequence[str], counts: Sequence[int]) -> torch.Tensor:
        return torch.zeros(sum(counts), dtype=self._dtype, device=self.device)

    def take_scale(self, names: Sequence[str]) -> float:
        return 1.0

    def ignore(self, name: str) -> None:
        pass

    def check_all_taken(self) -> None:
        pass


class TimedExecutor(CudaExecutor):
    """Also keeps when each step began and ended on the device."""

    def __init__(self, *arguments) -> None:
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        super().__init__(*arguments)

    def launch(self, plan: StepPlan) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        super().launch(plan)
        end.record()
        self.marks.append((begin, end))

    def medians_ms(self) -> tuple[float, float]:
        """Of a step's time on the device, and of the gap before the next."""
        torch.cuda.synchronize()
        steps = [begin.elapsed_time(end) for begin, end in self.marks]
        gaps = [
            before[1].elapsed_time(after[0])
            for before, after in zip(self.marks, self.marks[1:], strict=False)
        ]
        return statistics.median(steps), statistics.median(gaps)


def random_executor(kind, shape: dict, device: Device, **settings) -> CudaExecutor:
    """An executor of a model of that shape, whose weights nobody trained."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
        config = CudaExecutorConfig(model_dir=Path(folder), **settings)
        dtype = torch.float32 if settings.get("dtype") == "float32" else torch.bfloat16
        with torch.inference_mode():
            weights = RandomWeights(dtype, device.torch_device)
            return kind(config, device, weights)


def tokens_per_second(llm: LLM, running: int, *, prompt: int, output: int) -> float:
    """Output tokens a second while so many answers are written."""
    rng = random.Random(running)
    prompts = [rng.choices(range(2, 250), k=prompt) for _ in range(running)]
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    start = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    return sum(len(result.outputs[0].token_ids) for result in results) / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--enforce-eager", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device: nothing to measure")
    limits = {"max_num_seqs": max(args.running), "max_model_len": 8_192}
    executor = random_executor(
        TimedExecutor, LLAMA_8B, CudaDevice(), enforce_eager=args.enforce_eager, **limits
    )
    with LLM(executor=executor, tokenizer=ByteTokenizer(), **limits) as llm:
        for running in args.running:
            tokens_per_second(llm, running, prompt=128, output=8)  # warm
            executor.marks.clear()
            rate = tokens_per_second(llm, running, prompt=128, output=256)
            step, gap = executor.medians_ms()
            print(
                f"{running} running: {rate:,.0f} tokens/s; a step is {step:.2f} ms of the device, "
                f"the gap after it {gap * 1e3:,.0f} us ({gap / (step + gap):.1%} of an iteration)"
            )
    print(executor.graph_use)


if __name__ == "__main__":
    main()
