//! Data larger than memory: records are found, judged and drawn without being held.
//!
//! Peaks are the process's own, so that one test runs here by default. The other makes a file of a gigabyte: `make test-large`.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::time::Instant;

use rollflow::data::Prompt;
use rollflow::data::source::{DataSpec, Mixed};

/// The most memory that this process ever had, in bytes.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Lists of records are read where they lie too, all on one line, alone or in an object behind another list; so are lines of ten thousand letters.
#[test]
fn a_list_of_a_hundred_megabytes_on_one_line_is_never_held() {
    const RECORDS: u64 = 10_000;
    let before = peak_memory();
    let folder = tempfile::tempdir().unwrap();
    let answer = "{[\\\"\\u00e9 ".repeat(1000);
    for (name, begin, between, end) in [
        ("list.json", "[", ",", "]"),
        ("named.json", "{\"other\": [1, {\"data\": []}], \"data\": [", ", ", "], \"more\": 7}"),
        ("lines.jsonl", "", "\n", ""),
    ] {
        let path = folder.path().join(name);
        let mut file = BufWriter::new(File::create(&path).unwrap());
        file.write_all(begin.as_bytes()).unwrap();
        for row in 0..RECORDS {
            let between = if row == 0 { "" } else { between };
            write!(file, "{between}{{\"question\": \"{row}?\", \"answer\": \"{answer}\"}}").unwrap();
        }
        file.write_all(end.as_bytes()).unwrap();
        drop(file);
        let size = path.metadata().unwrap().len();
        let data = Mixed::<Prompt>::open(&[DataSpec::new(&path)], 0, true);
        let mut data = data.unwrap();
        assert_eq!(data.len() as u64, RECORDS, "{name}");
        let asked = (0..RECORDS).step_by(100).map(|number| data.prompt(number).unwrap().text.render());
        assert!(asked.collect::<std::collections::BTreeSet<_>>().len() == 100, "{name}");
        let took = peak_memory() - before;
        println!("{name}: {} MiB on disk, {} MiB in memory", size >> 20, took >> 20);
        assert!(size > 100 << 20 && took < 48 << 20, "{name}: {took} bytes for {size}");
        std::fs::remove_file(&path).unwrap();
    }
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
    let mut data = Mixed::<Prompt>::open(&[DataSpec::new(&path)], 0, true).unwrap();
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
