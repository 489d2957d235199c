//! How KV memory is handed out: when there is room for a newcomer, and who may go ahead of one for whom
//! there is none.
//!
//! Only names and numbers; the rules are in [`crate::iteration`] and [`crate::predict`].

use crate::config::policy::invalid;
use crate::error::ConfigError;

/// When there is memory for a newcomer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum MemoryAdmission {
    /// When its tokens fit now, above a watermark. What grows later may preempt.
    #[default]
    Optimistic,
    /// When everything that it and all that run may grow to fits. Nobody is preempted for memory.
    Reserve,
    /// When the future peak of all, by what was learned of output lengths, fits.
    Forecast,
}

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
    /// When there is memory for a newcomer.
    pub admission: MemoryAdmission,
    /// Share of admissions during whose life somebody may be preempted for memory, that
    /// [`MemoryAdmission::Forecast`] aims at.
    pub overflow: f64,
    /// Who may be admitted while the first of the queue does not fit.
    pub backfill: Backfill,
    /// Most waiting requests behind the first that are looked at in an iteration.
    pub backfill_candidates: u32,
}

impl Default for MemorySettings {
    fn default() -> Self {
        Self {
            admission: MemoryAdmission::default(),
            overflow: 0.05,
            backfill: Backfill::default(),
            backfill_candidates: 16,
        }
    }
}

impl MemorySettings {
    /// Checks the numbers.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if !(self.overflow > 0.0 && self.overflow <= 0.5) {
            let allowed = "more than 0 and at most 0.5";
            return Err(invalid("memory.overflow", self.overflow, allowed));
        }
        if !(1..=MAX_BACKFILL_CANDIDATES).contains(&self.backfill_candidates) {
            let allowed = format!("from 1 to {MAX_BACKFILL_CANDIDATES}");
            let candidates = self.backfill_candidates;
            return Err(invalid("memory.backfill_candidates", candidates, allowed));
        }
        Ok(())
    }

    /// The target that the forecast is steered by, where there is a forecast.
    pub(crate) fn target(&self) -> Option<f64> {
        (self.admission == MemoryAdmission::Forecast).then_some(self.overflow)
    }
}
