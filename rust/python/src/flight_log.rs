//! A flight log for Python: replayed, explained, measured, simulated.
//!
//! `chairlift.flight_log` is the only caller. Results go over as JSON text: they are small, and read by
//! people. Everything runs without the GIL and comes back for it ten times a second, to see whether it was
//! interrupted and to report how far it is.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use chairlift_core::config::Settings;
use chairlift_core::record::{
    Decoder, Entry, Header, Measures, Mismatch, Replayer, Storyteller, read_header,
    recorded_workload,
};
use chairlift_core::request::RequestId;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::Serialize;

use crate::engine::read_settings;
use crate::errors::{config_error, setup_error};
use crate::log_writer::{segment_path, segments_beside};
use crate::simulate;

/// How often a replay comes back for the GIL.
const REPORT_EVERY: Duration = Duration::from_millis(100);
/// Records between two looks at the clock.
const LOOK_EVERY: u64 = 256;
/// Bytes that are read at once.
const CHUNK_BYTES: usize = 1 << 20;

/// A log on disk.
#[pyclass(frozen, module = "chairlift._core")]
pub struct FlightLog {
    path: PathBuf,
    header: Header,
}

/// How a replay went.
#[derive(Default, Serialize)]
struct Report {
    steps: u64,
    records: u64,
    /// Bytes that were read, and bytes at the end that are no whole record.
    bytes: u64,
    cut_off_bytes: u64,
    /// The engine's clock at the last record.
    end_s: f64,
    /// Why the recording ended before the engine did.
    stopped: Option<String>,
    /// Segments of the log behind a gap: what lay between was let go.
    later_segments: Vec<u32>,
    mismatch: Option<Difference>,
    message: Option<String>,
}

#[derive(Serialize)]
struct Difference {
    step: u64,
    at_s: f64,
    call: &'static str,
    field: &'static str,
    logged: String,
    replayed: String,
}

impl From<&Mismatch> for Difference {
    fn from(mismatch: &Mismatch) -> Self {
        Self {
            step: mismatch.step,
            at_s: mismatch.now.0 as f64 / 1e6,
            call: mismatch.call,
            field: mismatch.field,
            logged: mismatch.logged.clone(),
            replayed: mismatch.replayed.clone(),
        }
    }
}

#[pymethods]
impl FlightLog {
    /// Reads the header.
    #[new]
    fn new(path: PathBuf) -> PyResult<Self> {
        let header = Stream::open(&path)?.0;
        Ok(Self { path, header })
    }

    /// Version of the package that wrote it.
    #[getter]
    fn package(&self) -> &str {
        &self.header.package
    }

    /// What `chairlift.engine` wrote about the engine.
    #[getter]
    fn about(&self) -> &str {
        &self.header.about
    }

    /// Replays all of it, on other settings if some are given; how it went, as JSON. `progress` is called
    /// with steps and the share of the file that was read.
    #[pyo3(signature = (settings = None, progress = None))]
    fn replay(
        &self,
        py: Python<'_>,
        settings: Option<&Bound<'_, PyAny>>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<String> {
        let settings = settings.map(read_settings).transpose()?;
        let report = py.detach(|| self.run(settings.as_ref(), progress, |_, _, _| true))?;
        json(&report)
    }

