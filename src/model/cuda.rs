//! The half of libtorch that knows NVIDIA's GPUs, brought when somebody asks for one: a program is linked to the other half alone, so that the same one
//! runs where there is no GPU and starts no slower there.

use std::error::Error as _;
use std::ffi::c_int;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use tch::Cuda;

const HALF: &str = "libtorch_cuda.so";

/// Loads `libtorch_cuda.so` from beside the `libtorch_cpu.so` of this process, unless it is there: linked, or preloaded. Takes a fifth of
/// a second or more. libtorch looks for CUDA once, at the latest when it first differentiates; what is loaded later, it doesn't see.
///
/// # Errors
///
/// Why it can't be: there is none, or what it needs of NVIDIA's libraries is missing.
pub(super) fn load() -> Result<(), String> {
    let mapped = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    if library(&mapped, HALF).is_some() {
        return Ok(());
    }
    let half = library(&mapped, "libtorch_cpu.so").map(|other| other.with_file_name(HALF));
    let Some(half) = half.filter(|half| half.exists()) else {
        return Err("libtorch came without its CUDA half".to_owned());
    };
    // SAFETY: what its constructors do is enter operations and a device with libtorch, under libtorch's own locks. It is never unloaded.
    let library = unsafe { Library::open(Some(&half), RTLD_NOW | RTLD_GLOBAL) };
    library.map(std::mem::forget).map_err(|error| {
        let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        format!("libtorch's CUDA half does not load ({why}); `ROLLFLOW_CUDA=1 make libtorch` brings NVIDIA's libraries")
    })
}

/// Where a file of this name is mapped from, in the words of `/proc/self/maps`.
fn library(mapped: &str, name: &str) -> Option<PathBuf> {
    let paths = mapped.lines().filter_map(|line| Some(Path::new(&line[line.find('/')?..])));
    paths.filter(|path| path.file_name().is_some_and(|file| file == name)).map(Path::to_owned).next()
}

/// Bytes of a GPU's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    /// All of it.
    pub total: u64,
    /// What no process holds. libtorch gives back nothing that it took.
    pub free: u64,
}

/// Asked of the CUDA runtime that came with libtorch; `None` where there is no such device, or no runtime.
pub fn gpu_memory(index: usize) -> Option<GpuMemory> {
    type SetDevice = unsafe extern "C" fn(c_int) -> c_int;
    type MemGetInfo = unsafe extern "C" fn(*mut usize, *mut usize) -> c_int;
    if load().is_err() || index as i64 >= Cuda::device_count() {
        return None;
    }
    let process = Library::this();
    // SAFETY: these two functions have had these signatures in every CUDA runtime, which stays loaded.
    unsafe {
        let set = process.get::<SetDevice>(b"cudaSetDevice").ok()?;
        let info = process.get::<MemGetInfo>(b"cudaMemGetInfo").ok()?;
        let (mut free, mut total) = (0, 0);
        (set(index as c_int) == 0 && info(&mut free, &mut total) == 0)
            .then_some(GpuMemory { total: total as u64, free: free as u64 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_by_its_name_among_what_is_mapped() {
        let mapped = "7f0-7f1 r-xp 0 08:01 12 /opt/my torch/lib/libtorch_cpu.so\n7f2-7f3 rw-p 0 00:00 0 \n7f4-7f5 r--p 0 08:01 9 /lib/libc.so.6\n";
        assert_eq!(library(mapped, "libtorch_cpu.so"), Some(PathBuf::from("/opt/my torch/lib/libtorch_cpu.so")));
        assert_eq!(library(mapped, HALF), None);
    }
}
