//! The clients: what they send, what they are told, and what each tenant has received.

use crate::iteration::plan::StepPlan;
use crate::output::{Event, OutputBatch};
use crate::predict::iteration_time::StepShares;
use crate::request::{
    Finish, NewRequest, RequestId, RequestStats, SamplingParams, StopParams, Ticket, Time,
};
use crate::sim::SimConfig;
use crate::sim::record::{Gap, Outcome, Record};
use crate::sim::service::Services;
use crate::sim::workload::Workload;

/// What is kept of a request beside its record.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    last_token_us: u64,
    /// Prompt tokens that were computed or found in the cache, and charged.
    charged_tokens: u32,
    /// Accepted, and never scheduled yet.
    waits: bool,
}

pub(crate) struct Clients<'a> {
    config: &'a SimConfig,
    workload: &'a Workload,
    pub(crate) records: Vec<Record>,
    pub(crate) gaps: Vec<Gap>,
    pub(crate) services: Services,
    progress: Vec<Progress>,
}

impl<'a> Clients<'a> {
    pub(crate) fn new(config: &'a SimConfig, workload: &'a Workload) -> Self {
        let price = config.settings.policy.price;
        let records = workload.requests.iter().map(|request| Record {
            arrival_us: request.arrival_us,
            submitted_us: request.arrival_us,
            ..Record::default()
        });
        Self {
            records: records.collect(),
            gaps: Vec::new(),
            services: Services::new(price, workload.tenants.len()),
            progress: vec![Progress::default(); workload.requests.len()],
            config,
            workload,
        }
    }

    /// Whether the request has neither ended nor been rejected for good.
    pub(crate) fn hopes(&self, index: usize) -> bool {
        self.records[index].outcome == Outcome::Unfinished
    }

    /// Ids are never used twice, so a second try has one of its own.
    pub(crate) fn id(&self, index: usize) -> RequestId {
        let tries = u64::from(self.records[index].rejections);
        RequestId(index as u64 + tries * self.workload.requests.len() as u64)
    }

    /// Position of the request that has this id.
    fn index(&self, id: RequestId) -> usize {
        (id.0 % self.workload.requests.len() as u64) as usize
    }

    /// What request number `index` shows at the door.
    pub(crate) fn ticket(&self, index: usize) -> Ticket {
        let request = &self.workload.requests[index];
        let class = &self.config.settings.policy.classes[request.class as usize];
        Ticket {
            tenant: self.workload.tenants[request.tenant as usize].clone(),
            class: Some(class.name.clone()),
            ..Ticket::new(self.id(index))
        }
    }

    /// What it submits.
    pub(crate) fn new_request(&self, index: usize) -> NewRequest {
        let request = &self.workload.requests[index];
        let own = self.workload.max_tokens.get(index).copied();
        let max_tokens = own.unwrap_or_else(|| self.config.max_tokens.max(request.output_tokens));
        NewRequest {
            id: self.id(index),
            prompt: self.workload.prompt(index),
            sampling: SamplingParams {
                // The seed goes with the row: so the executor knows whose row it is.
                seed: index as u64,
                ..SamplingParams::default()
            },
            stop: StopParams {
                max_tokens: Some(max_tokens),
                ..StopParams::default()
            },
            cache_salt: None,
            priority: request.priority,
            deadline: request
                .deadline_us
                .map(|after_us| Time(request.arrival_us + after_us)),
        }
    }

    /// The engine took the request: it waits.
    pub(crate) fn accepted(&mut self, index: usize) {
        self.progress[index].waits = true;
        self.services.enter(self.workload.requests[index].tenant);
    }

    /// The request is over, whatever the engine knows of it.
    pub(crate) fn end(&mut self, index: usize, outcome: Outcome, now_us: u64) {
        self.records[index].outcome = outcome;
        self.records[index].finished_us = Some(now_us);
    }

    /// Takes the engine's news.
    pub(crate) fn receive(&mut self, batch: &OutputBatch, now_us: u64) {
        for event in &batch.events {
            match event {
                Event::Scheduled {
                    request,
                    num_cached_tokens,
                    ..
                } => self.scheduled(self.index(*request), *num_cached_tokens, now_us),
                Event::Output(output) => {
                    let index = self.index(output.request);
                    if !output.tokens.is_empty() {
                        self.received(index, output.tokens.len() as u32, now_us);
                    }
                    if let Some(finish) = output.finish {
                        self.finished(index, finish);
                    }
                }
                Event::PromptLogprobs { .. } => {} // nobody asks for them
                Event::Ended { request, stats } => self.ended(self.index(*request), stats),
            }
        }
    }

    fn scheduled(&mut self, index: usize, num_cached_tokens: u32, now_us: u64) {
        let tenant = self.workload.requests[index].tenant;
        self.records[index].first_scheduled_us = Some(now_us);
        self.services.add_cached(tenant, num_cached_tokens);
        self.progress[index].charged_tokens = num_cached_tokens;
        self.leave_queue(index);
    }

    fn leave_queue(&mut self, index: usize) {
        if std::mem::take(&mut self.progress[index].waits) {
            self.services.leave(self.workload.requests[index].tenant);
        }
    }

    fn received(&mut self, index: usize, tokens: u32, now_us: u64) {
        let tenant = self.workload.requests[index].tenant;
        self.services.add_output(tenant, tokens);
        let record = &mut self.records[index];
        record.output_tokens += tokens;
        let last_us = std::mem::replace(&mut self.progress[index].last_token_us, now_us);
        if record.first_token_us.is_none() {
            record.first_token_us = Some(now_us);
            return;
        }
        let gap_us = now_us - last_us;
        record.max_gap_us = record.max_gap_us.max(gap_us);
        if self.config.keep_gaps {
            self.gaps.push(Gap {
                request: index as u32,
                us: u32::try_from(gap_us).unwrap_or(u32::MAX),
            });
        }
    }

    fn finished(&mut self, index: usize, finish: Finish) {
        self.records[index].outcome = Outcome::Ended(finish);
    }

    fn ended(&mut self, index: usize, stats: &RequestStats) {
        self.leave_queue(index);
        let record = &mut self.records[index];
        record.finished_us = Some(stats.finished.0);
        record.predicted_ttft_us = stats.predicted_ttft_us;
        record.preemptions = stats.num_preemptions;
        record.cached_tokens = stats.num_cached_tokens;
    }

    /// Counts who received an iteration; `row_requests` says whose the rows are.
    pub(crate) fn charge(&mut self, plan: &StepPlan, shares: &StepShares, row_requests: &[u32]) {
        let mut sampled = 0;
        for (at, &row) in plan.rows.iter().enumerate() {
            let index = row_requests[row as usize] as usize;
            let request = &self.workload.requests[index];
            let tokens = (plan.query_start_loc[at + 1] - plan.query_start_loc[at]) as u32;
            let end = plan.seq_lens[at] as u32;
            // One answer each, in the plan's order.
            let samples = u32::from(plan.sample_rows.get(sampled) == Some(&row));
            sampled += samples as usize;
            let us = if at < plan.num_decodes {
                shares.decode(end, samples)
            } else {
                shares.chunk(end - tokens, tokens, samples)
            };
            self.services.add_device(request.tenant, us);
            let computed = (plan.seq_lens[at] as u32).min(request.input_tokens);
            let charged = &mut self.progress[index].charged_tokens;
            if computed > *charged {
                self.services.add_input(request.tenant, computed - *charged);
                *charged = computed;
            }
        }
    }
}
