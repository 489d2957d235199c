//! What an iteration tells the clients, as one flat batch.
//!
//! The engine appends to an [`OutputBatch`]; whoever delivers it takes it whole, hands it on and gives
//! an empty one back, so that steady state allocates nothing. Every child of a request gets exactly one
//! [`Output::finish`], and the request exactly one [`Event::Ended`], after everything else of it.

use std::ops::Range;

use crate::request::{Finish, RequestId, RequestStats};
use crate::text::PlainText;

/// A range of an array of a batch, in half the room of a `Range<usize>`: there is one event for each running
/// sequence, and what is written for it is most of what a steady step writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Span {
    begin: u32,
    end: u32,
}

impl Span {
    /// The range, of which both ends are below 2^32: no batch of one iteration comes near that.
    #[inline]
    pub fn new(range: Range<usize>) -> Self {
        debug_assert!(u32::try_from(range.end).is_ok(), "a batch is too large");
        Self {
            begin: range.start as u32,
            end: range.end as u32,
        }
    }

    /// To index the array with.
    #[inline]
    pub fn range(self) -> Range<usize> {
        self.begin as usize..self.end as usize
    }

    /// The same where `by` entries stand before the array's own.
    #[must_use]
    pub fn shifted(self, by: usize) -> Self {
        let shifted = |at: u32| {
            u32::try_from(at as usize + by).expect("nobody leaves 2^32 entries of output unread")
        };
        Self {
            begin: shifted(self.begin),
            end: shifted(self.end),
        }
    }

    /// Entries in it.
    pub fn len(self) -> usize {
        self.range().len()
    }

    /// Whether nothing is in it.
    pub fn is_empty(self) -> bool {
        self.range().is_empty()
    }
}

/// One child's news: new tokens, their text, and how it ended if it did.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Output {
    /// The request.
    pub request: RequestId,
    /// Which of its `n` answers.
    pub child: u32,
    /// Range of [`OutputBatch::token_ids`].
    pub tokens: Span,
    /// Byte range of [`OutputBatch::text`]; held-back text makes it lag behind the tokens.
    pub text: Span,
    /// Range of [`OutputBatch::logprobs`]; empty unless asked for.
    pub logprobs: Span,
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
        logprobs: Span,
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
            tokens: Span::new(begin.tokens..self.token_ids.len()),
            text: Span::new(begin.text..self.text.len()),
            logprobs: Span::new(begin.logprobs..self.logprobs.len()),
            finish,
        }));
    }

    /// Tells the text of one token of an answer that goes on. The token is number `at`; it is appended
    /// together with those that are told of after it.
    #[inline]
    pub(crate) fn tell_token(
        &mut self,
        request: RequestId,
        child: u32,
        at: usize,
        text: PlainText<'_>,
    ) {
        let (begin, logprobs) = (self.text.len(), self.logprobs.len());
        text.push_to(&mut self.text);
        self.events.push(Event::Output(Output {
            request,
            child,
            tokens: Span::new(at..at + 1),
            text: Span::new(begin..begin + text.len()),
            logprobs: Span::new(logprobs..logprobs),
            finish: None,
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
