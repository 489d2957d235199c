//! A sequence: one answer of a request while it is being written.
//!
//! Its phase follows from counters and is stored nowhere: it is prefilling while more than one token
//! is left to compute, decoding when one is, and its next token can be sampled when the step computes
//! the last. (A step may have sampled several tokens; those are computed as a prefill chunk is.) It owns
//! its blocks and its row; dropping it gives both back, so it stays until no step in flight has it.
//!
//! Where it is planned while steps of it are in flight (run-ahead), it counts as if they had landed: what
//! they compute is computed, and if that is all there is, a token that only the executor knows is
//! expected after it.
//!
//! A request with `n` answers starts as one sequence that computes the prompt once and holds the rows
//! of its unborn siblings; they fork off it at the first output, which is sampled `n` times from one
//! row of logits.

mod blocks;

use std::ops::Range;
use std::sync::Arc;

use crate::iteration::flight::Part;
use crate::iteration::rows::Row;
use crate::iteration::tally::Payer;
use crate::memory::blocks::BlockTable;
use crate::memory::prefix::BlockHash;
use crate::predict::overflow::Life;
use crate::request::{Finish, Request, RequestId, Time};
use crate::text::StopStrings;
use crate::text::TextState;
use crate::waiting::fairness::FlowKey;
use crate::waiting::order::Units;
use crate::waiting::queue::Arrival;

/// Names a request while any of its sequences lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestKey(pub(crate) usize);

/// What a decode step has to know of a sequence's request, so that it need not look at the request.
#[derive(Clone, Copy)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "the request's own switches, copied"
)]
pub(crate) struct Ending {
    /// Output tokens after which it ends as `Length`.
    pub(crate) max_tokens: u32,
    /// Output tokens before which nothing else ends it.
    pub(crate) min_tokens: u32,
    /// The model's end-of-sequence tokens are ordinary ones.
    pub(crate) ignore_eos: bool,
    /// The request has stop tokens.
    pub(crate) has_stop_tokens: bool,
    /// Special tokens have no text.
    pub(crate) skip_special_tokens: bool,
    /// The token that ended it stays in the text.
    pub(crate) include_stop_token_in_text: bool,
}

impl Ending {
    pub(crate) fn of(request: &Request) -> Self {
        let stop = &request.stop;
        Self {
            max_tokens: request.max_tokens,
            min_tokens: stop.min_tokens,
            ignore_eos: stop.ignore_eos,
            has_stop_tokens: !stop.stop_token_ids.is_empty(),
            skip_special_tokens: stop.skip_special_tokens,
            include_stop_token_in_text: stop.include_stop_token_in_text,
        }
    }

    /// Whether there are tokens that end it.
    pub(crate) fn stops_at_tokens(self) -> bool {
        self.has_stop_tokens || !self.ignore_eos
    }
}

/// Tokens that are kept in the sequence itself before they join the others in its heap memory.
const TAIL: u32 = 16;

/// Laid out so that a step of a decode touches the first three cache lines and the one of the tail, and
/// planning it the first three: no line of a heap page of its own, of which a thousand sequences have more
/// than there are entries in a translation buffer. That holds for looking it up, too: what tells a vacant
/// place of the slab is the widest niche closest to an edge, which is the first field's.
#[repr(C, align(64))]
pub(crate) struct Sequence {
    /// The step from which on it was the head that did not fit, since it last ran.
    pub(crate) blocked_since: Option<u64>,
    /// Prompt and output.
    num_tokens: u32,
    /// Tokens whose K and V are in the table's blocks.
    pub(crate) num_computed_tokens: u32,
    /// Tokens that the step being planned computes.
    pub(crate) num_scheduled_tokens: u32,
    /// Tokens that the steps in flight compute, or copy from the host; that the one being planned copies,
    /// too.
    pub(crate) num_in_flight_tokens: u32,
    pub(crate) num_prompt_tokens: u32,
    /// The last of its tokens.
    last_token: u32,
    /// Steps of a decode that may be planned of it without a look ([`crate::iteration::steady`]).
    pub(crate) num_steady_steps: u32,
    /// Full blocks, from the start, that the prefix cache was told of.
    pub(crate) num_published_blocks: u32,
    /// Tokens, from the start, whose computation its flow was charged for.
    pub(crate) num_charged_tokens: u32,
    /// The flow that pays for it.
    pub(crate) leaf: FlowKey,
    /// How it is done while it stays until all of its batch are.
    pub(crate) finished: Option<Finish>,

