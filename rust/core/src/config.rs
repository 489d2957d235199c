//! Engine settings and their validation.
//!
//! [`Settings`] is what a person writes; [`Limits`] is what the engine runs with. The only way from one
//! to the other is [`Settings::validate`], so everything behind it can rely on the numbers: a pool that
//! holds at least one sequence of `max_model_len`, and a token budget that gives every running decode
//! its token.

pub mod memory;
pub mod pace;
pub mod policy;

use std::sync::Arc;

use crate::config::policy::{Policy, Rules};
use crate::error::ConfigError;
use crate::predict::iteration_time::Coefficients;
use crate::text::TokenTable;

/// Most blocks of a pool: a billion tokens in blocks of 16, and books of a few gigabytes.
pub const MAX_KV_BLOCKS: u32 = 1 << 26;

/// Most steps in flight: one that runs, and one behind it.
pub const MAX_IN_FLIGHT_STEPS: u32 = 2;

/// What a person may choose. Every count is in the unit of its name.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Settings {
    /// Most sequences that run at once; each owns a row of the executor.
    pub max_num_seqs: u32,
    /// Token budget of one iteration.
    pub max_num_batched_tokens: u32,
    /// Longest sequence, prompt and output together.
    pub max_model_len: u32,
    /// Longest prefill chunk of one sequence in one iteration; `None` leaves only the budget.
    pub long_prefill_token_threshold: Option<u32>,
    /// Tokens a KV block holds.
    pub block_size: u32,
    /// Blocks in the KV pool.
    pub num_kv_blocks: u32,
    /// Blocks of a second tier, on the host, that keep what is evicted from the pool; 0: there is none. It
    /// needs prefix caching.
    pub num_host_kv_blocks: u32,
    /// Whether full blocks are kept and found again by their content.
    pub enable_prefix_caching: bool,
    /// Blocks that a newcomer must leave free while others run, so that their next blocks are there;
    /// `None` is one in a hundred.
    pub watermark_blocks: Option<u32>,
    /// Most requests at the door and in the waiting queue together.
    pub max_queued_requests: u32,
    /// Most prompt tokens in the waiting queue; `None` is no bound.
    pub max_queued_tokens: Option<u64>,
    /// Classes, tenants, and how the queue treats them.
    pub policy: Policy,
    /// Tokens of the vocabulary; ids at or above it are refused.
    pub vocab_size: u32,
    /// Most steps that the executor has at once, the one that runs included: with 2 the next one is planned
    /// before the results of this one are known. At most [`MAX_IN_FLIGHT_STEPS`].
    pub max_in_flight_steps: u32,
    /// What an earlier engine on the same model and device learned of iterations' time.
    pub cost_model: Option<Coefficients>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_num_seqs: 256,
            max_num_batched_tokens: 2_048,
            max_model_len: 8_192,
            long_prefill_token_threshold: None,
            block_size: 16,
            num_kv_blocks: 4_096,
            num_host_kv_blocks: 0,
            enable_prefix_caching: true,
            watermark_blocks: None,
            max_queued_requests: 4_096,
            max_queued_tokens: None,
            policy: Policy::default(),
            vocab_size: 32_000,
            max_in_flight_steps: 1,
            cost_model: None,
        }
    }
}

impl Settings {
    /// Checks every number and derives the limits the engine runs with.
    ///
    /// A pool too small for one sequence of `max_model_len` lowers that length (see
    /// [`Limits::requested_max_model_len`]) instead of failing, because the pool's size is often
    /// measured, not chosen.
    pub fn validate(&self) -> Result<Limits, ConfigError> {
        let positive = [
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("block_size", self.block_size),
            ("num_kv_blocks", self.num_kv_blocks),
            ("max_queued_requests", self.max_queued_requests),
            ("vocab_size", self.vocab_size),
            ("max_in_flight_steps", self.max_in_flight_steps),
            (
                "long_prefill_token_threshold",
                self.long_prefill_token_threshold.unwrap_or(1),
            ),
        ];
        for (key, value) in positive {
            if value == 0 {
                return Err(ConfigError::TooSmall { key, value, min: 1 });
            }
            if value > i32::MAX as u32 {
                let max = i32::MAX as u32;
                return Err(ConfigError::TooLarge { key, value, max });
            }
        }
        if self.max_model_len < 2 {
            let (key, value) = ("max_model_len", self.max_model_len);
            return Err(ConfigError::TooSmall { key, value, min: 2 });
        }
        if self.max_num_seqs > self.max_num_batched_tokens {
            return Err(ConfigError::MoreSeqsThanTokens {
                max_num_seqs: self.max_num_seqs,
                max_num_batched_tokens: self.max_num_batched_tokens,
            });
        }
        let bounded = [
            ("num_kv_blocks", self.num_kv_blocks, MAX_KV_BLOCKS),
            ("num_host_kv_blocks", self.num_host_kv_blocks, MAX_KV_BLOCKS),
            (
                "max_in_flight_steps",
                self.max_in_flight_steps,
                MAX_IN_FLIGHT_STEPS,
            ),
        ];
        for (key, value, max) in bounded {
            if value > max {
                return Err(ConfigError::TooLarge { key, value, max });
            }
        }
        if self.num_host_kv_blocks > 0 && !self.enable_prefix_caching {
            return Err(ConfigError::Invalid {
                key: "num_host_kv_blocks".into(),
                value: self.num_host_kv_blocks.to_string(),
                allowed: "0 without prefix caching: blocks on the host are found by their content"
                    .into(),
            });
        }
        let pool_tokens = u64::from(self.num_kv_blocks) * u64::from(self.block_size);
        let max_model_len = u64::from(self.max_model_len).min(pool_tokens) as u32;
        if max_model_len < 2 {
            let (key, value) = ("num_kv_blocks", self.num_kv_blocks);
            return Err(ConfigError::TooSmall { key, value, min: 2 });
        }
        // Every plan carries all block tables, with int32 offsets.
        let table_blocks = max_model_len.div_ceil(self.block_size);
        let max_num_seqs = i32::MAX as u32 / table_blocks;
        if self.max_num_seqs > max_num_seqs {
            let (key, value, max) = ("max_num_seqs", self.max_num_seqs, max_num_seqs);
            return Err(ConfigError::TooLarge { key, value, max });
        }
        let watermark_blocks = self.watermark_blocks.unwrap_or(self.num_kv_blocks / 100);
        if watermark_blocks >= self.num_kv_blocks {
            return Err(ConfigError::TooLarge {
                key: "watermark_blocks",
                value: watermark_blocks,
                max: self.num_kv_blocks - 1,
            });
        }
        if self.max_queued_tokens == Some(0) {
            let (key, value) = ("max_queued_tokens", 0);
            return Err(ConfigError::TooSmall { key, value, min: 1 });
        }
        check_cost_model(self.cost_model)?;
        let rules = self.policy.validate()?;
        Ok(Limits {
            rules,
            settings: Settings {
                max_model_len,
                ..self.clone()
            },
            requested_max_model_len: self.max_model_len,
            watermark_blocks,
        })
    }
}

