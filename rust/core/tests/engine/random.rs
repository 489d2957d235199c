//! Random operations on tiny engines: the invariants hold after every one.

use chairlift_core::iteration::plan::StepPlan;
use chairlift_core::request::WaitReason;
use chairlift_core::request::{NewRequest, RequestId, Ticket, Time};

use super::conserving;
use super::harness::{Harness, Random, runs_ahead, ticket};
use super::plan_checks::{HOST, copies, table};
use super::random_inputs::{TENANTS, random_policy, random_request, tiny_settings};

/// Steps of a run, and runs: 120,000 steps in all. `CHAIRLIFT_SOAK_RUNS` asks for more runs.
const STEPS_PER_RUN: u32 = 6_000;
const RUNS: u64 = 20;

fn num_runs() -> u64 {
    let asked = std::env::var("CHAIRLIFT_SOAK_RUNS").ok();
    asked.map_or(RUNS, |runs| {
        runs.parse().expect("CHAIRLIFT_SOAK_RUNS is a number")
    })
}

/// Most steps in a row without output: the oldest of the highest level that runs is never preempted, and
/// in that many its prompt is computed, one token at a time; others may come and go before it.
const LONGEST_STALL: u32 = 200;

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
    /// Steps that were planned while another was in flight.
    ahead: u64,
    /// Samples of rows that did not fail, but that no client was told of.
    dropped: u64,
    rejected: u64,
    broken_results: u64,
    expired: u64,
    shed: u64,
    displaced: u64,
    reloads: u64,
    idle_with_work: u64,
    /// Steps beside which somebody waited though there were rows and budget to spare.
    waits_beside_room: u64,
    timers: u64,
    /// Steps under each mode of admission to memory.
    admissions: [u64; 3],
    sla_holds: usize,
    backfilled: u64,
    slips: u64,
    offloaded_blocks: u64,
    restored_tokens: u64,
    host_evictions: u64,
    /// Blocks that came from the host for a sequence that had been running.
    late_restores: usize,
    /// Most steps in a row that computed something, but brought no output and no end.
    longest_stall: u32,
}

