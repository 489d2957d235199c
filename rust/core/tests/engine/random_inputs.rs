//! Random settings, policies and requests, so small that everything happens.

use chairlift_core::config::Settings;
use chairlift_core::config::memory::{Backfill, MemoryAdmission, MemorySettings};
use chairlift_core::config::policy::{
    ClassSettings, Join, OnDoomed, OnTimeout, Order, Policy, Price, Sharing, Shedding,
    TenantSettings,
};
use chairlift_core::predict::iteration_time::Coefficients;
use chairlift_core::request::{NewRequest, Time};
use chairlift_core::text::{StopStrings, StopText};

use super::harness::{Harness, Random, request};

pub const CLASSES: [&str; 3] = ["gold", "silver", "bronze"];
pub const TENANTS: [&str; 4] = ["ann", "bob", "cy", "somebody"];

/// All rules mixed at random; times in microseconds, a step takes 10.
pub fn random_policy(random: &mut Random) -> Policy {
    let maybe = |random: &mut Random, percent, low, high| {
        random.chance(percent).then(|| random.within(low, high))
    };
    let mut policy = Policy::default();
    let num_classes = random.within(1, 3) as usize;
    policy.classes.clear();
    for name in &CLASSES[..num_classes] {
        let mut class = ClassSettings::new(*name);
        class.level = random.within(0, 2) as i32 - 1;
        class.weight = f64::from(random.within(1, 4));
        class.max_queued_requests = maybe(random, 20, 1, 6);
        class.max_queued_tokens = maybe(random, 20, 20, 80).map(u64::from);
        class.max_queue_time_us = maybe(random, 50, 20, 400).map(u64::from);
        class.ttft_target_us = maybe(random, 30, 50, 2_000).map(u64::from);
        class.tpot_target_us = maybe(random, 30, 3, 40).map(u64::from);
        class.on_timeout = [OnTimeout::Expire, OnTimeout::Promote][random.within(0, 1) as usize];
        let doomed = [OnDoomed::Keep, OnDoomed::Relegate, OnDoomed::Drop];
        class.on_doomed = doomed[random.within(0, 2) as usize];
        class.may_be_shed = random.chance(50);
        policy.classes.push(class);
    }
    for name in &TENANTS[..3] {
        policy
            .tenants
            .insert((*name).into(), random_tenant(random, num_classes));
    }
    policy.sharing = [Sharing::Fcfs, Sharing::Fair][random.within(0, 1) as usize];
    if random.chance(40) {
        policy.price = Price::DeviceTime;
    }
    policy.charge_predicted_output = random.chance(30);
    let orders = [
        Order::Arrival,
        Order::Shortest,
        Order::Footprint,
        Order::Deadline,
        Order::Prefix,
    ];
    policy.order = orders[random.within(0, 4) as usize];
    policy.max_level_wait_us = maybe(random, 30, 50, 500).map(u64::from);
    policy.join = match random.within(0, 9) {
        0 => Join::Static,
        1 => Join::Window {
            size: random.within(1, 4),
            delay_us: random.within(0, 200).into(),
        },
        _ => Join::Continuous,
    };
    policy.shedding = random.chance(30).then(|| Shedding {
        above_us: random.within(100, 400).into(),
        below_us: random.within(10, 99).into(),
    });
    policy.preempt_to_admit = random.chance(70);
    policy.pace.iteration_target_us = maybe(random, 20, 3, 40).map(u64::from);
    policy.pace.min_prefill_tokens = maybe(random, 30, 1, 4);
    let admissions = [
        MemoryAdmission::Optimistic,
        MemoryAdmission::Reserve,
        MemoryAdmission::Forecast,
    ];
    let modes = [
        Backfill::Easy,
        Backfill::Easy,
        Backfill::Unprotected,
        Backfill::Off,
    ];
    policy.memory = MemorySettings {
        admission: admissions[random.within(0, 2) as usize],
        overflow: f64::from(random.within(1, 50)) / 100.0,
        backfill: modes[random.within(0, 3) as usize],
        backfill_candidates: random.within(1, 4),
    };
    policy
}

fn random_tenant(random: &mut Random, num_classes: usize) -> TenantSettings {
    let class = CLASSES[random.within(1, num_classes as u32) as usize - 1];
    let rate = random
        .chance(30)
        .then(|| random.within(20_000, 500_000).into());
    TenantSettings {
        weight: f64::from(random.within(1, 3)),
        default_class: Some(class.into()),
        best_class: random.chance(30).then(|| class.into()),
        max_running: random.chance(30).then(|| random.within(1, 4)),
        max_queued: random.chance(20).then(|| random.within(1, 4)),
        tokens_per_second: rate,
        burst_tokens: rate.filter(|_| random.chance(50)).map(|_| 30),
    }
}

pub fn tiny_settings(random: &mut Random) -> Settings {
    let max_num_seqs = random.within(1, 6);
    let chunk = random.within(1, 12);
    let enable_prefix_caching = random.chance(70);
    let num_host_kv_blocks = if enable_prefix_caching && random.chance(60) {
        random.within(1, 16)
    } else {
        0
    };
    Settings {
        max_num_seqs,
        max_num_batched_tokens: max_num_seqs + random.within(0, 20),
        max_model_len: random.within(8, 40),
        long_prefill_token_threshold: random.chance(50).then_some(chunk),
        block_size: [1, 2, 4, 8][random.within(0, 3) as usize],
        num_kv_blocks: random.within(4, 24),
        num_host_kv_blocks,
        enable_prefix_caching,
        watermark_blocks: random.chance(50).then_some(random.within(0, 2)),
        max_queued_requests: random.within(1, 8),
        max_queued_tokens: random.chance(20).then(|| random.within(20, 200).into()),
        policy: if random.chance(80) {
            random_policy(random)
        } else {
            Policy::default()
        },
        vocab_size: 12,
        max_in_flight_steps: super::STEPS_IN_FLIGHT,
        cost_model: random.chance(50).then(|| Coefficients {
            t0_us: f64::from(random.within(0, 4)),
            t_weights_us: f64::from(random.within(0, 4)),
            t_tok_us: f64::from(random.within(1, 30)) / 10.0,
            t_seq_us: f64::from(random.within(0, 10)) / 10.0,
            t_ctx_us: f64::from(random.within(0, 10)) / 50.0,
            t_pair_us: f64::from(random.within(0, 10)) / 50.0,
            t_copy_us: f64::from(random.within(0, 10)) / 5.0,
            most_tokens: f64::from(random.within(1, 20)),
            ..Coefficients::default()
        }),
    }
}

/// A request from a tiny alphabet, so that prefixes are often shared.
pub fn random_request(random: &mut Random, harness: &Harness, id: u64) -> NewRequest {
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
    new.priority = random.within(0, 2) as i32 - 1;
    if random.chance(20) {
        let soon = harness.now.0 + u64::from(random.within(0, 400));
        new.deadline = Some(Time(soon));
    }
    new.cache_salt = random.chance(20).then(|| "tenant".to_string());
    new
}