    /// The story of one request, as JSON: `story` is null if the log does not have it.
    #[pyo3(signature = (request, progress = None))]
    fn explain(
        &self,
        py: Python<'_>,
        request: u64,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<String> {
        let mut teller = Storyteller::new(RequestId(request));
        let (report, is_heard) = py.detach(|| self.tell(&mut teller, progress))?;
        let (num_requests, examples) = teller.requests();
        json(&serde_json::json!({
            "report": report,
            "is_heard": is_heard,
            "num_requests": num_requests,
            "examples": examples,
            "story": teller.finish(),
        }))
    }

    /// Replays all of it and keeps what it measured.
    #[pyo3(signature = (progress = None))]
    fn measure(&self, py: Python<'_>, progress: Option<Py<PyAny>>) -> PyResult<RecordedRun> {
        let mut measures = Measures::default();
        let report = py.detach(|| {
            self.run(None, progress, |decoder, entry, replayer| {
                measures.observe(decoder.now(), entry, replayer);
                true
            })
        })?;
        Ok(RecordedRun {
            measures,
            report: json(&report)?,
        })
    }
}

impl FlightLog {
    /// Replays what can be; what cannot is only heard. Beside the report: whether the story is such.
    fn tell(
        &self,
        teller: &mut Storyteller,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<(Report, bool)> {
        if self.header.segment > 0 {
            hear(&self.path, teller)?;
            return Ok((Report::default(), true));
        }
        let report = self.run(None, progress, |decoder, entry, replayer| {
            teller.observe(decoder.now(), entry, replayer);
            !teller.is_over()
        })?;
        let (first, is_heard) = (report.later_segments.first(), !teller.is_over());
        let Some(&first) = first.filter(|_| is_heard) else {
            return Ok((report, false));
        };
        hear(&segment_path(&self.path, first), teller)?;
        Ok((report, true))
    }

    /// Replays until the end, a mismatch, or `observe`, which sees every record, says that it is enough.
    fn run(
        &self,
        settings: Option<&Settings>,
        progress: Option<Py<PyAny>>,
        mut observe: impl FnMut(&Decoder, &Entry, &Replayer) -> bool,
    ) -> PyResult<Report> {
        let (header, mut stream) = Stream::open(&self.path)?;
        if header.segment > 0 {
            let message = format!(
                "{} is segment {} of a log: it begins in the middle of a run, and only what begins with \
                 the engine can be replayed; give the log's first file (chairlift explain reads this one, \
                 too)",
                self.path.display(),
                header.segment
            );
            return Err(setup_error(&message, "log_segment"));
        }
        let replayer = Replayer::new(&header, settings);
        let mut replayer =
            replayer.map_err(|error| setup_error(&error.to_string(), "invalid_config"))?;
        let mut watch = Watch::new(progress);
        let mut report = Report::default();
        while let Some(entry) = stream.next()? {
            if let Entry::Stopped { why } = &entry {
                report.stopped = Some(why.clone());
            }
            if let Err(mismatch) = replayer.apply(stream.decoder.now(), &entry) {
                report.mismatch = Some(Difference::from(&*mismatch));
                report.message = Some(mismatch.to_string());
                break;
            }
            if !observe(&stream.decoder, &entry, &replayer) {
                break;
            }
            watch.look(&replayer, &stream)?;
        }
        report.steps = replayer.steps();
        report.records = replayer.records();
        report.bytes = stream.read_bytes - stream.rest().len() as u64;
        report.end_s = stream.decoder.now().0 as f64 / 1e6;
        let mut later = segments_beside(&self.path);
        later.retain(|&segment| segment > stream.segment);
        report.later_segments = later;
        if stream.is_at_end {
            report.cut_off_bytes = stream.rest().len() as u64;
        }
        Ok(report)
    }
}

/// Reads a segment, and those that follow it, without an engine.
fn hear(path: &Path, teller: &mut Storyteller) -> PyResult<()> {
    let (header, mut stream) = Stream::open(path)?;
    while let Some(entry) = stream.next()? {
        let classes = &header.settings.policy.classes;
        teller.hear(stream.decoder.now(), &entry, classes);
    }
    Ok(())
}

/// What a recorded run was asked for and what it measured.
#[pyclass(frozen, module = "chairlift._core")]
pub struct RecordedRun {
    measures: Measures,
    report: String,
}

#[pymethods]
impl RecordedRun {
    /// How its replay went, as JSON.
    #[getter]
    fn report(&self) -> &str {
        &self.report
    }

    /// Its requests, steps and reloads, as JSON.
    fn measures(&self) -> PyResult<String> {
        let Measures {
            requests,
            steps,
            reloads,
            ..
        } = &self.measures;
        json(&serde_json::json!({ "requests": requests, "steps": steps, "reloads": reloads }))
    }

