//! libtorch's CUDA library, loaded on first use. Programs link to the CPU library alone, so that
//! one program runs with and without a GPU, and starts as fast without.

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use tch::Cuda;

use super::fused;

const HALF: &str = "libtorch_cuda.so";

/// Loads `libtorch_cuda.so` from the folder of this process's `libtorch_cpu.so`, unless it is
/// already linked or preloaded. Takes 0.2 s or more. libtorch looks for CUDA once, no later than
/// the first backward pass, and ignores a library that is loaded afterwards. Also sets libtorch's
/// options ([`fused::gpu_defaults`]).
///
/// # Errors
/// A message if the library or one of NVIDIA's libraries is missing.
pub(super) fn load() -> Result<(), String> {
    let mapped = mapped();
    if library(&mapped, HALF).is_some() {
        fused::gpu_defaults();
        return Ok(());
    }
    let half = folder(&mapped).map(|folder| folder.join(HALF));
    let Some(half) = half.filter(|half| half.exists()) else {
        return Err("libtorch came without its CUDA half".to_owned());
    };
    // SAFETY: its constructors register operations and a device with libtorch, under libtorch's own
    // locks. The library is never unloaded.
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

/// Folder of this process's libtorch.
pub fn libtorch_folder() -> Option<PathBuf> {
    folder(&mapped())
}

fn mapped() -> String {
    std::fs::read_to_string("/proc/self/maps").unwrap_or_default()
}

fn folder(mapped: &str) -> Option<PathBuf> {
    library(mapped, "libtorch_cpu.so")?.parent().map(Path::to_owned)
}

/// Path of a mapped file of this name, from the text of `/proc/self/maps`.
fn library(mapped: &str, name: &str) -> Option<PathBuf> {
    let paths = mapped.lines().filter_map(|line| Some(Path::new(&line[line.find('/')?..])));
    paths.filter(|path| path.file_name().is_some_and(|file| file == name)).map(Path::to_owned).next()
}

/// Bytes of a GPU's memory.
pub struct GpuMemory {
    /// All of it.
    pub total: u64,
    /// Memory that no process holds. libtorch never returns memory to the system.
    pub free: u64,
}

/// Number of GPUs that this process sees. Takes no memory of them.
pub fn gpu_count() -> usize {
    if load().is_ok() { Cuda::device_count().max(0) as usize } else { 0 }
}

/// Bytes of all memory of a GPU, of which this takes nothing; `None` without such a device or driver.
pub fn gpu_total(index: usize) -> Option<u64> {
    type Init = unsafe extern "C" fn(c_uint) -> c_int;
    type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
    type TotalMem = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
    if index >= gpu_count() {
        return None;
    }
    // SAFETY: these functions have had these signatures in every CUDA driver, which is loaded already, and is never
    // unloaded.
    unsafe {
        let driver = std::mem::ManuallyDrop::new(Library::open(Some("libcuda.so.1"), RTLD_NOW).ok()?);
        let (init, get) = (driver.get::<Init>(b"cuInit").ok()?, driver.get::<Get>(b"cuDeviceGet").ok()?);
        let total_mem = driver.get::<TotalMem>(b"cuDeviceTotalMem_v2").ok()?;
        let (mut device, mut total) = (0, 0);
        let found = init(0) == 0 && get(&mut device, index as c_int) == 0 && total_mem(&mut total, device) == 0;
        found.then_some(total as u64)
    }
}

/// Memory of a GPU, from the CUDA runtime, which takes some hundred MiB of it; `None` without such a device
/// or runtime.
pub fn gpu_memory(index: usize) -> Option<GpuMemory> {
    type SetDevice = unsafe extern "C" fn(c_int) -> c_int;
    type MemGetInfo = unsafe extern "C" fn(*mut usize, *mut usize) -> c_int;
    if index >= gpu_count() {
        return None;
    }
    let ask = || {
        let process = Library::this();
        // SAFETY: these functions have had these signatures in every CUDA runtime. The runtime is never
        // unloaded.
        unsafe {
            let set = process.get::<SetDevice>(b"cudaSetDevice").ok()?;
            let info = process.get::<MemGetInfo>(b"cudaMemGetInfo").ok()?;
            let (mut free, mut total) = (0, 0);
            (set(index as c_int) == 0 && info(&mut free, &mut total) == 0)
                .then_some(GpuMemory { total: total as u64, free: free as u64 })
        }
    };
    // The device is that of another thread: this one keeps its own.
    std::thread::scope(|scope| scope.spawn(ask).join().ok().flatten())
}

/// A GPU's address on its bus, which is the same in each process; `None` without such a device or
/// runtime.
pub fn gpu_address(index: usize) -> Option<String> {
    type BusId = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    if load().is_err() {
        return None;
    }
    let process = Library::this();
    let mut text = [0u8; 32];
    // SAFETY: this function has had this signature in every CUDA runtime, and ends the text with a
    // zero within the length.
    let found = unsafe {
        let ask = process.get::<BusId>(b"cudaDeviceGetPCIBusId\0").ok()?;
        ask(text.as_mut_ptr().cast(), text.len() as c_int, index as c_int) == 0
    };
    CStr::from_bytes_until_nul(&text).ok().filter(|_| found).map(|text| text.to_string_lossy().into_owned())
}

/// Attributes of a GPU, by the CUDA runtime's numbers; `None` without such a device or runtime.
pub(crate) fn gpu_attributes<const N: usize>(index: usize, numbers: [c_int; N]) -> Option<[c_int; N]> {
    type Attribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;
    let process = Library::this();
    // SAFETY: this function has had this signature in every CUDA runtime.
    unsafe {
        let ask = process.get::<Attribute>(b"cudaDeviceGetAttribute\0").ok()?;
        let mut values = [0; N];
        let found = values.iter_mut().zip(numbers).all(|(value, number)| ask(value, number, index as c_int) == 0);
        found.then_some(values)
    }
}

/// Numbers of the attributes with a GPU's compute capability.
const CAPABILITY: [c_int; 2] = [75, 76];

/// Major number of a GPU's compute capability: 8 is Ampere. That of the newest if the CUDA runtime does
/// not tell.
pub(super) fn generation(index: usize) -> i32 {
    gpu_attributes(index, CAPABILITY).map_or(i32::MAX, |[major, _]| major)
}

/// Error message if the loaded CUDA library has no kernels for a GPU.
pub(super) fn gpu_problem(index: usize) -> Option<String> {
    unsupported(gpu_attributes(index, CAPABILITY)?, version(b"cudaRuntimeGetVersion\0")?)
}

/// libtorch for CUDA 13 begins with Turing.
fn unsupported(capability: [c_int; 2], runtime: i32) -> Option<String> {
    let [major, minor] = capability;
    (runtime >= 13000 && capability < [7, 5]).then(|| {
        format!(
            "it has compute capability {major}.{minor}, and libtorch for CUDA {} needs 7.5 (Turing) or newer; set LIBTORCH to a \
             libtorch for CUDA 12, or model.device = \"cpu\"",
            runtime / 1000
        )
    })
}

/// A version that the CUDA runtime tells by the function of this name.
fn version(name: &[u8]) -> Option<i32> {
    type Version = unsafe extern "C" fn(*mut c_int) -> c_int;
    let process = Library::this();
    // SAFETY: these functions have had this signature in every CUDA runtime.
    unsafe {
        let mut version = 0;
        let ask = process.get::<Version>(name).ok()?;
        (ask(&mut version) == 0).then_some(version)
    }
}

/// Error message if the driver is too old for the loaded CUDA library.
pub(super) fn driver_problem() -> Option<String> {
    too_old(version(b"cudaDriverGetVersion\0")?, version(b"cudaRuntimeGetVersion\0")?)
}

/// CUDA versions are 1000 · major + 10 · minor; 0 means no driver. A driver runs programs of its
/// own major version.
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
    fn a_gpu_for_which_the_library_has_no_kernels_is_named_with_its_capability() {
        let text = unsupported([7, 0], 13000).unwrap();
        assert!(text.contains("capability 7.0") && text.contains("CUDA 13 needs 7.5"), "{text}");
        let fine = [([7, 5], 13000), ([9, 0], 13020), ([7, 0], 12080)];
        assert_eq!(fine.map(|(capability, runtime)| unsupported(capability, runtime)), [None, None, None]);
    }

    /// The last device of the stand-in, which no other test of the library uses.
    #[test]
    fn gpus_are_counted_without_a_context() {
        type Contexts = unsafe extern "C" fn(i64, *mut u64, *mut u64);
        let process = Library::this();
        let Ok(contexts) = (unsafe { process.get::<Contexts>(b"stand_in_contexts\0") }) else {
            return eprintln!("skipped: only the stand-in of a GPU counts contexts");
        };
        let (count, mut made, mut none) = (gpu_count(), 0, 0);
        assert!(count > 1);
        // SAFETY: a function of the stand-in, by its signature.
        unsafe { contexts(count as i64 - 1, &mut made, &mut none) };
        assert_eq!(made, 0);
    }

    #[test]
    fn a_library_is_found_by_its_name_among_what_is_mapped() {
        let mapped = "7f0-7f1 r-xp 0 08:01 12 /opt/my torch/lib/libtorch_cpu.so\n7f2-7f3 rw-p 0 00:00 0 \n7f4-7f5 r--p 0 08:01 9 /lib/libc.so.6\n";
        assert_eq!(library(mapped, "libtorch_cpu.so"), Some(PathBuf::from("/opt/my torch/lib/libtorch_cpu.so")));
        assert_eq!(library(mapped, HALF), None);
    }
}
