//! The log: what its bytes mean.
//!
//! ```text
//! "chairlog"  format (u32)  layout (u64)  package version  header     then records:
//! length (varint)  kind (one byte)  time since the last (varint, if the kind has one)  content
//! ```
//! Content is postcard of the core's own types, so a log is read by a build whose requests, settings
//! and policies are made alike; `layout` tells. Numbers are little-endian or varints.

use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::Vocabulary;
use crate::config::Settings;
use crate::config::policy::Policy;
use crate::iteration::commit::{STATUS_OK, StepResults};
use crate::output::{Event, TokenLogprob};
use crate::record::digest::PlanDigest;
use crate::request::{NewRequest, RequestId, SamplingParams, StopParams, Ticket, Time};
use crate::text::TokenTable;

const MAGIC: [u8; 8] = *b"chairlog";
/// Version of the layout that the module's documentation describes.
const FORMAT: u32 = 1;
/// Magic, format, layout.
const PRELUDE_BYTES: usize = 8 + 4 + 8;

/// What a log begins with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Version of the package that wrote it. Another one may decide otherwise.
    pub package: String,
    /// Of the engine.
    pub settings: Settings,
    /// What the writer wanted to say; the core does not read it.
    pub about: String,
    /// Which part of the log this is: 0 begins with the engine. Only that can be replayed, and those that
    /// follow it without a gap.
    pub segment: u32,
    /// The time of the last record before it.
    pub base: Time,
    token_bytes: Vec<u8>,
    token_lengths: Vec<u32>,
    special_tokens: Vec<u32>,
    eos_token_ids: Vec<u32>,
}

/// A log that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// It does not begin as a log does.
    #[error("it is no flight log of chairlift")]
    NoLog,
    /// It ends before its header does.
    #[error("it ends within its header: nothing was recorded")]
    NoHeader,
    /// Its format is another.
    #[error("its format is {found}; this version of chairlift reads {known}")]
    Format {
        /// Of the log.
        found: u32,
        /// What can be read.
        known: u32,
    },
    /// Requests or settings are made of other parts.
    #[error(
        "it was written by another build of chairlift, whose requests or settings have other parts; \
         read it with that build"
    )]
    Layout,
    /// A record does not say anything.
    #[error("it is damaged: {record} cannot be read")]
    Damaged {
        /// What.
        record: &'static str,
    },
}

impl LogError {
    /// Stable identifier of the kind of error.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoLog | Self::NoHeader => "no_log",
            Self::Format { .. } | Self::Layout => "log_version",
            Self::Damaged { .. } => "damaged_log",
        }
    }
}

impl Header {
    /// The header of a log that begins now.
    pub fn new(settings: &Settings, vocabulary: &Vocabulary, about: &str) -> Self {
        let table = &vocabulary.tokens;
        let tokens = 0..table.len() as u32;
        let lengths = tokens.clone().map(|token| table.bytes(token).len() as u32);
        Self {
            package: env!("CARGO_PKG_VERSION").to_owned(),
            settings: settings.clone(),
            about: about.to_owned(),
            segment: 0,
            base: Time(0),
            token_bytes: tokens
                .clone()
                .flat_map(|token| table.bytes(token).to_vec())
                .collect(),
            token_lengths: lengths.collect(),
            special_tokens: tokens.filter(|&token| table.is_special(token)).collect(),
            eos_token_ids: vocabulary.eos_token_ids.clone(),
        }
    }

    /// The vocabulary of the engine.
    pub fn vocabulary(&self) -> Result<Vocabulary, LogError> {
        let mut offsets = vec![0];
        let mut end = 0;
        for &length in &self.token_lengths {
            end += i64::from(length);
            offsets.push(end);
        }
        let mut special = vec![0; self.token_lengths.len()];
        for &token in &self.special_tokens {
            if let Some(flag) = special.get_mut(token as usize) {
                *flag = 1;
            }
        }
        let table = TokenTable::new(&self.token_bytes, &offsets, &special);
        let record = "the vocabulary in its header";
        Ok(Vocabulary {
            tokens: Arc::new(table.map_err(|_| LogError::Damaged { record })?),
            eos_token_ids: self.eos_token_ids.clone(),
        })
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(FORMAT.to_le_bytes());
        bytes.extend(layout().to_le_bytes());
        let header = postcard::to_stdvec(self).expect("a vector takes everything");
        append(&mut bytes, &(header.len() as u64));
        bytes.extend(header);
        bytes
    }
}

