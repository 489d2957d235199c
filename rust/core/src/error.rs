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
        "the prompt has {prompt_tokens} tokens, but at most {} fit beside one output token in the \
         context of {max_model_len}; shorten the prompt or raise max_model_len",
        max_model_len - 1
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

impl SubmitError {
    /// Stable identifier of the kind of error.
    pub fn code(&self) -> &'static str {
        match self {
            Self::EmptyPrompt => "empty_prompt",
            Self::TokenOutOfRange { .. } => "token_out_of_range",
            Self::PromptTooLong { .. } => "context_length_exceeded",
            Self::InvalidParameter { .. } => "invalid_parameter",
            Self::QueueFull { .. } => "queue_full",
            Self::DuplicateRequest { .. } => "duplicate_request",
            Self::NoReservation { .. } => "no_reservation",
        }
    }
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
