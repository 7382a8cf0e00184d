//! Samples that nobody sampled, sound in every way, to try code on.

use std::sync::Arc;

use crate::data::shuffle::Draws;
use crate::data::{Batch, Group, Prompt, Sample, Status};

/// A sample of `group` with a prompt of a few tokens, up to sixteen sampled ones by weights of version 1, and a reward of 0 or 1: the same for
/// the same arguments.
pub fn mock_sample(group: u64, index: u32, seed: u64) -> Sample {
    answer(&question(group, seed), index, seed)
}

/// `groups` groups of `size` samples each, as [`mock_sample`] makes them.
pub fn mock_batch(groups: u64, size: u32, seed: u64) -> Batch {
    let group = |id| {
        let prompt = question(id, seed);
        Group {
            samples: (0..size).map(|index| answer(&prompt, index, seed)).collect(),
            prompt: Arc::new(prompt),
            ..Group::default()
        }
    };
    Batch { groups: (0..groups).map(group).collect(), ..Batch::default() }
}

fn question(group: u64, seed: u64) -> Prompt {
    let mut draws = Draws::new(seed, 2 * group);
    let (one, other) = (draws.below(100), draws.below(100));
    let mut prompt = Prompt { ordinal: group, ..Prompt::from(format!("{one}+{other}=")) };
    prompt.metadata.insert("answer".to_owned(), (one + other).to_string().into());
    prompt
}

fn answer(prompt: &Prompt, index: u32, seed: u64) -> Sample {
    let mut draws = Draws::new(seed ^ u64::from(index).rotate_right(32), 2 * prompt.ordinal + 1);
    let given: Vec<u32> = prompt.text.render().bytes().map(u32::from).collect();
    let mut sample = Sample::begin(prompt, index, &given);
    for _ in 0..1 + draws.below(16) {
        let digit = b'0' + draws.below(10) as u8;
        sample.response.push(char::from(digit));
        sample.push(u32::from(digit), -(draws.below(4000) as f32) / 1000.0, 1);
    }
    sample.reward = Some(draws.below(2) as f64);
    sample.status = Status::Completed;
    sample
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_up_samples_repeat_by_their_arguments_and_differ_otherwise() {
        assert_eq!(mock_batch(3, 4, 1), mock_batch(3, 4, 1));
        assert_eq!(mock_batch(3, 4, 1).groups[2].samples[3], mock_sample(2, 3, 1));
        assert_ne!(mock_sample(2, 3, 1).tokens, mock_sample(2, 3, 2).tokens);
        assert_ne!(mock_sample(2, 3, 1).tokens, mock_sample(2, 2, 1).tokens);
        let rewards: Vec<f64> = mock_batch(8, 8, 0).rewards().collect();
        assert!(rewards.contains(&0.0) && rewards.contains(&1.0));
    }
}
