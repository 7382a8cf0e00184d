//! Registry of custom losses, advantages, rewards, aggregators and filters that recipes use by name,
//! and of the ranks that share a run.
//!
//! A registry is a plain value. A program builds one and passes it to [`command`](crate::command),
//! which is then the whole command with the program's parts.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::sync::Arc;

use anyhow::{Context, Result};
use rollflow::algo::filters::{GroupFilter, Verdict};
use rollflow::algo::rewards::{Aggregator, IntoReward, RewardOutput};
use rollflow::algo::{Advantage, Estimator, LossChoice};
use rollflow::prelude::*;
use rollflow::ranks::Member;
use rollflow::recipe::{Composition, Custom, Params, Train};
use rollflow::stages::train::Distill;
use serde::de::DeserializeOwned;

/// A reward of samples.
pub type RewardFn = Arc<dyn Fn(&Sample) -> Result<RewardOutput, String> + Send + Sync>;
/// A filter of groups.
pub type FilterFn = Arc<dyn Fn(&Group) -> Verdict + Send + Sync>;

type Make<T> = Arc<dyn Fn(&Params) -> Result<T, String> + Send + Sync>;

/// Custom parts by name. A recipe uses them with `kind = "custom"`, `name` and `params`.
///
/// ```
/// use rollflow::algo::{Loss, LossError, LossInputs, LossOutput};
/// use rollflow_pipelines::Registry;
///
/// #[derive(serde::Deserialize)]
/// struct Scaled {
///     factor: f64,
/// }
///
/// // train.loss = { kind = "custom", name = "scaled", params = { factor = 2.0 } }
/// let registry = Registry::default().loss_with("scaled", |Scaled { factor }| {
///     Ok::<_, String>(move |inputs: &LossInputs| {
///         let slope = |(advantage, weight): (&f64, &f64)| -factor * advantage * weight;
///         let grad: Vec<f64> = inputs.advantages.iter().zip(inputs.weights).map(slope).collect();
///         let loss = grad.iter().zip(inputs.log_probs).map(|(slope, log_prob)| slope * log_prob).sum();
///         Ok::<_, LossError>(LossOutput::new(loss, grad))
///     })
/// });
/// assert_eq!(registry.names().collect::<Vec<_>>(), [("loss", "scaled")]);
/// ```
#[derive(Clone, Default)]
pub struct Registry {
    losses: Named<Arc<dyn Loss>>,
    advantages: Named<Arc<dyn Estimator>>,
    rewards: Named<RewardFn>,
    aggregators: Named<Aggregator>,
    filters: Named<FilterFn>,
    ranks: Option<Arc<Member>>,
}

/// Parts of one kind.
type Named<T> = BTreeMap<String, Make<T>>;

/// Something that no part of the registry is, or that a part cannot be made of.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}: {help}")]
pub struct RegistryError {
    /// If true, the name is wrong; otherwise its parameters.
    pub(crate) name: bool,
    pub(crate) message: String,
    pub(crate) help: String,
}

/// For parts that take no parameters.
#[derive(serde::Deserialize)]
struct Nothing {}

fn add<T, P: DeserializeOwned, E: Display>(
    parts: &mut Named<T>,
    name: &str,
    make: impl Fn(P) -> Result<T, E> + Send + Sync + 'static,
) {
    let make = move |params: &Params| make(params.read().map_err(|error| error.to_string())?).map_err(|why| format!("{why:#}"));
    parts.insert(name.to_owned(), Arc::new(make));
}

/// Makes the part called `name`. Messages call its kind `what`.
fn part<T>(parts: &Named<T>, what: &str, name: &str, params: &Params) -> Result<T, RegistryError> {
    let Some(make) = parts.get(name) else {
        let known: Vec<&str> = parts.keys().map(String::as_str).collect();
        let listed = match &known[..] {
            [] => format!(
                "this program registers none; write one with Registry::{what} and hand the registry to rollflow_pipelines::command"
            ),
            known => format!("registered are {}", known.join(", ")),
        };
        let near = known.iter().map(|known| (strsim::damerau_levenshtein(name, known), known)).min();
        let help = match near {
            Some((distance, meant)) if distance <= 1 + name.len() / 3 => format!("did you mean {meant:?}? {listed}"),
            _ => listed,
        };
        return Err(RegistryError { name: true, message: format!("no {what} is registered as {name:?}"), help });
    };
    let message = || format!("the {what} {name:?} can't be made of these parameters");
    make(params).map_err(|help| RegistryError { name: false, message: message(), help })
}

impl Registry {
    /// Registers a loss without parameters: a closure of [`LossInputs`](rollflow::algo::LossInputs),
    /// or any other [`Loss`].
    pub fn loss(self, name: &str, loss: impl Loss + Clone + 'static) -> Self {
        self.loss_with(name, move |Nothing {}| Ok::<_, String>(loss.clone()))
    }

