//! jemalloc for the whole process, libtorch included.
//!
//! A training step frees and allocates the same hundreds of megabytes again. glibc returns large
//! blocks to the system, and a third of a step is page faults; told to keep them, it needs up to a
//! quarter more memory. jemalloc keeps what it was given back for a minute and finds room in it. Longer steps
//! take their memory from the system each time, which is a small part of a minute.

use tikv_jemallocator::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// A C string, as C reads it.
#[repr(transparent)]
pub struct Text(*const u8);

// SAFETY: the string is constant.
unsafe impl Sync for Text {}

/// jemalloc's settings: unused memory is returned to the system after a minute, blocks of every size
/// alike. `MALLOC_CONF` has precedence.
#[unsafe(export_name = "malloc_conf")]
pub static SETTINGS: Text = Text(c"oversize_threshold:0,dirty_decay_ms:60000,muzzy_decay_ms:0".as_ptr().cast());
