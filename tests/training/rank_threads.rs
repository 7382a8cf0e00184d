//! Ranks of a run as threads of this process.

use std::sync::Arc;

use rollflow::ranks::{Member, Order, Place, RankError, Ranks, Shard};
use rollflow::train::{LocalConfig, TrainError, TrainerRanks, follow};

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
pub fn each<T: Send>(size: usize, settings: &Ranks, work: impl Fn(Result<Arc<Member>, RankError>) -> T + Sync) -> Vec<T> {
    let port = free_port();
    std::thread::scope(|scope| {
        let (work, ranks) = (&work, 0..size);
        let join = |rank| Member::join(place(rank, size, port), settings, "seed = 1\n", Default::default(), None);
        let start = |rank| scope.spawn(move || work(join(rank)));
        let threads: Vec<_> = ranks.map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The trainer of rank 0, whose work the other ranks share.
pub fn shared(config: LocalConfig, member: &Arc<Member>, shard: Shard) -> LocalConfig {
    LocalConfig { ranks: Some(TrainerRanks { member: member.clone(), name: "policy", shard }), ..config }
}

/// Follows it. No batch brings an algorithm.
pub fn following(config: LocalConfig, member: &Arc<Member>, number: u64) -> Result<(), TrainError> {
    follow(config, member, number, &|_| Err("a batch has an algorithm".to_owned()))
}

/// Runs `work` on rank 0 with a configuration that shares its trainer's work with the other ranks, which follow.
/// Returns its result, and how each other rank ended.
pub fn led<T: Send>(
    size: usize,
    shard: Shard,
    config: impl Fn() -> LocalConfig + Sync,
    work: impl Fn(LocalConfig) -> T + Sync,
) -> (T, Vec<Result<(), TrainError>>) {
    led_copies([1, size], shard, config, work)
}

/// [`led`] by ranks that hold several copies of the divided state, each divided among as many.
pub fn led_copies<T: Send>(
    [replicas, parts]: [usize; 2],
    shard: Shard,
    config: impl Fn() -> LocalConfig + Sync,
    work: impl Fn(LocalConfig) -> T + Sync,
) -> (T, Vec<Result<(), TrainError>>) {
    let results = each(replicas * parts, &Ranks { replicas, ..settings() }, |member| {
        let member = member.unwrap();
        if member.rank() == 0 {
            let result = work(shared(config(), &member, shard));
            member.end(0);
            return (Some(result), Ok(()));
        }
        let mut ended = Ok(());
        loop {
            match member.order() {
                Ok(Order::Follow(_, number)) => ended = ended.and(following(config(), &member, number)),
                Ok(Order::End(_)) => break member.end(0),
                Err(error) => break ended = ended.and(Err(TrainError::Ranks(error.to_string()))),
            }
        }
        (None, ended)
    });
    let mut results = results.into_iter();
    let first = results.next().unwrap().0.unwrap();
    (first, results.map(|(_, ended)| ended).collect())
}
