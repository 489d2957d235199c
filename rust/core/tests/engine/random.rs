//! Random operations on tiny engines: the invariants hold after every one.

use chairlift_core::config::Settings;
use chairlift_core::request::{NewRequest, RequestId};
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
    in_flight_aborts: u64,
    refused: u64,
}

fn run(seed: u64) -> Trace {
    let mut random = Random(seed);
    let mut harness = Harness::new(tiny_settings(&mut random));
    let mut trace = Trace::default();
    let mut next_id = 0;
    let mut in_flight = false;
    let mut steps = 0;
    while steps < STEPS_PER_RUN {
        match random.within(0, 99) {
            0..=24 => {
                next_id += 1;
                let new = random_request(&mut random, &harness, next_id);
                if harness.engine.metrics().queued < u64::from(harness.settings.max_queued_requests)
                {
                    harness.submit(new);
                } else {
                    let refusal = harness
                        .engine
                        .reserve(new.id)
                        .expect_err("the door is full");
                    assert_eq!(refusal.code(), "queue_full");
                }
            }
            25..=29 => {
                let id = next_id.saturating_sub(random.within(0, 12).into());
                let aborted = harness.abort(id);
                trace.in_flight_aborts += u64::from(aborted && in_flight);
                assert!(!harness.abort(id), "an abort is idempotent");
            }
            30..=31 => {
                next_id += 1;
                // A place that is taken and given back, as when a client leaves while tokenising.
                if harness.engine.reserve(RequestId(next_id)).is_ok() {
                    harness.engine.release(RequestId(next_id));
                }
            }
            32..=33 if in_flight => {
                harness.engine.fail_step(harness.now, harness.plan.step);
                harness.receive();
                in_flight = false;
            }
            _ if in_flight => {
                if random.chance(2) {
                    harness.failing_rows.push(harness.plan.rows[0]);
                }
                harness.commit();
                in_flight = false;
            }
            _ => {
                let idle = harness.engine.metrics();
                in_flight = harness.schedule();
                assert!(
                    in_flight || idle.live == 0,
                    "work waits, nothing is in flight, and the plan is empty"
                );
                steps += 1;
                trace.copies += harness.plan.block_copies.len();
                let digest = format!("{:?}", harness.plan);
                for byte in digest.bytes() {
                    trace.digest = trace.digest.wrapping_mul(31).wrapping_add(u64::from(byte));
                }
            }
        }
        if let Err(mistake) = harness.engine.audit() {
            panic!("seed {seed}, step {steps}: {mistake}");
        }
    }
    if in_flight {
        harness.commit();
    }
    harness.run_to_end();
    let metrics = harness.engine.metrics();
    assert_eq!(
        metrics.submitted,
        metrics.finished + metrics.aborted + metrics.failed
    );
    assert_eq!((metrics.used_blocks, metrics.queued), (0, 0), "seed {seed}");
    for (id, client) in &harness.clients {
        assert_eq!(client.ended, 1, "seed {seed}: {id} never ended");
    }
    Trace {
        preemptions: metrics.preemptions,
        cached_tokens: metrics.cached_tokens,
        aborted: metrics.aborted,
        failed: metrics.failed,
        finished: metrics.finished,
        refused: metrics.refused,
        ..trace
    }
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
        total.in_flight_aborts += trace.in_flight_aborts;
        total.refused += trace.refused;
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
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    assert_eq!(run(3), run(3));
    assert_ne!(run(3).digest, run(4).digest);
}
