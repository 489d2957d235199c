//! Tells one request's story from a replay: when it waited and for what, who went ahead, what it ran and
//! what held it up.
//!
//! A [`Storyteller`] looks at the replayed engine after every record. What is asked of the engine is
//! exact: waits, steps, tokens, memory. Why another request went ahead is not kept by the engine; it is
//! read off the classes, the policy and what the request waited for at that moment, in that order.

use std::collections::{BTreeMap, VecDeque};

use crate::Engine;
use crate::config::policy::{ClassSettings, OnTimeout, Order, Sharing};
use crate::iteration::progress::Progress;
use crate::output::Event;
use crate::record::format::Entry;
use crate::record::replay::Replayer;
use crate::record::story::{Ahead, End, Gap, Moment, Scheduled, Span, StepView, Story};
use crate::request::{Finish, NewRequest, RequestId, Ticket, Time, WaitReason};

/// Others that a story names for each reason.
const MAX_NAMES: usize = 5;
/// Gaps that a story tells of.
const MAX_GAPS: usize = 5;

/// What is known of every request.
struct Known {
    tenant: String,
    class: usize,
    user: Option<String>,
    priority: i32,
    prompt_tokens: u32,
    /// Order of submission, and when.
    submission: Option<(u64, Time)>,
}

/// What happened since an answer's last output.
#[derive(Default)]
struct Silence {
    since_us: Option<u64>,
    steps: u32,
    steps_with_it: u32,
    longest: Option<StepView>,
}

/// Watches a replay for one request.
pub struct Storyteller {
    id: RequestId,
    story: Story,
    is_known: bool,
    others: BTreeMap<RequestId, Known>,
    num_submitted: u64,
    /// Events that are waiting to be taken and were looked at.
    num_seen_events: usize,
    /// Steps in flight, the oldest first, and whether the request has tokens in them.
    in_flight: VecDeque<(StepView, bool)>,
    /// Tokens that were computed of each of its sequences when it was last seen to run.
    ran_with: Option<u32>,
    was_preempted: bool,
    ahead: BTreeMap<&'static str, (Ahead, BTreeMap<String, u64>)>,
    silences: BTreeMap<u32, Silence>,
}

impl Storyteller {
    /// Watches for request `id`.
    pub fn new(id: RequestId) -> Self {
        Self {
            id,
            story: Story {
                request: id.0,
                ..Story::default()
            },
            is_known: false,
            others: BTreeMap::new(),
            num_submitted: 0,
            num_seen_events: 0,
            in_flight: VecDeque::new(),
            ran_with: None,
            was_preempted: false,
            ahead: BTreeMap::new(),
            silences: BTreeMap::new(),
        }
    }

    /// Whether the story is over: nothing that comes belongs to it.
    pub fn is_over(&self) -> bool {
        self.story.stats.is_some() || self.story.refused.is_some()
    }

    /// Requests that the log had so far, and the first ids.
    pub fn requests(&self) -> (usize, Vec<u64>) {
        let first = self.others.keys().take(MAX_NAMES).map(|id| id.0);
        (self.others.len(), first.collect())
    }

    /// The story; `None` if the log never had the request.
    pub fn finish(self) -> Option<Story> {
        let mut story = self.story;
        let ahead = self.ahead.into_values().map(|(mut ahead, tenants)| {
            ahead.tenants = tenants.into_iter().collect();
            ahead
                .tenants
                .sort_by_key(|(_, count)| std::cmp::Reverse(*count));
            ahead.tenants.truncate(MAX_NAMES);
            ahead
        });
        story.ahead = ahead.collect();
        story
            .ahead
            .sort_by_key(|ahead| std::cmp::Reverse(ahead.count));
        story
            .gaps
            .sort_by_key(|gap| std::cmp::Reverse(gap.to_us - gap.from_us));
        self.is_known.then_some(story)
    }

