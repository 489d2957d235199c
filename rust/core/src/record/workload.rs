//! What a recorded run was asked for and what it measured: the input of "what would have happened".
//!
//! [`Measures`] watches a replay and keeps a line for each request and each step. [`recorded_workload`]
//! turns the requests into a workload of the simulator: arrivals, lengths, bounds, classes, tenants and
//! aborts as they were, prompts named by the chain of their blocks' contents so that those share a
//! prefix who did so in life. A request whose true length the log does not know (it was refused, given
//! up or cut off) gets the median of its class. `n` answers become `n` requests with one prompt.

use std::collections::{BTreeMap, HashMap, VecDeque};

use serde::Serialize;
use twox_hash::XxHash3_64;

use crate::config::Settings;
use crate::output::Event;
use crate::predict::iteration_time::StepShape;
use crate::record::format::Entry;
use crate::record::replay::Replayer;
use crate::request::{EndKind, NewRequest, RequestId, RequestStats, Ticket, Time};
use crate::sim::{SimRequest, Workload};

/// The least block that the simulator can name.
const MIN_BLOCK_TOKENS: u32 = 4;

/// A request as it was.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct MeasuredRequest {
    pub id: u64,
    pub tenant: String,
    /// Its class, by position.
    pub class: u32,
    /// When it was submitted, or took a place if it never was.
    pub arrival_us: u64,
    pub input_tokens: u32,
    pub max_tokens: Option<u32>,
    pub priority: i32,
    pub deadline_us: Option<u64>,
    /// Why it was refused; empty if it was not.
    pub refused: String,
    /// Output tokens of each answer, and whether it came to its own end.
    pub answers: Vec<(u32, bool)>,
    /// When its client gave it up, if that is how it ended.
    pub aborted_us: Option<u64>,
    /// What the engine counted; there if it ended.
    pub stats: Option<RequestStats>,
    /// Names of its prompt's blocks.
    #[serde(skip)]
    prefix: Vec<u32>,
}

/// A step as it was: what [`crate::sim::CostProfile`] prices, and what it took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct MeasuredStep {
    pub start_us: u64,
    pub duration_us: u64,
    /// Between the commit of the step before and this one's decision; `None` where nothing ran.
    pub gap_us: Option<u64>,
    /// Padding included.
    #[serde(flatten)]
    pub shape: StepShape,
}

/// Watches a replay.
#[derive(Debug, Default)]
pub struct Measures {
    /// In the order of their reservations.
    pub requests: Vec<MeasuredRequest>,
    /// Those that were committed.
    pub steps: Vec<MeasuredStep>,
    /// Policies that were loaded later; the simulator has the first throughout.
    pub reloads: u32,
    by_id: BTreeMap<RequestId, usize>,
    /// Steps in flight, the oldest first.
    in_flight: VecDeque<MeasuredStep>,
    landed_us: Option<u64>,
    names: HashMap<u64, u32>,
}

impl Measures {
    /// Looks at a record that has just been applied.
    pub fn observe(&mut self, now: Time, entry: &Entry, replayer: &Replayer) {
        match entry {
            Entry::Reserve { ticket, code } => self.reserve(now, ticket, code, replayer),
            Entry::Submit { request, code } => {
                self.submit(now, request, code, replayer.engine().limits().block_size());
            }
            Entry::Schedule { plan: None } if self.in_flight.is_empty() => self.landed_us = None,
            Entry::Schedule { plan: Some(_) } => {
                let padding = replayer.engine().padding();
                let mut shape = replayer.plan().shape();
                shape.sequences += f64::from(padding.sequences);
                shape.tokens += f64::from(padding.sequences);
                shape.decode_context += padding.context_tokens as f64;
                let runs_on = self.landed_us.filter(|_| self.in_flight.is_empty());
                self.in_flight.push_back(MeasuredStep {
                    start_us: now.0,
                    duration_us: 0,
                    gap_us: runs_on.map(|landed_us| now.0 - landed_us),
                    shape,
                });
            }
            Entry::Commit { .. } => {
                let landed_us = self.landed_us.replace(now.0).unwrap_or_default();
                if let Some(mut step) = self.in_flight.pop_front() {
                    // One that was planned ahead began when the one before it had ended.
                    step.duration_us = now.0 - step.start_us.max(landed_us);
                    self.steps.push(step);
                }
            }
            Entry::FailStep { .. } => drop(self.in_flight.pop_front()),
            Entry::FailAll => self.in_flight.clear(),
            Entry::Reload { code, .. } if code.is_empty() => self.reloads += 1,
            Entry::Abort { id, live: true } => {
                if let Some(&at) = self.by_id.get(id) {
                    self.requests[at].aborted_us = Some(now.0);
                }
            }
            Entry::Outputs { .. } => self.told(replayer),
            _ => {}
        }
    }

    fn reserve(&mut self, now: Time, ticket: &Ticket, code: &str, replayer: &Replayer) {
        let engine = replayer.engine();
        let class = engine.reserved_class(ticket.id).or(ticket.class.as_deref());
        let mut classes = engine.policy().classes.iter();
        let class = class.and_then(|name| classes.position(|class| class.name == name));
        self.by_id.insert(ticket.id, self.requests.len());
        self.requests.push(MeasuredRequest {
            id: ticket.id.0,
            tenant: ticket.tenant.clone(),
            class: class.unwrap_or_default() as u32,
            arrival_us: now.0,
            input_tokens: 0,
            max_tokens: None,
            priority: 0,
            deadline_us: None,
            refused: code.to_owned(),
            answers: vec![(0, false); ticket.n as usize],
            aborted_us: None,
            stats: None,
            prefix: Vec::new(),
        });
    }

