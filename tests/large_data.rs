//! Data larger than memory: ten million rows, shuffled, without holding them.
//! To see the figures of docs/data.md: cargo test --test large_data -- --ignored --nocapture
#![expect(clippy::unwrap_used, reason = "helpers of tests may panic as tests do")]

use std::fs::File;
use std::io::{BufWriter, Write};
use std::time::Instant;

use rollflow::data::Prompt;
use rollflow::data::source::{DataSpec, Mixed, Share};

/// The most memory that this process ever had, in bytes.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
#[ignore = "makes a file of a gigabyte"]
fn a_shuffled_epoch_of_ten_million_rows_stays_under_a_gibibyte() {
    let rows: u64 = std::env::var("ROLLFLOW_ROWS").map_or(10_000_000, |rows| rows.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    let mut file = BufWriter::new(File::create(&path).unwrap());
    for row in 0..rows {
        let sum = row % 977 + row / 977;
        writeln!(
            file,
            "{{\"question\": \"Of two numbers one is {row}. What is asked is the other.\", \"answer\": \"so #### {sum}\"}}"
        )
        .unwrap();
    }
    file.flush().unwrap();
    drop(file);
    let size = path.metadata().unwrap().len();

    let started = Instant::now();
    let sets = [(DataSpec::new(&path), Share::Repeat(1))];
    let mut data = Mixed::<Prompt>::open(&sets, 0, true).unwrap();
    let opened = started.elapsed();
    let first = data.prompt(0).unwrap();
    let drawn = started.elapsed();
    assert_eq!(data.len() as u64, rows);
    assert!(first.answer().is_some_and(|answer| answer.contains("####")));
    // The next epoch too: its order takes the place of the first one's.
    for number in (0..100_000).chain(rows..rows + 100) {
        assert_eq!(data.prompt(number).unwrap().epoch, number / rows);
    }
    let all = started.elapsed();
    let (mib, peak) = (size >> 20, peak_memory());
    println!(
        "{rows} rows, {mib} MiB: open after {opened:.1?}, first prompt after {drawn:.1?}, 100 000 more and another epoch's order after {all:.1?}, peak {} MiB",
        peak >> 20
    );
    assert!(peak < 1 << 30, "{peak} bytes");
}
