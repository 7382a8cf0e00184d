//! Settings of a sandbox: keys in a recipe, limits, isolation.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::{Program, ProgramError, Sandbox, SandboxError};
use crate::settings::declare::section;
use crate::settings::setting::{GIVEN, POSITIVE, SOME};

section! {
    /// Python in a sandbox, with tests.
    pub struct SandboxRule {
        /// Field of the task's records with the tests.
        tests: String = "tests".to_owned(), GIVEN;
        /// Interpreter: a path, or a name that is searched in `PATH`.
        python: String = "python3".to_owned(), GIVEN;
        /// Time limit of a program, in seconds.
        timeout: f64 = 10.0, POSITIVE;
        /// Memory limit of a program, in MiB.
        memory: usize = 512, SOME;
        /// Most processes and threads of a program.
        processes: usize = 16, SOME;
        /// If true, code may run without a sandbox on a machine that has none. It can then do
        /// everything that this run can.
        unsandboxed: bool = false;
    }
}

impl SandboxRule {
    /// Sets up the sandbox and runs a check in it.
    ///
    /// # Errors
    /// If the interpreter is missing, or the machine has no sandbox and `unsandboxed` is false.
    pub fn sandbox(&self) -> Result<Sandbox, SandboxError> {
        let config = SandboxConfig::new(Program::python(&self.python)?);
        let wall = Duration::try_from_secs_f64(self.timeout)?;
        let (memory, processes) = ((self.memory as u64) << 20, u32::try_from(self.processes).unwrap_or(u32::MAX));
        let limits = Limits { wall, cpu: wall, memory, processes, ..config.limits };
        let sandbox = Sandbox::new(SandboxConfig { limits, unsandboxed: self.unsandboxed, ..config })?;
        tracing::info!("Code runs behind {}", sandbox.isolation());
        Ok(sandbox)
    }
}

/// What one run may use. Whoever goes beyond it is ended, or refused what he asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Time by the clock, for the program and all that it starts.
    pub wall: Duration,
    /// Processor time of each process; counted in whole seconds, rounded up.
    pub cpu: Duration,
    /// Address space of each process, and memory of all together, in bytes.
    pub memory: u64,
    /// Processes and threads at the same time. Without namespaces none may be started at all.
    pub processes: u32,
    /// Bytes of a file.
    pub file_size: u64,
    /// Bytes of all its files together, which are kept in memory. Without namespaces nothing may be written at all.
    pub disk: u64,
    /// Bytes that it may print, to both outputs together. More is cut off, and ends it.
    pub output: u64,
}

impl Default for Limits {
    /// Ten seconds, 512 MiB, 16 processes, 16 MiB of files, 64 KiB of output.
    fn default() -> Self {
        const MIB: u64 = 1 << 20;
        let time = Duration::from_secs(10);
        Limits { wall: time, cpu: time, memory: 512 * MIB, processes: 16, file_size: 16 * MIB, disk: 16 * MIB, output: 64 << 10 }
    }
}

/// What stands between a program and the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Walls {
    /// Namespaces: a file system, processes and a network of its own; and all that [`Walls::Confined`] has, where the kernel has it.
    Namespaces,
    /// Landlock and a filter of system calls, for kernels and containers that allow no namespaces: the same is kept out, but the program may
    /// neither write files nor start processes.
    Confined,
    /// Limits alone.
    None,
}

impl fmt::Display for Walls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Walls::Namespaces => "namespaces",
            Walls::Confined => "Landlock and seccomp",
            Walls::None => "no walls",
        })
    }
}

/// How programs are run.
#[derive(Clone, Debug)]
pub struct SandboxConfig {
    /// What runs the code.
    pub program: Program,
    /// What a run may use, unless its job says otherwise.
    pub limits: Limits,
    /// What else programs may read: folders and files, by their real paths.
    pub readable: Vec<PathBuf>,
    /// Variables of their environment, beside `PATH`, `HOME` and the like. Nothing is taken over from this process.
    pub environment: Vec<(String, String)>,
    /// Most that run at the same time.
    pub concurrency: usize,
    /// These walls and no others; otherwise the strongest that can be had.
    pub walls: Option<Walls>,
    /// Whether code may be run without walls where none can be had. It could then do whatever this process can.
    pub unsandboxed: bool,
}

impl SandboxConfig {
    /// For the `python3` that is found first. Fails when there is none.
    pub fn python() -> Result<Self, ProgramError> {
        Ok(SandboxConfig::new(Program::python("python3")?))
    }

    /// For another program.
    pub fn new(program: Program) -> Self {
        SandboxConfig {
            program,
            limits: Limits::default(),
            readable: Vec::new(),
            environment: Vec::new(),
            concurrency: std::thread::available_parallelism().map_or(1, usize::from),
            walls: None,
            unsandboxed: false,
        }
    }
}
