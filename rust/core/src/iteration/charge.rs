//! Who pays for what: the one place that turns work into service of a flow.
//!
//! A prompt is charged when its request is admitted (VTC, OSDI'24), so that the next choice knows of
//! it; what of it has not run when the sequence is preempted or ends is refunded, exactly. Prompt tokens
//! that the prefix cache has are charged at their own price. Output is charged as it comes, unless its
//! predicted length was charged at admission; then only what goes beyond is, and what was not used is
//! refunded at the end. Nothing is charged twice: what is computed again after a preemption is free.
//!
//! With device time as the price, work costs its share of its iteration's time: by the terms of the cost
//! model once that is known, else by tokens. The prompt is charged by the time that a token took of
//! late, and corrected when its chunk has run.

use crate::config::policy::Price;
use crate::iteration::ledger::Ledger;
use crate::iteration::sequence::Sequence;
use crate::request::SequenceKey;
use crate::waiting::fairness::{FlowKey, Flows};
use crate::waiting::order::Units;

/// Prices in thousandths of their unit: a token's price, or a microsecond.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Prices {
    /// So much for each token.
    Tokens {
        input: Units,
        cached: Units,
        output: Units,
    },
    /// A nanosecond of device time is one.
    DeviceTime,
}

impl Prices {
    pub(crate) fn new(price: Price) -> Self {
        let thousandths = |price: f64| (price * 1_000.0).round() as Units;
        match price {
            Price::Tokens {
                input,
                cached,
                output,
            } => Self::Tokens {
                input: thousandths(input),
                cached: thousandths(cached),
                output: thousandths(output),
            },
            Price::DeviceTime => Self::DeviceTime,
        }
    }

    /// Price of an input token, where one takes `token_ns` of device time.
    pub(crate) fn input(self, token_ns: u64) -> Units {
        match self {
            Self::Tokens { input, .. } => input,
            Self::DeviceTime => token_ns,
        }
    }

    /// Price of an output token.
    pub(crate) fn output(self, token_ns: u64) -> Units {
        match self {
            Self::Tokens { output, .. } => output,
            Self::DeviceTime => token_ns,
        }
    }
}

impl Sequence {
    /// Takes the share of so many prompt tokens, after those that were charged, out of what was charged
    /// ahead.
    fn release(&mut self, num_charged: u32, num_tokens: u32) -> Units {
        let left = u64::from(self.num_prompt_tokens.saturating_sub(num_charged)).max(1);
        let released = if u64::from(num_tokens) == left {
            self.prepaid
        } else {
            (u128::from(self.prepaid) * u128::from(num_tokens) / u128::from(left)) as Units
        };
        self.prepaid -= released;
        released
    }
}

impl Ledger {
    /// Charges what of a sequence's prompt was never charged, when it is admitted with so many tokens
    /// cached. The first time, `predicted_output` tokens are charged as well.
    pub(crate) fn charge_admission(
        &mut self,
        key: SequenceKey,
        num_cached: u32,
        predicted_output: u64,
    ) {
        let token_ns = self.forecast.token_ns();
        let sequence = &mut self.sequences[key.0];
        let prompt = sequence.num_prompt_tokens;
        let cached = num_cached.min(prompt);
        let mut units = 0;
        if let Prices::Tokens { cached: price, .. } = self.prices {
            units += price * u64::from(cached.saturating_sub(sequence.num_charged_tokens));
        }
        sequence.num_charged_tokens = sequence.num_charged_tokens.max(cached);
        let uncharged = prompt.saturating_sub(sequence.num_charged_tokens);
        sequence.prepaid = u64::from(uncharged) * self.prices.input(token_ns);
        sequence.prepaid_output = predicted_output * self.prices.output(token_ns);
        units += sequence.prepaid + sequence.prepaid_output;
        self.queue.flows_mut().charge(sequence.leaf, units);
    }

    /// Makes the charges that a commit put off.
    pub(crate) fn charge_deferred(&mut self) {
        self.deferred.charge(self.queue.flows_mut());
    }

    /// Accounts for tokens that a step copied from the host, the last that are computed: like those that the
    /// prefix cache has, at their price.
    pub(crate) fn charge_restored(&mut self, key: SequenceKey) {
        let sequence = &mut self.sequences[key.0];
        let (begin, end) = (sequence.num_charged_tokens, sequence.num_computed_tokens);
        if end <= begin {
            return;
        }
        sequence.num_charged_tokens = end;
        let num_tokens = end.min(sequence.num_prompt_tokens).saturating_sub(begin);
        let released = sequence.release(begin, num_tokens);
        let leaf = sequence.leaf;
        let price = match self.prices {
            Prices::Tokens { cached, .. } => cached,
            Prices::DeviceTime => 0,
        };
        let flows = self.queue.flows_mut();
        flows.refund(leaf, released);
        flows.charge(leaf, price * u64::from(num_tokens));
    }

