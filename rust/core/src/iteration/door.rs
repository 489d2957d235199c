//! The door: places, and who has to make room for whom.
//!
//! A place is reserved before the prompt is tokenised, atomically at the doors of engine, class and tenant;
//! what comes after is [`crate::iteration::submission`]. The bounds are of those that have to wait: a slot
//! that is free is room for one more, so that a burst gets as many places whether or not the first of it
//! have been scheduled meanwhile. Only requests that were never scheduled are
//! displaced or shed, the lowest level first and the newest of it first: their clients have been told
//! nothing yet. Who displaces takes a place beyond the bound and displaces when it is let in, as much as
//! answers and prompt tokens call for, so that a request that is rejected after all has displaced nobody.

use std::sync::Arc;

use crate::config::Limits;
use crate::config::policy::ClassId;
use crate::error::SubmitError;
use crate::iteration::lane::Lane;
use crate::iteration::ledger::{Ledger, Reserved};
use crate::iteration::sequence::RequestKey;
use crate::request::{Finish, RequestId, Ticket, Time};
use crate::waiting::forecast::Blocked;
use crate::waiting::gate::{Bounds, Doors, Full, Place};
use crate::waiting::tenants::TenantKey;

/// What the engine's door lacks for a request: as much has to be displaced.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Lacking {
    answers: u64,
    tokens: u64,
}

impl Ledger {
    /// Takes a place at the door.
    pub(crate) fn reserve(
        &mut self,
        lane: &Lane,
        limits: &Limits,
        ticket: Ticket,
        now: Time,
    ) -> Result<(), SubmitError> {
        let id = ticket.id;
        if self.live.contains_key(&id) || self.reserved.contains_key(&id) {
            return Err(SubmitError::DuplicateRequest { request: id });
        }
        let chosen = self
            .rules
            .choose_class(&ticket.tenant, ticket.class.as_deref());
        let Some(class) = chosen else {
            return Err(self.unknown_class(ticket.class));
        };
        let tenant = self.tenants.acquire(now, &ticket.tenant, &self.rules);
        let placed = if self.is_shedding && self.rules.class(class).may_be_shed {
            Err(SubmitError::Shedding {
                class: self.rules.class(class).name.clone(),
                retry_after_us: self.overload_us(lane, limits),
            })
        } else {
            self.take_place(lane, limits, class, tenant, ticket.n)
        };
        match placed {
            Ok(place) => {
                let reserved = Reserved {
                    place,
                    class,
                    tenant,
                    user: ticket.user.map(Arc::from),
                };
                self.reserved.insert(id, reserved);
                Ok(())
            }
            Err(error) => {
                self.count_rejected(class, tenant, &error);
                self.tenants.release(tenant);
                Err(error)
            }
        }
    }

    /// Name of the class that a request with a reserved place will be served as.
    pub(crate) fn reserved_class(&self, id: RequestId) -> Option<&str> {
        let reserved = self.reserved.get(&id)?;
        Some(&self.rules.class(reserved.class).name)
    }

    /// Counts a request that its class and tenant are known of.
    pub(crate) fn count_rejected(
        &mut self,
        class: ClassId,
        tenant: TenantKey,
        error: &SubmitError,
    ) {
        self.classes[class.0 as usize].metrics.rejected(error);
        self.tenants.get_mut(tenant).metrics.rejected(error);
    }

    fn unknown_class(&self, class: Option<String>) -> SubmitError {
        let classes = self.rules.policy().classes.iter();
        let known: Vec<&str> = classes.map(|class| class.name.as_str()).collect();
        SubmitError::UnknownClass {
            class: class.unwrap_or_default(),
            known: known.join(", "),
        }
    }

    /// Gives a reserved place back; false if there is none.
    pub(crate) fn release(&mut self, id: RequestId) -> bool {
        match self.reserved.remove(&id) {
            None => false,
            Some(reserved) => {
                self.tenants.release(reserved.tenant);
                true
            }
        }
    }

    /// Gives all reserved places back.
    pub(crate) fn release_all(&mut self) {
        while let Some((_, reserved)) = self.reserved.pop_first() {
            self.tenants.release(reserved.tenant);
        }
    }