    /// Looks at a record that has just been applied.
    pub fn observe(&mut self, now: Time, entry: &Entry, replayer: &Replayer) {
        let engine = replayer.engine();
        match entry {
            Entry::Reserve { ticket, code } => {
                let class = engine.reserved_class(ticket.id);
                let class = class.or(ticket.class.as_deref());
                self.reserved(now, ticket, code, &engine.policy().classes, class);
            }
            Entry::Submit { request, code } => {
                let metrics = engine.metrics();
                // It waits itself by now, if it was let in.
                let others = metrics.waiting.saturating_sub(u64::from(code.is_empty()));
                self.submitted(now, request, code, (others, metrics.running_sequences));
            }
            Entry::Schedule { plan } => self.scheduled(now, plan.is_some(), replayer),
            Entry::Commit { .. } => self.landed(now),
            Entry::FailStep { .. } => drop(self.in_flight.pop_front()),
            Entry::FailAll => self.in_flight.clear(),
            Entry::Outputs { .. } => {
                self.num_seen_events = 0;
                self.told(now, replayer);
            }
            _ => {}
        }
        self.look_at_the_wait(now, engine);
    }

    /// Looks at a record of a segment that cannot be replayed: what the log says without an engine.
    pub fn hear(&mut self, now: Time, entry: &Entry, classes: &[ClassSettings]) {
        match entry {
            Entry::Reserve { ticket, code } => {
                self.reserved(now, ticket, code, classes, ticket.class.as_deref());
            }
            Entry::Submit { request, code } => self.submitted(now, request, code, (0, 0)),
            Entry::Outputs { events, .. } => {
                for event in events {
                    if let Event::Scheduled {
                        request,
                        num_cached_tokens,
                        ..
                    } = event
                        && *request == self.id
                    {
                        self.story.scheduled = Some(Scheduled {
                            step: 0,
                            at_us: now.0,
                            cached_tokens: *num_cached_tokens,
                        });
                    }
                    self.tell_end(now, event);
                }
            }
            _ => {}
        }
    }

    fn reserved(
        &mut self,
        now: Time,
        ticket: &Ticket,
        code: &str,
        classes: &[ClassSettings],
        class: Option<&str>,
    ) {
        let position = classes.iter().position(|known| Some(&*known.name) == class);
        let known = Known {
            tenant: ticket.tenant.clone(),
            class: position.unwrap_or_default(),
            user: ticket.user.clone(),
            priority: 0,
            prompt_tokens: 0,
            submission: None,
        };
        if ticket.id == self.id {
            self.is_known = true;
            let story = &mut self.story;
            story.tenant.clone_from(&known.tenant);
            story.class.clone_from(&classes[known.class].name);
            story.user.clone_from(&known.user);
            story.answers = ticket.n;
            story.reserved_us = now.0;
            story.refused = Some(code.to_owned()).filter(|code| !code.is_empty());
        }
        self.others.insert(ticket.id, known);
    }

    /// Beside it: requests that waited, and sequences that ran.
    fn submitted(&mut self, now: Time, request: &NewRequest, code: &str, beside: (u64, u64)) {
        let prompt_tokens = request.prompt.len() as u32;
        if let Some(known) = self.others.get_mut(&request.id) {
            known.priority = request.priority;
            known.prompt_tokens = prompt_tokens;
            known.submission = Some((self.num_submitted, now));
            self.num_submitted += 1;
        }
        if request.id == self.id {
            let story = &mut self.story;
            story.arrival_us = Some(now.0);
            story.refused = Some(code.to_owned()).filter(|code| !code.is_empty());
            story.prompt_tokens = prompt_tokens;
            story.max_tokens = request.stop.max_tokens;
            story.priority = request.priority;
            (story.waiting, story.running) = beside;
        }
    }

    /// Notes for what it waits now, where that is something else than before.
    fn look_at_the_wait(&mut self, now: Time, engine: &Engine) {
        let wait = engine.wait(now, self.id);
        let waits = &mut self.story.waits;
        let open = waits.last_mut().filter(|span| span.to_us == u64::MAX);
        let reason = wait.map(|(reason, _)| reason.name());
        if let Some(span) = open {
            if reason == Some(span.reason) {
                return;
            }
            span.to_us = now.0;
        }
        if let Some(reason) = reason {
            waits.push(Span {
                reason,
                from_us: now.0,
                to_us: u64::MAX,
            });
        }
    }

