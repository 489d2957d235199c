//! Newcomers: who joins the iteration, and what holds up the next one.
//!
//! They join in the queue's order, each behind the prefill chunks of its level and those above. The first that
//! does not fit holds up those behind it, but for whom backfill ([`crate::iteration::backfill`]) lets go ahead.
//! Whose tenant is at its bounds is set aside, and holds up nobody. A newcomer of a strictly higher level, or
//! a head whose guests are in its way, may preempt ([`crate::iteration::preempt`]).

use crate::config::Limits;
use crate::config::memory::MemoryAdmission;
use crate::config::policy::Order;
use crate::iteration::fit::{DoesNotFit, Horizon};
use crate::iteration::join::{leaves_together, may_join, takes};
use crate::iteration::preempt::{GivingWay, Lack, choose_victims_for, preempt};
use crate::iteration::scheduler::Scheduler;
use crate::iteration::sequence::Sequence;
use crate::iteration::write::write_resets;
use crate::request::{Request, SequenceKey};
use crate::waiting::forecast::Blocked;
use crate::waiting::queue::Next;

/// Candidates of a flow that [`Order::Prefix`] looks at.
const PREFIX_CANDIDATES: usize = 16;
/// Times that the first of a flow may be passed over for a longer cached prefix.
const MAX_PASSES: u32 = 32;

/// How a newcomer comes in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entrance {
    /// It is the next in the queue, and those below this level would give way to it.
    InTurn(usize),
    /// Others gave way for it.
    OverOthers,
    /// Ahead of the first of the queue, for as long as that does not fit; of this level.
    AsGuest(usize),
}

/// What newcomers were given.
#[derive(Default)]
pub(crate) struct Handed {
    rows: u64,
    blocks: u64,
}