    /// Gives back what was charged for work that has not run.
    pub(crate) fn refund(&mut self, key: SequenceKey) {
        let sequence = &mut self.sequences[key.0];
        let units =
            std::mem::take(&mut sequence.prepaid) + std::mem::take(&mut sequence.prepaid_output);
        if units > 0 {
            let leaf = sequence.leaf;
            self.queue.flows_mut().refund(leaf, units);
        }
    }
}

/// Charges of a step, summed up by leaf before they are made at all levels of flows. They must be made
/// before anybody looks at a counter: at the end of a commit, or when somebody ends.
#[derive(Default)]
pub(crate) struct Deferred {
    /// By the number of the leaf.
    units: Vec<Units>,
    /// Leaves with units.
    leaves: Vec<FlowKey>,
}

impl Deferred {
    #[inline]
    fn add(&mut self, leaf: FlowKey, units: Units) {
        if units == 0 {
            return;
        }
        if self.units.len() <= leaf.index() {
            self.units.resize(leaf.index() + 1, 0);
        }
        let sum = &mut self.units[leaf.index()];
        if *sum == 0 {
            self.leaves.push(leaf);
        }
        *sum += units;
    }

    /// Makes the charges.
    pub(crate) fn charge(&mut self, flows: &mut Flows) {
        let Self { units, leaves } = self;
        let charges = leaves.drain(..).map(|leaf| {
            let units = std::mem::take(&mut units[leaf.index()]);
            (leaf, units)
        });
        flows.charge_all(charges);
    }
}

/// Tokens that a step computed for a sequence.
#[derive(Clone, Copy)]
pub(crate) struct Computed {
    pub(crate) num_tokens: u32,
    /// Tokens of it that are computed now.
    pub(crate) end: u32,
    /// Its share of the step's time.
    pub(crate) step_ns: u64,
}

impl Prices {
    /// Accounts for tokens that a step computed for a sequence.
    #[inline]
    pub(crate) fn charge_computed(
        &self,
        sequence: &mut Sequence,
        computed: Computed,
        flows: &mut Flows,
    ) {
        let begin = sequence.num_charged_tokens;
        if computed.end <= begin {
            return; // computed again
        }
        sequence.num_charged_tokens = computed.end;
        if begin >= sequence.num_prompt_tokens && matches!(self, Self::Tokens { .. }) {
            return; // output is charged when it is sampled
        }
        self.charge_computed_from(begin, sequence, computed, flows);
    }

    /// Accounts for the token of a decode, after the prompt, and for the output that it led to.
    #[inline]
    pub(crate) fn charge_decode(
        &self,
        sequence: &mut Sequence,
        step_ns: u64,
        flows: &mut Flows,
        deferred: &mut Deferred,
    ) {
        let end = sequence.num_computed_tokens;
        match self {
            Self::Tokens { .. } => {
                sequence.num_charged_tokens = sequence.num_charged_tokens.max(end);
                self.charge_output(sequence, 1, deferred);
            }
            Self::DeviceTime => {
                let computed = Computed {
                    num_tokens: 1,
                    end,
                    step_ns,
                };
                self.charge_computed(sequence, computed, flows);
            }
        }
    }

    fn charge_computed_from(
        &self,
        begin: u32,
        sequence: &mut Sequence,
        computed: Computed,
        flows: &mut Flows,
    ) {
        let prompt = sequence.num_prompt_tokens;
        let in_prompt = computed.end.min(prompt).saturating_sub(begin);
        let released = sequence.release(begin, in_prompt);
        if matches!(self, Self::Tokens { .. }) {
            return; // what was released was the price
        }
        let scheduled = computed.num_tokens;
        let new = u128::from((computed.end - begin).min(scheduled));
        let actual = u128::from(computed.step_ns) * new / u128::from(scheduled.max(1));
        let mut actual = actual as Units;
        let from_output = actual.min(sequence.prepaid_output) * u64::from(in_prompt == 0);
        sequence.prepaid_output -= from_output;
        actual -= from_output;
        if actual >= released {
            flows.charge(sequence.leaf, actual - released);
        } else {
            flows.refund(sequence.leaf, released - actual);
        }
    }

    /// Accounts for output tokens that a step sampled for a sequence.
    #[inline]
    pub(crate) fn charge_output(
        &self,
        sequence: &mut Sequence,
        tokens: u64,
        deferred: &mut Deferred,
    ) {
        if let Self::Tokens { output, .. } = *self {
            let units = output * tokens;
            let prepaid = units.min(sequence.prepaid_output);
            sequence.prepaid_output -= prepaid;
            deferred.add(sequence.leaf, units - prepaid);
        }
    }
}
