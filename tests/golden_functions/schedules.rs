//! transformers' learning-rate schedules.

use proptest::prelude::*;
use rollflow::algo::{Decay, Schedule};

use crate::case::{Case, scalar};

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
        case.close_number(&format!("lr at step {step}"), schedule.at(step as u64), scalar(rate))?;
    }
    Ok(())
}

#[test]
fn nonsense_is_refused_with_its_value() {
    let good = Schedule { decay: Decay::Linear, total_steps: 10, ..Schedule::constant(0.1) };
    assert_eq!(good.validate(), Ok(()));
    let refused = |schedule: Schedule| schedule.validate().unwrap_err().to_string();
    assert_eq!(refused(Schedule { lr: 0.0, ..good }), "lr is 0; it is a finite number above 0");
    assert_eq!(refused(Schedule { floor: 1.5, ..good }), "floor is 1.5; it is a share of lr, from 0 to 1");
    assert_eq!(
        refused(Schedule { warmup_steps: 10, ..good }),
        "total_steps is 10 with 10 warm-up steps; a Linear decay needs more total steps than warm-up steps"
    );
}

#[test]
fn a_linear_rate_is_0_after_a_warm_up_of_the_whole_run() {
    let schedule = Schedule { decay: Decay::Linear, warmup_steps: 4, total_steps: 4, ..Schedule::constant(1.0) };
    assert_eq!([3, 4, 9].map(|step| schedule.at(step)), [0.75, 0.0, 0.0]);
}

proptest! {
    #[test]
    fn the_rate_climbs_then_falls_between_floor_and_peak(
        decay in prop::sample::select(vec![Decay::Constant, Decay::Linear, Decay::Cosine]),
        warmup_steps in 0u64..20, more in 1u64..50, floor in 0.0f64..1.0
    ) {
        let schedule = Schedule { lr: 0.1, decay, warmup_steps, total_steps: warmup_steps + more, floor };
        let rates: Vec<f64> = (0..=schedule.total_steps).map(|step| schedule.at(step)).collect();
        let (climb, fall) = rates.split_at(warmup_steps as usize);
        prop_assert!(climb.windows(2).all(|pair| pair[0] < pair[1]));
        prop_assert!(fall.windows(2).all(|pair| pair[0] >= pair[1] - 1e-15));
        prop_assert!((fall[0] - 0.1).abs() < 1e-15);
        prop_assert!(fall.iter().all(|rate| *rate >= 0.1 * floor - 1e-15));
    }
}
