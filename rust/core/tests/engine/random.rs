//! Random operations on tiny engines: the invariants hold after every one.

use chairlift_core::config::Settings;
use chairlift_core::request::{NewRequest, RequestId, Ticket};
use chairlift_core::text::{StopStrings, StopText};

use crate::harness::{Harness, Random, request};

/// Steps of all runs together; the issue asks for 100,000 at least.
const STEPS_PER_RUN: u32 = 6_000;
const RUNS: u64 = 20;

fn tiny_settings(random: &mut Random) -> Settings {
    let max_num_seqs = random.within(1, 6);
    let chunk = random.within(1, 12);
    Settings {
        max_num_seqs,
        max_num_batched_tokens: max_num_seqs + random.within(0, 20),
        max_model_len: random.within(8, 40),
        long_prefill_token_threshold: random.chance(50).then_some(chunk),
        block_size: [1, 2, 4, 8][random.within(0, 3) as usize],
        num_kv_blocks: random.within(4, 24),
        enable_prefix_caching: random.chance(70),
        watermark_blocks: random.chance(50).then_some(random.within(0, 2)),
        max_queued_requests: random.within(1, 8),
        vocab_size: 12,
        ..Settings::default()
    }
}

/// A request from a tiny alphabet, so that prefixes are often shared.
fn random_request(random: &mut Random, harness: &Harness, id: u64) -> NewRequest {
    let longest = harness.engine.limits().max_model_len() - 1;
    let length = random.within(1, longest);
    let alphabet = random.within(1, 3);
    let prompt = (0..length).map(|_| random.within(1, alphabet)).collect();
    let mut new = request(id, prompt, random.within(1, 12));
    new.sampling.n = random.within(1, harness.settings.max_num_seqs.min(3));
    if random.chance(30) {
        new.sampling.presence_penalty = 0.5;
    }
    new.sampling.logprobs = random.chance(20).then(|| random.within(0, 2));
    new.sampling.prompt_logprobs = random.chance(20).then(|| random.within(0, 2));
    if random.chance(20) {
        new.sampling.logit_bias = vec![(1, 1.0); random.within(1, 1_024) as usize];
    }
    if random.chance(30) {
        let stops = StopStrings::new(&["ab", "cad", "k"], StopText::Excluded).expect("stops");
        new.stop.stop = Some(stops.into());
    }
    new.stop.max_tokens = random
        .chance(80)
        .then_some(new.stop.max_tokens.unwrap_or(1));
    new.stop.ignore_eos = random.chance(30);
    if random.chance(30) {
        new.stop.stop_token_ids = vec![random.within(1, 11)];
        new.stop.min_tokens = random.within(0, new.stop.max_tokens.unwrap_or(4));
    }
    new.cache_salt = random.chance(20).then(|| "tenant".to_string());
    new
}

/// What a run did, to be compared between runs of one seed; and that it did everything.
#[derive(Debug, Default, PartialEq, Eq)]
struct Trace {
    digest: u64,
    preemptions: u64,
    cached_tokens: u64,
    aborted: u64,
    failed: u64,
    finished: u64,
    copies: usize,
    scores: usize,
    several_tokens: u64,
    in_flight_aborts: u64,
    refused: u64,
    broken_results: u64,
}

