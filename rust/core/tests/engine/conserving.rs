//! Work is conserved: nobody waits while rows, memory and budget are left that anybody could have.
//!
//! Under any order and sharing, with levels, promotions and displacement; but without what may hold a
//! request though there is room: windows, quotas, targets of iterations, and memory that is promised.

use chairlift_core::config::Settings;
use chairlift_core::config::memory::Backfill;
use chairlift_core::config::policy::{ClassSettings, OnTimeout, Order, Policy, Price, Sharing};

use super::harness::{Harness, Random, exact, ticket_for};

const MOST_ANSWERS: u32 = 2;
const LONGEST: u32 = 24;

fn policy(random: &mut Random) -> Policy {
    let class = |name: &str, random: &mut Random| ClassSettings {
        level: random.within(0, 1) as i32,
        weight: f64::from(random.within(1, 3)),
        max_queue_time_us: random.chance(50).then(|| random.within(50, 300).into()),
        on_timeout: OnTimeout::Promote,
        ..ClassSettings::new(name)
    };
    let orders = [
        Order::Arrival,
        Order::Shortest,
        Order::Footprint,
        Order::Prefix,
    ];
    let mut policy = Policy {
        classes: vec![class("one", random), class("two", random)],
        sharing: [Sharing::Fcfs, Sharing::Fair][random.within(0, 1) as usize],
        order: orders[random.within(0, 3) as usize],
        preempt_to_admit: random.chance(70),
        ..Policy::default()
    };
    if random.chance(50) {
        policy.price = Price::DeviceTime;
    }
    let modes = [Backfill::Easy, Backfill::Off, Backfill::Unprotected];
    policy.memory.backfill = modes[random.within(0, 2) as usize];
    policy
}

/// Whether rows, memory and budget are left for any request that there can be.
fn has_room(harness: &Harness) -> bool {
    let (engine, settings) = (&harness.engine, &harness.settings);
    let rows = engine.seats().iter().filter(|seat| seat.is_none()).count();
    let metrics = engine.metrics();
    let needed = (LONGEST + 1).div_ceil(settings.block_size) + engine.limits().watermark_blocks();
    rows >= MOST_ANSWERS as usize
        && metrics.free_blocks + metrics.cached_blocks >= u64::from(needed)
        && harness.plan.num_tokens() < settings.max_num_batched_tokens as usize
}

#[test]
fn nobody_waits_while_there_is_room_for_anybody() {
    let (mut full, mut roomy) = (0, 0);
    for seed in 0..60 {
        let mut random = Random(seed);
        let policy = policy(&mut random);
        let mut harness = Harness::new(Settings {
            max_num_seqs: random.within(4, 8),
            max_num_batched_tokens: random.within(8, 40),
            max_model_len: LONGEST,
            block_size: 4,
            num_kv_blocks: random.within(14, 40),
            max_queued_requests: 12,
            vocab_size: 100,
            policy,
            ..Settings::default()
        });
        for id in 0..400 {
            if random.chance(45) {
                let output = random.within(1, 10);
                let mut new = exact(id, random.within(1, LONGEST - output), output, 100);
                new.sampling.n = random.within(1, MOST_ANSWERS);
                let tenant = ["ann", "bob", "cy"][random.within(0, 2) as usize];
                let class = ["one", "two"][random.within(0, 1) as usize];
                // A full door is not what this is about.
                let _ = harness.try_submit(ticket_for(tenant, class, &new), new);
            }
            if !harness.schedule() {
                continue;
            }
            let waits = harness.engine.metrics().waiting_sequences > 0;
            let has_room = has_room(&harness);
            assert!(!(waits && has_room), "seed {seed}, request {id}");
            full += u32::from(waits);
            roomy += u32::from(has_room);
            harness.commit();
        }
        harness.run_to_end();
    }
    assert!(full > 5_000 && roomy > 3_000, "{full} {roomy}");
}
