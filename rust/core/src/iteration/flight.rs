//! Steps on their way: the one being planned, and those that the executor has.
//!
//! A step in flight holds what it touches. The blocks and rows of its sequences are theirs until it has
//! landed, even if they have ended ([`Sequence`](crate::iteration::sequence::Sequence)), and its copies
//! are holds of its own. So nothing is given to anybody else while a step may still read or write it.
//!
//! Run-ahead: with two steps in flight the next one is planned and launched before the results of the one
//! before are known, so that the executor never waits. What is decided then must hold whatever those
//! results are:
//! - a sequence that ends by length is not planned beyond its end; one that ends otherwise may have been,
//!   and what was computed and sampled of it is dropped when it lands, and charged to nobody;
//! - nobody is preempted: what a victim has is not free before its steps have landed. Where somebody
//!   would have to be, nothing more is planned until nothing is in flight (`must_land`).

use std::collections::VecDeque;

use crate::config::Limits;
use crate::memory::blocks::{BlockCopy, CopyKind};
use crate::predict::iteration_time::StepShape;
use crate::request::{SequenceKey, Time};

/// What a sequence has in a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) sequence: SequenceKey,
    /// Tokens that are computed.
    pub(crate) num_tokens: u32,
    /// Tokens that are left to compute before its next output.
    pub(crate) num_left_tokens: u32,
    /// Samples that those lead to.
    pub(crate) num_samples: u32,
    /// Prompt tokens that are scored.
    pub(crate) num_scores: u32,
}

/// Who is in a step, in the order of its plan. Kept until its results are committed.
#[derive(Default)]
pub(crate) struct Step {
    /// Its number, from 1.
    pub(crate) number: u64,
    /// When it was decided, or the one before it landed if that was later.
    pub(crate) since: Time,
    /// Tokens in it.
    pub(crate) num_tokens: u64,
    /// Whether more prefill was there than the token budget allowed.
    pub(crate) prefill_is_short: bool,
    /// Samples that its plan asks for.
    pub(crate) num_samples: usize,
    /// What its time depends on.
    pub(crate) shape: StepShape,
    /// Rows of those that are done and stay for their batch.
    pub(crate) num_padded: u64,
    /// Since the results of the step before, if any of its sequences ran on.
    pub(crate) gap_us: Option<u64>,
    /// Prompt tokens that it scores.
    pub(crate) num_scores: usize,
    /// Tokens that its sequences have left to compute before their next outputs.
    pub(crate) num_left_tokens: u64,
    /// Steady decodes that it will have when it is written.
    pub(crate) num_steady: usize,
    /// They lead to one sample each, and score nothing.
    pub(crate) is_plain: bool,
    /// One query token each: decodes, and prefill chunks of one token.
    pub(crate) decodes: Vec<Part>,
    /// Prefill chunks of more than one token.
    pub(crate) chunks: Vec<Part>,
    /// Copies of blocks, and for whom; held until the step is over.
    pub(crate) copies: Vec<(SequenceKey, BlockCopy)>,
}

impl Step {
    fn with_capacity(seqs: usize) -> Self {
        Self {
            decodes: Vec::with_capacity(seqs),
            chunks: Vec::with_capacity(seqs),
            copies: Vec::with_capacity(seqs),
            ..Self::default()
        }
    }

    /// Forgets who was in it.
    pub(crate) fn clear(&mut self) {
        self.decodes.clear();
        self.chunks.clear();
        self.copies.clear();
        self.num_padded = 0;
        self.num_left_tokens = 0;
        self.num_steady = 0;
        self.is_plain = true;
    }

    /// Adds a sequence with so many query tokens, after which so many are left before its next output. What
    /// they lead to is known when the plan is written.
    pub(crate) fn add_chunk(
        &mut self,
        sequence: SequenceKey,
        num_tokens: u32,
        num_left_tokens: u32,
    ) {
        let part = Part {
            sequence,
            num_tokens,
            num_left_tokens,
            num_samples: 0,
            num_scores: 0,
        };
        self.num_left_tokens += u64::from(num_left_tokens);
        if num_tokens == 1 {
            self.decodes.push(part);
        } else {
            self.chunks.push(part);
        }
    }

    /// Takes back what was granted to `sequence`, a steady decode or not.
    pub(crate) fn withdraw(&mut self, sequence: SequenceKey, is_steady: bool) {
        self.num_steady -= usize::from(is_steady);
        self.decodes.retain(|part| part.sequence != sequence);
        self.chunks.retain(|part| part.sequence != sequence);
        self.copies.retain(|&(key, _)| key != sequence);
        let left = self.parts().map(|part| u64::from(part.num_left_tokens));
        self.num_left_tokens = left.sum();
    }

    /// Its parts, in the order of the plan.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &Part> {
        self.decodes.iter().chain(&self.chunks)
    }

    /// The part at this place of the plan, if there are as many.
    pub(crate) fn part(&self, at: usize) -> Option<&Part> {
        let chunk = at.wrapping_sub(self.decodes.len());
        self.decodes.get(at).or_else(|| self.chunks.get(chunk))
    }

    /// Tokens that its sequences have when it has landed: computed, and copied from the host. A sequence
    /// may come several times.
    pub(crate) fn num_landing(&self, block_size: u32) -> impl Iterator<Item = (SequenceKey, u32)> {
        let computed = self.parts().map(|part| (part.sequence, part.num_tokens));
        let copies = self.copies.iter();
        let restores = copies.filter(|(_, copy)| copy.kind() == CopyKind::Restore);
        computed.chain(restores.map(move |&(key, _)| (key, block_size)))
    }

    /// Sequences in it.
    pub(crate) fn num_sequences(&self) -> usize {
        self.num_steady + self.decodes.len() + self.chunks.len()
    }
}

/// The steps that the executor has, the oldest first; they land in that order.
pub(crate) struct Flights {
    steps: VecDeque<Step>,
    /// Memory of steps that have landed.
    spare: Vec<Step>,
}

impl Flights {
    pub(crate) fn new(limits: &Limits) -> (Step, Self) {
        let (seqs, most) = (
            limits.max_num_seqs() as usize,
            limits.max_in_flight_steps() as usize,
        );
        let flights = Self {
            steps: VecDeque::with_capacity(most),
            spare: (0..most).map(|_| Step::with_capacity(seqs)).collect(),
        };
        (Step::with_capacity(seqs), flights)
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether the executor has nothing to do.
    pub(crate) fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// The steps, the oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Step> {
        self.steps.iter()
    }

    /// The one that lands next.
    pub(crate) fn oldest(&self) -> Option<&Step> {
        self.steps.front()
    }

    /// The one that was launched last.
    pub(crate) fn newest(&self) -> Option<&Step> {
        self.steps.back()
    }

    /// Launches a planned step; an empty one takes its place.
    pub(crate) fn launch(&mut self, step: &mut Step) {
        let mut empty = self.spare.pop().unwrap_or_default();
        empty.number = step.number;
        self.steps.push_back(std::mem::replace(step, empty));
    }

    /// Takes the one that lands next; it comes back by [`Self::landed`] or [`Self::goes_on`].
    pub(crate) fn take_oldest(&mut self) -> Option<Step> {
        self.steps.pop_front()
    }

    /// What was taken is still in flight.
    pub(crate) fn goes_on(&mut self, step: Step) {
        self.steps.push_front(step);
    }

    /// What was taken has landed: what it held is let go, and the next one has the executor to itself.
    pub(crate) fn landed(&mut self, mut step: Step, now: Time) {
        step.clear();
        self.spare.push(step);
        if let Some(next) = self.steps.front_mut() {
            next.since = now;
        }
    }
}
