"""Limits and a cost profile that several simulation tests share."""

from __future__ import annotations

from dataclasses import replace

from chairlift.engine_args import EngineArgs, core_settings
from chairlift.simulation import CostProfile

EXACT = CostProfile(
    t0_s=1e-3,
    t_seq_s=0.5e-3,
    t_w_s=2e-3,
    t_tok_s=1e-3,
    t_ctx_s=0.1e-3,
    t_pair_s=0.01e-3,
    noise_sigma=0.0,
)
"""Every term of the cost counts, and noise does not."""


def settings(**changes):
    args = EngineArgs(enable_prefix_caching=False, max_queued_requests=100_000)
    limits = core_settings(args, max_model_len=8_192, num_kv_blocks=28_600, vocab_size=1)
    return replace(limits, **changes)
