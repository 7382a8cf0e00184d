//! Checks between the parts of a reward.

use super::Note;
use crate::algo::rewards::Combine;
use crate::recipe::plan::Plan;
use crate::recipe::reward::{Composition, PartRule};

pub(super) fn parts(plan: &Plan, of: &Composition, note: Note) {
    let longest = plan.generate.max_new_tokens;
    if of.part.is_empty() {
        let message = "`reward.part` is empty: nothing would be earned".to_owned();
        note("reward.part", &["reward.kind"], message, "add [[reward.part]] with its name and kind");
    }
    let combinations = f64::from(of.levels).powi(i32::try_from(of.part.len()).unwrap_or(i32::MAX));
    if of.combine == Combine::Lexicographic && combinations > (1_u64 << 53) as f64 {
        let message =
            format!("`reward.levels` is {}: so many of {} parts are more than a number can tell apart", of.levels, of.part.len());
        note("reward.levels", &["reward.combine"], message, "have fewer levels, or fewer parts");
    }
    if (of.combine == Combine::Custom) != of.aggregator.is_some() {
        let (is, so) = if of.aggregator.is_some() { ("given", "not \"custom\"") } else { ("missing", "\"custom\"") };
        let message = format!("`reward.aggregator` is {is}, but `reward.combine` is {so}");
        note(
            "reward.aggregator",
            &["reward.combine"],
            message,
            "name a registered aggregator, together with combine = \"custom\"",
        );
    }
    for (at, part) in of.part.iter().enumerate() {
        let key = |name: &str| format!("reward.part[{at}].{name}");
        if let Some(first) = of.part[..at].iter().position(|other| other.name == part.name && !part.name.is_empty()) {
            let message = format!("`{}` is {:?}, as that of part {first} is", key("name"), part.name);
            note(&key("name"), &[], message, "give every part a name of its own");
        }
        if of.combine != Combine::Sum && part.weight != 1.0 {
            let message = format!("`{}` is {:?}, but only a sum has weights", key("weight"), part.weight);
            note(&key("weight"), &["reward.combine"], message, "leave it out, or set reward.combine = \"sum\"");
        }
        match &part.rule {
            PartRule::Length(length) if length.min > length.max => {
                let message =
                    format!("`{}` is {}, above its max of {}: no answer would earn it", key("min"), length.min, length.max);
                note(&key("min"), &[], message, "exchange them");
            }
            PartRule::Overlong(overlong) if overlong.buffer > longest => {
                let message = format!("`{}` is {}, but answers end at {longest} tokens", key("buffer"), overlong.buffer);
                note(&key("buffer"), &["generate.max_new_tokens"], message, "lower it, or raise generate.max_new_tokens");
            }
            _ => {}
        }
    }
}
