//! Waits that one writer or several end from elsewhere: signals (law F5), admission, weights (laws F2 and V1).

use std::sync::Arc;

use shuttle::thread::spawn;

use crate::control::{Control, Signal};
use crate::explore;
use crate::wait::block_on;
use crate::weights::{OutdatedVersion, weights};
use crate::window::Window;

#[test]
fn drain_and_stop_reach_every_waiter_and_never_fall() {
    explore(|| {
        let control = Control::new();
        let waiters = [Signal::Drain, Signal::Stop, Signal::Stop].map(|signal| {
            let control = control.clone();
            spawn(move || {
                block_on(control.reached(signal));
                assert!(control.signal() >= signal, "who was woken by a signal sees it");
            })
        });
        let watcher = spawn({
            let control = control.clone();
            move || assert!([(); 4].map(|()| control.signal()).is_sorted(), "a signal only ever rises")
        });
        let stopper = spawn({
            let control = control.clone();
            move || control.stop()
        });
        control.drain();
        stopper.join().unwrap();
        waiters.into_iter().chain([watcher]).for_each(|waiter| waiter.join().unwrap());
        assert_eq!((control.signal(), control.asked()), (Signal::Stop, Signal::Stop));
    });
}

#[test]
fn every_raise_of_a_window_lets_in_as_many_as_it_says_and_no_more() {
    explore(|| {
        let (window, control) = (Window::new(1), Control::new());
        let sources = [(); 2].map(|()| {
            let (window, control) = (window.clone(), control.clone());
            spawn(move || (0..2).all(|_| block_on(window.admit(&control))))
        });
        let raisers =
            [Box::new(|window: &Window| window.limit_to(2)) as Box<dyn Fn(&Window) + Send>, Box::new(|window| window.raise(2))]
                .map(|raise| {
                    let window = window.clone();
                    spawn(move || raise(&window))
                });
        // The count first: a limit never falls.
        let (admitted, limit) = (window.admitted(), window.limit());
        assert!(admitted <= limit, "{admitted} of {limit}");
        raisers.into_iter().for_each(|raiser| raiser.join().unwrap());
        // Whether the total or the addition came first decides the limit; the last place is given here.
        window.limit_to(4);
        assert!(sources.map(|source| source.join().unwrap()).iter().all(|admitted| *admitted));
        assert_eq!(window.admitted(), 4);
    });
}

#[test]
fn a_place_given_back_is_taken_by_who_waits_for_it() {
    explore(|| {
        let (window, control) = (Window::new(1), Control::new());
        assert!(window.try_admit());
        let waiter = spawn({
            let (window, control) = (window.clone(), control.clone());
            move || block_on(window.admit(&control))
        });
        window.give_back();
        assert!(waiter.join().unwrap());
        assert_eq!(window.admitted(), 1);
    });
}

#[test]
fn a_drain_wakes_all_who_wait_for_admission_and_counts_none_of_them() {
    explore(|| {
        let (window, control) = (Window::new(1), Control::new());
        let sources = [(); 3].map(|()| {
            let (window, control) = (window.clone(), control.clone());
            spawn(move || u64::from(block_on(window.admit(&control))))
        });
        let raiser = spawn({
            let window = window.clone();
            move || window.limit_to(2)
        });
        control.drain();
        let admitted: u64 = sources.into_iter().map(|source| source.join().unwrap()).sum();
        raiser.join().unwrap();
        assert_eq!(window.admitted(), admitted);
        assert!(admitted <= 2);
    });
}

#[test]
fn a_reader_never_misses_the_newest_weights_and_hears_of_the_publishers_end() {
    const LAST: u64 = 3;
    explore(|| {
        let (tx, rx) = weights::<u64>();
        let readers = [1, LAST].map(|first| {
            let mut rx = rx.clone();
            spawn(move || {
                let mut seen = 0;
                while let Some((version, weights)) = block_on(rx.reach(first.max(seen + 1))) {
                    assert!(version > seen, "versions only rise");
                    assert_eq!(*weights, 10 * version, "a version and its weights belong together");
                    assert!(!rx.has_newer_than(LAST) && rx.version() >= Some(version), "what was published stays");
                    seen = version;
                }
                seen
            })
        });
        for version in 1..=LAST {
            tx.publish(version, Arc::new(10 * version)).unwrap();
        }
        assert_eq!(tx.publish(LAST, Arc::new(0)), Err(OutdatedVersion { offered: LAST, current: LAST }));
        drop(tx);
        for reader in readers {
            assert_eq!(reader.join().unwrap(), LAST);
        }
        assert_eq!(rx.latest(), Some((LAST, Arc::new(10 * LAST))));
    });
}
