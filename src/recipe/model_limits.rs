//! Limits of the model that a recipe exceeds. Reads the model's `config.json`, and no weights.

use super::memory::{adapters, shape};
use super::plan::Plan;
use crate::model::{Lora, ModelConfig, ModelError};
use crate::settings::error::Problem;

/// Returns all of them. Errors of the model itself are reported when it is loaded.
pub(super) fn problems(plan: &Plan) -> Vec<Problem> {
    let Ok(model) = shape(plan) else { return Vec::new() };
    adapters_without_a_place(plan, &model).into_iter().chain(texts_beyond_its_positions(plan, &model)).collect()
}

fn adapters_without_a_place(plan: &Plan, model: &ModelConfig) -> Option<Problem> {
    // A rank out of its range is reported by its own key.
    plan.lora.as_ref().filter(|of| (1..=Lora::MOST_RANK).contains(&of.rank))?;
    let Err(unknown @ ModelError::Target { .. }) = adapters(plan, model) else { return None };
    Some(Problem::of("lora.targets", unknown.to_string(), "\"all-linear\" fits every model"))
}

/// Samples longer than the model reads, and answers that leave no room for a prompt.
fn texts_beyond_its_positions(plan: &Plan, model: &ModelConfig) -> Vec<Problem> {
    let positions = model.max_positions;
    let sample = plan.sft.as_ref().and_then(|sft| sft.max_length).map(|most| ("sft.max_length", most, positions));
    let answers = plan.pipeline.reinforces().then_some(("generate.max_new_tokens", plan.generate.max_new_tokens, positions - 1));
    let asked = plan.eval.as_ref().and_then(|eval| eval.max_new_tokens).map(|most| ("eval.max_new_tokens", most, positions - 1));
    let beyond = |(key, most, room): (&str, usize, usize)| {
        let message = format!("`{key}` is {most}, but the model reads {positions} tokens, prompt and answer together");
        let help = format!("lower it: {} leaves a prompt as much room as its answer", positions / 2);
        let help = if room == positions { format!("lower it to {positions}, or remove it") } else { help };
        (most > room).then(|| Problem::of(key, message, help))
    };
    [sample, answers, asked].into_iter().flatten().filter_map(beyond).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::parse;

    #[test]
    fn texts_longer_than_the_model_reads_are_refused_by_their_keys() {
        let beyond = |pipeline: &str, sets: &[&str]| -> Vec<String> {
            let text =
                format!("pipeline = '{pipeline}'\nmodel.kind = 'tiny'\ntask.kind = 'arithmetic'\nsft = {{}}\neval = {{}}\n");
            let plan = parse("r.toml", &text, &sets.iter().map(|set| (*set).to_owned()).collect::<Vec<_>>()).unwrap();
            problems(&plan).into_iter().map(|problem| problem.key).collect()
        };
        assert_eq!(beyond("grpo", &[]), [""; 0]);
        let most = ["generate.max_new_tokens=2047", "sft.max_length=2048", "eval.max_new_tokens=2047"];
        assert_eq!(beyond("grpo", &most), [""; 0]);
        let one_more = ["generate.max_new_tokens=2048", "sft.max_length=2049", "eval.max_new_tokens=2048"];
        assert_eq!(beyond("grpo", &one_more), ["sft.max_length", "generate.max_new_tokens", "eval.max_new_tokens"]);
        assert_eq!(beyond("sft", &["sft.max_length=2049"]), ["sft.max_length"]);
    }

    #[test]
    fn they_are_told_together_with_a_device_that_is_not_there() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "pipeline = 'grpo'\nmodel = { kind = 'tiny', device = 'cuda:63' }\ntask.kind = 'arithmetic'\n";
        std::fs::write(file.path(), text).unwrap();
        let told = crate::recipe::load(file.path(), &["generate.max_new_tokens=4096".to_owned()]).unwrap_err().to_string();
        assert!(told.contains("`model.device`") && told.contains("`generate.max_new_tokens` is 4096"), "{told}");
    }
}
