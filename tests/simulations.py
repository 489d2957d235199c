"""Limits and a cost profile that several simulation tests share."""

from __future__ import annotations

from chairlift.config import PolicyConfig
from chairlift.engine_args import CoreSettings
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
    values = {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2_048,
        "max_model_len": 8_192,
        "long_prefill_token_threshold": None,
        "block_size": 16,
        "num_kv_blocks": 28_600,
        "enable_prefix_caching": False,
        "watermark_blocks": None,
        "max_queued_requests": 100_000,
        "max_queued_tokens": None,
        "policy": PolicyConfig(),
        "vocab_size": 1,
    }
    return CoreSettings(**{**values, **changes})
