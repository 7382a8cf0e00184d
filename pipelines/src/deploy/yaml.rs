//! YAML of the files for platforms.

use anyhow::{Context, Result};
use serde_json::Value;

/// Documents after a comment. Strings are quoted where they would be read as something else.
pub fn documents(head: &str, all: &[Value]) -> Result<String> {
    let each = all.iter().map(|value| serde_saphyr::to_string(value).context("writing YAML"));
    let texts: Vec<String> = each.collect::<Result<_>>()?;
    Ok(head.to_owned() + &texts.join("---\n"))
}
