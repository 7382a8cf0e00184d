//! `[environment]`: what answers the model, and what a small model may imitate before it tries for itself.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use rollflow::data::chat::{ChatInput, tokenize_conversation};
use rollflow::data::{ChatMessage, Pair};
use rollflow::env::proxy::{AgentProxy, Launch, ProxyConfig, no_calls};
use rollflow::env::{
    CalculatorEnvironment, Corpus, Environment, GuessEnvironment, MakeEnvironment, PythonEnvironment, SearchEnvironment,
    ServedConfig, ServedEnvironment, ToolCall, ToolResult, ToolSpec, calculate,
};
use rollflow::prelude::*;
use rollflow::recipe::Plan;
use rollflow::recipe::environment::EnvironmentKind;
use rollflow::sandbox::CodeJudge;
use rollflow::stages::generate::agent::Agent;
use tracing::info;

use crate::assemble::{conversations, rewards, secrets};

/// The environment and its limits, for a model that reads at most `positions` tokens.
pub fn agent(plan: &Plan, positions: usize) -> Result<Option<Agent>> {
    let Some(of) = &plan.environment else { return Ok(None) };
    let make: MakeEnvironment = match &of.kind {
        EnvironmentKind::Calculator(_) => Arc::new(|| Box::new(CalculatorEnvironment::new())),
        EnvironmentKind::Game(game) => {
            let highest = game.highest;
            Arc::new(move || Box::new(GuessEnvironment::new(highest)))
        }
        EnvironmentKind::Search(search) => {
            let corpus = Corpus::lines(&search.corpus)
                .with_context(|| format!("environment.corpus: reading {}", search.corpus.display()))?;
            let (corpus, results) = (Arc::new(corpus), search.results);
            Arc::new(move || Box::new(SearchEnvironment::new(corpus.clone(), results)))
        }
        EnvironmentKind::Python(python) => {
            PythonEnvironment::maker(Arc::new(CodeJudge::new(rewards::sandbox(python)?)), &python.tests)
        }
        EnvironmentKind::Http(served) => {
            let mut config = ServedConfig::new(&served.url);
            config.endpoint = secrets::endpoint(&served.url, served.token_env.as_ref(), &plan.net)?;
            config.retry = served.retry.policy(served.retries)?;
            config.concurrency = served.concurrency;
            ServedEnvironment::maker(config)?
        }
        EnvironmentKind::Agent(elsewhere) => {
            let launch = match &elsewhere.url {
                Some(url) => Launch::post(secrets::endpoint(url, None, &plan.net)?)?,
                None => Launch::Command(elsewhere.command.clone()),
            };
            let parser = Arc::new(of.parser);
            let allowed_hosts = plan.net.allowed_hosts.clone();
            let model = elsewhere.model.clone();
            let proxy = AgentProxy::start(ProxyConfig { parser, model, allowed_hosts, ..ProxyConfig::new(launch) })?;
            info!("Agents find the model at http://{}", proxy.address());
            proxy.maker()
        }
    };
    let agent = match &of.kind {
        // The proxy reads calls, and hands them to whom they are for.
        EnvironmentKind::Agent(_) => Agent::by(make).parser(no_calls),
        _ => Agent::by(make).parser(of.parser),
    };
    let agent = agent
        .max_turns(of.max_turns)
        .max_tokens(of.max_tokens.unwrap_or(positions).min(positions))
        .step_timeout(Duration::try_from_secs_f64(of.step_timeout)?)
        .retries(of.replays)
        .workers(of.workers)
        .seed(plan.seed);
    let agent = match of.max_tool_calls {
        Some(calls) => agent.max_tool_calls(calls as u64),
        None => agent,
    };
    Ok(Some(match of.max_time {
        Some(time) => agent.max_time(Duration::try_from_secs_f64(time)?),
        None => agent,
    }))
}

/// Whether its environment shows how a task of its is done.
pub fn demonstrates(plan: &Plan) -> bool {
    plan.environment.as_ref().is_some_and(|of| matches!(of.kind, EnvironmentKind::Calculator(_)))
}

/// Sums, worked out with the calculator as the environment would have it, where the recipe has a calculator: what `[sft]` imitates then.
pub fn demonstrations(plan: &Plan, pairs: &[Pair], tokenizer: &Tokenizer) -> Result<Option<Vec<Sample>>> {
    let Some(of) = plan.environment.as_ref().filter(|_| demonstrates(plan)) else { return Ok(None) };
    let tools: Vec<_> = CalculatorEnvironment::new().tools().iter().map(ToolSpec::to_json).collect();
    let sample = |pair: &Pair| -> Result<Sample> {
        let asked = pair.prompt.render();
        let expression = asked.trim_end_matches('=');
        let value = calculate(expression).map_err(|problem| anyhow::anyhow!("{expression}: {problem}"))?;
        let call =
            |tool: &str, key: &str, value: &str| ToolCall::new(tool, [(key.to_owned(), value.into())].into_iter().collect());
        let calculation = call("calculator", "expression", expression);
        let says = |call: &ToolCall| ChatMessage::new("assistant", of.parser.write(call));
        let result = ToolResult::of(&calculation, &*value).message();
        let answer = call("complete_task", "answer", &value);
        let turns = [ChatMessage::new("user", asked.clone()), says(&calculation), result, says(&answer)];
        let turns = conversations::opened(&plan.chat, turns.into());
        let tokens = tokenize_conversation(&ChatInput::new(&turns).tools(&tools), tokenizer)?;
        Ok(tokens.sample(&turns))
    };
    pairs.iter().map(sample).collect::<Result<_>>().map(Some)
}