/// Reads the header at the beginning of `bytes`; `None` if it does not end in them. Beside it, how long
/// it is.
pub fn read_header(bytes: &[u8]) -> Result<Option<(Header, usize)>, LogError> {
    let known = bytes.len().min(MAGIC.len());
    if bytes[..known] != MAGIC[..known] {
        return Err(LogError::NoLog);
    }
    let Some((prelude, rest)) = bytes.split_at_checked(PRELUDE_BYTES) else {
        return Ok(None);
    };
    let number = |at: usize, width: usize| {
        let digits = prelude[at..at + width].iter().rev();
        digits.fold(0, |number, &byte| number << 8 | u64::from(byte))
    };
    let (found, known) = (number(8, 4) as u32, FORMAT);
    if found != known {
        return Err(LogError::Format { found, known });
    }
    if number(12, 8) != layout() {
        return Err(LogError::Layout);
    }
    let record = "its header";
    let Some((content, rest)) = framed(rest, record)? else {
        return Ok(None);
    };
    let header = postcard::from_bytes(content).map_err(|_| LogError::Damaged { record })?;
    Ok(Some((header, bytes.len() - rest.len())))
}

/// Tells builds apart whose records are made of other parts: a digest of one of each.
fn layout() -> u64 {
    let request = NewRequest {
        id: RequestId(1),
        prompt: vec![1],
        sampling: SamplingParams::default(),
        stop: StopParams::default(),
        cache_salt: None,
        priority: 0,
        deadline: None,
    };
    let sample = (Settings::default(), request, Ticket::new(RequestId(1)));
    XxHash3_64::oneshot(&postcard::to_stdvec(&sample).expect("a vector takes everything"))
}

/// Content, and what comes after it.
type Framed<'a> = (&'a [u8], &'a [u8]);

/// Cuts content behind its length; `None` if it is not all there.
fn framed<'a>(bytes: &'a [u8], record: &'static str) -> Result<Option<Framed<'a>>, LogError> {
    match postcard::take_from_bytes::<u64>(bytes) {
        Ok((length, rest)) => Ok(rest.split_at_checked(length as usize)),
        Err(postcard::Error::DeserializeUnexpectedEnd) => Ok(None),
        Err(_) => Err(LogError::Damaged { record }),
    }
}

/// Appends the postcard of a value.
pub(crate) fn append<T: Serialize + ?Sized>(bytes: &mut Vec<u8>, value: &T) {
    let grown = postcard::to_extend(value, std::mem::take(bytes));
    *bytes = grown.expect("a vector takes everything");
}

/// Kinds of records. Numbers are part of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Reserve = 1,
    Release,
    Submit,
    Abort,
    Reload,
    Schedule,
    Commit,
    CommitRefused,
    FailStep,
    FailAll,
    AbortAll,
    OnTime,
    Outputs,
    Stopped,
}

const KINDS: [Kind; 14] = [
    Kind::Reserve,
    Kind::Release,
    Kind::Submit,
    Kind::Abort,
    Kind::Reload,
    Kind::Schedule,
    Kind::Commit,
    Kind::CommitRefused,
    Kind::FailStep,
    Kind::FailAll,
    Kind::AbortAll,
    Kind::OnTime,
    Kind::Outputs,
    Kind::Stopped,
];

