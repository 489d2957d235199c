//! Commit: applies the results of a step.
//!
//! For each sequence of the step, in the order of its plan: count its tokens as computed, make full
//! blocks findable, tell what was scored of the prompt, append what was sampled, add to its text, and see whether it ends. Who ended
//! leaves at once; memory and rows serve the next iteration. Results that do not fit the step are
//! refused before anything is changed. What was planned of a sequence before it was known that it had
//! ended, or sampled several tokens, is dropped: it counts for nobody.
//!
//! What ends a sequence, where several would: the model's end-of-sequence token, a stop token, a stop
//! string, the length. The token that ends it is part of its ids and is counted; its text is not
//! shown unless asked for.

use std::ops::Range;

use slab::Slab;

use crate::config::{Limits, Vocabulary};
use crate::error::CommitError;
use crate::iteration::charge::Computed;
use crate::iteration::flight::{Part, Step};
use crate::iteration::join::leaves_together;
use crate::iteration::lane::Lane;
use crate::iteration::ledger::{Entry, Ledger};
use crate::iteration::sequence::Sequence;
use crate::iteration::tally::{Payer, Tally};
use crate::metrics::Beat;
use crate::output::{Event, Output, OutputBatch, TokenLogprob};
use crate::predict::iteration_time::StepShares;
use crate::request::{Finish, SequenceKey, Time};
use crate::text::TextState;

/// Status of a row whose step succeeded.
pub const STATUS_OK: u8 = 0;
/// Status of a row that failed by itself.
pub const STATUS_FAILED: u8 = 1;

/// What the executor returns for a step of `N` sequences, `S` samples and `P` scored prompt tokens, in
/// the plan's order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepResults {
    /// `[S + 1]` range of each sample's tokens; at least one token each.
    pub token_offsets: Vec<u32>,
    /// Sampled tokens; those of failed rows are not read.
    pub token_ids: Vec<u32>,
    /// `[N]` [`STATUS_OK`] or anything else: the row failed.
    pub statuses: Vec<u8>,
    /// `[S + 1]` range of each sample's log-probabilities, or empty: none.
    pub logprob_offsets: Vec<u32>,
    /// The sampled token's, then those of the best, for each token of each sample that asked: as many
    /// for every token of a sample.
    pub logprobs: Vec<TokenLogprob>,
    /// `[P + 1]` range of each scored prompt token's log-probabilities; empty will do where `P` is 0.
    pub prompt_logprob_offsets: Vec<u32>,
    /// The prompt token's, then those of the best; those of failed rows are not read.
    pub prompt_logprobs: Vec<TokenLogprob>,
}

/// One step's results being applied.
pub(crate) struct Commit<'a> {
    pub(crate) limits: &'a Limits,
    pub(crate) vocabulary: &'a Vocabulary,
    pub(crate) ledger: &'a mut Ledger,
    pub(crate) lane: &'a mut Lane,
    /// The step, taken out of those in flight.
    pub(crate) step: &'a Step,
    pub(crate) results: &'a StepResults,
    pub(crate) now: Time,
    /// Who ends stays until all of its batch have.
    pub(crate) stays: bool,
}

/// What became of a sequence.
#[derive(Clone, Copy, Default)]
struct Applied {
    num_outputs: u64,
    ended: bool,
}

