//! Work conservation: nobody waits beside what is free for it, but where a rule says so.

use chairlift_core::config::memory::MemoryAdmission;
use chairlift_core::config::policy::Join;
use chairlift_core::request::{NewRequest, RequestId, WaitReason};

use super::client::Client;
use super::harness::Harness;

/// Checks a decision that was made while no step was in flight; says whether there was something to check:
/// somebody waits, and there are rows, and tokens of the budget, to spare.
///
/// Who is first in the queue is the engine's to decide, and who does not fit holds up those behind it. But if
/// everybody who waits would fit, the first of them does. Windows, quotas, the governor and promises of
/// memory are rules by which somebody waits though there is room.
pub fn check(harness: &Harness) -> bool {
    let (engine, settings) = (&harness.engine, &harness.settings);
    let policy = &settings.policy;
    let is_ruled = policy.join != Join::Continuous
        || policy.memory.admission != MemoryAdmission::Optimistic
        || policy.pace.is_governed(&policy.classes);
    let free_rows = engine.seats().iter().filter(|seat| seat.is_none()).count();
    if is_ruled
        || free_rows == 0
        || harness.plan.num_tokens() == settings.max_num_batched_tokens as usize
    {
        return false;
    }
    let live = || {
        harness
            .clients
            .iter()
            .filter(|(_, client)| client.ended == 0)
    };
    let (fresh, admitted): (Vec<_>, Vec<_>) = live().partition(|(_, client)| client.scheduled == 0);
    // A preempted sequence is one of those that were admitted, and they wait with what they have written.
    let metrics = engine.metrics();
    let returning = metrics.waiting_sequences - fresh.len() as u64;
    let is_held = |id: RequestId| {
        let wait = engine.wait(harness.now, id);
        wait.is_some_and(|(reason, _)| reason == WaitReason::Rate)
    };
    let waits = returning > 0 || fresh.iter().any(|&(&id, _)| !is_held(id));
    let may_wait = admitted.into_iter().filter(|_| returning > 0).chain(fresh);
    let mut would_fit = may_wait.map(|(_, client)| fits(harness, client, free_rows));
    let all_would_fit = would_fit.all(|fits| fits);
    assert!(
        !(waits && all_would_fit),
        "somebody waits, and whoever it is would fit"
    );
    waits
}

/// Whether a client's request, or a sequence of it that was preempted, would fit beside what runs.
fn fits(harness: &Harness, client: &Client, free_rows: usize) -> bool {
    let (engine, plan) = (&harness.engine, &harness.plan);
    let NewRequest {
        prompt,
        sampling,
        stop,
        ..
    } = &client.request;
    let written = client
        .answers
        .iter()
        .map(|answer| answer.tokens.len())
        .max();
    let tokens = (prompt.len() + written.unwrap_or(0)) as u32;
    let limits = engine.limits();
    let needed = limits.blocks_for(tokens + 1) + limits.watermark_blocks();
    let metrics = engine.metrics();
    // Of what a plan can tell the executor of newcomers there is only so much.
    let is_told_much =
        sampling.has_penalties() || !sampling.logit_bias.is_empty() || stop.min_tokens > 0;
    sampling.n as usize <= free_rows
        && u64::from(needed) <= metrics.free_blocks + metrics.cached_blocks
        && (plan.resets.rows.is_empty() || !is_told_much)
}
