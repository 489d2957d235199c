//! Turns calls into bytes.
//!
//! Records gather in one buffer, which whoever writes the log takes from time to time. In steady state
//! nothing is allocated but by the buffer's growth, and that ends when buffers come back.

use crate::iteration::commit::StepResults;
use crate::iteration::plan::StepPlan;
use crate::output::{Event, OutputBatch};
use crate::record::digest::{PlanDigest, digest_outputs, is_common};
use crate::record::format::{Header, Kind, Results, append};
use crate::request::Time;

/// Writes records into a buffer.
#[derive(Debug)]
pub struct Recorder {
    header: Header,
    /// Whole records; the header first.
    buffer: Vec<u8>,
    /// The record that is being written.
    record: Vec<u8>,
    last: Time,
    num_records: u64,
    plan: PlanDigest,
    results: Results,
    scratch: Vec<u8>,
    events: Vec<Event>,
}

impl Recorder {
    pub(crate) fn new(header: Header) -> Self {
        Self {
            buffer: header.encode(),
            header,
            record: Vec::new(),
            last: Time(0),
            num_records: 0,
            plan: PlanDigest::default(),
            results: Results::default(),
            scratch: Vec::new(),
            events: Vec::new(),
        }
    }

    /// Goes on in another segment, with a header of its own: what was recorded before must have been
    /// taken. Returns its number.
    pub fn begin_segment(&mut self) -> u32 {
        self.header.segment += 1;
        self.header.base = self.last;
        self.buffer.extend(self.header.encode());
        self.header.segment
    }

    /// Bytes that were not taken yet.
    pub fn num_bytes(&self) -> usize {
        self.buffer.len()
    }

    /// Records since the start.
    pub fn num_records(&self) -> u64 {
        self.num_records
    }

    /// Takes all whole records; goes on in `empty`.
    pub fn take(&mut self, mut empty: Vec<u8>) -> Vec<u8> {
        empty.clear();
        std::mem::replace(&mut self.buffer, empty)
    }

    pub(crate) fn begin(&mut self, kind: Kind, now: Option<Time>) {
        self.record.clear();
        self.record.push(kind as u8);
        debug_assert_eq!(kind.has_time(), now.is_some());
        if let Some(now) = now {
            append(&mut self.record, &now.0.wrapping_sub(self.last.0));
            self.last = now;
        }
    }

    pub(crate) fn write<T: serde::Serialize + ?Sized>(&mut self, value: &T) {
        append(&mut self.record, value);
    }

    pub(crate) fn end(&mut self) {
        append(&mut self.buffer, &(self.record.len() as u64));
        self.buffer.extend_from_slice(&self.record);
        self.num_records += 1;
    }

    pub(crate) fn schedule(&mut self, now: Time, plan: Option<&StepPlan>) {
        self.begin(Kind::Schedule, Some(now));
        if let Some(plan) = plan {
            self.plan.set(plan);
        }
        append(&mut self.record, &plan.map(|_| &self.plan));
        self.end();
    }

    pub(crate) fn commit(&mut self, now: Time, step: u64, results: &StepResults) {
        self.begin(Kind::Commit, Some(now));
        self.results.set(results);
        append(&mut self.record, &step);
        append(&mut self.record, &self.results);
        self.end();
    }

    pub(crate) fn outputs(&mut self, batch: &OutputBatch) {
        let digest = digest_outputs(batch, &mut self.scratch);
        self.events.clear();
        let rare = batch.events.iter().filter(|event| !is_common(event));
        self.events.extend(rare.cloned());
        self.begin(Kind::Outputs, None);
        append(&mut self.record, &digest);
        append(&mut self.record, &self.events);
        self.end();
    }
}
