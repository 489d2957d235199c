//! Writes the flight log: a file, a thread of its own, and the bound on both.
//!
//! The scheduler thread hands full buffers over and never waits for the disk. If the disk is behind by
//! more than [`MAX_PENDING_BYTES`], the recording ends with a record that says so, and a warning: what is
//! in the file is whole up to there, and never has a hole.
//!
//! The log is bounded. Half of the bound is for `FILE`, which begins with the engine, since only that can
//! be replayed. Then it goes on in segments of a quarter, `FILE.1`, `FILE.2` and so on, of which the newest
//! two are kept: they tell of the last requests, and can be replayed as long as none before them is gone.
//!
//! The files hold prompts and answers, so only their owner can read them. A `FILE` that is there already
//! is kept as `FILE.old`; its segments go.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use chairlift_core::record::RecordedEngine;
use pyo3::prelude::*;

/// Bytes that are handed over at once.
const BUFFER_BYTES: usize = 1 << 16;
/// Longest time that records wait to be handed over while the thread is awake.
const HAND_OVER_EVERY: Duration = Duration::from_millis(500);
/// Bytes that the disk may be behind.
const MAX_PENDING_BYTES: u64 = 64 << 20;

/// Segments that are kept beside the first file.
const KEPT_SEGMENTS: u32 = 2;

/// What the thread is told.
enum Task {
    Write(Vec<u8>),
    Segment(u32),
}

/// The scheduler thread's end.
pub struct LogWriter {
    full: Option<Sender<Task>>,
    spare: Receiver<Vec<u8>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    limit_bytes: u64,
    segment: u32,
    segment_bytes: u64,
    handed_at: Instant,
}

struct Shared {
    path: PathBuf,
    pending_bytes: AtomicU64,
    has_failed: AtomicBool,
}

impl LogWriter {
    /// Makes the file and starts the thread.
    pub fn create(path: &Path, limit_bytes: u64) -> io::Result<Self> {
        let file = create_first(path)?;
        let (full, to_write) = channel();
        let (written, spare) = channel();
        let shared = Arc::new(Shared {
            path: path.to_owned(),
            pending_bytes: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
        });
        let theirs = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("chairlift-log".to_owned())
            .spawn(move || write_all(file, &theirs, &to_write, &written))?;
        Ok(Self {
            full: Some(full),
            spare,
            shared,
            thread: Some(thread),
            limit_bytes,
            segment: 0,
            segment_bytes: 0,
            handed_at: Instant::now(),
        })
    }

    /// Hands over what the engine has recorded if it is much or old, or `at_once`.
    pub fn take_from(&mut self, engine: &mut RecordedEngine, at_once: bool) {
        let Some(recorder) = engine.recorder() else {
            return;
        };
        let num_bytes = recorder.num_bytes();
        let is_due = num_bytes >= BUFFER_BYTES || self.handed_at.elapsed() >= HAND_OVER_EVERY;
        if num_bytes == 0 || !(is_due || at_once) {
            return;
        }
        if self.shared.has_failed.load(Ordering::Relaxed) {
            engine.stop_recording("the disk failed");
            return;
        }
        let pending = self.shared.pending_bytes.load(Ordering::Relaxed);
        if pending > MAX_PENDING_BYTES {
            self.stop(engine, &format!("the disk was {pending} bytes behind"));
            return;
        }
        let empty = self.spare.try_recv().unwrap_or_default();
        let buffer = recorder.take(empty);
        self.hand_over(buffer);
        // Another buffer must fit, but where the bound is tiny.
        let reserve = (BUFFER_BYTES as u64).min(self.limit_bytes / 8);
        if self.segment_bytes + reserve > self.segment_limit() {
            if self.segment == 0 {
                let path = self.shared.path.display();
                warn(format!(
                    "{path} is full (record_limit); the log goes on in {path}.1 and so on, of which the \
                     newest {KEPT_SEGMENTS} are kept"
                ));
            }
            self.segment = recorder.begin_segment();
            self.segment_bytes = 0;
            self.tell(Task::Segment(self.segment));
        }
    }

