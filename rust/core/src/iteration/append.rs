//! Appending what was sampled: part of commit.
//!
//! Nearly all samples are ordinary: one token of a sequence that had output before and goes on, with text
//! that is sent as it comes. Those have a short way of their own ([`Commit::go_on`]); it does what the long
//! one does, and takes a third of the time.

use std::ops::Range;

use slab::Slab;

use crate::config::Vocabulary;
use crate::iteration::commit::{Applied, Commit, STATUS_OK};
use crate::iteration::flight::Part;
use crate::iteration::ledger::{Entry, Ledger};
use crate::iteration::sequence::Sequence;
use crate::iteration::tally::{Payer, Tally};
use crate::output::OutputBatch;
use crate::predict::iteration_time::StepShares;
use crate::request::{Finish, SequenceKey};
use crate::text::TextState;

impl Commit<'_> {
    /// Applies what the step did for decodes, from the first on, as long as they go on with an ordinary
    /// token; how many those are. Each sample of the step has one token, and no log-probabilities.
    pub(crate) fn go_on(
        &mut self,
        decodes: &[Part],
        statuses: &[u8],
        tokens: &[u32],
        shares: &StepShares,
        tally: &mut Tally,
    ) -> usize {
        let Ledger {
            sequences,
            requests,
            queue,
            prices,
            deferred,
            tenants,
            outputs,
            ..
        } = &mut *self.ledger;
        let flows = queue.flows_mut();
        let has_rates = tenants.any_has_rate();
        let prices = *prices;
        let (block_size, caching) = (self.limits.block_size(), self.limits.prefix_caching());
        let (now, filled) = (self.now, &mut self.lane.filled);
        let begin = outputs.token_ids.len();
        let mut count = 0;
        for ((part, &status), &token) in decodes.iter().zip(statuses).zip(tokens) {
            let sequence = &mut sequences[part.sequence.0];
            if status != STATUS_OK || !sequence.goes_on_after(part) {
                break;
            }
            let stops = sequence.ending.stops_at_tokens()
                && find_stop_token(sequence, token, requests, self.vocabulary).is_some();
            if stops {
                break;
            }
            let Some(text) = self.vocabulary.tokens.plain_text(token) else {
                break;
            };
            debug_assert!(!sequence.ended && !sequence.has_other_tokens_than(part));
            sequence.num_easy_outputs -= 1;
            sequence.advance(1);
            if caching && sequence.has_filled_block(block_size) {
                filled.push(part.sequence);
            }
            let step_ns = shares.decode_ns(sequence.num_computed_tokens, 1);
            prices.charge_decode(sequence, step_ns, flows, deferred);
            sequence.push(token);
            outputs.tell_token(sequence.id, sequence.arrival.child, begin + count, text);
            let gap_us = now.since_us(sequence.last_output);
            sequence.last_output = now;
            tally.add(sequence.payer, step_ns, 1, Some(gap_us));
            if has_rates {
                tenants.get_mut(sequence.payer.tenant).use_tokens(now, 1);
            }
            count += 1;
        }
        outputs.token_ids.extend_from_slice(&tokens[..count]);
        filled.publish(sequences, block_size);
        count
    }

    /// Appends the first sample to the sequence and the others to siblings that are born by it.
    pub(crate) fn append_to_siblings(
        &mut self,
        key: SequenceKey,
        samples: Range<usize>,
    ) -> Applied {
        let siblings = self.fork_siblings(key);
        let mut all = Applied::default();
        for (key, sample) in std::iter::once(key).chain(siblings).zip(samples) {
            let applied = self.append(key, sample);
            all.num_outputs += applied.num_outputs;
            all.ended |= applied.ended;
        }
        all
    }

    fn fork_siblings(&mut self, key: SequenceKey) -> Vec<SequenceKey> {
        let sequence = &mut self.ledger.sequences[key.0];
        let rows = std::mem::take(&mut sequence.sibling_rows);
        sequence.num_unborn = 0;
        // What was charged ahead for the output of all is shared out among them.
        let prepaid_output = sequence.prepaid_output / (rows.len() as u64 + 1);
        sequence.prepaid_output -= prepaid_output * rows.len() as u64;
        let sequence = &self.ledger.sequences[key.0];
        let request = sequence.request.0;
        let stop = self.ledger.requests[request].request.stop.stop.clone();
        let num_shared_blocks = sequence.num_prompt_tokens / self.limits.block_size();
        let siblings: Vec<Sequence> = (1..)
            .zip(rows)
            .map(|(child, row)| {
                let text = TextState::new(stop.clone());
                let mut sibling = sequence.fork(child, row, text, self.ledger.overflow.begin());
                sibling.prepaid_output = prepaid_output;
                sibling.num_shared_blocks = num_shared_blocks;
                sibling
            })
            .collect();
        let mut keys = Vec::with_capacity(siblings.len());
        for sibling in siblings {
            let key = SequenceKey(self.ledger.sequences.insert(sibling));
            self.ledger.requests[request].sequences.push(key);
            self.lane.running.enter(&self.ledger.sequences, key);
            keys.push(key);
        }
        keys
    }

    /// Appends one sample to one sequence and tells its client.
    pub(crate) fn append(&mut self, key: SequenceKey, sample: usize) -> Applied {
        let ledger = &mut *self.ledger;
        let sequence = &mut ledger.sequences[key.0];
        let outputs = &mut ledger.outputs;
        let begin = outputs.mark();
        let mut finish = None;
        let sampled = &self.results.token_ids[self.results.tokens(sample)];
        for &token in sampled {
            let stop_token = if sequence.ending.stops_at_tokens() {
                find_stop_token(sequence, token, &ledger.requests, self.vocabulary)
            } else {
                None
            };
            finish = append_token(sequence, token, stop_token, self.vocabulary, outputs);
            if finish.is_some() {
                break;
            }
        }
        let num_tokens = outputs.token_ids.len() - begin.tokens;
        if !self.results.logprobs.is_empty() {
            let told = &self.results.logprobs[self.results.logprobs_of(sample)];
            // What came after the token that ended it is dropped with its log-probabilities.
            let per_token = told.len() / sampled.len();
            outputs
                .logprobs
                .extend_from_slice(&told[..num_tokens * per_token]);
        }
        let told = finish.filter(|_| !self.stays);
        outputs.tell(sequence.id, sequence.arrival.child, begin, told);
        let is_first = sequence.num_output_tokens() == num_tokens as u32;
        sequence.last_output = self.now;
        sequence.waits_for_samples |= num_tokens > 1;
        let (prices, deferred) = (&ledger.prices, &mut ledger.deferred);
        prices.charge_output(sequence, num_tokens as u64, deferred);
        if ledger.tenants.any_has_rate() {
            let tenant = ledger.tenants.get_mut(sequence.payer.tenant);
            tenant.use_tokens(self.now, num_tokens as u64);
        }
        if is_first {
            self.begin_output(key);
        }
        if let Some(finish) = finish {
            self.end(key, finish);
        }
        Applied {
            num_outputs: num_tokens as u64,
            ended: finish.is_some(),
        }
    }

    /// Notes when the first output of a sequence came.
    fn begin_output(&mut self, key: SequenceKey) {
        let sequence = &mut self.ledger.sequences[key.0];
        sequence.first_output = self.now;
        let stats = &mut self.ledger.requests[sequence.request.0].request.stats;
        if stats.first_token.is_none() {
            stats.first_token = Some(self.now);
            let ttft_us = self.now.since_us(stats.arrival);
            let Payer { class, tenant } = sequence.payer;
            self.ledger.classes[class.0 as usize]
                .metrics
                .started(ttft_us);
            self.ledger.tenants.get_mut(tenant).metrics.started(ttft_us);
        }
    }

    /// Ends a sequence; one that stays for its batch is told of later.
    fn end(&mut self, key: SequenceKey, finish: Finish) {
        let sequence = &mut self.ledger.sequences[key.0];
        let request = sequence.request;
        if self.stays {
            sequence.finished = Some(finish);
        } else {
            sequence.end();
        }
        self.ledger.charge_deferred();
        self.ledger.count_output(key);
        self.ledger.learn_length(key);
        self.ledger.refund(key);
        if !self.stays {
            self.lane.ended.push(key);
            self.ledger.end_child(request, finish, self.now);
        }
    }
}

