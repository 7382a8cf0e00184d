//! Memory of a GPU that other processes can map (CUDA IPC).

use std::ffi::c_char;

use tch::Tensor;
use torch_sys::C_tensor;

use super::c_text::taken;

unsafe extern "C" {
    fn rollflow_shared_memory(
        out: *mut *mut C_tensor,
        device: i64,
        bytes: i64,
        handle: *mut c_char,
        uuid: *mut c_char,
    ) -> *mut c_char;
}

/// Bytes of a GPU, which are freed with the tensor.
pub(crate) struct MappableMemory {
    /// The bytes.
    pub bytes: Tensor,
    /// The driver's handle, for processes that map them.
    pub handle: [u8; 64],
    /// UUID of the GPU, as torch writes it.
    pub gpu: String,
}

impl MappableMemory {
    /// Takes `bytes` of the GPU of this number.
    ///
    /// # Errors
    /// The driver's reason.
    pub fn new(device: usize, bytes: usize) -> Result<Self, String> {
        let (mut out, mut handle, mut uuid) = (std::ptr::null_mut(), [0u8; 64], [0u8; 16]);
        taken(unsafe {
            let (handle, uuid) = (handle.as_mut_ptr().cast(), uuid.as_mut_ptr().cast());
            rollflow_shared_memory(&mut out, device as i64, bytes as i64, handle, uuid)
        })?;
        // SAFETY: a tensor that was made for this.
        Ok(MappableMemory { bytes: unsafe { Tensor::from_ptr(out) }, handle, gpu: written(uuid) })
    }
}

/// A UUID in groups of hexadecimal digits.
fn written(uuid: [u8; 16]) -> String {
    let digits: Vec<String> = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    [0..4, 4..6, 6..8, 8..10, 10..16].map(|group| digits[group].concat()).join("-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Compute, Dtype};

    /// A new thread has no context of a GPU, not even of the first one.
    #[test]
    fn every_thread_takes_and_frees_memory() {
        if Compute::cuda(0, Dtype::F32).check().is_err() {
            return eprintln!("skipped: no GPU");
        }
        let taken = std::thread::spawn(|| MappableMemory::new(0, 100)).join().unwrap().unwrap();
        // The stand-in's handle is the name of a file.
        let name = String::from_utf8_lossy(&taken.handle).trim_matches(['/', '\0']).to_owned();
        let file = std::path::Path::new("/dev/shm").join(name);
        let is_stand_in = file.to_string_lossy().contains("stand_in");
        assert!(!is_stand_in || file.exists());
        std::thread::spawn(|| drop(taken)).join().unwrap();
        assert!(!is_stand_in || !file.exists(), "the memory is freed");
    }

    #[test]
    fn a_uuid_is_written_as_torch_writes_it() {
        let uuid = std::array::from_fn(|at| 0xa0 + at as u8);
        assert_eq!(written(uuid), "a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf");
    }
}
