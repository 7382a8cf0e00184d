//! Files that a user names: opened only if they are regular files, and read up to a bound.
//!
//! Opening a FIFO blocks until a writer comes, and a device may never end. Both are errors here,
//! before anything is opened.

use std::fs::{File, FileType};
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// The largest configuration, template or recipe that is read, in bytes: 64 MiB, far above any real
/// one.
pub const TEXT_LIMIT: u64 = 64 << 20;

/// Opens a regular file for reading. Anything else is an [`ErrorKind::InvalidInput`] error that
/// says what it is.
pub fn open(path: &Path) -> Result<File> {
    regular(path)?;
    File::open(path)
}

/// Checks that `path` is a regular file, without opening it.
pub fn regular(path: &Path) -> Result<()> {
    let kind = std::fs::metadata(path)?.file_type();
    if kind.is_file() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidInput, format!("it is {}, where a regular file is expected", named(kind))))
}

/// Reads a regular file of at most `limit` bytes. A larger one is an [`ErrorKind::InvalidData`]
/// error.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let file = open(path)?;
    let too_large =
        |size: u64| Error::new(ErrorKind::InvalidData, format!("it has {size} bytes or more; at most {limit} are read"));
    let size = file.metadata()?.len();
    if size > limit {
        return Err(too_large(size));
    }
    let mut bytes = Vec::with_capacity(size as usize);
    // A file may grow between the two.
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit { Err(too_large(limit + 1)) } else { Ok(bytes) }
}

/// Reads a regular UTF-8 file of at most [`TEXT_LIMIT`] bytes.
pub fn read_text(path: &Path) -> Result<String> {
    String::from_utf8(read(path, TEXT_LIMIT)?).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Error::new(ErrorKind::InvalidData, format!("it is not UTF-8: byte {at} begins no character"))
    })
}

fn named(kind: FileType) -> &'static str {
    if kind.is_dir() {
        return "a folder";
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let kinds = [
            (kind.is_fifo(), "a FIFO"),
            (kind.is_socket(), "a socket"),
            (kind.is_char_device(), "a character device"),
            (kind.is_block_device(), "a block device"),
        ];
        if let Some((_, name)) = kinds.into_iter().find(|(is, _)| *is) {
            return name;
        }
    }
    "no file"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_of_a_bounded_size_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "text").unwrap();
        assert_eq!(read_text(&file).unwrap(), "text");
        assert_eq!(read(&file, 4).unwrap(), b"text");
        assert!(read(&file, 3).unwrap_err().to_string().contains("at most 3 are read"));
        assert!(open(folder.path()).unwrap_err().to_string().contains("it is a folder"));
        std::fs::write(&file, b"ab\xff").unwrap();
        assert!(read_text(&file).unwrap_err().to_string().contains("byte 2"));
        assert_eq!(open(&folder.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
    }

    /// Without the check, each of these would block or never end.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_fifo_and_a_device_are_errors_and_are_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        assert!(read_text(&fifo).unwrap_err().to_string().contains("it is a FIFO"));
        assert!(read_text(Path::new("/dev/zero")).unwrap_err().to_string().contains("it is a character device"));
    }
}
