//! How the memory of a newcomer is reckoned with.

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

/// How memory is shared out.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MemorySettings {
    /// When there is memory for a newcomer.
    pub admission: MemoryAdmission,
    /// Share of admissions during whose life somebody may be preempted for memory, that
    /// [`MemoryAdmission::Forecast`] aims at.
    pub overflow: f64,
}

impl Default for MemorySettings {
    fn default() -> Self {
        Self {
            admission: MemoryAdmission::default(),
            overflow: 0.05,
        }
    }
}

impl MemorySettings {
    /// Checks the numbers.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if self.overflow > 0.0 && self.overflow <= 0.5 {
            return Ok(());
        }
        let allowed = "more than 0 and at most 0.5";
        Err(invalid("memory.overflow", self.overflow, allowed))
    }

    /// The target that the forecast is steered by, where there is a forecast.
    pub(crate) fn target(&self) -> Option<f64> {
        (self.admission == MemoryAdmission::Forecast).then_some(self.overflow)
    }
}
