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

use crate::config::{Limits, Vocabulary};
use crate::error::CommitError;
use crate::iteration::flight::{Part, Step};
use crate::iteration::join::leaves_together;
use crate::iteration::lane::Lane;
use crate::iteration::ledger::Ledger;
use crate::iteration::sequence::Sequence;
use crate::iteration::tally::Payer;
use crate::iteration::tier::land_copies;
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
}

impl Commit<'_> {
    /// Applies the results, or refuses them; whether a sequence of the step has ended.
    pub(crate) fn run(mut self) -> Result<bool, CommitError> {
        self.check()?;
        land_copies(self.ledger, self.step, self.limits.block_size());
        let shares = self.measure();
        let mut tally = std::mem::take(&mut self.lane.tally);
        let mut cut = Cut::default();
        let mut ended = false;
        for position in 0..self.step.num_sequences() {
            let part = self.step.part(position);
            let key = part.sequence;
            let sequence = &mut self.ledger.sequences[key.0];
            let (samples, scores) = cut.next(part);
            let (payer, scheduled) = (sequence.payer, part.num_tokens);
            let before = sequence.num_computed_tokens;
            let step_ns = if position < self.step.decodes.len() {
                shares.decode(before + 1, samples.len())
            } else {
                shares.chunk(before, scheduled, samples.len())
            };
            let step_ns = nearest(step_ns);
            let has_output = sequence.num_output_tokens() > 0 && !samples.is_empty();
            let gap_us = has_output.then(|| self.now.since_us(sequence.last_output));
            let output_before = self.ledger.counters.output_tokens;
            if sequence.ended {
                sequence.land(scheduled);
                ended = true;
            } else if sequence.has_other_tokens_than(part) {
                sequence.land(scheduled);
            } else if self.results.statuses[position] != STATUS_OK {
                let request = sequence.request;
                self.ledger
                    .end_request(self.lane, request, Finish::RowFailed, self.now);
                self.ledger.sequences[key.0].land(scheduled);
                ended = true;
            } else {
                let (block_size, caching) =
                    (self.limits.block_size(), self.limits.prefix_caching());
                sequence.advance(scheduled, block_size, caching);
                if part.num_scores > 0 {
                    sequence.num_scored_tokens += part.num_scores;
                }
                let end = sequence.num_computed_tokens;
                self.ledger.charge_computed(key, end, scheduled, step_ns);
                self.tell_scores(key, scores);
                ended |= self.append_samples(key, samples);
            }
            let outputs = self.ledger.counters.output_tokens - output_before;
            let gap_us = gap_us.filter(|_| outputs > 0);
            tally.add(payer, step_ns, outputs, gap_us);
        }
        tally.settle(self.ledger);
        self.lane.tally = tally;
        Ok(ended)
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
        let tokens_are_known = results.token_ids.iter().all(|&token| token < vocab_size);
        if tokens_are_known && results.logprobs.is_empty() && self.step.num_scores == 0 {
            return Ok(());
        }
        let mut cut = Cut::default();
        for (&status, part) in results.statuses.iter().zip(self.step.parts()) {
            let sequence = &self.ledger.sequences[part.sequence.0];
            let (samples, scores) = cut.next(part);
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
    ///
    /// Returns whether any of them ended.
    fn append_samples(&mut self, key: SequenceKey, samples: Range<usize>) -> bool {
        if samples.is_empty() {
            return false;
        }
        if samples.len() == 1 {
            return self.append(key, samples.start);
        }
        let siblings = self.fork_siblings(key);
        let mut ended = self.append(key, samples.start);
        for (sibling, sample) in siblings.into_iter().zip(samples.skip(1)) {
            ended |= self.append(sibling, sample);
        }
        ended
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
            self.lane.running.enter(&self.ledger.sequences, key);
            keys.push(key);
        }
        keys
    }

    /// Appends one sample to one sequence and tells its client; whether the sequence ended.
    fn append(&mut self, key: SequenceKey, sample: usize) -> bool {
        let sequence = &mut self.ledger.sequences[key.0];
        let outputs = &mut self.ledger.outputs;
        let (tokens, text) = (outputs.token_ids.len(), outputs.text.len());
        let stop_tokens: &[u32] = if sequence.ending.has_stop_tokens {
            let entry = &self.ledger.requests[sequence.request.0];
            &entry.request.stop.stop_token_ids
        } else {
            &[]
        };
        let mut finish = None;
        let sampled = &self.results.token_ids[self.results.tokens(sample)];
        for &token in sampled {
            finish = append_token(sequence, stop_tokens, token, self.vocabulary, outputs);
            if finish.is_some() {
                break;
            }
        }
        let num_tokens = outputs.token_ids.len() - tokens;
        let stays = leaves_together(self.ledger.rules.policy().join);
        let logprobs = outputs.logprobs.len();
        if !self.results.logprobs.is_empty() {
            let told = &self.results.logprobs[self.results.logprobs_of(sample)];
            // What came after the token that ended it is dropped with its log-probabilities.
            let per_token = told.len() / sampled.len();
            outputs
                .logprobs
                .extend_from_slice(&told[..num_tokens * per_token]);
        }
        if sequence.num_output_tokens() == num_tokens as u32 {
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
        sequence.last_output = self.now;
        self.ledger.counters.output_tokens += num_tokens as u64;
        outputs.events.push(Event::Output(Output {
            request: sequence.id,
            child: sequence.arrival.child,
            tokens: tokens..outputs.token_ids.len(),
            text: text..outputs.text.len(),
            logprobs: logprobs..outputs.logprobs.len(),
            finish: finish.filter(|_| !stays),
        }));
        if stays {
            sequence.finished = finish;
        } else {
            sequence.ended = finish.is_some();
        }
        sequence.waits_for_samples |= num_tokens > 1;
        self.ledger.charge_output(key, num_tokens as u64, self.now);
        let Some(finish) = finish else {
            return false;
        };
        self.ledger.count_output(key);
        self.ledger.learn_length(key);
        self.ledger.refund(key);
        if !stays {
            let request = self.ledger.sequences[key.0].request;
            self.lane.ended.push(key);
            self.ledger.end_child(request, finish, self.now);
        }
        true
    }
}

/// Cuts the samples and scores of a step into those of its parts.
#[derive(Default)]
struct Cut {
    samples: usize,
    scores: usize,
}

impl Cut {
    /// Those of the next part.
    fn next(&mut self, part: &Part) -> (Range<usize>, Range<usize>) {
        let (samples, scores) = (self.samples, self.scores);
        self.samples += part.num_samples as usize;
        self.scores += part.num_scores as usize;
        (samples..self.samples, scores..self.scores)
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
    let rising =
        offsets.first() == Some(&0) && offsets.windows(2).all(|pair| pair[0] + least <= pair[1]);
    if rising && last == got {
        return Ok(());
    }
    let expected = last.max(offsets.len() - 1);
    Err(CommitError::WrongLength {
        array,
        got,
        expected,
    })
}

/// Appends a token to ids and text; how that ended the sequence, if it did.
fn append_token(
    sequence: &mut Sequence,
    stop_tokens: &[u32],
    token: u32,
    vocabulary: &Vocabulary,
    outputs: &mut OutputBatch,
) -> Option<Finish> {
    sequence.tokens.push(token);
    sequence.last_token = token;
    outputs.token_ids.push(token);
    let stop = sequence.ending;
    let num_output_tokens = sequence.num_output_tokens();
    let may_stop = num_output_tokens >= stop.min_tokens;
    let stop_token = if !may_stop {
        None
    } else if !stop.ignore_eos && vocabulary.eos_token_ids.contains(&token) {
        Some(Finish::Eos)
    } else if stop_tokens.contains(&token) {
        Some(Finish::StopToken(token))
    } else {
        None
    };
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
pub(crate) fn leave_together(ledger: &mut Ledger, lane: &mut Lane, now: Time) {
    let stays = |ledger: &Ledger, key: SequenceKey| {
        let sequence = &ledger.sequences[key.0];
        sequence.finished.filter(|_| !sequence.ended)
    };
    let is_done =
        |key: &SequenceKey| ledger.sequences[key.0].ended || stays(ledger, *key).is_some();
    if !leaves_together(ledger.rules.policy().join) || !lane.running.iter().all(is_done) {
        return;
    }
    for &key in lane.running.iter() {
        if let Some(finish) = stays(ledger, key) {
            let sequence = &mut ledger.sequences[key.0];
            sequence.ended = true;
            lane.ended.push(key);
            let (request, child) = (sequence.request, sequence.arrival.child);
            ledger.tell_finish(request, child, ledger.outputs.text.len(), finish);
            ledger.end_child(request, finish, now);
        }
    }
}

/// Takes everyone who ended, and is in no step in flight, out of the running set and frees what they hold:
/// the oldest first.
pub(crate) fn remove_ended(ledger: &mut Ledger, lane: &mut Lane) {
    lane.ended
        .sort_unstable_by_key(|key| ledger.sequences[key.0].arrival);
    lane.ended.retain(|&key| {
        let stays = ledger.sequences[key.0].is_in_flight();
        if !stays {
            lane.running.leave(&ledger.sequences, key);
            ledger.discard(key);
        }
        stays
    });
}