impl Commit<'_> {
    /// Applies the results, or refuses them; whether a sequence of the step has ended.
    pub(crate) fn run(mut self) -> Result<bool, CommitError> {
        self.check()?;
        let shares = self.measure();
        let step = self.step;
        let first = step.parts().next().expect("no step is empty");
        let mut tally = Tally::new(self.now, self.ledger.sequences[first.sequence.0].payer);
        let mut cut = Cut::default();
        let mut statuses = self.results.statuses.iter();
        let mut ended = false;
        for (parts, are_decodes) in [(&step.decodes, true), (&step.chunks, false)] {
            for (part, &status) in parts.iter().zip(statuses.by_ref()) {
                let sequence = &self.ledger.sequences[part.sequence.0];
                let before = sequence.num_computed_tokens;
                let step_ns = nearest(if are_decodes {
                    shares.decode(before + 1, part.num_samples)
                } else {
                    shares.chunk(before, part.num_tokens, part.num_samples)
                });
                let payer = sequence.payer;
                let since = (sequence.num_output_tokens() > 0).then_some(sequence.last_output);
                let applied = self.apply(part, status, step_ns, cut.next(part));
                ended |= applied.ended;
                tally.add(self.ledger, payer, step_ns, applied.num_outputs, since);
            }
        }
        tally.flush(self.ledger);
        self.ledger.queue.flows_mut().charge_deferred();
        Ok(ended)
    }

    /// Applies what the step did for one sequence.
    fn apply(&mut self, part: &Part, status: u8, step_ns: u64, slice: Slice) -> Applied {
        let key = part.sequence;
        let ledger = &mut *self.ledger;
        let sequence = &mut ledger.sequences[key.0];
        if sequence.ended || sequence.has_other_tokens_than(part) {
            sequence.land(part.num_tokens);
            return Applied {
                ended: sequence.ended,
                ..Applied::default()
            };
        }
        if status != STATUS_OK {
            let request = sequence.request;
            ledger.queue.flows_mut().charge_deferred();
            ledger.end_request(self.lane, request, Finish::RowFailed, self.now);
            ledger.sequences[key.0].land(part.num_tokens);
            return Applied {
                ended: true,
                ..Applied::default()
            };
        }
        let (block_size, caching) = (self.limits.block_size(), self.limits.prefix_caching());
        sequence.advance(part.num_tokens, block_size, caching);
        if part.num_scores > 0 {
            sequence.num_scored_tokens += part.num_scores;
        }
        let computed = Computed {
            num_tokens: part.num_tokens,
            end: sequence.num_computed_tokens,
            step_ns,
        };
        let prices = ledger.prices;
        prices.charge_computed(sequence, &computed, ledger.queue.flows_mut());
        self.tell_scores(key, slice.scores);
        match part.num_samples {
            0 => Applied::default(),
            1 => self.append(key, slice.samples.start),
            _ => self.append_to_siblings(key, slice.samples),
        }
    }

    /// Measures the step's service; how its nanoseconds are shared out.
    fn measure(&mut self) -> StepShares {
        let step = self.step;
        let time_us = self.now.since_us(step.since);
        let prefill = step.num_tokens - step.decodes.len() as u64;
        let forecast = &mut self.ledger.forecast;
        forecast.measure_iteration(time_us, step.num_tokens, prefill, step.prefill_is_short);
        self.ledger.counters.device_us += time_us;
        let (sequences, decodes) = (step.num_sequences() as u64, step.decodes.len() as u64);
        let iterations = &mut self.ledger.iterations;
        iterations.observe(time_us, sequences, decodes, step.num_tokens);
        let shares = if let Some(costs) = self.lane.costs.coefficients() {
            StepShares::new(&costs, &step.shape, time_us as f64 * 1e3)
        } else {
            let token_ns = time_us.saturating_mul(1_000) / step.num_tokens.max(1);
            StepShares::by_tokens(token_ns as f64)
        };
        let predicted_us = self.lane.costs.observe(&step.shape, time_us as f64);
        self.ledger.pace.observe(&Beat {
            time_us,
            predicted_us,
            gap_us: step.gap_us,
            sequences,
            padded: step.num_padded,
        });
        shares
    }

    /// Refuses results that do not fit the step.
    fn check(&self) -> Result<(), CommitError> {
        let (results, step) = (self.results, self.step);
        let num_samples = step.num_samples;
        check_length("statuses", results.statuses.len(), step.num_sequences())?;
        let (tokens, logprobs) = (results.token_ids.len(), results.logprobs.len());
        check_length(
            "token_offsets",
            results.token_offsets.len(),
            num_samples + 1,
        )?;
        check_offsets("token_ids", &results.token_offsets, tokens, 1)?;
        let offsets = &results.logprob_offsets;
        if !offsets.is_empty() {
            check_length("logprob_offsets", offsets.len(), num_samples + 1)?;
            check_offsets("logprobs", offsets, logprobs, 0)?;
        }
        let (offsets, logprobs) = (
            &results.prompt_logprob_offsets,
            results.prompt_logprobs.len(),
        );
        if step.num_scores > 0 || !offsets.is_empty() {
            check_length("prompt_logprob_offsets", offsets.len(), step.num_scores + 1)?;
            check_offsets("prompt_logprobs", offsets, logprobs, 0)?;
        }
        self.check_rows()
    }

    /// Refuses what a row must not return; only a failed one may return anything.
    fn check_rows(&self) -> Result<(), CommitError> {
        let results = self.results;
        let vocab_size = self.limits.vocab_size();
        let tokens = results.token_ids.iter();
        let tokens_are_known = tokens.fold(true, |known, &token| known & (token < vocab_size));
        if tokens_are_known && results.logprobs.is_empty() && self.step.num_scores == 0 {
            return Ok(());
        }
        let mut cut = Cut::default();
        for (&status, part) in results.statuses.iter().zip(self.step.parts()) {
            let sequence = &self.ledger.sequences[part.sequence.0];
            let Slice { samples, scores } = cut.next(part);
            if status != STATUS_OK {
                continue;
            }
            for sample in samples {
                let tokens = &results.token_ids[results.tokens(sample)];
                if let Some(&token) = tokens.iter().find(|&&token| token >= vocab_size) {
                    return Err(CommitError::TokenOutOfRange { token, vocab_size });
                }
                let got = results.logprobs_of(sample).len();
                let expected = got.next_multiple_of(tokens.len());
                check_length("logprobs", got, expected)?;
            }
            let request = &self.ledger.requests[sequence.request.0].request;
            let expected = 1 + request.sampling.prompt_logprobs.unwrap_or(0) as usize;
            for score in scores {
                let got = results.prompt_logprobs_of(score..score + 1).len();
                check_length("prompt_logprobs of a token", got, expected)?;
            }
        }
        Ok(())
    }

    /// Tells the client what the step scored of its prompt.
    fn tell_scores(&mut self, key: SequenceKey, scores: Range<usize>) {
        if scores.is_empty() {
            return;
        }
        let request = self.ledger.sequences[key.0].request.0;
        let outputs = &mut self.ledger.outputs;
        let begin = outputs.logprobs.len();
        let num_tokens = scores.len() as u32;
        outputs.logprobs.extend_from_slice(
            &self.results.prompt_logprobs[self.results.prompt_logprobs_of(scores)],
        );
        outputs.events.push(Event::PromptLogprobs {
            request: self.ledger.requests[request].request.id,
            num_tokens,
            logprobs: begin..outputs.logprobs.len(),
        });
    }

    /// Appends the first sample to the sequence and the others to siblings that are born by it.
    #[inline(never)]
    fn append_to_siblings(&mut self, key: SequenceKey, samples: Range<usize>) -> Applied {
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
            .map(|(child, row)| Sequence {
                prepaid_output,
                num_shared_blocks,
                ..sequence.fork(
                    child,
                    row,
                    TextState::new(stop.clone()),
                    self.ledger.overflow.begin(),
                )
            })
            .collect();
        let mut keys = Vec::with_capacity(siblings.len());
        for sibling in siblings {
            let key = SequenceKey(self.ledger.sequences.insert(sibling));
            self.ledger.requests[request].sequences.push(key);
            self.ledger.enter_running(&mut self.lane.running, key);
            keys.push(key);
        }
        keys
    }

    /// Appends one sample to one sequence and tells its client.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "a call takes a tenth of the time")]
    fn append(&mut self, key: SequenceKey, sample: usize) -> Applied {
        let ledger = &mut *self.ledger;
        let sequence = &mut ledger.sequences[key.0];
        let outputs = &mut ledger.outputs;
        let (tokens, text) = (outputs.token_ids.len(), outputs.text.len());
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
        let num_tokens = outputs.token_ids.len() - tokens;
        let logprobs = outputs.logprobs.len();
        if !self.results.logprobs.is_empty() {
            let told = &self.results.logprobs[self.results.logprobs_of(sample)];
            // What came after the token that ended it is dropped with its log-probabilities.
            let per_token = told.len() / sampled.len();
            outputs
                .logprobs
                .extend_from_slice(&told[..num_tokens * per_token]);
        }
        outputs.events.push(Event::Output(Output {
            request: sequence.id,
            child: sequence.arrival.child,
            tokens: tokens..outputs.token_ids.len(),
            text: text..outputs.text.len(),
            logprobs: logprobs..outputs.logprobs.len(),
            finish: finish.filter(|_| !self.stays),
        }));
        let is_first = sequence.num_output_tokens() == num_tokens as u32;
        sequence.last_output = self.now;
        sequence.waits_for_samples |= num_tokens > 1;
        let prices = ledger.prices;
        prices.charge_output(sequence, num_tokens as u64, ledger.queue.flows_mut());
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
            sequence.ended = true;
        }
        self.ledger.queue.flows_mut().charge_deferred();
        self.ledger.count_output(key);
        self.ledger.learn_length(key);
        self.ledger.refund(key);
        if !self.stays {
            self.ledger.end_child(request, finish, self.now);
        }
    }
}