/// Refuses coefficients with which time could run backwards.
fn check_cost_model(coefficients: Option<Coefficients>) -> Result<(), ConfigError> {
    for (name, value) in coefficients.unwrap_or_default().named() {
        if !(0.0..=1e12).contains(&value) {
            return Err(ConfigError::Invalid {
                key: format!("cost_model.{name}"),
                value: value.to_string(),
                allowed: "from 0 to 1e12".into(),
            });
        }
    }
    Ok(())
}

/// Settings that have been checked; read-only.
#[derive(Clone, Debug)]
pub struct Limits {
    settings: Settings,
    requested_max_model_len: u32,
    watermark_blocks: u32,
    rules: Rules,
}

impl Limits {
    /// Most sequences that run at once.
    pub fn max_num_seqs(&self) -> u32 {
        self.settings.max_num_seqs
    }

    /// Token budget of one iteration.
    pub fn max_num_batched_tokens(&self) -> u32 {
        self.settings.max_num_batched_tokens
    }

    /// Longest sequence in tokens; never more than the pool holds.
    pub fn max_model_len(&self) -> u32 {
        self.settings.max_model_len
    }

    /// The `max_model_len` that was asked for; larger than [`Self::max_model_len`] when the pool was
    /// too small for it, which the caller has to say.
    pub fn requested_max_model_len(&self) -> u32 {
        self.requested_max_model_len
    }

    /// Longest prefill chunk of one sequence in one iteration, in tokens.
    pub fn max_chunk_tokens(&self) -> u32 {
        self.settings
            .long_prefill_token_threshold
            .unwrap_or(self.settings.max_num_batched_tokens)
    }

    /// Tokens a KV block holds.
    pub fn block_size(&self) -> u32 {
        self.settings.block_size
    }

    /// Blocks in the KV pool.
    pub fn num_kv_blocks(&self) -> u32 {
        self.settings.num_kv_blocks
    }

    /// Blocks of the second tier, on the host.
    pub fn num_host_kv_blocks(&self) -> u32 {
        self.settings.num_host_kv_blocks
    }

    /// Whether full blocks are found again by their content.
    pub fn prefix_caching(&self) -> bool {
        self.settings.enable_prefix_caching
    }

    /// Blocks that a newcomer leaves free while others run.
    pub fn watermark_blocks(&self) -> u32 {
        self.watermark_blocks
    }

    /// Most requests at the door and in the waiting queue together.
    pub fn max_queued_requests(&self) -> u32 {
        self.settings.max_queued_requests
    }

    /// Most prompt tokens in the waiting queue.
    pub fn max_queued_tokens(&self) -> Option<u64> {
        self.settings.max_queued_tokens
    }

    /// The policy the engine starts with.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Tokens of the vocabulary.
    pub fn vocab_size(&self) -> u32 {
        self.settings.vocab_size
    }

    /// Most steps that the executor has at once.
    pub fn max_in_flight_steps(&self) -> u32 {
        self.settings.max_in_flight_steps
    }

    /// What the cost model begins with.
    pub fn cost_model(&self) -> Option<Coefficients> {
        self.settings.cost_model
    }

    /// Blocks that hold `tokens` tokens.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.settings.block_size)
    }
}

/// What the engine knows of the model's tokens.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    /// Bytes of each token.
    pub tokens: Arc<TokenTable>,
    /// Tokens that end a sequence unless a request ignores them.
    pub eos_token_ids: Vec<u32>,
}
