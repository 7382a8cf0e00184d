//! Rows of a Parquet file as JSON, one after the other, without Arrow tables.

use std::fs::File;
use std::path::{Path, PathBuf};

use parquet::errors::ParquetError;
use parquet::file::reader::FileReader;
use parquet::file::serialized_reader::{ReadOptionsBuilder, SerializedFileReader};
use parquet::record::reader::RowIter;

use crate::data::DataError;
use crate::util::reading;

fn refuse(path: &Path) -> impl Fn(ParquetError) -> DataError {
    move |error| DataError::invalid(path, format!("not a Parquet file that can be read: {error}"))
}

fn open(path: &Path) -> Result<SerializedFileReader<File>, DataError> {
    SerializedFileReader::new(reading::open(path).map_err(DataError::read(path))?).map_err(refuse(path))
}

/// Number of rows, from the file's metadata.
pub(super) fn count(path: &Path) -> Result<usize, DataError> {
    let groups = open(path)?;
    Ok(groups.metadata().row_groups().iter().map(|group| group.num_rows() as usize).sum())
}

/// Rows in their order; a page of each column is in memory at a time.
pub(super) struct Rows {
    path: PathBuf,
    rows: RowIter<'static>,
}

impl Rows {
    /// From the row of this number on. Groups of rows that end before it are not read.
    pub(super) fn from(path: &Path, first: usize) -> Result<Self, DataError> {
        let (mut passed, mut before) = (0, 0);
        for group in open(path)?.metadata().row_groups() {
            let rows = group.num_rows() as usize;
            if before + rows > first {
                break;
            }
            (passed, before) = (passed + 1, before + rows);
        }
        let options = ReadOptionsBuilder::new().with_predicate(Box::new(move |_, at| at >= passed)).build();
        let file = reading::open(path).map_err(DataError::read(path))?;
        let reader = SerializedFileReader::new_with_options(file, options).map_err(refuse(path))?;
        let mut rows = RowIter::from_file_into(Box::new(reader));
        for _ in before..first {
            rows.next().transpose().map_err(refuse(path))?;
        }
        Ok(Rows { path: path.to_owned(), rows })
    }

    /// The next rows, at most `most`, and no more once they have so many bytes.
    pub(super) fn next(&mut self, most: usize, bytes: u64) -> Result<Vec<Vec<u8>>, DataError> {
        let (mut records, mut taken) = (Vec::new(), 0);
        while records.len() < most && taken < bytes {
            let Some(row) = self.rows.next() else { break };
            let record = row.map_err(refuse(&self.path))?.to_json_value().to_string().into_bytes();
            taken += record.len() as u64;
            records.push(record);
        }
        Ok(records)
    }
}
