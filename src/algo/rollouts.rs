//! Inspection of a batch by hand: problems, statistics, and one sample as text.

use std::cmp::Ordering;
use std::collections::HashSet;
use std::fmt;

use crate::data::{Batch, Sample, Status};
use crate::observe::logs::MetricStats;

/// Problems of a sample: columns of other lengths than its tokens, impossible numbers, sampled
/// tokens without a version, nothing to train. A missing reward is no problem; a reward that is not
/// finite is one.
fn sample_issues(sample: &Sample) -> Vec<String> {
    let mut issues = Vec::new();
    let Sample { group_index, index, .. } = sample;
    let mut note = |what: String| issues.push(format!("sample {index} of group {group_index}: {what}"));
    let tokens = sample.tokens.len();
    let columns = [
        ("loss_mask", sample.loss_mask.len(), false),
        ("log_probs", sample.log_probs.len(), true),
        ("versions", sample.versions.len(), true),
    ];
    for (column, found, may_be_absent) in columns {
        if found != tokens && !(may_be_absent && found == 0) {
            note(format!("{column} has {found} entries for {tokens} tokens"));
        }
    }
    if let Some(at) = sample.loss_mask.iter().position(|weight| !(weight.is_finite() && *weight >= 0.0)) {
        note(format!("loss_mask[{at}] is {}, not a finite number ≥ 0", sample.loss_mask[at]));
    }
    if sample.response_length() == 0 {
        note("it has no trained token".to_owned());
    }
    if let Some(at) = sample.log_probs.iter().position(|log_prob| log_prob.is_nan() || *log_prob > 0.0) {
        note(format!("log_probs[{at}] is {}, not the logarithm of a probability", sample.log_probs[at]));
    }
    let trained = sample.loss_mask.iter().zip(sample.versions.per_token());
    if let Some(at) = trained.into_iter().position(|(weight, version)| *weight > 0.0 && version.is_none()) {
        note(format!("token {at} is trained, but no version of the weights sampled it"));
    }
    for (name, value) in [("reward", sample.reward), ("advantage", sample.advantage)] {
        if let Some(value) = value.filter(|value| !value.is_finite()) {
            note(format!("its {name} is {value}, not a finite number"));
        }
    }
    issues
}

/// Problems of a batch: those of its samples, and of groups that are empty, repeated, out of order
/// (law D6) or hold samples of another group.
pub fn batch_issues(batch: &Batch) -> Vec<String> {
    let mut issues = Vec::new();
    let ids: Vec<u64> = batch.groups.iter().map(|group| group.id()).collect();
    for (at, group) in batch.groups.iter().enumerate() {
        let id = group.id();
        let mut note = |what: &str| issues.push(format!("group {id}: {what}"));
        match at.checked_sub(1).map(|before| ids[before].cmp(&id)) {
            Some(Ordering::Equal) => note("it is there twice"),
            Some(Ordering::Greater) => note("it follows a group of a larger id"),
            _ => {}
        }
        if group.samples.is_empty() {
            note("it has no sample");
        }
        for (place, sample) in (0..).zip(&group.samples) {
            if sample.group_index != id {
                issues.push(format!("sample {} of group {id}: it belongs to group {}", sample.index, sample.group_index));
            }
            if sample.index != place {
                issues.push(format!("sample {} of group {id}: its place is {place}", sample.index));
            }
        }
        issues.extend(group.samples.iter().flat_map(sample_issues));
    }
    issues
}

