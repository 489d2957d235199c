//! Text of a sequence: token bytes become UTF-8-safe deltas, cut at stop strings.
//!
//! Commit (step 6 on the way of a request) pushes the bytes of each new token into the sequence's
//! [`TextState`] and gets back the text that may be sent now. Two things are held back and nothing
//! else: an incomplete UTF-8 sequence (at most 3 bytes), and the longest end of the text that may
//! still become a stop string. Held back text is always delivered later or cut by a stop.
//!
//! Invariants:
//! - without a stop the deltas concatenate to `String::from_utf8_lossy` of all bytes pushed,
//!   however the bytes were split into tokens;
//! - with a stop nothing of the stop (or nothing after it) is ever delivered, and where the text is
//!   cut does not depend on the split either;
//! - the work per byte does not depend on how much text or how many stop strings there are.
//!
//! Not here: stop token ids, eos and length limits (commit decides), and tokenising (Python).

mod stop;
mod table;
mod utf8;

pub use stop::{
    MAX_STOP_STRINGS, MAX_STOP_STRINGS_BYTES, StopMatch, StopStrings, StopStringsError, StopText,
};
pub use table::{PlainText, TokenTable, TokenTableError};

use std::ops::ControlFlow;
use std::sync::Arc;

use stop::StopSearch;
use utf8::Utf8Tail;

/// The text of one sequence while it grows: a few words, no buffers, cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct TextState {
    tail: Utf8Tail,
    search: StopSearch,
}

impl TextState {
    /// An empty text that ends at the first of `stops`; the children of a request share them.
    pub fn new(stops: Option<Arc<StopStrings>>) -> Self {
        Self {
            tail: Utf8Tail::default(),
            search: StopSearch::new(stops),
        }
    }

    /// Whether text of whole characters is sent as it is: nothing is searched or held back.
    pub fn is_plain(&self) -> bool {
        self.tail.is_empty() && !self.search.has_stops()
    }

    /// Appends the bytes of one token and adds to `out` the text that may be sent now.
    ///
    /// A returned match ends the text: `out` has received everything up to the stop string
    /// ([`StopText`] says whether the string itself too), and from now on this state ignores
    /// whatever it is given.
    ///
    /// `check_stops` is false for the first `min_tokens` output tokens. vLLM's rule: a stop string
    /// counts if it *completes* in the text of a later token, even if it began before; one that
    /// completes earlier is ordinary text.
    pub fn push(&mut self, bytes: &[u8], check_stops: bool, out: &mut String) -> Option<StopMatch> {
        let Self { tail, search } = self;
        match tail.decode(bytes, |text| search.deliver(text, check_stops, out)) {
            ControlFlow::Continue(()) => None,
            ControlFlow::Break(found) => Some(found),
        }
    }

    /// The same as [`Self::push`] of the text's bytes, which need no check.
    #[inline]
    pub fn push_str(
        &mut self,
        text: &str,
        check_stops: bool,
        out: &mut String,
    ) -> Option<StopMatch> {
        if !self.tail.is_empty() {
            return self.push(text.as_bytes(), check_stops, out);
        }
        match self.search.deliver(text, check_stops, out) {
            ControlFlow::Continue(()) => None,
            ControlFlow::Break(found) => Some(found),
        }
    }

    /// Delivers what is held back: the sequence ended for a reason other than a stop string.
    ///
    /// An incomplete UTF-8 sequence becomes one U+FFFD, as in `String::from_utf8_lossy`. It is not
    /// searched for stop strings. A second call adds nothing.
    pub fn finish(&mut self, out: &mut String) {
        let rest = self.tail.finish();
        self.search.finish(rest, out);
    }
}