    pub(crate) text: TextState,
    pub(crate) ending: Ending,
    /// Siblings that fork off at the first output, also while there are no rows for them.
    pub(crate) num_unborn: u32,
    /// The request's name.
    pub(crate) id: RequestId,
    /// Outputs, the next, that go the short way through commit.
    pub(crate) num_easy_outputs: u32,
    /// Ended while steps of it are in flight: leaves when the last of them has landed.
    pub(crate) ended: bool,
    /// Has siblings, so its last block may be theirs too.
    pub(crate) may_share_last_block: bool,
    /// A step has sampled several tokens of it, so it is not known what a step ahead would compute.
    pub(crate) waits_for_samples: bool,
    /// Runs ahead of a head that did not fit when it joined, on the promise to be out of its way in time.
    pub(crate) is_guest: bool,
    /// When its last output was committed, once it has any.
    pub(crate) last_output: Time,

    /// Whose it is.
    pub(crate) payer: Payer,
    pub(crate) arrival: Arrival,
    /// Charged ahead for output that has not come.
    pub(crate) prepaid_output: Units,
    pub(crate) row: Option<Row>,
    /// Its second half is in the next line, and not needed.
    pub(crate) table: BlockTable,

    pub(crate) request: RequestKey,
    /// Charged ahead for prompt tokens that have not run.
    pub(crate) prepaid: Units,
    /// When its first output was committed, once it has any.
    pub(crate) first_output: Time,
    /// Index of its class's level; 0 is the highest.
    pub(crate) level: usize,

    /// Those of the tokens that are not in `stored` yet, each at its position modulo [`TAIL`].
    tail: [u32; TAIL as usize],

    /// Tokens, from the start, in memory that is there from the admission on.
    stored: Vec<u32>,
    /// Rows of the siblings that fork off at the first output.
    pub(crate) sibling_rows: Vec<Row>,
    /// Where the hash chain starts: the request's extras.
    pub(crate) root: BlockHash,
    /// Hashes of the full blocks of its tokens, as far as they were needed.
    pub(crate) chain: Vec<BlockHash>,
    /// Preempted before: until it has this many tokens others are preferred as victims.
    pub(crate) protected_below_tokens: u32,
    /// Tokens, from the start, that were computed once and lost in a preemption.
    pub(crate) num_lost_tokens: u32,
    /// The step that it joined at.
    pub(crate) joined_at_step: u64,
    /// Blocks, from the start, that were somebody else's before they were its own too.
    pub(crate) num_shared_blocks: u32,
    /// Prompt tokens whose successor's log-probability is asked for, from the start: all but the last,
    /// or none.
    pub(crate) num_tokens_to_score: u32,
    /// Those of them that were told of.
    pub(crate) num_scored_tokens: u32,
    /// Its life since it took memory.
    pub(crate) life: Option<Life>,
}

/// What a sequence begins with.
pub(crate) struct NewSequence {
    pub(crate) request: RequestKey,
    pub(crate) id: RequestId,
    pub(crate) ending: Ending,
    pub(crate) number: u64,
    pub(crate) level: usize,
    pub(crate) leaf: FlowKey,
    pub(crate) payer: Payer,
    pub(crate) prompt: Vec<u32>,
    pub(crate) num_tokens_to_score: u32,
    pub(crate) n: u32,
    pub(crate) table: BlockTable,
    pub(crate) root: BlockHash,
    pub(crate) chain: Vec<BlockHash>,
    pub(crate) stop: Option<Arc<StopStrings>>,
}