/// A record. Codes are those of refusals, empty where there was none.
#[derive(Clone, Debug)]
#[allow(
    missing_docs,
    reason = "the fields are those of the calls of the engine"
)]
pub enum Entry {
    /// [`crate::Engine::reserve`].
    Reserve { ticket: Ticket, code: String },
    /// [`crate::Engine::release`].
    Release { id: RequestId },
    /// [`crate::Engine::submit`].
    Submit {
        request: Box<NewRequest>,
        code: String,
    },
    /// [`crate::Engine::abort`].
    Abort { id: RequestId, live: bool },
    /// [`crate::Engine::reload`].
    Reload { policy: Box<Policy>, code: String },
    /// [`crate::Engine::schedule`], and what it planned if it did.
    Schedule { plan: Option<PlanDigest> },
    /// [`crate::Engine::commit`].
    Commit { step: u64, results: Results },
    /// The same, refused: it changed nothing.
    CommitRefused { step: u64, code: String },
    /// [`crate::Engine::fail_step`].
    FailStep { step: u64 },
    /// [`crate::Engine::fail_all`].
    FailAll,
    /// [`crate::Engine::abort_all`].
    AbortAll,
    /// [`crate::Engine::on_time`].
    OnTime,
    /// [`crate::record::RecordedEngine::take_outputs`], with a digest of what was taken, and the events
    /// that are not the common one (tokens of an answer that goes on), so that ends are told without a
    /// replay.
    Outputs { digest: u64, events: Vec<Event> },
    /// The recording ended before the engine did.
    Stopped { why: String },
}

/// The results of a step, without the values of log-probabilities.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Results {
    /// Tokens of all samples.
    token_ids: Vec<u32>,
    /// Tokens of each sample; empty: one each.
    tokens_per_sample: Vec<u32>,
    /// Sequences of the step.
    num_seqs: u32,
    /// As the executor gave them; empty: all are fine.
    statuses: Vec<u8>,
    /// Log-probabilities of each sample; empty: none.
    logprobs_per_sample: Vec<u32>,
    /// The same of each scored prompt token; empty where the results had no offsets.
    logprobs_per_score: Vec<u32>,
}

impl Results {
    /// Takes down results that were committed; keeps the memory.
    pub(crate) fn set(&mut self, results: &StepResults) {
        self.token_ids.clone_from(&results.token_ids);
        cut(&results.token_offsets, &mut self.tokens_per_sample);
        if self.tokens_per_sample.iter().all(|&tokens| tokens == 1) {
            self.tokens_per_sample.clear();
        }
        self.num_seqs = results.statuses.len() as u32;
        self.statuses.clear();
        if results.statuses.iter().any(|&status| status != STATUS_OK) {
            self.statuses.clone_from(&results.statuses);
        }
        cut(&results.logprob_offsets, &mut self.logprobs_per_sample);
        cut(
            &results.prompt_logprob_offsets,
            &mut self.logprobs_per_score,
        );
    }

    /// The results again, with log-probabilities of 0.
    pub(crate) fn restore(&self, into: &mut StepResults) {
        let ones = || self.token_ids.iter().map(|_| 1);
        into.token_ids.clone_from(&self.token_ids);
        if self.tokens_per_sample.is_empty() {
            join(ones(), &mut into.token_offsets);
        } else {
            join(
                self.tokens_per_sample.iter().copied(),
                &mut into.token_offsets,
            );
        }
        into.statuses.clone_from(&self.statuses);
        into.statuses.resize(self.num_seqs as usize, STATUS_OK);
        let unknown = TokenLogprob {
            token: 0,
            logprob: 0.0,
        };
        for (counts, offsets, logprobs) in [
            (
                &self.logprobs_per_sample,
                &mut into.logprob_offsets,
                &mut into.logprobs,
            ),
            (
                &self.logprobs_per_score,
                &mut into.prompt_logprob_offsets,
                &mut into.prompt_logprobs,
            ),
        ] {
            offsets.clear();
            logprobs.clear();
            if !counts.is_empty() {
                join(counts.iter().copied(), offsets);
                logprobs.resize(counts.iter().sum::<u32>() as usize, unknown);
            }
        }
    }
}

/// Lengths of the ranges that offsets cut.
fn cut(offsets: &[u32], into: &mut Vec<u32>) {
    into.clear();
    into.extend(offsets.windows(2).map(|pair| pair[1] - pair[0]));
}

