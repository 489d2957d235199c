//! Streaming UTF-8: bytes in any split, whole characters out, equal to `from_utf8_lossy`.
//!
//! Between two calls only an incomplete sequence is kept: 1 to 3 bytes that are a proper prefix of
//! some valid character. Invalid bytes become U+FFFD by the maximal-subpart rule of the Unicode
//! standard (section 3.9), the rule of Rust's own lossy decoding.

use std::ops::ControlFlow;

const REPLACEMENT: &str = "\u{FFFD}";

/// The incomplete end of a byte stream.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Utf8Tail {
    bytes: [u8; 4],
    len: u8,
}

impl Utf8Tail {
    /// Whether nothing is kept.
    pub(super) fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Gives `sink` the text that `bytes` complete, in order, until `sink` breaks.
    ///
    /// What follows a break is dropped.
    pub(super) fn decode<B>(
        &mut self,
        bytes: &[u8],
        mut sink: impl FnMut(&str) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        let bytes = self.complete(bytes, &mut sink)?;
        if let Ok(text) = std::str::from_utf8(bytes) {
            return if text.is_empty() {
                ControlFlow::Continue(())
            } else {
                sink(text)
            };
        }
        let mut consumed = 0;
        for chunk in bytes.utf8_chunks() {
            let invalid = chunk.invalid();
            consumed += chunk.valid().len() + invalid.len();
            if !chunk.valid().is_empty() {
                sink(chunk.valid())?;
            }
            if invalid.is_empty() {
                continue;
            }
            if consumed == bytes.len() && is_incomplete(invalid) {
                self.bytes[..invalid.len()].copy_from_slice(invalid);
                self.len = invalid.len() as u8;
            } else {
                sink(REPLACEMENT)?;
            }
        }
        ControlFlow::Continue(())
    }

    /// Feeds bytes to the kept sequence until it is complete or broken; returns the bytes left.
    fn complete<'a, B>(
        &mut self,
        mut bytes: &'a [u8],
        sink: &mut impl FnMut(&str) -> ControlFlow<B>,
    ) -> ControlFlow<B, &'a [u8]> {
        while self.len > 0 {
            let Some((&next, rest)) = bytes.split_first() else {
                break;
            };
            let len = usize::from(self.len);
            self.bytes[len] = next;
            let sequence = self.bytes;
            match std::str::from_utf8(&sequence[..=len]) {
                Ok(character) => {
                    self.len = 0;
                    bytes = rest;
                    sink(character)?;
                }
                Err(error) if error.error_len().is_none() => {
                    self.len += 1;
                    bytes = rest;
                }
                Err(_) => {
                    // `next` does not belong to the sequence: it starts afresh.
                    self.len = 0;
                    sink(REPLACEMENT)?;
                }
            }
        }
        ControlFlow::Continue(bytes)
    }

    /// The text of an incomplete sequence that will not be completed any more.
    pub(super) fn finish(&mut self) -> &'static str {
        match std::mem::take(&mut self.len) {
            0 => "",
            _ => REPLACEMENT,
        }
    }
}

/// Whether more bytes could make the sequence a character.
fn is_incomplete(sequence: &[u8]) -> bool {
    std::str::from_utf8(sequence).is_err_and(|error| error.error_len().is_none())
}
