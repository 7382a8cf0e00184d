//! Rollouts as a plain iterator, for those who want no graph.
//!
//! Who looks for a rollout manager: the graph of `Prompts`, `Generator`, `Reward` and `Batcher` does its work, with
//! over-sampling, partial answers and resume. This iterator is what is left where none of that is wanted.

use crate::data::{DataBuffer, Prompt, RolloutBatch, Sample};

/// A change to a batch's samples: scoring, masking, dropping. Pure.
pub type Transform = Box<dyn Fn(Vec<Sample>) -> Vec<Sample>>;

/// Applies transforms in order. Pure.
pub fn apply_sample_transforms(samples: Vec<Sample>, transforms: &[Transform]) -> Vec<Sample> {
    transforms.iter().fold(samples, |samples, transform| transform(samples))
}

/// An endless stream of rollout batches: `size` prompts, answered by `generate`, changed by `transforms`. Nothing is over-sampled or cached,
/// and nothing runs between two calls of `next`. A generator that fails ends nothing: its error is the item.
///
/// ```
/// use rollflow::data::{DataBuffer, Sample};
/// use rollflow::stages::generate::rollout_batches;
///
/// let echo = |prompts: &[rollflow::data::Prompt]| {
///     let answer = |prompt| Sample { response: "2".into(), ..Sample::begin(prompt, 0, &[]) };
///     Ok::<_, std::convert::Infallible>(prompts.iter().map(answer).collect())
/// };
/// let score = |samples: Vec<Sample>| samples.into_iter().map(|sample| Sample { reward: Some(1.0), ..sample }).collect();
/// let mut batches = rollout_batches(DataBuffer::new(["1+1="], 0)?, 3, echo, vec![Box::new(score)]);
/// let batch = batches.next().unwrap()?;
/// assert_eq!((batch.samples.len(), batch.rewards), (3, vec![1.0; 3]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn rollout_batches<G, E>(
    mut prompts: DataBuffer,
    size: usize,
    mut generate: G,
    transforms: Vec<Transform>,
) -> impl Iterator<Item = Result<RolloutBatch, E>>
where
    G: FnMut(&[Prompt]) -> Result<Vec<Sample>, E>,
{
    let mut step = 0;
    std::iter::from_fn(move || {
        let epoch = prompts.epoch();
        let samples = generate(&prompts.get_prompts(size));
        step += 1;
        Some(samples.map(|samples| RolloutBatch::new(apply_sample_transforms(samples, &transforms), epoch, step - 1)))
    })
}
