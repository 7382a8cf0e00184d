//! One run of the warden: its input and its output.

use std::fmt;
use std::fs::Permissions;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use super::warden::warden;
use super::{Limits, SandboxConfig, SandboxError, Walls};

/// Readable paths of the system, if they exist.
const SYSTEM: [&str; 6] = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives"];
/// Extra time of the warden beyond the limit.
const GRACE: Duration = Duration::from_secs(30);
const SIGXCPU: i32 = 24;
const SIGKILL: i32 = 9;

/// One run of the program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// Arguments of the program.
    pub arguments: Vec<String>,
    /// Files in its working folder, by name. Without namespaces they are read-only.
    pub files: Vec<(String, Vec<u8>)>,
    /// Standard input.
    pub stdin: Vec<u8>,
    /// Limits of this run; if none, those of the sandbox.
    pub limits: Option<Limits>,
}

impl Job {
    /// Runs the program with these arguments.
    pub fn new(arguments: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Job { arguments: arguments.into_iter().map(Into::into).collect(), ..Job::default() }
    }

    /// Runs Python code from a file `main.py`, without the user's packages and variables.
    pub fn python(code: impl Into<Vec<u8>>) -> Self {
        Job::new(["-I", "-B", "main.py"]).file("main.py", code)
    }

    /// Runs Python code without the startup code of installed packages, which starts about five times
    /// faster where many are installed.
    pub fn quick_python(code: impl Into<Vec<u8>>) -> Self {
        const LAUNCH: &str = "import builtins, sys; builtins.exit = builtins.quit = sys.exit; sys.argv = ['main.py']; \
                              exec(compile(open('main.py', 'rb').read(), 'main.py', 'exec'))";
        Job::new(["-s", "-S", "-B", "-c", LAUNCH]).file("main.py", code)
    }

    /// Adds a file.
    pub fn file(mut self, name: impl Into<String>, content: impl Into<Vec<u8>>) -> Self {
        self.files.push((name.into(), content.into()));
        self
    }

    /// Sets the standard input.
    pub fn stdin(self, stdin: impl Into<Vec<u8>>) -> Self {
        Job { stdin: stdin.into(), ..self }
    }

    /// Sets the limits.
    pub fn limits(self, limits: Limits) -> Self {
        Job { limits: Some(limits), ..self }
    }
}

/// End of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The program exited with this code.
    Exited(i32),
    /// A signal of this number killed the program.
    Signaled(i32),
    /// The program exceeded its wall-clock or CPU time and was killed.
    Overdue,
    /// The processes together exceeded the memory limit and were killed. A single process beyond the
    /// limit has its allocation denied.
    OutOfMemory,
    /// The program exceeded the output limit and was killed.
    TooMuchOutput,
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ran {
    /// End of the program.
    pub ended: Ended,
    /// Standard output, up to the limit.
    pub stdout: Vec<u8>,
    /// Standard error, up to the limit.
    pub stderr: Vec<u8>,
    /// CPU time of the processes that exited.
    pub cpu: Duration,
    /// Peak memory of one of these processes, in bytes.
    pub peak_memory: u64,
}

impl Ran {
    /// Returns true if the program exited with 0.
    pub fn succeeded(&self) -> bool {
        self.ended == Ended::Exited(0)
    }

    /// Returns standard output as text; invalid bytes are replaced.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Returns standard error as text; invalid bytes are replaced.
    pub fn complaint(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ended::Exited(code) => write!(f, "exited with {code}"),
            Ended::Signaled(signal) => write!(f, "was ended by signal {signal}"),
            Ended::Overdue => f.write_str("was ended: its time was up"),
            Ended::OutOfMemory => f.write_str("was ended: it used too much memory"),
            Ended::TooMuchOutput => f.write_str("was ended: it printed too much"),
        }
    }
}

impl fmt::Display for Ran {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.ended)?;
        match self.complaint().trim().lines().last() {
            // A program chooses how long it is.
            Some(line) => write!(f, ": {line:.200}"),
            None => Ok(()),
        }
    }
}

/// A started program and the socket to its warden. Dropping it kills both, with all processes that
/// the program started.
pub(super) struct Started {
    pub(super) wire: UnixStream,
    warden: Child,
    folder: Option<TempDir>,
}