    /// Simulates its requests under other settings; as `simulate()`, with `num_guessed`, the answers whose
    /// length was guessed.
    #[pyo3(signature = (settings, profile, options, progress = None))]
    fn simulate<'py>(
        &self,
        settings: &Bound<'py, PyAny>,
        profile: &Bound<'py, PyAny>,
        options: &Bound<'py, PyAny>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let core_settings = read_settings(settings)?;
        core_settings
            .validate()
            .map_err(|error| config_error(&error))?;
        let (workload, num_guessed) = recorded_workload(&self.measures, &core_settings);
        let result = simulate::run(settings, profile, workload, options, progress)?;
        result.set_item("num_guessed", num_guessed)?;
        Ok(result)
    }
}

/// A log, read record by record.
struct Stream {
    file: File,
    length: u64,
    read_bytes: u64,
    buffer: Vec<u8>,
    begin: usize,
    is_at_end: bool,
    decoder: Decoder,
    /// The file that is read now, that of segment 0, and which segment that is.
    path: PathBuf,
    first: PathBuf,
    segment: u32,
}

impl Stream {
    fn open(path: &Path) -> PyResult<(Header, Self)> {
        let told = |error: std::io::Error| {
            let path = path.display();
            setup_error(&format!("{path} cannot be read: {error}"), "no_log")
        };
        let file = File::open(path).map_err(told)?;
        let length = file.metadata().map_err(told)?.len();
        let mut stream = Self {
            file,
            length,
            read_bytes: 0,
            buffer: Vec::new(),
            begin: 0,
            is_at_end: false,
            decoder: Decoder::default(),
            path: path.to_owned(),
            first: path.to_owned(),
            segment: 0,
        };
        loop {
            let header = read_header(stream.rest()).map_err(|error| stream.error(&error))?;
            if let Some((header, length)) = header {
                stream.begin += length;
                stream.decoder = Decoder::after(&header);
                stream.segment = header.segment;
                if let Some(first) = first_path(path, header.segment) {
                    stream.first = first;
                }
                return Ok((header, stream));
            }
            if stream.is_at_end {
                let error = chairlift_core::record::LogError::NoHeader;
                return Err(stream.error(&error));
            }
            stream.fill()?;
        }
    }

    /// What was read and not used.
    fn rest(&self) -> &[u8] {
        &self.buffer[self.begin..]
    }

    fn error(&self, error: &chairlift_core::record::LogError) -> PyErr {
        let message = format!("{}: {error}", self.path.display());
        setup_error(&message, error.code())
    }

    fn fill(&mut self) -> PyResult<()> {
        self.buffer.drain(..self.begin);
        self.begin = 0;
        let mut chunk = (&mut self.file).take(CHUNK_BYTES as u64);
        let read = chunk.read_to_end(&mut self.buffer)?;
        self.read_bytes += read as u64;
        self.is_at_end = read == 0;
        Ok(())
    }

    fn next(&mut self) -> PyResult<Option<Entry>> {
        loop {
            let decoded = self.decoder.decode(&self.buffer[self.begin..]);
            if let Some((entry, length)) = decoded.map_err(|error| self.error(&error))? {
                self.begin += length;
                return Ok(Some(entry));
            }
            if self.is_at_end && !self.go_on()? {
                return Ok(None);
            }
            self.fill()?;
        }
    }

    /// Opens the next segment, if this one ends whole and that one is there.
    fn go_on(&mut self) -> PyResult<bool> {
        let next = segment_path(&self.first, self.segment + 1);
        if !self.rest().is_empty() || !next.is_file() {
            return Ok(false);
        }
        let (header, mut stream) = Self::open(&next)?;
        if header.segment != self.segment + 1 || header.base != self.decoder.now() {
            return Ok(false);
        }
        stream.read_bytes += self.read_bytes;
        stream.length += self.length;
        *self = stream;
        Ok(true)
    }
}

/// The path of a log whose segment lies at `path`.
fn first_path(path: &Path, segment: u32) -> Option<PathBuf> {
    let suffix = if segment > 0 {
        format!(".{segment}")
    } else {
        String::new()
    };
    path.to_str()?.strip_suffix(&suffix).map(PathBuf::from)
}

/// Comes back for the GIL now and then.
struct Watch {
    progress: Option<Py<PyAny>>,
    looks: u64,
    next: Instant,
}

impl Watch {
    fn new(progress: Option<Py<PyAny>>) -> Self {
        let next = Instant::now() + REPORT_EVERY;
        Self {
            progress,
            looks: 0,
            next,
        }
    }

    fn look(&mut self, replayer: &Replayer, stream: &Stream) -> PyResult<()> {
        self.looks += 1;
        if !self.looks.is_multiple_of(LOOK_EVERY) || Instant::now() < self.next {
            return Ok(());
        }
        self.next = Instant::now() + REPORT_EVERY;
        let used = stream.read_bytes - stream.rest().len() as u64;
        let share = used as f64 / stream.length.max(1) as f64;
        Python::attach(|py| {
            py.check_signals()?;
            match &self.progress {
                None => Ok(()),
                Some(progress) => progress.call1(py, (replayer.steps(), share)).map(drop),
            }
        })
    }
}

/// JSON text of a value.
pub fn json(value: &impl Serialize) -> PyResult<String> {
    let text = serde_json::to_string(value);
    text.map_err(|error| pyo3::exceptions::PyRuntimeError::new_err(error.to_string()))
}
