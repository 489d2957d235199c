//! The flight recorder: what was recorded happens again, and what differs is named.

use std::collections::BTreeSet;

use chairlift_core::config::Settings;
use chairlift_core::config::policy::{Join, OnTimeout, Order, Policy, Sharing};
use chairlift_core::record::{
    Decoder, Entry, Header, LogError, Measures, Mismatch, Moment, Replayer, Storyteller,
    read_header, recorded_workload,
};
use chairlift_core::request::RequestId;

use super::harness::{Harness, exact, ticket};
use super::random::Run;

/// Runs, and steps of each.
const RUNS: u64 = 24;
const STEPS_PER_RUN: u32 = 1_500;

/// Everything that was recorded so far.
fn take_log(harness: &mut Harness) -> Vec<u8> {
    let recorder = harness.engine.recorder().expect("it is recorded");
    recorder.take(Vec::new())
}

fn header_of(log: &[u8]) -> (Header, usize) {
    read_header(log).expect("a log").expect("a header")
}

/// Replays a log to its end, the last whole record: how many records that are, and what differs.
fn replay(log: &[u8], settings: Option<&Settings>) -> (u64, Result<(), Box<Mismatch>>) {
    replay_and(log, settings, |_, _, _| {})
}

fn replay_and(
    log: &[u8],
    settings: Option<&Settings>,
    mut observe: impl FnMut(&Decoder, &Entry, &Replayer),
) -> (u64, Result<(), Box<Mismatch>>) {
    let (header, mut at) = header_of(log);
    let mut replayer = Replayer::new(&header, settings).expect("an engine");
    let mut decoder = Decoder::after(&header);
    while let Some((entry, length)) = decoder.decode(&log[at..]).expect("a whole log") {
        at += length;
        if let Err(mismatch) = replayer.apply(decoder.now(), &entry) {
            return (replayer.records(), Err(mismatch));
        }
        observe(&decoder, &entry, &replayer);
    }
    (replayer.records(), Ok(()))
}

/// What the policies of the recorded runs had, so that none is forgotten.
fn kinds(policy: &Policy) -> Vec<String> {
    let mut kinds = vec![
        format!("{:?}", policy.sharing),
        format!("{:?}", policy.order),
        format!("{:?}", policy.join)
            .split(' ')
            .next()
            .unwrap_or_default()
            .to_owned(),
    ];
    if policy.shedding.is_some() {
        kinds.push("shedding".into());
    }
    let promotes = |class: &chairlift_core::config::policy::ClassSettings| {
        class.on_timeout == OnTimeout::Promote && class.max_queue_time_us.is_some()
    };
    if policy.classes.iter().any(promotes) {
        kinds.push("promote".into());
    }
    kinds
}

#[test]
fn random_operations_replay_bit_for_bit() {
    let mut all_kinds = BTreeSet::new();
    let (mut records, mut preemptions, mut aborted, mut reloads) = (0, 0, 0, 0);
    for seed in 100..100 + RUNS {
        let mut run = Run::recorded(seed);
        while run.steps < STEPS_PER_RUN {
            run.operate();
        }
        all_kinds.extend(kinds(&run.harness.settings.policy));
        let metrics = run.harness.engine.metrics();
        preemptions += metrics.preemptions;
        aborted += metrics.aborted;
        let log = take_log(&mut run.harness);
        let (replayed, same) = replay_and(&log, None, |_, entry, _| {
            reloads += u32::from(matches!(entry, Entry::Reload { .. }));
        });
        if let Err(mismatch) = same {
            panic!("seed {seed}: {mismatch}");
        }
        let recorder = run.harness.engine.recorder().expect("it is recorded");
        assert_eq!(replayed, recorder.num_records(), "seed {seed}");
        records += replayed;
    }
    println!("{records} records, {preemptions} preemptions, {aborted} aborted, {reloads} reloads");
    assert!(records > 100_000, "{records}");
    assert!(preemptions > 100 && aborted > 100 && reloads > 20);
    let expected = [
        "Arrival",
        "Continuous",
        "Deadline",
        "Fair",
        "Fcfs",
        "Footprint",
        "Prefix",
        "Shortest",
        "Static",
        "Window",
        "promote",
        "shedding",
    ];
    for kind in expected {
        assert!(all_kinds.contains(kind), "no run had {kind}: {all_kinds:?}");
    }
}

