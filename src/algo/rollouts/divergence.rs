//! How far each sample of a batch is from a reference policy.

use crate::algo::kl::{KlFunction, mean_kl};
use crate::data::Sample;

/// What [`compute_batch_kl`] finds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchKl {
    /// The mean over those samples that have one; `None` where none has.
    pub mean: Option<f64>,
    /// The mean over each sample's trained tokens, by its place; `None` where the reference never saw it.
    pub samples: Vec<Option<f64>>,
}

/// The divergence of the policy that sampled from a reference, by sample. `reference` gives the reference's log-probability of each of a
/// sample's tokens, or `None` for a sample that has none, which is left out of the mean and keeps its place.
///
/// ```
/// use rollflow::algo::Kl;
/// use rollflow::algo::rollouts::{compute_batch_kl, mock_batch};
/// use rollflow::data::Sample;
///
/// let samples: Vec<Sample> = mock_batch(1, 3, 0).samples().cloned().collect();
/// let itself = |sample: &Sample| (sample.index != 1).then(|| sample.log_probs.clone());
/// let kl = compute_batch_kl(&samples, itself, &Kl::default());
/// assert_eq!((kl.mean, kl.samples), (Some(0.0), vec![Some(0.0), None, Some(0.0)]));
/// ```
pub fn compute_batch_kl<R: AsRef<[f32]>>(
    samples: &[Sample],
    reference: impl Fn(&Sample) -> Option<R>,
    kl: &dyn KlFunction,
) -> BatchKl {
    let wide = |values: &[f32]| values.iter().map(|value| f64::from(*value)).collect::<Vec<f64>>();
    let of = |sample: &Sample| {
        let reference = reference(sample)?;
        Some(mean_kl(&wide(&sample.log_probs), &wide(reference.as_ref()), &sample.loss_mask, kl))
    };
    let samples: Vec<Option<f64>> = samples.iter().map(of).collect();
    let known: Vec<f64> = samples.iter().copied().flatten().collect();
    BatchKl { mean: (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64), samples }
}

/// Those samples whose divergence, as [`compute_batch_kl`] has it, is `most` at most, in their order. One whose divergence is not known is
/// not among them.
pub fn filter_by_kl<R: AsRef<[f32]>>(
    samples: &[Sample],
    reference: impl Fn(&Sample) -> Option<R>,
    kl: &dyn KlFunction,
    most: f64,
) -> Vec<Sample> {
    let divergences = compute_batch_kl(samples, reference, kl).samples;
    let near = |kl: &Option<f64>| kl.is_some_and(|kl| kl <= most);
    samples.iter().zip(&divergences).filter(|(_, kl)| near(kl)).map(|(sample, _)| sample.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algo::{Kl, KlForm};

    fn sample(index: u32) -> Sample {
        Sample {
            index,
            tokens: vec![1, 2, 3],
            loss_mask: vec![0.0, 1.0, 1.0],
            log_probs: vec![0.0, -0.5, -1.5],
            ..Sample::default()
        }
    }

    #[test]
    fn trained_tokens_alone_count_and_samples_keep_their_places() {
        let samples = [sample(0), sample(1), sample(2)];
        // The first token is given: how far off it is must not matter.
        let reference = |sample: &Sample| (sample.index != 1).then(|| vec![-9.0, -0.5, -1.5 - sample.index as f32]);
        let kl = Kl { form: KlForm::K1, ..Kl::default() };
        let found = compute_batch_kl(&samples, reference, &kl);
        // A masked mean adds 1e-8 to its count.
        let rounded = |value: f64| (value * 1e6).round() / 1e6;
        let by_sample: Vec<Option<f64>> = found.samples.into_iter().map(|kl| kl.map(rounded)).collect();
        assert_eq!((found.mean.map(rounded), by_sample), (Some(0.5), vec![Some(0.0), None, Some(1.0)]));
        let near = filter_by_kl(&samples, reference, &kl, 0.9);
        assert_eq!(near.iter().map(|sample| sample.index).collect::<Vec<_>>(), [0]);
        assert_eq!(compute_batch_kl(&samples, |_| None::<Vec<f32>>, &kl).mean, None);
    }
}
