//! `rollflow check`.

use std::cell::RefCell;
use std::collections::BTreeMap;

use anyhow::Result;
use clap::Args;
use rollflow::data::source::Survey;
use rollflow::recipe::{self, Derived, Machine, Place, RecipeErrors};
use serde_json::{Value, json};

use super::plans::{Loaded, RecipeArgs, load_and};
use super::{End, out};
use crate::registry::Registry;
use crate::survey::{self, Surveyed};

/// Find everything that is wrong with a recipe and its data, and print what follows from it.
#[derive(Args)]
#[command(after_help = "Example:\n  rollflow check mine.toml --set flow.max_staleness=2")]
pub struct Check {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Print one JSON object: the derived numbers and warnings, or the errors with their places.
    #[arg(long)]
    json: bool,
}

impl Check {
    pub fn run(self, registry: &Registry) -> Result<()> {
        let surveyed = RefCell::new(Surveyed::default());
        let checked = load_and(&self.recipe, registry, |plan| {
            let found = survey::of(plan);
            let complaints = found.complaints.clone();
            surveyed.replace(found);
            complaints
        });
        let surveyed = surveyed.into_inner();
        if self.json {
            out::line(&as_json(&checked, &surveyed).to_string())?;
            return if checked.is_ok() { Ok(()) } else { Err(End::Said(2).into()) };
        }
        let data: String = surveyed.lines.iter().map(|line| format!("  {line}\n")).collect();
        out::text(&(text_of(&checked.map_err(End::Recipe)?) + &data))
    }
}

/// The derived numbers, the values that were left out, and warnings.
pub(super) fn text_of((plan, derived): &Loaded) -> String {
    format!("{}left out, and derived:\n{}", recipe::check_text(plan), recipe::derived_text(derived))
}

/// The derived numbers, facts and warnings, or the errors with their places.
pub fn as_json(checked: &Result<Loaded, RecipeErrors>, surveyed: &Surveyed) -> Value {
    match checked {
        Ok((plan, derived)) => {
            let machine = Machine::here();
            let facts: BTreeMap<&str, String> = recipe::facts(plan, machine).into_iter().collect();
            let source = |(key, found): &(String, Survey)| {
                let Survey { name, files, records, exact, judged, skips } = found;
                json!({"key": key, "name": name, "files": files, "records": records, "exact": exact, "read": judged,
                    "skipped": skips.iter().collect::<BTreeMap<_, _>>()})
            };
            let data: Vec<Value> = surveyed.sources.iter().map(source).collect();
            let derived: Vec<Value> = derived
                .iter()
                .map(|Derived { key, value, reason }| json!({"key": key, "value": value, "reason": reason}))
                .collect();
            json!({
                "ok": true, "name": plan.name, "pipeline": plan.pipeline.word(), "facts": facts, "derived": derived, "data": data,
                "warnings": plan.warnings(machine),
            })
        }
        Err(errors) => {
            let error = |error: &recipe::RecipeError| {
                let mut row =
                    json!({"at": error.place.to_string(), "key": error.key, "message": error.message, "help": error.help});
                if let Place::File { file, line, column } = &error.place {
                    (row["file"], row["line"], row["column"]) = (json!(file), json!(line), json!(column));
                }
                row
            };
            json!({"ok": false, "errors": errors.iter().map(error).collect::<Vec<_>>()})
        }
    }
}