    fn scheduled(&mut self, now: Time, planned: bool, replayer: &Replayer) {
        let admitted = self.look_at_the_admitted(now, replayer);
        let mut progress = replayer.engine().progress(self.id);
        if !planned {
            // It has no tokens in this step, though it may have some in one that is in flight.
            for part in &mut progress {
                part.num_computed_tokens += std::mem::take(&mut part.num_scheduled_tokens);
            }
        }
        if planned {
            let plan = replayer.plan();
            let view = StepView {
                step: plan.step,
                start_us: now.0,
                duration_us: 0,
                num_decodes: plan.num_decodes as u32,
                prefill_tokens: (plan.num_tokens() - plan.num_decodes) as u32,
            };
            let has_it = progress.iter().any(|part| part.num_scheduled_tokens > 0);
            self.in_flight.push_back((view, has_it));
        }
        if !progress.is_empty() {
            let step = if planned { replayer.plan().step } else { 0 };
            self.look_at_the_run(now, step, &progress, admitted);
        }
    }

    /// Who was scheduled first just now.
    fn look_at_the_admitted(&mut self, now: Time, replayer: &Replayer) -> Vec<u64> {
        let engine = replayer.engine();
        let events = &engine.pending_outputs().events;
        let seen = std::mem::replace(&mut self.num_seen_events, events.len());
        let mut admitted = Vec::new();
        for event in events.iter().skip(seen) {
            let Event::Scheduled {
                request,
                num_cached_tokens,
                ..
            } = event
            else {
                continue;
            };
            admitted.push(request.0);
            if *request == self.id {
                self.story.scheduled = Some(Scheduled {
                    step: replayer.plan().step,
                    at_us: now.0,
                    cached_tokens: *num_cached_tokens,
                });
            } else {
                self.went_ahead(now, *request, engine);
            }
        }
        admitted
    }

    /// Notes preemptions, returns and prefill chunks; `admitted` were scheduled first in the same step.
    fn look_at_the_run(&mut self, now: Time, step: u64, parts: &[Progress], admitted: Vec<u64>) {
        let at_us = now.0;
        let running = parts.iter().filter(|part| part.runs);
        let computed: u32 = running.clone().map(|part| part.num_computed_tokens).sum();
        let num_running = running.count();
        let tokens: u32 = parts.iter().map(|part| part.num_scheduled_tokens).sum();
        let moments = &mut self.story.moments;
        if num_running < parts.len() {
            if let Some(had) = self.ran_with.take() {
                self.was_preempted = true;
                moments.push(Moment::Preempted {
                    step,
                    at_us,
                    lost_tokens: had.saturating_sub(computed),
                    admitted,
                });
            }
        } else {
            if std::mem::take(&mut self.was_preempted) {
                moments.push(Moment::Resumed {
                    step,
                    at_us,
                    cached_tokens: computed,
                });
            }
            self.ran_with = Some(computed + tokens);
        }
        if tokens as usize > num_running {
            moments.push(Moment::Chunk {
                step,
                at_us,
                tokens,
                computed_before: computed,
            });
        }
    }

    /// Another request was scheduled while this one waits: says why that may be.
    fn went_ahead(&mut self, now: Time, other: RequestId, engine: &Engine) {
        let Some((reason, _)) = engine.wait(now, self.id) else {
            return;
        };
        let (Some(mine), Some(theirs)) = (self.others.get(&self.id), self.others.get(&other))
        else {
            return;
        };
        let why = why_ahead(now, reason, mine, theirs, engine);
        let (ahead, tenants) = self.ahead.entry(why).or_insert_with(|| {
            let ahead = Ahead {
                why,
                count: 0,
                prompt_tokens: 0,
                requests: Vec::new(),
                tenants: Vec::new(),
            };
            (ahead, BTreeMap::new())
        });
        ahead.count += 1;
        ahead.prompt_tokens += u64::from(theirs.prompt_tokens);
        if ahead.requests.len() < MAX_NAMES {
            ahead.requests.push(other.0);
        }
        *tenants.entry(theirs.tenant.clone()).or_default() += 1;
    }

    fn landed(&mut self, now: Time) {
        let Some((mut view, has_it)) = self.in_flight.pop_front() else {
            return;
        };
        view.duration_us = now.0 - view.start_us;
        if let Some((next, _)) = self.in_flight.front_mut() {
            // It was planned ahead, and has the executor to itself from now on.
            next.start_us = now.0;
        }
        for silence in self.silences.values_mut() {
            silence.steps += 1;
            silence.steps_with_it += u32::from(has_it);
            if silence
                .longest
                .is_none_or(|longest| longest.duration_us < view.duration_us)
            {
                silence.longest = Some(view);
            }
        }
    }

