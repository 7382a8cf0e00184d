//! Interpreters of untrusted code, and the folders that they read.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A program, and the files that it reads to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Full path.
    pub path: PathBuf,
    /// Readable folders and files by their real paths, in addition to the system's libraries.
    pub readable: Vec<PathBuf>,
    /// Folders of installed Python packages.
    pub packages: Vec<PathBuf>,
    /// Arguments with which it exits immediately with 0, to check the sandbox.
    pub check: Vec<String>,
}

/// Failure to find an interpreter.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// No program has this name.
    #[error("{name} can't be run: {source}. Install it, or name another")]
    Missing {
        /// Name or path.
        name: String,
        /// Cause.
        source: std::io::Error,
    },
    /// The program is no Python.
    #[error("{name} does not answer as Python does: {answer}")]
    NoPython {
        /// Name or path.
        name: String,
        /// Output of the program.
        answer: String,
    },
}

impl Program {
    /// Finds a Python interpreter by its path, or by a name in `PATH`. It reports its own folders, so
    /// that versions in a home folder and virtual environments work; nothing else there is readable.
    pub fn python(name: &str) -> Result<Self, ProgramError> {
        const ASK: &str = "import site, sys; places = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]; \
                           print(sys.executable, *places, *site.getsitepackages(), sep='\\n')";
        let asked = Command::new(name).args(["-I", "-c", ASK]).output();
        let asked = asked.map_err(|source| ProgramError::Missing { name: name.to_owned(), source })?;
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
                Ok(Program { path, readable, packages, check: ["-I", "-c", ""].map(str::to_owned).to_vec() })
            }
            _ => {
                let answer = format!("{answer}{}", String::from_utf8_lossy(&asked.stderr));
                Err(ProgramError::NoPython { name: name.to_owned(), answer })
            }
        }
    }

    /// Takes any other program by its full path. With `check` as arguments it must exit immediately with 0.
    pub fn at(path: impl AsRef<Path>, check: &[&str]) -> Self {
        let path = path.as_ref().to_owned();
        Program {
            readable: vec![path.clone()],
            packages: Vec::new(),
            path,
            check: check.iter().map(|&argument| argument.to_owned()).collect(),
        }
    }
}
