//! A server of a test's own, for tests that crash it.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// A PostgreSQL server in a temporary folder, reached by its socket only. Dropping it stops it.
pub(crate) struct OwnServer {
    folder: tempfile::TempDir,
    binaries: PathBuf,
}

impl OwnServer {
    pub(crate) fn start() -> Self {
        let binaries = binaries();
        let folder = tempfile::Builder::new().prefix("carrick-pg").tempdir().unwrap();
        if is_root() {
            run(Command::new("chown").arg("postgres").arg(folder.path()));
        }
        let server = Self { folder, binaries };
        let data = server.data();
        run(server
            .tool("initdb")
            .args(["-A", "trust", "-U", "carrick", "-E", "UTF8", "-D"])
            .arg(&data));
        server.control(&["start"]);
        server
    }

    pub(crate) fn url(&self) -> String {
        let folder = self.folder.path().display().to_string().replace('/', "%2F");
        format!("postgres://carrick@{folder}/postgres")
    }

    /// Stops the server as a crash does, and starts it again: it recovers from its log.
    pub(crate) fn crash_and_restart(&self) {
        self.control(&["restart", "-m", "immediate"]);
    }

    fn control(&self, verb: &[&str]) {
        let socket = self.folder.path().display();
        let options = format!("-c listen_addresses='' -c unix_socket_directories='{socket}'");
        let log = self.folder.path().join("log");
        let mut tool = self.tool("pg_ctl");
        tool.args(verb).arg("-w").arg("-D").arg(self.data()).arg("-l").arg(log);
        run(tool.arg("-o").arg(options));
    }

    /// A tool of the server, as a user that it accepts: it refuses root.
    fn tool(&self, name: &str) -> Command {
        let path = self.binaries.join(name);
        let mut command = if is_root() {
            let mut command = Command::new("setpriv");
            command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]).arg(path);
            command
        } else {
            Command::new(path)
        };
        command.current_dir(self.folder.path());
        command
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        let data = self.data();
        let stop = self.tool("pg_ctl").args(["stop", "-m", "immediate", "-D"]).arg(data).output();
        if !matches!(&stop, Ok(output) if output.status.success()) {
            eprintln!("a test server may be left running: {stop:?}");
        }
    }
}

/// Where the newest server's programs are: Debian keeps them out of the path.
fn binaries() -> PathBuf {
    let installed = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = installed.map(|entry| entry.path().join("bin")).collect();
    folders.retain(|folder| folder.join("initdb").exists());
    folders.sort();
    let in_path = || {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).find(|folder| folder.join("initdb").exists())
    };
    folders.pop().or_else(in_path).expect("PostgreSQL's initdb is installed")
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(Path::new("/proc/self")).is_ok_and(|process| process.uid() == 0)
}

fn run(command: &mut Command) -> Output {
    // What a started server inherits must not keep this process' pipes open.
    let output = command
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    output
}
