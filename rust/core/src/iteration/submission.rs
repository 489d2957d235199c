//! Submission: with the prompt's tokens known, a request that has a place is let in or rejected.
//!
//! A rejection gives the place back and says why, with a prediction from the engine's own state. Who is
//! let in gets its key in the order of its flow and waits.

use crate::config::Limits;
use crate::config::policy::{ClassId, OnTimeout, Order};
use crate::error::SubmitError;
use crate::iteration::lane::Lane;
use crate::iteration::ledger::{Entry, Ledger, Reserved, Waiting};
use crate::iteration::sequence::{Ending, NewSequence, RequestKey, Sequence};
use crate::iteration::tally::Payer;
use crate::memory::prefix::{BlockHash, extend_chain};
use crate::request::{Request, SequenceKey, Time};
use crate::waiting::fairness::FlowKey;
use crate::waiting::forecast::Room;
use crate::waiting::gate::Place;
use crate::waiting::order::OrderKey;
use crate::waiting::queue::{Fresh, Standing, Work};
use crate::waiting::tenants::TenantKey;

impl Ledger {
    /// Lets a checked request wait, or rejects it; then its place is given back.
    pub(crate) fn let_in(
        &mut self,
        lane: &mut Lane,
        limits: &Limits,
        reserved: Reserved,
        request: Request,
        prompt: Vec<u32>,
        now: Time,
    ) -> Result<(), SubmitError> {
        let n = request.sampling.n;
        let (class, tenant) = (reserved.class, reserved.tenant);
        let leaf = self.queue.acquire_flow(
            &self.rules,
            class,
            &mut self.tenants,
            tenant,
            reserved.user.as_ref(),
        );
        let admitted = self.judge(lane, limits, reserved, request, leaf, now);
        match admitted {
            Ok((admitted, work)) => {
                let level = admitted.level;
                self.enter(lane, limits, admitted, prompt, work, now);
                self.displace(lane, limits, level, n, now);
                Ok(())
            }
            Err(error) => {
                self.queue.release_flow(leaf);
                self.count_rejected(class, tenant, &error);
                self.tenants.release(tenant);
                Err(error)
            }
        }
    }

    /// Everything that can be said against a request whose tokens are known.
    fn judge(
        &mut self,
        lane: &Lane,
        limits: &Limits,
        mut reserved: Reserved,
        mut request: Request,
        leaf: FlowKey,
        now: Time,
    ) -> Result<(Admitted, Work), SubmitError> {
        let Reserved { class, tenant, .. } = reserved;
        self.check_answers(limits, tenant, request.sampling.n)?;
        let bounds = self.bounds(lane, limits, class, tenant);
        let resized = reserved.place.resize(request.sampling.n, bounds);
        resized.map_err(|full| self.full(full, bounds, class, tenant))?;
        let level = self.queue.level_index(self.rules.class(class).level);
        let prompt_tokens = request.num_prompt_tokens.into();
        let n = request.sampling.n;
        let has_room = self.has_room_for_tokens(lane, limits, level, n, prompt_tokens);
        self.check_tokens(limits, class, prompt_tokens, has_room)?;
        let expected = self
            .expected_length(class, tenant)
            .min(request.max_tokens.into());
        let expected = expected as u64 * u64::from(request.sampling.n);
        self.check_rate(class, tenant, now)?;
        let work = self.work_of(limits, &request, expected);
        let key = self.order_key(limits, &request, class, expected, now);
        let room = lane.room_for(limits, level, self.rules.policy().preempt_to_admit);
        let ahead = self.queue.work_before(level, leaf, key);
        let outlook = lane.outlook(limits, request.num_prompt_tokens, now);
        if let Some((queue_time, ttft)) = self.forecast.predict(ahead, work, room, outlook) {
            request.stats.predicted_ttft_us = Some(ttft);
            request.stats.predicted_queue_time_us = Some(queue_time);
            // Where nothing is at work, a prediction has nothing to rest on but the past; whoever comes
            // then is let in, or one slow iteration could close the door for good.
            if !self.live.is_empty() {
                let left_us = request.deadline.map(|deadline| deadline.since_us(now));
                self.check_promises(class, ttft, left_us, work, room)?;
            }
        }
        let admitted = Admitted {
            entry: Entry {
                request,
                class,
                tenant,
                leaf,
                waiting: None,
                sequences: Vec::with_capacity(1),
            },
            place: reserved.place,
            key,
            level,
            rate_tokens: expected,
        };
        Ok((admitted, work))
    }

