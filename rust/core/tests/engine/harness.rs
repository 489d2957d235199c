//! A stand-in for executor and client.
//!
//! The executor (`executor.rs`) keeps one token for each KV slot (`contents.rs`). It writes a step's tokens where the plan says, makes
//! the copies, and reads each sampled sequence's whole history back through its block table; the next
//! token is a function of that history. So any block that is shared, reused or copied wrongly shows as
//! a wrong token. The client knows from the prompt alone which tokens must come.
//!
//! Steps are executed one after the other, when they are committed; what was launched ahead takes the
//! tokens that it does not know from what its rows sampled last.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use chairlift_core::Vocabulary;
use chairlift_core::config::Settings;
use chairlift_core::error::SubmitError;
use chairlift_core::iteration::plan::StepPlan;
use chairlift_core::output::{Event, OutputBatch, TokenLogprob};
use chairlift_core::record::RecordedEngine;
use chairlift_core::request::{
    Finish, NewRequest, RequestId, SamplingParams, StopParams, Ticket, Time,
};
use chairlift_core::text::TokenTable;

use super::client::{Answer, Client, check_text};
use super::contents::Contents;
use super::executor::ExecutorRow;

pub const EOS: u32 = 0;

/// Seeded random numbers (`SplitMix64`).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number in `low..=high`.
    pub fn within(&mut self, low: u32, high: u32) -> u32 {
        low + (self.next() % u64::from(high - low + 1)) as u32
    }

    pub fn chance(&mut self, percent: u32) -> bool {
        self.within(1, 100) <= percent
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The token after `history` in answer number `child`: any but [`EOS`], and that now and then.
pub fn next_token(history: &[u32], child: u32, vocab_size: u32) -> u32 {
    let mut state = 77 + u64::from(child);
    for &token in history {
        state = mix(state ^ u64::from(token)).wrapping_add(u64::from(token));
    }
    (state % u64::from(vocab_size)) as u32
}

/// The log-probability of `token` after `history`: any number that depends on both.
pub fn logprob(history: &[u32], token: u32) -> f32 {
    -(next_token(history, 1_000 + token, 10_000) as f32)
}

/// An entry for `token` and `num_best` others.
pub fn candidates(history: &[u32], token: u32, num_best: u32) -> Vec<TokenLogprob> {
    let entry = |token| TokenLogprob {
        token,
        logprob: logprob(history, token),
    };
    std::iter::once(token)
        .chain(0..num_best)
        .map(entry)
        .collect()
}

/// Tokens are letters, so that text shows every one of them.
pub fn vocabulary(vocab_size: u32) -> Vocabulary {
    let bytes: Vec<u8> = (0..vocab_size).map(|token| letter(token) as u8).collect();
    let offsets: Vec<i64> = (0..=i64::from(vocab_size)).collect();
    let mut special = vec![0; vocab_size as usize];
    special[EOS as usize] = 1;
    Vocabulary {
        tokens: Arc::new(TokenTable::new(&bytes, &offsets, &special).expect("the table is right")),
        eos_token_ids: vec![EOS],
    }
}

pub fn request(id: u64, prompt: Vec<u32>, max_tokens: u32) -> NewRequest {
    NewRequest {
        id: RequestId(id),
        prompt,
        sampling: SamplingParams::default(),
        stop: StopParams {
            max_tokens: Some(max_tokens),
            skip_special_tokens: true,
            ..StopParams::default()
        },
        cache_salt: None,
        priority: 0,
        deadline: None,
    }
}

/// A ticket of the default tenant and class.
pub fn ticket(request: &NewRequest) -> Ticket {
    Ticket {
        n: request.sampling.n,
        ..Ticket::new(request.id)
    }
}

/// A ticket of a tenant in a class.
pub fn ticket_for(tenant: &str, class: &str, request: &NewRequest) -> Ticket {
    Ticket {
        tenant: tenant.into(),
        class: Some(class.into()),
        ..ticket(request)
    }
}

/// A request whose answer has exactly `output_tokens` tokens, and no prefix in common with others.
pub fn exact(id: u64, prompt_tokens: u32, output_tokens: u32, vocab_size: u32) -> NewRequest {
    let mut random = Random(id);
    let prompt = (0..prompt_tokens).map(|_| random.within(1, vocab_size - 1));
    let mut new = request(id, prompt.collect(), output_tokens);
    new.stop.ignore_eos = true;
    new
}

pub struct Harness {
    pub engine: RecordedEngine,
    pub settings: Settings,
    /// The last plan.
    pub plan: StepPlan,
    /// Plans that were launched and have not landed, the oldest first.
    pub in_flight: VecDeque<StepPlan>,
    /// The plan that landed last.
    pub landed: StepPlan,
    pub clients: BTreeMap<RequestId, Client>,
    pub now: Time,
    /// Rows that fail in the next step.
    pub failing_rows: Vec<i32>,
    /// Most tokens that a sample returns; how many it does depends on the history.
    pub most_tokens_per_sample: u32,
    pub contents: Contents,
    pub rows: Vec<ExecutorRow>,
    /// By row, the seed of the request that was planned there last.
    pub planned: Vec<u64>,
}

impl Harness {
    pub fn new(settings: Settings) -> Self {
        let settings = in_flight(settings);
        let engine = RecordedEngine::new(&settings, vocabulary(settings.vocab_size));
        Self::with_engine(settings, engine.expect("settings"))
    }

    /// The same, with a flight recorder.
    pub fn recorded(settings: Settings) -> Self {
        let settings = in_flight(settings);
        let vocabulary = vocabulary(settings.vocab_size);
        let engine = RecordedEngine::recorded(&settings, vocabulary, "a test");
        Self::with_engine(settings, engine.expect("settings"))
    }

    fn with_engine(settings: Settings, engine: RecordedEngine) -> Self {
        Self {
            plan: StepPlan::new(engine.limits()),
            in_flight: VecDeque::new(),
            landed: StepPlan::default(),
            rows: vec![ExecutorRow::default(); settings.max_num_seqs as usize],
            planned: vec![0; settings.max_num_seqs as usize],
            contents: Contents::new(&settings),
            clients: BTreeMap::new(),
            now: Time(0),
            failing_rows: Vec::new(),
            most_tokens_per_sample: 1,
            engine,
            settings,
        }
    }

    /// Reserves and submits; panics on a refusal.
    pub fn submit(&mut self, request: NewRequest) {
        self.engine
            .reserve(self.now, Ticket::new(request.id))
            .expect("a place");
        self.submit_reserved(request);
    }

    /// Takes a place and submits, if the gate lets it in.
    pub fn try_submit(&mut self, ticket: Ticket, request: NewRequest) -> Result<(), SubmitError> {
        self.engine.reserve(self.now, ticket)?;
        let submitted = self.try_submit_reserved(request);
        self.receive();
        submitted
    }

    /// The same; panics on a rejection.
    pub fn submit_for(&mut self, tenant: &str, class: &str, request: NewRequest) {
        self.try_submit(ticket_for(tenant, class, &request), request)
            .expect("accepted");
    }

    /// Submits on a place that was reserved, if the gate lets it in.
    pub fn try_submit_reserved(&mut self, mut request: NewRequest) -> Result<(), SubmitError> {
        // The seed tells whose a row is.
        request.sampling.seed = request.id.0;
        self.engine.submit(self.now, request.clone())?;
        let answers = vec![Answer::default(); request.sampling.n as usize];
        let client = Client {
            answers,
            scored: 0,
            scheduled: 0,
            ended: 0,
            request,
        };
        assert!(self.clients.insert(client.request.id, client).is_none());
        Ok(())
    }

    /// Submits on a place that was reserved; panics on a rejection.
    pub fn submit_reserved(&mut self, request: NewRequest) {
        self.try_submit_reserved(request).expect("accepted");
    }

    pub fn schedule(&mut self) -> bool {
        self.now.0 += 10;
        let before = plan_pointers(&self.plan);
        let preemptions = self.engine.metrics().preemptions;
        let scheduled = self.engine.schedule(self.now, &mut self.plan);
        let preempted = self.engine.metrics().preemptions > preemptions;
        let is_ahead = !self.in_flight.is_empty();
        assert!(!(is_ahead && preempted), "what a victim has is in use");
        assert_eq!(before, plan_pointers(&self.plan), "plan memory moved");
        if scheduled {
            self.check_plan();
            self.check_ahead();
            self.in_flight.push_back(self.plan.clone());
        }
        self.receive();
        scheduled
    }

    /// The plan that lands next.
    pub fn oldest(&self) -> &StepPlan {
        self.in_flight.front().unwrap_or(&self.plan)
    }

    /// The oldest step lands.
    pub fn commit(&mut self) {
        let results = self.execute();
        self.now.0 += 10;
        let step = self.oldest().step;
        self.engine
            .commit(self.now, step, &results)
            .expect("results that fit");
        self.landed = self.in_flight.pop_front().unwrap_or_default();
        self.receive();
    }

    /// The oldest step fails before it has computed anything.
    pub fn fail_step(&mut self) {
        let plan = self.in_flight.pop_front().expect("a step in flight");
        for &row in &plan.rows {
            self.rows[row as usize].is_broken = true;
        }
        self.engine.fail_step(self.now, plan.step);
        self.receive();
    }

    /// The executor is gone.
    pub fn fail_all(&mut self) {
        self.engine.fail_all(self.now);
        self.in_flight.clear();
        self.receive();
    }

    /// Launches what may be launched, and lets the oldest step land; false if there is none.
    pub fn step(&mut self) -> bool {
        self.step_in(10)
    }

    /// A step whose iteration takes `us` microseconds.
    pub fn step_in(&mut self, us: u64) -> bool {
        let most = self.settings.max_in_flight_steps as usize;
        while self.in_flight.len() < most && self.schedule() {}
        if self.in_flight.is_empty() {
            return false;
        }
        self.now.0 += us - 10;
        self.commit();
        true
    }

    /// Microseconds pass, and the timers know.
    pub fn pass(&mut self, us: u64) {
        self.now.0 += us;
        self.engine.on_time(self.now);
        self.receive();
    }

    pub fn run_to_end(&mut self) {
        let mut steps = 0;
        loop {
            let ran = self.step();
            self.engine.audit().expect("consistent books");
            if !ran {
                match self.engine.next_wake() {
                    Some(time) if self.engine.metrics().live > 0 => self.now = time.max(self.now),
                    _ => break,
                }
            }
            steps += 1;
            assert!(steps < 100_000, "no end in sight");
        }
        assert_eq!(self.engine.metrics().live, 0, "somebody was left waiting");
    }

    /// Runs to the end; ids in the order in which they were first scheduled.
    pub fn order_of_admission(&mut self) -> Vec<u64> {
        let mut order = Vec::new();
        loop {
            for client in self.clients.values().filter(|client| client.scheduled == 1) {
                if !order.contains(&client.request.id.0) {
                    order.push(client.request.id.0);
                }
            }
            if !self.step() {
                return order;
            }
        }
    }

    pub fn abort(&mut self, id: u64) -> bool {
        let aborted = self.engine.abort(self.now, RequestId(id));
        self.receive();
        aborted
    }

    pub fn client(&self, id: u64) -> &Client {
        &self.clients[&RequestId(id)]
    }

    /// Takes the outputs and checks them against what must come.
    pub fn receive(&mut self) {
        let mut batch = OutputBatch::default();
        self.engine.take_outputs(&mut batch);
        for event in &batch.events {
            match event {
                Event::Scheduled { request, .. } => {
                    let client = self.clients.get_mut(request).expect("a client");
                    client.scheduled += 1;
                    assert_eq!(client.scheduled, 1, "{request} was scheduled first twice");
                }
                Event::Ended { request, stats } => {
                    let client = self.clients.get_mut(request).expect("a client");
                    client.ended += 1;
                    assert_eq!(client.ended, 1, "{request} ended twice");
                    let unscheduled = [
                        Finish::QueueTimeout,
                        Finish::DeadlineMissed,
                        Finish::Shed,
                        Finish::Displaced,
                    ];
                    let given_up = unscheduled
                        .iter()
                        .any(|&f| client.answers[0].finish == Some(f));
                    assert!(
                        !given_up || client.scheduled == 0,
                        "{request} was in a plan"
                    );
                    let waited = &stats.waits;
                    let parts = waited.slots_us
                        + waited.memory_us
                        + waited.budget_us
                        + waited.fairness_us
                        + waited.rate_us
                        + waited.window_us
                        + waited.sla_us;
                    if let Some(scheduled) = stats.first_scheduled {
                        let waited = scheduled.since_us(stats.arrival);
                        assert_eq!(parts, waited, "{request}: {:?}", stats.waits);
                    }
                    assert!(client.answers.iter().all(|answer| answer.finish.is_some()));
                    let tokens: usize = client
                        .answers
                        .iter()
                        .map(|answer| answer.tokens.len())
                        .sum();
                    assert_eq!(stats.num_output_tokens as usize, tokens);
                }
                Event::PromptLogprobs {
                    request,
                    num_tokens,
                    logprobs,
                } => {
                    let client = self.clients.get_mut(request).expect("a client");
                    assert!(client.answers[0].tokens.is_empty(), "{request}: too late");
                    client.check_scores(*num_tokens as usize, &batch.logprobs[logprobs.range()]);
                }
                Event::Output(output) => {
                    let client = self.clients.get_mut(&output.request).expect("a client");
                    assert_eq!(client.ended, 0, "{} spoke after its end", output.request);
                    let sampling = &client.request.sampling;
                    if sampling.prompt_logprobs.is_some() && !output.tokens.is_empty() {
                        let prompt = client.request.prompt.len();
                        assert_eq!(client.scored, prompt - 1, "{}", output.request);
                    }
                    let answer = &mut client.answers[output.child as usize];
                    assert_eq!(answer.finish, None, "{} ended twice", output.request);
                    let mut logprobs = Vec::new();
                    for &token in &batch.token_ids[output.tokens.range()] {
                        let mut history = client.request.prompt.clone();
                        history.extend(&answer.tokens);
                        let expected = next_token(&history, output.child, self.settings.vocab_size);
                        assert_eq!(token, expected, "{} child {}", output.request, output.child);
                        if let Some(num_best) = sampling.logprobs {
                            logprobs.extend(candidates(&history, token, num_best));
                        }
                        answer.tokens.push(token);
                    }
                    assert_eq!(batch.logprobs[output.logprobs.range()], logprobs);
                    answer.text.push_str(&batch.text[output.text.range()]);
                    answer.finish = output.finish;
                    check_text(&client.request, answer);
                }
            }
        }
    }
}

/// The settings with as many steps in flight as these tests are about.
fn in_flight(settings: Settings) -> Settings {
    Settings {
        max_in_flight_steps: super::STEPS_IN_FLIGHT,
        ..settings
    }
}

/// Whether a step is planned before the results of the one before are known. Then an engine does not
/// promise all that it does otherwise: that every running decode gets its token in every iteration, that
/// memory and rows are used again in the next one, and that who must be preempted is at once.
pub fn runs_ahead() -> bool {
    super::STEPS_IN_FLIGHT > 1
}

/// Text of a token.
pub fn letter(token: u32) -> char {
    char::from(b'a' + (token % 26) as u8)
}

fn plan_pointers(plan: &StepPlan) -> Vec<*const u8> {
    vec![
        plan.token_ids.as_ptr().cast(),
        plan.slot_mapping.as_ptr().cast(),
        plan.block_ids.as_ptr().cast(),
        plan.block_copies.as_ptr().cast(),
        plan.score_indices.as_ptr().cast(),
        plan.sample_rows.as_ptr().cast(),
        plan.resets.rows.as_ptr().cast(),
        plan.resets.ids.as_ptr().cast(),
        plan.resets.bias_ids.as_ptr().cast(),
    ]
}
