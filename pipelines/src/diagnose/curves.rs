//! Checks of the curves in `metrics.jsonl`. *First* and *last* are means over a fifth of the steps.

use super::series::{Trend, median};
use super::{Check, Evidence};

/// Share of the reward's range from which on a task is solved: equal rewards and low entropy are
/// then no fault.
const SOLVED: f64 = 0.9;

/// Last entropy over the first. Exploration ends below it: samples of a group are then nearly
/// equal. DAPO's authors saw such a fall (arXiv 2503.14476, figure 2) and raised `epsilon_high`
/// against it.
const ENTROPY: f64 = 0.2;

/// Growth of the gap, and the share of its warning above which growth counts: the gap of a first
/// version is rounding alone, and some growth comes with staleness.
const GAP_GROWTH: f64 = 3.0;
const GAP_FLOOR: f64 = 0.25;

/// Clipped share of tokens. The runs of *Measurements of asynchrony* clip at most 0.13, at a
/// staleness of 8.
const CLIPPED: f64 = 0.2;

/// Last mean length over the limit, and the growth in shares of the limit, that are a drift.
const LONG: f64 = 0.8;
const LENGTH_GROWTH: f64 = 0.2;

/// Change of a part, in shares of its largest value, that is a rise or a fall.
const PART_CHANGE: f64 = 0.1;

/// Change of the reward, in shares of its range, below which it is flat, and the steps that it
/// takes to tell.
const FLAT: f64 = 0.05;
const FLAT_STEPS: usize = 50;

/// Fall from the best fifth, in shares of the range, that is more than a bad batch.
const FALL: f64 = 0.15;

/// Gradient norm over the median of the norms before it that is a spike: Adam's second moments then
/// shrink the steps after it. Steps without a gradient do not count.
const SPIKE: f64 = 10.0;
const NORMS_BEFORE: usize = 20;
/// Share of steps with a spike. `pipelines/recipes/grpo.toml` solves its task with 2 spikes in 468
/// steps.
const SPIKES: f64 = 0.01;

/// Bound of staleness above which training at the bound costs: in *Measurements of asynchrony* a
/// bound of 2 costs nothing, and one of 4 takes 1.39 times as long.
const STALENESS: f64 = 2.0;
/// Share of the later half of the steps at the bound that is usual.
const AT_BOUND: f64 = 0.75;

/// Divergence of the trained policy from the one that sampled, in nats a token. PPO stops an epoch
/// at 0.01 to 0.05 as a rule; the runs of *Measurements of asynchrony* stay below 0.17.
const KL: f64 = 0.2;
/// Divergence from the reference policy, in nats a token: at 1, tokens are e times as likely as
/// under the reference.
const REFERENCE_KL: f64 = 1.0;

/// Share of groups whose reward failed or that lost too many samples.
const POISONED: f64 = 0.01;

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "not_finite",
        find: not_finite,
        advice: "lower train.lr or train.max_grad_norm, and look at the samples of these steps",
    },
    Check {
        name: "reward_flat",
        find: reward_flat,
        advice: "read samples (rollflow rollouts RUN --show chat): is any completion rewarded, and are prompts of the right \
                 difficulty? Then try a higher train.lr",
    },
    Check {
        name: "reward_falls",
        find: reward_falls,
        advice: "lower train.lr, use fewer train.ppo_epochs or a KL penalty, and resume from a checkpoint before the fall",
    },
    Check {
        name: "parts_diverge",
        find: parts_diverge,
        advice: "the policy trades one part for another: change the parts' weights, or make the falling one a condition",
    },
    Check {
        name: "entropy_collapse",
        find: entropy_collapse,
        advice: "lower train.lr, raise epsilon_high (train.loss.kind = \"dapo\"), or set train.entropy_coef or a KL penalty",
    },
    Check {
        name: "gap_high",
        find: gap_high,
        advice: "compare sampling settings and precision of generator and trainer; lower flow.max_staleness or set \
                 train.correction",
    },
    Check { name: "gap_grows", find: gap_grows, advice: "lower train.lr or flow.max_staleness, or set train.correction" },
    Check {
        name: "clip_high",
        find: clip_high,
        advice: "lower train.lr, use fewer train.ppo_epochs or train.minibatches, or lower flow.max_staleness",
    },
    Check {
        name: "kl_high",
        find: kl_high,
        advice: "lower train.lr, use fewer train.ppo_epochs, or raise the coefficient of the KL penalty",
    },
    Check {
        name: "gradient_spikes",
        find: gradient_spikes,
        advice: "look at the samples of these steps; lower train.max_grad_norm or train.lr, or use larger batches",
    },
    Check {
        name: "length_drift",
        find: length_drift,
        advice: "raise generate.max_new_tokens, or penalize length in the reward (an overlong part)",
    },
    Check {
        name: "staleness_at_bound",
        find: staleness_at_bound,
        advice: "lower flow.max_staleness to 1 or 2, which keeps the trainer as busy, or speed up the trainer",
    },
    Check {
        name: "groups_poisoned",
        find: groups_poisoned,
        advice: "read dead_letters.jsonl, correct the reward or its service, and score again: rollflow replay RUN",
    },
];

