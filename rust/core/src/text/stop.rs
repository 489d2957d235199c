//! Stop strings: compiled once per request, searched byte by byte as the text grows.
//!
//! All strings of a request form one Aho-Corasick automaton (Aho and Corasick, CACM 1975), that is
//! KMP for many strings at once: a trie whose nodes fall back to their longest proper suffix that
//! is also in the trie. The state of a search is one node, its depth is exactly how much text must
//! be held back, and the path to it *is* that text, so nothing is buffered and the work per byte
//! depends neither on the number of strings nor on the length of the text.
//!
//! Rule: the match that completes earliest in the text wins; of several that complete at the same
//! byte the longest, so that the text is cut at the earliest start.
//!
//! Invariant: between two calls the text is whole characters; the strings are too, so a node is
//! then at a character border of its string.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

/// Most stop strings of one request.
pub const MAX_STOP_STRINGS: usize = 1_024;
/// Most bytes of UTF-8 that the stop strings of one request may have together.
pub const MAX_STOP_STRINGS_BYTES: usize = 64 * 1_024;

const ROOT: u32 = 0;

/// Whether the delivered text keeps the stop string that ended it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum StopText {
    /// The text ends just before the stop string.
    #[default]
    Excluded,
    /// The text ends with the stop string (`include_stop_str_in_output`).
    Included,
}

/// A stop string was completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopMatch {
    /// Index of the string in the request's list; the first of equal ones.
    pub string_index: u32,
}

/// The stop strings of a request, compiled; immutable, to be shared behind an `Arc`.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "StopSource", into = "StopSource"))]
pub struct StopStrings {
    strings: Vec<Box<str>>,
    /// Breadth first: the children of a node are neighbours, ordered by byte.
    nodes: Vec<Node>,
    text: StopText,
}

/// What [`StopStrings`] are compiled of, which is how they travel.
#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
struct StopSource {
    strings: Vec<Box<str>>,
    text: StopText,
}

#[cfg(feature = "serde")]
impl From<StopStrings> for StopSource {
    fn from(compiled: StopStrings) -> Self {
        let StopStrings { strings, text, .. } = compiled;
        Self { strings, text }
    }
}

#[cfg(feature = "serde")]
impl TryFrom<StopSource> for StopStrings {
    type Error = StopStringsError;

    fn try_from(source: StopSource) -> Result<Self, Self::Error> {
        Self::new(&source.strings, source.text)
    }
}

/// One prefix of one or more stop strings.
#[derive(Clone, Debug)]
struct Node {
    /// The last byte of the prefix.
    byte: u8,
    num_children: u16,
    first_child: u32,
    /// The longest proper suffix of the prefix that is a node.
    fallback: u32,
    /// Length of the prefix in bytes.
    depth: u32,
    /// A string that begins with the prefix.
    prefix_of: u32,
    /// The longest string that ends here: the whole prefix, or a suffix of it.
    completes: Option<u32>,
}

impl StopStrings {
    /// Compiles the strings. An empty list matches nothing; an empty string is refused.
    pub fn new<S: AsRef<str>>(strings: &[S], text: StopText) -> Result<Self, StopStringsError> {
        if strings.len() > MAX_STOP_STRINGS {
            return Err(StopStringsError::TooMany {
                count: strings.len(),
            });
        }
        let bytes = strings.iter().map(|string| string.as_ref().len()).sum();
        if bytes > MAX_STOP_STRINGS_BYTES {
            return Err(StopStringsError::TooLong { bytes });
        }
        if let Some(index) = strings.iter().position(|s| s.as_ref().is_empty()) {
            return Err(StopStringsError::Empty { index });
        }
        let strings: Vec<Box<str>> = strings.iter().map(|s| s.as_ref().into()).collect();
        let nodes = build_nodes(&strings);
        Ok(Self {
            strings,
            nodes,
            text,
        })
    }

    /// The strings, in the order of the request.
    pub fn strings(&self) -> impl ExactSizeIterator<Item = &str> {
        self.strings.iter().map(AsRef::as_ref)
    }

