//! Requests that give weights to inference servers: the parts that vLLM and SGLang share.

use std::collections::BTreeMap;

use serde_json::Value;

use super::server::{LIMIT, Server};
use super::{Fault, RemoteError, WeightControl};

/// SHA-256 of nothing: the checksum of a matrix that a server keeps elsewhere.
const OF_NOTHING: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

impl Server {
    /// Posts a request for weights.
    pub(super) async fn post_control(&self, path: &str, body: &Value) -> Result<Value, RemoteError> {
        self.client.post(path, body, LIMIT).await.map_err(|error| self.explain(path, error))
    }

    /// Posts a request whose reply reports success in `success`, in addition to the status.
    pub(super) async fn post_success(&self, path: &str, body: &Value) -> Result<Value, RemoteError> {
        let reply = self.post_control(path, body).await?;
        self.succeeded(path, &reply)?;
        Ok(reply)
    }

    /// Page that describes the served weights.
    pub(super) async fn info(&self, path: &str) -> Result<Value, RemoteError> {
        self.client.get(path, LIMIT).await.map_err(|error| self.explain(path, error))
    }

    /// Checksums below the first of `keys` that has any; `None` if the server has no such route. If
    /// `reports_success`, the reply must say that it succeeded.
    pub(super) async fn checksums(
        &self,
        path: &str,
        keys: &[&str],
        reports_success: bool,
    ) -> Result<Option<BTreeMap<String, String>>, RemoteError> {
        let reply = match self.client.post(path, &serde_json::json!({"action": "checksum"}), LIMIT).await {
            Ok(reply) => reply,
            Err(RemoteError { fault: Fault::Refused { status: 404 | 405, .. }, .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        if reports_success {
            self.succeeded(path, &reply)?;
        }
        let found = keys.iter().find_map(|key| checksums(&reply[*key]));
        found.map(Some).ok_or_else(|| self.nonsense(path, "no checksums", &reply))
    }

    /// Names of the adapters that the server lists in addition to its model.
    pub(super) async fn adapters(&self) -> Result<Vec<String>, RemoteError> {
        let reply = self.client.get("/v1/models", LIMIT).await?;
        let listed = reply["data"].as_array().into_iter().flatten().filter(|model| model["parent"].is_string());
        Ok(listed.filter_map(|model| model["id"].as_str().map(str::to_owned)).collect())
    }

    pub(super) fn nonsense(&self, path: &str, why: &str, reply: &Value) -> RemoteError {
        self.client.nonsense(&format!("POST {path}"), why.to_owned(), &reply.to_string())
    }

    fn explain(&self, path: &str, mut error: RemoteError) -> RemoteError {
        if let Fault::Refused { status: 404 | 405, advice, .. } = &mut error.fault {
            *advice = (self.advice)(path).to_owned();
        }
        error
    }

    fn succeeded(&self, path: &str, reply: &Value) -> Result<(), RemoteError> {
        match reply["success"].as_bool() {
            Some(true) => Ok(()),
            Some(false) => {
                let begins = reply["message"].as_str().map_or_else(|| reply.to_string(), str::to_owned);
                let what = format!("POST {path} (success: false)");
                Err(self.client.fault(Fault::Failed { what, status: 200, begins }))
            }
            None => Err(self.nonsense(path, "no `success`", reply)),
        }
    }
}

/// Unloads an adapter of this name, if there is one: servers refuse to load a name twice.
pub(super) async fn unload_namesake(control: &dyn WeightControl, name: &str) -> Result<(), RemoteError> {
    match control.adapters().await?.iter().any(|known| known == name) {
        true => control.unload_adapter(name).await,
        false => Ok(()),
    }
}

/// Label of the served weights in a page; `None` before the first label.
pub(super) fn label(reply: &Value) -> Option<String> {
    reply["weight_version"].as_str().filter(|label| !label.is_empty() && *label != "default").map(str::to_owned)
}

/// All texts in an object or list, by path, except checksums of nothing.
fn checksums(reply: &Value) -> Option<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    gather(reply, "", &mut found);
    (!found.is_empty()).then_some(found)
}

fn gather(reply: &Value, path: &str, found: &mut BTreeMap<String, String>) {
    let inside = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
    match reply {
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
    fn a_checksum_of_nothing_says_nothing_and_unnamed_weights_have_no_version() {
        let said = json!({"a": "1", "b": {"c": "2", "packed": OF_NOTHING}, "d": ["3"]});
        let found = checksums(&said).unwrap();
        assert_eq!(found.keys().map(String::as_str).collect::<Vec<_>>(), ["a", "b/c", "d/0"]);
        assert_eq!(checksums(&json!({"packed": OF_NOTHING})), None);
        assert_eq!(label(&json!({"weight_version": "42"})), Some("42".to_owned()));
        for unnamed in [json!({"weight_version": "default"}), json!({}), json!({"weight_version": null})] {
            assert_eq!(label(&unnamed), None);
        }
    }

    #[test]
    fn r260_success_false_is_an_error_whatever_the_status_says() {
        let control = Server::new("SGLang", "http://127.0.0.1:9".into(), None, |_| "").unwrap();
        assert!(control.succeeded("/x", &json!({"success": true})).is_ok());
        let told = control.succeeded("/x", &json!({"success": false, "message": "no such tensor"})).unwrap_err().to_string();
        assert!(told.contains("SGLang http://127.0.0.1:9") && told.contains("no such tensor"), "{told}");
        assert!(control.succeeded("/x", &json!({})).is_err());
    }
}