/// Cuts the samples and scores of a step into those of its parts.
#[derive(Default)]
struct Cut {
    samples: usize,
    scores: usize,
}

/// What a part has of a step's samples and scores.
struct Slice {
    samples: Range<usize>,
    scores: Range<usize>,
}

impl Cut {
    /// Those of the next part.
    fn next(&mut self, part: &Part) -> Slice {
        let (samples, scores) = (self.samples, self.scores);
        self.samples += part.num_samples as usize;
        self.scores += part.num_scores as usize;
        Slice {
            samples: samples..self.samples,
            scores: scores..self.scores,
        }
    }
}

impl StepResults {
    fn tokens(&self, sample: usize) -> Range<usize> {
        self.token_offsets[sample] as usize..self.token_offsets[sample + 1] as usize
    }

    fn logprobs_of(&self, sample: usize) -> Range<usize> {
        match self.logprob_offsets.get(sample..=sample + 1) {
            Some(&[begin, end]) => begin as usize..end as usize,
            _ => 0..0,
        }
    }

    /// Range of `prompt_logprobs` of a range of scored prompt tokens, which is not empty.
    fn prompt_logprobs_of(&self, scores: Range<usize>) -> Range<usize> {
        let [begin, end] = [scores.start, scores.end].map(|at| self.prompt_logprob_offsets[at]);
        begin as usize..end as usize
    }
}

