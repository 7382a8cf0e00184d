//! Problems of samples and batches, before they are trained on.

use crate::data::{Batch, Sample};

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
            Some(std::cmp::Ordering::Equal) => note("it is there twice"),
            Some(std::cmp::Ordering::Greater) => note("it follows a group of a larger id"),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Group, Prompt, Status};

    /// A valid sample of four tokens, two of them sampled.
    fn sample(group: u64, index: u32) -> Sample {
        let mut sample = Sample::begin(&Prompt { ordinal: group, ..Prompt::from("3+4=") }, index, &[1, 2]);
        sample.push(3, -0.5, 1);
        sample.push(4, -0.25, 1);
        Sample { reward: Some(1.0), status: Status::Completed, ..sample }
    }

    fn batch(groups: u64, size: u32) -> Batch {
        let group = |id| Group {
            prompt: std::sync::Arc::new(Prompt { ordinal: id, ..Prompt::from("3+4=") }),
            samples: (0..size).map(|index| sample(id, index)).collect(),
            ..Group::default()
        };
        Batch { groups: (0..groups).map(group).collect(), ..Batch::default() }
    }

    #[test]
    fn all_that_is_wrong_with_a_sample_is_told_at_once() {
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
        let mut batch = batch(4, 2);
        assert!(batch_issues(&batch).is_empty());
        batch.groups.swap(0, 1);
        batch.groups[2].samples.clear();
        batch.groups[3].samples[0].group_index = 9;
        batch.groups[3].samples.swap(0, 1);
        let last = batch.groups[3].clone();
        batch.groups.push(last);
        let issues = batch_issues(&batch);
        let twice: Vec<&str> = issues.iter().map(String::as_str).collect();
        assert_eq!(
            twice[..5],
            [
                "group 0: it follows a group of a larger id",
                "group 2: it has no sample",
                "sample 1 of group 3: its place is 0",
                "sample 0 of group 3: it belongs to group 9",
                "sample 0 of group 3: its place is 1",
            ]
        );
        assert!(twice.contains(&"group 3: it is there twice"));
    }
}
