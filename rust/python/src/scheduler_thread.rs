//! The scheduler thread: owns the core, never attaches to Python.
//!
//! It sleeps on one channel (and on the core's next timer), serves whatever arrives, and plans the next
//! step whenever fewer are in flight than may be. Steps run on the executor thread meanwhile; commands are
//! served and timers fire all the same. After a step: commit, plan the next, hand it over, and only then deliver, so
//! that the executor never waits for a client.
//!
//! The engine ends in one of three ways, after each of which every request has had its end and every
//! later command gets the reason: a shutdown (requests end as aborted), the executor thread's end, or
//! a panic here (the outbox is told by [`Obituary`]; clients end their own requests).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use chairlift_core::config::policy::Policy;
use chairlift_core::record::RecordedEngine;
use chairlift_core::request::{NewRequest, RequestId, Ticket, Time};

use crate::command::{Answer, Command, Message, Order, Question, Step, Submission, recv_soon};
use crate::cost_model::Learned;
use crate::delivery::{Delivery, Outbox};
use crate::errors::Refusal;
use crate::groups::{Groups, Wait};
use crate::iterations::Iterations;
use crate::log_writer::LogWriter;
use crate::metrics::EngineMetrics;

/// What the thread is given.
pub struct SchedulerEnd {
    /// Commands of every other thread.
    pub commands: Receiver<Command>,
    /// Steps for the executor thread.
    pub steps: Sender<Step>,
    /// Where output goes.
    pub outbox: Arc<Outbox>,
    /// The ring of plan sets.
    pub ring: VecDeque<Step>,
    /// Zero of the engine's clock.
    pub epoch: Instant,
    /// How long a step may take.
    pub step_timeout: Option<Duration>,
    /// Where the flight log goes, if the engine is recorded.
    pub log: Option<LogWriter>,
}

/// Serves until the engine is shut down; returns what it has learned of iterations' time.
pub fn run(engine: RecordedEngine, end: SchedulerEnd) -> Option<Learned> {
    let outbox = Arc::clone(&end.outbox);
    let mut scheduler = Scheduler::new(engine, end);
    // Dropped before the scheduler with its channels: who finds them closed finds the reason, too.
    let _obituary = Obituary(outbox);
    while scheduler.is_open {
        scheduler.turn();
    }
    scheduler.write_log(true);
    Learned::of(scheduler.engine.cost_model())
}

/// Tells the clients that nobody serves them any more, however the thread ends.
struct Obituary(Arc<Outbox>);

impl Drop for Obituary {
    fn drop(&mut self) {
        self.0.close(if std::thread::panicking() {
            "the scheduler thread panicked, which is a bug in chairlift; please report the message \
             on standard error"
        } else {
            SHUT_DOWN
        });
    }
}

/// How long a step that was handed over is waited for before sleeping.
const PATIENCE: Duration = Duration::from_micros(50);

const SHUT_DOWN: &str = "the engine was shut down";

/// A step that was handed over.
struct InFlight {
    step: u64,
    /// When it was, or when the one before it came back, if that was later.
    since: Instant,
}

struct Scheduler {
    engine: RecordedEngine,
    end: SchedulerEnd,
    /// The oldest first; they come back in that order.
    in_flight: VecDeque<InFlight>,
    /// Why no step can be run any more.
    dead: Option<Arc<str>>,
    is_open: bool,
    delivery: Delivery,
    stats: EngineMetrics,
    iterations: Iterations,
}

impl Scheduler {
    fn new(engine: RecordedEngine, end: SchedulerEnd) -> Self {
        Self {
            engine,
            end,
            in_flight: VecDeque::new(),
            dead: None,
            is_open: true,
            delivery: Delivery::default(),
            stats: EngineMetrics::default(),
            iterations: Iterations::default(),
        }
    }

    fn now(&self) -> Time {
        Time(self.end.epoch.elapsed().as_micros() as u64)
    }

    /// Sleeps until there is something to do, does it, plans, delivers.
    fn turn(&mut self) {
        let mut next = self.sleep();
        while let Some(command) = next {
            // A finished step is followed by planning at once; other commands are served in a row.
            let frees_the_executor =
                matches!(command, Command::StepDone(_) | Command::StepFailed(..));
            self.serve(command);
            if frees_the_executor || !self.is_open || self.timer_is_due() {
                break;
            }
            next = self.end.commands.try_recv().ok();
        }
        if self.is_open {
            if self.timer_is_due() {
                self.engine.on_time(self.now());
            }
            self.watch_step();
            self.plan();
        }
        self.deliver(None);
        // Without a step the thread may sleep for long.
        self.write_log(self.in_flight.is_empty());
    }

    /// Hands what was recorded to the log's writer.
    fn write_log(&mut self, at_once: bool) {
        if let Some(log) = &mut self.end.log {
            log.take_from(&mut self.engine, at_once);
        }
    }

