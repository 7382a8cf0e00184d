//! Validation of custom parts by name, and of parts that cannot be built from valid keys.

use anyhow::Result;
use rollflow::algo::LossChoice;
use rollflow::algo::rewards::Combine;
use rollflow::recipe::{Filter as FilterChoice, PartRule, Pipeline, Plan, Problem, Timeline};
use rollflow::util::causes::full_message;

use crate::assemble::{rollout, steps};
use crate::registry::{Registry, RegistryError};

/// Lists the parts of a plan, and of its later changes, that are not registered or reject their
/// parameters. For [`recipe::load_with`](rollflow::recipe::load_with).
pub fn complaints(registry: &Registry, plan: &Plan) -> Vec<Problem> {
    let own = complaints_now(registry, plan);
    let Ok(timeline) = Timeline::of(plan) else { return own };
    let later = timeline.plans().into_iter().skip(1).flat_map(|plan| complaints_now(registry, &plan));
    let later: Vec<Problem> = later.map(|problem| Problem::of("change", problem.message, problem.help)).collect();
    let own = if own.is_empty() { later } else { own };
    if own.is_empty() && plan.validate().is_ok() { unmakeable(registry, plan, &timeline) } else { own }
}

fn complaints_now(registry: &Registry, plan: &Plan) -> Vec<Problem> {
    let mut all = Vec::new();
    if plan.observe.otlp.is_some() && !cfg!(feature = "otlp") {
        let help = "build it with the feature: cargo build --release --features rollflow-pipelines/otlp";
        all.push(Problem::of("observe.otlp", "this build exports nothing to `observe.otlp`", help));
    }
    let mut note = |name: String, params: String, made: Result<(), RegistryError>| {
        if let Err(RegistryError { name: unknown, message, help }) = made {
            all.push(Problem::of(if unknown { name } else { params }, message, help));
        }
    };
    let keys = |section: &str| (format!("{section}.name"), format!("{section}.params"));
    if let LossChoice::Custom(of) = &plan.train.loss {
        let (name, params) = keys("train.loss");
        note(name, params, registry.own_loss_of(of).map(drop));
    }
    let (name, params) = keys("train.advantage");
    note(name, params, registry.estimator_of(&plan.train.advantage).map(drop));
    match plan.reward.rule.alone() {
        Ok(Some(PartRule::Custom { function, params: given })) => {
            let (name, params) = keys("reward");
            note(name, params, registry.reward_of(&function, &given).map(drop));
        }
        Ok(_) => {}
        Err(parts) => {
            if parts.combine == Combine::Custom && parts.aggregator.is_some() {
                let key = |of: &str| format!("reward.aggregator{of}");
                note(key(""), key("_params"), registry.aggregator_of(parts).map(drop));
            }
            for (at, part) in parts.part.iter().enumerate() {
                if let PartRule::Custom { function, params } = &part.rule {
                    let key = |of: &str| format!("reward.part[{at}].{of}");
                    note(key("function"), key("params"), registry.reward_of(function, params).map(drop));
                }
            }
        }
    }
    for (at, filter) in plan.filter.iter().enumerate() {
        if let FilterChoice::Custom(of) = filter {
            let (name, params) = keys(&format!("filter[{at}]"));
            note(name, params, registry.filter_of(&of.name, &of.params).map(drop));
        }
    }
    all
}

/// Parts of a plan that can't be made although every key is in its range, as the run would find out.
fn unmakeable(registry: &Registry, plan: &Plan, timeline: &Timeline) -> Vec<Problem> {
    let learns = plan.pipeline.reinforces() || plan.pipeline == Pipeline::GrpoOffline;
    let made = [
        ("generate", plan.generate.sampling().check().map_err(anyhow::Error::from)),
        ("filter", if learns { rollout::filter(&plan.filter, timeline, registry).map(drop) } else { Ok(()) }),
        ("train", if learns { steps::step_config(plan, registry).map(drop) } else { Ok(()) }),
    ];
    let complaint = |(key, made): (&str, Result<()>)| {
        let message = format!("[{key}] can't be used: {}", full_message(made.err()?.as_ref()));
        Some(Problem::of(key, message, "give it another value"))
    };
    made.into_iter().filter_map(complaint).collect()
}
