//! A run of several processes: rank 0 runs the pipeline, and the others compute their shares of its
//! trainers' work.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use rollflow::flow::Interrupts;
use rollflow::observe::Console;
use rollflow::ranks::{Member, Order, Place, RankError};
use rollflow::recipe::{DeviceName, Plan, Timeline, model_fingerprints};
use rollflow::train::{Algorithm, AlgorithmKey, LocalConfig, follow};
use rollflow::util::causes::full_message;

use crate::assemble::{steps, trainers};
use crate::command::End;
use crate::registry::Registry;
use crate::reward_model;

/// Calls `lead` with a registry that shares trainers with the other ranks, on rank 0 or if there is
/// one process; follows rank 0 otherwise. A launcher's variables tell which
/// ([`Place::of_environment`]).
pub fn among_ranks(plan: &Plan, registry: &Registry, lead: impl FnOnce(&Registry) -> Result<()>) -> Result<()> {
    let Some(place) = Place::of_environment()? else { return lead(registry) };
    shareable(plan)?;
    let (own, rank) = (on_own_device(plan, &place), place.rank);
    let join = || Member::join(place, &plan.ranks, &plan.to_toml(), model_fingerprints(plan), gpu(&own));
    // The run's own console comes later, and on rank 0 alone.
    let member = tracing::subscriber::with_default(Console::quiet(), join);
    let member = member.map_err(|error| match error {
        RankError::Ended(_) => End::ByAnother(error.to_string()).into(),
        // Rank 0 ends with the code of the failure, or has not started.
        RankError::Apart(_) | RankError::NoStore(..) if rank > 0 => End::ByAnother(error.to_string()).into(),
        _ => anyhow::Error::from(error),
    })?;
    let result = match member.rank() {
        0 => lead(&registry.clone().of_ranks(&member)),
        _ => follow_all(&own, registry, &member),
    };
    member.end(result.as_ref().map_or_else(End::code, |()| 0));
    result.map_err(|error| match error.is::<End>() || !member.is_ended_by_another() {
        true => error,
        false => End::ByAnother(full_message(error.as_ref())).into(),
    })
}

/// The plan of this rank. Rank 0 computes on `model.device`. If that is a GPU, the other processes of
/// a host have the next ones.
fn on_own_device(plan: &Plan, place: &Place) -> Plan {
    let mut own = plan.clone();
    if let DeviceName::Cuda(first) = plan.model.device
        && place.rank > 0
    {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        own.model.device = DeviceName::Cuda(place.gpu(first, visible.as_deref()));
    }
    own
}

fn gpu(plan: &Plan) -> Option<usize> {
    if let DeviceName::Cuda(index) = plan.model.device { Some(index) } else { None }
}

/// Rejects what this version cannot share.
fn shareable(plan: &Plan) -> Result<()> {
    let gpus = plan.generate.devices.iter().find(|device| matches!(device, DeviceName::Cuda(_)));
    if let Some(device) = gpus {
        bail!(
            "generate.devices names {:?}: in a run of several ranks, rank 0 generates on model.device; leave the key out",
            device.word()
        );
    }
    let sections = [
        ("train", Some(&plan.train.optimization)),
        ("critic", plan.critic.as_ref().map(|critic| &critic.optimization)),
        ("sft", plan.sft.as_ref().map(|sft| &sft.optimization)),
        ("reward_model", plan.reward_model.as_ref().map(|of| &of.optimization)),
    ];
    let replicated = sections.iter().find(|(_, of)| of.is_some_and(|of| !of.replica_devices.is_empty()));
    ensure!(
        replicated.is_none(),
        "{}.replica_devices: a run of several ranks has one copy of the model in each; leave the key out",
        replicated.map_or("", |(section, _)| section)
    );
    Ok(())
}

/// Follows rank 0's trainers, one after another, or the critic next to the policy, until rank 0 ends.
fn follow_all(plan: &Plan, registry: &Registry, member: &Arc<Member>) -> Result<()> {
    // Rank 0 drains the run, then ends the others.
    let interrupts = Interrupts::listen().context("listening for Ctrl-C")?;
    member.drain_when(move || interrupts.pressed());
    std::thread::scope(|scope| {
        let mut followed = Vec::new();
        let code = loop {
            match member.order()? {
                Order::End(code) => break code,
                Order::Follow(name, number) => {
                    followed.push(scope.spawn(move || follow_one(plan, registry, member, &name, number)))
                }
            }
        };
        for thread in followed {
            thread.join().unwrap_or_else(|_| bail!("a trainer's thread failed; its message is above"))?;
        }
        match code {
            0 => Ok(()),
            End::AGAIN => Err(End::Said(End::AGAIN).into()),
            _ => Err(End::ByAnother("the run failed; rank 0 says why".to_owned()).into()),
        }
    })
}

fn follow_one(plan: &Plan, registry: &Registry, member: &Arc<Member>, name: &str, number: u64) -> Result<()> {
    let prepared = config(plan, registry, name).and_then(|config| Ok((config, Timeline::of(plan)?)));
    let (config, timeline) = prepared.inspect_err(|error| member.fail(&full_message(error.as_ref())))?;
    let made = |key| algorithm(&timeline, registry, key).map_err(|error| full_message(error.as_ref()));
    Ok(follow(config, member, number, &made)?)
}

/// Settings of the trainer `name`, which rank 0 makes of the same plan.
fn config(plan: &Plan, registry: &Registry, name: &str) -> Result<LocalConfig> {
    let Plan { model, checkpoint, .. } = plan;
    match (name, &plan.critic, &plan.sft, &plan.reward_model) {
        (trainers::POLICY, ..) => trainers::policy_config(plan, registry),
        (trainers::CRITIC, Some(critic), ..) => trainers::critic_config(plan, critic),
        (trainers::SUPERVISED, _, Some(sft), _) => trainers::supervised_config(sft, model, checkpoint),
        (trainers::REWARD_MODEL, .., Some(of)) => trainers::reward_model_config(of, model, checkpoint),
        _ => bail!("rank 0 has a trainer {name:?}, which this recipe does not"),
    }
}

/// The algorithm of a batch.
fn algorithm(timeline: &Timeline, registry: &Registry, key: AlgorithmKey) -> Result<Arc<Algorithm>> {
    let AlgorithmKey::Step(step) = key else { return Ok(steps::mixed_algorithm()) };
    let plan = timeline.at(step)?;
    let config = match plan.reward_model {
        Some(_) => reward_model::step_config(&plan)?,
        None => steps::step_config(&plan, registry)?,
    };
    config.algorithm.with_context(|| format!("step {step} has no algorithm"))
}
