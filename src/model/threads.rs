//! How many threads share an operation of libtorch.

use std::ffi::c_int;

use super::{Layout, ModelConfig};
use crate::util::cores::cores;

/// So many parameters are work enough for one more thread of an engine on a processor.
const PARAMETERS_OF_A_THREAD: usize = 1 << 22;

unsafe extern "C" {
    fn rollflow_use_threads(threads: c_int);
}

/// Sets it for the operations that this thread starts, whatever other threads set before or afterwards.
pub(crate) fn use_threads(threads: usize) {
    let threads = c_int::try_from(threads.max(1)).unwrap_or(c_int::MAX);
    // SAFETY: takes a number, which is positive.
    unsafe { rollflow_use_threads(threads) }
}

/// Threads of an engine by the size of its model, at most the machine's.
pub(crate) fn threads_of_engine(model: &ModelConfig) -> usize {
    (Layout::new(model).total() / PARAMETERS_OF_A_THREAD).clamp(1, cores())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tch::{Kind, Tensor};

    use super::*;
    use crate::model::fused;

    #[test]
    fn a_thread_keeps_its_number_when_another_sets_its_own_afterwards() {
        let (first_has_set, second_begins) = mpsc::channel();
        let (first_goes_on, second_has_set) = mpsc::channel();
        let first = std::thread::spawn(move || {
            use_threads(3);
            first_has_set.send(()).unwrap();
            second_has_set.recv().unwrap();
            // Operations of ours take numbers over apart from libtorch's.
            let x = Tensor::ones([4096, 64], (Kind::Float, tch::Device::Cpu));
            let _normed = fused::rms_norm(&x, &Tensor::ones([64], (Kind::Float, tch::Device::Cpu)), 1e-6);
            tch::get_num_threads()
        });
        let second = std::thread::spawn(move || {
            second_begins.recv().unwrap();
            use_threads(2);
            first_goes_on.send(()).unwrap();
            tch::get_num_threads()
        });
        assert_eq!((first.join().unwrap(), second.join().unwrap()), (3, 2));
    }
}
