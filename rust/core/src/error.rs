//! Typed errors with a stable `code()`.
//!
//! Messages are lower case, name the numbers that decided and say what to do next. One file of the
//! bindings maps codes to Python exceptions, one of the server maps them to HTTP statuses; nothing
//! else may depend on the wording.

use thiserror::Error;

use crate::request::RequestId;

/// Settings that cannot work together.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ConfigError {
    /// A number is below its least value.
    #[error("{key} is {value}; it must be at least {min}")]
    TooSmall {
        /// The setting.
        key: &'static str,
        /// Its value.
        value: u32,
        /// Its least value.
        min: u32,
    },
    /// A number is above its greatest value.
    #[error("{key} is {value}; it must be at most {max}")]
    TooLarge {
        /// The setting.
        key: &'static str,
        /// Its value.
        value: u32,
        /// Its greatest value.
        max: u32,
    },
    /// Not every running sequence could get its token in one iteration.
    #[error(
        "max_num_seqs ({max_num_seqs}) is above max_num_batched_tokens ({max_num_batched_tokens}), \
         so not every running sequence could get its token; lower the first or raise the second"
    )]
    MoreSeqsThanTokens {
        /// The setting of that name.
        max_num_seqs: u32,
        /// The setting of that name.
        max_num_batched_tokens: u32,
    },
    /// A value of the policy is not allowed.
    #[error("{key} is {value}; it must be {allowed}")]
    Invalid {
        /// Where it stands, as a dotted path.
        key: String,
        /// Its value, as text.
        value: String,
        /// What is allowed, as a phrase.
        allowed: String,
    },
}

impl ConfigError {
    /// Stable identifier of the kind of error.
    pub fn code(&self) -> &'static str {
        "invalid_config"
    }
}

/// A request that was not accepted. Nothing of it is left in the engine.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum SubmitError {
    /// The prompt has no tokens.
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,
    /// A token id is outside the vocabulary.
    #[error("token id {token} in {field} is outside the vocabulary of {vocab_size} tokens")]
    TokenOutOfRange {
        /// Where it stood.
        field: &'static str,
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        vocab_size: u32,
    },
    /// Prompt and one output token do not fit in a sequence.
    #[error(
        "the prompt is too long: it has {prompt_tokens} tokens, but the model's maximum context \
         length is {max_model_len} tokens, at least one of them for the output; shorten the prompt \
         or raise max_model_len"
    )]
    PromptTooLong {
        /// Length of the prompt.
        prompt_tokens: usize,
        /// Longest sequence.
        max_model_len: u32,
    },
    /// A sampling parameter is out of its range.
    #[error("{field} is {value}; it must be {allowed}")]
    InvalidParameter {
        /// The parameter.
        field: &'static str,
        /// Its value, as text.
        value: String,
        /// What is allowed, as a phrase.
        allowed: String,
    },
    /// The waiting queue is full.
    #[error(
        "the waiting queue is full: {queued} of {max_queued_requests} requests are waiting; \
         retry later or raise max_queued_requests"
    )]
    QueueFull {
        /// Requests that wait now.
        queued: u32,
        /// The bound.
        max_queued_requests: u32,
    },
    /// Too many prompt tokens wait.
    #[error(
        "the waiting queue is full: {queued_tokens} prompt tokens wait and the request has \
         {prompt_tokens} more, of at most {max_queued_tokens}{}; retry later", of_class(.class.as_ref())
    )]
    TokensFull {
        /// Prompt tokens that wait now.
        queued_tokens: u64,
        /// Prompt tokens of the request.
        prompt_tokens: u64,
        /// The bound.
        max_queued_tokens: u64,
        /// The class whose bound it is; `None`: the engine's.
        class: Option<String>,
    },
    /// The class has no place left.
    #[error(
        "class {class} is full: {queued} of {max_queued_requests} requests are waiting; retry later"
    )]
    ClassFull {
        /// The class.
        class: String,
        /// Its requests that wait now.
        queued: u32,
        /// The bound.
        max_queued_requests: u32,
    },
    /// The tenant has no place left.
    #[error("tenant {tenant} is full: {queued} of {max_queued} requests are waiting; retry later")]
    TenantFull {
        /// The tenant.
        tenant: String,
        /// Its requests that wait now.
        queued: u32,
        /// The bound.
        max_queued: u32,
    },
    /// The request has more answers than the tenant may run at once.
    #[error(
        "the request has {n} answers, but tenant {tenant} may run {max_running} at once; \
         ask for fewer"
    )]
    TooManyAnswers {
        /// The tenant.
        tenant: String,
        /// Answers of the request.
        n: u32,
        /// The bound.
        max_running: u32,
    },
    /// No class has this name.
    #[error("there is no class {class}; the classes are {known}")]
    UnknownClass {
        /// The name.
        class: String,
        /// The names there are.
        known: String,
    },
    /// The tenant's token rate would hold the request for longer than its class may wait.
    #[error(
        "tenant {tenant} has used up its {tokens_per_second} tokens a second for the next \
         {wait_us} us, and the request may wait {max_queue_time_us} us; retry later"
    )]
    RateExceeded {
        /// The tenant.
        tenant: String,
        /// Its quota.
        tokens_per_second: u64,
        /// How long it would hold the request, in microseconds.
        wait_us: u64,
        /// How long the request may wait, in microseconds.
        max_queue_time_us: u64,
    },
    /// The first token would come after the class's target, or the request's deadline.
    #[error(
        "the first token is predicted after {predicted_us} us, but {} within {target_us} us; \
         retry later", whose_target(.class.as_ref())
    )]
    TtftUnreachable {
        /// The class whose target it is; `None`: the request has a deadline.
        class: Option<String>,
        /// Predicted time to first token, in microseconds.
        predicted_us: u64,
        /// The target, or what is left until the deadline, in microseconds.
        target_us: u64,
    },
    /// The class promises a queue time that promises made before leave no room for.
    #[error(
        "the request would wait {predicted_us} us behind promises made before, but class {class} \
         promises at most {max_queue_time_us} us; retry later"
    )]
    PromiseUnkeepable {
        /// The class.
        class: String,
        /// Predicted queue time, in microseconds.
        predicted_us: u64,
        /// The promise, in microseconds.
        max_queue_time_us: u64,
    },
    /// The engine is overloaded and sheds this class.
    #[error(
        "the engine is overloaded and takes no requests of class {class}; retry in {retry_after_us} us"
    )]
    Shedding {
        /// The class.
        class: String,
        /// When it may be over, in microseconds.
        retry_after_us: u64,
    },
    /// The id is in use by a live request.
    #[error("{request} is live already; ids must be unique")]
    DuplicateRequest {
        /// The id.
        request: RequestId,
    },
    /// The request's place was never reserved, or it was given back.
    #[error("{request} has no open reservation; reserve a place once, then submit once")]
    NoReservation {
        /// The id.
        request: RequestId,
    },
}

