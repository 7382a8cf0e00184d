//! `[train.loss]` and the corrections of `[train]` as the library's.

use std::sync::Arc;

use rollflow::algo::{
    self, AdaptiveKl, Bound, Clip, Correction, Importance, Kl, KlForm, Level, LossError, OffPolicy, PairLoss, PairwiseLoss,
    PolicyLoss, Preference, RatioLevel, Rejection, Surrogate, Vespo, all_pairs, best_against_worst, first_against_second,
    random_pair,
};
use rollflow::recipe::correction::{self, Reject};
use rollflow::recipe::kl::{KlLimits, KlReward};
use rollflow::recipe::loss::{self, Dpo, Loss};
use rollflow::recipe::pairs::Select;
use rollflow::recipe::train::Train;
use rollflow::recipe::{Pipeline, Plan};
use rollflow::stages::pairs::Pairing;
use rollflow::stages::train::RewardKl;

/// The loss of `[train]`, of values that go together, if it is one of the library's: see [`Registry::loss_of`](crate::Registry::loss_of).
pub fn loss(train: &Train) -> Option<Result<Arc<dyn algo::Loss>, LossError>> {
    if let Loss::Dpo(of) = &train.loss {
        let pairs = pairwise_loss(of);
        return Some(pairs.preference.check().map(|()| Arc::new(pairs) as Arc<dyn algo::Loss>));
    }
    let policy = policy_loss(train)?;
    Some(policy.check().map(|()| Arc::new(policy) as Arc<dyn algo::Loss>))
}

/// A loss of pairs.
fn pairwise_loss(of: &Dpo) -> PairwiseLoss {
    let term = match of.pair_loss {
        loss::PairLoss::Sigmoid => PairLoss::Sigmoid,
        loss::PairLoss::Hinge => PairLoss::Hinge,
        loss::PairLoss::Ipo => PairLoss::Ipo,
        loss::PairLoss::ExoPair => PairLoss::ExoPair,
        loss::PairLoss::NcaPair => PairLoss::NcaPair,
        loss::PairLoss::Robust => PairLoss::Robust,
        loss::PairLoss::BcoPair => PairLoss::BcoPair,
        loss::PairLoss::SppoHard => PairLoss::SppoHard,
        loss::PairLoss::Aot => PairLoss::Aot,
        loss::PairLoss::AotUnpaired => PairLoss::AotUnpaired,
        loss::PairLoss::ApoZero => PairLoss::ApoZero,
        loss::PairLoss::ApoDown => PairLoss::ApoDown,
        loss::PairLoss::Discopop => PairLoss::Discopop { tau: of.tau },
        loss::PairLoss::Sft => PairLoss::Sft,
        loss::PairLoss::SigmoidNorm => PairLoss::SigmoidNorm,
    };
    let Dpo { beta, label_smoothing, tail_weight, reference_free, .. } = *of;
    PairwiseLoss { preference: Preference { beta, label_smoothing, tail_weight, ..Preference::of(term) }, reference_free }
}

/// The pairs of `[pairs]`, or those that the data of `pipeline = "dpo"` has.
pub fn pairing(plan: &Plan) -> Option<Pairing> {
    if plan.pipeline == Pipeline::Dpo {
        return Some(Pairing::by(first_against_second));
    }
    plan.pairs.as_ref().map(|of| match of.select {
        Select::BestWorst => Pairing::by(best_against_worst),
        Select::Random => Pairing::by(random_pair(plan.seed)),
        Select::All => Pairing::by(all_pairs),
    })
}

/// The policy loss of `[train]`. A loss of pairs and one of the user's own are none.
fn policy_loss(train: &Train) -> Option<PolicyLoss> {
    let ratio = |of| match of {
        correction::Level::Token => RatioLevel::Token,
        correction::Level::Sequence => RatioLevel::Sequence,
        correction::Level::Geometric => RatioLevel::Geometric,
    };
    let clip = |low, high| Clip { low, high, ..Clip::default() };
    let (surrogate, level) = match &train.loss {
        Loss::Dpo(_) | Loss::Custom(_) => return None,
        Loss::Grpo(of) => {
            let clip = Clip { delta: of.delta, dual: of.dual_clip, ..clip(of.epsilon, of.epsilon_high) };
            (Surrogate::Clip(clip), ratio(of.level))
        }
        Loss::Dapo(of) => (Surrogate::Clip(clip(of.epsilon, of.epsilon_high)), RatioLevel::Token),
        Loss::Gspo(of) => {
            let level = if of.by_token { RatioLevel::GeometricToken } else { RatioLevel::Geometric };
            (Surrogate::Clip(clip(of.epsilon, of.epsilon_high)), level)
        }
        Loss::Cispo(of) => (Surrogate::Cispo { low: of.epsilon, high: of.epsilon_high }, ratio(of.level)),
        Loss::Sapo(of) => (Surrogate::Sapo { tau_pos: of.tau_pos, tau_neg: of.tau_neg }, ratio(of.level)),
        Loss::Gpg(_) => (Surrogate::Gpg, RatioLevel::Token),
        Loss::Dro(of) => (Surrogate::Dro { beta: of.beta }, RatioLevel::Token),
        Loss::Dppo(of) => {
            let divergence = of.divergence;
            (Surrogate::Dppo { divergence, low: of.epsilon, high: of.epsilon_high, max_ratio: of.max_ratio }, RatioLevel::Token)
        }
        Loss::Vespo(of) => {
            let loss::Vespo { k_pos, lambda_pos, k_neg, lambda_neg } = *of;
            (Surrogate::Vespo(Vespo { k_pos, lambda_pos, k_neg, lambda_neg }), RatioLevel::Token)
        }
        Loss::GeoMean(of) => (Surrogate::GeoMean { low: of.epsilon, high: of.epsilon_high }, RatioLevel::Geometric),
        Loss::ClipCov(of) => {
            let clip = clip(of.epsilon, of.epsilon_high);
            (Surrogate::ClipCov { clip, share: of.share, min: of.min, max: of.max }, RatioLevel::Token)
        }
        Loss::KlCov(of) => (Surrogate::KlCov { share: of.share, coef: of.coef }, RatioLevel::Token),
    };
    let (beta, kl, unbiased_kl) = match &train.kl_loss {
        Some(of) => {
            let kl = Kl { straight_through: of.straight_through, ..divergence(of.estimator, &of.limits) };
            (of.beta, kl, of.unbiased)
        }
        None => (0.0, Kl::default(), true),
    };
    Some(PolicyLoss {
        level,
        surrogate,
        beta,
        kl,
        unbiased_kl,
        entropy_coef: train.entropy_coef,
        top_entropy: train.top_entropy,
        off_policy_threshold: train.off_policy_threshold,
        ..PolicyLoss::default()
    })
}