    /// What its client was told.
    fn told(&mut self, now: Time, replayer: &Replayer) {
        for event in &replayer.outputs().events {
            if let Event::Output(output) = event
                && output.request == self.id
                && !output.tokens.is_empty()
            {
                self.end_silence(output.child, now);
            }
            self.tell_end(now, event);
        }
    }

    /// Notes the end of one of its answers, or of all.
    fn tell_end(&mut self, now: Time, event: &Event) {
        match event {
            Event::Output(output) if output.request == self.id => {
                if let Some(finish) = output.finish {
                    self.story.ends.push(End {
                        child: output.child,
                        at_us: now.0,
                        reason: end_name(finish),
                    });
                    self.silences.remove(&output.child);
                }
            }
            Event::Ended { request, stats } if *request == self.id => {
                self.is_known = true;
                let story = &mut self.story;
                // Its beginning may lie before what is heard.
                story.arrival_us.get_or_insert(stats.arrival.0);
                story.prompt_tokens = stats.num_prompt_tokens;
                story.stats = Some(**stats);
            }
            _ => {}
        }
    }

    fn end_silence(&mut self, child: u32, now: Time) {
        let silence = self.silences.entry(child).or_default();
        let ended = std::mem::take(silence);
        silence.since_us = Some(now.0);
        let Some(from_us) = ended.since_us else {
            return; // its first output
        };
        let gaps = &mut self.story.gaps;
        gaps.push(Gap {
            from_us,
            to_us: now.0,
            steps: ended.steps,
            steps_with_it: ended.steps_with_it,
            longest: ended.longest,
        });
        if gaps.len() > MAX_GAPS {
            let lengths = gaps.iter().map(|gap| gap.to_us - gap.from_us).enumerate();
            let shortest = lengths.min_by_key(|&(_, length)| length);
            gaps.swap_remove(shortest.map_or(0, |(at, _)| at));
        }
    }
}

/// Why `theirs` may have gone ahead of `mine`, which waits for `reason`.
fn why_ahead(
    now: Time,
    reason: WaitReason,
    mine: &Known,
    theirs: &Known,
    engine: &Engine,
) -> &'static str {
    let policy = engine.policy();
    let (my_class, class) = (&policy.classes[mine.class], &policy.classes[theirs.class]);
    let came = |known: &Known| known.submission.map(|(number, _)| number);
    if came(theirs) < came(mine) {
        return "came earlier";
    }
    let waited_us = theirs
        .submission
        .map_or(0, |(_, since)| now.since_us(since));
    let longest_us = class
        .max_queue_time_us
        .filter(|_| class.on_timeout == OnTimeout::Promote);
    let longest_us = longest_us.into_iter().chain(policy.max_level_wait_us).min();
    if class.level > my_class.level {
        return "of a higher level";
    }
    if longest_us.is_some_and(|longest_us| waited_us >= longest_us) {
        return "promoted";
    }
    if reason == WaitReason::Rate {
        return "its own tenant was held by its rate or its running answers";
    }
    let same_flow =
        mine.class == theirs.class && mine.tenant == theirs.tenant && mine.user == theirs.user;
    if policy.sharing == Sharing::Fair && !same_flow {
        return "had received less than its share";
    }
    if theirs.priority < mine.priority {
        return "of a sooner priority";
    }
    match policy.order {
        Order::Arrival => "fitted where it did not",
        Order::Shortest => "predicted to be shorter",
        Order::Footprint => "predicted to need less memory over time",
        Order::Deadline => "of an earlier deadline",
        Order::Prefix => "had a longer cached prefix",
    }
}

fn end_name(finish: Finish) -> &'static str {
    match finish {
        Finish::Eos => "end of sequence",
        Finish::StopToken(_) => "stop token",
        Finish::StopString(_) => "stop string",
        Finish::RowFailed => "its row failed",
        Finish::StepFailed => "its step failed",
        Finish::EngineDead => "the engine died",
        other => other.reason(),
    }
}