/// Offsets that cut ranges of these lengths.
fn join(lengths: impl Iterator<Item = u32>, into: &mut Vec<u32>) {
    into.clear();
    into.push(0);
    let mut end = 0;
    into.extend(lengths.map(|length| {
        end += length;
        end
    }));
}

/// Reads records one after the other.
#[derive(Clone, Copy, Debug, Default)]
pub struct Decoder {
    now: Time,
}

impl Decoder {
    /// Reads what follows a header.
    pub fn after(header: &Header) -> Self {
        Self { now: header.base }
    }

    /// The time of the last record.
    pub fn now(&self) -> Time {
        self.now
    }

    /// Reads the record at the beginning of `bytes`; `None` if it does not end in them. Beside it, how
    /// long it is.
    pub fn decode(&mut self, bytes: &[u8]) -> Result<Option<(Entry, usize)>, LogError> {
        let record = "a record";
        let Some((content, rest)) = framed(bytes, record)? else {
            return Ok(None);
        };
        let kind = content.first().copied();
        let kind = KINDS.into_iter().find(|&known| Some(known as u8) == kind);
        let kind = kind.ok_or(LogError::Damaged { record })?;
        let mut content = Content {
            kind,
            bytes: &content[1..],
        };
        if kind.has_time() {
            self.now = Time(self.now.0.wrapping_add(content.read::<u64>()?));
        }
        let entry = content.entry()?;
        Ok(Some((entry, bytes.len() - rest.len())))
    }
}

/// What is left of a record.
struct Content<'a> {
    kind: Kind,
    bytes: &'a [u8],
}

impl Content<'_> {
    fn read<T: DeserializeOwned>(&mut self) -> Result<T, LogError> {
        let record = self.kind.name();
        let read = postcard::take_from_bytes(self.bytes);
        let (value, rest) = read.map_err(|_| LogError::Damaged { record })?;
        self.bytes = rest;
        Ok(value)
    }

    fn entry(mut self) -> Result<Entry, LogError> {
        Ok(match self.kind {
            Kind::Reserve => Entry::Reserve {
                ticket: self.read()?,
                code: self.read()?,
            },
            Kind::Release => Entry::Release { id: self.read()? },
            Kind::Submit => Entry::Submit {
                request: self.read()?,
                code: self.read()?,
            },
            Kind::Abort => {
                let (id, live) = self.read()?;
                Entry::Abort { id, live }
            }
            Kind::Reload => Entry::Reload {
                policy: self.read()?,
                code: self.read()?,
            },
            Kind::Schedule => Entry::Schedule { plan: self.read()? },
            Kind::Commit => Entry::Commit {
                step: self.read()?,
                results: self.read()?,
            },
            Kind::CommitRefused => Entry::CommitRefused {
                step: self.read()?,
                code: self.read()?,
            },
            Kind::FailStep => Entry::FailStep { step: self.read()? },
            Kind::FailAll => Entry::FailAll,
            Kind::AbortAll => Entry::AbortAll,
            Kind::OnTime => Entry::OnTime,
            Kind::Outputs => Entry::Outputs {
                digest: self.read()?,
                events: self.read()?,
            },
            Kind::Stopped => Entry::Stopped { why: self.read()? },
        })
    }
}

impl Kind {
    /// Whether the call had a `now`.
    pub(crate) fn has_time(self) -> bool {
        !matches!(self, Self::Release | Self::Outputs | Self::Stopped)
    }

    /// The call, for messages.
    fn name(self) -> &'static str {
        match self {
            Self::Reserve => "a reserve()",
            Self::Release => "a release()",
            Self::Submit => "a submit()",
            Self::Abort => "an abort()",
            Self::Reload => "a reload()",
            Self::Schedule => "a schedule()",
            Self::Commit | Self::CommitRefused => "a commit()",
            Self::FailStep => "a fail_step()",
            Self::FailAll => "a fail_all()",
            Self::AbortAll => "an abort_all()",
            Self::OnTime => "an on_time()",
            Self::Outputs => "a batch of outputs",
            Self::Stopped => "the end of the recording",
        }
    }
}
