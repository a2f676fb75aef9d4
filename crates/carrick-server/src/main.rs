//! The `carrick` binary.

fn main() -> std::process::ExitCode {
    carrick_server::cli::main()
}
