//! Settings of a sandbox: keys in a recipe, limits, isolation.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::{Sandbox, SandboxError};
use rollflow_settings::declare::section;
use rollflow_settings::setting::{GIVEN, POSITIVE, SOME};

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
        let config = SandboxConfig::python(&self.python)?;
        let wall = Duration::try_from_secs_f64(self.timeout)?;
        let (memory, processes) = ((self.memory as u64) << 20, u32::try_from(self.processes).unwrap_or(u32::MAX));
        let limits = Limits { wall, cpu: wall, memory, processes, ..config.limits };
        let sandbox = Sandbox::new(SandboxConfig { limits, unsandboxed: self.unsandboxed, ..config })?;
        tracing::info!("Code runs isolated by {}", sandbox.isolation());
        Ok(sandbox)
    }
}

/// Resource limits of one run. A program beyond a limit is killed, or its request is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Wall-clock time of the program and all processes that it starts.
    pub wall: Duration,
    /// CPU time of each process, rounded up to whole seconds.
    pub cpu: Duration,
    /// Address space of each process, and memory of all processes together, in bytes.
    pub memory: u64,
    /// Most processes and threads at a time. Without namespaces none may be started.
    pub processes: u32,
    /// Largest file, in bytes.
    pub file_size: u64,
    /// Total size of all files, in bytes; they are in memory. Without namespaces no file may be
    /// written.
    pub disk: u64,
    /// Most bytes on both outputs together. More is cut off and ends the program.
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

/// Isolation of a program from the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Walls {
    /// Namespaces: a separate file system, process tree and network, in addition to
    /// [`Walls::Confined`] if the kernel has it.
    Namespaces,
    /// Landlock and a filter of system calls, for kernels and containers without namespaces. The
    /// program may neither write files nor start processes.
    Confined,
    /// Limits only.
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

/// Interpreter of untrusted code and settings of its sandbox.
#[derive(Clone, Debug)]
pub struct SandboxConfig {
    /// Full path of the interpreter.
    pub program: PathBuf,
    /// Arguments with which it exits immediately with 0, to check the sandbox.
    pub check: Vec<String>,
    /// Readable folders and files by their real paths, in addition to the system's libraries. The
    /// interpreter's own are among them, so extend the list.
    pub readable: Vec<PathBuf>,
    /// Folders of installed Python packages.
    pub packages: Vec<PathBuf>,
    /// Limits of a run, unless its job has its own.
    pub limits: Limits,
    /// Environment variables in addition to `PATH`, `HOME` and the like. None are inherited.
    pub environment: Vec<(String, String)>,
    /// Most concurrent programs. Default: the number of cores.
    pub concurrency: usize,
    /// Required isolation; if none, the strongest available.
    pub walls: Option<Walls>,
    /// If true, code may run without isolation on a machine that has none. It can then do everything
    /// that this process can.
    pub unsandboxed: bool,
}

impl SandboxConfig {
    /// Finds a Python interpreter by its path, or by a name in `PATH`. It reports its own folders, so
    /// that versions in a home folder and virtual environments work; nothing else there is readable.
    pub fn python(name: &str) -> Result<Self, SandboxError> {
        const ASK: &str = "import site, sys; places = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]; \
                           print(sys.executable, *places, *site.getsitepackages(), sep='\\n')";
        let asked = Command::new(name).args(["-I", "-c", ASK]).output();
        let asked = asked.map_err(|source| SandboxError::NoProgram { name: name.to_owned(), source })?;
        let answer = String::from_utf8_lossy(&asked.stdout).into_owned();
        let mut lines = answer.lines().map(PathBuf::from);
        match lines.next() {
            Some(path) if asked.status.success() && path.is_absolute() => {
                let mut readable: Vec<PathBuf> = lines.by_ref().take(4).chain(std::fs::canonicalize(&path)).collect();
                let packages = lines.filter(|packages| packages.is_dir()).collect();
                readable.extend(readable.clone().iter().filter_map(|path| std::fs::canonicalize(path).ok()));
                // A prefix of `/` means the system's folders, which are readable anyway.
                readable.retain(|path| path.parent().is_some());
                readable.sort();
                readable.dedup();
                Ok(SandboxConfig { readable, packages, ..SandboxConfig::program(path, &["-I", "-c", ""]) })
            }
            _ => {
                let answer = format!("{answer}{}", String::from_utf8_lossy(&asked.stderr));
                Err(SandboxError::NoPython { name: name.to_owned(), answer })
            }
        }
    }

    /// Takes any other program by its full path. With `check` as arguments it must exit immediately with 0.
    pub fn program(path: impl AsRef<Path>, check: &[&str]) -> Self {
        let program = path.as_ref().to_owned();
        SandboxConfig {
            readable: vec![program.clone()],
            packages: Vec::new(),
            program,
            check: check.iter().map(|&argument| argument.to_owned()).collect(),
            limits: Limits::default(),
            environment: Vec::new(),
            concurrency: std::thread::available_parallelism().map_or(1, usize::from),
            walls: None,
            unsandboxed: false,
        }
    }
}
