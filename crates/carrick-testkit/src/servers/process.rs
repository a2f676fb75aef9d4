//! Child processes that a test starts, waits for and kills.

use std::{
    collections::VecDeque,
    io,
    process::{ExitStatus, Stdio},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    net::TcpStream,
    process::{Child, Command},
    sync::Notify,
    task::JoinHandle,
    time::{Instant, timeout_at},
};

/// Lines of output that are kept: what a failed test wants to see, without holding the chatter of a
/// long campaign.
const KEPT_LINES: usize = 10_000;

/// How to tell that a child is ready.
#[derive(Clone, Debug)]
pub enum Ready {
    /// As soon as it runs.
    AtOnce,
    /// When a line of its output contains this.
    Line(String),
    /// When something listens at this address.
    Listens(String),
}

/// Why a child did not become ready. Its last lines of output are part of the message.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The program cannot be started.
    #[error("{program} cannot be started")]
    Start {
        /// The program.
        program: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It ended before it was ready.
    #[error("{program} ended with {status} before it was ready; its output:\n{output}")]
    Ended {
        /// The program.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// Its last lines.
        output: String,
    },
    /// It runs, but is not ready in time.
    #[error("{program} was not ready after {patience:?}; its output:\n{output}")]
    NotReady {
        /// The program.
        program: String,
        /// How long was waited.
        patience: Duration,
        /// Its last lines.
        output: String,
    },
}

/// How a child ended, and what it had said.
#[derive(Clone, Debug)]
pub struct Exited {
    /// Its exit status.
    pub status: ExitStatus,
    /// Its last lines of output.
    pub output: String,
}

/// A running child; it is killed when dropped.
#[derive(Debug)]
pub struct ChildProcess {
    child: Child,
    output: Arc<Output>,
    /// One for each of the two streams.
    readers: [JoinHandle<()>; 2],
}

#[derive(Debug, Default)]
struct Output {
    lines: Mutex<VecDeque<String>>,
    grown: Notify,
}

impl ChildProcess {
    /// Starts a program and waits until it is ready, at most `patience`.
    ///
    /// # Errors
    /// [`SpawnError`], with what the program had said.
    ///
    /// # Cancel safety
    /// The child is killed.
    pub async fn spawn(
        mut command: Command,
        ready: Ready,
        patience: Duration,
    ) -> Result<Self, SpawnError> {
        let program = command.as_std().get_program().to_string_lossy().into_owned();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|source| SpawnError::Start { program: program.clone(), source })?;
        let output = Arc::<Output>::default();
        let stdout = child.stdout.take().expect("stdout is piped");
        let stderr = child.stderr.take().expect("stderr is piped");
        let readers = [
            tokio::spawn(keep(stdout, Arc::clone(&output))),
            tokio::spawn(keep(stderr, Arc::clone(&output))),
        ];
        let mut this = Self { child, output, readers };

        let deadline = Instant::now() + patience;
        let output = Arc::clone(&this.output);
        let is_ready = timeout_at(deadline, output.wait(&ready));
        tokio::select! {
            biased;
            found = is_ready => match found {
                Ok(()) => Ok(this),
                Err(_) => Err(SpawnError::NotReady { program, patience, output: this.output() }),
            },
            status = this.child.wait() => {
                let status = status.map_err(|source| SpawnError::Start {
                    program: program.clone(),
                    source,
                })?;
                this.read_to_end().await;
                Err(SpawnError::Ended { program, status, output: this.output() })
            }
        }
    }

    /// The process id.
    ///
    /// # Panics
    /// If the child has ended and was waited for.
    pub fn id(&self) -> u32 {
        self.child.id().expect("the child was not waited for")
    }

    /// Waits until a line of the output, past or future, contains `text`; at most `patience`. Returns
    /// that line.
    ///
    /// # Cancel safety
    /// Safe to drop.
    pub async fn wait_for_line(&self, text: &str, patience: Duration) -> Option<String> {
        tokio::time::timeout(patience, self.output.line(text)).await.ok()
    }

    /// What the child said, as far as it is kept.
    pub fn output(&self) -> String {
        self.output.text()
    }

    /// Kills it at once, as `kill -9`, and waits until it is gone.
    ///
    /// # Errors
    /// The system refuses.
    ///
    /// # Cancel safety
    /// It is killed; dropping only leaves it unwaited for.
    pub async fn kill_9(mut self) -> io::Result<Exited> {
        self.child.start_kill()?;
        self.ended().await
    }

    /// Sends a signal, such as `TERM`.
    ///
    /// # Errors
    /// `kill` is not there, or says no.
    pub async fn signal(&self, signal: &str) -> io::Result<()> {
        // Through the program: the workspace forbids the unsafe call.
        let status = Command::new("kill")
            .arg(format!("-{signal}"))
            .arg(self.id().to_string())
            .status()
            .await?;
        if status.success() { Ok(()) } else { Err(io::Error::other(format!("kill: {status}"))) }
    }

    /// Waits until it ends, at most `patience`.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] if it does not; it is killed then.
    ///
    /// # Cancel safety
    /// The child is killed.
    pub async fn exited(mut self, patience: Duration) -> io::Result<Exited> {
        match tokio::time::timeout(patience, self.ended()).await {
            Ok(ended) => ended,
            Err(_) => {
                let text = format!("still running; its output:\n{}", self.output());
                Err(io::Error::new(io::ErrorKind::TimedOut, text))
            }
        }
    }

    async fn ended(&mut self) -> io::Result<Exited> {
        let status = self.child.wait().await?;
        self.read_to_end().await;
        Ok(Exited { status, output: self.output() })
    }

    /// Waits for the last lines. A grandchild may hold the pipe open, so not for ever.
    async fn read_to_end(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(1);
        for reader in &mut self.readers {
            _ = timeout_at(deadline, reader).await;
        }
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.readers.iter().for_each(JoinHandle::abort);
    }
}

impl Output {
    async fn wait(&self, ready: &Ready) {
        match ready {
            Ready::AtOnce => {}
            Ready::Line(text) => _ = self.line(text).await,
            Ready::Listens(address) => {
                while TcpStream::connect(address).await.is_err() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        }
    }

    async fn line(&self, text: &str) -> String {
        loop {
            let grown = self.grown.notified();
            let found = self.lines.lock().iter().find(|line| line.contains(text)).cloned();
            match found {
                Some(line) => return line,
                None => grown.await,
            }
        }
    }

    fn text(&self) -> String {
        self.lines.lock().iter().flat_map(|line| [line.as_str(), "\n"]).collect()
    }
}

async fn keep(stream: impl AsyncRead + Unpin, output: Arc<Output>) {
    let mut stream = BufReader::new(stream);
    let mut line = Vec::new();
    // What is not UTF-8 is shown as well as it goes; an unreadable stream ends like a closed one.
    while matches!(stream.read_until(b'\n', &mut line).await, Ok(1..)) {
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        line.clear();
        let mut lines = output.lines.lock();
        if lines.len() == KEPT_LINES {
            lines.pop_front();
        }
        lines.push_back(text);
        drop(lines);
        output.grown.notify_waiters();
    }
}