/// All that [`SubmitError::code`] can be: the reasons by which rejections are counted.
pub const REJECTION_CODES: [&str; 15] = [
    "empty_prompt",
    "token_out_of_range",
    "context_length_exceeded",
    "invalid_parameter",
    "queue_full",
    "class_full",
    "tenant_full",
    "too_many_answers",
    "unknown_class",
    "rate_exceeded",
    "ttft_unreachable",
    "promise_unkeepable",
    "shedding",
    "duplicate_request",
    "no_reservation",
];

impl SubmitError {
    /// When the same request may be taken, in microseconds from now: from the prediction that rejected
    /// it, and a second where a place is all that lacks. `None` if it never will be as it is.
    pub fn retry_after_us(&self) -> Option<u64> {
        let least = 1_000_000;
        match *self {
            Self::QueueFull { .. }
            | Self::TokensFull { .. }
            | Self::ClassFull { .. }
            | Self::TenantFull { .. } => Some(least),
            Self::RateExceeded {
                wait_us,
                max_queue_time_us,
                ..
            } => Some((wait_us - max_queue_time_us).max(least)),
            Self::TtftUnreachable {
                predicted_us,
                target_us,
                ..
            } => Some((predicted_us - target_us).max(least)),
            Self::PromiseUnkeepable {
                predicted_us,
                max_queue_time_us,
                ..
            } => Some((predicted_us - max_queue_time_us).max(least)),
            Self::Shedding { retry_after_us, .. } => Some(retry_after_us.max(least)),
            Self::EmptyPrompt
            | Self::TokenOutOfRange { .. }
            | Self::PromptTooLong { .. }
            | Self::InvalidParameter { .. }
            | Self::TooManyAnswers { .. }
            | Self::UnknownClass { .. }
            | Self::DuplicateRequest { .. }
            | Self::NoReservation { .. } => None,
        }
    }

    /// Stable identifier of the kind of error.
    pub fn code(&self) -> &'static str {
        match self {
            Self::EmptyPrompt => "empty_prompt",
            Self::TokenOutOfRange { .. } => "token_out_of_range",
            Self::PromptTooLong { .. } => "context_length_exceeded",
            Self::InvalidParameter { .. } => "invalid_parameter",
            Self::QueueFull { .. } | Self::TokensFull { .. } => "queue_full",
            Self::ClassFull { .. } => "class_full",
            Self::TenantFull { .. } => "tenant_full",
            Self::TooManyAnswers { .. } => "too_many_answers",
            Self::UnknownClass { .. } => "unknown_class",
            Self::RateExceeded { .. } => "rate_exceeded",
            Self::TtftUnreachable { .. } => "ttft_unreachable",
            Self::PromiseUnkeepable { .. } => "promise_unkeepable",
            Self::Shedding { .. } => "shedding",
            Self::DuplicateRequest { .. } => "duplicate_request",
            Self::NoReservation { .. } => "no_reservation",
        }
    }
}

fn of_class(class: Option<&String>) -> String {
    class.map_or_else(String::new, |class| format!(" in class {class}"))
}

fn whose_target(class: Option<&String>) -> String {
    let of_class = |class| format!("class {class} promises it");
    class.map_or_else(|| "its deadline is".into(), of_class)
}

/// Results that do not belong to the step in flight. The executor is at fault; its requests fail.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CommitError {
    /// No such step is in flight.
    #[error("step {step} is not in flight")]
    UnknownStep {
        /// The step that was named.
        step: u64,
    },
    /// An array has the wrong length.
    #[error("{array} has {got} entries, but the step needs {expected}")]
    WrongLength {
        /// The array.
        array: &'static str,
        /// Its length.
        got: usize,
        /// The length that the plan calls for.
        expected: usize,
    },
    /// A sampled token is outside the vocabulary.
    #[error("sampled token {token} is outside the vocabulary of {vocab_size} tokens")]
    TokenOutOfRange {
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        vocab_size: u32,
    },
}

impl CommitError {
    /// Stable identifier of the kind of error.
    pub fn code(&self) -> &'static str {
        match self {
            Self::UnknownStep { .. } => "unknown_step",
            Self::WrongLength { .. } | Self::TokenOutOfRange { .. } => "invalid_step_result",
        }
    }
}
