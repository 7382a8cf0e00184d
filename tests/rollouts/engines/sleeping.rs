//! Servers that sleep while the trainer takes a step, as SGLang does.

use std::sync::{Arc, Mutex};

use rollflow::engine::remote::EngineMemory;
use rollflow::engine::remote::sync::WeightSyncManager;
use rollflow::flow::{Capacity, Ended, from_iter};
use rollflow::prelude::*;
use rollflow::stages::sync::{EvaluationHold, SleepServers};

use super::protocols::sglang;
use super::server::{Server, Sleeper, wait_for};
use super::{handle, manager, unprobed};

/// A manager of new clients of this server, as a run has it.
fn run_with(server: &Server, sleep: bool) -> WeightSyncManager {
    let mut manager = manager(&handle([sglang(&server.url)]));
    manager.config.sleep = sleep;
    manager
}

/// SGLang ends if it is woken twice, and if it computes with memory that it has freed.
#[test]
fn v4_sglang_takes_all_its_memory_again_when_a_sync_fails_on_the_way_and_after_a_run_that_was_killed() {
    let state = Arc::<Mutex<Sleeper>>::default();
    let server = Server::sleeper(&state);
    let refuse = |label: Option<char>| state.lock().unwrap().refuses = label;
    let awake_with = |label: &str| {
        let state = state.lock().unwrap();
        assert!(state.label == label && state.asleep.is_empty() && !state.ended, "{label}: {state:?}");
    };
    let run = run_with(&server, true);
    let served = |run: &WeightSyncManager| wait_for(run.fleet.engine(0).unwrap().weights().unwrap().served()).unwrap();
    wait_for(run.sync(unprobed(7))).unwrap();
    awake_with("7");
    wait_for(run.sleep());
    assert_eq!(state.lock().unwrap().label, "7 (asleep)");
    assert_eq!(served(&run).as_deref(), Some("7"), "it is not taken for one that restarted");
    // The next sync fails after the load, and is repeated.
    refuse(Some('8'));
    wait_for(run.sync(unprobed(8))).unwrap_err();
    assert_eq!(state.lock().unwrap().label, "8 (cache asleep)");
    refuse(None);
    wait_for(run.sync(unprobed(8))).unwrap();
    awake_with("8");
    // The run ends instead.
    wait_for(run.sleep());
    refuse(Some('9'));
    wait_for(run.sync(unprobed(9))).unwrap_err();
    refuse(None);
    wait_for(run.wake());
    awake_with("9");
    // A stage that is late puts nothing to sleep.
    wait_for(run.sleep());
    awake_with("9");
    // The next run is killed while it sleeps, and the one after it does not even sleep.
    let run = run_with(&server, true);
    wait_for(run.sleep());
    refuse(Some('1'));
    wait_for(run.sync(unprobed(10))).unwrap_err();
    refuse(None);
    wait_for(run_with(&server, false).sync(unprobed(11))).unwrap();
    awake_with("11");
}

/// Law F5: of three batches the third is asked for once the first waits for an evaluation, which never ends.
#[test]
fn f5_a_stop_during_an_evaluation_puts_no_server_to_sleep() {
    let state = Arc::<Mutex<Sleeper>>::default();
    let server = Server::sleeper(&state);
    let run = run_with(&server, true);
    wait_for(run.sync(unprobed(7))).unwrap();
    let mut flow = Flow::new("sleep");
    flow.capacity(Capacity::items(1));
    let (handle, mut sent) = (flow.handle(), 0);
    let next = move || {
        sent += 1;
        if sent == 3 {
            // Until the stage waits for the evaluation.
            std::thread::sleep(std::time::Duration::from_millis(100));
            handle.stop();
        }
        Some(Batch::default())
    };
    let batches = flow.source("batches", from_iter(std::iter::from_fn(next)));
    let batches = flow.stage("sleep", batches, SleepServers::new(run).hold(&EvaluationHold::new(|_| true)));
    flow.sink("seen", batches, |_: Batch| {});
    assert_eq!(flow.run(Until::finished()).unwrap().ended, Ended::Stopped);
    assert!(state.lock().unwrap().asleep.is_empty(), "{state:?}");
}

/// With adapters alone nothing labels the weights.
#[test]
fn an_sglang_server_without_a_label_tells_the_next_run_that_it_sleeps() {
    let state = Arc::new(Mutex::new(Sleeper { label: "default".into(), ..Sleeper::default() }));
    let server = Server::sleeper(&state);
    wait_for(run_with(&server, true).sleep());
    assert_eq!(state.lock().unwrap().label, "default (asleep)");
    let next = sglang(&server.url);
    let control = next.weights().unwrap();
    assert_eq!(wait_for(control.served()).unwrap(), None);
    for _ in 0..2 {
        for part in [EngineMemory::Weights, EngineMemory::Cache] {
            wait_for(control.wake(part)).unwrap();
        }
    }
    let state = state.lock().unwrap();
    assert!(state.label == "default" && state.asleep.is_empty() && !state.ended, "{state:?}");
}