    /// Whether there is no string at all.
    pub fn is_empty(&self) -> bool {
        self.strings.is_empty()
    }

    /// The text that a search in `node` holds back.
    fn held(&self, node: u32) -> &str {
        let node = &self.nodes[node as usize];
        match self.strings.get(node.prefix_of as usize) {
            Some(string) => &string[..node.depth as usize],
            None => "", // no strings: only the root
        }
    }

    /// The node after one more byte, and how many nodes were visited on the way.
    #[inline]
    fn step(&self, mut node: u32, byte: u8) -> (u32, u32) {
        let mut visited = 1;
        loop {
            if let Some(child) = child(&self.nodes, node, byte) {
                return (child, visited);
            }
            if node == ROOT {
                return (ROOT, visited);
            }
            node = self.nodes[node as usize].fallback;
            visited += 1;
        }
    }

    /// The first node upwards from which a longer match can still come.
    fn without_dead_end(&self, mut node: u32) -> u32 {
        while node != ROOT && self.nodes[node as usize].num_children == 0 {
            node = self.nodes[node as usize].fallback;
        }
        node
    }
}

fn child(nodes: &[Node], node: u32, byte: u8) -> Option<u32> {
    let parent = &nodes[node as usize];
    let first = parent.first_child as usize;
    nodes[first..first + usize::from(parent.num_children)]
        .binary_search_by_key(&byte, |child| child.byte)
        .ok()
        .map(|at| parent.first_child + at as u32)
}

/// Builds the trie breadth first from the sorted strings, then the fallbacks.
fn build_nodes(strings: &[Box<str>]) -> Vec<Node> {
    let mut sorted: Vec<u32> = (0..strings.len() as u32).collect();
    sorted.sort_by_key(|&index| (strings[index as usize].as_bytes(), index));
    sorted.dedup_by_key(|index| strings[*index as usize].as_bytes());
    let string_of = |at: usize| strings[sorted[at] as usize].as_bytes();

    // Each node stands for a range of the sorted strings: those that begin with its prefix.
    let mut nodes = vec![new_node(0, 0, sorted.first().copied().unwrap_or(0))];
    let mut ranges: Vec<Range<usize>> = Vec::new();
    ranges.push(0..sorted.len());
    let mut parent = 0;
    while parent < nodes.len() {
        let depth = nodes[parent].depth as usize;
        let Range { mut start, end } = ranges[parent].clone();
        if start < end && string_of(start).len() == depth {
            nodes[parent].completes = Some(sorted[start]); // the shortest sorts first
            start += 1;
        }
        nodes[parent].first_child = nodes.len() as u32;
        while start < end {
            let byte = string_of(start)[depth];
            let same = (start..end)
                .take_while(|&at| string_of(at)[depth] == byte)
                .count();
            nodes.push(new_node(byte, depth as u32 + 1, sorted[start]));
            ranges.push(start..start + same);
            nodes[parent].num_children += 1;
            start += same;
        }
        parent += 1;
    }
    link_fallbacks(&mut nodes);
    nodes
}

fn new_node(byte: u8, depth: u32, prefix_of: u32) -> Node {
    Node {
        byte,
        num_children: 0,
        first_child: 0,
        fallback: ROOT,
        depth,
        prefix_of,
        completes: None,
    }
}

/// Breadth first, so that the fallback of every shallower node is known.
fn link_fallbacks(nodes: &mut [Node]) {
    for parent in 0..nodes.len() {
        let first = nodes[parent].first_child;
        for at in first..first + u32::from(nodes[parent].num_children) {
            let mut fallback = ROOT;
            let mut suffix = parent as u32;
            while suffix != ROOT {
                suffix = nodes[suffix as usize].fallback;
                if let Some(found) = child(nodes, suffix, nodes[at as usize].byte) {
                    fallback = found;
                    break;
                }
            }
            let inherited = nodes[fallback as usize].completes;
            let node = &mut nodes[at as usize];
            node.fallback = fallback;
            node.completes = node.completes.or(inherited);
        }
    }
}