impl Drop for Started {
    fn drop(&mut self) {
        self.warden.kill().unwrap_or_default();
        drop(self.warden.wait());
        if let Some(folder) = self.folder.take() {
            let path = folder.path().to_owned();
            if let Err(error) = folder.close() {
                tracing::warn!("{} was not deleted: {error}", path.display());
            }
        }
    }
}

/// Runs a job to its end. Returns its result and the active layers.
pub(super) fn run(config: &SandboxConfig, walls: Walls, job: &Job) -> Result<(Ran, Vec<String>), SandboxError> {
    let limits = job.limits.unwrap_or(config.limits);
    let started = start(config, walls, job, false)?;
    let mut heard = Heard::new(limits);
    loop {
        if let Some(ran) = heard.frame(&started.wire)? {
            return Ok((ran, heard.layers));
        }
    }
}

/// Starts a program. If `streamed`, its input is what is written to the socket afterwards.
pub(super) fn start(config: &SandboxConfig, walls: Walls, job: &Job, streamed: bool) -> Result<Started, SandboxError> {
    if let Some((name, _)) =
        job.files.iter().find(|(name, _)| name.is_empty() || name.contains(['/', '\0']) || name.starts_with('.'))
    {
        return Err(SandboxError::FileName(name.clone()));
    }
    let limits = job.limits.unwrap_or(config.limits);
    // With namespaces the folder exists inside the sandbox only.
    let folder = if walls == Walls::Namespaces { None } else { Some(work_folder().map_err(SandboxError::Start)?) };
    let (wire, theirs) = UnixStream::pair().map_err(SandboxError::Start)?;
    let mut spawned = warden().map_err(SandboxError::Start)?;
    spawned.command.env_clear().stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).stderr(Stdio::null());
    let warden = spawned.command.spawn().map_err(SandboxError::Start)?;
    // Closes this process's copy of the other end of the socket.
    drop(spawned);
    let started = Started { wire, warden, folder };
    let mut wire = &started.wire;
    let told = tell(config, walls, job, streamed, started.folder.as_ref()).and_then(|message| wire.write_all(&message));
    told.and_then(|()| wire.set_read_timeout(Some(limits.wall.saturating_add(GRACE))))
        .map_err(|error| SandboxError::Broken(error.to_string()))?;
    Ok(started)
}

/// Makes the folder of one run, which other users may read.
fn work_folder() -> io::Result<TempDir> {
    tempfile::Builder::new().prefix("rollflow-").permissions(Permissions::from_mode(0o755)).tempdir()
}

/// Writes the records that the warden reads.
fn tell(config: &SandboxConfig, walls: Walls, job: &Job, streamed: bool, folder: Option<&TempDir>) -> io::Result<Vec<u8>> {
    let limits = job.limits.unwrap_or(config.limits);
    let mut message = Vec::new();
    let mut record = |tag: u8, data: &[u8]| {
        let size = u32::try_from(data.len()).map_err(|_| io::Error::other("more than 4 GiB for one run"))?;
        message.push(tag);
        message.extend_from_slice(&size.to_le_bytes());
        message.extend_from_slice(data);
        message.push(0);
        Ok::<(), io::Error>(())
    };
    let mode: &[u8] = match walls {
        Walls::Namespaces => b"n",
        Walls::Confined => b"w",
        Walls::None => b"u",
    };
    record(b'm', mode)?;
    let numbers = [
        (b'w', limits.wall.as_millis().clamp(1, i64::MAX as u128) as u64),
        (b'c', limits.cpu.as_secs().saturating_add(u64::from(limits.cpu.subsec_nanos() > 0))),
        (b'M', limits.memory),
        (b'p', u64::from(limits.processes)),
        (b'f', limits.file_size),
        (b'd', limits.disk),
        (b'o', limits.output),
    ];
    numbers.iter().try_for_each(|(tag, number)| record(*tag, number.min(&(i64::MAX as u64)).to_string().as_bytes()))?;
    if let Some(folder) = folder {
        record(b'D', folder.path().as_os_str().as_bytes())?;
    }
    SYSTEM.iter().try_for_each(|path| record(b'r', path.as_bytes()))?;
    for path in &config.readable {
        record(b'r', path.as_os_str().as_bytes())?;
    }
    record(b'a', config.program.as_os_str().as_bytes())?;
    job.arguments.iter().try_for_each(|argument| record(b'a', argument.as_bytes()))?;
    let home = folder.map_or("/work".to_owned(), |folder| folder.path().display().to_string());
    let given = [
        ("PATH", "/usr/local/bin:/usr/bin:/bin"),
        ("HOME", home.as_str()),
        ("TMPDIR", home.as_str()),
        ("LANG", "C.UTF-8"),
        // These libraries start a thread per core by default.
        ("OMP_NUM_THREADS", "1"),
        ("OPENBLAS_NUM_THREADS", "1"),
    ];
    let packages: Vec<_> = config.packages.iter().map(|packages| packages.display().to_string()).collect();
    if !packages.is_empty() {
        record(b'e', format!("PYTHONPATH={}", packages.join(":")).as_bytes())?;
    }
    let own = config.environment.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    own.chain(given).try_for_each(|(name, value)| record(b'e', format!("{name}={value}").as_bytes()))?;
    job.files.iter().try_for_each(|(name, content)| record(b'F', &[name.as_bytes(), b"\0", content].concat()))?;
    if streamed {
        record(b's', b"")?;
    }
    record(b'i', &job.stdin)?;
    record(b'G', b"")?;
    Ok(message)
}

