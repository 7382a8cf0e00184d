//! TensorBoard event files: TFRecord frames around hand-encoded protobuf events, one scalar a metric.
//!
//! The format is small and frozen. An `Event` has wall time (1, double), step (2, varint), file
//! version (3, string), summary (5) or session log (7). A summary has values (1), and a value a tag
//! (1, string) and a number (2, float). A session log has a status (1, varint), of which 1 is START.
//! A frame is length, masked CRC-32C of the length, the event, and its masked CRC-32C. Each event is
//! one write, so that a crash truncates only the last one, which TensorBoard skips.

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::{MetricsLogger, StepMetrics};
use crate::observe::ObserveError;
use crate::util::atomic_file;

/// Writes `events.out.tfevents.<seconds>.<process>.rollflow` into a folder that TensorBoard is pointed at.
#[derive(Debug)]
pub struct TensorBoardLogger {
    file: File,
    path: PathBuf,
}

impl TensorBoardLogger {
    /// Starts a new event file in `folder`, which is made if it is missing. A resumed run adds a
    /// file; TensorBoard shows them as one.
    pub fn new(folder: impl AsRef<Path>) -> Result<Self, ObserveError> {
        let (folder, now) = (folder.as_ref(), seconds_now());
        let path = folder.join(format!("events.out.tfevents.{:.0}.{}.rollflow", now.floor(), std::process::id()));
        let open = || {
            atomic_file::create_folder(folder)?;
            let mut file = File::options().create(true).append(true).open(&path)?;
            file.write_all(&frame(&version_event(now)))?;
            Ok(file)
        };
        let file = open().map_err(ObserveError::at(&path))?;
        Ok(TensorBoardLogger { file, path })
    }

    /// The same for a run that has taken `step` steps. A TensorBoard that has read later ones drops them: a
    /// resume makes them again.
    pub fn after(folder: impl AsRef<Path>, step: u64) -> Result<Self, ObserveError> {
        let mut logger = TensorBoardLogger::new(folder)?;
        let event = frame(&start_event(seconds_now(), step + 1));
        logger.file.write_all(&event).map_err(ObserveError::at(&logger.path))?;
        Ok(logger)
    }

    /// The file it writes.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl MetricsLogger for TensorBoardLogger {
    fn log(&mut self, step: u64, metrics: &StepMetrics) -> Result<(), ObserveError> {
        let event = frame(&step_event(seconds_now(), step, metrics));
        self.file.write_all(&event).map_err(ObserveError::at(&self.path))
    }

    fn finish(&mut self) -> Result<(), ObserveError> {
        self.file.sync_all().map_err(ObserveError::at(&self.path))
    }
}

/// The event files that runs of this program wrote into a folder. A folder that does not exist holds none.
pub(super) fn event_files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    let ours = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("events.out.tfevents.") && name.ends_with(".rollflow")
    };
    Ok(paths.into_iter().filter(ours).collect())
}

/// Returns the end of the last whole event of a step up to `step`; `None` if there is none. Steps
/// ascend in such files.
pub(super) fn end_of_step(path: &Path, step: Option<u64>) -> std::io::Result<Option<u64>> {
    let mut file = BufReader::new(File::open(path)?);
    let (mut at, mut end) = (0, None);
    while let Some(event) = read_frame(&mut file)? {
        at += event.len() as u64 + 16;
        match step_of(&event) {
            None => {}
            Some(of) if step.is_some_and(|step| of <= step) => end = Some(at),
            Some(_) => break,
        }
    }
    Ok(end)
}

/// The next event, unless the file ends or is torn before the event's end.
fn read_frame(file: &mut impl Read) -> std::io::Result<Option<Vec<u8>>> {
    let mut head = [0; 12];
    match file.read_exact(&mut head) {
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let (length, check) = head.split_at(8);
    let length: [u8; 8] = length.try_into().unwrap_or_default();
    if masked_crc(&length).to_le_bytes() != check {
        return Ok(None);
    }
    let mut event = Vec::new();
    let whole = u64::from_le_bytes(length) + 4;
    file.take(whole).read_to_end(&mut event)?;
    if (event.len() as u64) < whole {
        return Ok(None);
    }
    event.truncate(event.len() - 4);
    Ok(Some(event))
}

/// Reads the step of an event as [`step_event`] writes it: wall time, then step. Other events have none
/// there.
fn step_of(event: &[u8]) -> Option<u64> {
    let (&tag, digits) = event.get(9..)?.split_first()?;
    if tag != 2 << 3 {
        return None;
    }
    let mut step = 0;
    for (at, byte) in digits.iter().enumerate().take(10) {
        step |= u64::from(byte & 0x7f) << (7 * at);
        if byte & 0x80 == 0 {
            return Some(step);
        }
    }
    None
}

fn seconds_now() -> f64 {
    // A clock before 1970 is wrong anyway; zero says so.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// An event with its wall time only.
fn timed_event(wall_time: f64) -> Vec<u8> {
    let mut event = Vec::new();
    put_tag(&mut event, 1, 1);
    event.extend(wall_time.to_le_bytes());
    event
}

fn version_event(wall_time: f64) -> Vec<u8> {
    let mut event = timed_event(wall_time);
    put_bytes(&mut event, 3, b"brain.Event:2");
    event
}

/// Says that steps from `step` on follow, for the first time or again. The step comes last: [`step_of`] must
/// not find it.
fn start_event(wall_time: f64, step: u64) -> Vec<u8> {
    let mut event = timed_event(wall_time);
    put_bytes(&mut event, 7, &[1 << 3, 1]);
    put_tag(&mut event, 2, 0);
    put_varint(&mut event, step);
    event
}

fn step_event(wall_time: f64, step: u64, metrics: &StepMetrics) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, &number) in metrics {
        let mut value = Vec::new();
        put_bytes(&mut value, 1, tag.as_bytes());
        put_tag(&mut value, 2, 5);
        value.extend((number as f32).to_le_bytes());
        put_bytes(&mut summary, 1, &value);
    }
    let mut event = timed_event(wall_time);
    put_tag(&mut event, 2, 0);
    put_varint(&mut event, step);
    put_bytes(&mut event, 5, &summary);
    event
}

fn frame(event: &[u8]) -> Vec<u8> {
    let length = (event.len() as u64).to_le_bytes();
    [&length[..], &masked_crc(&length).to_le_bytes(), event, &masked_crc(event).to_le_bytes()].concat()
}

/// Appends a protobuf key: the field's number and its wire type (0 varint, 1 eight bytes, 2 counted
/// bytes, 5 four bytes).
fn put_tag(out: &mut Vec<u8>, field: u64, wire: u64) {
    put_varint(out, field << 3 | wire);
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn put_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_tag(out, field, 2);
    put_varint(out, bytes.len() as u64);
    out.extend(bytes);
}

/// Checksum of TFRecord: CRC-32C, rotated and offset, so that data may contain checksums.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), bit by bit: an event has a few hundred bytes, for which a table is not
/// worth its code.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0_u32;
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_has_the_published_check_values() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }
}