/// A run: random operations on one engine.
pub struct Run {
    seed: u64,
    random: Random,
    pub harness: Harness,
    trace: Trace,
    next_id: u64,
    /// Requests whose place is reserved but that were not submitted yet.
    at_the_door: Vec<NewRequest>,
    pub steps: u32,
    was_reloaded: bool,
    /// Steps since there was output, or somebody ended or came.
    stalled: u32,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let harness = Harness::new(tiny_settings(&mut random));
        Self::with_harness(seed, random, harness)
    }

    /// The same run with a flight recorder.
    pub fn recorded(seed: u64) -> Self {
        let mut random = Random(seed);
        let harness = Harness::recorded(tiny_settings(&mut random));
        Self::with_harness(seed, random, harness)
    }

    fn with_harness(seed: u64, mut random: Random, mut harness: Harness) -> Self {
        harness.most_tokens_per_sample = [1, 1, 2, 3][random.within(0, 3) as usize];
        Self {
            seed,
            harness,
            random,
            trace: Trace::default(),
            next_id: 0,
            at_the_door: Vec::new(),
            steps: 0,
            was_reloaded: false,
            stalled: 0,
        }
    }

    /// One random operation.
    pub fn operate(&mut self) {
        match self.random.within(0, 999) {
            0..=249 => self.arrive(),
            250..=309 => self.leave_the_door(),
            310..=349 => self.abort_one(),
            350..=357 => self.wait_for_a_timer(),
            358..=359 => self.reload(),
            360..=361 => self.end_all(),
            362..=379 if self.in_flight() > 0 => self.harness.fail_step(),
            380..=399 if self.in_flight() > 0 => self.return_nonsense(),
            _ if self.plans_now() => self.schedule(),
            _ => self.commit(),
        }
    }

    /// Steps in flight.
    fn in_flight(&self) -> usize {
        self.harness.in_flight.len()
    }

    /// Whether the next step is planned before the oldest lands.
    fn plans_now(&mut self) -> bool {
        let most = self.harness.settings.max_in_flight_steps as usize;
        match self.in_flight() {
            0 => true,
            some => some < most && self.random.chance(70),
        }
    }

    /// A request takes a place; most are submitted at once.
    fn arrive(&mut self) {
        self.next_id += 1;
        let new = random_request(&mut self.random, &self.harness, self.next_id);
        let known = &self.harness.settings.policy.classes;
        let class = &known[self.random.within(1, known.len() as u32) as usize - 1].name;
        let ticket = Ticket {
            tenant: TENANTS[self.random.within(0, 3) as usize].into(),
            class: self.random.chance(60).then(|| class.clone()),
            user: self.random.chance(30).then(|| "user".into()),
            ..ticket(&new)
        };
        let before = self.harness.engine.metrics();
        match self.harness.engine.reserve(self.harness.now, ticket) {
            Ok(()) if self.random.chance(80) => self.submit_reserved(new),
            Ok(()) => self.at_the_door.push(new),
            Err(rejection) => {
                let after = self.harness.engine.metrics();
                assert_eq!(after.rejected, before.rejected + 1, "{rejection}");
                assert_eq!((after.queued, after.live), (before.queued, before.live));
                let most = u64::from(self.harness.settings.max_queued_requests);
                if rejection.code() == "queue_full" {
                    assert!(before.queued + u64::from(new.sampling.n) > most);
                }
            }
        }
        self.harness.receive();
    }

    fn submit_reserved(&mut self, new: NewRequest) {
        // The gate may still reject it, now that its tokens are known.
        let before = self.harness.engine.metrics().rejected;
        let rejected = self.harness.try_submit_reserved(new).is_err();
        let after = self.harness.engine.metrics().rejected;
        assert_eq!(after - before, u64::from(rejected));
    }

    /// Time passes, to the next timer if there is one, in the middle of a step too.
    fn wait_for_a_timer(&mut self) {
        let now = self.harness.now;
        let next = self.harness.engine.next_wake();
        let passed = u64::from(self.random.within(0, 60));
        self.harness.now = next.unwrap_or(now).max(Time(now.0 + passed));
        self.harness.engine.on_time(self.harness.now);
        self.harness.receive();
        if self.in_flight() > 0 {
            let next = self.harness.engine.next_wake();
            let now = self.harness.now;
            assert!(
                next.is_none_or(|at| at > now),
                "seed {}: it spins",
                self.seed
            );
        }
        self.trace.timers += 1;
    }

    /// Other numbers for the same classes and tenants.
    fn reload(&mut self) {
        let mut policy = random_policy(&mut self.random);
        let old = &self.harness.settings.policy;
        policy.classes.clone_from(&old.classes);
        for class in &mut policy.classes {
            class.weight = f64::from(self.random.within(1, 4));
            class.max_queued_requests = self.random.chance(20).then_some(3);
        }
        for (name, tenant) in &mut policy.tenants {
            let before = old.tenants.get(name);
            tenant.default_class = before.and_then(|old| old.default_class.clone());
            tenant.best_class = None;
        }
        policy.sharing = old.sharing;
        policy.price = old.price;
        policy.order = old.order;
        policy.join = old.join;
        let before = self.harness.engine.metrics();
        let reloaded = self.harness.engine.reload(self.harness.now, &policy);
        reloaded.expect("the same classes");
        assert_eq!(
            self.harness.engine.metrics(),
            before,
            "a reload loses nothing"
        );
        self.harness.settings.policy = policy;
        self.was_reloaded = true;
        self.trace.reloads += 1;
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
            self.submit_reserved(new);
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
        self.trace.in_flight_aborts += u64::from(aborted && self.in_flight() > 0);
        assert!(!self.harness.abort(id), "an abort is idempotent");
    }

    fn end_all(&mut self) {
        if self.random.chance(50) {
            self.harness.engine.abort_all(self.harness.now);
        } else {
            self.harness.fail_all();
            self.at_the_door.clear();
        }
        self.harness.receive();
        assert_eq!(self.harness.engine.metrics().live, 0);
    }

    /// Results that do not fit are refused and change nothing; the step goes on.
    fn return_nonsense(&mut self) {
        let mut results = self.harness.execute();
        results.statuses.push(0);
        let before = self.harness.engine.metrics();
        let (now, step) = (self.harness.now, self.harness.oldest().step);
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
            let row = self.harness.oldest().rows[0];
            self.harness.failing_rows.push(row);
        }
        let samples = self.harness.oldest().num_samples() as u64;
        let before = self.harness.engine.metrics().output_tokens;
        self.harness.commit();
        let tokens = self.harness.engine.metrics().output_tokens - before;
        self.stalled = if tokens > 0 { 0 } else { self.stalled + 1 };
        self.trace.longest_stall = self.trace.longest_stall.max(self.stalled);
        assert!(
            self.stalled <= LONGEST_STALL,
            "seed {}: {} steps and no output",
            self.seed,
            self.stalled
        );
        self.trace.several_tokens += u64::from(tokens > samples);
        self.trace.dropped += samples.saturating_sub(tokens);
    }

    fn schedule(&mut self) {
        let is_ahead = self.in_flight() > 0;
        let scheduled = self.harness.schedule();
        self.trace.ahead += u64::from(is_ahead && scheduled);
        if !is_ahead && !scheduled {
            self.check_idle();
        }
        if !is_ahead && scheduled {
            self.trace.waits_beside_room += u64::from(conserving::check(&self.harness));
        }
        self.check_tenants();
        self.steps += 1;
        let admission = self.harness.settings.policy.memory.admission;
        self.trace.admissions[admission as usize] += 1;
        self.trace.copies += self.harness.plan.block_copies.len();
        self.trace.late_restores += late_restores(&self.harness.plan);
        let (engine, now) = (&self.harness.engine, self.harness.now);
        let clients = self.harness.clients.keys();
        let waits = clients.filter_map(|&id| engine.wait(now, id));
        self.trace.sla_holds += waits.filter(|(why, _)| *why == WaitReason::Sla).count();
        self.trace.scores += self.harness.plan.num_scores();
        for byte in format!("{:?}", self.harness.plan).bytes() {
            let digest = self.trace.digest.wrapping_mul(31);
            self.trace.digest = digest.wrapping_add(u64::from(byte));
        }
    }

    /// Nothing runs: then nothing waits but for a window or a tenant's rate, and a timer knows of it.
    fn check_idle(&mut self) {
        let now = self.harness.now;
        let engine = &self.harness.engine;
        if engine.metrics().live == 0 {
            return;
        }
        self.trace.idle_with_work += 1;
        let next = engine.next_wake();
        let seed = self.seed;
        let wakes = next.is_some_and(|at| at > now);
        for &id in self.harness.clients.keys() {
            let wait = engine.wait(now, id);
            assert!(
                wakes || wait.is_none(),
                "seed {seed}, {now:?}: {next:?} wakes {id}: {wait:?}"
            );
            if let Some((reason, _)) = wait {
                let allowed = matches!(reason, WaitReason::Rate | WaitReason::Window);
                assert!(allowed, "{id} waits for {reason:?} while nobody runs");
            }
        }
    }

    fn check_tenants(&self) {
        for share in self.harness.engine.shares() {
            let policy = &self.harness.settings.policy;
            let settings = policy.tenants.get(share.tenant);
            let bound = settings.and_then(|tenant| tenant.max_running);
            let kept = bound.is_none_or(|bound| share.num_running <= bound);
            assert!(
                kept || self.was_reloaded,
                "{share:?} runs more than {bound:?}"
            );
        }
    }

    /// Ends what is open, and checks that nothing is left.
    fn close(mut self) -> Trace {
        while self.in_flight() > 0 {
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
            rejected: metrics.rejected,
            expired: metrics.expired,
            shed: metrics.shed,
            displaced: metrics.displaced,
            backfilled: metrics.backfilled,
            slips: metrics.forecast_slips,
            offloaded_blocks: metrics.offloaded_blocks,
            restored_tokens: metrics.restored_tokens,
            host_evictions: self.harness.contents.num_host_evictions,
            ..self.trace
        }
    }
}