/// Ten requests of falling length for two rows.
fn short_run() -> Vec<u8> {
    let settings = Settings {
        max_num_seqs: 2,
        max_num_batched_tokens: 32,
        max_model_len: 64,
        block_size: 4,
        num_kv_blocks: 64,
        vocab_size: 12,
        ..Settings::default()
    };
    let mut harness = Harness::recorded(settings);
    for id in 1..=10 {
        harness.submit(exact(id, 20 - id as u32, 4, 12));
    }
    harness.run_to_end();
    take_log(&mut harness)
}

#[test]
fn a_changed_policy_is_caught_with_step_and_field() {
    let log = short_run();
    let (_, same) = replay(&log, None);
    same.expect("the same policy");
    let settings = header_of(&log).0.settings;

    let mut other = settings.clone();
    other.policy.order = Order::Shortest;
    other.policy.ageing = 0.0;
    let (_, differs) = replay(&log, Some(&other));
    let mismatch = differs.expect_err("another order");
    // Nobody decided anything before the first step, in which another request is first.
    assert_eq!((mismatch.step, mismatch.call), (1, "schedule"));
    assert_eq!(mismatch.field, "num_tokens");
    assert_ne!(mismatch.logged, mismatch.replayed);

    let other = Settings {
        max_num_seqs: 1,
        ..settings.clone()
    };
    let mismatch = replay(&log, Some(&other)).1.expect_err("one row less");
    assert_eq!((mismatch.step, mismatch.field), (1, "num_seqs"));
    assert_eq!(
        (mismatch.logged.as_str(), mismatch.replayed.as_str()),
        ("2", "1")
    );

    // What only moves blocks about is found in the arrays.
    let other = Settings {
        block_size: 8,
        ..settings
    };
    let mismatch = replay(&log, Some(&other)).1.expect_err("larger blocks");
    assert_eq!(mismatch.field, "block_ids");
    assert!(mismatch.logged.starts_with("digest "), "{mismatch}");
}

#[test]
fn a_log_that_was_cut_off_is_good_up_to_its_last_whole_record() {
    let log = short_run();
    let (all, _) = replay(&log, None);
    let (header, begin) = header_of(&log);
    assert_eq!(
        (header.about.as_str(), header.package.is_empty()),
        ("a test", false)
    );
    let mut last = 0;
    for end in (begin..log.len()).step_by(97) {
        let (records, same) = replay(&log[..end], None);
        same.expect("what is there is right");
        assert!(
            last <= records && records < all,
            "{end}: {records} of {all}"
        );
        last = records;
    }
    assert!(last > all / 2);
    for end in 0..begin {
        assert_eq!(read_header(&log[..end]), Ok(None), "{end}");
    }
}

#[test]
fn another_format_another_build_and_another_file_are_told_apart() {
    let log = short_run();
    let changed = |at: usize| {
        let mut log = log.clone();
        log[at] ^= 1;
        read_header(&log).expect_err("something else")
    };
    assert_eq!(changed(0), LogError::NoLog);
    assert_eq!(changed(8), LogError::Format { found: 0, known: 1 });
    assert_eq!(changed(12), LogError::Layout);
    assert_eq!(read_header(b"{\"choices\": []}"), Err(LogError::NoLog));
    let (_, begin) = header_of(&log);
    let mut damaged = log[begin..].to_vec();
    damaged[1] = 99; // a kind that there is not
    let read = Decoder::default().decode(&damaged);
    assert_eq!(read.expect_err("damaged").code(), "damaged_log");
}

