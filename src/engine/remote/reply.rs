//! Parts of replies that several servers share.

use serde::Deserialize;
use serde_json::Value;

use super::{Chunk, VersionSpan};

/// Span of tokens of one version, as vLLM and SGLang write it.
#[derive(Debug, Deserialize)]
pub(super) struct WireSpan {
    version: String,
    start: usize,
    end: usize,
}

/// Converts the spans of a completion; an empty list is `None`.
pub(super) fn spans(spans: Option<Vec<WireSpan>>) -> Option<Vec<VersionSpan>> {
    let spans = spans.filter(|spans| !spans.is_empty())?;
    Some(spans.into_iter().map(|WireSpan { version, start, end }| VersionSpan { label: version, start, end }).collect())
}

/// Pairs tokens with their log-probabilities.
pub(super) fn chunk(tokens: Vec<u32>, log_probs: Vec<Option<f64>>) -> Result<Chunk, String> {
    if tokens.len() != log_probs.len() {
        return Err(format!("{} tokens and {} log-probabilities", tokens.len(), log_probs.len()));
    }
    let log_probs: Option<Vec<f32>> = log_probs.into_iter().map(|log_prob| log_prob.map(|log_prob| log_prob as f32)).collect();
    let log_probs = log_probs.ok_or("a token without log-probability")?;
    Ok(Chunk { tokens, log_probs })
}

/// Status of an error in a reply. Default: 500.
pub(super) fn status(error: &Value) -> u16 {
    let code = [error.pointer("/error/code"), error.get("code"), error.get("status_code")].into_iter().flatten().next();
    code.and_then(Value::as_u64).and_then(|code| u16::try_from(code).ok()).filter(|code| (400..600).contains(code)).unwrap_or(500)
}