/// Lowest and highest reward of the run, if there are any.
fn reward_range(run: &Evidence) -> Option<(f64, f64)> {
    let low = run.series("reward_min").into_iter().reduce(f64::min)?;
    let high = run.series("reward_max").into_iter().reduce(f64::max)?;
    Some((low, high))
}

/// Mean rewards of the policy's own samples. Recorded samples give none: their rewards and their order
/// do not depend on the policy.
fn sampled_rewards(run: &Evidence) -> Vec<f64> {
    if run.settings.samples { run.series("reward_mean") } else { Vec::new() }
}

/// Returns true if nearly all rewards of the last fifth are the highest that the run has seen.
pub(super) fn is_solved(run: &Evidence) -> bool {
    let solved = |(low, high): (f64, f64), reward: Trend| high > low && reward.last() >= low + SOLVED * (high - low);
    reward_range(run).zip(Trend::of(&run.series("reward_mean"))).is_some_and(|(range, reward)| solved(range, reward))
}

fn not_finite(run: &Evidence) -> Option<String> {
    let count = |name: &str| run.columns.get(name).map_or(0, |of| of.iter().filter(|value| !value.is_finite()).count());
    let steps = count("loss").max(count("grad_norm"));
    (steps > 0).then(|| format!("loss or gradient norm was not finite in {steps} steps"))
}

fn reward_flat(run: &Evidence) -> Option<String> {
    let rewards = sampled_rewards(run);
    let (reward, (low, high)) = (Trend::of(&rewards)?, reward_range(run)?);
    let flat = reward.change().abs() <= FLAT * (high - low) && !reward.is_sure();
    (rewards.len() >= FLAT_STEPS && flat && !is_solved(run)).then(|| {
        let (first, last, limit) = (reward.first(), reward.last(), FLAT * (high - low));
        format!("the reward went from {first:.3} to {last:.3} in {} steps, a change of at most {limit:.3}", rewards.len())
    })
}

fn reward_falls(run: &Evidence) -> Option<String> {
    let (reward, (low, high)) = (Trend::of(&sampled_rewards(run))?, reward_range(run)?);
    let best = reward.fifths.into_iter().fold(f64::MIN, f64::max);
    let limit = FALL * (high - low);
    (best - reward.last() > limit.max(2.0 * reward.error))
        .then(|| format!("the reward fell from {best:.3} to {:.3}, by more than {limit:.3}", reward.last()))
}

fn parts_diverge(run: &Evidence) -> Option<String> {
    let names = run.columns.keys().filter(|_| run.settings.samples);
    let parts = names.filter_map(|name| Some((name, name.strip_prefix("reward_part_")?)));
    let trend = |(name, part): (&String, &str)| {
        let values = run.series(name);
        let largest = values.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
        let trend = Trend::of(&values).filter(|trend| trend.is_sure() && trend.change().abs() > PART_CHANGE * largest)?;
        Some((part.to_owned(), trend))
    };
    let (rising, falling): (Vec<_>, Vec<_>) = parts.filter_map(trend).partition(|(_, trend)| trend.change() > 0.0);
    let ((up, rise), (down, fall)) = (rising.first()?, falling.first()?);
    Some(format!(
        "part {up} rose from {:.3} to {:.3}, and part {down} fell from {:.3} to {:.3}",
        rise.first(),
        rise.last(),
        fall.first(),
        fall.last()
    ))
}