/// Output of a warden so far.
pub(super) struct Heard {
    pub(super) stdout: Vec<u8>,
    stderr: Vec<u8>,
    layers: Vec<String>,
    refused: Option<String>,
    limits: Limits,
}

impl Heard {
    pub(super) fn new(limits: Limits) -> Self {
        Heard { stdout: Vec::new(), stderr: Vec::new(), layers: Vec::new(), refused: None, limits }
    }

    /// Reads one frame. Returns the result if the program ended.
    pub(super) fn frame(&mut self, mut wire: impl Read) -> Result<Option<Ran>, SandboxError> {
        let mut head = [0; 5];
        let mut read = |into: &mut [u8]| wire.read_exact(into).map_err(|error| SandboxError::Broken(error.to_string()));
        read(&mut head)?;
        let [tag, size @ ..] = head;
        let mut data = vec![0; (u32::from_le_bytes(size) as usize).min(1 << 20)];
        read(&mut data)?;
        let text = || String::from_utf8_lossy(&data).into_owned();
        match tag {
            b'O' => self.stdout.append(&mut data),
            b'E' => self.stderr.append(&mut data),
            b'L' => self.layers.push(text()),
            b'X' => self.refused = self.refused.take().or_else(|| Some(text())),
            b'S' => {
                if let Some(why) = self.refused.take() {
                    return Err(SandboxError::Setup(why));
                }
                let (ended, cpu, peak_memory) =
                    end(&text(), &self.limits).ok_or_else(|| SandboxError::Broken(format!("it said {:?}", text())))?;
                let (stdout, stderr) = (std::mem::take(&mut self.stdout), std::mem::take(&mut self.stderr));
                return Ok(Some(Ran { ended, stdout, stderr, cpu, peak_memory }));
            }
            _ => return Err(SandboxError::Broken(format!("it sent a frame {tag}"))),
        }
        Ok(None)
    }
}

/// Parses `exited 0 - 1234 5678`: end, number, reason, microseconds, kilobytes.
fn end(line: &str, limits: &Limits) -> Option<(Ended, Duration, u64)> {
    let words: Vec<&str> = line.split(' ').collect();
    let [how, number, why, cpu, peak] = words[..] else { return None };
    let (number, cpu, peak): (i32, u64, u64) = (number.parse().ok()?, cpu.parse().ok()?, peak.parse().ok()?);
    let cpu = Duration::from_micros(cpu);
    let ended = match (why, how) {
        ("time", _) => Ended::Overdue,
        ("memory", _) => Ended::OutOfMemory,
        ("output", _) => Ended::TooMuchOutput,
        (_, "exited") => Ended::Exited(number),
        _ if number == SIGXCPU || (number == SIGKILL && cpu >= limits.cpu) => Ended::Overdue,
        _ => Ended::Signaled(number),
    };
    Some((ended, cpu, peak * 1024))
}
