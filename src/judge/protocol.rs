//! Requests and responses of a reward service as JSON. `docs/reference/protocols.md` specifies them.

use serde_json::{Value, json};

use super::ServiceError;
use crate::algo::rewards::RewardOutput;
use crate::data::{Group, PromptText, RewardParts, Sample};

/// Characters of a malformed response that an error shows.
const SHOWN: usize = 120;

/// Returns the body of a request: the group's prompt and its samples at `places`, with the tokens of
/// their completions if `tokens` is true.
pub(super) fn request(group: &Group, places: &[usize], tokens: bool) -> Value {
    let samples = places.iter().map(|place| {
        let Sample { index, response, status, metadata, .. } = &group.samples[*place];
        let length = group.samples[*place].generated();
        let mut sample =
            json!({ "index": index, "response": response, "status": status, "length": length, "metadata": metadata });
        if tokens {
            let Sample { tokens, versions, .. } = &group.samples[*place];
            let begins = versions.per_token().position(|version| version.is_some()).unwrap_or(tokens.len());
            sample["tokens"] = json!(tokens[begins..]);
        }
        sample
    });
    let mut request = json!({ "group": group.id(), "prompt": group.prompt.text.render() });
    if let PromptText::Chat(messages) = &group.prompt.text {
        request["messages"] = json!(messages);
    }
    request["samples"] = samples.collect();
    request
}

/// Reward of a sample, none if the reward does not apply to it; or the reason why it failed.
pub type Answer = Result<Option<RewardOutput>, String>;

/// Parses the rewards of `count` samples.
///
/// # Errors
/// If the body as a whole is no response with `count` rewards.
pub(super) fn parse(url: &str, body: &[u8], count: usize) -> Result<Vec<Answer>, ServiceError> {
    let no_json = |error| ServiceError::Answer { url: url.to_owned(), why: format!("no JSON ({error})"), begins: begins(body) };
    rewards(url, &serde_json::from_slice(body).map_err(no_json)?, count)
}

/// Reads the rewards of `count` samples from a response.
///
/// # Errors
/// If the response as a whole has no `count` rewards.
pub(super) fn rewards(url: &str, answer: &Value, count: usize) -> Result<Vec<Answer>, ServiceError> {
    let wrong = |why: String| ServiceError::Answer { url: url.to_owned(), why, begins: begins(answer.to_string().as_bytes()) };
    let Some(rewards) = answer.get("rewards") else {
        return Err(wrong("JSON without a key \"rewards\"".to_owned()));
    };
    let Value::Array(rewards) = rewards else {
        return Err(wrong("no list under \"rewards\"".to_owned()));
    };
    if rewards.len() != count {
        return Err(wrong(format!("{} rewards for {count} samples", rewards.len())));
    }
    Ok(rewards.iter().map(|reward| reward_entry(url, reward)).collect())
}

/// Reads one entry: a number, `{"reward": number or null, "parts": {…}}` or `{"error": text}`.
fn reward_entry(url: &str, entry: &Value) -> Answer {
    if let Some(error) = entry.get("error").filter(|error| !error.is_null()) {
        return Err(format!("{url} says: {}", error.as_str().map_or_else(|| error.to_string(), str::to_owned)));
    }
    let number = |value: &Value| {
        let shown: String = value.to_string().chars().take(SHOWN).collect();
        value.as_f64().ok_or_else(|| {
            format!("{url} gave {shown} where a finite number must stand (a number, or a table with \"reward\" or \"error\")")
        })
    };
    let parts = match entry.get("parts") {
        None | Some(Value::Null) => RewardParts::new(),
        Some(Value::Object(parts)) => {
            parts.iter().map(|(name, value)| Ok((name.clone(), number(value)?))).collect::<Result<_, String>>()?
        }
        Some(other) => return Err(format!("{url} gave the parts {other}; they must be a table of numbers")),
    };
    match entry.get("reward") {
        Some(Value::Null) => Ok(None),
        reward => Ok(Some(RewardOutput { reward: number(reward.unwrap_or(entry))?, parts })),
    }
}