    /// The next command, or `None` when a timer of the core is due or the step should be back.
    fn sleep(&self) -> Option<Command> {
        // A step of a small model may be back at once; without one nothing is expected.
        let patience = self.in_flight.front().map_or(Duration::ZERO, |_| PATIENCE);
        let timer = self.engine.next_wake();
        // A timer beyond what the clock can tell never fires.
        let timer = timer.and_then(|at| self.end.epoch.checked_add(Duration::from_micros(at.0)));
        let limit = timer.into_iter().chain(self.step_is_late_at()).min();
        match recv_soon(&self.end.commands, patience, limit) {
            Ok(command) => Some(command),
            Err(RecvTimeoutError::Timeout) => None,
            // Every other end is gone: nobody is left to serve.
            Err(RecvTimeoutError::Disconnected) => {
                Some(Command::Client(Message::Tell(Order::Shutdown)))
            }
        }
    }

    fn timer_is_due(&self) -> bool {
        let timer = self.engine.next_wake();
        timer.is_some_and(|at| at <= self.now())
    }

    /// An answer whose asker is gone is dropped.
    fn serve(&mut self, command: Command) {
        let now = self.now();
        match command {
            Command::Client(Message::Ask(call, question)) => {
                let answer = self.answer(now, question);
                self.end.outbox.answer(call, answer);
            }
            Command::Client(Message::Tell(order)) => self.obey(now, &order),
            Command::StepDone(step) => self.step_done(now, step),
            Command::StepFailed(step, why) => self.step_failed(now, step, &why),
            Command::ExecutorGone(why) => self.executor_gone(now, &why),
        }
    }

    fn answer(&mut self, now: Time, question: Question) -> Answer {
        match question {
            Question::Reserve(ticket) => {
                let id = ticket.id;
                match self.reserve(now, ticket) {
                    Ok(()) => Answer::Reserved(self.reserved_class(id)),
                    Err(refusal) => Answer::Refused(refusal),
                }
            }
            Question::Submit(submission) => self.submit(now, submission.arrived(now)).into(),
            Question::SubmitAtOnce(both) => {
                let (ticket, submission) = *both;
                let reserved = self.reserve(now, ticket);
                let submitted = reserved.and_then(|()| self.submit(now, submission.arrived(now)));
                submitted.into()
            }
            Question::Feed(submissions) => self.feed(now, submissions),
            Question::Reload(policy) => self.reload(now, &policy).into(),
            Question::Metrics => Answer::Metrics(Box::new(self.metrics())),
            Question::Groups { is_brief } => {
                let groups = Groups::of(&self.engine, &self.metrics(), is_brief);
                Answer::Groups(Box::new(groups))
            }
            Question::Iterations(since) => {
                Answer::Iterations(Box::new(self.iterations.recent(&self.engine, since, now)))
            }
            Question::Wait(id) => Answer::Wait(self.engine.wait(now, id).map(Wait::from)),
            Question::CostModel => Answer::CostModel(Learned::of(self.engine.cost_model())),
        }
    }

    fn obey(&mut self, now: Time, order: &Order) {
        match *order {
            Order::Release(id) => self.engine.release(id),
            Order::Abort(id) => {
                self.engine.abort(now, id);
            }
            Order::AbortAll => self.engine.abort_all(now),
            Order::Shutdown => self.shut_down(now),
        }
    }

    fn metrics(&self) -> EngineMetrics {
        let since = self.in_flight.front().map(|flight| flight.since);
        EngineMetrics {
            core: self.engine.metrics(),
            iterations: *self.engine.iteration_metrics(),
            memory: self.engine.memory_metrics(),
            pace: self.engine.pace_metrics(),
            in_flight_us: since.map_or(0, |since| since.elapsed().as_micros() as u64),
            ..self.stats
        }
    }

    fn reserve(&mut self, now: Time, ticket: Ticket) -> Result<(), Refusal> {
        match &self.dead {
            Some(reason) => Err(Refusal::dead(reason)),
            None => Ok(self.engine.reserve(now, ticket)?),
        }
    }

    fn submit(&mut self, now: Time, request: NewRequest) -> Result<(), Refusal> {
        let id = request.id;
        if let Some(reason) = &self.dead {
            self.engine.release(id);
            return Err(Refusal::dead(reason));
        }
        self.engine.submit(now, request)?;
        Ok(())
    }

    fn reload(&mut self, now: Time, policy: &Policy) -> Result<(), Refusal> {
        match &self.dead {
            Some(reason) => Err(Refusal::dead(reason)),
            None => Ok(self.engine.reload(now, policy)?),
        }
    }

    fn reserved_class(&self, id: RequestId) -> String {
        self.engine
            .reserved_class(id)
            .unwrap_or_default()
            .to_owned()
    }