impl Scheduler<'_> {
    /// Admits newcomers while there is room, and says what holds the next one up.
    pub(crate) fn admit_newcomers(&mut self) {
        let mut handed = Handed::default();
        let blocked = self.admit_until_blocked(&mut handed);
        self.lane.is_forming =
            leaves_together(self.ledger.rules.policy().join) && blocked == Some(Blocked::Budget);
        if let Some(before) = self.ledger.clocks.blocked()
            && let Some(passed) = self.ledger.since_schedule.lap(self.now)
        {
            let forecast = &mut self.ledger.forecast;
            forecast.measure_admissions(before, passed, handed.rows, handed.blocks);
        }
        if blocked.is_some() {
            self.ledger.since_schedule.lap(self.now);
        }
        self.ledger.clocks.set(self.now, blocked);
    }

    /// What holds everybody up while all rows are taken and nobody may be preempted: then it does not
    /// matter who is next, which would have to be found out.
    fn without_rows(&mut self) -> Option<Blocked> {
        let queue = &self.ledger.queue;
        let level = queue.next_level()?;
        let may_preempt =
            self.ledger.rules.policy().preempt_to_admit && self.lane.running.has_below(level);
        if self.lane.rows.num_free() > 0 || may_preempt {
            return None;
        }
        self.schedule_chunks(level);
        Some(if self.budget == 0 {
            Blocked::Budget
        } else {
            Blocked::Slots
        })
    }

    fn admit_until_blocked(&mut self, handed: &mut Handed) -> Option<Blocked> {
        self.lane.foresight.missing_blocks = 0;
        if self.ledger.queue.is_empty() {
            return None;
        }
        if self.lane.must_land {
            return Some(Blocked::Memory);
        }
        let join = self.ledger.rules.policy().join;
        if leaves_together(join) && !may_join(join, self.ledger.situation(self.lane), self.now) {
            return Some(Blocked::Window);
        }
        loop {
            if let Some(blocked) = self.without_rows() {
                return Some(blocked);
            }
            let next = self.next_in_line()?;
            match next {
                Next::Promoted(_) => {}
                Next::Returning(_, level) | Next::Fresh(_, level, _) => self.schedule_chunks(level),
            }
            if self.budget == 0 || self.lane.governor.is_spent() {
                return Some(Blocked::Budget);
            }
            if self.hold_back(next) {
                continue;
            }
            let key = self.choose(next);
            let num_rows = self.limits.max_num_seqs() - self.lane.rows.num_free();
            if !takes(join, num_rows, self.ledger.sequences[key.0].num_rows()) {
                return Some(Blocked::Window);
            }
            if self.is_too_many(next, key) {
                return Some(Blocked::Sla);
            }
            let level = self.level_of(next);
            let admitted = match self.admit(key, Entrance::InTurn(level)) {
                Err(DoesNotFit { lack, .. }) if self.preempt_for(next, key, lack) => {
                    self.admit(key, Entrance::OverOthers)
                }
                admitted => admitted,
            };
            match admitted {
                Ok(chunk) => {
                    if let Next::Fresh(first, _, leaf) = next {
                        self.ledger.queue.left(leaf, key == first);
                    }
                    self.lane.backfill.joined(key);
                    self.start_newcomer(next, key, chunk, handed);
                }
                Err(DoesNotFit { blocked, lack }) => {
                    if matches!(blocked, Blocked::Memory | Blocked::Slots) && !self.lane.must_land {
                        self.backfill(key, lack, handed);
                    }
                    return Some(blocked);
                }
            }
        }
    }

    /// Gives an admitted sequence its place in the step.
    pub(crate) fn start_newcomer(
        &mut self,
        next: Next,
        key: SequenceKey,
        chunk: u32,
        handed: &mut Handed,
    ) {
        self.budget -= chunk;
        let sequence = &mut self.ledger.sequences[key.0];
        let left = sequence.num_remaining_tokens() - chunk;
        self.lane.step.add_chunk(key, chunk, left);
        if let Next::Promoted(_) = next {
            // It stays ahead of those it went ahead of, or they would take its place.
            self.lane.running.move_to(sequence, 0);
        }
        if !matches!(next, Next::Returning(..)) {
            // What returns was let in before: it is no service to those that wait for their first time.
            handed.rows += u64::from(sequence.num_rows());
            handed.blocks += u64::from(sequence.table.num_blocks());
        }
    }

    /// Sets the next request aside if its tenant's bounds say so; then somebody else is next.
    fn hold_back(&mut self, next: Next) -> bool {
        if matches!(next, Next::Returning(..)) {
            return false; // it was let in before
        }
        let request = self.ledger.sequences[next.sequence().0].request;
        let entry = &self.ledger.requests[request.0];
        let tenant_key = entry.tenant;
        let tenant = self.ledger.tenants.get(tenant_key);
        let is_busy = tenant.is_busy(entry.request.sampling.n);
        let until = match next {
            // Its class's bound on the queue time outweighs the rate.
            Next::Promoted(_) => None,
            _ => tenant.rate_holds_until(self.now, 0).filter(|_| !is_busy),
        };
        if !is_busy && until.is_none() {
            return false;
        }
        if tenant.held_since.is_none() {
            self.ledger.hold(tenant_key, until, self.now);
        }
        // Holding its flows does not stop what waits elsewhere.
        self.ledger.set_aside(request);
        true
    }

    /// The sequence to admit: the next, or with [`Order::Prefix`] one of the next few of its flow.
    fn choose(&mut self, next: Next) -> SequenceKey {
        let first = next.sequence();
        let Next::Fresh(_, _, leaf) = next else {
            return first;
        };
        let by_prefix = self.ledger.rules.policy().order == Order::Prefix;
        if !by_prefix || !self.limits.prefix_caching() || self.lane.backfill.is_head(first) {
            return first;
        }
        let mut best = (first, 0);
        if self.ledger.queue.passes(leaf) < MAX_PASSES {
            let mut candidates = Vec::with_capacity(PREFIX_CANDIDATES);
            self.ledger
                .queue
                .visit_first(leaf, PREFIX_CANDIDATES, |key| candidates.push(key));
            for key in candidates {
                let sequence = &mut self.ledger.sequences[key.0];
                let entry = &self.ledger.requests[sequence.request.0];
                let owner = self.ledger.tenants.get(entry.tenant);
                if owner.is_busy(entry.request.sampling.n) {
                    continue;
                }
                let chain = sequence.usable_chain(self.limits.block_size());
                let cached = self.lane.pool.find_prefix(chain).num_blocks;
                if cached > best.1 {
                    best = (key, cached);
                }
            }
        }
        best.0
    }

    /// Whether the decodes would take too long with this one among them. Promoted ones were promised
    /// their place.
    pub(crate) fn is_too_many(&self, next: Next, key: SequenceKey) -> bool {
        let level = match next {
            Next::Promoted(_) => return false,
            Next::Returning(_, level) | Next::Fresh(_, level, _) => level,
        };
        let newcomer = &self.ledger.sequences[key.0];
        !self.lane.running.is_empty() && self.lane.governor.holds(newcomer, level)
    }

    /// The level below which others give way to the next. Where it waits counts: best effort preempts
    /// nobody, whatever its class.
    pub(crate) fn level_of(&self, next: Next) -> usize {
        match next {
            Next::Promoted(key) => self.ledger.sequences[key.0].level,
            Next::Returning(_, level) | Next::Fresh(_, level, _) => level,
        }
    }

    /// Who gives way to a newcomer that may preempt what is below `level`. Its guests do not where a
    /// forecast keeps to a share of admissions that may see a preemption: there it waits for them.
    pub(crate) fn giving_way(&self, newcomer: SequenceKey, level: usize) -> GivingWay {
        let policy = self.ledger.rules.policy();
        let guests_stay = policy.memory.admission == MemoryAdmission::Forecast;
        let since = self.ledger.sequences[newcomer.0].blocked_since;
        GivingWay {
            level: if policy.preempt_to_admit {
                level
            } else {
                usize::MAX
            },
            guests_since: since.filter(|_| !guests_stay),
        }
    }

    /// Preempts a newcomer's guests, and sequences of lower levels, so that it fits; false, and nothing
    /// has changed, if that would not be enough, or has to wait for the steps in flight.
    fn preempt_for(&mut self, next: Next, key: SequenceKey, lack: Lack) -> bool {
        let giving_way = self.giving_way(key, self.level_of(next));
        if giving_way == GivingWay::NOBODY || lack.blocks + lack.rows == 0 {
            return false;
        }
        let Some(victims) = choose_victims_for(self.ledger, self.lane, key, giving_way, lack)
        else {
            return false;
        };
        if self.lane.is_ahead() {
            self.lane.must_land = true;
            return false;
        }
        for victim in victims {
            let position = self.lane.running.iter().position(|&key| key == victim);
            if let Some(position) = position {
                self.budget += preempt(self.ledger, self.lane, position, self.limits);
            }
        }
        true
    }

    /// Gives a waiting sequence its rows and blocks and its first chunk, or changes nothing.
    pub(crate) fn admit(
        &mut self,
        key: SequenceKey,
        entrance: Entrance,
    ) -> Result<u32, DoesNotFit> {
        let limits = self.limits;
        let horizon = match entrance {
            Entrance::OverOthers => Horizon::Now,
            Entrance::InTurn(level) | Entrance::AsGuest(level) => Horizon::Future(level),
        };
        let cached = self.find_room(key, horizon)?;
        let is_guest = matches!(entrance, Entrance::AsGuest(_));
        self.ledger.leave_queue(key, is_guest, self.now);
        let num_on_host = self.keep_on_host(key, cached.num_blocks);
        self.allow_offloads(num_on_host);
        let sequence = &mut self.ledger.sequences[key.0];
        let entry = &mut self.ledger.requests[sequence.request.0];
        let block_size = limits.block_size();
        reserve_memory(sequence, &entry.request, limits);
        sequence
            .table
            .adopt(&sequence.chain[..cached.num_blocks as usize]);
        sequence
            .table
            .grow(
                limits.blocks_for(sequence.num_tokens()) - cached.num_blocks,
                &mut self.lane.new_copies,
            )
            .expect("the blocks were counted above and nothing took any since");
        sequence.row = self.lane.rows.take();
        let siblings = (0..sequence.num_unborn).map_while(|_| self.lane.rows.take());
        sequence.sibling_rows.extend(siblings);
        write_resets(self.plan, &entry.request, sequence);

        sequence.joined_at_step = self.lane.step.number + 1;
        sequence.blocked_since = None;
        sequence.is_guest = false;
        sequence.num_computed_tokens = cached.num_blocks * block_size;
        sequence.num_published_blocks = cached.num_blocks;
        sequence.num_shared_blocks = cached.num_blocks;
        let class = self.ledger.rules.class(sequence.payer.class);
        self.lane.governor.settle(sequence, class.tpot_target_us);
        self.keep_copies(key);
        let chunk = self.grant_chunk(key);
        let num_cached_tokens = self.ledger.sequences[key.0].num_planned_tokens();
        self.ledger.admitted(key, num_cached_tokens, self.now);
        self.lane.running.enter(&self.ledger.sequences, key);
        self.has_joined(key, cached);
        Ok(chunk)
    }
}

/// Room for everything the sequence can become, so that its decode steps allocate nothing.
fn reserve_memory(sequence: &mut Sequence, request: &Request, limits: &Limits) {
    let most = request.num_prompt_tokens + request.max_tokens;
    sequence.reserve_tokens(most);
    let blocks = limits.blocks_for(most);
    sequence.table.reserve(blocks);
    if limits.prefix_caching() {
        let extra = (blocks as usize).saturating_sub(sequence.chain.len());
        sequence.chain.reserve_exact(extra);
    }
}
