//! How careful a forecast has to be: a quantile steered by what came of it.
//!
//! An admission overflows if at least one preemption for memory happened, to anybody, while it was
//! admitted: from taking its memory to its end or its own preemption. The share of admissions that
//! overflow is to be the target. No model says which quantile of the length beliefs does that (errors of
//! answers that run together average out, those of a belief that is behind the times do not), so the
//! quantile is steered: each admission that ends moves it by [`GAIN`] times how far its outcome is
//! from the target. That is the online update of adaptive conformal inference (Gibbs and Candes,
//! 2021): over `T` admissions, the realised share differs from the target by at most `1 / (GAIN * T)`,
//! whatever lengths do, while the quantile is not at an end of its range. At 0 the forecast is
//! optimistic (a token more each), at 1 it reserves `max_tokens`.
//!
//! An admission that did not overflow says nothing where the forecast held nobody back during it:
//! memory was plenty, and becoming bolder then would only be paid for at the next rush. It is counted,
//! but moves nothing.

/// What an outcome moves the quantile by.
const GAIN: f64 = 0.005;
/// Where the quantile starts.
const FIRST_QUANTILE: f64 = 0.8;
/// Admissions that the realised share remembers.
const MEMORY: u32 = 1_000;

/// The quantile, and what was realised with it.
#[derive(Clone, Debug)]
pub struct OverflowControl {
    quantile: f64,
    realised: f64,
    /// Admissions in `realised`.
    known: u32,
    preemptions: u64,
    refusals: u64,
    begun: u64,
    ended: u64,
    overflowed: u64,
}

/// The life of an admission that has not ended: what had happened when it began.
#[derive(Clone, Copy, Debug)]
pub struct Life {
    preemptions: u64,
    refusals: u64,
}

impl Default for OverflowControl {
    fn default() -> Self {
        Self {
            quantile: FIRST_QUANTILE,
            realised: 0.0,
            known: 0,
            preemptions: 0,
            refusals: 0,
            begun: 0,
            ended: 0,
            overflowed: 0,
        }
    }
}

impl OverflowControl {
    /// Somebody takes memory.
    pub fn begin(&mut self) -> Life {
        self.begun += 1;
        Life {
            preemptions: self.preemptions,
            refusals: self.refusals,
        }
    }

    /// It gave its memory back. With a `target`, what came of it steers the quantile.
    pub fn end(&mut self, life: Life, target: Option<f64>) {
        self.ended += 1;
        let has_overflowed = self.preemptions > life.preemptions;
        let was_bound = self.refusals > life.refusals;
        let outcome = f64::from(u8::from(has_overflowed));
        self.overflowed += u64::from(has_overflowed);
        self.known = (self.known + 1).min(MEMORY);
        self.realised += (outcome - self.realised) / f64::from(self.known);
        if let Some(target) = target.filter(|_| has_overflowed || was_bound) {
            self.quantile = (self.quantile + GAIN * (outcome - target)).clamp(0.0, 1.0);
        }
    }

    /// Somebody is preempted because there is no block for a decode.
    pub fn preempted(&mut self) {
        self.preemptions += 1;
    }

    /// The forecast held somebody back for whom there was room now.
    pub fn refused(&mut self) {
        self.refusals += 1;
    }

    /// The quantile of the length beliefs that a forecast reckons with.
    pub fn quantile(&self) -> f64 {
        self.quantile
    }

    /// Share of the last thousand admissions or so that overflowed.
    pub fn realised(&self) -> f64 {
        self.realised
    }

    /// Admissions that ended.
    pub fn ended(&self) -> u64 {
        self.ended
    }

    /// Those of them that overflowed.
    pub fn overflowed(&self) -> u64 {
        self.overflowed
    }

    /// Admissions that have not ended.
    pub fn live(&self) -> u64 {
        self.begun - self.ended
    }

    /// A number that differs whenever somebody has begun or ended since.
    pub fn changes(&self) -> u64 {
        self.begun + self.ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ends an admission that was bound, and during which somebody was preempted or not.
    fn live(control: &mut OverflowControl, overflows: bool, target: Option<f64>) {
        let life = control.begin();
        control.refused();
        if overflows {
            control.preempted();
        }
        control.end(life, target);
    }

    #[test]
    fn the_realised_share_meets_the_target_whatever_the_cause_does() {
        let mut control = OverflowControl::default();
        let (mut overflowed, mut quantiles) = (0, Vec::new());
        // A preemption happens where the quantile is below a level, which changes half-way.
        for at in 0..20_000_u32 {
            let level = if at < 10_000 { 0.35 } else { 0.75 };
            let noise = f64::from(at * 7_919 % 101) / 500.0 - 0.1;
            let overflows = control.quantile() < level + noise;
            overflowed += u32::from(overflows);
            live(&mut control, overflows, Some(0.1));
            quantiles.push(control.quantile());
        }
        let share = f64::from(overflowed) / 20_000.0;
        assert!((share - 0.1).abs() < 0.01, "{share}");
        assert!(
            (control.realised() - 0.1).abs() < 0.03,
            "{}",
            control.realised()
        );
        assert!((quantiles[9_999] - 0.4).abs() < 0.1, "{}", quantiles[9_999]);
        assert!(
            (quantiles[19_999] - 0.8).abs() < 0.1,
            "{}",
            quantiles[19_999]
        );
        assert_eq!(
            (control.ended(), control.overflowed()),
            (20_000, overflowed.into())
        );
    }

    #[test]
    fn nothing_is_learned_where_memory_is_plenty() {
        let mut control = OverflowControl::default();
        for _ in 0..10_000 {
            let life = control.begin();
            control.end(life, Some(0.05));
        }
        assert!((control.quantile() - FIRST_QUANTILE).abs() < 1e-9);
        assert!(control.realised() < 1e-9);
        live(&mut control, true, None);
        assert!(
            (control.quantile() - FIRST_QUANTILE).abs() < 1e-9,
            "no target"
        );
    }

    #[test]
    fn what_happened_before_an_admission_is_not_its_own() {
        let mut control = OverflowControl::default();
        control.preempted();
        let (first, before) = (control.begin(), control.changes());
        let second = control.begin();
        assert_ne!(control.changes(), before);
        control.end(first, Some(0.05));
        control.preempted();
        control.end(second, Some(0.05));
        assert_eq!((control.ended(), control.overflowed()), (2, 1));
    }
}
