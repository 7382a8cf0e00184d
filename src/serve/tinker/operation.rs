//! Operations on a model, and their answers.

use std::collections::BTreeMap;

use rollflow_tinker::message::{AdamParams, PassOutput, SampleResponse, Sequence, Tensor, TopRow};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::util::untrusted;

/// A numbered operation on a model. The journal keeps it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Operation {
    /// A pass, in protobuf.
    Pass(Vec<u8>),
    /// An update.
    Update(AdamParams),
    /// Weights and optimizer are saved under this name.
    Save(String),
    /// Weights, and the optimizer if so, are loaded from this path.
    Load { path: String, optimizer: bool },
    /// Weights are made ready for sampling, as this session or under this name.
    Sampler { session: String, name: Option<String> },
    /// Nothing is done, for this reason. It has a number, so that later operations run.
    Refused(String),
    /// The server failed at it, for this reason. `has_gradient`: if false, no gradient was left.
    Failed { why: String, has_gradient: bool },
}

impl Operation {
    /// Path of the weights that it loads.
    pub fn loads(&self) -> Option<&str> {
        match self {
            Operation::Load { path, .. } => Some(path),
            _ => None,
        }
    }

    /// Weights that it saves for the model `id`, as `weights/NAME` or `sampler_weights/NAME`.
    pub fn saves(&self, id: &str) -> Option<String> {
        match self {
            Operation::Save(name) => Some(format!("weights/{name}")),
            Operation::Sampler { session, .. } => {
                Some(format!("sampler_weights/{}", session.strip_prefix(id)?.strip_prefix('.')?))
            }
            _ => None,
        }
    }

    /// Approximate size of what a client sent, in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Operation::Pass(pass) => pass.len(),
            Operation::Load { path, .. } => path.len(),
            Operation::Refused(why) | Operation::Failed { why, .. } => why.len(),
            _ => 0,
        }
    }
}

/// Answer to an operation.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    Json(Value),
    Pass(PassOutput),
    Samples(SampleResponse),
    /// Why it failed, and whether the request was at fault.
    Failed {
        why: String,
        of_request: bool,
    },
}

impl Answer {
    /// A failure that the request is to blame for.
    pub fn refused(why: impl ToString) -> Self {
        // It may quote the request.
        Answer::Failed { why: untrusted::block_of(&why.to_string(), untrusted::LINE), of_request: true }
    }

    /// A failure of the server.
    pub fn failed(why: impl ToString) -> Self {
        Answer::Failed { why: why.to_string(), of_request: false }
    }

    /// Size in memory, about.
    pub fn bytes(&self) -> usize {
        /// Of an answer without its lists.
        const FRAME: usize = 512;
        let rows = |rows: &Option<Vec<TopRow>>| -> usize {
            rows.iter().flatten().map(|row| size_of::<TopRow>() + row.as_ref().map_or(0, |row| size_of_val(&row[..]))).sum()
        };
        FRAME
            + match self {
                Answer::Json(_) | Answer::Failed { .. } => 0,
                Answer::Pass(pass) => pass.loss_fn_outputs.iter().flat_map(BTreeMap::values).map(Tensor::bytes).sum(),
                Answer::Samples(samples) => {
                    let sequence = |of: &Sequence| {
                        let log_probs = of.logprobs.as_ref().map_or(0, |all| size_of_val(&all[..]));
                        size_of_val(&of.tokens[..]) + log_probs + rows(&of.topk_logprobs)
                    };
                    let prompt = samples.prompt_logprobs.as_ref().map_or(0, |all| size_of_val(&all[..]));
                    samples.sequences.iter().map(sequence).sum::<usize>() + prompt + rows(&samples.topk_prompt_logprobs)
                }
            }
    }

    /// The page of a failure.
    pub fn failure(why: &str, of_request: bool) -> Value {
        json!({"error": why, "category": if of_request { "user" } else { "server" }})
    }
}
