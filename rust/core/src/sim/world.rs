//! The world around the engine: clock, clients and executor.
//!
//! Everything that happens goes through one heap, ordered by time and, at one time, by when it was
//! decided. The engine's own timers are asked for before each jump of the clock, so none is ever stale.
//! All that happens at one moment happens before the engine decides, as commands do that are waiting
//! when the scheduler thread wakes.
//!
//! An iteration allocates nothing, but for the growth of the log.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;

use crate::config::Settings;
use crate::iteration::commit::{STATUS_OK, StepResults};
use crate::iteration::plan::StepPlan;
use crate::output::OutputBatch;
use crate::predict::iteration_time::StepShares;
use crate::request::{Finish, Time};
use crate::sim::clients::Clients;
use crate::sim::random::{Cause, Random};
use crate::sim::record::{Iteration, IterationView, Outcome, ServiceSample, SimOutcome};
use crate::sim::slowness::{self, Slowness};
use crate::sim::workload::{EOS, FILLER, VOCAB_SIZE, Workload};
use crate::sim::{SimConfig, SimError};
use crate::text::TokenTable;
use crate::{Engine, Vocabulary};

/// What can happen, beside the engine's timers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The next request of the workload comes.
    Arrival,
    /// A rejected request comes again.
    Retry(u32),
    /// A client gives up.
    Abort(u32),
    /// The oldest step in flight is done.
    StepEnd,
}

/// A step that was launched.
struct Flight {
    plan: StepPlan,
    iteration: Iteration,
}

pub(crate) struct World<'a> {
    config: &'a SimConfig,
    workload: &'a Workload,
    engine: Engine,
    now_us: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    num_events: u64,
    next_arrival: usize,
    noise: Random,
    slowness: Slowness<'a>,
    /// Plans that are not in flight.
    spare: Vec<StepPlan>,
    results: StepResults,
    batch: OutputBatch,
    /// Steps that the executor has, the oldest first: that one runs.
    in_flight: VecDeque<Flight>,
    /// Which request has a row of the executor.
    row_requests: Vec<u32>,
    clients: Clients<'a>,
    preemptions: u64,
    outcome: SimOutcome,
}

impl<'a> World<'a> {
    pub(crate) fn new(config: &'a SimConfig, workload: &'a Workload) -> Result<Self, SimError> {
        config.profile.validate()?;
        slowness::validate(config.slowness.as_deref().unwrap_or_default())?;
        workload.validate(config)?;
        let settings = Settings {
            vocab_size: VOCAB_SIZE,
            ..config.settings.clone()
        };
        let engine = Engine::new(&settings, vocabulary())?;
        let rows = settings.max_num_seqs as usize;
        let mut world = Self {
            spare: (0..settings.max_in_flight_steps)
                .map(|_| StepPlan::new(engine.limits()))
                .collect(),
            engine,
            now_us: 0,
            events: BinaryHeap::new(),
            num_events: 0,
            next_arrival: 0,
            noise: Random::new(config.seed, Cause::Noise),
            slowness: Slowness::new(config),
            results: StepResults::default(),
            batch: OutputBatch::default(),
            in_flight: VecDeque::new(),
            row_requests: vec![0; rows],
            clients: Clients::new(config, workload),
            preemptions: 0,
            outcome: SimOutcome::default(),
            config,
            workload,
        };
        world.expect_next_arrival();
        Ok(world)
    }

