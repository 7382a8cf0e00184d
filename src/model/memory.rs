//! Reuse of freed memory.

/// Configures the C allocator to keep freed memory instead of returning it to the system. Call it
/// first in `main`.
///
/// A training step frees and allocates the same hundreds of megabytes again. Page faults of
/// returned memory took a quarter of a small model's step. The process keeps its peak memory. Does
/// nothing without glibc.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        use std::ffi::c_int;
        unsafe extern "C" {
            fn mallopt(parameter: c_int, value: c_int) -> c_int;
        }
        // From malloc.h. glibc accepts at most 32 MiB for the first; thread heaps are 64 MiB.
        const TRIM_THRESHOLD: c_int = -1;
        const TOP_PAD: c_int = -2;
        const MMAP_THRESHOLD: c_int = -3;
        for (parameter, value) in [(MMAP_THRESHOLD, 32 << 20), (TRIM_THRESHOLD, c_int::MAX), (TOP_PAD, 64 << 20)] {
            // SAFETY: mallopt takes any value; one it refuses it ignores.
            unsafe { mallopt(parameter, value) };
        }
    }
}