impl Sequence {
    /// A sequence that waits for the first time.
    pub(crate) fn new(new: NewSequence) -> Self {
        Self {
            request: new.request,
            arrival: Arrival {
                request: new.number,
                child: 0,
            },
            id: new.id,
            ending: new.ending,
            num_prompt_tokens: new.prompt.len() as u32,
            num_tokens: new.prompt.len() as u32,
            last_token: new.prompt.last().copied().unwrap_or_default(),
            tail: [0; TAIL as usize],
            stored: new.prompt,
            num_computed_tokens: 0,
            num_scheduled_tokens: 0,
            num_in_flight_tokens: 0,
            num_steady_steps: 0,
            num_easy_outputs: 0,
            num_tokens_to_score: new.num_tokens_to_score,
            num_scored_tokens: 0,
            num_published_blocks: 0,
            waits_for_samples: false,
            table: new.table,
            row: None,
            sibling_rows: Vec::new(),
            num_unborn: new.n - 1,
            may_share_last_block: new.n > 1,
            root: new.root,
            chain: new.chain,
            text: TextState::new(new.stop),
            ended: false,
            protected_below_tokens: 0,
            num_lost_tokens: 0,
            level: new.level,
            leaf: new.leaf,
            payer: new.payer,
            last_output: Time(0),
            first_output: Time(0),
            num_charged_tokens: 0,
            prepaid: 0,
            prepaid_output: 0,
            joined_at_step: 0,
            num_shared_blocks: 0,
            life: None,
            is_guest: false,
            blocked_since: None,
            finished: None,
        }
    }

    pub(crate) fn num_tokens(&self) -> u32 {
        self.num_tokens
    }

    /// The token at `position`; the last one, all that a decode needs, is at hand.
    pub(crate) fn token(&self, position: u32) -> u32 {
        if position + 1 == self.num_tokens {
            return self.last_token;
        }
        let stored = self.stored.get(position as usize).copied();
        stored.unwrap_or_else(|| self.tail[(position % TAIL) as usize])
    }