    /// Checks the bounds on prompt tokens; that of the engine holds unless `has_room` says that it is kept.
    fn check_tokens(
        &self,
        limits: &Limits,
        class: ClassId,
        prompt_tokens: u64,
        has_room: bool,
    ) -> Result<(), SubmitError> {
        let settings = self.rules.class(class);
        let of_class = &self.classes[class.0 as usize].door;
        let of_engine = limits.max_queued_tokens().filter(|_| !has_room);
        let bounds = [
            (&self.door, of_engine, None),
            (of_class, settings.max_queued_tokens, Some(&settings.name)),
        ];
        for (door, bound, class) in bounds {
            let queued_tokens = door.queued_tokens();
            if let Some(most) = bound.filter(|&most| prompt_tokens > most) {
                return Err(SubmitError::InvalidParameter {
                    field: "prompt",
                    value: format!("{prompt_tokens} tokens long"),
                    allowed: format!("at most max_queued_tokens ({most}) long"),
                });
            }
            if let Some(most) = bound.filter(|&most| queued_tokens + prompt_tokens > most) {
                return Err(SubmitError::TokensFull {
                    queued_tokens,
                    prompt_tokens,
                    max_queued_tokens: most,
                    class: class.cloned(),
                });
            }
        }
        Ok(())
    }

    fn check_rate(&self, class: ClassId, tenant: TenantKey, now: Time) -> Result<(), SubmitError> {
        let owner = self.tenants.get(tenant);
        let Some(most) = self.rules.class(class).max_queue_time_us else {
            return Ok(());
        };
        let until = owner.rate_holds_until(now, owner.waiting_tokens);
        match until.map(|until| until.since_us(now)) {
            Some(wait_us) if wait_us > most => Err(SubmitError::RateExceeded {
                tenant: owner.name.to_string(),
                tokens_per_second: owner.rules.settings.tokens_per_second.unwrap_or(0),
                wait_us,
                max_queue_time_us: most,
            }),
            _ => Ok(()),
        }
    }

    /// Rejects what will miss its class's TTFT target or its own deadline in `left_us`, and promises of
    /// promotion beyond those that can be kept.
    fn check_promises(
        &self,
        class: ClassId,
        predicted_us: u64,
        left_us: Option<u64>,
        work: Work,
        room: Room,
    ) -> Result<(), SubmitError> {
        let settings = self.rules.class(class);
        let of_class = settings.ttft_target_us.map(|us| (us, Some(&settings.name)));
        let targets = of_class.into_iter().chain(left_us.map(|us| (us, None)));
        if let Some((target_us, class)) = targets.min_by_key(|&(us, _)| us)
            && predicted_us > target_us
        {
            return Err(SubmitError::TtftUnreachable {
                class: class.cloned(),
                predicted_us,
                target_us,
            });
        }
        if let Some(most) = self.promises(class) {
            let promised = self.queue.promised_work();
            let kept = self.forecast.predict(promised, work, room, None);
            if let Some((predicted_us, _)) = kept.filter(|&(wait, _)| wait > most) {
                return Err(SubmitError::PromiseUnkeepable {
                    class: settings.name.clone(),
                    predicted_us,
                    max_queue_time_us: most,
                });
            }
        }
        Ok(())
    }

    /// Microseconds after which a class promises to promote, if it does.
    fn promises(&self, class: ClassId) -> Option<u64> {
        let settings = self.rules.class(class);
        let promotes = settings.on_timeout == OnTimeout::Promote;
        settings.max_queue_time_us.filter(|_| promotes)
    }

    /// What a fresh request is expected to need, with so many output tokens.
    fn work_of(&self, limits: &Limits, request: &Request, output_tokens: u64) -> Work {
        let token_ns = self.forecast.token_ns();
        let prompt = u64::from(request.num_prompt_tokens);
        Work {
            units: prompt * self.prices.input(token_ns)
                + output_tokens * self.prices.output(token_ns),
            prefill_tokens: prompt,
            rows: request.sampling.n.into(),
            blocks: limits.blocks_for(request.num_prompt_tokens + 1).into(),
        }
    }

