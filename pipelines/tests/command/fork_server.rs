//! The built command without the time that loading it takes: `fork_server.c` loads it once, and forks for each request.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{ErrorKind, PipeWriter, Read, Write, pipe};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Mutex, OnceLock};

/// The built command.
pub const BINARY: &str = env!("CARGO_BIN_EXE_rollflow");

/// A process of the command. Killed when dropped.
pub struct Process {
    pub id: u32,
    answers: UnixStream,
    status: Option<ExitStatus>,
}

impl Process {
    /// Starts the built command as [`Command::spawn`] does, with nothing on its standard input.
    pub fn start(command: &Command, out: PipeWriter, error: PipeWriter) -> Self {
        let mut variables: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
        for (name, value) in command.get_envs() {
            variables.remove(name);
            variables.extend(value.map(|value| (name.to_owned(), value.to_owned())));
        }
        let preloaded = variables.get(OsStr::new("LD_PRELOAD")).cloned().unwrap_or_default();
        let stream = |end: &PipeWriter| format!("/proc/{}/fd/{}", std::process::id(), end.as_raw_fd());
        let arguments: Vec<&OsStr> = [command.get_program()].into_iter().chain(command.get_args()).collect();
        let folder = command.get_current_dir().unwrap_or(Path::new(".")).as_os_str();
        let mut request = Vec::new();
        let mut put = |parts: &[&OsStr]| {
            parts.iter().for_each(|part| request.extend_from_slice(part.as_bytes()));
            request.push(0);
        };
        let texts = [stream(&out), stream(&error), arguments.len().to_string()];
        let [out_path, error_path, count] = texts.each_ref().map(OsStr::new);
        [out_path, error_path, folder, count].iter().for_each(|text| put(&[text]));
        arguments.iter().for_each(|argument| put(&[argument]));
        variables.iter().for_each(|(name, value)| put(&[name, OsStr::new("="), value]));
        let mut answers = UnixStream::connect(socket(preloaded)).unwrap();
        answers.write_all(&request).unwrap();
        answers.shutdown(Shutdown::Write).unwrap();
        let mut id = [0; 4];
        answers.read_exact(&mut id).expect("the command is started");
        Process { id: u32::from_ne_bytes(id), answers, status: None }
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        self.answers.set_nonblocking(false).unwrap();
        loop {
            if let Some(status) = self.ended() {
                return status;
            }
        }
    }

    /// How it ended, if it did.
    pub fn try_wait(&mut self) -> Option<ExitStatus> {
        self.answers.set_nonblocking(true).unwrap();
        self.ended()
    }

    fn ended(&mut self) -> Option<ExitStatus> {
        let mut status = [0; 4];
        if self.status.is_none() {
            match self.answers.read_exact(&mut status) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                read => read.expect("the server reports its end"),
            }
            self.status = Some(ExitStatus::from_raw(i32::from_ne_bytes(status)));
        }
        self.status
    }

    pub fn signal(&self, name: &str) -> bool {
        Command::new("kill").args([name, &self.id.to_string()]).status().unwrap().success()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.try_wait().is_none() {
            // It may end meanwhile.
            self.signal("-KILL");
            self.wait();
        }
    }
}

/// [`Command::output`], of the built command by the fork server.
pub fn output(command: &mut Command) -> Output {
    if command.get_program() != BINARY {
        return command.output().unwrap();
    }
    let ((mut out, out_end), (mut error, error_end)) = (pipe().unwrap(), pipe().unwrap());
    let mut process = Process::start(command, out_end, error_end);
    let errors = std::thread::spawn(move || {
        let mut stderr = Vec::new();
        error.read_to_end(&mut stderr).map(|_| stderr)
    });
    let mut stdout = Vec::new();
    out.read_to_end(&mut stdout).unwrap();
    Output { stdout, stderr: errors.join().unwrap().unwrap(), status: process.wait() }
}

/// The socket of the server with these preloaded libraries. It is started when it is first asked for, and ends with this process.
fn socket(preloaded: OsString) -> PathBuf {
    static SERVERS: Mutex<BTreeMap<OsString, (PathBuf, Child)>> = Mutex::new(BTreeMap::new());
    let mut servers = SERVERS.lock().unwrap();
    let path = std::env::temp_dir().join(format!("rollflow-fork-{}-{}", std::process::id(), servers.len()));
    let (path, _) = servers.entry(preloaded).or_insert_with_key(|preloaded| {
        let libraries = [library().as_os_str(), preloaded].join(OsStr::new(":"));
        let mut command = Command::new(BINARY);
        command.env("LD_PRELOAD", libraries).env("FORK_SERVER", &path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut server = command.spawn().unwrap();
        let ready = server.stdout.take().unwrap().read(&mut [0]).unwrap();
        assert_eq!(ready, 1, "the fork server has started");
        (path, server)
    });
    path.clone()
}

/// The server's library, built once.
fn library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let built = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fork_server.so");
        let fresh = built.with_extension(std::process::id().to_string());
        compile(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/command/fork_server.c")), &fresh);
        fs::rename(fresh, &built).unwrap();
        built
    })
}

/// Builds a library to preload.
pub fn compile(source: &Path, library: &Path) {
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(library).arg(source).args(["-ldl", "-lpthread"]);
    let built = compiler.output().expect("a C compiler, which the sandbox needs too");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}
