//! How long iterations may take: the governor's numbers.
//!
//! The rules are in [`crate::iteration`] (`governor`); here they only have their names.

use crate::config::policy::{ClassSettings, at_least_one};
use crate::error::ConfigError;

/// How long iterations may take while output is being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Pace {
    /// Whether prefill is cut, and admission held, so that iterations keep their target.
    pub governor: bool,
    /// Target of every iteration in which somebody decodes, in microseconds; `None` is that of the
    /// classes that decode in it.
    pub iteration_target_us: Option<u64>,
    /// Prefill tokens that every iteration may have whatever its target; `None` is one block.
    pub min_prefill_tokens: Option<u32>,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            governor: true,
            iteration_target_us: None,
            min_prefill_tokens: None,
        }
    }
}

impl Pace {
    /// Checks every number.
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        at_least_one("pace.iteration_target".into(), self.iteration_target_us)?;
        let least = self.min_prefill_tokens.map(u64::from);
        at_least_one("pace.min_prefill_tokens".into(), least)
    }

    /// Whether any iteration can have a target.
    pub fn is_governed(&self, classes: &[ClassSettings]) -> bool {
        let has_target = |class: &ClassSettings| class.tpot_target_us.is_some();
        self.governor && (self.iteration_target_us.is_some() || classes.iter().any(has_target))
    }
}
