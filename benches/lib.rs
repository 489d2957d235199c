//! Workloads that the Rust benches share.

use std::sync::Arc;

use chairlift_core::Vocabulary;
use chairlift_core::config::Settings;
use chairlift_core::error::ConfigError;
use chairlift_core::iteration::commit::{STATUS_OK, StepResults};
use chairlift_core::iteration::plan::StepPlan;
use chairlift_core::output::OutputBatch;
use chairlift_core::record::RecordedEngine;
use chairlift_core::request::{NewRequest, RequestId, SamplingParams, StopParams, Ticket, Time};
use chairlift_core::text::TokenTable;
use mimalloc::MiMalloc;

/// The extension module's.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// Tokens of the bench vocabulary, the default model's size.
pub const VOCAB_SIZE: u32 = 49_152;

/// An engine with an executor that returns a constant token at no cost.
pub struct Bench {
    /// The engine under test.
    pub engine: RecordedEngine,
    plan: StepPlan,
    results: StepResults,
    log: Vec<u8>,
    batch: OutputBatch,
    now: Time,
    next_id: u64,
}

impl Bench {
    /// An idle engine.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        Self::with_engine(settings, RecordedEngine::new(settings, vocabulary()))
    }

    /// The same with a flight recorder.
    #[must_use]
    pub fn recorded(settings: &Settings) -> Self {
        Self::with_engine(
            settings,
            RecordedEngine::recorded(settings, vocabulary(), ""),
        )
    }

    fn with_engine(settings: &Settings, engine: Result<RecordedEngine, ConfigError>) -> Self {
        let engine = engine.expect("settings that fit");
        let samples = settings.max_num_seqs as usize;
        Self {
            plan: StepPlan::new(engine.limits()),
            engine,
            results: StepResults {
                token_ids: Vec::with_capacity(samples),
                token_offsets: Vec::with_capacity(samples + 1),
                statuses: Vec::with_capacity(samples),
                ..StepResults::default()
            },
            log: Vec::new(),
            batch: OutputBatch::default(),
            now: Time(0),
            next_id: 0,
        }
    }

    /// A request whose prompt no other shares.
    pub fn request(&mut self, prompt_tokens: u32, max_tokens: u32) -> NewRequest {
        self.next_id += 1;
        let id = self.next_id;
        let token = |at: u32| (id as u32).wrapping_mul(2_654_435_761).wrapping_add(at) % VOCAB_SIZE;
        NewRequest {
            id: RequestId(id),
            prompt: (0..prompt_tokens).map(token).collect(),
            sampling: SamplingParams::default(),
            stop: StopParams {
                max_tokens: Some(max_tokens),
                ignore_eos: true,
                skip_special_tokens: true,
                ..StopParams::default()
            },
            cache_salt: None,
            priority: 0,
            deadline: None,
        }
    }

    /// Reserves and submits.
    pub fn submit(&mut self, request: NewRequest) {
        self.submit_as(Ticket::new(request.id), request);
    }

    /// Reserves with a ticket and submits.
    pub fn submit_as(&mut self, ticket: Ticket, request: NewRequest) {
        self.engine
            .reserve(self.now, ticket)
            .expect("room at the door");
        self.engine
            .submit(self.now, request)
            .expect("a request that fits");
    }

    /// Gives a request up.
    pub fn abort(&mut self, id: RequestId) {
        self.engine.abort(self.now, id);
        self.engine.take_outputs(&mut self.batch);
        self.batch.clear();
    }

    /// One iteration: schedule, plan, commit, outputs taken. Returns the tokens it scheduled.
    pub fn step(&mut self) -> usize {
        self.now.0 += 1_000;
        if !self.engine.schedule(self.now, &mut self.plan) {
            return 0;
        }
        let results = &mut self.results;
        results.token_ids.clear();
        results.token_ids.resize(self.plan.num_samples(), 1_000);
        results.token_offsets.clear();
        results
            .token_offsets
            .extend(0..=self.plan.num_samples() as u32);
        results.statuses.clear();
        results.statuses.resize(self.plan.num_seqs(), STATUS_OK);
        self.engine
            .commit(self.now, self.plan.step, results)
            .expect("results that fit");
        self.engine.take_outputs(&mut self.batch);
        self.batch.clear();
        if let Some(recorder) = self.engine.recorder()
            && recorder.num_bytes() > 1 << 16
        {
            self.log = recorder.take(std::mem::take(&mut self.log));
        }
        self.plan.num_tokens()
    }
}

/// Tokens of four bytes each, as a byte-level vocabulary has on average.
fn vocabulary() -> Vocabulary {
    let bytes: Vec<u8> = (0..VOCAB_SIZE * 4)
        .map(|at| b'a' + (at % 26) as u8)
        .collect();
    let offsets: Vec<i64> = (0..=i64::from(VOCAB_SIZE)).map(|token| token * 4).collect();
    let special = vec![0; VOCAB_SIZE as usize];
    Vocabulary {
        tokens: Arc::new(TokenTable::new(&bytes, &offsets, &special).expect("a right table")),
        eos_token_ids: vec![2],
    }
}