#[test]
fn a_recording_can_be_stopped_and_says_so() {
    let mut harness = Harness::recorded(Settings::default());
    harness.submit(exact(1, 10, 2, 100));
    harness.step();
    let log = harness
        .engine
        .stop_recording("the disk is full")
        .expect("a log");
    assert!(harness.engine.recorder().is_none());
    harness.run_to_end();
    let mut why = None;
    let (_, same) = replay_and(&log, None, |_, entry, _| {
        if let Entry::Stopped { why: said } = entry {
            why = Some(said.clone());
        }
    });
    same.expect("what is there is right");
    assert_eq!(why.as_deref(), Some("the disk is full"));
}

#[test]
fn an_idle_iteration_of_32_takes_less_than_200_bytes_beyond_its_tokens() {
    let mut harness = Harness::recorded(Settings::default());
    for id in 1..=32 {
        harness.submit(exact(id, 40, 64, 32_000));
    }
    while harness.plan.num_decodes < 32 {
        harness.step();
    }
    take_log(&mut harness);
    for _ in 0..10 {
        harness.step();
    }
    assert_eq!(harness.plan.num_decodes, 32);
    let bytes = take_log(&mut harness).len();
    println!("{} bytes an iteration of 32", bytes / 10);
    let tokens = 32 * 3; // ids below 32,000 take up to three bytes
    assert!(bytes / 10 < 200 + tokens, "{}", bytes / 10);
}

#[test]
fn a_story_tells_of_the_wait_the_preemption_and_the_gap() {
    let settings = Settings {
        max_num_seqs: 4,
        max_num_batched_tokens: 64,
        max_model_len: 64,
        block_size: 4,
        num_kv_blocks: 16,
        vocab_size: 32,
        watermark_blocks: Some(0),
        enable_prefix_caching: false,
        policy: Policy {
            sharing: Sharing::Fcfs,
            join: Join::Continuous,
            ..Policy::default()
        },
        ..Settings::default()
    };
    let mut harness = Harness::recorded(settings);
    // Two grow until the pool is full; the newer gives way. A third waits for memory from the start.
    harness.submit(exact(1, 24, 24, 32));
    harness.submit(exact(2, 24, 24, 32));
    harness.step();
    harness.submit(exact(3, 40, 4, 32));
    harness.run_to_end();
    assert!(harness.engine.metrics().preemptions > 0);
    let log = take_log(&mut harness);
    let tell = |id: u64| {
        let mut teller = Storyteller::new(RequestId(id));
        let (_, same) = replay_and(&log, None, |decoder, entry, replayer| {
            if !teller.is_over() {
                teller.observe(decoder.now(), entry, replayer);
            }
        });
        same.expect("the same");
        let known = teller.requests().0;
        (teller.finish(), known)
    };

    let (story, _) = tell(2);
    let story = story.expect("request 2");
    let preempted = story
        .moments
        .iter()
        .position(|m| matches!(m, Moment::Preempted { .. }));
    let resumed = story
        .moments
        .iter()
        .position(|m| matches!(m, Moment::Resumed { .. }));
    assert!(
        preempted.expect("preempted") < resumed.expect("resumed"),
        "{story:?}"
    );
    let stats = story.stats.expect("it ended");
    assert_eq!(stats.num_preemptions, 1);
    assert_eq!(story.ends[0].reason, "length");
    let gap = &story.gaps[0];
    assert!(
        gap.steps > gap.steps_with_it,
        "others ran meanwhile: {gap:?}"
    );

    let (story, _) = tell(3);
    let story = story.expect("request 3");
    let waits: Vec<_> = story.waits.iter().map(|span| span.reason).collect();
    // It came in the middle of an iteration, and then there was no memory.
    assert_eq!(waits, ["budget", "memory"], "{story:?}");
    let lengths: Vec<u64> = story
        .waits
        .iter()
        .map(|span| span.to_us - span.from_us)
        .collect();
    let waited = story.stats.expect("it ended").waits;
    assert_eq!(lengths, [waited.budget_us, waited.memory_us]);
    let scheduled = story.scheduled.expect("scheduled");
    assert_eq!(scheduled.at_us, story.waits[1].to_us);

    let (story, known) = tell(77);
    assert!(story.is_none());
    assert_eq!(known, 3);
}