fn entropy_collapse(run: &Evidence) -> Option<String> {
    // Imitation lowers the entropy, and is meant to.
    Trend::of(&sampled_rewards(run))?;
    let entropy = Trend::of(&run.series("entropy_nats"))?;
    let (first, last) = (entropy.first(), entropy.last());
    (last < ENTROPY * first && !is_solved(run))
        .then(|| format!("the entropy fell from {first:.3} to {last:.3} nats, below {ENTROPY} of its start"))
}

fn gap_high(run: &Evidence) -> Option<String> {
    let (gap, warn) = (Trend::of(&run.series("log_prob_gap_mean_nats"))?.last(), run.settings.gap_warn);
    (gap > warn).then(|| format!("generator and trainer are {gap:.3} nats apart on average, above train.gap_warn of {warn}"))
}

fn gap_grows(run: &Evidence) -> Option<String> {
    let gap = Trend::of(&run.series("log_prob_gap_mean_nats"))?;
    let (first, last, floor) = (gap.first(), gap.last(), GAP_FLOOR * run.settings.gap_warn);
    (last > GAP_GROWTH * first && last > floor && gap.is_sure())
        .then(|| format!("the gap grew from {first:.3} to {last:.3} nats, more than {GAP_GROWTH} times and above {floor:.3}"))
}

fn clip_high(run: &Evidence) -> Option<String> {
    let clipped = Trend::of(&run.series("clip_ratio"))?.last();
    (run.settings.clips_tokens && clipped > CLIPPED)
        .then(|| format!("{:.0}% of the tokens were clipped, above {:.0}%", 100.0 * clipped, 100.0 * CLIPPED))
}

fn kl_high(run: &Evidence) -> Option<String> {
    let limits = [("approx_kl_nats", KL), ("kl_loss_mean_nats", REFERENCE_KL), ("kl_reward_mean_nats", REFERENCE_KL)];
    let high = |(name, limit): (&str, f64)| {
        let kl = Trend::of(&run.series(name))?.last();
        (kl > limit).then(|| format!("{name} is {kl:.3}, above {limit}"))
    };
    limits.into_iter().find_map(high)
}

fn gradient_spikes(run: &Evidence) -> Option<String> {
    let norms: Vec<f64> = run.series("grad_norm").into_iter().filter(|norm| *norm > 0.0).collect();
    let spike = |at: usize| {
        let median = median(norms[at - NORMS_BEFORE..at].to_vec())?;
        (norms[at] > SPIKE * median).then(|| (norms[at], median))
    };
    let spikes: Vec<(f64, f64)> = (NORMS_BEFORE..norms.len()).filter_map(spike).collect();
    let (largest, median) = spikes.iter().copied().max_by(|(a, _), (b, _)| a.total_cmp(b))?;
    let (count, steps) = (spikes.len(), norms.len());
    // Few groups teach anything once the task is solved, and their norms vary.
    (count as f64 > SPIKES * steps as f64 && !is_solved(run)).then(|| {
        let than = format!("{SPIKE} times the median of the {NORMS_BEFORE} before it");
        format!("the gradient norm passed {than} in {count} of {steps} steps: {largest:.3} after {median:.3}")
    })
}

fn length_drift(run: &Evidence) -> Option<String> {
    let (length, limit) = (Trend::of(&run.series("length_finished_mean_tokens"))?, run.settings.max_new_tokens?);
    let (first, last) = (length.first(), length.last());
    (last > LONG * limit && length.change() > LENGTH_GROWTH * limit).then(|| {
        format!("completions grew from {first:.1} to {last:.1} tokens, above {LONG} of generate.max_new_tokens = {limit}")
    })
}

fn staleness_at_bound(run: &Evidence) -> Option<String> {
    let (lags, bound) = (run.series("sample_staleness_max_versions"), run.settings.max_staleness);
    Trend::of(&lags)?;
    // The first steps come before the bound is reached.
    let late = &lags[lags.len() / 2..];
    let at_bound = late.iter().filter(|lag| **lag >= bound).count() as f64 / late.len() as f64;
    (bound > STALENESS && at_bound > AT_BOUND).then(|| {
        let (share, limit) = (100.0 * at_bound, 100.0 * AT_BOUND);
        format!("{share:.0}% of the later half of the steps trained at flow.max_staleness = {bound}, above {limit:.0}%")
    })
}