    /// All tokens, in one piece: prompt, then output.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = u32> {
        let rest = self.stored.len() as u32..self.num_tokens;
        let stored = self.stored.iter().copied();
        stored.chain(rest.map(|position| self.tail[(position % TAIL) as usize]))
    }

    /// Makes room for `capacity` tokens, so that growing to it allocates nothing.
    pub(crate) fn reserve_tokens(&mut self, capacity: u32) {
        let extra = (capacity as usize).saturating_sub(self.stored.len());
        self.stored.reserve_exact(extra);
    }

    /// Moves the tail to the others.
    #[inline(never)]
    pub(crate) fn store_tail(&mut self) {
        let begin = self.stored.len() as u32;
        let count = (self.num_tokens - begin) as usize;
        let tail = &self.tail[(begin % TAIL) as usize..][..count];
        self.stored.extend_from_slice(tail);
    }

    pub(crate) fn num_output_tokens(&self) -> u32 {
        self.num_tokens() - self.num_prompt_tokens
    }

    /// Tokens whose K and V are in the table's blocks when the steps in flight have landed.
    pub(crate) fn num_planned_tokens(&self) -> u32 {
        self.num_computed_tokens + self.num_in_flight_tokens
    }

    /// Tokens that it has when the steps in flight have landed: where they compute all that it has now, a
    /// sampled one comes after those.
    pub(crate) fn num_expected_tokens(&self) -> u32 {
        self.num_tokens().max(self.num_planned_tokens() + 1)
    }

    /// Outputs that may still be sampled, then.
    pub(crate) fn num_expected_outputs_left(&self) -> u32 {
        let outputs = self.num_expected_tokens() - self.num_prompt_tokens;
        self.ending.max_tokens.saturating_sub(outputs)
    }

    /// Tokens whose K and V are still to be computed, then; at least one.
    pub(crate) fn num_remaining_tokens(&self) -> u32 {
        self.num_expected_tokens() - self.num_planned_tokens()
    }

    /// Whether steps of it are in flight.
    pub(crate) fn is_in_flight(&self) -> bool {
        self.num_in_flight_tokens > 0
    }

    /// Whether another step may be planned of it now. While steps of it are in flight, not if it ends by
    /// their results for sure, or if what comes next cannot be known without them.
    pub(crate) fn may_be_planned(&self) -> bool {
        !self.is_in_flight() || self.may_be_planned_ahead()
    }

    fn may_be_planned_ahead(&self) -> bool {
        let samples = self.num_expected_tokens() > self.num_tokens();
        let ends_by_length = self.num_output_tokens() + 1 >= self.ending.max_tokens;
        !self.ended
            && !self.waits_for_samples
            && !(samples && (ends_by_length || self.num_unborn > 0))
    }

    /// Appends a sampled token.
    pub(crate) fn push(&mut self, token: u32) {
        let position = self.num_tokens;
        self.tail[(position % TAIL) as usize] = token;
        self.num_tokens = position + 1;
        self.last_token = token;
        if (position + 1).is_multiple_of(TAIL) {
            self.store_tail();
        }
    }

    /// Whether it goes on after a step, with one token more and nothing else to tell: if the token does not
    /// end it by itself.
    pub(crate) fn goes_on_after(&self, part: &Part) -> bool {
        part.num_samples == 1 && self.num_easy_outputs > 0
    }

    /// Finds out how many outputs may come before it must be looked at: it has output already, its text is
    /// sent as it comes, and it is one short of its end then.
    pub(crate) fn count_easy_outputs(&mut self) {
        let num_output_tokens = self.num_output_tokens();
        let is_easy = num_output_tokens > 0
            && !self.ended
            && self.finished.is_none()
            && !self.waits_for_samples
            && self.text.is_plain();
        self.num_easy_outputs = if is_easy {
            self.ending.max_tokens.saturating_sub(num_output_tokens + 1)
        } else {
            0
        };
    }

    /// Whether it runs by leave of a head that does not fit since step `since`.
    pub(crate) fn is_guest_since(&self, since: u64) -> bool {
        self.is_guest && self.joined_at_step >= since
    }

    /// Whether it has become something else than a step took for granted that was planned ahead: it was to
    /// compute its last token with it, or not.
    pub(crate) fn has_other_tokens_than(&self, part: &Part) -> bool {
        let is_last = self.num_computed_tokens + part.num_tokens == self.num_tokens();
        is_last != (part.num_samples > 0)
    }

    /// Samples that its scheduled tokens lead to.
    pub(crate) fn num_samples(&self) -> u32 {
        self.num_samples_after(self.num_planned_tokens() + self.num_scheduled_tokens)
    }

    /// Samples that the last of its first `num_tokens` tokens, of which one at least is scheduled, leads to.
    pub(crate) fn num_samples_after(&self, num_tokens: u32) -> u32 {
        if num_tokens >= self.num_tokens {
            1 + self.num_unborn
        } else {
            0
        }
    }

    /// Whether others are preferred as victims: it was preempted and has not filled a block since.
    pub(crate) fn is_protected(&self) -> bool {
        self.num_tokens() < self.protected_below_tokens
    }

    /// Positions of the prompt tokens that its scheduled tokens score. What was told of before a
    /// preemption is computed again, but not scored again.
    pub(crate) fn scores(&self) -> Range<u32> {
        self.scores_of(self.num_scheduled_tokens)
    }

    /// The same of its next `num_tokens` tokens.
    pub(crate) fn scores_of(&self, num_tokens: u32) -> Range<u32> {
        let to_score = self.num_tokens_to_score;
        if to_score == 0 {
            return 0..0;
        }
        let planned = self.num_planned_tokens();
        let begin = self.num_scored_tokens.max(planned.min(to_score));
        let end = planned + num_tokens;
        begin..end.min(to_score).max(begin)
    }

    /// Rows it needs to run.
    pub(crate) fn num_rows(&self) -> u32 {
        1 + self.num_unborn
    }

    /// So many tokens, the next, come from the host by copies of the step being planned. They count as in
    /// flight from now on.
    pub(crate) fn restore(&mut self, num_tokens: u32) {
        self.num_in_flight_tokens += num_tokens;
    }

    /// Those tokens are there.
    pub(crate) fn land_restored(&mut self, num_tokens: u32) {
        self.land(num_tokens);
        self.num_computed_tokens += num_tokens;
    }

    /// Tokens that the step being planned computes, once its decodes are known.
    pub(crate) fn num_granted_tokens(&self) -> u32 {
        self.num_scheduled_tokens + u32::from(self.num_steady_steps > 0)
    }

    /// Hands the scheduled tokens over to the executor.
    pub(crate) fn launch(&mut self) {
        self.num_in_flight_tokens += std::mem::take(&mut self.num_scheduled_tokens);
    }

    /// Hands the next token of a steady decode over to the executor.
    pub(crate) fn launch_steady(&mut self) {
        self.num_steady_steps -= 1;
        self.num_in_flight_tokens += 1;
    }

    /// Has the next plan, and the next results, look at it.
    pub(crate) fn unsettle(&mut self) {
        self.num_steady_steps = 0;
        self.num_easy_outputs = 0;
    }

    /// It ends; while steps of it are in flight, it stays.
    pub(crate) fn end(&mut self) {
        self.ended = true;
        self.unsettle();
    }

    /// A step with so many of its tokens has landed.
    pub(crate) fn land(&mut self, num_tokens: u32) {
        self.num_in_flight_tokens -= num_tokens;
    }

    /// Counts the tokens of a step that has landed among the computed ones.
    #[inline]
    pub(crate) fn advance(&mut self, num_tokens: u32) {
        self.land(num_tokens);
        self.num_computed_tokens += num_tokens;
    }

    /// Gives blocks and rows back; what was computed is lost but for what the prefix cache keeps.
    pub(crate) fn reset_for_recompute(&mut self, block_size: u32) {
        self.table.release();
        self.row = None;
        self.sibling_rows.clear();
        self.num_lost_tokens = self.num_computed_tokens.max(self.num_lost_tokens);
        self.num_computed_tokens = 0;
        self.num_scheduled_tokens = 0;
        self.num_in_flight_tokens = 0;
        self.num_published_blocks = 0;
        self.unsettle();
        self.protected_below_tokens = self.num_tokens() + block_size;
    }

    /// The sibling number `child`, on the same prompt and blocks, with `row` as its own.
    pub(crate) fn fork(&self, child: u32, row: Row, text: TextState, life: Life) -> Sequence {
        let mut stored = Vec::with_capacity(self.stored.capacity());
        stored.extend_from_slice(&self.stored);
        let mut chain = Vec::with_capacity(self.chain.capacity());
        chain.extend_from_slice(&self.chain);
        Sequence {
            request: self.request,
            arrival: Arrival {
                child,
                ..self.arrival
            },
            num_tokens: self.num_tokens,
            tail: self.tail,
            stored,
            num_prompt_tokens: self.num_prompt_tokens,
            num_computed_tokens: self.num_computed_tokens,
            num_scheduled_tokens: 0,
            num_in_flight_tokens: 0,
            num_steady_steps: 0,
            num_easy_outputs: 0,
            waits_for_samples: self.waits_for_samples,
            num_tokens_to_score: self.num_tokens_to_score,
            num_scored_tokens: self.num_scored_tokens,
            num_published_blocks: self.num_published_blocks,
            table: self.table.fork(),
            row: Some(row),
            sibling_rows: Vec::new(),
            num_unborn: 0,
            may_share_last_block: self.may_share_last_block,
            root: self.root,
            chain,
            text,
            id: self.id,
            ending: self.ending,
            last_token: self.last_token,
            ended: false,
            protected_below_tokens: self.protected_below_tokens,
            num_lost_tokens: 0,
            level: self.level,
            leaf: self.leaf,
            payer: self.payer,
            last_output: self.last_output,
            first_output: self.first_output,
            num_charged_tokens: self.num_charged_tokens,
            prepaid: 0,
            prepaid_output: 0,
            joined_at_step: self.joined_at_step,
            num_shared_blocks: self.num_shared_blocks,
            life: Some(life),
            is_guest: self.is_guest,
            blocked_since: None,
            finished: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn what_a_decode_needs_is_in_three_lines_and_its_tail_in_one() {
        assert_eq!(offset_of!(Sequence, table), 3 * 64 - 16);
        assert_eq!(offset_of!(Sequence, tail) % 64, 0);
        assert_eq!(size_of::<Option<Sequence>>(), size_of::<Sequence>());
    }
}