    fn feed(&mut self, now: Time, submissions: Vec<(Ticket, Submission)>) -> Answer {
        let mut taken = 0;
        for (ticket, submission) in submissions {
            if self.dead.is_none() && !self.engine.has_room(ticket.n) {
                break;
            }
            let reserved = self.reserve(now, ticket);
            let submitted = reserved.and_then(|()| self.submit(now, submission.arrived(now)));
            if let Err(refusal) = submitted {
                return Answer::Taken(taken, Some(refusal));
            }
            taken += 1;
        }
        Answer::Taken(taken, None)
    }

    /// When the oldest step in flight has taken longer than a step may.
    fn step_is_late_at(&self) -> Option<Instant> {
        let flight = self.in_flight.front()?;
        flight.since.checked_add(self.end.step_timeout?)
    }

    /// Gives the executor up if its step does not come back.
    fn watch_step(&mut self) {
        let late = self.step_is_late_at().filter(|&at| at <= Instant::now());
        let flight = self.in_flight.front();
        if let (Some(_), Some(flight), Some(limit)) = (late, flight, self.end.step_timeout) {
            let why = format!(
                "the executor has not returned from step {} for {} s (step_timeout)",
                flight.step,
                limit.as_secs_f64()
            );
            self.executor_gone(self.now(), &why);
        }
    }

    /// Plans as many steps as may be in flight, and hands them to the executor thread.
    fn plan(&mut self) {
        let most = self.engine.limits().max_in_flight_steps() as usize;
        while self.in_flight.len() < most && self.dead.is_none() && self.plan_one() {}
    }

    /// Plans the next step; false if there is nothing to plan.
    fn plan_one(&mut self) -> bool {
        let Some(mut step) = self.end.ring.pop_front() else {
            return false; // cannot be: the ring has more sets than there may be steps in flight
        };
        let since = Instant::now();
        let now = self.now();
        if !self.engine.schedule(now, step.lease.plan_mut()) {
            self.end.ring.push_front(step);
            return false;
        }
        let handed = Instant::now();
        self.stats.scheduler_us += (handed - since).as_micros() as u64;
        self.in_flight.push_back(InFlight {
            step: step.plan().step,
            since: handed,
        });
        if self.end.steps.send(step).is_err() {
            // The executor thread is gone; its farewell is on the way, or was never needed because it
            // never came.
            self.executor_gone(now, "the executor thread has ended");
        }
        true
    }

    /// Counts a step that has come back. `None` if it is not the oldest in flight.
    fn landed(&mut self, step: u64) -> Option<()> {
        self.in_flight
            .front()
            .filter(|flight| flight.step == step)?;
        let flight = self.in_flight.pop_front()?;
        if let Some(next) = self.in_flight.front_mut() {
            next.since = Instant::now();
        }
        self.stats.steps += 1;
        // One that has nothing to say is counted with the next that has.
        self.delivery.iterations += 1;
        self.stats.step_us += flight.since.elapsed().as_micros() as u64;
        Some(())
    }

    fn step_done(&mut self, now: Time, step: Step) {
        let number = step.plan().step;
        if self.landed(number).is_some() {
            self.stats
                .count_graph(step.graph_rows, step.plan().num_seqs());
            let since = Instant::now();
            let committed = self.engine.commit(now, number, &step.results);
            self.stats.scheduler_us += since.elapsed().as_micros() as u64;
            if let Err(error) = committed {
                self.fail_step(now, number, &error.to_string());
            }
            self.iterations
                .push(&self.engine.metrics(), step.plan(), now);
        }
        self.end.ring.push_back(step);
    }

    fn step_failed(&mut self, now: Time, step: Step, why: &str) {
        let number = step.plan().step;
        if self.landed(number).is_some() {
            self.fail_step(now, number, why);
        }
        self.end.ring.push_back(step);
    }

    fn fail_step(&mut self, now: Time, step: u64, why: &str) {
        self.stats.failed_steps += 1;
        // What is there already is not part of the failure.
        self.deliver(None);
        self.engine.fail_step(now, step);
        self.deliver(Some(
            format!("the executor failed step {step}: {why}").into(),
        ));
    }

    fn executor_gone(&mut self, now: Time, why: &str) {
        if self.dead.is_some() {
            return;
        }
        let reason: Arc<str> = format!("the engine is dead: {why}").into();
        self.deliver(None);
        self.engine.fail_all(now);
        self.in_flight.clear();
        self.deliver(Some(Arc::clone(&reason)));
        self.end.outbox.end(&reason);
        self.dead = Some(reason);
    }

    fn shut_down(&mut self, now: Time) {
        self.engine.abort_all(now);
        self.dead.get_or_insert_with(|| SHUT_DOWN.into());
        self.is_open = false;
    }

    /// Publishes what the core has said since the last time; `failure` is the message for every
    /// failed request in it.
    fn deliver(&mut self, failure: Option<Arc<str>>) {
        if !self.engine.take_outputs(&mut self.delivery.batch) {
            return;
        }
        if let Some(message) = failure {
            let all = 0..self.delivery.batch.events.len();
            self.delivery.failures.push((all, message));
        }
        self.end.outbox.publish(&mut self.delivery);
    }
}
