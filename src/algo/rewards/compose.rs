//! Rewards from rewards.

use super::earned::Earned;
use crate::data::Sample;

/// Combines rewards. Every closure that [`Earned`] something of a sample has these methods; where one fails, the whole does.
///
/// ```
/// use rollflow::algo::rewards::{Compose, format, length, math};
/// use rollflow::data::Sample;
///
/// // Right answers count, if the form is kept; short ones a little more.
/// let reward = math().when(format(["think", "answer"])?).plus(length(1, 200)?.times(0.1));
/// let mut sample = Sample { response: "<think>6 / 2</think><answer>3</answer>".into(), ..Sample::default() };
/// sample.metadata.insert("answer".into(), "3".into());
/// assert_eq!(reward(&sample), Ok(1.0)); // no token was sampled: not within 1 and 200
/// # Ok::<(), rollflow::algo::rewards::BuildError>(())
/// ```
pub trait Compose<R: Earned>: Fn(&Sample) -> R + Send + Sync + Sized + 'static {
    /// `factor · r`.
    fn times(self, factor: f64) -> impl Fn(&Sample) -> Result<f64, String> + Send + Sync + 'static {
        move |sample: &Sample| Ok(factor * value(&self, sample)?)
    }

    /// `r + s`.
    fn plus<S: Earned, O: Compose<S>>(self, other: O) -> impl Fn(&Sample) -> Result<f64, String> + Send + Sync + 'static {
        move |sample: &Sample| Ok(value(&self, sample)? + value(&other, sample)?)
    }

    /// `r · s`.
    fn and<S: Earned, O: Compose<S>>(self, other: O) -> impl Fn(&Sample) -> Result<f64, String> + Send + Sync + 'static {
        move |sample: &Sample| Ok(value(&self, sample)? * value(&other, sample)?)
    }

    /// `max(r, s)`.
    fn or<S: Earned, O: Compose<S>>(self, other: O) -> impl Fn(&Sample) -> Result<f64, String> + Send + Sync + 'static {
        move |sample: &Sample| Ok(value(&self, sample)?.max(value(&other, sample)?))
    }

    /// `r` where the gate is above 0, else 0, and then `r` is not computed.
    fn when<S: Earned, O: Compose<S>>(self, gate: O) -> impl Fn(&Sample) -> Result<f64, String> + Send + Sync + 'static {
        move |sample: &Sample| if value(&gate, sample)? > 0.0 { value(&self, sample) } else { Ok(0.0) }
    }

    /// 1 if `r` reaches `threshold`, else 0.
    fn at_least(self, threshold: f64) -> impl Fn(&Sample) -> Result<f64, String> + Send + Sync + 'static {
        move |sample: &Sample| Ok(f64::from(value(&self, sample)? >= threshold))
    }

    /// `r`, cut to `low` … `high`.
    fn within(self, low: f64, high: f64) -> impl Fn(&Sample) -> Result<f64, String> + Send + Sync + 'static {
        move |sample: &Sample| Ok(value(&self, sample)?.min(high).max(low))
    }
}

impl<R: Earned, F: Fn(&Sample) -> R + Send + Sync + Sized + 'static> Compose<R> for F {}

fn value<R: Earned>(reward: &impl Fn(&Sample) -> R, sample: &Sample) -> Result<f64, String> {
    reward(sample).earned().map(|earnings| earnings.reward)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewards_combine_as_numbers_do_and_fail_together() {
        let sample = Sample { index: 3, ..Sample::default() };
        let index = |sample: &Sample| f64::from(sample.index);
        let two = |_: &Sample| 2.0;
        let fails = |_: &Sample| Err::<f64, _>("no key");
        assert_eq!(index.plus(two).times(2.0)(&sample), Ok(10.0));
        assert_eq!((index.and(two)(&sample), index.or(two)(&sample)), (Ok(6.0), Ok(3.0)));
        assert_eq!((index.at_least(3.0)(&sample), index.at_least(3.1)(&sample)), (Ok(1.0), Ok(0.0)));
        assert_eq!((index.within(0.0, 1.0)(&sample), index.within(4.0, 9.0)(&sample)), (Ok(1.0), Ok(4.0)));
        assert_eq!(index.plus(fails)(&sample), Err("no key".to_owned()));
        assert_eq!(fails.when(|_: &Sample| 0.0)(&sample), Ok(0.0), "what is shut off is not asked");
    }
}