    /// The most answers that may be at the doors now: those that may wait, and one for each slot that is
    /// free for them.
    pub(crate) fn bounds(
        &self,
        lane: &Lane,
        limits: &Limits,
        class: ClassId,
        tenant: TenantKey,
    ) -> Bounds {
        let free = self.free_slots(lane);
        let owner = self.tenants.get(tenant);
        let of_class = self.rules.class(class).max_queued_requests;
        let of_tenant = owner.rules.settings.max_queued;
        Bounds {
            engine: Some(self.most_at_the_door(lane, limits)),
            class: of_class.map(|most| most.saturating_add(free)),
            tenant: of_tenant.map(|most| most.saturating_add(owner.free_slots(free))),
        }
    }

    /// Slots that newcomers will get: none while somebody waits for a slot or for memory.
    fn free_slots(&self, lane: &Lane) -> u32 {
        match self.clocks.blocked() {
            Some(Blocked::Slots | Blocked::Memory | Blocked::Sla) => 0,
            Some(Blocked::Budget | Blocked::Window) | None => lane.rows.num_free(),
        }
    }

    /// The most answers that may be at the engine's door now.
    fn most_at_the_door(&self, lane: &Lane, limits: &Limits) -> u32 {
        let waiting = limits.max_queued_requests();
        waiting.saturating_add(self.free_slots(lane))
    }

    /// Whether `n` answers more may be at the engine's door.
    pub(crate) fn has_room(&self, lane: &Lane, limits: &Limits, n: u32) -> bool {
        self.door.queued().saturating_add(n) <= self.most_at_the_door(lane, limits)
    }

    fn take_place(
        &mut self,
        lane: &Lane,
        limits: &Limits,
        class: ClassId,
        tenant: TenantKey,
        n: u32,
    ) -> Result<Place, SubmitError> {
        self.check_answers(limits, tenant, n)?;
        let doors = Doors {
            engine: self.door.clone(),
            class: self.classes[class.0 as usize].door.clone(),
            tenant: self.tenants.get(tenant).door.clone(),
        };
        let bounds = self.bounds(lane, limits, class, tenant);
        let mut taken = doors.take(n, bounds);
        if matches!(taken, Err(Full::Engine)) && self.can_displace(lane, limits, class, n) {
            // Who has the place now keeps it until this request is let in.
            let engine = None;
            taken = doors.take(n, Bounds { engine, ..bounds });
        }
        taken.map_err(|full| self.full(full, bounds, class, tenant))
    }

    /// More answers than rows there are, or than the tenant may run at once, would never run.
    pub(crate) fn check_answers(
        &self,
        limits: &Limits,
        tenant: TenantKey,
        n: u32,
    ) -> Result<(), SubmitError> {
        let most = limits.max_num_seqs();
        if !(1..=most).contains(&n) {
            return Err(SubmitError::InvalidParameter {
                field: "n",
                value: n.to_string(),
                allowed: format!("from 1 to max_num_seqs ({most})"),
            });
        }
        let owner = self.tenants.get(tenant);
        match owner.rules.settings.max_running {
            Some(max_running) if n > max_running => Err(SubmitError::TooManyAnswers {
                tenant: owner.name.to_string(),
                n,
                max_running,
            }),
            _ => Ok(()),
        }
    }

    pub(crate) fn full(
        &self,
        full: Full,
        bounds: Bounds,
        class: ClassId,
        tenant: TenantKey,
    ) -> SubmitError {
        let settings = self.rules.class(class);
        let owner = self.tenants.get(tenant);
        match full {
            Full::Engine => SubmitError::QueueFull {
                queued: self.door.queued(),
                max_queued_requests: bounds.engine.unwrap_or(u32::MAX),
            },
            Full::Class => SubmitError::ClassFull {
                class: settings.name.clone(),
                queued: self.classes[class.0 as usize].door.queued(),
                max_queued_requests: bounds.class.unwrap_or(u32::MAX),
            },
            Full::Tenant => SubmitError::TenantFull {
                tenant: owner.name.to_string(),
                queued: owner.door.queued(),
                max_queued: bounds.tenant.unwrap_or(u32::MAX),
            },
        }
    }

    /// Whether room at the engine's door for `n` answers more can be made by displacing what is less
    /// important than a class.
    fn can_displace(&self, lane: &Lane, limits: &Limits, class: ClassId, n: u32) -> bool {
        let level = self.queue.level_index(self.rules.class(class).level);
        let lacking = Lacking {
            answers: self.beyond(lane, limits) + u64::from(n),
            tokens: 0,
        };
        self.victims(level, lacking).is_some()
    }

