//! How memory is handed out while it is short: who may go ahead of a request that does not fit.
//!
//! Only names and numbers; the rules are in [`crate::iteration`] and [`crate::predict`].

use crate::error::ConfigError;

/// Who may be admitted while the first of the queue does not fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Backfill {
    /// Nobody: strictly in the queue's order.
    Off,
    /// Whoever fits without moving the time at which the first will (EASY).
    #[default]
    Easy,
    /// Whoever fits: a stream of small requests can keep a big one waiting for ever. A baseline.
    Unprotected,
}

/// Most candidates that may be looked at in an iteration.
pub const MAX_BACKFILL_CANDIDATES: u32 = 256;

/// How memory is handed out.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MemorySettings {
    /// Who may be admitted while the first of the queue does not fit.
    pub backfill: Backfill,
    /// Most waiting requests behind the first that are looked at in an iteration.
    pub backfill_candidates: u32,
}

impl Default for MemorySettings {
    fn default() -> Self {
        Self {
            backfill: Backfill::default(),
            backfill_candidates: 16,
        }
    }
}

impl MemorySettings {
    /// Checks every number.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if (1..=MAX_BACKFILL_CANDIDATES).contains(&self.backfill_candidates) {
            return Ok(());
        }
        Err(ConfigError::Invalid {
            key: "memory.backfill_candidates".into(),
            value: self.backfill_candidates.to_string(),
            allowed: format!("from 1 to {MAX_BACKFILL_CANDIDATES}"),
        })
    }
}