/// How a token ends the sequence by itself, if it does.
#[inline(never)]
fn find_stop_token(
    sequence: &Sequence,
    token: u32,
    requests: &Slab<Entry>,
    vocabulary: &Vocabulary,
) -> Option<Finish> {
    let stop = &sequence.ending;
    if !stop.ignore_eos && vocabulary.eos_token_ids.contains(&token) {
        return Some(Finish::Eos);
    }
    if !stop.has_stop_tokens {
        return None;
    }
    let stop_tokens = &requests[sequence.request.0].request.stop.stop_token_ids;
    let is_stop_token = stop_tokens.contains(&token);
    is_stop_token.then_some(Finish::StopToken(token))
}

/// Appends a token to ids and text; how that ended the sequence, if it did. A stop token does not end it
/// before its least length.
fn append_token(
    sequence: &mut Sequence,
    token: u32,
    stop_token: Option<Finish>,
    vocabulary: &Vocabulary,
    outputs: &mut OutputBatch,
) -> Option<Finish> {
    sequence.push(token);
    outputs.token_ids.push(token);
    let stop = sequence.ending;
    let num_output_tokens = sequence.num_output_tokens();
    let stop_token = stop_token.filter(|_| num_output_tokens >= stop.min_tokens);
    let hidden = stop.skip_special_tokens && vocabulary.tokens.is_special(token);
    let shown = !hidden && (stop_token.is_none() || stop.include_stop_token_in_text);
    let shown_text = if shown {
        vocabulary.tokens.text(token)
    } else {
        Ok("")
    };
    // vLLM's rule: the text of the first min_tokens tokens is not searched.
    let search = num_output_tokens > stop.min_tokens && stop_token.is_none();
    let (text, out) = (&mut sequence.text, &mut outputs.text);
    let stop_string = match shown_text {
        Ok(whole) => text.push_str(whole, search, out),
        Err(bytes) => text.push(bytes, search, out),
    };
    if let Some(found) = stop_string {
        return Some(Finish::StopString(found.string_index));
    }
    let finish =
        stop_token.or_else(|| (num_output_tokens >= stop.max_tokens).then_some(Finish::Length));
    if finish.is_some() {
        sequence.text.finish(&mut outputs.text);
    }
    finish
}
