//! A plan back as text: the resolved recipe with every default filled in, and what `rollflow check` prints.

use super::defaults::{Derived, LENGTHS};
use super::derive::Machine;
use super::model::{DeviceName, ModelSource};
use super::plan::{OnStale, Pipeline, Plan};
use super::task::{Packing, Sft};
use crate::model::Dtype;
use crate::settings::section::Section;
use crate::settings::setting::Written;

impl Plan {
    /// Renders the resolved recipe: every key that the pipeline reads, defaults included. It loads
    /// again to an equal plan.
    pub fn to_toml(&self) -> String {
        let mut rows = Vec::new();
        self.rows(&mut rows);
        rows.retain(|(key, _)| !self.unused_sections().contains(&key.as_str()));
        for (section, unused) in self.unused_keys() {
            for (_, value) in rows.iter_mut().filter(|(key, _)| key == section) {
                if let Written::Table(keys) = value {
                    keys.retain(|(key, _)| key != unused);
                }
            }
        }
        // Where epochs are given, steps follow from them.
        for (_, value) in rows.iter_mut().filter(|(key, _)| LENGTHS.contains(&key.as_str())) {
            if let Written::Table(keys) = value
                && keys.iter().any(|(key, value)| key == "epochs" && *value != Written::Absent)
            {
                keys.retain(|(key, _)| key != "steps");
            }
        }
        let mut text = String::new();
        for (key, value) in &rows {
            if let Written::Inline(value) = value {
                text += &format!("{key} = {value}\n");
            }
        }
        for (key, value) in &rows {
            match value {
                Written::Table(rows) => text += &format!("\n[{key}]\n{}", lines(rows)),
                Written::Tables(tables) => {
                    for rows in tables {
                        text += &format!("\n[[{key}]]\n{}", lines(rows));
                    }
                }
                Written::Inline(_) | Written::Absent => {}
            }
        }
        text
    }
}

fn lines(rows: &[(String, Written)]) -> String {
    assignments(rows).into_iter().map(|line| line + "\n").collect()
}

fn assignments(rows: &[(String, Written)]) -> Vec<String> {
    rows.iter().filter_map(|(key, value)| inline(value).map(|value| format!("{key} = {value}"))).collect()
}

fn inline(value: &Written) -> Option<String> {
    let braced = |rows: &Vec<(String, Written)>| format!("{{ {} }}", assignments(rows).join(", "));
    match value {
        Written::Absent => None,
        Written::Inline(value) => Some(value.clone()),
        Written::Table(rows) => Some(braced(rows)),
        Written::Tables(tables) => Some(format!("[{}]", tables.iter().map(braced).collect::<Vec<_>>().join(", "))),
    }
}

/// Output of `rollflow check` for a valid plan: derived numbers, warnings for this machine, and
/// memory.
pub fn check_text(plan: &Plan) -> String {
    let text = check_text_on(plan, Machine::here());
    #[cfg(feature = "torch")]
    let text = match super::MemoryPlan::of(plan) {
        Ok(all) => all.iter().fold(text, |text, memory| text + &memory.to_string()),
        Err(error) => text + &format!("warning: what it takes of memory is not known: {error}\n"),
    };
    text
}

/// [`check_text`] for another machine.
pub fn check_text_on(plan: &Plan, machine: Machine) -> String {
    let mut text = format!("{} ({})\n", plan.name, plan.pipeline.word());
    for (what, value) in facts(plan, machine) {
        text += &format!("  {what:<18} {value}\n");
    }
    for warning in plan.warnings(machine) {
        text += &format!("warning: {warning}\n");
    }
    text
}

/// Output of `rollflow check` for values that a recipe left out: one line each, with the reason.
pub fn derived_text(derived: &[Derived]) -> String {
    derived.iter().map(|Derived { key, value, reason }| format!("  {key} = {value}: {reason}\n")).collect()
}

