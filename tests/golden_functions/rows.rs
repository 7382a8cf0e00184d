//! TRL's and verl's row-wise helpers: log-probability of one token, entropy.

use crate::case::{Case, tensor};
use crate::objective::{entropy, log_softmax_at};

pub fn utils(case: &Case) -> Result<(), String> {
    case.only("inputs", &["logits", "index", "labels"])?;
    let logits = case.needed("logits")?;
    let vocab = *logits.shape.last().ok_or("logits are a scalar")?;
    let rows = logits.data.chunks(vocab);
    let actual: Vec<f64> = match case.input("index").or(case.input("labels")) {
        Some(index) => rows.zip(&index.data).map(|(row, &index)| log_softmax_at(row, index as usize)).collect(),
        None => rows.map(entropy).collect(),
    };
    case.close(case.kind(), &actual, &tensor(&case.value["expected"]))
}
