//! Log lines leave through a thread of their own, so that a reader that stands still (a full pipe, a
//! slow terminal) never holds up the work that logs.

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

use tracing_subscriber::fmt::MakeWriter;

/// Lines that may wait. At 200 bytes each they take less than 1 MiB, and they cover a stall of a
/// second at four thousand lines a second, which is more than anybody should log.
const WAITING: usize = 4_096;

enum Order {
    Line {
        text: Vec<u8>,
        /// Lines that were lost since the one before.
        lost_before: u64,
    },
    /// Answered once everything before it is written.
    Flush(SyncSender<()>),
}

/// Hands lines to the writing thread. Clones share it; it ends with the last of them.
#[derive(Clone, Debug)]
pub(super) struct LogWriter {
    orders: SyncSender<Order>,
    lost: Arc<AtomicU64>,
}

impl LogWriter {
    pub(super) fn start(out: impl Write + Send + 'static) -> io::Result<Self> {
        let (orders, queue) = sync_channel(WAITING);
        let lost = Arc::new(AtomicU64::new(0));
        thread::Builder::new().name("log".to_owned()).spawn(move || write(out, &queue))?;
        Ok(Self { orders, lost })
    }

    /// Waits until what was logged so far is written, at most `patience`; tells whether it is.
    pub(super) fn flush(&self, patience: Duration) -> bool {
        let (done, wait) = sync_channel(1);
        // A full queue means that the reader stands still: there is nothing to wait for.
        self.orders.try_send(Order::Flush(done)).is_ok() && wait.recv_timeout(patience).is_ok()
    }

    fn send(&self, text: Vec<u8>) {
        let lost_before = self.lost.swap(0, Ordering::Relaxed);
        if self.orders.try_send(Order::Line { text, lost_before }).is_err() {
            self.lost.fetch_add(lost_before + 1, Ordering::Relaxed);
            ::metrics::counter!("carrick_telemetry_log_lines_lost_total").increment(1);
        }
    }
}

fn write(mut out: impl Write, queue: &Receiver<Order>) {
    while let Ok(order) = queue.recv() {
        // A closed standard error is no reason to end, and there is nowhere to tell it.
        match order {
            Order::Line { text, lost_before } => {
                if lost_before > 0 {
                    _ = writeln!(
                        out,
                        "... {lost_before} log lines were lost: their reader stood still"
                    );
                }
                _ = out.write_all(&text);
            }
            Order::Flush(done) => {
                _ = out.flush();
                _ = done.try_send(());
            }
        }
    }
}

/// One line in the making; it is sent when dropped.
#[derive(Debug)]
pub(super) struct Line<'a> {
    writer: &'a LogWriter,
    text: Vec<u8>,
}

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        if !self.text.is_empty() {
            self.writer.send(std::mem::take(&mut self.text));
        }
    }
}

impl<'a> MakeWriter<'a> for LogWriter {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { writer: self, text: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use parking_lot::Mutex;

    use super::*;

    /// A reader that stands still until it is told to go on.
    struct Stuck {
        go: mpsc::Receiver<()>,
        seen: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for Stuck {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            _ = self.go.recv(); // an error means "from now on without waiting"
            self.seen.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_stands_still_costs_lines_and_says_so_but_never_holds_up_the_work() {
        let (go, wait) = mpsc::sync_channel(1);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let writer = LogWriter::start(Stuck { go: wait, seen: Arc::clone(&seen) }).unwrap();
        let sent = WAITING + 100;
        for n in 0..sent {
            writeln!(writer.make_writer(), "line {n}").unwrap();
        }
        assert!(seen.lock().is_empty(), "all lines were taken while the reader stood still");
        drop(go);
        while !writer.flush(Duration::from_secs(10)) {} // the queue is full at first
        writeln!(writer.make_writer(), "after").unwrap();
        assert!(writer.flush(Duration::from_secs(10)));
        let seen = String::from_utf8(seen.lock().clone()).unwrap();
        let numbers: Vec<usize> =
            seen.lines().filter_map(|line| line.strip_prefix("line ")?.parse().ok()).collect();
        let (before, rest) = seen.split_once("... ").unwrap();
        let lost: usize = rest.split_once(' ').unwrap().0.parse().unwrap();
        assert!(
            numbers.len() >= WAITING && numbers.iter().copied().eq(0..numbers.len()),
            "in order"
        );
        assert_eq!(lost, sent - numbers.len(), "every loss is told");
        assert_eq!(before.lines().count(), numbers.len(), "where it happened");
    }
}
