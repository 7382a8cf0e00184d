//! Checks of a run's end, its stages and its token ledger.

use super::{Check, Evidence};

/// Busy share of the generator, and of the trainer, from which on generation alone limits a run:
/// the trainer's device is idle three quarters of the time.
const BUSY_GENERATOR: f64 = 0.75;
const IDLE_TRAINER: f64 = 0.25;

/// A fate of generated tokens.
struct Fate {
    name: &'static str,
    /// Share of all tokens above which it is a finding.
    limit: Option<f64>,
    /// The setting that changes it.
    setting: &'static str,
}

/// Fates other than trained, in the order of the ledger. Reasons of the limits:
///
/// - filtered: at 0.8 a step costs five times its tokens. Runs of the page *Measurements of asynchrony*
///   filter 0.2 to 0.4.
/// - stale, truncated: these tokens were meant to be trained. A tenth exceeds what resumes cost.
/// - surplus: `batch.oversampling_factor` 1.33 costs a quarter.
/// - lost, poisoned: failures of services and rewards are exceptions.
const FATES: [Fate; 8] = [
    Fate { name: "masked", limit: None, setting: "generate.mask_older_versions, train.mask_truncated, flow.on_stale" },
    Fate { name: "filtered", limit: Some(0.8), setting: "[[filter]], [curriculum], generate.group_size" },
    Fate { name: "stale", limit: Some(0.1), setting: "flow.on_stale = \"wait\", flow.max_staleness" },
    Fate { name: "truncated", limit: Some(0.1), setting: "generate.on_new_weights, and fewer interruptions" },
    Fate { name: "poisoned", limit: None, setting: "[reward], and rollflow replay" },
    Fate { name: "surplus", limit: Some(0.25), setting: "batch.oversampling_factor" },
    Fate { name: "lost", limit: Some(0.01), setting: "failures of [engine], [environment] or [reward]" },
    Fate { name: "in_flight", limit: None, setting: "flow.max_staleness" },
];

/// Returns the setting that changes how many tokens have this fate; empty for trained ones.
pub(crate) fn setting_of(fate: &str) -> &'static str {
    FATES.iter().find(|of| of.name == fate).map_or("", |of| of.setting)
}

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "failed",
        find: |run| run.failure.clone(),
        advice: "the page Questions and symptoms lists errors with what to do; rollflow resume continues the run",
    },
    Check {
        name: "generator_limits",
        find: generator_limits,
        advice: "raise generate.max_num_seqs, generate.threads or generate.workers, add engines, or shorten completions",
    },
    Check {
        name: "tokens_wasted",
        find: tokens_wasted,
        advice: "change the setting that stands with the fate in the list of tokens above",
    },
];

fn generator_limits(run: &Evidence) -> Option<String> {
    let busy = |name: &str| run.stages.iter().find(|stage| stage.name == name)?.shares.get("busy").copied();
    let (generate, train) = (busy("generate")?, busy("train")?);
    (generate > BUSY_GENERATOR && train < IDLE_TRAINER).then(|| {
        format!(
            "the generator was busy {:.0}% of the time and the trainer {:.0}%; findings start above {:.0}% and below {:.0}%",
            100.0 * generate,
            100.0 * train,
            100.0 * BUSY_GENERATOR,
            100.0 * IDLE_TRAINER
        )
    })
}

fn tokens_wasted(run: &Evidence) -> Option<String> {
    let all: f64 = run.tokens.iter().map(|(_, tokens)| tokens).sum();
    let wasted = |fate: &Fate| {
        let tokens = run.tokens.iter().find(|(name, _)| name == fate.name)?.1;
        let (share, limit) = (tokens / all, fate.limit?);
        (share > limit).then(|| format!("{:.0}% of the tokens were {}, above {:.0}%", 100.0 * share, fate.name, 100.0 * limit))
    };
    let wasted: Vec<String> = FATES.iter().filter_map(wasted).collect();
    (!wasted.is_empty()).then(|| wasted.join("; "))
}

#[cfg(test)]
mod tests {
    use rollflow::observe::StageShares;

    use super::*;

    fn stages(generate: f64, train: f64) -> Evidence {
        let stage = |name: &str, busy| StageShares { name: name.into(), workers: 1, shares: [("busy".into(), busy)].into() };
        Evidence { stages: vec![stage("generate", generate), stage("train", train)], ..Evidence::default() }
    }

    #[test]
    fn a_generator_limits_if_it_is_busy_and_the_trainer_idle() {
        assert!(
            generator_limits(&stages(0.99, 0.07))
                .unwrap()
                .starts_with("the generator was busy 99% of the time and the trainer 7%")
        );
        for (generate, train) in [(0.99, 0.9), (0.3, 0.1), (0.1, 0.9)] {
            assert_eq!(generator_limits(&stages(generate, train)), None);
        }
    }

    #[test]
    fn tokens_are_wasted_above_the_limit_of_their_fate() {
        let run = |tokens: &[(&str, f64)]| Evidence {
            tokens: tokens.iter().map(|(name, tokens)| ((*name).to_owned(), *tokens)).collect(),
            ..Evidence::default()
        };
        let found = tokens_wasted(&run(&[("trained", 15.0), ("filtered", 83.0), ("lost", 2.0)])).unwrap();
        assert_eq!(found, "83% of the tokens were filtered, above 80%; 2% of the tokens were lost, above 1%");
        assert_eq!(tokens_wasted(&run(&[("trained", 60.0), ("filtered", 30.0), ("surplus", 9.5), ("lost", 0.5)])), None);
        assert_eq!(tokens_wasted(&run(&[("trained", 1.0), ("masked", 99.0)])), None, "masks are asked for");
    }

    #[test]
    fn every_fate_of_the_ledger_has_a_setting() {
        for fate in rollflow::rollout::Fate::ALL.map(rollflow::rollout::Fate::label) {
            assert_eq!(setting_of(fate).is_empty(), fate == "trained", "{fate}");
        }
    }
}