/// A run: random operations on one engine.
struct Run {
    seed: u64,
    random: Random,
    harness: Harness,
    trace: Trace,
    next_id: u64,
    /// Requests whose place is reserved but that were not submitted yet.
    at_the_door: Vec<NewRequest>,
    in_flight: bool,
    steps: u32,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let mut harness = Harness::new(tiny_settings(&mut random));
        harness.most_tokens_per_sample = [1, 1, 2, 3][random.within(0, 3) as usize];
        Self {
            seed,
            harness,
            random,
            trace: Trace::default(),
            next_id: 0,
            at_the_door: Vec::new(),
            in_flight: false,
            steps: 0,
        }
    }

    /// One random operation.
    fn operate(&mut self) {
        match self.random.within(0, 999) {
            0..=249 => self.arrive(),
            250..=309 => self.leave_the_door(),
            310..=359 => self.abort_one(),
            360..=361 => self.end_all(),
            362..=379 if self.in_flight => self.fail_step(),
            380..=399 if self.in_flight => self.return_nonsense(),
            _ if self.in_flight => self.commit(),
            _ => self.schedule(),
        }
    }

    /// A request takes a place; most are submitted at once.
    fn arrive(&mut self) {
        self.next_id += 1;
        let new = random_request(&mut self.random, &self.harness, self.next_id);
        let full = self.harness.engine.metrics().queued
            >= u64::from(self.harness.settings.max_queued_requests);
        match self
            .harness
            .engine
            .reserve(self.harness.now, Ticket::new(new.id))
        {
            Ok(()) if self.random.chance(80) => self.harness.submit_reserved(new),
            Ok(()) => self.at_the_door.push(new),
            Err(refusal) => assert_eq!((refusal.code(), full), ("queue_full", true)),
        }
    }

    /// Somebody who had a place submits, or gives it back.
    fn leave_the_door(&mut self) {
        if self.at_the_door.is_empty() {
            return;
        }
        let last = self.at_the_door.len() as u32 - 1;
        let new = self
            .at_the_door
            .remove(self.random.within(0, last) as usize);
        if self.random.chance(60) {
            self.harness.submit_reserved(new);
        } else {
            self.harness.engine.release(new.id);
        }
    }

    fn abort_one(&mut self) {
        let id = self
            .next_id
            .saturating_sub(self.random.within(0, 12).into());
        self.at_the_door.retain(|new| new.id != RequestId(id));
        let aborted = self.harness.abort(id);
        self.trace.in_flight_aborts += u64::from(aborted && self.in_flight);
        assert!(!self.harness.abort(id), "an abort is idempotent");
    }

    fn end_all(&mut self) {
        if self.random.chance(50) {
            self.harness.engine.abort_all(self.harness.now);
        } else {
            self.harness.engine.fail_all(self.harness.now);
            self.at_the_door.clear();
            self.in_flight = false;
        }
        self.harness.receive();
        assert_eq!(self.harness.engine.metrics().live, 0);
    }

    fn fail_step(&mut self) {
        let step = self.harness.plan.step;
        self.harness.engine.fail_step(self.harness.now, step);
        self.harness.receive();
        self.in_flight = false;
    }

    /// Results that do not fit are refused and change nothing; the step goes on.
    fn return_nonsense(&mut self) {
        let mut results = self.harness.execute();
        results.statuses.push(0);
        let before = self.harness.engine.metrics();
        let (now, step) = (self.harness.now, self.harness.plan.step);
        let refused = self.harness.engine.commit(now, step, &results);
        assert_eq!(
            refused.map_err(|error| error.code()),
            Err("invalid_step_result")
        );
        assert_eq!(self.harness.engine.metrics(), before);
        self.trace.broken_results += 1;
    }

    fn commit(&mut self) {
        if self.random.chance(2) {
            let row = self.harness.plan.rows[0];
            self.harness.failing_rows.push(row);
        }
        let before = self.harness.engine.metrics().output_tokens;
        self.harness.commit();
        let tokens = self.harness.engine.metrics().output_tokens - before;
        self.trace.several_tokens += u64::from(tokens > self.harness.plan.num_samples() as u64);
        self.in_flight = false;
    }

    fn schedule(&mut self) {
        let before = self.harness.engine.metrics();
        self.in_flight = self.harness.schedule();
        if !self.in_flight {
            assert_eq!(
                before.live, 0,
                "work waits, nothing is in flight, and the plan is empty"
            );
            assert_eq!(self.harness.engine.metrics(), before, "nothing was decided");
        }
        self.steps += 1;
        self.trace.copies += self.harness.plan.block_copies.len();
        self.trace.scores += self.harness.plan.num_scores();
        for byte in format!("{:?}", self.harness.plan).bytes() {
            let digest = self.trace.digest.wrapping_mul(31);
            self.trace.digest = digest.wrapping_add(u64::from(byte));
        }
    }

    /// Ends what is open, and checks that nothing is left.
    fn close(mut self) -> Trace {
        if self.in_flight {
            self.harness.commit();
        }
        for new in self.at_the_door.drain(..) {
            self.harness.engine.release(new.id);
        }
        self.harness.run_to_end();
        let seed = self.seed;
        let metrics = self.harness.engine.metrics();
        assert_eq!((metrics.used_blocks, metrics.queued), (0, 0), "seed {seed}");
        for (id, client) in &self.harness.clients {
            assert_eq!(client.ended, 1, "seed {seed}: {id} never ended");
        }
        Trace {
            preemptions: metrics.preemptions,
            cached_tokens: metrics.cached_tokens,
            aborted: metrics.aborted,
            failed: metrics.failed,
            finished: metrics.finished,
            refused: metrics.rejected,
            ..self.trace
        }
    }
}

fn run(seed: u64) -> Trace {
    let mut run = Run::new(seed);
    while run.steps < STEPS_PER_RUN {
        run.operate();
        if let Err(mistake) = run.harness.engine.audit() {
            panic!("seed {seed}, step {}: {mistake}", run.steps);
        }
    }
    run.close()
}

#[test]
fn invariants_hold_over_random_operations() {
    let mut total = Trace::default();
    for seed in 0..RUNS {
        let trace = run(seed);
        total.preemptions += trace.preemptions;
        total.cached_tokens += trace.cached_tokens;
        total.aborted += trace.aborted;
        total.failed += trace.failed;
        total.finished += trace.finished;
        total.copies += trace.copies;
        total.scores += trace.scores;
        total.several_tokens += trace.several_tokens;
        total.in_flight_aborts += trace.in_flight_aborts;
        total.refused += trace.refused;
        total.broken_results += trace.broken_results;
    }
    // The scenario really happened, all of it.
    println!("{} steps: {total:?}", RUNS * u64::from(STEPS_PER_RUN));
    assert!(total.preemptions > 500, "{total:?}");
    assert!(total.cached_tokens > 1_000, "{total:?}");
    assert!(
        total.aborted > 500 && total.in_flight_aborts > 100,
        "{total:?}"
    );
    assert!(total.failed > 100 && total.finished > 5_000, "{total:?}");
    assert!(total.copies > 100 && total.refused > 100, "{total:?}");
    assert!(total.broken_results > 100, "{total:?}");
    assert!(
        total.scores > 10_000 && total.several_tokens > 1_000,
        "{total:?}"
    );
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    assert_eq!(run(3), run(3));
    assert_ne!(run(3).digest, run(4).digest);
}
