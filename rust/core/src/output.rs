//! What an iteration tells the clients, as one flat batch.
//!
//! The engine appends to an [`OutputBatch`]; whoever delivers it takes it whole, hands it on and gives
//! an empty one back, so that steady state allocates nothing. Every child of a request gets exactly one
//! [`Output::finish`], and the request exactly one [`Event::Ended`], after everything else of it.

use std::ops::Range;

use crate::request::{Finish, RequestId, RequestStats};

/// One child's news: new tokens, their text, and how it ended if it did.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Output {
    /// The request.
    pub request: RequestId,
    /// Which of its `n` answers.
    pub child: u32,
    /// Range of [`OutputBatch::token_ids`].
    pub tokens: Range<usize>,
    /// Byte range of [`OutputBatch::text`]; held-back text makes it lag behind the tokens.
    pub text: Range<usize>,
    /// Range of [`OutputBatch::logprobs`]; empty unless asked for.
    pub logprobs: Range<usize>,
    /// How the child ended, if it did.
    pub finish: Option<Finish>,
}

/// One thing a client wants to know.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Event {
    /// The request is in a plan for the first time.
    Scheduled {
        /// The request.
        request: RequestId,
        /// Prompt tokens found in the prefix cache.
        num_cached_tokens: u32,
        /// Microseconds since its submission.
        queue_time_us: u64,
    },
    /// Log-probabilities of prompt tokens, for a request that asked for them: the next of its prompt,
    /// in order, from the second token on; all are there before the first output.
    PromptLogprobs {
        /// The request.
        request: RequestId,
        /// Prompt tokens told of, at least one.
        num_tokens: u32,
        /// Range of [`OutputBatch::logprobs`], as many entries for each token.
        logprobs: Range<usize>,
    },
    /// News of one child.
    Output(Output),
    /// The request ended: its last child did, or it was refused after submission.
    Ended {
        /// The request.
        request: RequestId,
        /// When things happened to it; apart, so that the common event stays small.
        stats: Box<RequestStats>,
    },
}

/// The log-probability of one candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TokenLogprob {
    /// The candidate.
    pub token: u32,
    /// Its natural log-probability under the raw logits.
    pub logprob: f32,
}

/// The news of one iteration (and of what happened since the last one), in order.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct OutputBatch {
    /// In the order they happened.
    pub events: Vec<Event>,
    /// Tokens of all outputs, one range each.
    pub token_ids: Vec<u32>,
    /// Text of all outputs, one byte range each.
    pub text: String,
    /// For each token with log-probabilities: its own entry, then the best ones'.
    pub logprobs: Vec<TokenLogprob>,
}

/// How far a batch's arrays are: where those of the next output begin.
#[derive(Clone, Copy)]
pub(crate) struct Mark {
    pub(crate) tokens: usize,
    text: usize,
    logprobs: usize,
}

impl OutputBatch {
    /// Where the arrays of the next output begin.
    #[inline]
    pub(crate) fn mark(&self) -> Mark {
        Mark {
            tokens: self.token_ids.len(),
            text: self.text.len(),
            logprobs: self.logprobs.len(),
        }
    }

    /// Tells news of one child: what the arrays have beyond `begin`, and how it ended if it did.
    #[inline]
    pub(crate) fn tell(
        &mut self,
        request: RequestId,
        child: u32,
        begin: Mark,
        finish: Option<Finish>,
    ) {
        self.events.push(Event::Output(Output {
            request,
            child,
            tokens: begin.tokens..self.token_ids.len(),
            text: begin.text..self.text.len(),
            logprobs: begin.logprobs..self.logprobs.len(),
            finish,
        }));
    }

    /// Whether there is nothing to deliver.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Empties it and keeps its memory.
    pub fn clear(&mut self) {
        self.events.clear();
        self.token_ids.clear();
        self.text.clear();
        self.logprobs.clear();
    }
}
