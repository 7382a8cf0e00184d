//! A plan back as text: the resolved recipe with every default filled in, and what `rollflow check` prints.

use super::derive::Machine;
use super::model::Model;
use super::plan::{OnStale, Pipeline, Plan};
use super::section::Section;
use super::setting::Written;

impl Plan {
    /// The resolved recipe: every value that matters to the pipeline, defaults included. It loads again to an equal plan.
    pub fn to_toml(&self) -> String {
        let mut rows = Vec::new();
        self.rows(&mut rows);
        rows.retain(|(key, _)| !self.pipeline.unused_sections().contains(&key.as_str()));
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

/// What `rollflow check` prints about a sound plan: its derived numbers, and warnings for this machine.
pub fn check_text(plan: &Plan) -> String {
    check_text_on(plan, Machine::here())
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

fn facts(plan: &Plan, machine: Machine) -> Vec<(&'static str, String)> {
    let mut facts = vec![("model", model(plan)), ("steps", plan.steps().to_string())];
    let epoch = plan.steps_per_epoch().map(|steps| format!("{steps:.1} steps"));
    let samples = plan.samples_per_step();
    if plan.pipeline == Pipeline::Grpo {
        if let Some(sft) = &plan.sft {
            facts.push(("warm-up", format!("{} of {} pairs", count(sft.steps, "step"), sft.batch)));
        }
        facts.extend([
            (
                "samples a step",
                format!("{samples} ({} groups of {}{})", plan.batch.groups, plan.generate.group_size, chosen_from(plan)),
            ),
            ("tokens a step", format!("at most {} sampled", plan.generated_tokens_per_step())),
            ("admission window", format!("{} groups", plan.admission_window())),
            ("worst staleness", worst_staleness(plan)),
        ]);
    } else {
        facts.push(("samples a step", samples.to_string()));
    }
    facts.extend(epoch.map(|epoch| ("one epoch", epoch)));
    facts.push(("threads", format!("{} of the machine's {}", plan.threads(), machine.threads)));
    facts
}

fn chosen_from(plan: &Plan) -> String {
    if plan.over_samples() { format!(", the first of {}", plan.groups_chosen_from()) } else { String::new() }
}

fn worst_staleness(plan: &Plan) -> String {
    let (worst, in_turn) = (plan.worst_staleness(), plan.worst_lag_in_turn());
    let mut text = format!("{}, one published every {}", count(worst, "version"), count(plan.sync.every, "step"));
    if plan.over_samples() {
        text += &format!(" ({in_turn} in turn, the rest for groups that finish late)");
    }
    match plan.flow.on_stale {
        _ if !plan.over_samples() && in_turn <= worst => {}
        OnStale::Wait => text += "; later ones are waited for",
        OnStale::Drop => text += "; older groups are dropped",
        OnStale::Mask => text += "; older tokens are masked",
    }
    text
}

fn count(number: u64, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

fn model(plan: &Plan) -> String {
    match &plan.model {
        Model::Folder(folder) => folder.path.display().to_string(),
        Model::Tiny(tiny) => format!("tiny, about {:.2} million parameters", tiny.parameters() as f64 / 1e6),
    }
}
