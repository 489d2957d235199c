//! What is in the KV blocks: one token for each slot, on the device and on the host.

use chairlift_core::config::Settings;
use chairlift_core::iteration::plan::StepPlan;

use super::plan_checks::{copies, num_host_copies, sequence_of};

/// The slots of each location, block by block.
pub struct Contents {
    slots: [Vec<Option<u32>>; 2],
    block_size: usize,
    /// The last step whose copies were made.
    copied_step: u64,
    /// Blocks of the host that were written over.
    pub num_host_evictions: u64,
}

impl Contents {
    pub fn new(settings: &Settings) -> Self {
        let block_size = settings.block_size as usize;
        let pools = [settings.num_kv_blocks, settings.num_host_kv_blocks];
        Self {
            slots: pools.map(|num_blocks| vec![None; num_blocks as usize * block_size]),
            block_size,
            copied_step: 0,
            num_host_evictions: 0,
        }
    }

    /// Makes the copies of a plan, once: those to the host first, the others in any order, which is the
    /// reverse of the plan's here.
    pub fn copy(&mut self, plan: &StepPlan) {
        if plan.step <= self.copied_step {
            return;
        }
        self.copied_step = plan.step;
        let places: Vec<_> = copies(plan).collect();
        let (offloads, others) = places.split_at(num_host_copies(plan).0);
        for &[from, to] in offloads.iter().chain(others.iter().rev()) {
            let [source, destination] = [from, to].map(|(location, block)| {
                let begin = block as usize * self.block_size;
                (location as usize, begin..begin + self.block_size)
            });
            let content = self.slots[source.0][source.1].to_vec();
            let written = &mut self.slots[destination.0][destination.1];
            let is_offload = destination.0 == 1;
            self.num_host_evictions += u64::from(is_offload && written[0].is_some());
            written.clone_from_slice(&content);
        }
    }

    /// Writes the tokens of a plan.
    pub fn write(&mut self, plan: &StepPlan) {
        for (&slot, &token) in plan.slot_mapping.iter().zip(&plan.token_ids) {
            self.slots[0][slot as usize] = Some(token as u32);
        }
    }

    /// Tokens up to that at `index` of the plan, read through its sequence's block table.
    pub fn history(&self, plan: &StepPlan, index: i32) -> Vec<u32> {
        let begin = plan.block_table_offsets[sequence_of(plan, index)] as usize;
        let slot = |at: usize| {
            let block = plan.block_ids[begin + at / self.block_size] as usize;
            self.slots[0][block * self.block_size + at % self.block_size]
        };
        (0..=plan.positions[index as usize] as usize)
            .map(|at| slot(at).expect("a slot that was written"))
            .collect()
    }
}