/// The derived numbers that [`check_text`] prints: what, and how much.
pub fn facts(plan: &Plan, machine: Machine) -> Vec<(&'static str, String)> {
    let mut facts = vec![("model", model(plan)), ("steps", plan.steps().to_string())];
    let epoch = plan.steps_per_epoch().map(|steps| format!("{steps:.1} steps"));
    let (samples, turns) =
        (plan.samples_per_step(), plan.environment.as_ref().map_or(1, |environment| environment.limits.max_turns));
    let sampled = samples.saturating_mul(plan.generate.max_new_tokens).saturating_mul(turns);
    if plan.pipeline.reinforces() {
        if let Some(sft) = &plan.sft {
            facts.push(("warm-up", format!("{} of {}", count(sft.steps, "step"), step_of(sft, "pairs"))));
        }
        facts.extend([
            (
                "samples a step",
                format!("{samples} ({} groups of {}{})", plan.batch.groups, plan.generate.group_size, chosen_from(plan)),
            ),
            ("updates a step", updates(plan)),
            ("tokens a step", format!("at most {sampled} sampled")),
            ("new version", format!("every {} ({} groups)", count(plan.sync.every, "step"), plan.groups_per_publish())),
            ("admission window", format!("{} groups", plan.admission_window())),
        ]);
        facts.extend(worst_staleness(plan));
    } else if plan.pipeline.trains_by_train() {
        let size = if plan.pipeline == Pipeline::Dpo { "pairs a step" } else { "groups a step" };
        facts.extend([(size, plan.batch.groups.to_string()), ("updates a step", updates(plan))]);
    } else {
        match &plan.sft {
            Some(sft) if plan.pipeline == Pipeline::Sft && sft.packs() => facts.push(("a step", step_of(sft, "samples"))),
            _ => facts.push(("samples a step", samples.to_string())),
        }
    }
    facts.extend(epoch.map(|epoch| ("one epoch", epoch)));
    facts.push(("computes in", computes_in(plan, machine)));
    let threads = match plan.threads() {
        0 => format!("the machine's {}", machine.threads),
        set => format!("{set} of the machine's {}", machine.threads),
    };
    facts.push(("threads", threads));
    facts
}

/// The format that models compute in, and where it comes from.
fn computes_in(plan: &Plan, machine: Machine) -> String {
    let (format, device) = (plan.model.precision().word(), plan.model.device.word());
    let why = match (plan.model.dtype, plan.model.device) {
        (Some(Dtype::Bf16), DeviceName::Cpu) if !machine.multiplies_bf16 => {
            "as model.dtype says, but this processor has no products of bf16 numbers: it is no faster than f32"
        }
        (Some(_), _) => "as model.dtype says",
        (None, DeviceName::Cpu) if machine.multiplies_bf16 => {
            "model.dtype is not set, and a processor computes in f32; this one is faster with model.dtype = \"bf16\""
        }
        (None, DeviceName::Cpu) => "model.dtype is not set, and a processor computes in f32",
        (None, DeviceName::Cuda(_)) => "model.dtype is not set, and a GPU computes in bf16",
    };
    format!("{format} on {device}: {why}")
}

/// Size of a step of supervised training.
fn step_of(sft: &Sft, what: &str) -> String {
    let row = sft.max_length.filter(|_| sft.packing != Packing::Apart);
    match (sft.batch_tokens, row) {
        (Some(tokens), None) => format!("at most {tokens} tokens"),
        (Some(tokens), Some(row)) => format!("at most {tokens} tokens, in rows of at most {row}"),
        (None, Some(row)) => format!("{} rows of at most {row} tokens", sft.batch),
        (None, None) => format!("{} {what}", sft.batch),
    }
}

fn chosen_from(plan: &Plan) -> String {
    let whose = if plan.flow.max_staleness == 0 { "the oldest kept" } else { "the first" };
    if plan.over_samples() { format!(", {whose} of {}", plan.groups_chosen_from()) } else { String::new() }
}

fn updates(plan: &Plan) -> String {
    let (passes, minibatches) = (plan.train.ppo_epochs, plan.train.minibatches);
    let of = match (passes, minibatches) {
        (1, 1) => String::new(),
        (passes, 1) => format!(" ({passes} passes)"),
        (1, cut) => format!(" ({cut} minibatches)"),
        (passes, cut) => format!(" ({passes} passes of {cut} minibatches)"),
    };
    format!("{}{of}", plan.train.updates_a_step())
}

/// Staleness bound and its origin: the window, or `max_staleness` if that is the tighter one.
fn worst_staleness(plan: &Plan) -> Vec<(&'static str, String)> {
    let (worst, in_order) = (plan.worst_staleness(), plan.worst_lag_in_turn());
    let (window, groups) = (plan.admission_window(), plan.groups_per_publish());
    let derived = format!("{}: floor((window {window} - 1) / {groups} groups per version)", count(in_order, "version"));
    if !plan.over_samples() && in_order <= worst {
        return vec![("worst staleness", derived)];
    }
    if plan.flow.max_staleness == 0 && plan.over_samples() {
        return vec![("worst staleness", "0 versions: what a round has beyond its steps is dropped".to_owned())];
    }
    let enforced = match plan.flow.on_stale {
        OnStale::Wait => "groups that finish late are waited for",
        OnStale::Drop => "groups that become older are dropped",
        OnStale::Mask => "tokens that become older are masked",
    };
    let bound = format!("{}: flow.max_staleness; {enforced}", count(worst, "version"));
    vec![("worst staleness", bound), ("if all in order", derived)]
}

fn count(number: u64, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

fn model(plan: &Plan) -> String {
    match &plan.model.source {
        ModelSource::Folder(folder) => folder.name().display().to_string(),
        ModelSource::Tiny(tiny) => format!("tiny, about {:.2} million parameters", tiny.parameters() as f64 / 1e6),
    }
}
