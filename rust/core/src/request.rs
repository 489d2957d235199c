//! Requests: what a client asks for, checked once, and how it ends.
//!
//! [`NewRequest`] is unchecked input; [`Request`] is what the engine keeps, made only by
//! [`NewRequest::validate`]. A request owns `n` sequences (children) that share its prompt; each ends
//! with one [`Finish`], and the request ends with its last child.

use std::fmt::{self, Display};
use std::sync::Arc;

use crate::config::Limits;
use crate::config::policy::DEFAULT_TENANT;
use crate::error::SubmitError;
use crate::text::StopStrings;

/// Microseconds since the engine's start, on the caller's clock; the core never reads one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Time(pub u64);

impl Time {
    /// Microseconds from `earlier` to `self`, zero if it is later.
    pub fn since_us(self, earlier: Time) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Names a request for its whole life; chosen by the caller, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RequestId(pub u64);

impl Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// Names a sequence while it lives; reused afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceKey(pub(crate) usize);

/// How the next token is drawn from the logits. Semantics are vLLM's.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SamplingParams {
    /// Answers (children) to the same prompt.
    pub n: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// Nucleus mass, in (0, 1].
    pub top_p: f32,
    /// Most candidates; 0 is all.
    pub top_k: u32,
    /// Least probability relative to the best, in [0, 1].
    pub min_p: f32,
    /// Divides the logits of seen tokens; 1 is none.
    pub repetition_penalty: f32,
    /// Taken from the logits of output tokens once.
    pub presence_penalty: f32,
    /// Taken from the logits of output tokens once per occurrence.
    pub frequency_penalty: f32,
    /// Key of the random stream; the caller draws one where the user gave none.
    pub seed: u64,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// `None`: no log-probabilities; `Some(k)`: the sampled token's and those of the `k` best.
    pub logprobs: Option<u32>,
    /// `None`: none of the prompt; `Some(k)`: for every prompt token but the first, its own
    /// log-probability and those of the `k` best. Such a request does not read the prefix cache.
    pub prompt_logprobs: Option<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            n: 1,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            logit_bias: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

impl SamplingParams {
    /// Whether the sampler needs the ids seen so far.
    #[allow(clippy::float_cmp)] // exactly "no penalty" is what is asked
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }
}

/// When a sequence ends and what of its text is shown.
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct StopParams {
    /// Most output tokens; `None` is the room that is left in the context.
    pub max_tokens: Option<u32>,
    /// Output tokens before which neither end-of-sequence, stop tokens nor stop strings end it.
    pub min_tokens: u32,
    /// Strings that end the sequence, compiled; children share them.
    pub stop: Option<Arc<StopStrings>>,
    /// Tokens that end the sequence.
    pub stop_token_ids: Vec<u32>,
    /// Whether the token that ended the sequence stays in the text (for a stop string,
    /// [`crate::text::StopText`] says it).
    pub include_stop_token_in_text: bool,
    /// Whether the model's end-of-sequence tokens are ordinary ones.
    pub ignore_eos: bool,
    /// Whether special tokens have no text.
    pub skip_special_tokens: bool,
}

/// A request as it comes in, unchecked.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct NewRequest {
    /// Its name; a place was reserved for it.
    pub id: RequestId,
    /// Prompt tokens.
    pub prompt: Vec<u32>,
    /// How to sample.
    pub sampling: SamplingParams,
    /// When to stop.
    pub stop: StopParams,
    /// Separates prefix-cache entries that must not be shared (tenant, user's own salt).
    pub cache_salt: Option<String>,
    /// Order within its class before every other key: lower is sooner.
    pub priority: i32,
    /// The latest time at which its first token is of use: one that was not scheduled by then ends as
    /// [`Finish::DeadlineMissed`].
    pub deadline: Option<Time>,
}

/// Who asks for a place at the door: all that is known before the prompt is tokenised.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Ticket {
    /// The request's name.
    pub id: RequestId,
    /// Its tenant.
    pub tenant: String,
    /// The class it asks for; `None` is the tenant's default.
    pub class: Option<String>,
    /// The tenant's user that it comes from.
    pub user: Option<String>,
    /// Answers, each counted as one request.
    pub n: u32,
}

impl Ticket {
    /// A ticket of the default tenant and class for one answer.
    pub fn new(id: RequestId) -> Self {
        Self {
            id,
            tenant: DEFAULT_TENANT.into(),
            class: None,
            user: None,
            n: 1,
        }
    }
}

/// A checked request: everything the engine needs to know of it but its sequences.
#[derive(Debug)]
pub struct Request {
    /// Its name.
    pub id: RequestId,
    /// How to sample.
    pub sampling: SamplingParams,
    /// When to stop.
    pub stop: StopParams,
    /// Tokens not to be sampled before `min_tokens` outputs: end-of-sequence and stop tokens.
    pub suppressed: Vec<u32>,
    /// Output tokens after which it ends as [`Finish::Length`]: `max_tokens` cut to the room.
    pub max_tokens: u32,
    /// Prompt tokens.
    pub num_prompt_tokens: u32,
    /// Prefix-cache salt.
    pub cache_salt: Option<String>,
    /// Order within its class; lower is sooner.
    pub priority: i32,
    /// The latest time at which its first token is of use.
    pub deadline: Option<Time>,
    /// Children that have not ended.
    pub live_children: u32,
    /// When things happened.
    pub stats: RequestStats,
}