/// The search of one sequence.
#[derive(Clone, Debug, Default)]
pub(super) struct StopSearch {
    stops: Option<Arc<StopStrings>>,
    node: u32,
    stopped: bool,
}

impl StopSearch {
    pub(super) fn new(stops: Option<Arc<StopStrings>>) -> Self {
        Self {
            stops: stops.filter(|stops| !stops.is_empty()),
            node: ROOT,
            stopped: false,
        }
    }

    /// Whether there is anything to search for.
    pub(super) fn has_stops(&self) -> bool {
        self.stops.is_some()
    }

    /// Searches `text` and appends to `out` what can no longer be part of a stop string.
    pub(super) fn deliver(
        &mut self,
        text: &str,
        check_stops: bool,
        out: &mut String,
    ) -> ControlFlow<StopMatch> {
        let Some(stops) = &self.stops else {
            out.push_str(text);
            return ControlFlow::Continue(());
        };
        if self.stopped {
            return ControlFlow::Continue(());
        }
        let held = stops.held(self.node);
        for (at, &byte) in text.as_bytes().iter().enumerate() {
            (self.node, _) = stops.step(self.node, byte);
            let Some(string_index) = stops.nodes[self.node as usize].completes else {
                continue;
            };
            if !check_stops {
                self.node = stops.without_dead_end(self.node);
                continue;
            }
            let end = held.len() + at + 1;
            let cut = match stops.text {
                StopText::Excluded => end - stops.strings[string_index as usize].len(),
                StopText::Included => end,
            };
            push_start(held, text, cut, out);
            self.stopped = true;
            return ControlFlow::Break(StopMatch { string_index });
        }
        let hold = stops.nodes[self.node as usize].depth as usize;
        push_start(held, text, held.len() + text.len() - hold, out);
        ControlFlow::Continue(())
    }

    /// Delivers what is held back, then `rest` unsearched.
    pub(super) fn finish(&mut self, rest: &str, out: &mut String) {
        if self.stopped {
            return;
        }
        if let Some(stops) = &self.stops {
            out.push_str(stops.held(self.node));
            self.node = ROOT;
        }
        out.push_str(rest);
    }
}

/// Appends the first `length` bytes of `held` followed by `text`.
fn push_start(held: &str, text: &str, length: usize, out: &mut String) {
    if length <= held.len() {
        out.push_str(&held[..length]);
    } else {
        out.push_str(held);
        out.push_str(&text[..length - held.len()]);
    }
}

/// Why the stop strings of a request were refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StopStringsError {
    /// An empty string would match everywhere.
    #[error("stop string {index} is empty: remove it, or give at least one character")]
    Empty {
        /// Its index in the request's list.
        index: usize,
    },
    /// More strings than [`MAX_STOP_STRINGS`].
    #[error("{count} stop strings: give at most {MAX_STOP_STRINGS}")]
    TooMany {
        /// Strings given.
        count: usize,
    },
    /// More bytes than [`MAX_STOP_STRINGS_BYTES`].
    #[error(
        "the stop strings have {bytes} bytes of UTF-8 in total: give at most \
         {MAX_STOP_STRINGS_BYTES}"
    )]
    TooLong {
        /// Bytes of all strings together.
        bytes: usize,
    },
}

impl StopStringsError {
    /// A stable name for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Empty { .. } => "stop_string_empty",
            Self::TooMany { .. } => "too_many_stop_strings",
            Self::TooLong { .. } => "stop_strings_too_long",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches `text`; returns the most and the total of nodes visited for one byte.
    fn visits(stops: &StopStrings, text: &str) -> (u32, u64) {
        let (mut node, mut most, mut total) = (ROOT, 0, 0);
        for &byte in text.as_bytes() {
            let (next, visited) = stops.step(node, byte);
            assert!(stops.nodes[next as usize].completes.is_none());
            node = next;
            most = most.max(visited);
            total += u64::from(visited);
        }
        (most, total)
    }

