//! The recipe as JSON schema, for editors, from the declarations themselves.

use serde_json::{Value, json};

use super::plan::Plan;
use crate::settings::section::Section;

/// docs/recipe.schema.json: what a recipe may say, as JSON schema.
pub fn schema() -> Value {
    let mut keys = Plan::shape();
    let file = json!({"type": "string"});
    keys.extend(
        "include",
        json!({
            "description": "Recipes that this one is laid over, from the folder that it lies in.",
            "oneOf": [file, {"type": "array", "items": file}],
        }),
    );
    let mut schema = keys.schema();
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema".into();
    schema["title"] = "A recipe of rollflow".into();
    schema
}
