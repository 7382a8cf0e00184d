//! The half of libtorch that knows NVIDIA's GPUs, brought when somebody asks for one: a program is linked to the other half alone, so that the same one
//! runs where there is no GPU and starts no slower there.

use std::error::Error as _;
use std::ffi::c_int;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use tch::Cuda;

use super::fused;

const HALF: &str = "libtorch_cuda.so";

/// Loads `libtorch_cuda.so` from beside the `libtorch_cpu.so` of this process, unless it is there: linked, or preloaded. Takes a fifth of
/// a second or more. libtorch looks for CUDA once, at the latest when it first differentiates; what is loaded later, it doesn't see. Sets what libtorch may
/// do there ([`fused::gpu_defaults`]).
///
/// # Errors
///
/// Why it can't be: there is none, or what it needs of NVIDIA's libraries is missing.
pub(super) fn load() -> Result<(), String> {
    let mapped = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    if library(&mapped, HALF).is_some() {
        fused::gpu_defaults();
        return Ok(());
    }
    let half = library(&mapped, "libtorch_cpu.so").map(|other| other.with_file_name(HALF));
    let Some(half) = half.filter(|half| half.exists()) else {
        return Err("libtorch came without its CUDA half".to_owned());
    };
    // SAFETY: what its constructors do is enter operations and a device with libtorch, under libtorch's own locks. It is never unloaded.
    let library = unsafe { Library::open(Some(&half), RTLD_NOW | RTLD_GLOBAL) };
    let loaded = library.map(|library| {
        std::mem::forget(library);
        fused::gpu_defaults();
    });
    loaded.map_err(|error| {
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

/// Why there is no device though CUDA's half is loaded, if that is the driver's age.
pub(super) fn driver_problem() -> Option<String> {
    type Version = unsafe extern "C" fn(*mut c_int) -> c_int;
    let process = Library::this();
    // SAFETY: these functions have had this signature in every CUDA runtime.
    let version = |name: &[u8]| unsafe {
        let mut version = 0;
        let ask = process.get::<Version>(name).ok()?;
        (ask(&mut version) == 0).then_some(version)
    };
    too_old(version(b"cudaDriverGetVersion\0")?, version(b"cudaRuntimeGetVersion\0")?)
}

/// CUDA's versions are 1000 · major + 10 · minor; 0 is no driver. A driver runs programs of its own major version.
fn too_old(driver: i32, runtime: i32) -> Option<String> {
    let text = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
    let needed = match runtime / 1000 {
        12 => ", the NVIDIA driver 525 or newer",
        13 => ", the NVIDIA driver 580 or newer",
        _ => "",
    };
    match driver {
        0 => Some(format!("no NVIDIA driver is loaded; this libtorch is for CUDA {}{needed}", text(runtime))),
        driver if driver / 1000 < runtime / 1000 => Some(format!(
            "the NVIDIA driver is too old: it runs CUDA {}, and this libtorch is for CUDA {}{needed}",
            text(driver),
            text(runtime)
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_is_too_old_is_named_with_what_is_needed() {
        let text = too_old(12080, 13000).unwrap();
        assert!(text.contains("CUDA 12.8") && text.contains("CUDA 13.0") && text.contains("580"), "{text}");
        assert!(too_old(0, 13000).unwrap().contains("no NVIDIA driver"));
        assert_eq!((too_old(13000, 13000), too_old(13010, 13000), too_old(12040, 12080)), (None, None, None));
    }

    #[test]
    fn a_library_is_found_by_its_name_among_what_is_mapped() {
        let mapped = "7f0-7f1 r-xp 0 08:01 12 /opt/my torch/lib/libtorch_cpu.so\n7f2-7f3 rw-p 0 00:00 0 \n7f4-7f5 r--p 0 08:01 9 /lib/libc.so.6\n";
        assert_eq!(library(mapped, "libtorch_cpu.so"), Some(PathBuf::from("/opt/my torch/lib/libtorch_cpu.so")));
        assert_eq!(library(mapped, HALF), None);
    }
}
