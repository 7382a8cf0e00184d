//! What a server does, found out on a scratch model before a run.
//!
//! Servers of the protocol differ where it matters. SkyRL 0.3 divides each sequence's loss by the
//! sum of its weights and the gradient by the number of sequences, and its JAX trainer samples from
//! the slot that it trains. Nothing of this is reported, so it is measured.

use std::sync::Arc;

use rollflow_tinker::message::{AdamParams, Datum, LoraConfig, SampleRequest, SampleResponse, SamplingParams, Tensor};
use rollflow_tinker::{Connection, Encoding, TinkerError};

use super::model::{CROSS_ENTROPY, Loss, Numbers, RemoteModel};
use super::one_pass;

/// Way in which a server combines the losses of tokens and sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The sum over all tokens, as the protocol says.
    Sum,
    /// Each sequence's sum divided by that of its weights, and the mean over sequences.
    Mean,
}

/// Properties of a server.
#[derive(Clone, Debug)]
pub struct Dialect {
    /// Messages of passes.
    pub encoding: Encoding,
    /// Combination of losses.
    pub reduction: Reduction,
    /// If true, an operation that arrives twice under one number is done once.
    pub recognises_repeats: bool,
    /// If true, gradients are clipped where it is asked for.
    pub clips: bool,
    /// If true, the norm of the gradient is reported.
    pub reports_norm: bool,
    /// If true, sampling from older weights changes the weights that are trained.
    pub sampling_disturbs: bool,
    /// Losses that it has built in, with the gradient of this library's.
    pub built_in: Vec<String>,
}

/// Largest difference of log-probabilities that are equal.
const EQUAL: f32 = 1e-4;

/// Largest mean difference, in nats, between sampler and trainer, which may compute in 16 bits.
const AGREES: f32 = 0.08;

/// Rate of the scratch model's update, which must be visible.
const VISIBLE: f64 = 0.05;

fn datum(copies: usize, weight: f32) -> Vec<Datum> {
    let inputs = || [("target_tokens", Tensor::Ints(vec![2, 3, 1])), ("weights", Tensor::Floats(vec![weight; 3]))];
    (0..copies).map(|_| Datum::new(vec![1, 2, 3], inputs())).collect()
}

/// Tries the operations that a run needs on a scratch model over `base`.
///
/// # Errors
/// An operation that the server lacks, by name; or a sampler that disagrees with the trainer.
pub(super) async fn probe(
    connection: &Arc<Connection>,
    numbers: &Arc<Numbers>,
    base: &str,
    lora: LoraConfig,
) -> Result<Dialect, TinkerError> {
    let model = RemoteModel::create(connection, numbers, base, lora).await?;
    let found = measured(&model).await;
    // A server may keep it until the session ends.
    if let Err(error) = model.unload().await {
        tracing::debug!("{error}");
    }
    found
}

async fn measured(model: &RemoteModel) -> Result<Dialect, TinkerError> {
    let connection = &model.connection;
    let first = model.submit_passes("forward", datum(1, 1.0), &Loss::named(CROSS_ENTROPY), true).await?;
    let again = model.repeat_forward(datum(1, 1.0)).await;
    let recognises_repeats = again.is_ok_and(|again| first.first() == Some(&again));
    model.outputs("forward", &first).await?;
    if recognises_repeats {
        connection.recognises_repeats();
    }
    let clips = clips(model).await?;
    let mut norms = Vec::new();
    for data in [datum(1, 1.0), datum(1, 2.0), datum(2, 1.0)] {
        norms.push(step(model, data, 0.0).await?);
    }
    let reduction = match norms[..] {
        [Some(one), Some(weighted), Some(twice)] => match (ratio(weighted, one), ratio(twice, one)) {
            (Some(2), Some(2)) => Reduction::Sum,
            (Some(1), Some(1)) => Reduction::Mean,
            _ => {
                let lacks = format!(
                    "combines losses in an unknown way: the gradient's norm is {one} for one sequence, {weighted} with its weights \
                     doubled and {twice} for two of it; expected twice as much in both cases (a sum)"
                );
                return Err(TinkerError::Lacks { server: connection.name().to_owned(), lacks });
            }
        },
        _ => Reduction::Sum,
    };
    let comparable = reduction == Reduction::Sum && recognises_repeats && norms[0].is_some();
    let built_in = if comparable { one_pass::offered(model).await? } else { Vec::new() };
    let old = model.sampler().await?;
    step(model, datum(1, 1.0), VISIBLE).await?;
    let before = model.forward(datum(1, 1.0)).await?;
    sample(connection, &old, vec![1, 2], 1).await?;
    let after = model.forward(datum(1, 1.0)).await?;
    let sampling_disturbs = !close(&before[0], &after[0], EQUAL);
    if sampling_disturbs {
        // The adapter is not what it was; what follows is of one that agrees with itself.
        step(model, datum(1, 1.0), VISIBLE).await?;
    }
    agreement(model).await?;
    Ok(Dialect {
        encoding: connection.encoding().unwrap_or(Encoding::Json),
        reduction,
        recognises_repeats,
        clips,
        reports_norm: norms[0].is_some(),
        sampling_disturbs,
        built_in,
    })
}

