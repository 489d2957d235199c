//! Commit: applies the results of a step.
//!
//! For each sequence of the step, in the order of its plan: count its tokens as computed, make full
//! blocks findable, tell what was scored of the prompt, append what was sampled, add to its text, and see
//! whether it ends. Who ended leaves at once; memory and rows serve the next iteration. Results that do
//! not fit the step are refused before anything is changed. What was planned of a sequence before it was
//! known that it had ended, or sampled several tokens, is dropped: it counts for nobody.
//!
//! What ends a sequence, where several would: the model's end-of-sequence token, a stop token, a stop
//! string, the length. The token that ends it is part of its ids and is counted; its text is not
//! shown unless asked for.

use std::ops::Range;

use crate::config::{Limits, Vocabulary};
use crate::error::CommitError;
use crate::iteration::charge::Computed;
use crate::iteration::flight::{Part, Step};
use crate::iteration::join::leaves_together;
use crate::iteration::lane::Lane;
use crate::iteration::ledger::Ledger;
use crate::iteration::tier::land_copies;
use crate::metrics::Beat;
use crate::output::{Event, Span, TokenLogprob};
use crate::predict::iteration_time::StepShares;
use crate::request::{Finish, SequenceKey, Time};

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
pub(crate) struct Applied {
    pub(crate) num_outputs: u64,
    pub(crate) ended: bool,
}

impl Commit<'_> {
    /// Applies the results, or refuses them; whether a sequence of the step has ended.
    pub(crate) fn run(mut self) -> Result<bool, CommitError> {
        self.check()?;
        land_copies(self.ledger, self.step, self.limits.block_size());
        let shares = self.measure();
        let mut tally = std::mem::take(&mut self.lane.tally);
        let (step, results) = (self.step, self.results);
        let one_token_each = results.token_ids.len() == step.num_samples;
        let are_ordinary = one_token_each && results.logprobs.is_empty();
        let mut cut = Cut::default();
        let mut ended = false;
        let mut at = 0;
        while at < step.num_sequences() {
            if are_ordinary && at < step.decodes.len() {
                let tokens = &results.token_ids[cut.samples..];
                let statuses = &results.statuses[at..];
                let count = self.go_on(&step.decodes[at..], statuses, tokens, &shares, &mut tally);
                at += count;
                cut.samples += count;
            }
            let Some(part) = step.part(at) else { break };
            let sequence = &self.ledger.sequences[part.sequence.0];
            let before = sequence.num_computed_tokens;
            let step_ns = if at < step.decodes.len() {
                shares.decode_ns(before + 1, part.num_samples)
            } else {
                shares.chunk_ns(before, part.num_tokens, part.num_samples)
            };
            let payer = sequence.payer;
            let has_output = sequence.num_output_tokens() > 0;
            let gap_us = self.now.since_us(sequence.last_output);
            let applied = self.apply(part, results.statuses[at], step_ns, cut);
            self.ledger.sequences[part.sequence.0].count_easy_outputs();
            ended |= applied.ended;
            let gap_us = (has_output && applied.num_outputs > 0).then_some(gap_us);
            tally.add(payer, step_ns, applied.num_outputs, gap_us);
            cut.skip(part);
            at += 1;
        }
        tally.settle(self.ledger);
        self.lane.tally = tally;
        self.ledger.charge_deferred();
        Ok(ended)
    }

    /// Applies what the step did for one sequence.
    #[inline(never)]
    fn apply(&mut self, part: &Part, status: u8, step_ns: u64, cut: Cut) -> Applied {
        let key = part.sequence;
        let ledger = &mut *self.ledger;
        let sequence = &mut ledger.sequences[key.0];
        sequence.unsettle();
        if sequence.ended || sequence.has_other_tokens_than(part) {
            sequence.land(part.num_tokens);
            return Applied {
                ended: sequence.ended,
                ..Applied::default()
            };
        }
        if status != STATUS_OK {
            let request = sequence.request;
            ledger.charge_deferred();
            ledger.end_request(self.lane, request, Finish::RowFailed, self.now);
            ledger.sequences[key.0].land(part.num_tokens);
            return Applied {
                ended: true,
                ..Applied::default()
            };
        }
        let (block_size, caching) = (self.limits.block_size(), self.limits.prefix_caching());
        sequence.advance(part.num_tokens);
        if caching && sequence.has_filled_block(block_size) {
            sequence.publish_full_blocks(block_size);
        }
        if part.num_scores > 0 {
            sequence.num_scored_tokens += part.num_scores;
        }
        let computed = Computed {
            num_tokens: part.num_tokens,
            end: sequence.num_computed_tokens,
            step_ns,
        };
        let flows = ledger.queue.flows_mut();
        ledger.prices.charge_computed(sequence, computed, flows);
        self.tell_scores(key, cut.scores_of(part));
        match part.num_samples {
            0 => Applied::default(),
            1 => self.append(key, cut.samples),
            _ => self.append_to_siblings(key, cut.samples_of(part)),
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
        let prediction = self.lane.costs.observe(&step.shape, time_us as f64);
        self.ledger.pace.observe(&Beat {
            time_us,
            prediction,
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
        // Counted, not looked for: without a way out of the loop several are compared at once.
        let unknown = results
            .token_ids
            .iter()
            .filter(|&&token| token >= vocab_size);
        if unknown.count() == 0 && results.logprobs.is_empty() && self.step.num_scores == 0 {
            return Ok(());
        }
        let mut cut = Cut::default();
        for (&status, part) in results.statuses.iter().zip(self.step.parts()) {
            let sequence = &self.ledger.sequences[part.sequence.0];
            let (samples, scores) = (cut.samples_of(part), cut.scores_of(part));
            cut.skip(part);
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
            logprobs: Span::new(begin..outputs.logprobs.len()),
        });
    }
}

/// Where a part's samples and scores begin among those of its step.
#[derive(Clone, Copy, Default)]
struct Cut {
    samples: usize,
    scores: usize,
}

impl Cut {
    /// Those of `part`, the next.
    fn samples_of(self, part: &Part) -> Range<usize> {
        self.samples..self.samples + part.num_samples as usize
    }

    fn scores_of(self, part: &Part) -> Range<usize> {
        self.scores..self.scores + part.num_scores as usize
    }

    /// Goes on to the part after it.
    fn skip(&mut self, part: &Part) {
        self.samples += part.num_samples as usize;
        self.scores += part.num_scores as usize;
    }
}

impl StepResults {
    /// Range of the tokens of a sample.
    pub(crate) fn tokens(&self, sample: usize) -> Range<usize> {
        self.token_offsets[sample] as usize..self.token_offsets[sample + 1] as usize
    }

    /// Range of the log-probabilities of a sample.
    pub(crate) fn logprobs_of(&self, sample: usize) -> Range<usize> {
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
    let pairs = offsets.iter().zip(offsets.iter().skip(1));
    let falling = pairs.filter(|&(&begin, &end)| begin + least > end).count();
    if offsets.first() == Some(&0) && falling == 0 && last == got {
        return Ok(());
    }
    let expected = last.max(offsets.len() - 1);
    Err(CommitError::WrongLength {
        array,
        got,
        expected,
    })
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
            sequence.end();
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
