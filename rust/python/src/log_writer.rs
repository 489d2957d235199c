//! Writes the flight log: a file, a thread of its own, and the bound on both.
//!
//! The scheduler thread hands full buffers over and never waits for the disk. What the disk has not taken
//! is bounded ([`MAX_PENDING_BYTES`]), and so is the file. At either bound the recording ends with a
//! record that says so, and a warning: what is in the file is whole up to there, and never has a hole. A
//! log that lacks its beginning cannot be replayed, so it is the beginning that is kept.
//!
//! The file holds prompts and answers, so only its owner can read it. One that is there already is kept
//! beside it as `FILE.old`.

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

/// The scheduler thread's end.
pub struct LogWriter {
    full: Option<Sender<Vec<u8>>>,
    spare: Receiver<Vec<u8>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    limit_bytes: u64,
    handed_bytes: u64,
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
        let file = create_private(path)?;
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
            handed_bytes: 0,
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
        let pending = self.shared.pending_bytes.load(Ordering::Relaxed);
        let total = self.handed_bytes + num_bytes as u64;
        if self.shared.has_failed.load(Ordering::Relaxed) {
            engine.stop_recording("the disk failed");
            return;
        }
        if total > self.limit_bytes {
            let limit = self.limit_bytes;
            self.stop(
                engine,
                &format!("the log has its limit of {limit} bytes (record_limit)"),
            );
        } else if pending > MAX_PENDING_BYTES {
            self.stop(engine, &format!("the disk was {pending} bytes behind"));
        } else {
            let empty = self.spare.try_recv().unwrap_or_default();
            let buffer = recorder.take(empty);
            self.hand_over(buffer);
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
        self.handed_bytes += buffer.len() as u64;
        self.handed_at = Instant::now();
        let pending = &self.shared.pending_bytes;
        pending.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        if let Some(full) = &self.full {
            // A thread that has ended has said why.
            let _ = full.send(buffer);
        }
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

fn create_private(path: &Path) -> io::Result<File> {
    if path.is_file() {
        let mut old = path.as_os_str().to_owned();
        old.push(".old");
        fs::rename(path, old)?;
    }
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600).open(path)
}

/// The thread's life.
fn write_all(
    mut file: File,
    shared: &Shared,
    to_write: &Receiver<Vec<u8>>,
    written: &Sender<Vec<u8>>,
) {
    for buffer in to_write {
        if let Err(error) = file.write_all(&buffer) {
            shared.has_failed.store(true, Ordering::Relaxed);
            let path = shared.path.display();
            warn(format!(
                "{path}: recording has ended, the file cannot be written: {error}"
            ));
            return;
        }
        let length = buffer.len() as u64;
        shared.pending_bytes.fetch_sub(length, Ordering::Relaxed);
        let _ = written.send(buffer); // the scheduler may be gone
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
