//! CUDA graphs: kernels that are recorded once and then started together, for steps of so many small kernels
//! that starting them one by one takes longer than running them.

use std::ffi::c_char;

use super::c_text::{check, taken};

#[repr(C)]
struct CGraph {
    _private: [u8; 0],
}

unsafe extern "C" {
    fn rollflow_graphs() -> bool;
    fn rollflow_graph_pool(pool: *mut u64);
    fn rollflow_graph_begin(pool: *const u64, graph: *mut *mut CGraph) -> *mut c_char;
    fn rollflow_graph_end(graph: *mut CGraph) -> *mut c_char;
    fn rollflow_graph_replay(graph: *mut CGraph) -> *mut c_char;
    fn rollflow_graph_free(graph: *mut CGraph);
}

/// Memory of graphs of which one runs at a time, and whose results are copied before the next one runs.
pub(crate) struct GraphPool([u64; 2]);

impl GraphPool {
    /// `None` if this libtorch records no graphs.
    pub fn new() -> Option<Self> {
        let mut pool = [0; 2];
        // SAFETY: two numbers are written where there are graphs.
        unsafe { rollflow_graphs().then(|| rollflow_graph_pool(pool.as_mut_ptr())) }?;
        Some(GraphPool(pool))
    }
}

/// A recorded graph. Its inputs and results are tensors that must live as long.
pub(crate) struct Graph(*mut CGraph);

impl Graph {
    /// Records what `work` asks of this thread's stream, which must not be the default one. Nothing of it runs. It must
    /// neither wait for the device nor read from the host.
    ///
    /// # Errors
    /// libtorch's message if it cannot be recorded.
    pub fn record<T>(pool: &GraphPool, work: impl FnOnce() -> T) -> Result<(Self, T), String> {
        let mut graph = std::ptr::null_mut();
        let begun = taken(unsafe { rollflow_graph_begin(pool.0.as_ptr(), &mut graph) });
        let graph = Graph(graph);
        begun?;
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        let ended = taken(unsafe { rollflow_graph_end(graph.0) });
        let done = done.map_err(|_| "an operation in it cannot be recorded".to_owned())?;
        ended?;
        Ok((graph, done))
    }

    /// Runs it in this thread's stream.
    pub fn replay(&self) {
        check(unsafe { rollflow_graph_replay(self.0) });
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by `record`, and freed once.
            unsafe { rollflow_graph_free(self.0) };
        }
    }
}
