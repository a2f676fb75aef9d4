//! What the operating system says about this process, under the names that dashboards expect.

use std::fmt::Write as _;

/// Appends the process metrics. Where the system has no `/proc`, there are none.
pub(super) fn render(text: &mut String) {
    let mut put = |name: &str, kind: &str, help: &str, value: Option<f64>| {
        if let Some(value) = value {
            _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n");
        }
    };
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = |field| numbers(&status, field).next().map(|kib| kib * 1024.0);
    put("process_resident_memory_bytes", "gauge", "Resident memory.", kib("VmRSS:"));
    put("process_virtual_memory_bytes", "gauge", "Virtual memory.", kib("VmSize:"));
    put("process_threads", "gauge", "Threads.", numbers(&status, "Threads:").next());
    put(
        "process_cpu_seconds_total",
        "counter",
        "Processor time, in user and system mode.",
        cpu_seconds(),
    );
    // One of them is the listing itself.
    let fds =
        std::fs::read_dir("/proc/self/fd").ok().map(|fds| fds.count().saturating_sub(1) as f64);
    put("process_open_fds", "gauge", "Open file descriptors.", fds);
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    put(
        "process_max_fds",
        "gauge",
        "File descriptors that may be open.",
        numbers(&limits, "Max open files").next(),
    );
}

/// The numbers that follow `field` in its line.
fn numbers<'a>(text: &'a str, field: &str) -> impl Iterator<Item = f64> + use<'a> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap_or_default();
    line.split_ascii_whitespace().filter_map(|word| word.parse().ok())
}

/// From `/proc/self/schedstat` would be finer, but that counts the main thread alone.
fn cpu_seconds() -> Option<f64> {
    // The kernel reports ticks of 1/100 s to user space on every architecture that we know.
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name in parentheses may hold spaces and parentheses; the rest starts at the third field.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    let user: f64 = fields.next()?.parse().ok()?;
    let system: f64 = fields.next()?.parse().ok()?;
    Some((user + system) / TICKS_PER_SECOND)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_figures_are_of_this_process() {
        let mut text = String::new();
        render(&mut text);
        let value = |name: &str| numbers(&text, &format!("{name} ")).next().unwrap();
        assert!(value("process_resident_memory_bytes") > 1e6);
        assert!(value("process_threads") >= 1.0);
        assert!(value("process_open_fds") >= 3.0);
        assert!(value("process_max_fds") >= value("process_open_fds"));
        let before = value("process_cpu_seconds_total");
        let mut sum = 0_u64;
        while cpu_seconds().unwrap() < before + 0.03 {
            sum = (0..1_000_000_u64).fold(sum, u64::wrapping_add);
        }
        assert!(std::hint::black_box(sum) < u64::MAX);
    }
}
