//! Parquet larger than what may be held: rows are unpacked a group at a time, and only as far as they are used.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;

use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use rollflow::data::Prompt;
use rollflow::data::source::{DataSet, DataSpec};

/// `groups` groups of `rows` rows: the row's number as the question, and an answer of `letters` letters. Where the last group begins.
fn table(path: &Path, (groups, rows): (usize, usize), letters: usize) -> u64 {
    let schema = "message table { REQUIRED BYTE_ARRAY question (UTF8); REQUIRED BYTE_ARRAY answer (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let compression = Compression::ZSTD(ZstdLevel::default());
    let properties = WriterProperties::builder().set_compression(compression).set_dictionary_enabled(false).build();
    let mut file = SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::new(properties)).unwrap();
    for group in 0..groups {
        let mut columns = file.next_row_group().unwrap();
        for column in 0..2 {
            let value = |row: usize| if column == 0 { (group * rows + row).to_string() } else { "x".repeat(letters) };
            let values: Vec<ByteArray> = (0..rows).map(|row| ByteArray::from(value(row).into_bytes())).collect();
            let mut writer = columns.next_column().unwrap().unwrap();
            writer.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
            writer.close().unwrap();
        }
        columns.close().unwrap();
    }
    let written = file.close().unwrap();
    written.row_group(groups - 1).column(0).data_page_offset() as u64
}

/// Resident bytes of this process: now, or their peak since it was last forgotten.
fn resident(key: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(key)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

fn questions(spec: &DataSpec) -> Vec<String> {
    DataSet::<Prompt>::open(spec).unwrap().iter().map(|prompt| prompt.unwrap().text.render()).collect()
}

/// In a process of its own, whose allocator returns to the system what is free.
#[test]
fn rows_are_unpacked_as_far_as_they_are_used_and_never_held_together() {
    let mut process = std::process::Command::new(std::env::current_exe().unwrap());
    process.args(["--exact", "large_parquet::measurement", "--ignored", "--nocapture"]);
    let output = process.env("MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
#[ignore = "a process that the test above starts"]
fn measurement() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("table.parquet");
    let slice = |split: &str| DataSpec { split: split.parse().unwrap(), ..DataSpec::new(&path) };

    let last = table(&path, (3, 10), 5);
    assert_eq!(questions(&DataSpec::new(&path)), (0..30).map(|row| row.to_string()).collect::<Vec<_>>());
    assert_eq!(questions(&slice("train[18:22]")), ["18", "19", "20", "21"]);
    assert_eq!(questions(&slice("train[-1:]")), ["29"]);
    // A group that can't be read harms nobody who doesn't need it.
    let mut broken = File::options().write(true).open(&path).unwrap();
    broken.seek(SeekFrom::Start(last)).unwrap();
    broken.write_all(&[0xff; 20]).unwrap();
    assert_eq!(questions(&slice("train[15:20]")).len(), 5);
    assert_eq!(questions(&DataSpec { max_samples: Some(2), ..DataSpec::new(&path) }), ["0", "1"]);
    let refused = DataSet::<Prompt>::open(&DataSpec::new(&path)).unwrap_err().to_string();
    assert!(refused.contains("table.parquet: not a Parquet file that can be read"), "{refused}");

    let (groups, rows, letters) = (20, 1000, 15_000);
    table(&path, (groups, rows), letters);
    // Forgets the peak of the writing.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = resident("VmRSS:");
    let data = DataSet::<Prompt>::open(&DataSpec::new(&path)).unwrap();
    for row in [0, 19_999, 7, 12_345] {
        let prompt = data.get(row).unwrap();
        assert_eq!((prompt.text.render(), prompt.answer().map(str::len)), (row.to_string(), Some(letters)));
    }
    let took = resident("VmHWM:") - before;
    println!("{} MiB unpacked, {} MiB in memory", (groups * rows * letters) >> 20, took >> 20);
    assert!(took < 160 << 20, "{took} bytes");
}
