//! What every plan promises, and what one does that was made while others are in flight.

use std::collections::BTreeSet;

use chairlift_core::iteration::plan::{SOURCE_LAST_SAMPLED, StepPlan};
use chairlift_core::memory::blocks::BlockLocation;
use chairlift_core::request::RequestId;

use super::client::Client;
use super::harness::Harness;

impl Harness {
    /// What every plan promises.
    pub fn check_plan(&self) {
        let plan = &self.plan;
        let n = plan.num_seqs();
        assert!(n > 0 && n <= self.settings.max_num_seqs as usize);
        assert!(plan.num_tokens() <= self.settings.max_num_batched_tokens as usize);
        assert_eq!(plan.query_start_loc.len(), n + 1);
        assert_eq!(plan.block_table_offsets.len(), n + 1);
        let mut rows = plan.rows.clone();
        rows.sort_unstable();
        rows.dedup();
        assert_eq!(rows.len(), n, "a row twice in one plan");
        let mut slots = plan.slot_mapping.clone();
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), plan.num_tokens(), "a slot is written twice");
        assert_eq!(plan.adapter_ids, vec![-1; n]);
        assert!(plan.mask_rows.is_empty());
        check_copies(plan);
        for position in 0..n {
            let tokens = plan.query_start_loc[position]..plan.query_start_loc[position + 1];
            assert_eq!(
                position < plan.num_decodes,
                tokens.len() == 1,
                "decodes come first"
            );
            assert!(tokens.len() <= self.engine.limits().max_chunk_tokens() as usize);
            let last = plan.positions[tokens.end as usize - 1];
            assert_eq!(last + 1, plan.seq_lens[position]);
        }
    }

    /// What a plan promises that was made while others are in flight.
    pub fn check_ahead(&mut self) {
        let plan = &self.plan;
        for (row, ints) in plan.resets.rows.iter().zip(&plan.resets.ints) {
            self.planned[*row as usize] = ints[1] as u64;
        }
        assert_eq!(plan.token_sources.len(), plan.num_tokens());
        let sampled: BTreeSet<i32> = self
            .in_flight
            .iter()
            .flat_map(|flight| flight.sample_rows.iter().copied())
            .collect();
        for (index, &source) in plan.token_sources.iter().enumerate() {
            if source == SOURCE_LAST_SAMPLED {
                let sequence = sequence_of(plan, index as i32);
                assert!(sampled.contains(&plan.rows[sequence]), "nobody samples it");
                assert!(sequence < plan.num_decodes, "it is all that is computed");
            }
        }
        for (&row, &index) in plan.sample_rows.iter().zip(&plan.sample_output_indices) {
            let id = RequestId(self.planned[row as usize]);
            let Some(Client { request, .. }) = self.clients.get(&id) else {
                continue;
            };
            let room = self.engine.limits().max_model_len() - request.prompt.len() as u32;
            let most = request.stop.max_tokens.unwrap_or(room).min(room);
            assert!((index as u32) < most, "{id} was planned beyond its length");
        }
        self.check_memory_in_flight();
    }

    /// Nothing is written that a step in flight touches for somebody else.
    fn check_memory_in_flight(&self) {
        let (plan, block_size) = (&self.plan, i64::from(self.settings.block_size));
        for flight in &self.in_flight {
            for row in &plan.resets.rows {
                assert!(
                    !flight.rows.contains(row),
                    "row {row} is in step {}",
                    flight.step
                );
            }
            for index in 0..plan.num_tokens() {
                let row = plan.rows[sequence_of(plan, index as i32)];
                let block = (plan.slot_mapping[index] / block_size) as i32;
                check_owner(flight, row, block);
                let mut touched = copies(flight).flatten();
                let copied = touched.any(|place| place == (DEVICE, block));
                let is_newcomer = plan.resets.rows.contains(&row);
                assert!(!(copied && is_newcomer), "step {} copies it", flight.step);
            }
            for [_, place] in copies(plan) {
                let (location, written) = place;
                if location == HOST {
                    let mut touched = copies(flight).flatten();
                    let copied = touched.any(|other| other == place);
                    assert!(!copied, "step {} copies block {written}", flight.step);
                    continue;
                }
                let mut tables = (0..plan.num_seqs()).map(|at| (plan.rows[at], table(plan, at)));
                let owner = tables.find(|(_, blocks)| blocks.contains(&written));
                check_owner(flight, owner.map_or(-1, |(row, _)| row), written);
            }
        }
    }
}

const DEVICE: u8 = BlockLocation::Device as u8;
pub const HOST: u8 = BlockLocation::Host as u8;

/// Location and block of source and destination of each copy.
pub fn copies(plan: &StepPlan) -> impl Iterator<Item = [(u8, i32); 2]> {
    assert_eq!(plan.block_copy_locations.len(), plan.block_copies.len());
    let ends = plan.block_copies.iter().zip(&plan.block_copy_locations);
    ends.map(|(blocks, locations)| [0, 1].map(|end| (locations[end], blocks[end])))
}

/// Blocks that a plan copies to the host, and from it.
pub fn num_host_copies(plan: &StepPlan) -> (usize, usize) {
    let on_host = |end: usize| copies(plan).filter(|places| places[end].0 == HOST).count();
    (on_host(1), on_host(0))
}

/// Copies to the host come first. What a copy writes no other of its kind touches, and what goes to the host
/// is not read in the same step.
fn check_copies(plan: &StepPlan) {
    let places: Vec<_> = copies(plan).collect();
    let num_offloads = num_host_copies(plan).0;
    let (offloads, others) = places.split_at(num_offloads);
    assert!(
        offloads
            .iter()
            .all(|&[from, to]| (from.0, to.0) == (DEVICE, HOST))
    );
    for group in [offloads, others] {
        for [_, written] in group {
            let count = group
                .as_flattened()
                .iter()
                .filter(|&place| place == written)
                .count();
            assert_eq!(count, 1, "copies of a step depend on each other");
        }
    }
    for [_, written] in offloads {
        assert!(
            !others.as_flattened().contains(written),
            "it is not there yet"
        );
    }
}

/// Blocks of the sequence at `position` of a plan.
pub fn table(plan: &StepPlan, position: usize) -> &[i32] {
    let [begin, end] = [position, position + 1].map(|at| plan.block_table_offsets[at] as usize);
    &plan.block_ids[begin..end]
}

/// A block that a plan writes for `row` is nobody else's in a step in flight.
fn check_owner(flight: &StepPlan, row: i32, block: i32) {
    for position in 0..flight.num_seqs() {
        assert!(
            flight.rows[position] == row || !table(flight, position).contains(&block),
            "block {block} is written for row {row}, but step {} has it for row {}",
            flight.step,
            flight.rows[position],
        );
    }
}

/// Position of the sequence that a token of a plan belongs to.
pub fn sequence_of(plan: &StepPlan, token: i32) -> usize {
    plan.query_start_loc.partition_point(|&at| at <= token) - 1
}