impl Request {
    /// Prompt tokens whose successor's log-probability is asked for, from the start.
    pub fn num_tokens_to_score(&self) -> u32 {
        match self.sampling.prompt_logprobs {
            Some(_) => self.num_prompt_tokens - 1,
            None => 0,
        }
    }
}

/// When things happened to a request, and what it cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RequestStats {
    /// Submission.
    pub arrival: Time,
    /// First time in a plan.
    pub first_scheduled: Option<Time>,
    /// First output token committed.
    pub first_token: Option<Time>,
    /// Time to first token that the gate predicted at submission, in microseconds; `None` while
    /// nothing was measured that a prediction could rest on.
    pub predicted_ttft_us: Option<u64>,
    /// Queue time that was predicted with it.
    pub predicted_queue_time_us: Option<u64>,
    /// Last child ended.
    pub finished: Time,
    /// For how long it waited for what before it was first scheduled.
    pub waits: WaitTimes,
    /// Prompt tokens.
    pub num_prompt_tokens: u32,
    /// Prompt tokens found in the prefix cache when it was first scheduled.
    pub num_cached_tokens: u32,
    /// Output tokens of all children.
    pub num_output_tokens: u32,
    /// Times a child was preempted.
    pub num_preemptions: u32,
}

/// Why a request waits now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum WaitReason {
    /// All rows are taken.
    Slots,
    /// Memory is short.
    Memory,
    /// The token budget is used up.
    Budget,
    /// The order put others ahead that came later.
    Fairness,
    /// Its tenant has used up its token rate or its running answers.
    Rate,
    /// Its batch is not formed yet.
    Window,
    /// With it, those that run would decode more slowly than they were promised.
    Sla,
}

impl WaitReason {
    /// Its stable name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Slots => "slots",
            Self::Memory => "memory",
            Self::Budget => "budget",
            Self::Fairness => "fairness",
            Self::Rate => "rate",
            Self::Window => "window",
            Self::Sla => "sla",
        }
    }
}

/// For how long a request waited for what, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct WaitTimes {
    /// For a row.
    pub slots_us: u64,
    /// For memory.
    pub memory_us: u64,
    /// For the token budget, and for the step in flight to end.
    pub budget_us: u64,
    /// For those that came later and went ahead.
    pub fairness_us: u64,
    /// For its tenant's rate.
    pub rate_us: u64,
    /// For its batch to be formed.
    pub window_us: u64,
    /// For those that run to leave time for one more.
    pub sla_us: u64,
}

/// How a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Finish {
    /// The model's end-of-sequence token.
    Eos,
    /// A stop token, by id.
    StopToken(u32),
    /// A stop string, by its index in the request's list.
    StopString(u32),
    /// `max_tokens` or the end of the context.
    Length,
    /// The client gave up.
    Abort,
    /// The executor failed this sequence's row.
    RowFailed,
    /// The executor failed the whole step.
    StepFailed,
    /// The engine died.
    EngineDead,
    /// It waited for as long as its class may wait.
    QueueTimeout,
    /// Its deadline passed, or was certain to pass, before it was first scheduled.
    DeadlineMissed,
    /// It was shed under overload before it was first scheduled.
    Shed,
    /// A more important request took its place before it was first scheduled.
    Displaced,
}

/// The kinds of ends that are counted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndKind {
    /// By itself.
    Finished,
    /// Its client gave it up.
    Aborted,
    /// The executor or the engine failed it.
    Failed,
    /// It waited too long, or missed its deadline.
    Expired,
    /// Shed under overload.
    Shed,
    /// It gave its place to a more important one.
    Displaced,
}

impl Finish {
    /// Its kind.
    pub fn kind(self) -> EndKind {
        match self {
            Self::Eos | Self::StopToken(_) | Self::StopString(_) | Self::Length => {
                EndKind::Finished
            }
            Self::Abort => EndKind::Aborted,
            Self::RowFailed | Self::StepFailed | Self::EngineDead => EndKind::Failed,
            Self::QueueTimeout | Self::DeadlineMissed => EndKind::Expired,
            Self::Shed => EndKind::Shed,
            Self::Displaced => EndKind::Displaced,
        }
    }

    /// The finish reason as the API names it: `stop`, `length`, `abort` or `error`; of what was never
    /// scheduled, the stable reason for which it was given up.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Eos | Self::StopToken(_) | Self::StopString(_) => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::RowFailed | Self::StepFailed | Self::EngineDead => "error",
            Self::QueueTimeout => "queue_timeout",
            Self::DeadlineMissed => "deadline_missed",
            Self::Shed => "shed",
            Self::Displaced => "displaced",
        }
    }
}