    /// A loss that is made of parameters, which are read as `P`.
    pub fn loss_with<P: DeserializeOwned, L: Loss + 'static, E: Display>(
        mut self,
        name: &str,
        make: impl Fn(P) -> Result<L, E> + Send + Sync + 'static,
    ) -> Self {
        add(&mut self.losses, name, move |params| make(params).map(|loss| Arc::new(loss) as Arc<dyn Loss>));
        self
    }

    /// An advantage estimator without parameters.
    pub fn advantage(self, name: &str, estimator: impl Estimator + Clone + 'static) -> Self {
        self.advantage_with(name, move |Nothing {}| Ok::<_, String>(estimator.clone()))
    }

    /// An advantage estimator that is made of parameters.
    pub fn advantage_with<P: DeserializeOwned, A: Estimator + 'static, E: Display>(
        mut self,
        name: &str,
        make: impl Fn(P) -> Result<A, E> + Send + Sync + 'static,
    ) -> Self {
        add(&mut self.advantages, name, move |params| make(params).map(|estimator| Arc::new(estimator) as Arc<dyn Estimator>));
        self
    }

    /// A reward without parameters, for `[reward]` and `[[reward.part]]`.
    pub fn reward<R: IntoReward>(self, name: &str, reward: impl Fn(&Sample) -> R + Clone + Send + Sync + 'static) -> Self {
        self.reward_with(name, move |Nothing {}| Ok::<_, String>(reward.clone()))
    }

    /// A reward that is made of parameters.
    pub fn reward_with<P: DeserializeOwned, R: IntoReward, F: Fn(&Sample) -> R + Send + Sync + 'static, E: Display>(
        mut self,
        name: &str,
        make: impl Fn(P) -> Result<F, E> + Send + Sync + 'static,
    ) -> Self {
        let boxed = |reward: F| Arc::new(move |sample: &Sample| reward(sample).into_reward()) as RewardFn;
        add(&mut self.rewards, name, move |params| make(params).map(boxed));
        self
    }

    /// An aggregator of a reward's parts, without parameters.
    pub fn aggregator(self, name: &str, aggregate: impl Fn(&[f64]) -> f64 + Clone + Send + Sync + 'static) -> Self {
        self.aggregator_with(name, move |Nothing {}| Ok::<_, String>(aggregate.clone()))
    }

    /// An aggregator that is made of parameters.
    pub fn aggregator_with<P: DeserializeOwned, F: Fn(&[f64]) -> f64 + Send + Sync + 'static, E: Display>(
        mut self,
        name: &str,
        make: impl Fn(P) -> Result<F, E> + Send + Sync + 'static,
    ) -> Self {
        add(&mut self.aggregators, name, move |params| make(params).map(Aggregator::custom));
        self
    }

    /// A filter of groups, without parameters.
    pub fn filter(self, name: &str, filter: impl GroupFilter + Clone) -> Self {
        self.filter_with(name, move |Nothing {}| Ok::<_, String>(filter.clone()))
    }

    /// A filter that is made of parameters.
    pub fn filter_with<P: DeserializeOwned, F: GroupFilter, E: Display>(
        mut self,
        name: &str,
        make: impl Fn(P) -> Result<F, E> + Send + Sync + 'static,
    ) -> Self {
        add(&mut self.filters, name, move |params| make(params).map(|filter| Arc::new(filter) as FilterFn));
        self
    }

    /// Everything that is registered: what it is, and its name.
    pub fn names(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let losses = self.losses.keys().map(|name| ("loss", name));
        let advantages = self.advantages.keys().map(|name| ("advantage", name));
        let rewards = self.rewards.keys().map(|name| ("reward", name));
        let aggregators = self.aggregators.keys().map(|name| ("aggregator", name));
        let filters = self.filters.keys().map(|name| ("filter", name));
        let all = losses.chain(advantages).chain(rewards).chain(aggregators).chain(filters);
        all.map(|(what, name)| (what, name.as_str()))
    }

    /// Shares the training of runs with the other ranks of `member`, whose rank is 0.
    pub(crate) fn of_ranks(mut self, member: &Arc<Member>) -> Self {
        self.ranks = Some(member.clone());
        self
    }

    /// Membership of this process in a run of several.
    pub(crate) fn ranks(&self) -> Option<&Arc<Member>> {
        self.ranks.as_ref()
    }

    /// Builds the loss of `[train]`, the library's or a registered one, with the divergence from a
    /// `teacher` if the recipe compares distributions.
    pub fn loss_of(&self, train: &Train, teacher: Option<&Distill>) -> Result<Arc<dyn Loss>> {
        let loss = match &train.loss {
            LossChoice::Custom(of) => self.own_loss_of(of)?,
            _ => train.library_loss().context("a loss that is not registered is one of the library's")??,
        };
        Ok(match teacher {
            Some(distill) => distill.added_to(loss),
            None => loss,
        })
    }

    pub(crate) fn own_loss_of(&self, of: &Custom) -> Result<Arc<dyn Loss>, RegistryError> {
        part(&self.losses, "loss", &of.name, &of.params)
    }

    pub(crate) fn estimator_of(&self, of: &Advantage) -> Result<Arc<dyn Estimator>, RegistryError> {
        match of {
            Advantage::Custom(of) => part(&self.advantages, "advantage", &of.name, &of.params),
            own => Ok(Arc::new(own.clone())),
        }
    }

    pub(crate) fn reward_of(&self, name: &str, params: &Params) -> Result<RewardFn, RegistryError> {
        part(&self.rewards, "reward", name, params)
    }

    pub(crate) fn aggregator_of(&self, of: &Composition) -> Result<Aggregator, RegistryError> {
        part(&self.aggregators, "aggregator", of.aggregator.as_deref().unwrap_or_default(), &of.aggregator_params)
    }

    pub(crate) fn filter_of(&self, name: &str, params: &Params) -> Result<FilterFn, RegistryError> {
        part(&self.filters, "filter", name, params)
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}
