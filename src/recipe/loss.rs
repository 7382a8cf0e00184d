//! The loss of `[train]`, composed from its sections.

use std::sync::Arc;

use super::plan::{Pipeline, Plan};
use super::train::Train;
use crate::algo::{
    Aggregation, Loss, LossChoice, LossError, OffPolicy, PolicyLoss, Select, all_pairs, best_against_worst, first_against_second,
    random_pair,
};
use crate::stages::pairs::Pairing;
use crate::stages::train::RewardKl;

impl Train {
    /// Loss with these settings; `None` for a registered one.
    pub fn library_loss(&self) -> Option<Result<Arc<dyn Loss>, LossError>> {
        match &self.loss {
            LossChoice::Custom(_) => None,
            LossChoice::Dpo(of) => {
                let pairs = of.loss();
                Some(pairs.check().map(|()| Arc::new(pairs) as Arc<dyn Loss>))
            }
            _ => {
                let policy = self.policy_loss();
                Some(policy.check().map(|()| Arc::new(policy) as Arc<dyn Loss>))
            }
        }
    }

    /// Policy loss with these settings.
    pub fn policy_loss(&self) -> PolicyLoss {
        PolicyLoss {
            surrogate: self.loss.clone(),
            kl_loss: self.kl_loss.clone(),
            top_entropy: self.top_entropy,
            off_policy_threshold: self.off_policy_threshold,
            entropy_coef: self.entropy_coef,
            ..PolicyLoss::default()
        }
    }

    /// Correction of off-policy tokens.
    pub fn off_policy(&self) -> OffPolicy {
        OffPolicy { proximal: self.centre(), weigh: self.correction.importance(), reject: self.reject.clone() }
    }

    /// KL penalty in the reward, if any.
    pub fn reward_kl(&self) -> Option<RewardKl> {
        self.kl_reward.clone().map(RewardKl::from)
    }
}

impl Plan {
    /// Weights of tokens in the loss; those of `dr_grpo` follow from `generate.max_new_tokens`.
    pub fn aggregation(&self) -> Aggregation {
        match self.train.loss_aggregation {
            Aggregation::DrGrpo { max_len: 0 } => Aggregation::DrGrpo { max_len: self.generate.max_new_tokens },
            other => other,
        }
    }

    /// Pairs of `[pairs]`, or those of the data set with `pipeline = "dpo"`.
    pub fn pairing(&self) -> Option<Pairing> {
        if self.pipeline == Pipeline::Dpo {
            return Some(Pairing::by(first_against_second));
        }
        self.pairs.as_ref().map(|of| match of.select {
            Select::BestWorst => Pairing::by(best_against_worst),
            Select::Random => Pairing::by(random_pair(self.seed)),
            Select::All => Pairing::by(all_pairs),
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::algo::KlForm;
    use crate::recipe::{Plan, parse};

    fn plan(rest: &str) -> Plan {
        let recipe = format!("pipeline = 'grpo'\nmodel.kind = 'tiny'\ntask.kind = 'arithmetic'\n{rest}");
        parse("recipe.toml", &recipe, &[]).unwrap_or_else(|errors| panic!("{errors}"))
    }

    #[test]
    fn every_kind_of_policy_loss_has_defaults_that_go_together() {
        let kinds = [
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
        for (kind, name) in kinds {
            let train = plan(&format!("train.entropy_coef = 0.01\ntrain.loss.kind = '{kind}'")).train;
            let found = (train.library_loss().unwrap().unwrap().name().to_owned(), train.policy_loss().entropy_coef);
            assert_eq!(found, (name.to_owned(), 0.01));
        }
    }

    #[test]
    fn every_loss_of_pairs_has_settings_that_go_together() {
        let kinds = ["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"];
        for kind in [&kinds[..], &["apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"]].concat() {
            let pair_loss = format!("train.loss = {{ kind = 'dpo', pair_loss = '{kind}', label_smoothing = 0.1 }}");
            let reference = if kind == "sft" { "" } else { "reference.kind = 'frozen'" };
            let loss = plan(&format!("{pair_loss}\npairs.select = 'all'\n{reference}")).train.library_loss().unwrap().unwrap();
            assert_eq!((loss.name(), loss.whole_batch()), ("dpo", ["aot", "aot_unpaired", "sft"].contains(&kind)));
        }
    }

    #[test]
    fn a_kl_penalty_weighs_as_the_recipe_says_and_its_loss_reads_every_token() {
        let penalty = "beta = 0.2, estimator = 'k2', unbiased = false, truncate = 3";
        let train = plan(&format!("reference.kind = 'ema'\ntrain.kl_loss = {{ {penalty} }}")).train;
        let of = train.policy_loss().kl_loss.unwrap();
        assert_eq!((of.beta, of.unbiased, of.truncate, of.estimator), (0.2, false, Some(3.0), KlForm::K2));
        let ignores = |train: &crate::recipe::train::Train| train.library_loss().unwrap().unwrap().ignores_zero_advantage();
        assert!(!ignores(&train) && ignores(&plan("").train));
    }
}
