//! `[train.advantage]` as the library's estimator.

use std::sync::Arc;

use anyhow::{Context, Result};
use rollflow::algo::{Advantage, AdvantageConfig, Estimator};
use rollflow::recipe::advantage::Advantage as Choice;
use rollflow::recipe::train::Train;

use crate::registry::Registry;

/// What rewards are compared with.
pub fn estimator(train: &Train, registry: &Registry) -> Result<Arc<dyn Estimator>> {
    Ok(match &train.advantage {
        Choice::Custom(of) => registry.estimator_of(of)?,
        of => Arc::new(advantage(of).context("an estimator that is not registered is one of the library's")?),
    })
}

/// The library's own.
fn advantage(of: &Choice) -> Option<Advantage> {
    // What TRL adds to a deviation over the batch, and verl to that of a group whose best counts.
    const OVER_BATCH: f64 = 1e-4;
    const OVER_GROUP: f64 = 1e-6;
    Some(match of {
        Choice::GroupMean(of) => {
            Advantage::GroupMean(AdvantageConfig { scale: of.std, epsilon: of.epsilon, ..AdvantageConfig::default() })
        }
        Choice::LeaveOneOut(of) => Advantage::LeaveOneOut { normalize: of.normalize.then_some(OVER_BATCH) },
        Choice::ReinforcePlusPlus(_) => Advantage::ReinforcePlusPlus,
        Choice::ReinforcePlusPlusBaseline(_) => Advantage::ReinforcePlusPlusBaseline,
        Choice::OptimalBaseline(_) => Advantage::OptimalBaseline,
        Choice::Gpg(_) => Advantage::Gpg,
        Choice::BestOfGroup(of) => Advantage::BestOfGroup { scale: of.scale.then_some(OVER_GROUP) },
        Choice::Rank(_) => Advantage::Rank,
        Choice::Normalized(_) => Advantage::Normalized { epsilon: OVER_BATCH },
        Choice::Constant(of) => Advantage::Constant { baseline: of.baseline },
        Choice::Custom(_) => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A recipe's words are the library's own.
    #[test]
    fn every_kind_is_the_estimator_of_its_name() {
        let kinds = [
            "group_mean",
            "leave_one_out",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "optimal_baseline",
            "gpg",
            "best_of_group",
            "rank",
            "normalized",
            "constant",
        ];
        for kind in kinds {
            let recipe =
                format!("pipeline = 'grpo'\nmodel.kind = 'tiny'\ntask.kind = 'arithmetic'\ntrain.advantage.kind = '{kind}'");
            let plan = rollflow::recipe::parse("a.toml", &recipe, &[]).unwrap_or_else(|errors| panic!("{errors}"));
            assert_eq!(serde_json::to_value(advantage(&plan.train.advantage)).unwrap()["kind"], kind);
        }
    }
}