    fn submit(&mut self, now: Time, request: &NewRequest, code: &str, block_size: u32) {
        let Some(&at) = self.by_id.get(&request.id) else {
            return;
        };
        let prefix = self.name_blocks(request, block_size);
        let known = &mut self.requests[at];
        known.arrival_us = now.0;
        known.input_tokens = request.prompt.len() as u32;
        known.max_tokens = request.stop.max_tokens;
        known.priority = request.priority;
        known.deadline_us = request.deadline.map(|at| at.since_us(now));
        code.clone_into(&mut known.refused);
        known.prefix = prefix;
    }

    /// The same name for the same content after the same content.
    fn name_blocks(&mut self, request: &NewRequest, block_size: u32) -> Vec<u32> {
        if block_size < MIN_BLOCK_TOKENS {
            return Vec::new();
        }
        let salt = request.cache_salt.as_deref().unwrap_or_default();
        let mut parent = XxHash3_64::oneshot(salt.as_bytes());
        let blocks = request.prompt.chunks_exact(block_size as usize);
        let names = blocks.map(|block| {
            parent = XxHash3_64::oneshot_with_seed(parent, bytemuck::cast_slice(block));
            let next = self.names.len() as u32;
            *self.names.entry(parent).or_insert(next)
        });
        names.collect()
    }

    fn told(&mut self, replayer: &Replayer) {
        for event in &replayer.outputs().events {
            match event {
                Event::Output(output) => {
                    let Some(&at) = self.by_id.get(&output.request) else {
                        continue;
                    };
                    let answers = &mut self.requests[at].answers;
                    let Some(answer) = answers.get_mut(output.child as usize) else {
                        continue;
                    };
                    answer.0 += output.tokens.len() as u32;
                    answer.1 |= output
                        .finish
                        .is_some_and(|finish| finish.kind() == EndKind::Finished);
                }
                Event::Ended { request, stats } => {
                    if let Some(at) = self.by_id.remove(request) {
                        self.requests[at].stats = Some(**stats);
                    }
                }
                _ => {}
            }
        }
    }
}

/// The requests as a workload, in order of arrival; beside it, how many answers got a guessed length.
///
/// Requests without a prompt are left out: their clients gave up at the door.
pub fn recorded_workload(measures: &Measures, settings: &Settings) -> (Workload, u32) {
    let guesses = median_lengths(measures);
    let mut workload = Workload {
        prefix_block_tokens: settings.block_size,
        ..Workload::default()
    };
    let mut tenants: BTreeMap<&str, u32> = BTreeMap::new();
    let mut guessed = 0;
    let mut requests: Vec<&MeasuredRequest> = measures.requests.iter().collect();
    requests.retain(|request| request.input_tokens > 0 && !never_fits(&request.refused));
    requests.sort_by_key(|request| request.arrival_us);
    let start_us = requests.first().map_or(0, |request| request.arrival_us);
    for request in requests {
        let next = tenants.len() as u32;
        let tenant = *tenants.entry(&request.tenant).or_insert(next);
        if tenant == next {
            workload.tenants.push(request.tenant.clone());
        }
        let begin = workload.prefix_hashes.len() as u32;
        workload.prefix_hashes.extend(&request.prefix);
        let prefix = begin..workload.prefix_hashes.len() as u32;
        let room = settings
            .max_model_len
            .saturating_sub(request.input_tokens)
            .max(1);
        let most = request.max_tokens.unwrap_or(room).min(room);
        for &(tokens, is_whole) in &request.answers {
            guessed += u32::from(!is_whole);
            let guess = guesses.get(&request.class).copied().unwrap_or(most);
            let length = if is_whole {
                tokens
            } else {
                guess.max(tokens + 1)
            };
            workload.max_tokens.push(most);
            workload.requests.push(SimRequest {
                arrival_us: request.arrival_us - start_us,
                input_tokens: request.input_tokens,
                output_tokens: length.min(most).max(1),
                tenant,
                class: request.class,
                priority: request.priority,
                deadline_us: request.deadline_us,
                abort_us: request.aborted_us.map(|at_us| at_us - request.arrival_us),
                prefix: prefix.clone(),
            });
        }
    }
    (workload, guessed)
}

/// Whether it was refused for what no other settings would change.
fn never_fits(refused: &str) -> bool {
    let kinds = [
        "invalid_parameter",
        "token_out_of_range",
        "empty_prompt",
        "duplicate_request",
    ];
    kinds.contains(&refused)
}

/// Median length of the answers that came to their own end, by class.
fn median_lengths(measures: &Measures) -> BTreeMap<u32, u32> {
    let mut lengths: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for request in &measures.requests {
        let whole = request.answers.iter().filter(|(_, is_whole)| *is_whole);
        let of_class = lengths.entry(request.class).or_default();
        of_class.extend(whole.map(|(tokens, _)| *tokens));
    }
    let medians = lengths.into_iter().filter_map(|(class, mut lengths)| {
        lengths.sort_unstable();
        Some((class, *lengths.get(lengths.len() / 2)?))
    });
    medians.collect()
}
