//! Inspection of a batch by hand: its problems, and one sample as text.

use std::cmp::Ordering;

use crate::data::{Batch, Sample};

/// Problems of a sample: columns of other lengths than its tokens, impossible numbers, sampled
/// tokens without a version, nothing to train. A missing reward is no problem; a reward that is not
/// finite is one.
fn sample_issues(sample: &Sample) -> Vec<String> {
    let mut issues = sample.mismatches();
    let mut note = |what: String| issues.push(sample.problem(&what));
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
        for sample in &group.samples {
            if sample.group_index != id {
                issues.push(format!("sample {} of group {id}: it belongs to group {}", sample.index, sample.group_index));
            }
        }
        // A dropped sample leaves a gap; a rollout in parts has one index.
        for pair in group.samples.windows(2) {
            let [before, next] = [&pair[0], &pair[1]].map(|sample| (sample.index, sample.part));
            match before.cmp(&next) {
                Ordering::Less => {}
                Ordering::Equal => issues.push(format!("sample {} of group {id}: it is there twice", next.0)),
                Ordering::Greater => issues.push(format!("sample {} of group {id}: it follows sample {}", next.0, before.0)),
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
