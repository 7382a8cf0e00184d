//! How many threads share an operation of libtorch, and a decoding step.

use std::ffi::c_int;

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::{Layout, ModelConfig};
use crate::util::cores::cores;

/// So many parameters are work enough for one more thread of an engine on a processor.
const PARAMETERS_OF_A_THREAD: usize = 1 << 22;

unsafe extern "C" {
    fn rollflow_use_threads(threads: c_int);
    fn rollflow_release_helpers();
}

/// Sets it for the operations that this thread starts, whatever other threads set before or afterwards.
pub(crate) fn use_threads(threads: usize) {
    let threads = c_int::try_from(threads.max(1)).unwrap_or(c_int::MAX);
    // SAFETY: takes a number, which is positive.
    unsafe { rollflow_use_threads(threads) }
}

/// Ends the threads that help with this thread's operations, before it waits for work. Its next operation
/// starts others.
///
/// OpenMP counts the helpers of all threads. If there are more than cores, all of them sleep between
/// operations instead of looking out for the next for a while, and waking them takes as long as a small
/// operation.
pub(crate) fn release_helpers() {
    // SAFETY: takes no arguments; inside an operation of several threads it does nothing.
    unsafe { rollflow_release_helpers() }
}

/// Threads of an engine by the size of its model, at most the machine's.
pub(crate) fn threads_of_engine(model: &ModelConfig) -> usize {
    (Layout::new(model).total() / PARAMETERS_OF_A_THREAD).clamp(1, cores())
}

/// Rows of a decoding step that are worth a thread.
const ROWS_OF_A_THREAD: usize = 8;

/// Threads of an engine on a processor. Where operations are too small for all of them, each computes some
/// rows of a decoding step.
#[derive(Default)]
pub(crate) struct StepThreads {
    /// One thread fewer than there are parts.
    pool: Option<ThreadPool>,
}

impl StepThreads {
    /// Lets `threads` compute steps of this model: operations of the caller's thread take as many as are worth
    /// it. Where no thread can start, the caller's computes alone, and a warning says so.
    pub fn new(model: &ModelConfig, threads: usize) -> Self {
        let of_each = threads_of_engine(model).min(threads).max(1);
        use_threads(of_each);
        let more = threads / of_each;
        if more < 2 {
            return StepThreads::default();
        }
        let pool = ThreadPoolBuilder::new()
            .num_threads(more - 1)
            .thread_name(|index| format!("generate-{}", index + 1))
            .start_handler(move |_| use_threads(of_each))
            .build();
        StepThreads { pool: pool.inspect_err(|error| tracing::warn!("one thread generates instead of {threads}: {error}")).ok() }
    }

    /// Ends all helpers, before the caller's thread waits ([`release_helpers`]).
    pub fn rest(&self) {
        release_helpers();
        self.pool.iter().for_each(|pool| drop(pool.broadcast(|_| release_helpers())));
    }

    /// Parts of a step with so many rows.
    pub fn parts(&self, rows: usize) -> usize {
        let most = self.pool.as_ref().map_or(1, |pool| pool.current_num_threads() + 1);
        most.min(rows / ROWS_OF_A_THREAD).max(1)
    }

    /// Does `work` with each part at the same time, and returns the results in their order. A panic is passed on.
    pub fn each<P: Send, T: Send>(&self, parts: Vec<P>, work: impl Fn(P) -> T + Sync) -> Vec<T> {
        let Some(pool) = self.pool.as_ref().filter(|_| parts.len() > 1) else { return parts.into_iter().map(work).collect() };
        let mut done: Vec<Option<T>> = parts.iter().map(|_| None).collect();
        let work = &work;
        pool.in_place_scope(|scope| {
            let mut places = parts.into_iter().zip(&mut done);
            let own = places.next();
            for (part, place) in places {
                scope.spawn(move |_| *place = Some(work(part)));
            }
            own.into_iter().for_each(|(part, place)| *place = Some(work(part)));
        });
        done.into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tch::{Kind, Tensor};

    use super::*;
    use crate::model::fused;

    fn two() -> StepThreads {
        StepThreads { pool: Some(ThreadPoolBuilder::new().num_threads(1).build().unwrap()) }
    }

    #[test]
    fn parts_are_done_each_once_and_returned_in_order_and_few_rows_are_not_divided() {
        assert_eq!(two().each((0..9).collect(), |part: i32| part * part), (0..9).map(|part| part * part).collect::<Vec<_>>());
        assert_eq!([15, 16, 400].map(|rows| two().parts(rows)), [1, 2, 2]);
        assert_eq!(StepThreads::default().parts(400), 1);
    }

    #[test]
    #[should_panic(expected = "part 1")]
    fn a_panic_of_a_part_is_passed_on() {
        two().each(vec![0, 1], |part| assert!(part != 1, "part {part}"));
    }

    /// Threads have the name of the one that started them.
    #[cfg(target_os = "linux")]
    fn threads_named(name: &str) -> usize {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.filter(|found| found.trim_end() == name).count()
    }

    /// A thread that was joined is listed until the system has removed it.
    #[cfg(target_os = "linux")]
    fn one_is_left_of(name: &str) -> bool {
        (0..5000).any(|_| {
            threads_named(name) == 1 || {
                std::thread::sleep(std::time::Duration::from_millis(1));
                false
            }
        })
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn helpers_end_when_they_are_released_and_the_next_operation_starts_others() {
        let name = "has-helpers";
        let counted = || {
            use_threads(3);
            let x = Tensor::ones([4096, 64], (Kind::Float, tch::Device::Cpu));
            let computed = || {
                let _sums = &x + &x;
                threads_named(name)
            };
            assert_eq!(computed(), 3);
            release_helpers();
            assert!(one_is_left_of(name));
            assert_eq!(computed(), 3);
        };
        std::thread::Builder::new().name(name.into()).spawn(counted).unwrap().join().unwrap();
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn helpers_of_every_part_of_a_step_end_when_it_rests() {
        let name = "computes-a-part";
        let of_parts = ThreadPoolBuilder::new().num_threads(1).thread_name(move |_| name.into());
        let threads = StepThreads { pool: Some(of_parts.start_handler(|_| use_threads(3)).build().unwrap()) };
        let computed = |part: i64| {
            let x = Tensor::full([4096, 64], part, (Kind::Float, tch::Device::Cpu));
            drop(&x + &x);
        };
        threads.each(vec![1, 2], computed);
        assert_eq!(threads_named(name), 3);
        threads.rest();
        assert!(one_is_left_of(name));
    }

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