    /// Answers at the engine's door beyond its bound: of places that will displace others.
    fn beyond(&self, lane: &Lane, limits: &Limits) -> u64 {
        let most = self.most_at_the_door(lane, limits);
        self.door.queued().saturating_sub(most).into()
    }

    /// What a request of `n` answers that has a place lacks at the engine's door, with `prompt_tokens` more
    /// than are counted there.
    fn lacking(&self, lane: &Lane, limits: &Limits, n: u32, prompt_tokens: u64) -> Lacking {
        let tokens = self.door.queued_tokens() + prompt_tokens;
        let most_tokens = limits.max_queued_tokens().unwrap_or(u64::MAX);
        Lacking {
            answers: self.beyond(lane, limits).min(n.into()),
            tokens: tokens.saturating_sub(most_tokens),
        }
    }

    /// Whether a request of a level that has a place for `n` answers may wait with its prompt: there is
    /// room for its tokens at the engine's door, or it can be made by displacing.
    pub(crate) fn has_room_for_tokens(
        &self,
        lane: &Lane,
        limits: &Limits,
        level: usize,
        n: u32,
        prompt_tokens: u64,
    ) -> bool {
        let lacking = self.lacking(lane, limits, n, prompt_tokens);
        lacking.tokens == 0 || self.victims(level, lacking).is_some()
    }

    /// Displaces what is less important than a request of `n` answers that was let in, if it is beyond the
    /// bounds.
    pub(crate) fn displace(
        &mut self,
        lane: &mut Lane,
        limits: &Limits,
        level: usize,
        n: u32,
        now: Time,
    ) {
        let lacking = self.lacking(lane, limits, n, 0);
        for victim in self.victims(level, lacking).unwrap_or_default() {
            self.end_request(lane, victim, Finish::Displaced, now);
        }
    }

    /// The least important requests below a level that together wait with what is `lacking`.
    fn victims(&self, level: usize, mut lacking: Lacking) -> Option<Vec<RequestKey>> {
        let mut victims = Vec::new();
        for key in self.queue.least_important(level + 1) {
            if lacking == Lacking::default() {
                break;
            }
            let victim = self.sequences[key.0].request;
            let request = &self.requests[victim.0].request;
            lacking.answers = lacking.answers.saturating_sub(request.sampling.n.into());
            let tokens = request.num_prompt_tokens.into();
            lacking.tokens = lacking.tokens.saturating_sub(tokens);
            victims.push(victim);
        }
        (lacking == Lacking::default()).then_some(victims)
    }

    /// How long the overload is predicted to last, in microseconds.
    fn overload_us(&self, lane: &Lane, limits: &Limits) -> u64 {
        let below = self
            .rules
            .policy()
            .shedding
            .map_or(0, |shedding| shedding.below_us);
        let drain = self.forecast.drain_us(self.queue.work(), lane.room(limits));
        drain.saturating_sub(below)
    }

    /// Begins and ends overload, with hysteresis; sheds what may be shed, until it is over.
    pub(crate) fn shed(&mut self, lane: &mut Lane, limits: &Limits, now: Time) {
        let Some(shedding) = self.rules.policy().shedding else {
            self.is_shedding = false;
            return;
        };
        let room = lane.room(limits);
        let mut work = self.queue.work();
        let mut drain = self.forecast.drain_us(work, room);
        if drain <= shedding.below_us {
            self.is_shedding = false;
        }
        if self.is_shedding || drain <= shedding.above_us {
            return;
        }
        self.is_shedding = true;
        let mut victims = Vec::new();
        for key in self.queue.least_important(0) {
            if drain <= shedding.below_us {
                break;
            }
            let request = self.sequences[key.0].request;
            let entry = &self.requests[request.0];
            if let Some(waiting) = &entry.waiting
                && self.rules.class(entry.class).may_be_shed
            {
                work = work.less(waiting.fresh.work);
                drain = self.forecast.drain_us(work, room);
                victims.push(request);
            }
        }
        for victim in victims {
            self.end_request(lane, victim, Finish::Shed, now);
        }
    }
}
