//! The warden's executable, which is embedded in this crate and executed from memory.

use std::io;
use std::process::Command;

/// Command of the warden, and the memory file that must exist until it is spawned.
pub(super) struct Warden {
    pub(super) command: Command,
    #[cfg(target_os = "linux")]
    _program: std::os::fd::OwnedFd,
}

#[cfg(target_os = "linux")]
pub(super) fn warden() -> io::Result<Warden> {
    use std::io::Write;
    use std::os::fd::AsRawFd;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

    const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/warden"));
    if PROGRAM.is_empty() {
        return Err(io::Error::other(
            "this program was built without a C compiler, and has no sandbox; install one and build it again",
        ));
    }
    let mut file = std::fs::File::from(memfd_create("warden", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.write_all(PROGRAM)?;
    // The file cannot be modified any more.
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    let command = Command::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
    Ok(Warden { command, _program: file.into() })
}

#[cfg(not(target_os = "linux"))]
pub(super) fn warden() -> io::Result<Warden> {
    Err(io::Error::other("the sandbox needs Linux"))
}