/// The nearest whole number of nanoseconds, which are not negative. `f64::round` would be a call, and the
/// conversion to an unsigned number takes several times the instructions.
fn nearest(nanoseconds: f64) -> u64 {
    (nanoseconds + 0.5) as i64 as u64
}

fn check_length(array: &'static str, got: usize, expected: usize) -> Result<(), CommitError> {
    if got == expected {
        return Ok(());
    }
    Err(CommitError::WrongLength {
        array,
        got,
        expected,
    })
}

fn check_offsets(
    array: &'static str,
    offsets: &[u32],
    got: usize,
    least: u32,
) -> Result<(), CommitError> {
    let last = offsets.last().map_or(0, |&last| last as usize);
    // Without a way out of the loop, so that several are compared at once.
    let rising = (offsets.iter().zip(offsets.iter().skip(1)))
        .fold(true, |rising, (begin, end)| rising & (begin + least <= *end));
    if offsets.first() == Some(&0) && rising && last == got {
        return Ok(());
    }
    let expected = last.max(offsets.len() - 1);
    Err(CommitError::WrongLength {
        array,
        got,
        expected,
    })
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
    if !stop.ignore_eos && vocabulary.eos_token_ids.iter().any(|&eos| eos == token) {
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
#[inline(always)]
#[expect(clippy::inline_always, reason = "as above")]
fn append_token(
    sequence: &mut Sequence,
    token: u32,
    stop_token: Option<Finish>,
    vocabulary: &Vocabulary,
    outputs: &mut OutputBatch,
) -> Option<Finish> {
    sequence.tokens.push(token);
    sequence.last_token = token;
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

/// Ends those that stayed for the others of their batch, once all of it are done.
pub(crate) fn leave_together(ledger: &mut Ledger, lane: &Lane, now: Time) {
    let stays = |ledger: &Ledger, key: SequenceKey| {
        let sequence = &ledger.sequences[key.0];
        sequence.finished.filter(|_| !sequence.ended)
    };
    let is_done =
        |key: &SequenceKey| ledger.sequences[key.0].ended || stays(ledger, *key).is_some();
    if !leaves_together(ledger.rules.policy().join) || !lane.running.iter().all(is_done) {
        return;
    }
    for &key in &lane.running {
        if let Some(finish) = stays(ledger, key) {
            let sequence = &mut ledger.sequences[key.0];
            sequence.ended = true;
            let (request, child) = (sequence.request, sequence.arrival.child);
            ledger.tell_finish(request, child, ledger.outputs.text.len(), finish);
            ledger.end_child(request, finish, now);
        }
    }
}

/// Takes everyone who ended, and is in no step in flight, out of the running set and frees what they hold.
pub(crate) fn remove_ended(ledger: &mut Ledger, lane: &mut Lane) {
    lane.running.retain(|&key| {
        let sequence = &ledger.sequences[key.0];
        let leaves = sequence.ended && !sequence.is_in_flight();
        if leaves {
            ledger.discard(key);
        }
        !leaves
    });
}