/// Blocks that a plan copies from the host for sequences that did not come in it.
fn late_restores(plan: &StepPlan) -> usize {
    let is_newcomer = |at: &usize| plan.resets.rows.contains(&plan.rows[*at]);
    let newcomers = (0..plan.num_seqs()).filter(is_newcomer);
    let blocks: Vec<i32> = newcomers.flat_map(|at| table(plan, at).to_vec()).collect();
    let is_late = |&[from, to]: &[(u8, i32); 2]| from.0 == HOST && !blocks.contains(&to.1);
    copies(plan).filter(is_late).count()
}

/// Says the seed of a run that panics.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("it was seed {}", self.0);
        }
    }
}

fn run(seed: u64) -> Trace {
    let _seed = Seed(seed);
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
    let runs = num_runs();
    for seed in 0..runs {
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
        total.ahead += trace.ahead;
        total.dropped += trace.dropped;
        total.rejected += trace.rejected;
        total.broken_results += trace.broken_results;
        total.expired += trace.expired;
        total.shed += trace.shed;
        total.displaced += trace.displaced;
        total.reloads += trace.reloads;
        total.idle_with_work += trace.idle_with_work;
        total.waits_beside_room += trace.waits_beside_room;
        total.timers += trace.timers;
        for (total, steps) in total.admissions.iter_mut().zip(trace.admissions) {
            *total += steps;
        }
        total.sla_holds += trace.sla_holds;
        total.backfilled += trace.backfilled;
        total.slips += trace.slips;
        total.offloaded_blocks += trace.offloaded_blocks;
        total.restored_tokens += trace.restored_tokens;
        total.host_evictions += trace.host_evictions;
        total.late_restores += trace.late_restores;
        total.longest_stall = total.longest_stall.max(trace.longest_stall);
    }
    // The scenario really happened, all of it.
    println!("{} steps: {total:?}", runs * u64::from(STEPS_PER_RUN));
    assert!(total.preemptions > 500, "{total:?}");
    assert!(total.cached_tokens > 1_000, "{total:?}");
    assert!(
        total.aborted > 500 && total.in_flight_aborts > 100,
        "{total:?}"
    );
    assert!(total.failed > 100 && total.finished > 5_000, "{total:?}");
    assert!(total.copies > 100 && total.rejected > 100, "{total:?}");
    assert!(total.broken_results > 100, "{total:?}");
    assert!(total.expired > 500 && total.shed > 100, "{total:?}");
    assert!(total.backfilled > 200 && total.slips > 20, "{total:?}");
    assert!(
        total.offloaded_blocks > 1_000 && total.restored_tokens > 1_000,
        "{total:?}"
    );
    assert!(
        total.host_evictions > 500 && total.late_restores > 10,
        "{total:?}"
    );
    assert!(total.longest_stall > 5, "{total:?}");
    assert!(total.displaced > 100 && total.reloads > 100, "{total:?}");
    assert!(
        total.scores > 10_000 && total.several_tokens > 1_000,
        "{total:?}"
    );
    assert!(
        total.admissions.iter().all(|&steps| steps > 10_000),
        "{total:?}"
    );
    assert!(
        total.idle_with_work > 100 && total.timers > 500,
        "{total:?}"
    );
    assert!(total.sla_holds > 100, "{total:?}");
    assert!(total.waits_beside_room > 1_000, "{total:?}");
    if runs_ahead() {
        assert!(total.ahead > 20_000 && total.dropped > 2_000, "{total:?}");
    } else {
        assert_eq!(total.ahead, 0, "{total:?}");
    }
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    assert_eq!(run(3), run(3));
    assert_ne!(run(3).digest, run(4).digest);
}
