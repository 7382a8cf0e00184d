//! TRL's packing of supervised samples into rows.

use rollflow::data::Sample;
use rollflow::data::packing::{OverlongPolicy, Packing, pack};
use serde_json::Value;

use crate::case::Case;

pub fn rows(case: &Case) -> Result<(), String> {
    case.only("inputs", &["sequences", "seq_length", "strategy"])?;
    case.only("expected", &["input_ids", "seq_lengths"])?;
    let inputs = &case.value["inputs"];
    let (packing, too_long) = match inputs["strategy"].as_str() {
        Some("bfd") => (Packing::BestFit, OverlongPolicy::Truncate),
        Some("bfd_split") => (Packing::BestFit, OverlongPolicy::Split),
        Some("wrapped") => (Packing::Wrapped, OverlongPolicy::default()),
        other => return Err(format!("strategy {other:?} is unknown")),
    };
    let sequences: Vec<Vec<u32>> = serde_json::from_value(inputs["sequences"].clone()).map_err(|error| error.to_string())?;
    let room = inputs["seq_length"].as_u64().ok_or("seq_length is missing")? as usize;
    let samples = sequences.into_iter().map(|tokens| Sample { loss_mask: vec![1.0; tokens.len()], tokens, ..Sample::default() });
    let rows = pack(samples.collect(), room, packing, too_long).rows;
    let of = |look: &dyn Fn(&[Sample]) -> Value| Value::from(rows.iter().map(|row| look(row)).collect::<Vec<Value>>());
    let tokens = of(&|row| row.iter().flat_map(|sample| sample.tokens.iter().copied()).collect::<Vec<u32>>().into());
    let lengths = of(&|row| row.iter().map(|sample| sample.tokens.len()).collect::<Vec<usize>>().into());
    for (what, found) in [("input_ids", tokens), ("seq_lengths", lengths)] {
        match case.value["expected"].get(what) {
            Some(expected) if *expected != found => return Err(format!("{what} are {found}, expected {expected}")),
            None if what == "input_ids" => return Err(format!("expected {what} is missing")),
            _ => {}
        }
    }
    Ok(())
}