fn groups_poisoned(run: &Evidence) -> Option<String> {
    let poisoned = run.series("poisoned_groups");
    let (bad, good) = (poisoned.iter().sum::<f64>(), poisoned.len() as f64 * run.settings.groups);
    let share = bad / (bad + good);
    (share > POISONED).then(|| {
        format!(
            "the reward of {bad} groups failed or their samples were lost: {:.1}%, above {:.0}%",
            100.0 * share,
            100.0 * POISONED
        )
    })
}

#[cfg(test)]
mod tests {
    use super::super::Settings;
    use super::*;

    /// A run of 50 steps whose metrics go from one number to the other in a straight line.
    fn lines(of: &[(&str, f64, f64)]) -> Evidence {
        let line = |from: f64, to: f64| (0..50).map(|step| from + (to - from) * f64::from(step) / 49.0).collect();
        let columns = of.iter().map(|(name, from, to)| ((*name).to_owned(), line(*from, *to))).collect();
        let settings = Settings {
            max_new_tokens: Some(100.0),
            gap_warn: 1.0,
            max_staleness: 4.0,
            groups: 8.0,
            samples: true,
            clips_tokens: true,
            ..Settings::default()
        };
        Evidence { columns, settings, ..Evidence::default() }
    }

    /// The same with rewards between 0 and 1.
    fn rewarded(from: f64, to: f64, of: &[(&str, f64, f64)]) -> Evidence {
        lines(&[&[("reward_min", 0.0, 0.0), ("reward_max", 1.0, 1.0), ("reward_mean", from, to)], of].concat())
    }

    /// Holds a check to runs that it finds something in, and to runs that it finds nothing in.
    fn assert_finds(find: fn(&Evidence) -> Option<String>, sick: &[Evidence], healthy: &[Evidence]) {
        for run in sick {
            assert!(find(run).is_some(), "{:?}", run.columns);
        }
        for run in healthy {
            assert_eq!(find(run), None, "{:?}", run.columns);
        }
        assert_eq!(find(&lines(&[])), None, "a run without the metric");
    }

    #[test]
    fn numbers_that_are_not_finite_are_counted() {
        let sick = |value: f64| {
            let mut run = lines(&[("loss", 1.0, 0.5), ("grad_norm", 1.0, 1.0)]);
            run.columns.get_mut("grad_norm").unwrap()[7] = value;
            run
        };
        assert_finds(not_finite, &[sick(f64::NAN), sick(f64::INFINITY)], &[sick(1e300)]);
    }

    #[test]
    fn a_reward_is_flat_if_it_hardly_changes_and_is_not_the_best() {
        let sick = [rewarded(0.3, 0.3, &[]), rewarded(0.0, 0.0, &[])];
        assert_finds(reward_flat, &sick, &[rewarded(0.3, 0.4, &[]), rewarded(0.95, 0.95, &[]), rewarded(0.5, 0.2, &[])]);
        let mut short = rewarded(0.3, 0.3, &[]);
        short.columns.get_mut("reward_mean").unwrap().truncate(FLAT_STEPS - 1);
        assert_finds(reward_flat, &[], &[short]);
    }

    #[test]
    fn a_reward_falls_if_it_ends_far_below_its_best_fifth() {
        let mut collapsed = rewarded(0.2, 0.9, &[]);
        collapsed.columns.get_mut("reward_mean").unwrap()[35..].fill(0.1);
        assert_finds(reward_falls, &[collapsed, rewarded(0.6, 0.3, &[])], &[rewarded(0.2, 0.9, &[]), rewarded(0.5, 0.45, &[])]);
    }

    #[test]
    fn recorded_rewards_say_nothing_of_the_policy() {
        let columns = [("entropy_nats", 1.0, 0.01), ("reward_part_a", 0.2, 0.8), ("reward_part_b", 0.9, 0.4)];
        let checks: [fn(&Evidence) -> Option<String>; 4] = [reward_flat, reward_falls, parts_diverge, entropy_collapse];
        for (find, from) in checks.into_iter().zip([0.3, 0.6, 0.3, 0.3]) {
            let sampled = rewarded(from, 0.3, &columns);
            let recorded = Evidence { settings: Settings { samples: false, ..sampled.settings.clone() }, ..sampled.clone() };
            assert_finds(find, &[sampled], &[recorded]);
        }
    }