impl NewRequest {
    /// Checks everything that can be known before the request waits: what passes can run.
    ///
    /// `eos_token_ids` are the model's.
    pub fn validate(
        self,
        limits: &Limits,
        eos_token_ids: &[u32],
        now: Time,
    ) -> Result<(Request, Vec<u32>), SubmitError> {
        check_prompt(&self.prompt, limits)?;
        check_sampling(&self.sampling, limits)?;
        check_tokens("stop_token_ids", &self.stop.stop_token_ids, limits)?;
        let num_prompt_tokens = self.prompt.len() as u32;
        let room = limits.max_model_len() - num_prompt_tokens;
        let max_tokens = self.stop.max_tokens.unwrap_or(room).min(room);
        if max_tokens == 0 {
            return Err(invalid("max_tokens", 0, "at least 1"));
        }
        if self.stop.min_tokens > self.stop.max_tokens.unwrap_or(u32::MAX) {
            return Err(invalid(
                "min_tokens",
                self.stop.min_tokens,
                "at most max_tokens",
            ));
        }
        let mut suppressed = Vec::new();
        if self.stop.min_tokens > 0 {
            suppressed.extend_from_slice(&self.stop.stop_token_ids);
            if !self.stop.ignore_eos {
                suppressed.extend_from_slice(eos_token_ids);
            }
            suppressed.sort_unstable();
            suppressed.dedup();
        }
        if suppressed.len() > MAX_RAGGED_PER_REQUEST {
            let most = format!("at most {MAX_RAGGED_PER_REQUEST} tokens");
            return Err(invalid("stop_token_ids", suppressed.len(), most));
        }
        let request = Request {
            id: self.id,
            live_children: self.sampling.n,
            sampling: self.sampling,
            stop: self.stop,
            suppressed,
            max_tokens,
            num_prompt_tokens,
            cache_salt: self.cache_salt,
            priority: self.priority,
            deadline: self.deadline,
            stats: RequestStats {
                arrival: now,
                num_prompt_tokens,
                ..RequestStats::default()
            },
        };
        Ok((request, self.prompt))
    }
}

/// Most entries of `logit_bias`, and of the tokens that `min_tokens` suppresses, per request.
pub const MAX_RAGGED_PER_REQUEST: usize = 1_024;

fn check_prompt(prompt: &[u32], limits: &Limits) -> Result<(), SubmitError> {
    if prompt.is_empty() {
        return Err(SubmitError::EmptyPrompt);
    }
    if prompt.len() >= limits.max_model_len() as usize {
        return Err(SubmitError::PromptTooLong {
            prompt_tokens: prompt.len(),
            max_model_len: limits.max_model_len(),
        });
    }
    check_tokens("prompt", prompt, limits)
}

fn check_tokens(field: &'static str, tokens: &[u32], limits: &Limits) -> Result<(), SubmitError> {
    let vocab_size = limits.vocab_size();
    match tokens.iter().find(|&&token| token >= vocab_size) {
        None => Ok(()),
        Some(&token) => Err(SubmitError::TokenOutOfRange {
            field,
            token,
            vocab_size,
        }),
    }
}

fn check_sampling(sampling: &SamplingParams, limits: &Limits) -> Result<(), SubmitError> {
    let ranges = [
        ("temperature", sampling.temperature, 0.0, 2.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        // Logits are divided by it; what is smaller would make infinities of them.
        ("repetition_penalty", sampling.repetition_penalty, 0.01, 2.0),
        ("presence_penalty", sampling.presence_penalty, -2.0, 2.0),
        ("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0),
    ];
    for (field, value, low, high) in ranges {
        if !(low..=high).contains(&value) {
            return Err(invalid(field, value, format!("from {low} to {high}")));
        }
    }
    if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
        return Err(invalid("top_p", sampling.top_p, "above 0 and at most 1"));
    }
    if !(1..=limits.max_num_seqs()).contains(&sampling.n) {
        let allowed = format!("from 1 to max_num_seqs ({})", limits.max_num_seqs());
        return Err(invalid("n", sampling.n, allowed));
    }
    for (field, wanted) in [
        ("logprobs", sampling.logprobs),
        ("prompt_logprobs", sampling.prompt_logprobs),
    ] {
        if let Some(k) = wanted.filter(|&k| k > limits.vocab_size()) {
            let allowed = format!("at most the vocabulary ({})", limits.vocab_size());
            return Err(invalid(field, k, allowed));
        }
    }
    if sampling.logit_bias.len() > MAX_RAGGED_PER_REQUEST {
        let most = format!("at most {MAX_RAGGED_PER_REQUEST} tokens");
        return Err(invalid("logit_bias", sampling.logit_bias.len(), most));
    }
    for &(token, bias) in &sampling.logit_bias {
        check_tokens("logit_bias", &[token], limits)?;
        if !(-100.0..=100.0).contains(&bias) {
            return Err(invalid("logit_bias", bias, "from -100 to 100"));
        }
    }
    Ok(())
}

fn invalid(field: &'static str, value: impl Display, allowed: impl Into<String>) -> SubmitError {
    SubmitError::InvalidParameter {
        field,
        value: value.to_string(),
        allowed: allowed.into(),
    }
}
