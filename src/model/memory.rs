//! How freed memory is kept for the next step.

/// Tells the C allocator to keep freed memory rather than hand it back to the system. Call it first in `main`.
///
/// A training step frees and asks for the same hundreds of megabytes again; handing them back costs a page fault for every 4 KiB,
/// which took a quarter of a small model's step. The price: the process keeps its peak. Does nothing where the C library is not glibc.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        use std::ffi::c_int;
        unsafe extern "C" {
            fn mallopt(parameter: c_int, value: c_int) -> c_int;
        }
        // From malloc.h. The largest value that glibc takes for the first is 32 MiB; threads' heaps are 64 MiB.
        const TRIM_THRESHOLD: c_int = -1;
        const TOP_PAD: c_int = -2;
        const MMAP_THRESHOLD: c_int = -3;
        for (parameter, value) in [(MMAP_THRESHOLD, 32 << 20), (TRIM_THRESHOLD, c_int::MAX), (TOP_PAD, 64 << 20)] {
            // SAFETY: mallopt takes any value; one it refuses it ignores.
            unsafe { mallopt(parameter, value) };
        }
    }
}
