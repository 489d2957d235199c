//! The requests of a simulation, and the tokens they are made of.
//!
//! A trace has lengths, not texts, so prompts are filler: unique for each request, so that no two share
//! a prefix by accident, or derived from the trace's prefix hashes, so that those share a prefix who
//! did so in life. The filler is a function of the request's number alone; no chance is in it.

use std::ops::Range;

use crate::sim::random::{Cause, Random};
use crate::sim::record::{Outcome, Record};
use crate::sim::{SimConfig, SimError};

/// Vocabulary of the simulated model. Tokens have no text.
pub(crate) const VOCAB_SIZE: u32 = 4_096;
/// Ends an answer.
pub(crate) const EOS: u32 = 0;
/// Every other output token.
pub(crate) const FILLER: u32 = 1;

/// One request as the world sends it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimRequest {
    /// When, in microseconds from the start.
    pub arrival_us: u64,
    /// Prompt tokens.
    pub input_tokens: u32,
    /// True length of the answer, its end-of-sequence token included; hidden from every policy.
    pub output_tokens: u32,
    /// Its tenant, by position in [`Workload::tenants`].
    pub tenant: u32,
    /// Its class, by position in the policy's classes.
    pub class: u32,
    /// Order within its class; lower is sooner.
    pub priority: i32,
    /// Latest moment to be scheduled first, in microseconds after its arrival.
    pub deadline_us: Option<u64>,
    /// When the client gives up, in microseconds after its arrival.
    pub abort_us: Option<u64>,
    /// Its range of [`Workload::prefix_hashes`]; empty for a prompt that nobody shares.
    pub prefix: Range<u32>,
}

/// Requests in order of arrival.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Workload {
    /// The requests.
    pub requests: Vec<SimRequest>,
    /// Names of the tenants.
    pub tenants: Vec<String>,
    /// Names of prompt blocks: the same name after the same names is the same content.
    pub prefix_hashes: Vec<u32>,
    /// Prompt tokens that each of them stands for.
    pub prefix_block_tokens: u32,
    /// `max_tokens` of each request; empty: that of the configuration, or the true length where that is
    /// larger.
    pub max_tokens: Vec<u32>,
}

impl Workload {
    /// Marks a `share` of the requests as given up at a uniformly random moment of their life, which
    /// `records`, of the same workload without aborts, knows.
    pub fn add_aborts(&mut self, records: &[Record], share: f64, seed: u64) {
        let mut random = Random::new(seed, Cause::Aborts);
        for (request, record) in self.requests.iter_mut().zip(records) {
            let (chosen, moment) = (random.uniform() < share, random.uniform());
            let life_us = record.finished_us.map(|end| end - record.arrival_us);
            request.abort_us = match (chosen, life_us, record.outcome) {
                (true, Some(life_us), Outcome::Ended(_)) => Some((life_us as f64 * moment) as u64),
                _ => None,
            };
        }
    }

    /// The first `count` requests, all there at time 0, without deadlines, aborts and classes.
    pub(crate) fn burst(&self, count: usize) -> Workload {
        let requests = self.requests.iter().take(count).map(|request| SimRequest {
            arrival_us: 0,
            class: 0,
            deadline_us: None,
            abort_us: None,
            ..request.clone()
        });
        Workload {
            requests: requests.collect(),
            ..self.clone()
        }
    }

    /// Checks everything that the engine does not.
    pub(crate) fn validate(&self, config: &SimConfig) -> Result<(), SimError> {
        let num_classes = config.settings.policy.classes.len();
        let mut last_us = 0;
        for (at, request) in self.requests.iter().enumerate() {
            let check = |holds: bool, field, value, allowed: &str| {
                if holds {
                    return Ok(());
                }
                Err(SimError::Workload {
                    request: at,
                    field,
                    value,
                    allowed: allowed.to_owned(),
                })
            };
            let rising = request.arrival_us >= last_us;
            let before = "not before the one ahead of it";
            check(rising, "arrival_us", request.arrival_us, before)?;
            last_us = request.arrival_us;
            for (field, value) in [
                ("input_tokens", request.input_tokens),
                ("output_tokens", request.output_tokens),
            ] {
                check(value > 0, field, u64::from(value), "at least 1")?;
            }
            for (field, value, count) in [
                ("tenant", request.tenant, self.tenants.len()),
                ("class", request.class, num_classes),
            ] {
                let allowed = format!("below their number, {count}");
                check((value as usize) < count, field, u64::from(value), &allowed)?;
            }
            let Range { start, end } = request.prefix;
            let hashes = self.prefix_hashes.len();
            let inside = start <= end && end as usize <= hashes;
            let allowed = format!("a range of the {hashes} prefix hashes");
            check(inside, "prefix", u64::from(end), &allowed)?;
            let blocks = start == end || self.prefix_block_tokens > 0;
            check(blocks, "prefix_block_tokens", 0, "at least 1")?;
        }
        Ok(())
    }

    /// The prompt of request number `index`.
    ///
    /// Blocks of the trace have their own name in front, the rest of the prompt the request's; with
    /// names of three tokens that is unique where KV blocks have at least four.
    pub(crate) fn prompt(&self, index: usize) -> Vec<u32> {
        let request = &self.requests[index];
        let mut prompt = vec![FILLER; request.input_tokens as usize];
        let hashes =
            &self.prefix_hashes[request.prefix.start as usize..request.prefix.end as usize];
        let mut rest = prompt.as_mut_slice();
        for &hash in hashes {
            let (block, after) =
                rest.split_at_mut(rest.len().min(self.prefix_block_tokens as usize));
            name(block, SHARED, hash);
            rest = after;
        }
        name(rest, UNIQUE, index as u32);
        prompt
    }
}

/// First token of a block that requests share.
const SHARED: u32 = 2;
/// First token of what nobody shares.
const UNIQUE: u32 = 3;

/// Writes `kind` and `number` in front of `tokens`, as far as they go. No token is [`EOS`].
fn name(tokens: &mut [u32], kind: u32, number: u32) {
    const DIGITS: u32 = VOCAB_SIZE - 1;
    let digits = [
        number % DIGITS,
        number / DIGITS % DIGITS,
        number / DIGITS / DIGITS,
    ];
    let all = [kind, digits[0] + 1, digits[1] + 1, digits[2] + 1];
    for (token, value) in tokens.iter_mut().zip(all) {
        *token = value;
    }
}
