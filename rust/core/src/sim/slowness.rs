//! How slow the machine is at a moment.
//!
//! A real machine has slow seconds: the logarithm of measured over predicted time is correlated over
//! many iterations. Where it was recorded how slow the machine was ([`Stretch`]), that is taken.
//! Else it is an Ornstein-Uhlenbeck process (Uhlenbeck and Ornstein, On the theory of
//! the Brownian motion, Physical Review 36, 1930), which is moved from one moment to the next exactly,
//! however far apart they are (Gillespie, Exact numerical simulation of the Ornstein-Uhlenbeck process
//! and its integral, Physical Review E 54, 1996):
//!
//! ```text
//! x <- x * exp(-dt / slow_s) + slow_sigma * sqrt(1 - exp(-2 dt / slow_s)) * normal
//! ```
//! It begins stationary and runs on while the machine idles. Iterations take `exp(x)` times as long. The
//! profile only says how it moves; where it is belongs to the world.

use crate::sim::profile::CostProfile;
use crate::sim::random::{Cause, Random};
use crate::sim::{SimConfig, SimError};

/// From when on a machine was so slow, until the next stretch begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stretch {
    /// In microseconds from the workload's start.
    pub start_us: u64,
    /// How many times as long iterations take that begin in it.
    pub factor: f64,
}

/// Most that [`Stretch::factor`] may be.
const MOST_SLOW: f64 = 1_000.0;

/// Checks that stretches follow each other and time never runs backwards.
pub(crate) fn validate(stretches: &[Stretch]) -> Result<(), SimError> {
    let mut last_us = 0;
    for (at, stretch) in stretches.iter().enumerate() {
        let refuse = |field, value, allowed| SimError::Slowness {
            stretch: at,
            field,
            value,
            allowed,
        };
        if stretch.start_us < last_us {
            let before = "not before the one ahead of it";
            return Err(refuse("start_us", stretch.start_us.to_string(), before));
        }
        last_us = stretch.start_us;
        if !(stretch.factor > 0.0 && stretch.factor <= MOST_SLOW) {
            let allowed = "above 0 and at most 1000";
            return Err(refuse("factor", stretch.factor.to_string(), allowed));
        }
    }
    Ok(())
}

/// How slow the machine is, as it was recorded or as chance has it.
pub(crate) enum Slowness<'a> {
    Recorded(Recorded<'a>),
    Drawn(Process),
}

impl<'a> Slowness<'a> {
    pub(crate) fn new(config: &'a SimConfig) -> Self {
        match &config.slowness {
            Some(stretches) => Self::Recorded(Recorded {
                stretches,
                factor: 1.0,
            }),
            None => Self::Drawn(Process::new(&config.profile, config.seed)),
        }
    }

    /// How many times as long an iteration takes that begins at `now_us`, which must not be before the
    /// time of the call before.
    pub(crate) fn at(&mut self, now_us: u64) -> f64 {
        match self {
            Self::Recorded(recorded) => recorded.at(now_us),
            Self::Drawn(process) => process.at(now_us),
        }
    }
}

/// What was recorded, from where it was last asked for.
pub(crate) struct Recorded<'a> {
    /// Those that are still to come.
    stretches: &'a [Stretch],
    factor: f64,
}

impl Recorded<'_> {
    fn at(&mut self, now_us: u64) -> f64 {
        while let [first, rest @ ..] = self.stretches
            && first.start_us <= now_us
        {
            self.factor = first.factor;
            self.stretches = rest;
        }
        self.factor
    }
}

/// The process, where it was when it was last asked for.
pub(crate) struct Process {
    sigma: f64,
    memory_us: f64,
    random: Random,
    /// Logarithm of the factor.
    log: f64,
    at_us: u64,
}

impl Process {
    /// The process of `profile` at time 0, with a random stream of its own.
    fn new(profile: &CostProfile, seed: u64) -> Self {
        let mut random = Random::new(seed, Cause::Slowness);
        Self {
            sigma: profile.slow_sigma,
            memory_us: profile.slow_s * 1e6,
            log: profile.slow_sigma * random.normal(),
            random,
            at_us: 0,
        }
    }

