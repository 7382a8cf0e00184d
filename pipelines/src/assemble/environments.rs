//! `[environment]`: the environment of multi-turn rollouts.

use std::sync::Arc;

use anyhow::{Context, Result};
use rollflow::env::{AgentProxy, programming_environment, python_environment, served_environment};
use rollflow::recipe::{Environment, EnvironmentKind, Net};
use rollflow::rollout::{Agent, AgentLimits};
use tracing::info;

use crate::assemble::secrets;

#[path = "../../../examples/environments/mod.rs"]
pub(crate) mod demonstrations;
use demonstrations::{CalculatorEnvironment, Corpus, GuessEnvironment, SearchEnvironment};

/// Builds the environment with its limits, for a model that reads at most `positions` tokens.
pub fn agent(of: &Environment, net: &Net, seed: u64, positions: usize) -> Result<Agent> {
    let agent = match &of.kind {
        EnvironmentKind::Calculator => Agent::new(CalculatorEnvironment::default),
        EnvironmentKind::Game { highest } => {
            let highest = *highest;
            Agent::new(move || GuessEnvironment::new(highest))
        }
        EnvironmentKind::Search { corpus, results } => {
            let texts =
                std::fs::read_to_string(corpus).with_context(|| format!("environment.corpus: reading {}", corpus.display()))?;
            let corpus = Corpus::new(texts.lines().map(str::trim).filter(|line| !line.is_empty()));
            let (corpus, results) = (Arc::new(corpus), *results);
            Agent::new(move || SearchEnvironment::new(corpus.clone(), results))
        }
        EnvironmentKind::Code(of) => Agent::by(programming_environment(of.sandbox()?, &of.tests)),
        EnvironmentKind::Python(of) => Agent::by(python_environment(of.start()?)),
        EnvironmentKind::Http(served) => {
            let endpoint = secrets::endpoint(&served.url, served.token_env.as_ref(), net)?;
            Agent::by(served_environment(endpoint, served.retry.policy(served.retries)?, served.concurrency)?)
        }
        EnvironmentKind::Agent { command, url, model } => {
            let mut proxy = match url {
                Some(url) => AgentProxy::post(secrets::endpoint(url, None, net)?)?,
                None => AgentProxy::command(command.clone()),
            };
            (proxy.parser, proxy.model, proxy.allowed_hosts) = (Arc::new(of.parser), model.clone(), net.allowed_hosts.clone());
            let (address, make) = proxy.start()?;
            info!("Agents find the model at http://{address}");
            Agent::remote(make)
        }
    };
    let agent = match &of.kind {
        // The proxy parses the calls and returns them to the agent.
        EnvironmentKind::Agent { .. } => agent,
        _ => agent.parser(of.parser),
    };
    let max_tokens = Some(of.limits.max_tokens.unwrap_or(positions).min(positions));
    Ok(agent.limits(|limits| *limits = AgentLimits { max_tokens, ..of.limits.clone() }).seed(seed))
}
