//! What the answers of inference servers to whoever gives them weights have in common.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use super::{Fault, RemoteError, WeightControl};
use crate::net::Client;

/// SHA-256 of nothing: what a server says of a matrix that it keeps elsewhere, in a form of its own.
const OF_NOTHING: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

/// The same error with `advice` in the place of the usual where it is a refusal with one of these statuses.
pub(super) fn explain(mut error: RemoteError, statuses: &[u16], told: &str) -> RemoteError {
    if let Fault::Refused { status, advice, .. } = &mut error.fault
        && statuses.contains(status)
    {
        *advice = told.to_owned();
    }
    error
}

/// Nothing where the server has no such route.
pub(super) fn none_where_missing<T>(error: RemoteError) -> Result<Option<T>, RemoteError> {
    match error.fault {
        Fault::Refused { status: 404 | 405, .. } => Ok(None),
        _ => Err(error),
    }
}

/// Whether an answer with status 200 says that it did not work all the same.
pub(super) fn succeeded(client: &Client, what: &str, said: &Value) -> Result<(), RemoteError> {
    match said["success"].as_bool() {
        Some(true) => Ok(()),
        Some(false) => {
            let begins = said["message"].as_str().map_or_else(|| said.to_string(), str::to_owned);
            let what = format!("POST {what} (success: false)");
            Err(RemoteError::new(client.name(), Fault::Failed { what, status: 200, begins }))
        }
        None => Err(client.nonsense(&format!("POST {what}"), "no `success`".into(), &said.to_string())),
    }
}

/// What the weights are called; `None` for what servers say before anybody named them.
pub(super) fn version(said: &Value) -> Option<String> {
    said["weight_version"].as_str().filter(|label| !label.is_empty() && *label != "default").map(str::to_owned)
}

/// The adapters that a server lists beside its model.
pub(super) async fn adapters(client: &Client, limit: Duration) -> Result<Vec<String>, RemoteError> {
    let said = client.get("/v1/models", limit).await?;
    let listed = said["data"].as_array().into_iter().flatten().filter(|model| model["parent"].is_string());
    Ok(listed.filter_map(|model| model["id"].as_str().map(str::to_owned)).collect())
}

/// Servers refuse to load an adapter by a name that they know.
pub(super) async fn forget_namesake(control: &dyn WeightControl, name: &str) -> Result<(), RemoteError> {
    match control.adapters().await?.iter().any(|known| known == name) {
        true => control.unload_adapter(name).await,
        false => Ok(()),
    }
}

/// Checksums by name.
pub(super) struct Checksums;

impl Checksums {
    /// All texts in an object or list, by their path. Those of nothing are left out: they would be the same for all weights.
    pub fn of(said: &Value) -> Option<BTreeMap<String, String>> {
        let mut found = BTreeMap::new();
        gather(said, "", &mut found);
        (!found.is_empty()).then_some(found)
    }
}

fn gather(said: &Value, path: &str, found: &mut BTreeMap<String, String>) {
    let inside = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
    match said {
        Value::String(text) if text != OF_NOTHING => drop(found.insert(path.to_owned(), text.clone())),
        Value::Object(rows) => rows.iter().for_each(|(name, row)| gather(row, &inside(name), found)),
        Value::Array(rows) => rows.iter().enumerate().for_each(|(at, row)| gather(row, &inside(&at.to_string()), found)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_checksum_of_nothing_says_nothing() {
        let said = json!({"a": "1", "b": {"c": "2", "packed": OF_NOTHING}, "d": ["3"]});
        let found = Checksums::of(&said).unwrap();
        assert_eq!(found.keys().map(String::as_str).collect::<Vec<_>>(), ["a", "b/c", "d/0"]);
        assert_eq!(Checksums::of(&json!({"packed": OF_NOTHING})), None);
    }

    #[test]
    fn r260_success_false_is_an_error_whatever_the_status_says() {
        let client = Client::new("SGLang", "http://127.0.0.1:9").unwrap();
        assert!(succeeded(&client, "/x", &json!({"success": true})).is_ok());
        let told = succeeded(&client, "/x", &json!({"success": false, "message": "no such tensor"})).unwrap_err().to_string();
        assert!(told.contains("SGLang http://127.0.0.1:9") && told.contains("no such tensor"), "{told}");
        assert!(succeeded(&client, "/x", &json!({})).is_err());
    }

    #[test]
    fn unnamed_weights_have_no_version() {
        assert_eq!(version(&json!({"weight_version": "42"})), Some("42".to_owned()));
        assert!(
            [json!({"weight_version": "default"}), json!({}), json!({"weight_version": null})]
                .iter()
                .all(|said| version(said).is_none())
        );
    }
}
