//! transformers' learning-rate schedules.

use rollflow::algo::{Decay, Schedule};

use crate::case::Case;

pub fn schedule(case: &Case) -> Result<(), String> {
    case.only("inputs", &["lr", "num_warmup_steps", "num_training_steps"])?;
    case.only("config", &["scheduler_specific_kwargs"])?;
    let options = &case.value["config"]["scheduler_specific_kwargs"];
    let lr = case.value["inputs"]["lr"].as_f64().ok_or("lr is missing")?;
    let steps = |name: &str| case.value["inputs"][name].as_u64().ok_or_else(|| format!("{name} is missing"));
    let unknown = options
        .as_object()
        .into_iter()
        .flat_map(|options| options.keys())
        .find(|key| !["min_lr", "min_lr_rate"].contains(&key.as_str()));
    if let Some(key) = unknown {
        return Err(format!("{key} is unknown"));
    }
    let (warmup_steps, total_steps) = (steps("num_warmup_steps")?, steps("num_training_steps")?);
    let floor = options["min_lr_rate"].as_f64().or(options["min_lr"].as_f64().map(|rate| rate / lr)).unwrap_or(0.0);
    let (decay, warmup_steps) = match case.kind() {
        "constant" => (Decay::Constant, 0),
        "constant_with_warmup" => (Decay::Constant, warmup_steps),
        "linear" => (Decay::Linear, warmup_steps),
        "cosine" | "cosine_with_min_lr" => (Decay::Cosine, warmup_steps),
        kind => return Err(format!("{kind} is unknown")),
    };
    let schedule = Schedule { lr, decay, warmup_steps, total_steps, floor };
    let expected = case.value["expected"]["lr_at_step"].as_array().ok_or("lr_at_step is missing")?;
    for (step, rate) in expected.iter().enumerate() {
        case.close_number(&format!("lr at step {step}"), schedule.at(step as u64), rate.as_f64().unwrap_or(f64::NAN))?;
    }
    Ok(())
}