/// Returns the first characters of a body on one line.
pub(super) fn begins(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(4 * SHOWN)]);
    let line: String = text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(SHOWN).collect();
    if line.is_empty() { "nothing".to_owned() } else { line }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::data::{ChatMessage, Prompt};

    const URL: &str = "http://judge/score";

    fn group() -> Group {
        let mut prompt = Prompt { ordinal: 7, ..Prompt::from("3+4=") };
        prompt.metadata.insert("answer".into(), "7".into());
        let sample = |index| Sample { response: format!("{index}"), ..Sample::begin(&prompt, index, &[1]) };
        Group { samples: (0..3).map(sample).collect(), prompt: Arc::new(prompt), ..Group::default() }
    }

    #[test]
    fn a_question_holds_the_prompt_and_the_samples_that_are_asked_for() {
        let asked = request(&group(), &[0, 2], false);
        let sample = |index: u32| {
            json!({
                "index": index, "response": index.to_string(), "status": "pending", "length": 0, "metadata": {"answer": "7"},
            })
        };
        assert_eq!(asked, json!({"group": 7, "prompt": "3+4=", "samples": [sample(0), sample(2)]}));

        let turn = ChatMessage::new("user", "3+4=");
        let chat = Group { prompt: Arc::new(Prompt::from(vec![turn])), ..group() };
        let asked = request(&chat, &[], false);
        assert_eq!(asked["messages"], json!([{"role": "user", "content": "3+4="}]));
    }

    #[test]
    fn an_answer_gives_a_reward_or_a_reason_to_each_sample() {
        let body =
            br#"{"rewards": [1, {"reward": 0.5, "parts": {"form": 1.0}}, {"error": "no key"}, null, "1.0", {"parts": {}}, {"reward": null}, {"reward": 2, "parts": null, "error": null}]}"#;
        let answers = parse(URL, body, 8).unwrap();
        assert_eq!(answers[0], Ok(Some(RewardOutput { reward: 1.0, parts: RewardParts::new() })));
        assert_eq!(answers[1], Ok(Some(RewardOutput { reward: 0.5, parts: [("form".to_owned(), 1.0)].into() })));
        assert_eq!(answers[6], Ok(None));
        assert_eq!(answers[7], Ok(Some(RewardOutput { reward: 2.0, parts: RewardParts::new() })), "fields that are not set");
        assert_eq!(answers[2], Err("http://judge/score says: no key".to_owned()));
        for (place, shown) in [(3, "null"), (4, "\"1.0\""), (5, "{\"parts\":{}}")] {
            assert!(answers[place].as_ref().unwrap_err().contains(&format!("gave {shown} where a finite number")), "{answers:?}");
        }
    }

    #[test]
    fn what_is_no_answer_is_refused_with_the_reason_and_its_beginning() {
        for (body, why) in [
            (&b"<html>\n<title>404</title>"[..], "no JSON (expected value at line 1 column 1): \"<html> <title>404</title>\""),
            (b"{\"rewards\": [1.0, 0", "no JSON (EOF while parsing a list"),
            (b"{\"rewards\": [1.0, NaN]}", "no JSON (expected value"),
            (b"{\"rewards\": [1.0, 1e999]}", "no JSON (number out of range"),
            (b"", "no JSON (EOF while parsing a value at line 1 column 0): \"nothing\""),
            (b"\xff\xfe", "no JSON"),
            (b"[1.0, 0.0]", "JSON without a key \"rewards\""),
            (b"{\"rewards\": 1.0}", "no list under \"rewards\""),
            (b"{\"rewards\": [1.0]}", "1 rewards for 2 samples"),
        ] {
            let error = parse(URL, body, 2).unwrap_err().to_string();
            assert!(error.starts_with("http://judge/score answered with ") && error.contains(why), "{error}");
        }
    }
}
