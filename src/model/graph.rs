//! CUDA graphs: kernels that are recorded once and then started together, for steps of so many small kernels
//! that starting them one by one takes longer than running them.

use std::ffi::c_char;
use std::rc::Rc;

use tch::Device;

use super::c_text::{check, taken};

#[repr(C)]
struct CGraph {
    _private: [u8; 0],
}

unsafe extern "C" {
    fn rollflow_graphs() -> bool;
    fn rollflow_graph_pool(pool: *mut u64);
    fn rollflow_graph_begin(pool: *const u64, device: i64, graph: *mut *mut CGraph) -> *mut c_char;
    fn rollflow_graph_end(graph: *mut CGraph) -> *mut c_char;
    fn rollflow_graph_replay(graph: *mut CGraph) -> *mut c_char;
    fn rollflow_graph_free(graph: *mut CGraph);
}

/// Memory of graphs of which one runs at a time, and whose results are copied before the next one runs.
pub(crate) struct GraphPool {
    index: usize,
    /// libtorch's numbers, once there was a graph.
    numbers: [u64; 2],
    /// Each graph has a part of it.
    graphs: Rc<()>,
}

impl GraphPool {
    /// `None` if this device and libtorch record no graphs.
    pub fn new(device: Device) -> Option<Self> {
        let Device::Cuda(index) = device else { return None };
        // SAFETY: it looks functions up.
        unsafe { rollflow_graphs() }.then(|| GraphPool { index, numbers: [0; 2], graphs: Rc::default() })
    }

    /// libtorch's numbers. It takes no pool whose graphs are all gone, so that the first graph gets another one.
    fn numbers(&mut self) -> [u64; 2] {
        if Rc::strong_count(&self.graphs) == 1 {
            // SAFETY: two numbers are written.
            unsafe { rollflow_graph_pool(self.numbers.as_mut_ptr()) };
        }
        self.numbers
    }
}

/// A recorded graph. Its inputs and results are tensors that must live as long.
pub(crate) struct Graph {
    graph: *mut CGraph,
    _of_pool: Rc<()>,
}

impl Graph {
    /// Records what `work` asks of this thread's stream of the pool's device, which must not be the default
    /// one. Nothing of it runs. It must neither wait for the device nor read from the host.
    ///
    /// # Errors
    /// libtorch's message if it cannot be recorded.
    pub fn record<T>(pool: &mut GraphPool, work: impl FnOnce() -> T) -> Result<(Self, T), String> {
        let (numbers, mut graph) = (pool.numbers(), std::ptr::null_mut());
        let begun = taken(unsafe { rollflow_graph_begin(numbers.as_ptr(), pool.index as i64, &mut graph) });
        let graph = Graph { graph, _of_pool: pool.graphs.clone() };
        begun?;
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        let ended = taken(unsafe { rollflow_graph_end(graph.graph) });
        let done = done.map_err(|_| "an operation in it cannot be recorded".to_owned())?;
        ended?;
        Ok((graph, done))
    }

    /// Runs it in this thread's stream.
    pub fn replay(&self) {
        check(unsafe { rollflow_graph_replay(self.graph) });
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if !self.graph.is_null() {
            // SAFETY: made by `record`, and freed once.
            unsafe { rollflow_graph_free(self.graph) };
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;
    use crate::model::stream::Stream;
    use crate::model::{Compute, Dtype};

    /// Recordings that libtorch's allocator has at work; `None` without the stand-in of a GPU.
    fn at_work() -> Option<u64> {
        type Ask = unsafe extern "C" fn(i64, *mut u64, *mut u64);
        let process = libloading::os::unix::Library::this();
        let (mut recordings, mut none) = (0, 0);
        // SAFETY: a function of the stand-in, by its signature.
        unsafe { process.get::<Ask>(b"stand_in_recordings\0").ok()?(0, &mut recordings, &mut none) };
        Some(recordings)
    }

    /// Also of a GPU that is not the thread's current one.
    #[test]
    fn graphs_are_recorded_also_after_all_are_gone_and_after_one_has_failed() {
        let Some(index) = [1, 0].into_iter().find(|index| Compute::cuda(*index, Dtype::F32).check().is_ok()) else {
            return eprintln!("skipped: no GPU");
        };
        let device = Device::Cuda(index);
        let stream = Stream::new(device);
        let _stream = stream.enter();
        let x = Tensor::ones([4], (Kind::Float, device));
        let mut pool = GraphPool::new(device).unwrap();
        let mut sum = || {
            let (graph, sum) = Graph::record(&mut pool, || &x + 1.0).unwrap();
            graph.replay();
            sum.to_device(Device::Cpu).double_value(&[0])
        };
        assert_eq!([sum(), sum()], [2.0, 2.0]);
        let failed = Graph::record(&mut pool, || (&x + 1.0).double_value(&[0]));
        assert!(failed.is_err(), "the host reads a number");
        // Other tests record, too, but not for long.
        let ended = (0..1000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            at_work().is_none_or(|recordings| recordings == 0)
        });
        assert!(ended, "the recording that failed is still at work");
        let (graph, sum) = Graph::record(&mut pool, || &x + 2.0).unwrap();
        graph.replay();
        assert_eq!(sum.to_device(Device::Cpu).double_value(&[0]), 3.0);
    }
}