/// A sample as text: prompt, response, rewards, and a line for every token with its mask,
/// log-probability and version.
pub fn inspect_sample(sample: &Sample) -> String {
    let number = |value: Option<f64>| value.map_or_else(|| "none".to_owned(), |value| value.to_string());
    let mut page = format!("sample {} of group {} ({:?})\n", sample.index, sample.group_index, sample.status);
    page += &format!("  prompt     {:?}\n", sample.prompt.render());
    page += &format!("  response   {:?}\n", sample.response);
    page += &format!("  reward     {}\n", number(sample.reward));
    for (name, value) in &sample.reward_parts {
        page += &format!("    {name} {value}\n");
    }
    page += &format!("  advantage  {}\n", number(sample.advantage));
    page +=
        &format!("  tokens     {}: {} sampled, {} trained\n", sample.tokens.len(), sample.generated(), sample.response_length());
    page += "  place    token  weight  log-prob  version\n";
    let mut versions = sample.versions.per_token();
    for (at, token) in sample.tokens.iter().enumerate() {
        let column =
            |values: &[f32], digits: usize| values.get(at).map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"));
        let version = versions.next().flatten().map_or_else(|| "-".to_owned(), |version| version.to_string());
        page += &format!(
            "  {at:>5} {token:>8} {:>7} {:>9} {version:>8}\n",
            column(&sample.loss_mask, 2),
            column(&sample.log_probs, 4)
        );
    }
    page
}

/// Statistics of the samples of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BatchStatistics {
    /// Number of samples.
    pub samples: usize,
    /// Number of groups.
    pub groups: usize,
    /// Samples with a finite reward.
    pub scored: usize,
    /// Rewards, in the order of the samples; `None` without any.
    pub reward: Option<MetricStats>,
    /// Trained tokens of a sample; `None` without samples.
    pub length: Option<MetricStats>,
    /// Truncated samples.
    pub truncated: usize,
    /// Number of distinct responses.
    pub distinct: usize,
}

/// Counts samples and their rewards and lengths.
pub fn batch_statistics<'a>(samples: impl IntoIterator<Item = &'a Sample>) -> BatchStatistics {
    let samples: Vec<&Sample> = samples.into_iter().collect();
    let rewards: Vec<f64> = samples.iter().filter_map(|sample| sample.reward).filter(|reward| reward.is_finite()).collect();
    let lengths: Vec<f64> = samples.iter().map(|sample| sample.response_length() as f64).collect();
    BatchStatistics {
        samples: samples.len(),
        groups: samples.iter().map(|sample| sample.group_index).collect::<HashSet<_>>().len(),
        scored: rewards.len(),
        reward: MetricStats::of(rewards),
        length: MetricStats::of(lengths),
        truncated: samples.iter().filter(|sample| sample.status == Status::Truncated).count(),
        distinct: samples.iter().map(|sample| (&sample.response, &sample.tokens)).collect::<HashSet<_>>().len(),
    }
}

