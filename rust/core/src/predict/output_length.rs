//! How long an answer will be: a running mean of those that ended.

/// Answers that the mean remembers.
const MEMORY: u32 = 1_000;
/// What an answer is taken to be while none has ended, in tokens.
const FIRST_GUESS: f64 = 128.0;

/// A running mean of output lengths, in tokens; the newest count as one in [`MEMORY`] at least.
#[derive(Clone, Copy, Debug, Default)]
pub struct MeanLength {
    mean: f64,
    count: u32,
}

impl MeanLength {
    /// Counts an answer that ended.
    pub fn learn(&mut self, tokens: u32) {
        self.count = (self.count + 1).min(MEMORY);
        self.mean += (f64::from(tokens) - self.mean) / f64::from(self.count);
    }

    /// Whether an answer was counted.
    pub fn is_known(self) -> bool {
        self.count > 0
    }

    /// The mean; where nothing was learned yet, that of `wider`, and there being none a guess.
    pub fn or(self, wider: Self) -> f64 {
        match (self.count, wider.count) {
            (0, 0) => FIRST_GUESS,
            (0, _) => wider.mean,
            _ => self.mean,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_is_learned_and_follows_a_change() {
        let mut own = MeanLength::default();
        let mut wider = MeanLength::default();
        assert!((own.or(wider) - FIRST_GUESS).abs() < 1e-9);
        wider.learn(10);
        assert!((own.or(wider) - 10.0).abs() < 1e-9);
        own.learn(20);
        own.learn(40);
        assert!((own.or(wider) - 30.0).abs() < 1e-9);
        for _ in 0..5_000 {
            own.learn(100);
        }
        assert!(own.or(wider) > 99.0, "{own:?}");
    }
}
