//! `rollflow check`.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use rollflow::recipe::{self, Machine, Place, Plan, RecipeErrors};
use serde_json::{Value, json};

use super::plans::{RecipeArgs, show, try_load};
use super::{REFUSED, out};
use crate::registry::Registry;

/// Find everything that is wrong with a recipe, and print what follows from it.
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
    pub fn run(self, registry: &Registry) -> Result<ExitCode> {
        let checked = try_load(&self.recipe, registry);
        if self.json {
            out::line(&as_json(&checked).to_string())?;
        } else {
            match &checked {
                Ok(plan) => out::text(&recipe::check_text(plan))?,
                Err(errors) => show(errors),
            }
        }
        Ok(if checked.is_ok() { ExitCode::SUCCESS } else { ExitCode::from(REFUSED) })
    }
}

fn as_json(checked: &Result<Plan, RecipeErrors>) -> Value {
    match checked {
        Ok(plan) => {
            let machine = Machine::here();
            let facts: BTreeMap<&str, String> = recipe::facts(plan, machine).into_iter().collect();
            json!({"ok": true, "name": plan.name, "pipeline": plan.pipeline.word(), "facts": facts, "warnings": plan.warnings(machine)})
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
