//! TRL's and verl's row-wise helpers: log-probability of one token, entropy.

use crate::case::{Case, Tensor, tensor};
use crate::objective::{entropy, log_softmax_at};

/// The tests' own objective, which backends are compared with, and the model.
pub fn utils(case: &Case) -> Result<(), String> {
    case.only("inputs", &["logits", "index", "labels"])?;
    let logits = case.needed("logits")?;
    let vocab = *logits.shape.last().ok_or("logits are a scalar")?;
    let index = case.input("index").or(case.input("labels"));
    let rows = logits.data.chunks(vocab);
    let actual: Vec<f64> = match &index {
        Some(index) => rows.zip(&index.data).map(|(row, &index)| log_softmax_at(row, index as usize)).collect(),
        None => rows.map(entropy).collect(),
    };
    let expected = tensor(&case.value["expected"]);
    case.close(case.kind(), &actual, &expected)?;
    of_the_model(case, &logits, index.as_ref(), expected)
}

/// The model computes in single precision, whatever it is given.
#[cfg(feature = "torch")]
fn of_the_model(case: &Case, logits: &Tensor, index: Option<&Tensor>, expected: Tensor) -> Result<(), String> {
    let targets: Vec<i64> = match index {
        Some(index) => index.data.iter().map(|&index| index as i64).collect(),
        None => vec![0; expected.data.len()],
    };
    let rows = tch::Tensor::from_slice(&logits.data).reshape([targets.len() as i64, -1]);
    let (log_probs, entropies) = rollflow::model::log_probs_and_entropy(&rows, &tch::Tensor::from_slice(&targets), 1.0);
    let found = if index.is_some() { log_probs } else { entropies };
    let found = Vec::<f64>::try_from(found.to_kind(tch::Kind::Double)).map_err(|error| error.to_string())?;
    case.close("the model's", &found, &Tensor { dtype: "float32".to_owned(), ..expected })
}

#[cfg(not(feature = "torch"))]
fn of_the_model(_: &Case, _: &Tensor, _: Option<&Tensor>, _: Tensor) -> Result<(), String> {
    Ok(())
}
