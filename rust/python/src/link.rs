//! The link between an engine's process and its client's: one socket, one frame per iteration.
//!
//! A frame is its length (4 bytes, little endian) and a value of `postcard`. Four threads of Rust, none
//! of which ever attaches to Python, read and write: messages go to the engine, [`News`] come back. A
//! client that is gone has its requests aborted; a client whose engine is gone finds its outbox ended
//! and closed, so that every request and every call gets an error. Nobody waits for the other end to
//! read: what is said meanwhile merges in the outbox, or queues in the channel.

use std::io::{self, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use chairlift_core::config::{Limits, Settings};
use pyo3::PyResult;
use pyo3::exceptions::PyOSError;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::client::{Line, Post};
use crate::command::{Command, Message, Order};
use crate::delivery::{News, Outbox};
use crate::errors::config_error;

/// The first frame: what the engine is.
#[derive(Serialize, Deserialize)]
struct Hello {
    settings: Settings,
    eos_token_ids: Vec<u32>,
}

/// Why an engine without a farewell has ended.
const LOST: &str = "the engine is dead: its process has ended without a word";

/// A frame that says it is longer is noise.
const LONGEST_FRAME: usize = 1 << 30;

/// The socket behind a descriptor that the caller gives away.
fn socket(fd: RawFd) -> UnixStream {
    // SAFETY: the caller owns the descriptor and gives it away; it is used by nothing else.
    unsafe { UnixStream::from_raw_fd(fd) }
}

/// The engine's end: greets the client, then passes its messages on until it is gone. Blocks.
pub fn serve(
    fd: RawFd,
    settings: &Settings,
    eos_token_ids: &[u32],
    commands: &Sender<Command>,
    outbox: &Arc<Outbox>,
) -> io::Result<()> {
    let stream = socket(fd);
    let mut writer = Writer::new(stream.try_clone()?);
    writer.write(&Hello {
        settings: settings.clone(),
        eos_token_ids: eos_token_ids.to_vec(),
    })?;
    let teller = {
        let outbox = Arc::clone(outbox);
        spawn("chairlift-tell", move || tell(&mut writer, &outbox))?
    };
    let mut reader = Reader::new(stream);
    // An unreadable frame is the end as well: whoever sends such is no client.
    while let Ok(Some(message)) = reader.read::<Message>() {
        if commands.send(Command::Client(message)).is_err() {
            break;
        }
    }
    // The client is gone or wants no more; the engine ends, and says so to nobody.
    let _ = commands.send(Command::Client(Message::Tell(Order::Shutdown)));
    let _ = teller.join();
    Ok(())
}

/// Writes news until no more can come, or nobody reads them.
fn tell(writer: &mut Writer, outbox: &Outbox) {
    let mut end_is_told = false;
    loop {
        let news = outbox.next_news(end_is_told);
        end_is_told |= news.end_reason.is_some();
        let written = writer.write(&news);
        if let Some(delivery) = news.delivery {
            outbox.recycle(delivery);
        }
        if written.is_err() || news.is_closed {
            // The client reads to the end of what was written, then knows.
            let _ = writer.stream.shutdown(Shutdown::Write);
            return;
        }
    }
}

/// The client's end: waits for the greeting and starts both threads.
pub fn connect(fd: RawFd) -> PyResult<Line> {
    let stream = socket(fd);
    let mut reader = Reader::new(stream.try_clone()?);
    let Some(hello) = reader.read::<Hello>()? else {
        return Err(PyOSError::new_err(LOST));
    };
    let limits = hello.settings.validate();
    let limits: Arc<Limits> = Arc::new(limits.map_err(|error| config_error(&error))?);
    let outbox = Arc::new(Outbox::new()?);
    let (messages, to_write) = channel();
    let writer = Writer::new(stream);
    spawn("chairlift-ask", move || ask(writer, &to_write))?;
    let heard = Arc::clone(&outbox);
    spawn("chairlift-hear", move || hear(reader, &heard))?;
    Ok(Line::new(
        Post::Away(messages),
        outbox,
        limits,
        hello.eos_token_ids,
    ))
}

/// Writes messages until the client is dropped.
fn ask(mut writer: Writer, messages: &Receiver<Message>) {
    while let Ok(message) = messages.recv() {
        if writer.write(&message).is_err() {
            return; // the other thread has heard why
        }
    }
    let _ = writer.stream.shutdown(Shutdown::Write);
}

/// Puts news into the outbox until there are no more.
fn hear(mut reader: Reader, outbox: &Outbox) {
    while let Ok(Some(news)) = reader.read::<News>() {
        if let Some(mut delivery) = news.delivery {
            for (call, answer) in delivery.answers.drain(..) {
                outbox.answer(call, answer);
            }
            outbox.publish(&mut delivery);
        }
        if let Some(reason) = news.end_reason {
            outbox.end(&reason);
        }
    }
    let _ = reader.stream.get_ref().shutdown(Shutdown::Both);
    outbox.close(LOST); // unless it has said why
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<thread::JoinHandle<()>> {
    thread::Builder::new().name(name.to_owned()).spawn(run)
}

struct Writer {
    stream: UnixStream,
    buffer: Vec<u8>,
}

impl Writer {
    fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            buffer: Vec::new(),
        }
    }

    /// Writes a frame.
    fn write(&mut self, value: &impl Serialize) -> io::Result<()> {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        buffer.extend([0; 4]);
        let mut buffer = postcard::to_extend(value, buffer).map_err(io::Error::other)?;
        let length = (buffer.len() - 4) as u32;
        buffer[..4].copy_from_slice(&length.to_le_bytes());
        self.stream.write_all(&buffer)?;
        self.buffer = buffer;
        Ok(())
    }
}

struct Reader {
    stream: BufReader<UnixStream>,
    buffer: Vec<u8>,
}

impl Reader {
    fn new(stream: UnixStream) -> Self {
        Self {
            stream: BufReader::with_capacity(1 << 16, stream),
            buffer: Vec::new(),
        }
    }

    /// Reads a frame; `None` at the end.
    fn read<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let mut length = [0; 4];
        match self.stream.read_exact(&mut length) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        let length = u32::from_le_bytes(length) as usize;
        if length > LONGEST_FRAME {
            return Err(io::Error::other("a frame is longer than any can be"));
        }
        self.buffer.resize(length, 0);
        self.stream.read_exact(&mut self.buffer)?;
        postcard::from_bytes(&self.buffer)
            .map(Some)
            .map_err(io::Error::other)
    }
}
