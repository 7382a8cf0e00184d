//! Runs numbered tasks on several workers and returns results in order.
//!
//! A worker takes the next task when it is free, so that a slow one delays no other. Results are
//! taken by number, so that sums over them do not depend on timing.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::{ThreadPool, ThreadPoolBuilder};

/// Workers, and a thread for each; a single one works on the caller's.
pub(super) struct SideBySide<W> {
    workers: Vec<W>,
    pool: Option<ThreadPool>,
}

impl<W: Send> SideBySide<W> {
    /// Starts one thread per worker, called `name` and a number; `start` runs first on each. Fails
    /// if a thread cannot start.
    pub fn new(workers: Vec<W>, name: &'static str, start: impl Fn() + Send + Sync + 'static) -> std::io::Result<Self> {
        let threads = ThreadPoolBuilder::new()
            .num_threads(workers.len())
            .thread_name(move |index| format!("{name}-{index}"))
            .start_handler(move |_| start());
        let pool = (workers.len() > 1).then(|| threads.build().map_err(std::io::Error::other)).transpose()?;
        Ok(SideBySide { workers, pool })
    }

    /// Number of workers.
    pub fn len(&self) -> usize {
        self.workers.len()
    }

    /// Runs tasks `0..count` and passes each result to `take` on the calling thread, in ascending
    /// order. After a break no further task starts, and results of running ones are dropped. A
    /// worker's panic is propagated.
    pub fn run<T: Send>(
        &mut self,
        count: usize,
        work: impl Fn(&mut W, usize) -> T + Sync,
        mut take: impl FnMut(usize, T) -> ControlFlow<()>,
    ) {
        let Some(pool) = &self.pool else {
            let Some(worker) = self.workers.first_mut() else { return };
            let _stopped = (0..count).try_for_each(|piece| take(piece, work(worker, piece)));
            return;
        };
        let next = AtomicUsize::new(0);
        let (answers, answered) = crossbeam_channel::unbounded();
        pool.in_place_scope(|scope| {
            for worker in &mut self.workers {
                let (answers, next, work) = (answers.clone(), &next, &work);
                scope.spawn(move |_| {
                    loop {
                        let piece = next.fetch_add(1, Ordering::Relaxed);
                        if piece >= count || answers.send((piece, work(worker, piece))).is_err() {
                            break;
                        }
                    }
                });
            }
            drop(answers);
            let (mut early, mut expected) = (BTreeMap::new(), 0);
            for (piece, answer) in answered {
                early.insert(piece, answer);
                while let Some(answer) = early.remove(&expected) {
                    if take(expected, answer).is_break() {
                        next.store(count, Ordering::Relaxed);
                        return;
                    }
                    expected += 1;
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_come_in_order_each_once_whichever_is_faster_until_a_break() {
        for (delays, end) in [(vec![0], 40), (vec![0, 50, 100], 40), (vec![0], 4), (vec![0, 0], 4)] {
            let slow_first = |delay: &mut u64, piece: usize| {
                std::thread::sleep(std::time::Duration::from_micros(if piece.is_multiple_of(5) { 900 } else { *delay }));
                piece * piece
            };
            let mut seen = Vec::new();
            SideBySide::new(delays, "test", || {}).unwrap().run(40, slow_first, |piece, square| {
                seen.push((piece, square));
                if seen.len() == end { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            assert_eq!(seen, (0..end).map(|piece| (piece, piece * piece)).collect::<Vec<_>>());
        }
    }

    #[test]
    #[should_panic(expected = "piece 2")]
    fn a_panic_is_passed_on() {
        let work = |(): &mut (), piece: usize| assert!(piece != 2, "piece 2");
        SideBySide::new(vec![(); 2], "test", || {}).unwrap().run(5, work, |_, ()| ControlFlow::Continue(()));
    }
}
