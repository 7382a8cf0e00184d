//! transformers' samplers: which scores survive, and their values.

use rollflow::engine::SamplingParams;
use rollflow::engine::penalties::{adjust, adjusted};
use rollflow::engine::sampling::warp as warp_scores;

use crate::case::{Case, tensor};

pub fn warp(case: &Case) -> Result<(), String> {
    case.only("inputs", &["input_ids", "scores"])?;
    let number = &case.name[case.kind().len()..];
    let unknown = |error: &dyn std::fmt::Display| format!("{number} in {}: {error}", case.name);
    let float = || number.parse::<f32>().map_err(|error| unknown(&error));
    let mut params = SamplingParams::default();
    match case.kind() {
        "temperature" => params.temperature = float()?,
        "top_k" => params.top_k = number.parse().map_err(|error| unknown(&error))?,
        "top_p" => params.top_p = float()?,
        "min_p" => params.min_p = float()?,
        "repetition" => params.repetition_penalty = float()?,
        kind => return Err(format!("{kind} is unknown")),
    }
    let scores = case.needed("scores")?;
    let mut rows: Vec<f32> = scores.data.iter().map(|score| *score as f32).collect();
    let vocab = *scores.shape.last().ok_or("scores are a scalar")?;
    let read = case.needed("input_ids")?;
    let ids: Vec<u32> = read.data.iter().map(|token| *token as u32).collect();
    let read = ids.chunks(*read.shape.last().ok_or("input_ids are a scalar")?);
    for (row, read) in rows.chunks_mut(vocab).zip(read) {
        adjust(row, &adjusted(&params, read, [].iter()));
        warp_scores(row, &params);
    }
    let rows: Vec<f64> = rows.into_iter().map(f64::from).collect();
    case.close("scores", &rows, &tensor(&case.value["expected"]))
}
