//! Reuse of freed memory.

/// Configures the C allocator to keep freed memory instead of returning it to the system. Call it
/// first in `main`.
///
/// A training step frees and allocates the same hundreds of megabytes again. Page faults of
/// returned memory took a quarter of a small model's step. The process keeps its peak memory. Does
/// nothing without glibc.
pub fn keep_freed_memory() {
    // glibc accepts at most 32 MiB for the first; thread heaps are 64 MiB.
    configure([32 << 20, i32::MAX, 64 << 20]);
}

/// Returns freed memory to the system from now on, from a megabyte on: the opposite of
/// [`keep_freed_memory`], for a process that gathers and frees more than it could hold.
pub(crate) fn return_freed_memory() {
    configure([1 << 20, 1 << 20, 0]);
}

/// Sets glibc's thresholds of mappings and of trimming, and the padding of heaps, in bytes.
fn configure([mmap_threshold, trim_threshold, top_pad]: [i32; 3]) {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        use std::ffi::c_int;
        unsafe extern "C" {
            fn mallopt(parameter: c_int, value: c_int) -> c_int;
        }
        // Parameters of malloc.h.
        for (parameter, value) in [(-3, mmap_threshold), (-1, trim_threshold), (-2, top_pad)] {
            // SAFETY: mallopt takes any value; one it refuses it ignores.
            unsafe { mallopt(parameter, value) };
        }
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    let _none = (mmap_threshold, trim_threshold, top_pad);
}
