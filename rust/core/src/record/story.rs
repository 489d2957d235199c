//! One request's story as data: what a [`Storyteller`](crate::record::Storyteller) tells.
//!
//! Times are microseconds on the engine's clock.

use serde::Serialize;

use crate::request::RequestStats;

/// What a story tells; times in microseconds on the engine's clock.
#[derive(Clone, Debug, Default, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Story {
    pub request: u64,
    pub tenant: String,
    pub class: String,
    pub user: Option<String>,
    pub answers: u32,
    pub prompt_tokens: u32,
    pub max_tokens: Option<u32>,
    pub priority: i32,
    /// When it took a place at the door.
    pub reserved_us: u64,
    /// When it was submitted; every other time is told from here.
    pub arrival_us: Option<u64>,
    /// Why it was not let in.
    pub refused: Option<String>,
    /// Requests that waited when it came.
    pub waiting: u64,
    /// Sequences that ran when it came.
    pub running: u64,
    /// For what it waited, and when.
    pub waits: Vec<Span>,
    /// Who was scheduled before it while it waited, by why: the most frequent first.
    pub ahead: Vec<Ahead>,
    /// When and in which step it was scheduled first.
    pub scheduled: Option<Scheduled>,
    /// Prefill chunks, preemptions and returns.
    pub moments: Vec<Moment>,
    /// The longest gaps between two outputs of one of its answers.
    pub gaps: Vec<Gap>,
    /// How each answer ended.
    pub ends: Vec<End>,
    /// What the engine counted; there if it ended.
    pub stats: Option<RequestStats>,
}

/// A time in which it waited for one thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Span {
    pub reason: &'static str,
    pub from_us: u64,
    pub to_us: u64,
}

/// Others that went ahead of it for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Ahead {
    pub why: &'static str,
    pub count: u64,
    pub prompt_tokens: u64,
    /// The first of them.
    pub requests: Vec<u64>,
    /// Their tenants, the most frequent first.
    pub tenants: Vec<(String, u64)>,
}

/// It was scheduled first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Scheduled {
    pub step: u64,
    pub at_us: u64,
    pub cached_tokens: u32,
}

/// Something that happened to it in a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "what", rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names say it")]
pub enum Moment {
    /// Part of its tokens was computed at once.
    Chunk {
        step: u64,
        at_us: u64,
        tokens: u32,
        computed_before: u32,
    },
    /// It lost its memory, for requests that were scheduled first in that step, or for the next tokens
    /// of those that ran on.
    Preempted {
        step: u64,
        at_us: u64,
        lost_tokens: u32,
        admitted: Vec<u64>,
    },
    /// It runs again.
    Resumed {
        step: u64,
        at_us: u64,
        cached_tokens: u32,
    },
}

/// A gap between two outputs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Gap {
    pub from_us: u64,
    pub to_us: u64,
    /// Steps that ended in it, and in how many of them it had tokens.
    pub steps: u32,
    pub steps_with_it: u32,
    /// The longest of them.
    pub longest: Option<StepView>,
}

/// A step, from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct StepView {
    pub step: u64,
    pub start_us: u64,
    pub duration_us: u64,
    pub num_decodes: u32,
    pub prefill_tokens: u32,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "the names say it")]
pub struct End {
    pub child: u32,
    pub at_us: u64,
    pub reason: &'static str,
}