    #[test]
    fn work_does_not_grow_with_strings_or_text() {
        let strings: Vec<String> = (0..1_000).map(|i| format!("word {i:03} stop")).collect();
        let stops = StopStrings::new(&strings, StopText::Excluded).unwrap();
        // 2,000 output tokens, each the beginning of one of the strings.
        let token = |i: usize| format!("word {:03} st", i % 1_000);
        let text: Vec<String> = (0..2_000).map(token).collect();
        let (most, first) = visits(&stops, &text[..1_000].concat());
        let (_, both) = visits(&stops, &text.concat());
        assert!(most <= 3, "{most} nodes for one byte");
        let bytes = text.concat().len() as u64;
        assert!(both <= 2 * bytes, "{both} nodes for {bytes} bytes");
        assert!(
            both <= 2 * first + 2,
            "{both} nodes, {first} of them for the first half"
        );
    }

    #[test]
    fn repeated_prefixes_cost_two_nodes_a_byte_at_most() {
        let long = format!("{}b", "a".repeat(MAX_STOP_STRINGS_BYTES - 1));
        let stops = StopStrings::new(&[long], StopText::Excluded).unwrap();
        let text = "aaaaaaaaaaaaaaaaaaaaaaac".repeat(10_000);
        let (_, total) = visits(&stops, &text);
        assert!(total <= 2 * text.len() as u64, "{total} nodes");
    }

    #[test]
    fn equal_strings_and_shared_ends_complete_the_longest_and_first() {
        let strings = ["b", "ab", "b", "ab", "xab", "abc"];
        let stops = StopStrings::new(&strings, StopText::Excluded).unwrap();
        let completes = |text: &str| {
            let node = text
                .bytes()
                .fold(ROOT, |node, byte| stops.step(node, byte).0);
            stops.nodes[node as usize].completes
        };
        assert_eq!(completes("b"), Some(0));
        assert_eq!(completes("ab"), Some(1));
        assert_eq!(completes("xab"), Some(4));
        assert_eq!(completes("xabc"), Some(5));
        assert_eq!(completes("xa"), None);
        assert_eq!(completes("xabb"), Some(0));
    }

    #[test]
    fn refuses_empty_too_many_and_too_long() {
        let refuse = |strings: &[String]| {
            let error = StopStrings::new(strings, StopText::Excluded).unwrap_err();
            (error.code(), error.to_string())
        };
        let (code, message) = refuse(&["a".into(), String::new()]);
        assert_eq!(code, "stop_string_empty");
        assert!(message.contains("stop string 1 is empty"), "{message}");
        let (code, message) = refuse(&vec!["a".into(); MAX_STOP_STRINGS + 1]);
        assert_eq!(code, "too_many_stop_strings");
        assert!(
            message.contains("1025") && message.contains("1024"),
            "{message}"
        );
        let (code, message) = refuse(&["a".repeat(MAX_STOP_STRINGS_BYTES), "b".into()]);
        assert_eq!(code, "stop_strings_too_long");
        assert!(
            message.contains("65537") && message.contains("65536"),
            "{message}"
        );
    }

    #[test]
    fn accepts_the_most_that_is_allowed() {
        let length = MAX_STOP_STRINGS_BYTES / MAX_STOP_STRINGS;
        let strings: Vec<String> = (0..MAX_STOP_STRINGS)
            .map(|i| format!("{i:0length$}"))
            .collect();
        let stops = StopStrings::new(&strings, StopText::Excluded).unwrap();
        assert_eq!(stops.strings().len(), MAX_STOP_STRINGS);
        assert!(stops.nodes.len() <= MAX_STOP_STRINGS_BYTES + 1);
        let none = StopStrings::new::<&str>(&[], StopText::Excluded).unwrap();
        assert!(none.is_empty());
        assert_eq!(none.held(ROOT), "");
    }
}
