//! What runs untrusted code: an interpreter, and the folders that it needs to read.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A program, and what must be readable for it to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Itself, by its full path.
    pub path: PathBuf,
    /// Folders and files that it reads, by their real paths, beside the system's libraries.
    pub readable: Vec<PathBuf>,
    /// Where a Python finds what is installed beside its own library.
    pub packages: Vec<PathBuf>,
    /// Arguments with which it ends at once and well: what a sandbox is tried out with.
    pub check: Vec<String>,
}

/// A program that is not there.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// None of that name.
    #[error("{name} can't be run: {source}. Install it, or name another")]
    Missing {
        /// What was looked for.
        name: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// It is no Python.
    #[error("{name} does not answer as Python does: {answer}")]
    NoPython {
        /// What was asked.
        name: String,
        /// What it said.
        answer: String,
    },
}

impl Program {
    /// A Python interpreter by its path, or by a name that is looked for in `PATH`. It is asked where it lives, so that versions installed in a
    /// home folder and virtual environments work; nothing else of that home can be read.
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
                // An interpreter that lives at the root lives in the system's folders.
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

    /// Any other program, by its full path, with arguments with which it ends at once and well.
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
