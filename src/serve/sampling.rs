//! Sampling parameters of both dialects.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::reply::Refusal;
use super::ticket::TextStyle;
use crate::engine::SamplingParams;
use crate::util::untrusted;

/// One value or a list.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    /// The values, and whether they were a list.
    pub fn list(self) -> (Vec<T>, bool) {
        match self {
            OneOrMany::One(one) => (vec![one], false),
            OneOrMany::Many(many) => (many, true),
        }
    }

    /// The value of an element: the only one, or that of its place.
    pub fn of(&self, at: usize) -> Option<&T> {
        match self {
            OneOrMany::One(one) => Some(one),
            OneOrMany::Many(many) => many.get(at),
        }
    }
}

/// Sampling parameters as SGLang, vLLM and OpenAI name them.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Sampling {
    max_new_tokens: Option<usize>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    /// By token, in decimal.
    logit_bias: Option<BTreeMap<String, f32>>,
    stop: Option<OneOrMany<String>>,
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    pub n: Option<u32>,
    sampling_seed: Option<i64>,
    seed: Option<i64>,
    pub skip_special_tokens: Option<bool>,
    no_stop_trim: Option<bool>,
    include_stop_str_in_output: Option<bool>,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// Parameters that would change the result and are not supported, with their neutral values.
/// Null and empty values are neutral, too.
const UNSUPPORTED: [(&str, f64); 29] = [
    ("min_new_tokens", 0.0),
    ("min_tokens", 0.0),
    ("stop_regex", 0.0),
    ("json_schema", 0.0),
    ("regex", 0.0),
    ("ebnf", 0.0),
    ("structural_tag", 0.0),
    ("response_format", 0.0),
    ("structured_outputs", 0.0),
    ("custom_params", 0.0),
    ("custom_logit_processor", 0.0),
    ("beam_width", 1.0),
    ("best_of", 1.0),
    ("suffix", 0.0),
    ("choice", 0.0),
    ("watermark", 0.0),
    ("chat_template_kwargs", 0.0),
    ("chat_template", 0.0),
    ("continue_final_message", 0.0),
    ("truncate_prompt_tokens", 0.0),
    ("allowed_token_ids", 0.0),
    ("bad_words", 0.0),
    ("use_beam_search", 0.0),
    ("length_penalty", 1.0),
    ("guided_json", 0.0),
    ("guided_regex", 0.0),
    ("guided_choice", 0.0),
    ("guided_grammar", 0.0),
    // Every number asks for log-probabilities, 0 too.
    ("prompt_logprobs", f64::NAN),
];

fn is_neutral(value: &Value, neutral: f64) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(neutral),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty() || *value == json!({ "type": "text" }),
        Value::Bool(true) => false,
    }
}

impl Sampling {
    /// Rejects parameters that are not supported, and, if `strict`, unknown ones.
    pub fn check(&self, strict: bool) -> Result<(), Refusal> {
        // Known, and without an effect here.
        const FREE: [&str; 2] = ["stream_interval", "spaces_between_special_tokens"];
        for (name, value) in &self.rest {
            let known = UNSUPPORTED.iter().find(|(known, _)| known == name);
            let refused = match known {
                Some((_, neutral)) => !is_neutral(value, *neutral),
                None => strict && !FREE.contains(&name.as_str()),
            };
            if refused {
                let name = untrusted::line_of(name, 60);
                return Err(Refusal::bad(format!("the sampling parameter `{name}` is not supported here; leave it out")));
            }
        }
        let mut biased = self.logit_bias.iter().flatten().map(|(token, _)| token);
        match biased.find(|token| token.parse::<u32>().is_err()) {
            Some(token) => Err(Refusal::bad(format!("`logit_bias` names {}; it takes tokens", untrusted::line_of(token, 60)))),
            None => Ok(()),
        }
    }

    /// Parameters of the engine; `max_new_tokens` is the default of the route.
    pub fn params(&self, max_new_tokens: usize) -> SamplingParams {
        let given = self.max_completion_tokens.or(self.max_tokens).or(self.max_new_tokens);
        SamplingParams {
            temperature: self.temperature.unwrap_or(1.0),
            top_p: self.top_p.unwrap_or(1.0),
            top_k: self.top_k.and_then(|k| usize::try_from(k).ok()).unwrap_or(0),
            min_p: self.min_p.unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            logit_bias: self.logit_bias.iter().flatten().filter_map(|(token, bias)| Some((token.parse().ok()?, *bias))).collect(),
            max_new_tokens: given.unwrap_or(max_new_tokens),
            stop_token_ids: self.stop_token_ids.clone().unwrap_or_default(),
            stop: self.stop.clone().map(|stop| stop.list().0).unwrap_or_default(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
        }
    }

    pub fn seed(&self) -> Option<u64> {
        self.sampling_seed.or(self.seed).map(i64::cast_unsigned)
    }

    pub fn style(&self) -> TextStyle {
        let whole = self.no_stop_trim.or(self.include_stop_str_in_output).unwrap_or(false);
        TextStyle { skip_special: self.skip_special_tokens.unwrap_or(true), trim: !whole }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_all_dialects_are_read_and_what_has_no_effect_here_is_refused() {
        let read = |value: Value| serde_json::from_value::<Sampling>(value).unwrap();
        let sglang = read(json!({"max_new_tokens": 7, "sampling_seed": 5, "top_k": -1, "stop": null, "no_stop_trim": true}));
        let openai = read(json!({"max_tokens": 7, "seed": 5, "top_k": 0, "stop": [], "include_stop_str_in_output": true}));
        assert_eq!((sglang.params(1), sglang.seed(), sglang.style().trim), (openai.params(2), openai.seed(), false));
        assert_eq!(
            read(json!({"stop": "a"})).params(9),
            SamplingParams { stop: vec!["a".into()], max_new_tokens: 9, ..Default::default() }
        );
        let twice = read(json!({
            "max_tokens": null, "max_completion_tokens": 5, "seed": 7, "sampling_seed": null, "no_stop_trim": null,
            "include_stop_str_in_output": true,
        }));
        assert_eq!((twice.params(9).max_new_tokens, twice.seed(), twice.style().trim), (5, Some(7), false));
        assert_eq!(read(json!({"max_tokens": 6, "max_completion_tokens": 5})).params(9).max_new_tokens, 5);
        let neutral = json!({
            "min_tokens": 0, "regex": null, "logit_bias": {}, "response_format": {"type": "text"}, "bad_words": [],
            "use_beam_search": false, "length_penalty": 1.0, "prompt_logprobs": null,
        });
        assert!(read(neutral).check(true).is_ok());
        for refused in [
            json!({"min_tokens": 1}),
            json!({"logit_bias": {"a": 1}}),
            json!({"regex": "a"}),
            json!({"beam_width": 2}),
            json!({"allowed_token_ids": [7]}),
            json!({"bad_words": ["a"]}),
            json!({"prompt_logprobs": 0}),
            json!({"use_beam_search": true}),
            json!({"length_penalty": 2}),
            json!({"guided_choice": ["a"]}),
        ] {
            assert!(read(refused.clone()).check(false).is_err(), "{refused}");
        }
        let changed =
            json!({"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"7": -100}});
        let expected = SamplingParams {
            repetition_penalty: 1.1,
            presence_penalty: 0.5,
            frequency_penalty: -1.0,
            logit_bias: [(7, -100.0)].into(),
            max_new_tokens: 9,
            ..Default::default()
        };
        assert_eq!(read(changed).params(9), expected);
        let unknown = read(json!({"heat": 0.5}));
        assert!(unknown.check(true).is_err() && unknown.check(false).is_ok());
    }
}
