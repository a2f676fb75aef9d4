//! A server as a child process, with the operating system's own account of its CPU and memory.

use std::{
    fs,
    io::{BufRead, BufReader},
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, bail};

/// A child that is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl Server {
    /// Starts the hub on a store, and waits until it is ready.
    pub(crate) fn hub(store: &str) -> anyhow::Result<Self> {
        let binary = sibling("carrick")?;
        let address = free_address()?;
        let child = Command::new(&binary)
            .args(["up", "--listen", &address.to_string(), "--store", store])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {}", binary.display()))?;
        let mut server = Self { child, address };
        server.wait_ready()?;
        Ok(server)
    }

    /// Starts the bare server of this program.
    pub(crate) fn floor() -> anyhow::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("floor")
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the bare server")?;
        let mut line = String::new();
        let out = child.stdout.take().context("the child's output is a pipe")?;
        BufReader::new(out).read_line(&mut line)?;
        let address = line.trim().parse().context("the bare server prints its address")?;
        Ok(Self { child, address })
    }

    fn wait_ready(&mut self) -> anyhow::Result<()> {
        for _ in 0..200 {
            if let Some(status) = self.child.try_wait()? {
                bail!("the hub stopped at once: {status}");
            }
            if std::net::TcpStream::connect(self.address).is_ok() {
                return Ok(());
            }
            // Nothing tells a parent when its child listens; asking again is the way.
            std::thread::park_timeout(Duration::from_millis(25));
        }
        bail!("the hub did not listen on {} within 5 s", self.address)
    }

    /// CPU used so far, user and system, in seconds.
    pub(crate) fn cpu_seconds(&self) -> anyhow::Result<f64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        // The second field is a name in parentheses that may hold spaces.
        let rest = stat.rsplit_once(')').context("stat has a name in parentheses")?.1;
        let ticks: Vec<u64> =
            rest.split_whitespace().skip(11).take(2).map(str::parse).collect::<Result<_, _>>()?;
        // The kernel counts these in hundredths of a second on every Linux that we know.
        Ok(ticks.iter().sum::<u64>() as f64 / 100.0)
    }

    /// Resident memory in MiB.
    pub(crate) fn resident_mib(&self) -> anyhow::Result<f64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().nth(1)).context("no VmRSS")?;
        Ok(kib.parse::<f64>()? / 1024.0)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may be gone already, which is what we want.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_address() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

fn sibling(name: &str) -> anyhow::Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name(name);
    if !path.exists() {
        bail!("{} is not there: run `cargo build --release` first", path.display());
    }
    Ok(path)
}
