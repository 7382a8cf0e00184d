//! What ranks send for each division of the state, against the formulas of `docs/how_to/ranks.md`.
//!
//! TCP counts the bytes of a process's connections, so that each measurement has a process of its own.

use std::sync::Arc;

use rollflow::algo::{Aggregation, CrossEntropy, Schedule};
use rollflow::model::{ModelConfig, Weights};
use rollflow::ranks::Shard;
use rollflow::train::{LocalBackend, LocalConfig, TrainingBackend, collate};
use serde_json::json;

use crate::rank_threads::led_copies;

/// The division, copies and parts of the measurement.
const VARIABLE: &str = "ROLLFLOW_RANK_BYTES";

const STEPS: usize = 3;
/// Micro-batches of a rank, of each batch.
const MICRO_BATCHES: usize = 2;
/// Batches of an update.
const BATCHES: usize = 2;

fn model() -> ModelConfig {
    let config = json!({
        "model_type": "qwen2", "vocab_size": 16, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu", "initializer_range": 0.02, "eos_token_id": 1,
    });
    ModelConfig::from_json(std::path::Path::new("config.json"), config.as_object().unwrap()).unwrap()
}

/// Bytes that all TCP connections of this process have sent and that have arrived.
fn sent() -> u64 {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|file| file.ok()?.file_name().to_str()?.parse().ok());
    let of = |file: i32| {
        let (mut info, mut len) = ([0u8; 256], 256 as libc::socklen_t);
        // SAFETY: the buffer has the length that is given. Files that are no TCP connection are refused.
        let asked = unsafe { libc::getsockopt(file, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &mut len) };
        // `tcpi_bytes_acked` of Linux's `struct tcp_info`.
        if asked == 0 && len >= 128 { u64::from_ne_bytes(info[120..128].try_into().unwrap()) } else { 0 }
    };
    files.map(of).sum()
}

/// [`sent`] after all ranks have ended a step. Signs of life stay below a kilobyte meanwhile.
fn settled() -> u64 {
    loop {
        let before = sent();
        std::thread::sleep(std::time::Duration::from_millis(200));
        let after = sent();
        if after - before < 1024 {
            return after;
        }
    }
}

/// Prints the bytes of a step. The measurement is a process of the test below.
#[test]
#[ignore = "a process that `the_bytes_of_a_step_are_those_of_the_formula` starts"]
fn measurement() {
    let given = std::env::var(VARIABLE).expect("the division");
    let given: Vec<usize> = given.split(' ').map(|number| number.parse().unwrap()).collect();
    let [shard, copies, parts] = given[..] else { panic!("three numbers") };
    let (shard, ranks) = (Shard::ALL[shard], copies * parts);
    let config =
        || LocalConfig { threads: Some(1), micro_batch_tokens: 1, ..LocalConfig::new(CrossEntropy, Schedule::constant(1e-3)) };
    let (bytes, ended) = led_copies([copies, parts], shard, config, |config| {
        let backend = LocalBackend::new(config, model(), Weights::random(&model(), 0)).unwrap();
        let samples = crate::tiny::rollouts(&vec![(2, 4); ranks * MICRO_BATCHES], 1);
        let batch = Arc::new(collate(&samples, Aggregation::TokenMean).unwrap());
        let step = || {
            for _ in 0..BATCHES {
                let seen = backend.forward_backward(batch.clone()).wait().unwrap();
                assert_eq!(seen.micro_batches, ranks * MICRO_BATCHES);
            }
            backend.optim_step().wait().unwrap();
        };
        step();
        let before = settled();
        (0..STEPS).for_each(|_| step());
        (settled() - before) / STEPS as u64
    });
    assert!(ended.iter().all(Result::is_ok), "{ended:?}");
    println!("sent {bytes} of {}", Weights::random(&model(), 0).layout.total());
}

#[test]
fn the_bytes_of_a_step_are_those_of_the_formula() {
    for (at, shard) in Shard::ALL.iter().enumerate() {
        for [copies, parts] in [[1, 2], [1, 4], [2, 2], [3, 2]] {
            if *shard == Shard::Nothing && copies > 1 {
                continue;
            }
            let mut process = std::process::Command::new(std::env::current_exe().unwrap());
            process.args(["--exact", "rank_bytes::measurement", "--ignored", "--nocapture"]);
            let output = process.env(VARIABLE, format!("{at} {copies} {parts}")).output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
            let line = text.lines().find_map(|line| line.split_once("sent ")).expect(&text).1;
            let [bytes, numbers] = [0, 2].map(|at| line.split(' ').nth(at).unwrap().parse::<f64>().unwrap());
            let (copies, parts) = (copies as f64, parts as f64);
            let passes = (BATCHES * MICRO_BATCHES) as f64;
            let (exchange, sum) = ((parts - 1.0) / parts, 2.0 * (copies - 1.0) / copies / parts);
            let each = match shard {
                Shard::Nothing => 2.0 * exchange,
                Shard::Optimizer => 2.0 * exchange + sum,
                Shard::Gradients => exchange * (passes + 1.0) + sum,
                Shard::Parameters => 3.0 * exchange * passes + sum,
            };
            let expected = 4.0 * each * numbers * copies * parts;
            // Commands and results are a few kilobytes.
            let ratio = bytes / expected;
            assert!(
                (0.99..1.03).contains(&ratio),
                "{}, {copies} copies of {parts} parts: {bytes} B, formula {expected}",
                shard.word()
            );
        }
    }
}
