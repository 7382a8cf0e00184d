//! Bytes that may outgrow memory: in memory up to a bound, then in an anonymous temporary file that
//! is removed with the process.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Beyond this it goes to `TMPDIR`,
const IN_MEMORY: usize = 64 << 20;
/// and from then on in pieces of this size.
const PIECE: usize = 4 << 20;

/// Written once from the beginning, then read anywhere.
#[derive(Default)]
pub(super) struct Spool {
    memory: Vec<u8>,
    file: Option<File>,
    /// Bytes in the file.
    written: u64,
}

impl Spool {
    pub(super) fn len(&self) -> u64 {
        self.written + self.memory.len() as u64
    }

    pub(super) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.memory.extend_from_slice(bytes);
        let most = if self.file.is_none() { IN_MEMORY } else { PIECE };
        if self.memory.len() > most {
            let file = match self.file.take() {
                Some(file) => file,
                None => nameless()?,
            };
            file.write_all_at(&self.memory, self.written)?;
            self.written += self.memory.len() as u64;
            self.memory = Vec::with_capacity(PIECE);
            self.file = Some(file);
        }
        Ok(())
    }

    pub(super) fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        let in_file = self.written.saturating_sub(at).min(bytes.len() as u64) as usize;
        let (head, tail) = bytes.split_at_mut(in_file);
        match &self.file {
            Some(file) if !head.is_empty() => file.read_exact_at(head, at)?,
            _ => {}
        }
        if tail.is_empty() {
            return Ok(());
        }
        let from = (at + in_file as u64 - self.written) as usize;
        let memory = self.memory.get(from..from + tail.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        tail.copy_from_slice(memory);
        Ok(())
    }
}

/// A file without a name, from its making on.
fn nameless() -> io::Result<File> {
    let folder = std::env::temp_dir();
    for number in 0..1_000_u32 {
        let path = folder.join(format!(".rollflow-{}-{number}", std::process::id()));
        match File::options().read(true).write(true).create_new(true).open(&path) {
            Ok(file) => {
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}
