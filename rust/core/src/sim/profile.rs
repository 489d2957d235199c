//! What an iteration costs.

use crate::iteration::join::Padding;
use crate::iteration::plan::StepPlan;
use crate::predict::iteration_time::Coefficients;
use crate::sim::SimError;
use crate::sim::random::Random;

/// The time of an iteration as a function of what is in it, in seconds:
///
/// ```text
/// t0 + t_seq * sequences + max(t_w, t_tok * tokens) + t_ctx * (sum of the decodes' contexts)
///    + t_pair * (sum over prefill chunks of chunk * (context before + chunk / 2)) + t_sample * samples
///    + t_copy * (blocks copied from and to the host)
/// ```
/// times lognormal noise, of which one part is each iteration's own and the other lasts: the machine is
/// slow or fast for some seconds (`slow_sigma`, `slow_s`; see `slowness`). A sequence that is done and stays
/// until all of its batch are (static batching) costs what a decode costs: its row is computed all the same.
/// The maximum is the roofline of the linear layers: reading the weights, or the arithmetic of the tokens,
/// whichever takes longer; the terms of contexts and pairs are attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostProfile {
    /// Every iteration.
    pub t0_s: f64,
    /// A sequence.
    pub t_seq_s: f64,
    /// Reading the weights once.
    pub t_w_s: f64,
    /// A token's arithmetic in the linear layers.
    pub t_tok_s: f64,
    /// A token of a decode's context.
    pub t_ctx_s: f64,
    /// A pair of a prefill token and a token before it.
    pub t_pair_s: f64,
    /// A row of logits that is sampled.
    pub t_sample_s: f64,
    /// A block that is copied from or to the host.
    pub t_copy_s: f64,
    /// Standard deviation of the logarithm of the noise that is each iteration's own.
    pub noise_sigma: f64,
    /// Standard deviation of the logarithm of how many times as long iterations take at a moment.
    pub slow_sigma: f64,
    /// Seconds after which that logarithm's correlation is 1/e; with 0 it is each iteration's own, too.
    pub slow_s: f64,
}

impl CostProfile {
    /// Llama-3.1-8B in bf16 on one GPU of the H100's class, analytic: 3.0 TB/s and 500 TFLOP/s
    /// sustained; 131,072 bytes of KV a token.
    pub const GPU_8B: Self = Self {
        t0_s: 0.6e-3,
        t_seq_s: 4e-6,
        t_w_s: 5.4e-3,
        t_tok_s: 32e-6,
        t_ctx_s: 0.0437e-6,
        t_pair_s: 1.31e-9,
        t_sample_s: 0.0,
        t_copy_s: 0.0,
        noise_sigma: 0.03,
        slow_sigma: 0.0,
        slow_s: 0.0,
    };
    /// Blocks of 16 in the pool of [`Self::GPU_8B`]: 60 GB.
    pub const GPU_8B_BLOCKS: u32 = 28_600;
    /// The same with a small pool.
    pub const GPU_8B_SMALL_BLOCKS: u32 = 4_000;

    /// Names and values, in the order of the formula.
    pub fn named(&self) -> [(&'static str, f64); 11] {
        [
            ("t0_s", self.t0_s),
            ("t_seq_s", self.t_seq_s),
            ("t_w_s", self.t_w_s),
            ("t_tok_s", self.t_tok_s),
            ("t_ctx_s", self.t_ctx_s),
            ("t_pair_s", self.t_pair_s),
            ("t_sample_s", self.t_sample_s),
            ("t_copy_s", self.t_copy_s),
            ("noise_sigma", self.noise_sigma),
            ("slow_sigma", self.slow_sigma),
            ("slow_s", self.slow_s),
        ]
    }

    /// The same as a cost model has it.
    pub fn coefficients(&self) -> Coefficients {
        Coefficients {
            t0_us: self.t0_s * 1e6,
            t_seq_us: self.t_seq_s * 1e6,
            t_weights_us: self.t_w_s * 1e6,
            t_tok_us: self.t_tok_s * 1e6,
            t_ctx_us: self.t_ctx_s * 1e6,
            t_pair_us: self.t_pair_s * 1e6,
            t_sample_us: self.t_sample_s * 1e6,
            t_copy_us: self.t_copy_s * 1e6,
            most_tokens: 0.0,
        }
    }

    /// Seconds that the plan's iteration takes without noise, with rows beside it that are padding.
    pub fn seconds(&self, plan: &StepPlan, padding: Padding) -> f64 {
        let decodes = plan.seq_lens[..plan.num_decodes].iter();
        let contexts = decodes.map(|&context| context as u64).sum::<u64>() + padding.context_tokens;
        let padded = padding.sequences as usize;
        let pairs: f64 = (plan.num_decodes..plan.num_seqs())
            .map(|at| {
                let chunk = plan.query_start_loc[at + 1] - plan.query_start_loc[at];
                let before = plan.seq_lens[at] - chunk;
                f64::from(chunk) * (f64::from(before) + f64::from(chunk) / 2.0)
            })
            .sum();
        self.t0_s
            + self.t_seq_s * (plan.num_seqs() + padded) as f64
            + self
                .t_w_s
                .max(self.t_tok_s * (plan.num_tokens() + padded) as f64)
            + self.t_ctx_s * contexts as f64
            + self.t_pair_s * pairs
            + self.t_sample_s * plan.num_samples() as f64
            + self.t_copy_s * plan.num_host_copies() as f64
    }

    /// Microseconds that the plan's iteration takes, noise included, on a machine that takes `slowness`
    /// times as long at the moment; at least 1.
    pub(crate) fn duration_us(
        &self,
        plan: &StepPlan,
        padding: Padding,
        noise: &mut Random,
        slowness: f64,
    ) -> u64 {
        let factor = if self.noise_sigma > 0.0 {
            (self.noise_sigma * noise.normal()).exp()
        } else {
            1.0
        };
        ((self.seconds(plan, padding) * factor * slowness * 1e6).round() as u64).max(1)
    }

    /// Checks that time is a finite number and never runs backwards.
    pub(crate) fn validate(&self) -> Result<(), SimError> {
        for (field, value) in self.named() {
            let most = match field {
                "t0_s" | "t_w_s" | "slow_s" => 3_600.0,
                _ => 1.0,
            };
            if !(0.0..=most).contains(&value) {
                return Err(SimError::Profile {
                    field,
                    value: value.to_string(),
                    allowed: "from 0 to 1 (t0_s, t_w_s and slow_s: to 3600)",
                });
            }
        }
        Ok(())
    }
}
