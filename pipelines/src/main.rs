//! The command `rollflow`, with no parts but the library's.

use std::process::ExitCode;

use rollflow_pipelines::{Registry, command};

fn main() -> ExitCode {
    command(Registry::default())
}
