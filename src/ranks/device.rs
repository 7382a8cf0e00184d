//! NCCL, for tensors of a GPU: a separate shared object, loaded on first use.
//!
//! Programs link to libtorch's CPU library alone. NCCL's process group is in the CUDA half, and the
//! shared object (`nccl.cpp`), which needs both, is opened after it. `scripts/nccl.sh` compiles it.

use std::error::Error as _;
use std::path::PathBuf;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::model::{Compute, Dtype, gpu_address, gpu_attributes, libtorch_folder};

/// File of the shared object.
const FILE: &str = "librollflow_nccl.so";

/// Entry of the shared object that makes groups. C++ alone calls it; `device.hpp` has its arguments.
pub type DeviceGroups = unsafe extern "C" fn();

/// Name of a GPU by which two processes of a host compare theirs.
pub(super) fn gpu_name(index: usize) -> String {
    gpu_address(index).unwrap_or_else(|| format!("cuda:{index}"))
}

/// Type of a GPU: what decides the order of its sums. `None` if the CUDA runtime does not tell.
pub(super) fn gpu_type(index: usize) -> Option<String> {
    let [major, minor, multiprocessors] = gpu_attributes(index, [75, 76, 16])?;
    Some(format!("a GPU of compute capability {major}.{minor} with {multiprocessors} multiprocessors"))
}

/// Loads what exchanges tensors of a GPU between ranks.
///
/// # Errors
/// A message if the device, the shared object or NCCL is missing, with what to do.
pub(crate) fn groups(index: usize) -> Result<DeviceGroups, String> {
    Compute::cuda(index, Dtype::F32).check().map_err(|error| error.to_string())?;
    // A library of that name may be preloaded.
    if let Some(groups) = entry(&Library::this()) {
        return Ok(groups);
    }
    let folders = libtorch_folder().into_iter().chain(program_folder());
    let Some(file) = folders.map(|folder| folder.join(FILE)).find(|file| file.exists()) else {
        return Err(format!("tensors of GPUs are exchanged by NCCL, and {FILE} is missing; run `make nccl`"));
    };
    // SAFETY: its constructors register nothing; it is never unloaded.
    let library = unsafe { Library::open(Some(&file), RTLD_NOW | RTLD_GLOBAL) }.map_err(|error| {
        let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        format!("{} does not load ({why}); run `make nccl` again", file.display())
    })?;
    let groups = entry(&library);
    std::mem::forget(library);
    groups.ok_or_else(|| format!("{} is of another version; run `make nccl` again", file.display()))
}

fn entry(library: &Library) -> Option<DeviceGroups> {
    // SAFETY: a function of this name; it is passed on without its type.
    unsafe { library.get::<DeviceGroups>(b"rollflow_device_group\0") }.ok().map(|symbol| *symbol)
}

fn program_folder() -> Option<PathBuf> {
    std::env::current_exe().ok()?.parent().map(PathBuf::from)
}
