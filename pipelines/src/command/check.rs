//! `rollflow check`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use rollflow::recipe;

use super::plans::{RecipeArgs, load};
use super::{REFUSED, out};
use crate::registry::Registry;

/// Find everything that is wrong with a recipe, and print what follows from it.
#[derive(Args)]
pub struct Check {
    #[command(flatten)]
    recipe: RecipeArgs,
}

impl Check {
    pub fn run(self, registry: &Registry) -> Result<ExitCode> {
        let Some(plan) = load(&self.recipe, registry) else { return Ok(ExitCode::from(REFUSED)) };
        out::text(&recipe::check_text(&plan))?;
        Ok(ExitCode::SUCCESS)
    }
}