    /// How many times as long iterations take at `now_us`, which must not be before the time of the
    /// call before. A process without memory (`slow_s` is 0) is drawn anew at each call.
    fn at(&mut self, now_us: u64) -> f64 {
        if self.sigma == 0.0 {
            return 1.0;
        }
        let gap_us = (now_us - self.at_us) as f64;
        self.at_us = now_us;
        let kept = if self.memory_us > 0.0 {
            (-gap_us / self.memory_us).exp()
        } else {
            0.0
        };
        let fresh = self.sigma * (1.0 - kept * kept).sqrt();
        self.log = self.log * kept + fresh * self.random.normal();
        self.log.exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIGMA: f64 = 0.3;
    const MEMORY_S: f64 = 4.0;

    fn process(seed: u64, slow_sigma: f64, slow_s: f64) -> Process {
        let profile = CostProfile {
            slow_sigma,
            slow_s,
            ..CostProfile::GPU_8B
        };
        Process::new(&profile, seed)
    }

    /// Logarithms of the factor at the times.
    fn logs(process: &mut Process, at_us: impl Iterator<Item = u64>) -> Vec<f64> {
        at_us.map(|now_us| process.at(now_us).ln()).collect()
    }

    fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
        let count = values.len() as f64;
        values.sum::<f64>() / count
    }

    /// Mean product of values `lag` apart.
    fn covariance(values: &[f64], lag: usize) -> f64 {
        let pairs = values.iter().zip(&values[lag..]);
        mean(pairs.map(|(before, after)| before * after))
    }

    #[test]
    fn it_is_stationary_and_forgets_by_an_exponential() {
        const STEP_US: u64 = 500_000;
        let found = logs(
            &mut process(1, SIGMA, MEMORY_S),
            (0..400_000).map(|step| step * STEP_US),
        );
        let average = mean(found.iter().copied());
        assert!(average.abs() < 0.01, "mean {average}");
        let variance = covariance(&found, 0);
        assert!(
            (variance / SIGMA.powi(2) - 1.0).abs() < 0.03,
            "variance {variance}"
        );
        for lag in [1, 8, 24] {
            let got = covariance(&found, lag) / variance;
            let expected = (-(lag as f64) * STEP_US as f64 / 1e6 / MEMORY_S).exp();
            assert!(
                (got - expected).abs() < 0.02,
                "lag {lag}: {got}, not {expected}"
            );
        }
    }

    #[test]
    fn it_begins_stationary_and_gaps_of_any_length_are_exact() {
        // Two moments, 8 s apart, of many processes: one gets there in a leap, the other in 80 steps.
        let leap = [0, 8_000_000];
        let steps = (0..=80).map(|step| step * 100_000);
        let ends = |at_us: &[u64]| -> Vec<(f64, f64)> {
            let both = |seed| {
                let found = logs(&mut process(seed, SIGMA, MEMORY_S), at_us.iter().copied());
                (found[0], found[found.len() - 1])
            };
            (0..20_000).map(both).collect()
        };
        for ends in [ends(&leap), ends(&steps.collect::<Vec<_>>())] {
            let first = mean(ends.iter().map(|ends| ends.0.powi(2))) / SIGMA.powi(2);
            let last = mean(ends.iter().map(|ends| ends.1.powi(2))) / SIGMA.powi(2);
            let between = mean(ends.iter().map(|ends| ends.0 * ends.1)) / SIGMA.powi(2);
            assert!((first - 1.0).abs() < 0.05, "variance {first} at first");
            assert!((last - 1.0).abs() < 0.05, "variance {last} at last");
            assert!((between - (-2.0_f64).exp()).abs() < 0.03, "{between}");
        }
    }

    #[test]
    fn without_memory_each_call_is_a_draw_of_its_own() {
        let found = logs(
            &mut process(2, SIGMA, 0.0),
            (0..50_000).map(|at| at / 2), // also twice at one moment
        );
        let variance = covariance(&found, 0) / SIGMA.powi(2);
        assert!((variance - 1.0).abs() < 0.03, "variance {variance}");
        let next = covariance(&found, 1) / SIGMA.powi(2);
        assert!(next.abs() < 0.03, "correlation {next}");
    }

    #[test]
    fn a_machine_that_is_steady_is_as_fast_as_predicted() {
        let mut steady = process(3, 0.0, MEMORY_S);
        assert!((0..100).all(|at| steady.at(at * 1_000).to_bits() == 1.0_f64.to_bits()));
    }

    #[test]
    fn what_was_recorded_holds_until_the_next_stretch() {
        let stretches = [(10, 2.0), (20, 0.5), (20, 3.0), (40, 0.7)]
            .map(|(start_us, factor)| Stretch { start_us, factor });
        let mut recorded = Recorded {
            stretches: &stretches,
            factor: 1.0,
        };
        let found =
            [0, 9, 10, 19, 20, 20, 39, 40, 1_000].map(|now_us| recorded.at(now_us).to_bits());
        let expected = [1.0_f64, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0, 0.7, 0.7];
        assert_eq!(found, expected.map(f64::to_bits));
    }
}