impl fmt::Display for BatchStatistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spread = |of: Option<MetricStats>| match of {
            Some(of) => format!("{:.4} ± {:.4} ({:.4} to {:.4})", of.mean, of.std, of.min, of.max),
            None => "none".to_owned(),
        };
        write!(
            f,
            "{} samples of {} groups, {} scored; reward {}; trained tokens {}; {} truncated, {} distinct",
            self.samples,
            self.groups,
            self.scored,
            spread(self.reward),
            spread(self.length),
            self.truncated,
            self.distinct,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Group, Prompt};

    /// A valid sample of four tokens, two of them sampled.
    fn sample(group: u64, index: u32) -> Sample {
        let mut sample = Sample::begin(&Prompt { ordinal: group, ..Prompt::from("3+4=") }, index, &[1, 2]);
        sample.push(3, -0.5, 1);
        sample.push(4, -0.25, 1);
        Sample { reward: Some(1.0), status: Status::Completed, ..sample }
    }

    #[test]
    fn all_problems_of_a_sample_are_reported_together() {
        let mut sample = sample(7, 2);
        assert_eq!(sample_issues(&sample), [""; 0]);
        let tokens = sample.tokens.len();
        sample.loss_mask.pop();
        sample.loss_mask[0] = f32::NAN;
        sample.log_probs[1] = 0.5;
        sample.reward = Some(f64::INFINITY);
        let issues = sample_issues(&sample);
        let of = "sample 2 of group 7";
        assert_eq!(
            issues,
            [
                format!("{of}: loss_mask has {} entries for {tokens} tokens", tokens - 1),
                format!("{of}: loss_mask[0] is NaN, not a finite number ≥ 0"),
                format!("{of}: log_probs[1] is 0.5, not the logarithm of a probability"),
                format!("{of}: its reward is inf, not a finite number"),
            ]
        );
        let given = Sample::begin(&"3+4=".into(), 0, &[1, 2]);
        assert_eq!(sample_issues(&given), ["sample 0 of group 0: it has no trained token"]);
        let mut unknown = self::sample(0, 0);
        unknown.versions.truncate(0);
        unknown.versions.extend(None, unknown.tokens.len());
        assert!(sample_issues(&unknown)[0].ends_with("is trained, but no version of the weights sampled it"));
    }

    #[test]
    fn a_batch_names_groups_that_are_not_what_they_should_be() {
        let group = |id| Group {
            prompt: std::sync::Arc::new(Prompt { ordinal: id, ..Prompt::from("3+4=") }),
            samples: (0..2).map(|index| sample(id, index)).collect(),
            ..Group::default()
        };
        let mut batch = Batch { groups: (0..4).map(group).collect(), ..Batch::default() };
        assert!(batch_issues(&batch).is_empty());
        batch.groups.swap(0, 1);
        batch.groups[2].samples.clear();
        batch.groups[3].samples[0].group_index = 9;
        batch.groups[3].samples.swap(0, 1);
        let last = batch.groups[3].clone();
        batch.groups.push(last);
        let issues = batch_issues(&batch);
        assert_eq!(
            issues[..5],
            [
                "group 0: it follows a group of a larger id",
                "group 2: it has no sample",
                "sample 1 of group 3: its place is 0",
                "sample 0 of group 3: it belongs to group 9",
                "sample 0 of group 3: its place is 1",
            ]
        );
        assert!(issues.contains(&"group 3: it is there twice".to_owned()));
    }

    #[test]
    fn a_page_has_a_line_for_every_token() {
        let mut sample = Sample::begin(&"3+4=".into(), 1, &[5, 6]);
        sample.push(7, -0.25, 3);
        sample.reward = Some(1.0);
        sample.reward_parts.insert("form".to_owned(), 0.5);
        let page = inspect_sample(&sample);
        let lines: Vec<&str> = page.lines().collect();
        assert_eq!(lines[0], "sample 1 of group 0 (Pending)");
        assert_eq!(lines[4], "    form 0.5");
        assert_eq!(lines[6], "  tokens     3: 1 sampled, 1 trained");
        assert_eq!(
            lines[8..],
            [
                "      0        5    0.00    0.0000        -",
                "      1        6    0.00    0.0000        -",
                "      2        7    1.00   -0.2500        3"
            ]
        );
    }

    #[test]
    fn samples_are_counted_and_those_without_a_reward_left_out_of_its_mean() {
        let sample = |group_index, reward, length: usize| Sample {
            group_index,
            reward,
            loss_mask: vec![1.0; length],
            tokens: vec![group_index as u32; length],
            status: if length > 3 { Status::Truncated } else { Status::Completed },
            ..Sample::default()
        };
        let samples = [sample(0, Some(1.0), 2), sample(0, Some(0.0), 2), sample(1, Some(f64::NAN), 4), sample(1, None, 0)];
        let seen = batch_statistics(&samples);
        assert_eq!((seen.samples, seen.groups, seen.scored, seen.truncated, seen.distinct), (4, 2, 2, 1, 3));
        assert_eq!(batch_statistics(&[]), BatchStatistics::default());
        let shown = "4 samples of 2 groups, 2 scored; reward 0.5000 ± 0.5000 (0.0000 to 1.0000); trained tokens 2.0000 ± 1.4142 (0.0000 to 4.0000); 1 truncated, 3 distinct";
        assert_eq!(seen.to_string(), shown);
    }
}
