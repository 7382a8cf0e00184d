//! Ranks of a run as threads of this process.

use std::sync::Arc;

use rollflow::algo::CrossEntropy;
use rollflow::ranks::{Member, Order, Place, RankError, Ranks};
use rollflow::train::{Algorithm, LocalConfig, TrainError, TrainerRanks, follow};

/// Generous, for loaded machines: nothing here waits for it unless it fails.
pub fn settings() -> Ranks {
    Ranks { start_timeout: 60.0, exchange_timeout: 60.0, lost_timeout: 30.0, ..Ranks::default() }
}

pub fn place(rank: usize, size: usize, port: u16) -> Place {
    let (host, attempt) = ("127.0.0.1".to_owned(), String::new());
    Place { rank, size, local_rank: rank, host, port, store_exists: false, attempt }
}

/// A port that is free now.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Joins every rank of a run in a thread of its own, and returns what `work` makes of each membership.
pub fn each<T: Send>(size: usize, work: impl Fn(Result<Arc<Member>, RankError>) -> T + Sync) -> Vec<T> {
    let port = free_port();
    std::thread::scope(|scope| {
        let (work, ranks) = (&work, 0..size);
        let start = |rank| scope.spawn(move || work(Member::join(place(rank, size, port), &settings(), "seed = 1\n")));
        let threads: Vec<_> = ranks.map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A trainer's part in a run.
pub fn shared(config: LocalConfig, member: &Arc<Member>) -> LocalConfig {
    let algorithms = Arc::new(|_| Ok(Arc::new(Algorithm::new(CrossEntropy))));
    LocalConfig { ranks: Some(TrainerRanks { member: member.clone(), name: "policy".to_owned(), algorithms }), ..config }
}

/// Runs `work` on rank 0 with a configuration that shares its trainer's work with the other ranks, which follow.
/// Returns its result, and how each other rank ended.
pub fn led<T: Send>(
    size: usize,
    config: impl Fn() -> LocalConfig + Sync,
    work: impl Fn(LocalConfig) -> T + Sync,
) -> (T, Vec<Result<(), TrainError>>) {
    let results = each(size, |member| {
        let member = member.unwrap();
        if member.rank() == 0 {
            let result = work(shared(config(), &member));
            member.end(true);
            return (Some(result), Ok(()));
        }
        let mut ended = Ok(());
        loop {
            match member.order() {
                Ok(Order::Follow(_, number)) => ended = ended.and(follow(shared(config(), &member), number)),
                Ok(Order::End(_)) => break member.end(true),
                Err(error) => break ended = ended.and(Err(TrainError::Ranks(error.to_string()))),
            }
        }
        (None, ended)
    });
    let mut results = results.into_iter();
    let first = results.next().unwrap().0.unwrap();
    (first, results.map(|(_, ended)| ended).collect())
}