/// What `train.kl_reward` takes off rewards.
pub fn reward_kl(of: &KlReward) -> RewardKl {
    let kl = RewardKl::new(of.beta, divergence(of.estimator, &of.limits));
    match of.target {
        Some(target) => kl.adaptive(AdaptiveKl { target, horizon: of.horizon }),
        None => kl,
    }
}

fn divergence(form: KlForm, limits: &KlLimits) -> Kl {
    Kl { truncate: limits.truncate, confidence: limits.confidence, ..form.into() }
}

/// What is done about tokens of another policy.
pub fn off_policy(train: &Train) -> OffPolicy {
    let level = |level| match level {
        correction::Level::Token => Level::Token,
        correction::Level::Sequence => Level::Sequence,
        correction::Level::Geometric => Level::Geometric,
    };
    let weigh = match &train.correction {
        correction::Correction::None(_) => None,
        correction::Correction::TruncatedIs(of) => {
            let bound = Bound::Truncate { min: of.min, max: of.max };
            Some(Importance { level: level(of.level), bound, normalize: of.normalize })
        }
        correction::Correction::MaskedIs(of) => {
            Some(Importance { normalize: of.normalize, ..Importance::masked(level(of.level), of.min, of.max) })
        }
        correction::Correction::IcePop(of) => Some(Importance::icepop(of.alpha, of.beta)),
    };
    let reject = train.reject.iter().map(rejection).collect();
    OffPolicy { proximal: train.centre(), correction: Correction { weigh, reject } }
}

fn rejection(reject: &Reject) -> Rejection {
    Rejection { divergence: reject.divergence, over: reject.over, min: reject.min, max: reject.max }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rollflow::recipe::{Plan, parse};

    use super::loss;

    /// Every kind of `[train.loss]` of a policy, and what the library calls it.
    const KINDS: [(&str, &str); 12] = [
        ("grpo", "grpo"),
        ("dapo", "grpo"),
        ("gspo", "gspo"),
        ("cispo", "cispo"),
        ("sapo", "sapo"),
        ("gpg", "gpg"),
        ("dro", "dro"),
        ("dppo", "dppo"),
        ("vespo", "vespo"),
        ("geo_mean", "geo_mean"),
        ("clip_cov", "clip_cov"),
        ("kl_cov", "kl_cov"),
    ];

    fn plan(rest: &str) -> Plan {
        let recipe = format!("pipeline = 'grpo'\nmodel.kind = 'tiny'\ntask.kind = 'arithmetic'\n{rest}");
        parse("recipe.toml", &recipe, &[]).unwrap_or_else(|errors| panic!("{errors}"))
    }

    #[test]
    fn every_kind_of_loss_can_be_had_from_a_recipe_with_defaults_that_go_together() {
        for (kind, name) in KINDS {
            let plan = plan(&format!("train.entropy_coef = 0.01\ntrain.loss.kind = '{kind}'"));
            assert_eq!(
                (loss(&plan.train).unwrap().unwrap().name(), super::policy_loss(&plan.train).unwrap().entropy_coef),
                (name, 0.01)
            );
        }
    }

    #[test]
    fn every_loss_of_pairs_can_be_had_from_a_recipe() {
        let kinds = ["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"];
        for kind in [&kinds[..], &["apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"]].concat() {
            let pair_loss = format!("train.loss = {{ kind = 'dpo', pair_loss = '{kind}', label_smoothing = 0.1 }}");
            let reference = if kind == "sft" { "" } else { "reference.kind = 'frozen'" };
            let plan = plan(&format!("{pair_loss}\npairs.select = 'all'\n{reference}"));
            let loss = loss(&plan.train).unwrap().unwrap();
            assert_eq!((loss.name(), loss.whole_batch()), ("dpo", ["aot", "aot_unpaired", "sft"].contains(&kind)));
        }
    }

    #[test]
    fn a_divergence_weighs_as_the_recipe_says_and_its_loss_looks_at_every_token() {
        let held =
            plan("reference.kind = 'ema'\ntrain.kl_loss = { beta = 0.2, estimator = 'k2', unbiased = false, truncate = 3 }");
        let found = super::policy_loss(&held.train).unwrap();
        assert_eq!((found.beta, found.unbiased_kl, found.kl.truncate), (0.2, false, Some(3.0)));
        assert_eq!(found.kl.form, rollflow::algo::KlForm::K2);
        assert!(
            !loss(&held.train).unwrap().unwrap().ignores_zero_advantage()
                && loss(&plan("").train).unwrap().unwrap().ignores_zero_advantage()
        );
    }
}
