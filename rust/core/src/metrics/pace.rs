//! What iterations took of late, how much of it follows from what was in them, and how well it was
//! predicted.

use crate::metrics::{RecentMoments, RecentQuantiles};
use crate::predict::iteration_time::{CostModel, Prediction};

/// Power of two of the shortest time, in microseconds, that is told apart.
const LOWEST_US: i32 = 3;

/// Counts iterations.
#[derive(Clone, Debug)]
pub(crate) struct PaceBook {
    times: RecentQuantiles,
    time: RecentMoments,
    /// The same of those that were predicted, and what their composition left unexplained.
    predicted: RecentMoments,
    residual: RecentMoments,
    /// Error relative to the measured time, without its sign.
    error: RecentMoments,
    gap: RecentMoments,
    idle_us: u64,
    rows: RecentMoments,
    padded: RecentMoments,
    padded_rows: u64,
}

/// An iteration whose results came back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Beat {
    pub(crate) time_us: u64,
    pub(crate) prediction: Option<Prediction>,
    /// Since the results of the one before, if its sequences ran on.
    pub(crate) gap_us: Option<u64>,
    pub(crate) sequences: u64,
    pub(crate) padded: u64,
}

/// Iterations of late (the last few thousand); before the first all is 0, but the slowdown 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PaceMetrics {
    /// Mean time, in microseconds.
    pub mean_us: f64,
    /// Standard deviation of the time, in microseconds.
    pub std_us: f64,
    /// Median time, in microseconds.
    pub p50_us: f64,
    /// 95th percentile of the time, in microseconds.
    pub p95_us: f64,
    /// 99th percentile of the time, in microseconds.
    pub p99_us: f64,
    /// Share of the variance that the cost model explains by what was in the iterations: 1 less the
    /// variance of its errors over that of the times. Below 0 if the model is worse than the mean.
    pub explained_share: f64,
    /// Mean absolute error of its predictions, relative to the measured time.
    pub prediction_error: f64,
    /// How many times as long as the cost model learned iterations take now: above 1 while the machine is
    /// slower than over the last hundreds of iterations.
    pub slowdown: f64,
    /// Median of measured over predicted time.
    pub p50_ratio: f64,
    /// 95th percentile of measured over predicted time: how far the unlucky are behind.
    pub p95_ratio: f64,
    /// Mean time from the results of an iteration to the decision on the next, while somebody ran, in
    /// microseconds.
    pub gap_us: f64,
    /// Sum of those gaps since the start, in microseconds.
    pub idle_us: u64,
    /// Share of the rows that were padding.
    pub padded_share: f64,
    /// Rows that were padding since the start, summed over the iterations.
    pub padded_rows: u64,
}

impl Default for PaceBook {
    fn default() -> Self {
        Self {
            times: RecentQuantiles::new(LOWEST_US),
            time: RecentMoments::default(),
            predicted: RecentMoments::default(),
            residual: RecentMoments::default(),
            error: RecentMoments::default(),
            gap: RecentMoments::default(),
            idle_us: 0,
            rows: RecentMoments::default(),
            padded: RecentMoments::default(),
            padded_rows: 0,
        }
    }
}

impl PaceBook {
    /// Counts an iteration.
    pub(crate) fn observe(&mut self, beat: &Beat) {
        let time_us = beat.time_us as f64;
        self.times.observe(time_us);
        self.time.observe(time_us);
        if let Some(prediction) = beat.prediction {
            self.predicted.observe(time_us);
            self.residual.observe(time_us - prediction.learned_us);
            let error_us = (time_us - prediction.now_us).abs();
            self.error.observe(error_us / time_us.max(1.0));
        }
        if let Some(gap_us) = beat.gap_us {
            self.gap.observe(gap_us as f64);
            self.idle_us += gap_us;
        }
        self.rows.observe((beat.sequences + beat.padded) as f64);
        self.padded.observe(beat.padded as f64);
        self.padded_rows += beat.padded;
    }

    /// What was counted, and how far the cost model was off.
    pub(crate) fn metrics(&self, costs: &CostModel) -> PaceMetrics {
        let quantile = |q| self.times.quantile(q).unwrap_or(0.0);
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        let explained = self.predicted.variance() - self.residual.variance();
        PaceMetrics {
            mean_us: self.time.mean(),
            std_us: self.time.variance().sqrt(),
            p50_us: quantile(0.5),
            p95_us: quantile(0.95),
            p99_us: quantile(0.99),
            explained_share: share(explained, self.predicted.variance()),
            prediction_error: self.error.mean(),
            slowdown: costs.slowdown(),
            p50_ratio: costs.ratio(0.5).unwrap_or(0.0),
            p95_ratio: costs.ratio(0.95).unwrap_or(0.0),
            gap_us: self.gap.mean(),
            idle_us: self.idle_us,
            padded_share: share(self.padded.mean(), self.rows.mean()),
            padded_rows: self.padded_rows,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_variance_is_explained_by_a_composition_that_tells_half_of_it() {
        let mut book = PaceBook::default();
        let costs = CostModel::default();
        let nothing = PaceMetrics {
            slowdown: 1.0,
            ..PaceMetrics::default()
        };
        assert_eq!(book.metrics(&costs), nothing);
        for at in 0..4_000_u64 {
            // Two independent coins of equal weight: the composition tells the first, and the
            // speed of the machine the second.
            let (seen, unseen) = (at % 2 * 1_000, at / 2 % 2 * 1_000);
            book.observe(&Beat {
                time_us: 10_000 + seen + unseen,
                prediction: Some(Prediction {
                    learned_us: 10_500.0 + seen as f64,
                    now_us: 10_200.0 + (seen + unseen) as f64,
                }),
                gap_us: (at % 4 > 0).then_some(30),
                sequences: 3,
                padded: at % 2 * 2,
            });
        }
        let metrics = book.metrics(&costs);
        assert!((metrics.explained_share - 0.5).abs() < 0.01, "{metrics:?}");
        assert!((metrics.prediction_error - 200.0 / 11_000.0).abs() < 0.001);
        assert!((metrics.mean_us - 11_000.0).abs() < 1.0);
        assert!((metrics.std_us - 707.0).abs() < 2.0);
        assert!((metrics.p99_us / 12_000.0 - 1.0).abs() < 0.03);
        assert!((metrics.gap_us - 30.0).abs() < 1e-9);
        assert_eq!((metrics.idle_us, metrics.padded_rows), (90_000, 4_000));
        assert!((metrics.padded_share - 0.25).abs() < 0.001);
    }
}