    fn segment_limit(&self) -> u64 {
        self.limit_bytes / if self.segment == 0 { 2 } else { 4 }
    }

    fn tell(&self, task: Task) {
        if let Some(full) = &self.full {
            // A thread that has ended has said why.
            let _ = full.send(task);
        }
    }

    fn stop(&mut self, engine: &mut RecordedEngine, why: &str) {
        if let Some(rest) = engine.stop_recording(why) {
            self.hand_over(rest);
        }
        warn(format!(
            "{}: recording has ended: {why}",
            self.shared.path.display()
        ));
    }

    fn hand_over(&mut self, buffer: Vec<u8>) {
        self.segment_bytes += buffer.len() as u64;
        self.handed_at = Instant::now();
        let pending = &self.shared.pending_bytes;
        pending.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        self.tell(Task::Write(buffer));
    }
}

impl Drop for LogWriter {
    /// Waits until everything is written.
    fn drop(&mut self) {
        self.full = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Path of a segment of the log at `path`.
pub fn segment_path(path: &Path, segment: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    if segment > 0 {
        name.push(format!(".{segment}"));
    }
    PathBuf::from(name)
}

/// Numbers of the segments that lie beside the log at `path`, rising.
pub fn segments_beside(path: &Path) -> Vec<u32> {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
        return Vec::new();
    };
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let entries = fs::read_dir(folder.unwrap_or(Path::new(".")))
        .into_iter()
        .flatten();
    let numbers = entries.filter_map(|entry| {
        let entry = entry.ok()?.file_name();
        let number = entry.to_str()?.strip_prefix(name)?.strip_prefix('.')?;
        number.parse().ok().filter(|&number: &u32| number > 0)
    });
    let mut numbers: Vec<u32> = numbers.collect();
    numbers.sort_unstable();
    numbers
}

/// Makes the first file, and puts away what an earlier engine left.
fn create_first(path: &Path) -> io::Result<File> {
    if path.is_file() {
        let mut old = path.as_os_str().to_owned();
        old.push(".old");
        fs::rename(path, old)?;
    }
    let file = create_private(path)?;
    for segment in segments_beside(path) {
        fs::remove_file(segment_path(path, segment))?;
    }
    Ok(file)
}

fn create_private(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600).open(path)
}

/// The thread's life.
fn write_all(mut file: File, shared: &Shared, tasks: &Receiver<Task>, written: &Sender<Vec<u8>>) {
    for task in tasks {
        let done = match task {
            Task::Write(buffer) => file.write_all(&buffer).map(|()| {
                let length = buffer.len() as u64;
                shared.pending_bytes.fetch_sub(length, Ordering::Relaxed);
                let _ = written.send(buffer); // the scheduler may be gone
            }),
            Task::Segment(segment) => begin_segment(&mut file, &shared.path, segment),
        };
        if let Err(error) = done {
            shared.has_failed.store(true, Ordering::Relaxed);
            let path = shared.path.display();
            warn(format!(
                "{path}: recording has ended, it cannot be written: {error}"
            ));
            return;
        }
    }
}

/// Goes on in another file, and lets the oldest go.
fn begin_segment(file: &mut File, path: &Path, segment: u32) -> io::Result<()> {
    *file = create_private(&segment_path(path, segment))?;
    match segment.checked_sub(KEPT_SEGMENTS) {
        Some(gone) if gone > 0 => fs::remove_file(segment_path(path, gone)),
        _ => Ok(()),
    }
}

/// Warns through Python's logging, on a thread of its own: neither the scheduler nor the disk waits for
/// the interpreter.
fn warn(message: String) {
    let tell = move || {
        // Without an interpreter there is nobody to warn.
        let _ = Python::try_attach(|py| {
            let logged = py
                .import("logging")
                .and_then(|logging| logging.call_method1("getLogger", ("chairlift",)))
                .and_then(|logger| logger.call_method1("warning", ("%s", &message)));
            if let Err(error) = logged {
                error.write_unraisable(py, None);
            }
        });
    };
    let name = "chairlift-warn".to_owned();
    let _ = thread::Builder::new().name(name).spawn(tell);
}