    pub(crate) fn run<F>(mut self, mut observe: F) -> Result<SimOutcome, SimError>
    where
        F: FnMut(&Engine, &IterationView<'_>) -> ControlFlow<()>,
    {
        while let Some(now_us) = self.next_instant() {
            self.now_us = now_us;
            let mut ended = None;
            while let Some(event) = self.pop_due() {
                match event {
                    Event::Arrival => self.arrive(),
                    Event::Retry(request) => self.submit(request),
                    Event::Abort(request) => self.abort(request),
                    Event::StepEnd => ended = self.end_step(),
                }
            }
            if self.engine.next_wake().is_some_and(|at| at.0 <= now_us) {
                self.engine.on_time(Time(now_us));
            }
            self.receive();
            if let Some(flight) = ended {
                let flow = self.observe(&flight, &mut observe);
                self.spare.push(flight.plan);
                if flow.is_break() {
                    return Ok(self.into_outcome());
                }
            }
            self.start_steps();
            self.receive();
        }
        let live = self.engine.metrics().live;
        if live > 0 {
            let now_us = self.now_us;
            return Err(SimError::Stuck { live, now_us });
        }
        Ok(self.into_outcome())
    }

    fn into_outcome(mut self) -> SimOutcome {
        if self.config.service_interval.is_some() {
            self.sample_services();
        }
        SimOutcome {
            records: self.clients.records,
            gaps: self.clients.gaps,
            recomputed_tokens: self.engine.metrics().recomputed_tokens,
            backfilled: self.engine.metrics().backfilled,
            forecast_slips: self.engine.metrics().forecast_slips,
            end_us: self.now_us,
            ..self.outcome
        }
    }

    /// When something happens next.
    fn next_instant(&self) -> Option<u64> {
        let event = self.events.peek().map(|Reverse((at_us, ..))| *at_us);
        // What was due by now has been fired.
        let wake = self.engine.next_wake().map(|at| at.0);
        let wake = wake.filter(|&at_us| at_us > self.now_us);
        event.into_iter().chain(wake).min()
    }

    fn pop_due(&mut self) -> Option<Event> {
        let &Reverse((at_us, _, event)) = self.events.peek()?;
        if at_us > self.now_us {
            return None;
        }
        self.events.pop();
        Some(event)
    }

    fn expect(&mut self, at_us: u64, event: Event) {
        self.events.push(Reverse((at_us, self.num_events, event)));
        self.num_events += 1;
    }

    /// Arrivals are sorted, so only the next one has to be in the heap.
    fn expect_next_arrival(&mut self) {
        if let Some(request) = self.workload.requests.get(self.next_arrival) {
            self.expect(request.arrival_us, Event::Arrival);
        }
    }

    fn arrive(&mut self) {
        let index = self.next_arrival;
        self.next_arrival += 1;
        self.expect_next_arrival();
        if let Some(after_us) = self.workload.requests[index].abort_us {
            self.expect(self.now_us + after_us, Event::Abort(index as u32));
        }
        self.submit(index as u32);
    }

    /// Sends the request to the engine, and sees to its trying again if it is rejected.
    fn submit(&mut self, index: u32) {
        let at = index as usize;
        if !self.clients.hopes(at) {
            return; // given up while it waited to try again
        }
        let now = Time(self.now_us);
        self.clients.records[at].submitted_us = self.now_us;
        let reserved = self.engine.reserve(now, self.clients.ticket(at));
        let accepted =
            reserved.and_then(|()| self.engine.submit(now, self.clients.new_request(at)));
        let Err(error) = accepted else {
            self.clients.accepted(at);
            return;
        };
        self.clients.records[at].rejections += 1;
        let may_retry = self.config.retry && self.clients.records[at].rejections == 1;
        if let Some(after_us) = error.retry_after_us().filter(|_| may_retry) {
            self.expect(self.now_us + after_us, Event::Retry(index));
        } else {
            let outcome = Outcome::Rejected(error.code());
            self.clients.end(at, outcome, self.now_us);
        }
    }

    fn abort(&mut self, index: u32) {
        let at = index as usize;
        let live = self.engine.abort(Time(self.now_us), self.clients.id(at));
        if !live && self.clients.hopes(at) {
            let outcome = Outcome::Ended(Finish::Abort);
            self.clients.end(at, outcome, self.now_us);
        }
    }

    /// Lets the engine decide as far ahead as it may, and the executor have what it decided.
    fn start_steps(&mut self) {
        while let Some(mut plan) = self.spare.pop() {
            if !self.engine.schedule(Time(self.now_us), &mut plan) {
                self.spare.push(plan);
                return;
            }
            self.start_step(plan);
        }
    }

    fn start_step(&mut self, plan: StepPlan) {
        for (row, ints) in plan.resets.rows.iter().zip(&plan.resets.ints) {
            self.row_requests[*row as usize] = ints[1] as u32;
        }
        let metrics = self.engine.metrics();
        let padding = self.engine.padding();
        let profile = &self.config.profile;
        // It begins when all those before it are done.
        let start_us = self.in_flight.back().map_or(self.now_us, |last| {
            last.iteration.start_us + last.iteration.duration_us
        });
        let slowness = self.slowness.at(start_us);
        let iteration = Iteration {
            start_us,
            duration_us: profile.duration_us(&plan, padding, &mut self.noise, slowness),
            num_decodes: plan.num_decodes as u32,
            prefill_tokens: (plan.num_tokens() - plan.num_decodes) as u32,
            sequences: plan.num_seqs() as u32,
            running: metrics.running_sequences as u32,
            waiting: metrics.waiting_sequences as u32,
            free_blocks: (metrics.free_blocks + metrics.cached_blocks) as u32,
            preemptions: (metrics.preemptions - self.preemptions) as u32,
        };
        self.preemptions = metrics.preemptions;
        self.in_flight.push_back(Flight { plan, iteration });
        if self.in_flight.len() == 1 {
            self.expect(self.now_us + iteration.duration_us, Event::StepEnd);
        }
    }

    /// Commits what the oldest step sampled; the next one begins.
    fn end_step(&mut self) -> Option<Flight> {
        let flight = self.in_flight.pop_front()?;
        let Flight { plan, iteration } = &flight;
        if let Some(next) = self.in_flight.front() {
            let end_us = self.now_us + next.iteration.duration_us;
            self.expect(end_us, Event::StepEnd);
        }
        let costs = self.config.profile.coefficients();
        let time_us = iteration.duration_us as f64;
        let shares = StepShares::new(&costs, &plan.shape(), time_us);
        self.clients.charge(plan, &shares, &self.row_requests);
        self.sample(plan);
        self.engine
            .commit(Time(self.now_us), plan.step, &self.results)
            .expect("the results were made for this very plan");
        Some(flight)
    }

    /// The model: filler, until the answer has its true length.
    fn sample(&mut self, plan: &StepPlan) {
        let results = &mut self.results;
        results.token_ids.clear();
        let outputs = plan.sample_rows.iter().zip(&plan.sample_output_indices);
        results.token_ids.extend(outputs.map(|(&row, &index)| {
            let request = self.row_requests[row as usize] as usize;
            let length = self.workload.requests[request].output_tokens;
            if index as u32 + 1 == length {
                EOS
            } else {
                FILLER
            }
        }));
        results.token_offsets.clear();
        results.token_offsets.extend(0..=plan.num_samples() as u32);
        results.statuses.clear();
        results.statuses.resize(plan.num_seqs(), STATUS_OK);
    }

    fn observe<F>(&mut self, flight: &Flight, observe: &mut F) -> ControlFlow<()>
    where
        F: FnMut(&Engine, &IterationView<'_>) -> ControlFlow<()>,
    {
        let Flight { plan, iteration } = flight;
        self.outcome.iterations.push(*iteration);
        let count = self.outcome.iterations.len();
        if let Some(interval) = self.config.service_interval
            && count.is_multiple_of(interval.max(1) as usize)
        {
            self.sample_services();
        }
        let view = IterationView {
            iteration,
            plan,
            services: &self.clients.services,
        };
        observe(&self.engine, &view)
    }

    fn sample_services(&mut self) {
        let tenants = self.clients.services.tenants();
        self.outcome.services.push(ServiceSample {
            at_us: self.now_us,
            priced_tokens: tenants.iter().map(|tenant| tenant.priced_tokens).collect(),
            device_us: tenants.iter().map(|tenant| tenant.device_us).collect(),
        });
    }

    /// Hands the engine's news to the clients.
    fn receive(&mut self) {
        if self.engine.outputs().is_empty() {
            return;
        }
        let mut batch = std::mem::take(&mut self.batch);
        std::mem::swap(&mut batch, self.engine.outputs());
        self.clients.receive(&batch, self.now_us);
        batch.clear();
        self.batch = batch;
    }
}

/// Tokens without text: what lies beyond a token table has none.
fn vocabulary() -> Vocabulary {
    let tokens = TokenTable::new(&[], &[0, 0], &[1]);
    Vocabulary {
        tokens: Arc::new(tokens.expect("one token without bytes is a table")),
        eos_token_ids: vec![EOS],
    }
}