    #[test]
    fn parts_diverge_if_one_rises_and_another_falls() {
        let (up, down, same) = (("reward_part_a", 0.2, 0.8), ("reward_part_b", 0.9, 0.4), ("reward_part_c", 0.5, 0.51));
        assert_finds(
            parts_diverge,
            &[lines(&[up, down, same])],
            &[lines(&[up, same]), lines(&[down, same]), lines(&[up, ("loss", 1.0, 0.1)])],
        );
    }

    #[test]
    fn entropy_collapses_if_it_falls_far_before_the_task_is_solved() {
        let fall = ("entropy_nats", 1.0, -0.1);
        let healthy = [rewarded(0.2, 0.5, &[("entropy_nats", 1.0, 0.4)]), rewarded(0.2, 1.1, &[fall]), lines(&[fall])];
        assert_finds(entropy_collapse, &[rewarded(0.2, 0.5, &[fall])], &healthy);
    }

    #[test]
    fn a_gap_is_high_above_its_warning_and_grows_by_multiples() {
        let gap = |from, to| lines(&[("log_prob_gap_mean_nats", from, to)]);
        assert_finds(gap_high, &[gap(1.2, 1.2)], &[gap(0.5, 0.9), gap(3.0, 0.1)]);
        assert_finds(gap_grows, &[gap(0.01, 0.6)], &[gap(0.4, 0.8), gap(0.0001, 0.01), gap(0.6, 0.01)]);
    }

    #[test]
    fn clipping_is_high_above_a_fifth_where_tokens_are_clipped() {
        let clip = |from, to| lines(&[("clip_ratio", from, to)]);
        let sequences = Evidence { settings: Settings::default(), ..clip(0.5, 0.5) };
        assert_finds(clip_high, &[clip(0.1, 0.4)], &[clip(0.01, 0.15), clip(0.5, 0.0), sequences]);
    }

    #[test]
    fn divergence_is_high_from_the_sampling_or_the_reference_policy() {
        let sick = [
            lines(&[("approx_kl_nats", 0.0, 0.5)]),
            lines(&[("kl_loss_mean_nats", 0.0, 2.0)]),
            lines(&[("kl_reward_mean_nats", 2.0, 2.0)]),
        ];
        assert_finds(kl_high, &sick, &[lines(&[("approx_kl_nats", 0.0, 0.1), ("kl_loss_mean_nats", 0.0, 0.5)])]);
    }

    #[test]
    fn a_gradient_spikes_far_above_its_median() {
        let spike = |norm| {
            let mut run = lines(&[("grad_norm", 1.0, 2.0)]);
            run.columns.get_mut("grad_norm").unwrap()[30] = norm;
            run
        };
        let mut rare = spike(40.0);
        rare.columns.get_mut("grad_norm").unwrap().extend([1.0; 50]);
        let mut solved = spike(40.0);
        solved.columns.extend(rewarded(0.5, 1.0, &[]).columns);
        let healthy =
            [rare, solved, spike(5.0), spike(0.0), lines(&[("grad_norm", 0.0, 0.0)]), lines(&[("grad_norm", 9.0, 0.01)])];
        assert_finds(gradient_spikes, &[spike(40.0)], &healthy);
    }

    #[test]
    fn lengths_drift_if_they_grow_to_the_limit() {
        let length = |from, to| lines(&[("length_finished_mean_tokens", from, to)]);
        let unbounded = Evidence { settings: Settings::default(), ..length(20.0, 99.0) };
        assert_finds(
            length_drift,
            &[length(20.0, 99.0)],
            &[length(20.0, 60.0), length(90.0, 95.0), length(99.0, 20.0), unbounded],
        );
    }

    #[test]
    fn staleness_is_at_its_bound_if_most_steps_are_and_the_bound_is_loose() {
        let stale = |lag| lines(&[("sample_staleness_max_versions", lag, lag)]);
        let tight = Evidence { settings: Settings { max_staleness: 1.0, ..Settings::default() }, ..stale(1.0) };
        assert_finds(staleness_at_bound, &[stale(4.0)], &[stale(1.0), tight]);
    }

    #[test]
    fn failed_rewards_are_a_finding_above_one_group_in_a_hundred() {
        let poisoned = |groups| lines(&[("poisoned_groups", groups, groups)]);
        assert_finds(groups_poisoned, &[poisoned(1.0)], &[poisoned(0.0), poisoned(0.05)]);
    }
}
