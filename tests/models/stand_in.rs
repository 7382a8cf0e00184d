//! What the stand-in of a GPU tells of a device.

type Numbers = unsafe extern "C" fn(i64, *mut u64, *mut u64);

fn asked(function: &[u8], device: usize) -> Option<(u64, u64)> {
    let process = libloading::os::unix::Library::this();
    let (mut first, mut second) = (0, 0);
    // SAFETY: functions of the stand-in, by their signature.
    unsafe { process.get::<Numbers>(function).ok()?(device as i64, &mut first, &mut second) };
    Some((first, second))
}

/// Kernels that were started so far, and times that the host waited; `None` without the stand-in.
pub fn counts(device: usize) -> Option<(u64, u64)> {
    asked(b"stand_in_counts\0", device)
}

/// Recorded steps that this thread has started; `None` without the stand-in.
pub fn replays() -> Option<u64> {
    asked(b"stand_in_replays\0", 0).map(|(replays, _)| replays)
}

/// Bytes of the tensors now, and at most since this was last asked; `None` without the stand-in.
pub fn bytes(device: usize) -> Option<(u64, u64)> {
    asked(b"stand_in_bytes\0", device)
}

/// Bytes of the tensors now, and of an allocator that keeps the memory of freed ones; `None` without the stand-in.
pub fn kept(device: usize) -> Option<(u64, u64)> {
    asked(b"stand_in_kept\0", device)
}