#[test]
fn what_was_recorded_can_be_simulated() {
    let settings = Settings {
        max_num_seqs: 3,
        max_num_batched_tokens: 64,
        max_model_len: 64,
        block_size: 4,
        num_kv_blocks: 40,
        vocab_size: 12,
        ..Settings::default()
    };
    let mut harness = Harness::recorded(settings.clone());
    for id in 1..=6 {
        let mut new = exact(1, 12, 4 + id as u32, 12); // all with the same prompt
        new.id = RequestId(id);
        harness
            .engine
            .reserve(harness.now, ticket(&new))
            .expect("a place");
        harness.submit_reserved(new);
        harness.step();
    }
    harness.abort(6);
    harness.run_to_end();
    let log = take_log(&mut harness);
    let mut measures = Measures::default();
    let (_, same) = replay_and(&log, None, |decoder, entry, replayer| {
        measures.observe(decoder.now(), entry, replayer);
    });
    same.expect("the same");
    assert_eq!(measures.requests.len(), 6);
    assert!(measures.steps.len() > 6 && measures.steps.iter().all(|step| step.duration_us > 0));
    let (workload, guessed) = recorded_workload(&measures, &settings);
    assert_eq!(guessed, 1, "only the one that was aborted");
    let lengths: Vec<u32> = workload.requests.iter().map(|r| r.output_tokens).collect();
    assert_eq!(lengths[..5], [5, 6, 7, 8, 9]);
    assert!(workload.requests[5].abort_us.is_some());
    assert_eq!(workload.max_tokens, [5, 6, 7, 8, 9, 10]);
    let names: BTreeSet<&[u32]> = workload
        .requests
        .iter()
        .map(|r| &workload.prefix_hashes[r.prefix.start as usize..r.prefix.end as usize])
        .collect();
    assert_eq!(names.len(), 1, "one prompt, one chain of names");
}

#[test]
fn segments_replay_in_a_row_and_their_ends_are_told_without_a_replay() {
    let mut harness = Harness::recorded(Settings::default());
    harness.submit(exact(1, 10, 3, 100));
    harness.run_to_end();
    let first = take_log(&mut harness);
    let recorder = harness.engine.recorder().expect("it is recorded");
    assert_eq!(recorder.begin_segment(), 1);
    let split = harness.now;
    harness.submit(exact(2, 12, 4, 100));
    harness.run_to_end();
    let second = take_log(&mut harness);

    // The records of both behind the first header are one log.
    let (header, begin) = header_of(&second);
    assert_eq!((header.segment, header.base), (1, split));
    let joined = [&first[..], &second[begin..]].concat();
    let (_, same) = replay(&joined, None);
    same.expect("the same");

    // The second alone says how request 2 went, and nothing of request 1.
    for (id, output_tokens) in [(1, None), (2, Some(4))] {
        let mut teller = Storyteller::new(RequestId(id));
        let mut decoder = Decoder::after(&header);
        let mut at = begin;
        while let Some((entry, length)) = decoder.decode(&second[at..]).expect("a whole log") {
            at += length;
            teller.hear(decoder.now(), &entry, &header.settings.policy.classes);
        }
        let story = teller.finish();
        let stats = story.and_then(|story| story.stats);
        assert_eq!(stats.map(|stats| stats.num_output_tokens), output_tokens);
        if let Some(stats) = stats {
            assert!(stats.arrival >= split && stats.finished > stats.arrival);
        }
    }
}
