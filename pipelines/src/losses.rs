//! `[train.loss]` and the corrections of `[train]` as the library's.

use rollflow::algo::{
    BinaryDivergence, Bound, Clip, Correction, Divergence, Importance, Level, OffPolicy, Over, PolicyLoss, Proximal, RatioLevel,
    Rejection, Surrogate, Vespo,
};
use rollflow::recipe::correction::{self, Reject};
use rollflow::recipe::loss::{self, Loss, Moved};
use rollflow::recipe::train::Train;

/// The policy loss of `[train]`, if it is one of the library's: see [`Registry::loss_of`](crate::Registry::loss_of).
pub fn policy_loss(train: &Train) -> Option<PolicyLoss> {
    let ratio = |of| match of {
        correction::Level::Token => RatioLevel::Token,
        correction::Level::Sequence => RatioLevel::Sequence,
        correction::Level::Geometric => RatioLevel::Geometric,
    };
    let clip = |low, high| Clip { low, high, ..Clip::default() };
    let (surrogate, level) = match &train.loss {
        Loss::Grpo(of) => {
            let clip = Clip { delta: of.delta, dual: of.dual_clip, ..clip(of.clip_low, of.clip_high) };
            (Surrogate::Clip(clip), ratio(of.level))
        }
        Loss::Dapo(of) => (Surrogate::Clip(clip(of.clip_low, of.clip_high)), RatioLevel::Token),
        Loss::Gspo(of) => {
            let level = if of.by_token { RatioLevel::GeometricToken } else { RatioLevel::Geometric };
            (Surrogate::Clip(clip(of.clip_low, of.clip_high)), level)
        }
        Loss::Cispo(of) => (Surrogate::Cispo { low: of.clip_low, high: of.clip_high }, ratio(of.level)),
        Loss::Sapo(of) => (Surrogate::Sapo { tau_pos: of.tau_pos, tau_neg: of.tau_neg }, ratio(of.level)),
        Loss::Gpg(_) => (Surrogate::Gpg, RatioLevel::Token),
        Loss::Dro(of) => (Surrogate::Dro { beta: of.beta }, RatioLevel::Token),
        Loss::Dppo(of) => {
            let divergence = match of.divergence {
                Moved::TotalVariation => BinaryDivergence::TotalVariation,
                Moved::Kl => BinaryDivergence::Kl,
            };
            (Surrogate::Dppo { divergence, low: of.clip_low, high: of.clip_high, max_ratio: of.max_ratio }, RatioLevel::Token)
        }
        Loss::Vespo(of) => {
            let loss::Vespo { k_pos, lambda_pos, k_neg, lambda_neg } = *of;
            (Surrogate::Vespo(Vespo { k_pos, lambda_pos, k_neg, lambda_neg }), RatioLevel::Token)
        }
        Loss::GeoMean(of) => (Surrogate::GeoMean { low: of.clip_low, high: of.clip_high }, RatioLevel::Geometric),
        Loss::ClipCov(of) => {
            let clip = clip(of.clip_low, of.clip_high);
            (Surrogate::ClipCov { clip, share: of.share, min: of.min, max: of.max }, RatioLevel::Token)
        }
        Loss::KlCov(of) => (Surrogate::KlCov { share: of.share, coef: of.coef }, RatioLevel::Token),
        Loss::Custom(_) => return None,
    };
    Some(PolicyLoss {
        level,
        surrogate,
        entropy_coef: train.entropy_coef,
        top_entropy: train.top_entropy,
        off_policy_threshold: train.off_policy_threshold,
        ..PolicyLoss::default()
    })
}

/// What is done about tokens of another policy.
pub fn off_policy(train: &Train) -> OffPolicy {
    let proximal = match train.centre() {
        correction::Proximal::Behaviour => Proximal::Behaviour,
        correction::Proximal::Recompute => Proximal::Recompute,
        correction::Proximal::LogLinear => Proximal::LogLinear,
    };
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
    OffPolicy { proximal, correction: Correction { weigh, reject } }
}

fn rejection(reject: &Reject) -> Rejection {
    let divergence = match reject.divergence {
        correction::Divergence::K1 => Divergence::K1,
        correction::Divergence::K2 => Divergence::K2,
        correction::Divergence::K3 => Divergence::K3,
    };
    let over = match reject.over {
        correction::Over::Token => Over::Token,
        correction::Over::Sum => Over::Sum,
        correction::Over::Mean => Over::Mean,
        correction::Over::Max => Over::Max,
    };
    Rejection { divergence, over, min: reject.min, max: reject.max }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use rollflow::algo::Loss;

    use super::policy_loss;

    /// Every kind of `[train.loss]`, and what the library calls it.
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

    #[test]
    fn every_kind_of_loss_can_be_had_from_a_recipe_with_defaults_that_go_together() {
        for (kind, name) in KINDS {
            let recipe = format!(
                "pipeline = 'grpo'\nmodel.kind = 'tiny'\ntask.kind = 'arithmetic'\ntrain.entropy_coef = 0.01\ntrain.loss.kind = '{kind}'"
            );
            let plan = rollflow::recipe::parse("recipe.toml", &recipe, &[]).unwrap();
            let loss = policy_loss(&plan.train).unwrap();
            loss.check().unwrap();
            assert_eq!((loss.name(), loss.entropy_coef), (name, 0.01));
        }
    }
}