    /// Where a request stands among those of its flow, whatever happens later: ratios that change with
    /// time cannot live in a search tree, so age is the engine's own clock of tokens processed when it
    /// came.
    fn order_key(
        &self,
        limits: &Limits,
        request: &Request,
        class: ClassId,
        output_tokens: u64,
        now: Time,
    ) -> OrderKey {
        let policy = self.rules.policy();
        let age = (self.counters.scheduled_tokens as f64 * policy.ageing) as u64;
        let prompt = u64::from(request.num_prompt_tokens);
        let cost = match policy.order {
            Order::Arrival | Order::Prefix => 0,
            Order::Shortest => (prompt + output_tokens).saturating_add(age),
            // Blocks times iterations: those held on average while the output is written.
            Order::Footprint => {
                let held = (prompt + output_tokens / 2).saturating_mul(output_tokens.max(1));
                (held / u64::from(limits.block_size())).saturating_add(age)
            }
            Order::Deadline => {
                let target = self.rules.class(class).ttft_target_us;
                let by_target = target.map(|target| now.0.saturating_add(target));
                request
                    .deadline
                    .map(|at| at.0)
                    .or(by_target)
                    .unwrap_or(u64::MAX)
            }
        };
        OrderKey {
            priority: request.priority,
            cost,
            number: self.num_arrivals,
        }
    }

    fn enter(
        &mut self,
        lane: &Lane,
        limits: &Limits,
        admitted: Admitted,
        prompt: Vec<u32>,
        work: Work,
        now: Time,
    ) {
        let Admitted {
            mut entry,
            place,
            key,
            level,
            rate_tokens,
        } = admitted;
        self.num_arrivals += 1;
        self.counters.submitted += 1;
        let request_key = RequestKey(self.requests.vacant_key());
        let sequence = self.new_sequence(lane, limits, &entry, request_key, prompt, (key, level));
        let id = entry.request.id;
        self.live.insert(id, request_key);
        entry.sequences.push(sequence);
        let fresh = Fresh {
            sequence,
            level,
            leaf: entry.leaf,
            key,
            work,
            standing: Standing::Flow,
            is_aside: false,
            is_promised: self.promises(entry.class).is_some(),
        };
        self.classes[entry.class.0 as usize].metrics.accepted();
        let tenant = self.tenants.get_mut(entry.tenant);
        tenant.metrics.accepted();
        let rate_tokens = rate_tokens + work.prefill_tokens;
        tenant.waiting_tokens += rate_tokens;
        let mut waiting = Waiting {
            fresh,
            place,
            rate_tokens,
            timer: None,
            since: self.clocks.read(now),
            held_us: tenant.held_us(now),
        };
        waiting.place.count_tokens(work.prefill_tokens);
        entry.waiting = Some(Box::new(waiting));
        self.requests.insert(entry);
        self.queue.push_fresh(&fresh);
        self.arm(request_key);
    }

    fn new_sequence(
        &mut self,
        lane: &Lane,
        limits: &Limits,
        entry: &Entry,
        request_key: RequestKey,
        prompt: Vec<u32>,
        (key, level): (OrderKey, usize),
    ) -> SequenceKey {
        let request = &entry.request;
        // No tenant finds what another's prompts have left behind; those that name none are one.
        let tenant = Some(&*self.tenants.get(entry.tenant).name);
        let root = BlockHash::root([tenant, request.cache_salt.as_deref(), None]);
        let mut chain = Vec::new();
        if limits.prefix_caching() {
            extend_chain(&mut chain, root, &prompt, limits.block_size());
        }
        SequenceKey(self.sequences.insert(Sequence::new(NewSequence {
            request: request_key,
            id: request.id,
            ending: Ending::of(request),
            number: key.number,
            level,
            leaf: entry.leaf,
            payer: Payer {
                class: entry.class,
                tenant: entry.tenant,
            },
            prompt,
            num_tokens_to_score: request.num_tokens_to_score(),
            n: request.sampling.n,
            table: lane.pool.table(),
            root,
            chain,
            stop: request.stop.stop.clone(),
        })))
    }
}

/// A request that was let in, on its way into the queue.
struct Admitted {
    entry: Entry,
    place: Place,
    key: OrderKey,
    level: usize,
    rate_tokens: u64,
}
