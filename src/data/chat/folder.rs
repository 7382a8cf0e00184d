//! Finding a model folder's chat template among its files.

use std::path::Path;

use serde_json::{Map, Value};

use super::{ChatError, ChatTemplate};
use crate::data::Metadata;
use crate::util::reading;

const JINJA: &str = "chat_template.jinja";
const CONFIG: &str = "tokenizer_config.json";
const OLD: &str = "chat_template.json";

impl ChatTemplate {
    /// Reads the template of a model's folder: `chat_template.jinja` and those of
    /// `additional_chat_templates`, else `chat_template` in `tokenizer_config.json` (one template
    /// or a list of named ones), else `chat_template.json`. Special tokens of
    /// `tokenizer_config.json` become its variables.
    pub fn from_dir(dir: &Path) -> Result<Option<Self>, ChatError> {
        let config = object(&dir.join(CONFIG))?;
        let variables = config.as_ref().map_or_else(Metadata::new, special_tokens);
        let mut sources = Vec::new();
        if let Some(text) = read(&dir.join(JINJA))? {
            sources.push(("default".to_owned(), text));
            let more = std::fs::read_dir(dir.join("additional_chat_templates")).into_iter().flatten().flatten();
            for path in more.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|end| end == "jinja")) {
                let name = path.file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
                sources.extend(read(&path)?.map(|text| (name, text)));
            }
            return ChatTemplate::named(&dir.join(JINJA).display().to_string(), sources, variables).map(Some);
        }
        for (name, object) in [(CONFIG, config), (OLD, object(&dir.join(OLD))?)] {
            let path = dir.join(name);
            if let Some(found) = object.as_ref().and_then(|object| object.get("chat_template")).filter(|found| !found.is_null()) {
                let sources = templates(found).ok_or_else(|| ChatError::File {
                    path: path.clone(),
                    reason: "`chat_template` must be a text or a list of {\"name\": …, \"template\": …}".to_owned(),
                })?;
                return ChatTemplate::named(&format!("{} (chat_template)", path.display()), sources, variables).map(Some);
            }
        }
        Ok(None)
    }
}

/// Name and text of each.
fn templates(found: &Value) -> Option<Vec<(String, String)>> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    match found {
        Value::String(template) => Some(vec![("default".to_owned(), template.clone())]),
        Value::Array(list) if !list.is_empty() => {
            list.iter().map(|one| Some((text(one.get("name")?)?, text(one.get("template")?)?))).collect()
        }
        _ => None,
    }
}

/// `bos_token` and its like, as the texts that templates print.
pub(crate) fn special_tokens(config: &Map<String, Value>) -> Metadata {
    let token = |(name, value): (&String, &Value)| {
        let text = value.get("content").unwrap_or(value).as_str()?;
        name.ends_with("_token").then(|| (name.clone(), text.into()))
    };
    config.iter().filter_map(token).collect()
}

/// The file's text, if there is one.
fn read(path: &Path) -> Result<Option<String>, ChatError> {
    match reading::read_text(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(ChatError::File { path: path.to_owned(), reason: error.to_string() }),
    }
}

fn object(path: &Path) -> Result<Option<Map<String, Value>>, ChatError> {
    let Some(text) = read(path)? else { return Ok(None) };
    let parsed = serde_json::from_str(&text);
    parsed.map(Some).map_err(|error| ChatError::File { path: path.to_owned(), reason: format!("not a JSON object: {error}") })
}
