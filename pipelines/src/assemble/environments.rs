//! `[environment]`: the environment of multi-turn rollouts.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rollflow::data::ChatMessage;
use rollflow::env::{AgentProxy, programming_environment, python_environment, served_environment};
use rollflow::prelude::*;
use rollflow::python::Workers;
use rollflow::recipe::{Environment, EnvironmentKind, Net};
use rollflow::rollout::{Agent, AgentLimits};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tracing::info;

use crate::assemble::secrets;

#[path = "../../../examples/environments/mod.rs"]
pub(crate) mod demonstrations;
use demonstrations::{CalculatorEnvironment, Corpus, GuessEnvironment, SearchEnvironment};

/// Timeout for listing the tasks of an environment, which may fetch a data set.
const LISTING: Duration = Duration::from_secs(3600);

/// Builds the environment with its limits, for a model that reads at most `positions` tokens.
pub fn agent(of: &Environment, net: &Net, seed: u64, positions: usize) -> Result<Agent> {
    let mut workers = of.limits.workers;
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
        EnvironmentKind::Python(_) | EnvironmentKind::OpenEnv(_) => {
            let processes = python(&of.kind)?;
            // A rollout that waits for a worker has no deadline yet, one that waits for its process has.
            workers = workers.min(processes.capacity());
            Agent::by(python_environment(processes))
        }
        EnvironmentKind::Http(served) => {
            let endpoint = secrets::endpoint(&served.url, served.token_env.as_ref(), net)?;
            Agent::by(served_environment(endpoint, served.retry.policy(served.retries)?, served.concurrency)?)
        }
        EnvironmentKind::Verifiers(_) => proxied(AgentProxy::python(python(&of.kind)?), of, net)?,
        EnvironmentKind::Agent { command, url, model } => {
            let mut proxy = match url {
                Some(url) => AgentProxy::post(secrets::endpoint(url, None, net)?)?,
                None => AgentProxy::command(command.clone()),
            };
            proxy.model.clone_from(model);
            proxied(proxy, of, net)?
        }
    };
    let agent = match &of.kind {
        // The proxy parses the calls and returns them to the agent.
        EnvironmentKind::Agent { .. } | EnvironmentKind::Verifiers(_) => agent,
        _ => agent.parser(of.parser),
    };
    let max_tokens = Some(of.limits.max_tokens.unwrap_or(positions).min(positions));
    Ok(agent.limits(|limits| *limits = AgentLimits { max_tokens, workers, ..of.limits.clone() }).seed(seed))
}

/// Serves the model to agents in other processes.
fn proxied(mut proxy: AgentProxy, of: &Environment, net: &Net) -> Result<Agent> {
    (proxy.parser, proxy.allowed_hosts) = (Arc::new(of.parser), net.allowed_hosts.clone());
    let (address, make) = proxy.start()?;
    info!("Agents find the model at http://{address}");
    Ok(Agent::remote(make))
}

fn python(kind: &EnvironmentKind) -> Result<Workers> {
    Ok(kind.start_python().context("this environment has no Python processes")??)
}

/// The prompts that the environment brings, `limit` at most.
pub fn tasks(of: Option<&Environment>, limit: Option<usize>) -> Result<Vec<Prompt>> {
    #[derive(Deserialize)]
    struct Task {
        messages: Vec<ChatMessage>,
        #[serde(flatten)]
        columns: Map<String, Value>,
    }
    let of = of.context("task.kind = \"environment\" needs a section [environment]")?;
    let workers = python(&of.kind)?;
    let mut answer = workers.block_on(workers.ask(json!({ "do": "tasks", "limit": limit }), LISTING))?;
    let unreadable = || format!("reading the tasks of {}", workers.name());
    let tasks: Vec<Task> = serde_json::from_value(answer["tasks"].take()).with_context(unreadable)?;
    ensure!(!tasks.is_empty(), "{} has no tasks", workers.name());
    info!("Tasks: {} of {}", tasks.len(), workers.name());
    Ok(tasks.into_iter().map(|Task { messages, columns }| Prompt { metadata: columns, ..Prompt::from(messages) }).collect())
}

#[cfg(test)]
mod tests {
    use rollflow::python::{PythonEnvironment, PythonProcesses};

    use super::*;

    #[test]
    fn an_environment_of_python_works_on_as_many_rollouts_as_its_processes_take_calls() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("my_env.py");
        let source = "class Computes:\n    def reset(self): pass\n\nclass Waits:\n    async def reset(self): pass\n";
        std::fs::write(&file, source).unwrap();
        let workers = |name: &str, workers: usize| {
            let processes = PythonProcesses { processes: 2, calls_in_flight: 3, ..PythonProcesses::default() };
            let environment = Some(name.to_owned());
            let python = PythonEnvironment { file: file.clone(), environment, processes, ..PythonEnvironment::default() };
            let limits = AgentLimits { workers, ..AgentLimits::default() };
            let of = Environment { kind: EnvironmentKind::Python(python), limits, ..Environment::default() };
            let mut found = 0;
            drop(agent(&of, &Net::default(), 0, 64).unwrap().limits(|limits| found = limits.workers));
            found
        };
        assert_eq!((workers("Computes", 32), workers("Waits", 32), workers("Waits", 4)), (2, 6, 4));
    }
}