/// Rounded ratio of two norms; `None` if it is no whole number.
fn ratio(of: f64, to: f64) -> Option<u32> {
    let ratio = of / to;
    ((ratio - ratio.round()).abs() < 0.05).then_some(ratio.round() as u32)
}

async fn step(model: &RemoteModel, data: Vec<Datum>, learning_rate: f64) -> Result<Option<f64>, TinkerError> {
    update(model, data, AdamParams { learning_rate, ..AdamParams::default() }).await
}

/// Returns true if a gradient that is clipped to almost nothing changes almost nothing. AdamW
/// does not see the gradient's scale unless it is below `eps`.
async fn clips(model: &RemoteModel) -> Result<bool, TinkerError> {
    let before = model.forward(datum(1, 1.0)).await?;
    let adam = AdamParams { learning_rate: VISIBLE, eps: 1e-4, grad_clip_norm: 1e-12, ..AdamParams::default() };
    update(model, datum(1, 1.0), adam).await?;
    let after = model.forward(datum(1, 1.0)).await?;
    Ok(close(&before[0], &after[0], EQUAL))
}

async fn update(model: &RemoteModel, data: Vec<Datum>, adam: AdamParams) -> Result<Option<f64>, TinkerError> {
    let passes = model.submit_passes("forward_backward", data, &Loss::named(CROSS_ENTROPY), false).await?;
    let update = model.submit_update(adam).await?;
    model.outputs("forward_backward", &passes).await?;
    model.updated(&update).await
}

async fn sample(connection: &Connection, session: &str, prompt: Vec<i64>, tokens: usize) -> Result<SampleResponse, TinkerError> {
    let request = SampleRequest {
        num_samples: 1,
        prompt: rollflow_tinker::message::ModelInput::text(prompt),
        sampling_params: SamplingParams {
            max_tokens: Some(tokens),
            seed: Some(0),
            temperature: Some(1.0),
            ..SamplingParams::default()
        },
        sampling_session_id: Some(session.to_owned()),
        seq_id: Some(0),
        kind: "sample".to_owned(),
        ..SampleRequest::default()
    };
    connection.sample("asample", &request).await
}

fn close(one: &[f32], other: &[f32], within: f32) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| (one - other).abs() <= within)
}

/// Checks that sampled tokens have the log-probabilities that the trainer gives them.
async fn agreement(model: &RemoteModel) -> Result<(), TinkerError> {
    let (connection, prompt) = (&model.connection, vec![1, 2, 3]);
    let lacks = |lacks: String| TinkerError::Lacks { server: connection.name().to_owned(), lacks };
    let session = model.sampler().await?;
    let sampled = sample(connection, &session, prompt.clone(), 8).await?;
    let sequence = sampled.sequences.first().ok_or_else(|| lacks("returned no sample".to_owned()))?;
    let behaviour = sequence.logprobs.as_ref().filter(|scores| scores.len() == sequence.tokens.len() && !scores.is_empty());
    let behaviour = behaviour.ok_or_else(|| {
        lacks("samples without log-probabilities, which no run can be trained on; use a server that reports them".to_owned())
    })?;
    let tokens: Vec<i64> = prompt.iter().chain(&sequence.tokens).copied().collect();
    let weights = Tensor::Floats(vec![1.0; tokens.len() - 1]);
    let inputs = [("target_tokens", Tensor::Ints(tokens[1..].to_vec())), ("weights", weights)];
    let scored = model.forward(vec![Datum::new(tokens[..tokens.len() - 1].to_vec(), inputs)]).await?;
    let own = &scored[0][prompt.len() - 1..];
    let gap = own.iter().zip(behaviour).map(|(own, sampled)| (own - sampled).abs()).sum::<f32>() / own.len() as f32;
    if gap <= AGREES {
        return Ok(());
    }
    Err(lacks(format!(
        "samples with other weights than it trains: the log-probabilities of its own samples differ by {gap:.4} nats on average from \
         those of a forward pass; {AGREES} are allowed"
    )))
}
