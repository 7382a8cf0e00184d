//! TRL's divergences from a teacher: value, and gradient by the student's logits.

use rollflow::algo::TeacherDivergence;

use crate::case::{Case, Tensor};
use crate::objective::log_softmax_at;

pub fn divergence(case: &Case) -> Result<(), String> {
    case.only("inputs", &["student_logits", "teacher_logits", "labels"])?;
    case.only("config", &["beta", "temperature", "reduction", "num_items_in_batch", "top_k"])?;
    let config = &case.value["config"];
    let number = |key: &str| config[key].as_f64();
    let temperature = number("temperature").unwrap_or(1.0);
    let [student, teacher] = ["student_logits", "teacher_logits"].map(|name| case.needed(name));
    let (student, teacher, labels) = (student?, teacher?, case.needed("labels")?);
    let vocabulary = student.shape[2];
    let k = number("top_k").map_or(vocabulary, |k| k as usize);
    let divergence = TeacherDivergence { beta: number("beta").ok_or("no beta")? };
    let rows = |of: &Tensor, at: usize| -> Vec<f64> {
        let logits: Vec<f64> = of.data[at * vocabulary..(at + 1) * vocabulary].iter().map(|logit| logit / temperature).collect();
        (0..vocabulary).map(|token| log_softmax_at(&logits, token)).collect()
    };
    let trained: Vec<usize> = (0..labels.data.len()).filter(|at| labels.data[*at] != -100.0).collect();
    let denominator = match (number("num_items_in_batch"), config["reduction"].as_str()) {
        (Some(items), _) => items,
        (None, Some("sum")) => 1.0,
        (None, Some("mean")) => (trained.len() * vocabulary) as f64,
        (None, _) => trained.len() as f64,
    };
    let (mut loss, mut grad) = (0.0, vec![0.0; student.data.len()]);
    for at in trained {
        let (own, theirs) = (rows(&student, at), rows(&teacher, at));
        let mut likeliest: Vec<usize> = (0..vocabulary).collect();
        likeliest.sort_by(|a, b| theirs[*b].total_cmp(&theirs[*a]));
        likeliest.truncate(k);
        let column = |of: &[f64]| likeliest.iter().map(|token| of[*token]).collect::<Vec<f64>>();
        let (value, slopes) = divergence.evaluate(&column(&own), &column(&theirs), k == vocabulary);
        loss += value / denominator;
        let sum: f64 = slopes.iter().sum();
        for token in 0..vocabulary {
            let place = likeliest.iter().position(|kept| *kept == token);
            let slope = place.map_or(0.0, |place| slopes[place]) - own[token].exp() * sum;
            grad[at * vocabulary + token] = slope / temperature / denominator;
        }
    }
    case.close("loss", &[loss], &case.expected("loss")?)?;
    case.close("grad", &grad, &case.expected("grad")?)
}
