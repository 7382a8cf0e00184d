//! Error texts of the C++ parts, which come from the C library's allocator.

use std::ffi::{CStr, c_char};

unsafe extern "C" {
    #[link_name = "free"]
    fn libc_free(pointer: *mut std::ffi::c_void);
}

/// The text, which is freed; `Ok` if there is none.
pub(crate) fn taken(error: *mut c_char) -> Result<(), String> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: a text of the C library, which its only owner gives here.
    let text = unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned();
    unsafe { libc_free(error.cast()) };
    Err(text)
}

/// Panics with the text, if there is one, like tch's operations.
pub(super) fn check(error: *mut c_char) {
    if let Err(text) = taken(error) {
        panic!("libtorch: {text}");
    }
}
