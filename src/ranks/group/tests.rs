//! Groups of ranks that are threads of one process.

use tch::{Device, Kind};

use super::*;
use crate::ranks::device;

const DEADLINE: Duration = Duration::from_secs(20);

/// A group that the rank of this `place` is to join.
fn joining(store: &Store, place: [usize; 2], deadline: Duration, devices: Option<DeviceGroups>) -> Joining<'_> {
    Joining { store, name: "group", address: "127.0.0.1", place, deadline, devices, alone: false }
}

/// Runs `work` on each of `size` ranks, in threads of this process, and returns their results.
fn ranks<T: Send>(size: usize, work: impl Fn(Group) -> T + Sync) -> Vec<T> {
    ranks_on(None, size, work)
}

/// The same. `devices`: makes the groups for tensors of a GPU.
fn ranks_on<T: Send>(devices: Option<DeviceGroups>, size: usize, work: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let served = Store::open("127.0.0.1", 0, true, "test", DEADLINE).unwrap();
    let join = |rank: usize| {
        let store = Store::open("127.0.0.1", served.port(), false, "test", DEADLINE).unwrap();
        work(joining(&store, [rank, size], DEADLINE, devices).join(&Arc::default()).unwrap())
    };
    let join = &join;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || join(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn sums_parts_and_bytes_are_exact_for_each_number_of_ranks() {
    for size in 1..=4 {
        let results = ranks(size, |mut group| {
            let rank = group.rank() as i64;
            let mut sum = Tensor::arange(6, (Kind::Float, Device::Cpu)) + rank as f64;
            group.all_reduce(&mut sum).unwrap();
            let whole = Tensor::arange(3 * size as i64, (Kind::Float, Device::Cpu)) * (rank + 1) as f64;
            let part = group.reduce_scatter(&whole).unwrap();
            let gathered = group.gather(&part).unwrap().wait().unwrap();
            let bytes = group.gather_bytes(&vec![rank as u8; rank as usize]).unwrap();
            let told = group.broadcast_bytes(if rank == 0 { b"from rank 0" } else { b"" }).unwrap();
            (sum, gathered, bytes, told)
        });
        let ranks = size as f64;
        let (all, factor) = ((0..size).map(|rank| rank as f64).sum::<f64>(), ranks * (ranks + 1.0) / 2.0);
        for (sum, gathered, bytes, told) in results {
            assert_eq!(sum, Tensor::arange(6, (Kind::Float, Device::Cpu)) * ranks + all);
            assert_eq!(gathered, Tensor::arange(3 * size as i64, (Kind::Float, Device::Cpu)) * factor);
            assert_eq!(bytes, (0..size).map(|rank| vec![rank as u8; rank]).collect::<Vec<_>>());
            assert_eq!(told, b"from rank 0");
        }
    }
}

#[test]
fn a_rank_that_comes_when_a_wait_is_looked_at_fails_no_call() {
    let results = ranks(2, |mut group| {
        let late = |group: &Group| std::thread::sleep(Duration::from_millis(100 * group.rank() as u64));
        (0..30).try_for_each(|_| {
            late(&group);
            group.all_reduce(&mut Tensor::ones([4], (Kind::Float, Device::Cpu)))
        })
    });
    assert_eq!(results, [Ok(()), Ok(())]);
}

#[test]
fn a_join_ends_with_the_run_though_the_other_rank_never_comes() {
    let store = Store::open("127.0.0.1", 0, true, "test", DEADLINE).unwrap();
    let signals = Arc::new(Signals { cancelled: true.into(), ..Signals::default() });
    let joined = joining(&store, [0, 2], Duration::from_secs(1), None).join(&signals);
    let error = joined.map(drop).unwrap_err();
    assert!(error.0.contains("the run is ending"), "{error}");
}

#[test]
fn a_group_that_was_given_up_is_freed_with_the_port_of_its_store() {
    let store = Store::open("127.0.0.1", 0, true, "test", DEADLINE).unwrap();
    let (port, signals) = (store.port(), Arc::<Signals>::default());
    let group = joining(&store, [0, 1], DEADLINE, None).join(&signals).unwrap();
    signals.cancelled.store(true, Release);
    drop((group, store));
    let until = Instant::now() + DEADLINE;
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_ok() {
        assert!(Instant::now() < until, "port {port} is still served");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What makes groups for tensors of a GPU's stand-in, which several ranks may share.
fn stand_in() -> Option<DeviceGroups> {
    // SAFETY: the function is not called.
    unsafe { libloading::os::unix::Library::this().get::<*const ()>(b"stand_in_counts\0") }.ok()?;
    device::groups(0).ok()
}

/// On a GPU as NCCL reports it: the call is completed, and has an error.
#[test]
fn a_rank_that_left_fails_the_others_calls_long_before_the_deadline() {
    let on_a_gpu = stand_in().map(|devices| (Some(devices), Device::Cuda(0)));
    for (devices, device) in [(None, Device::Cpu)].into_iter().chain(on_a_gpu) {
        let started = Instant::now();
        let results = ranks_on(devices, 3, |mut group| {
            // All are there.
            group.all_reduce(&mut Tensor::ones([4], (Kind::Float, device))).unwrap();
            if group.rank() == 1 {
                return None;
            }
            group.all_reduce(&mut Tensor::ones([4], (Kind::Float, device))).err()
        });
        assert!(results[0].is_some() && results[2].is_some(), "{device:?}: {results:?}");
        assert!(started.elapsed() < DEADLINE, "{device:?}: {results:?}");
    }
}
