//! Rows of a Parquet file as JSON, a group of rows in memory at a time. Without Arrow: its tables would only be taken apart again.

use std::fs::File;
use std::path::Path;

use parquet::file::reader::{FileReader, SerializedFileReader};

use super::DataError;

/// Gives every row, in order.
pub(super) fn rows(path: &Path, mut each: impl FnMut(Vec<u8>) -> Result<(), DataError>) -> Result<(), DataError> {
    let refuse =
        |error: parquet::errors::ParquetError| DataError::format(path, format!("not a Parquet file that can be read: {error}"));
    let file = File::open(path).map_err(DataError::file(path))?;
    let reader = SerializedFileReader::new(file).map_err(refuse)?;
    for group in 0..reader.num_row_groups() {
        let group = reader.get_row_group(group).map_err(refuse)?;
        for row in group.get_row_iter(None).map_err(refuse)? {
            each(row.map_err(refuse)?.to_json_value().to_string().into_bytes())?;
        }
    }
    Ok(())
}
