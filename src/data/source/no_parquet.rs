//! Instead of `parquet.rs` in a build without the feature `parquet`.

use std::path::Path;

use crate::data::DataError;

pub(super) struct Rows;

pub(super) fn count(path: &Path) -> Result<usize, DataError> {
    let problem =
        "this program was built without Parquet; build it with the feature `parquet`, or convert the file to JSON lines";
    Err(DataError::invalid(path, problem))
}

impl Rows {
    pub(super) fn from(path: &Path, _first: usize) -> Result<Self, DataError> {
        count(path).map(|_| Rows)
    }

    pub(super) fn next(&mut self, _most: usize, _bytes: u64) -> Result<Vec<Vec<u8>>, DataError> {
        Ok(Vec::new())
    }
}
