//! The pipeline `grpo` on a Tinker server: the same graph, of parts that the server has.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rollflow::data::Version;
use rollflow::engine::remote::sync::{SyncConfig, Update, WeightSyncManager};
use rollflow::engine::remote::{Fleet, FleetConfig, FleetHandle};
use rollflow::flow::{BoxedStage, Interrupts, Report, WeightsTx, weights};
use rollflow::model::Dtype;
use rollflow::prelude::*;
use rollflow::recipe::{Plan, Timeline};
use rollflow::stages::sync::RemoteSync;
use rollflow::train::tinker::{
    Encoding, LoraConfig, Patience, Reduction, SamplerWeights, TinkerBackend, TinkerConfig, TinkerEngine, TinkerExporter,
    TinkerService,
};

use crate::assemble::engines::{self, Engines};
use crate::assemble::policy::Reader;
use crate::assemble::references::Scorers;
use crate::assemble::rewards::Scoring;
use crate::assemble::servers::Startup;
use crate::assemble::{data, evaluation, secrets, steps, trainers};
use crate::components::{Components, generator_of, log_every, pending};
use crate::grpo;
use crate::registry::Registry;
use crate::run::folder::RunFolder;
use crate::run::resume::ResumePoint;

/// Longest time of a completion, which comes in one piece, after a server may have compiled.
const STALL: Duration = Duration::from_secs(900);

/// Runs on the server of `[trainer]`. `from` resumes an interrupted run.
pub fn run(plan: &Plan, registry: &Registry, run: &RunFolder, from: Option<&ResumePoint>) -> Result<Report> {
    let interrupts = Interrupts::listen().context("listening for Ctrl-C")?;
    let reader = Reader::served(&plan.model, &plan.chat)?;
    run.say(&format!("trying the operations of {}", plan.trainer.url.as_deref().unwrap_or_default()));
    let service = open(plan, Duration::MAX)?;
    for line in described(plan, &service)? {
        run.say(&line);
    }
    let startup = Startup { report: &|line| run.say(line), interrupted: &|| interrupts.pressed() };
    let sampling = match plan.engine.is_remote() {
        true => Sampling::by_engines(plan, reader, &service, &run.path().join("engine"), startup)?,
        false => Some(Sampling::by_server(plan, reader, &service)),
    };
    let Some(sampling) = sampling else { return Ok(Report::before(&plan.name)) };
    grpo::train(plan, components(plan, registry, &service, sampling, from)?, run, from, &interrupts)
}

/// Time for which `rollflow check` waits for a server that does not answer.
pub const A_MOMENT: Duration = Duration::from_secs(5);

/// Opens a session with the server of `[trainer]`, and tries its operations. Waits for an unreachable
/// server for `trainer.lost_timeout`, at most `wait`.
pub fn open(plan: &Plan, wait: Duration) -> Result<TinkerService> {
    let place = &plan.trainer;
    let url = place.url.as_deref().context("the recipe has no trainer.url")?;
    let key = match &place.key_env {
        None => None,
        Some(name) => {
            Some(std::env::var(name).with_context(|| format!("the environment has no {name}, which trainer.key_env names"))?)
        }
    };
    let patience = Patience {
        operation: engines::seconds(place.timeout),
        unreachable: engines::seconds(place.lost_timeout).min(wait),
        ..Patience::default()
    };
    let endpoint = secrets::endpoint(url, None, &plan.net)?;
    let opened = TinkerService::open(endpoint, key.as_deref(), place.base_model.as_deref(), lora(plan)?, patience);
    opened.context("trying the server of [trainer]")
}

/// The adapters of `[lora]`; without it, all weights are trained.
fn lora(plan: &Plan) -> Result<LoraConfig> {
    let seed = Some(plan.seed & 0x7fff_ffff);
    let Some(lora) = &plan.lora else { return Ok(LoraConfig { seed, ..LoraConfig::WHOLE }) };
    let (train_attn, train_mlp) = lora.groups().context("lora.targets")?;
    Ok(LoraConfig { rank: lora.rank, seed, train_unembed: false, train_mlp, train_attn })
}

/// What the server does, and what that means for the run.
///
/// # Errors
/// The run needs what the server does not do.
pub fn described(plan: &Plan, service: &TinkerService) -> Result<Vec<String>> {
    let (found, name) = (service.dialect(), service.name());
    if found.sampling_disturbs && plan.flow.max_staleness > 0 && !plan.engine.is_remote() {
        bail!(
            "{name} samples from the adapter that it trains: sampling from older weights changes the trained ones, so that no run can \
             generate while it trains; set flow.max_staleness = 0, or sample on servers of your own ([engine])"
        );
    }
    let mut lines = vec![format!(
        "{name}: model {}, {}, losses as a {}, repeated requests {}, gradient's norm {}",
        service.base_model(),
        match found.encoding {
            Encoding::Protobuf => "protobuf",
            Encoding::Json => "JSON",
        },
        match found.reduction {
            Reduction::Sum => "sum",
            Reduction::Mean => "mean",
        },
        if found.recognises_repeats { "recognised" } else { "not recognised" },
        if found.reports_norm { "reported" } else { "unknown" },
    )];
    if !found.built_in.is_empty() {
        lines.push(format!("{name}: has built in {}, which are computed in one pass", found.built_in.join(" and ")));
    }
    let max = plan.train.optimization.max_grad_norm;
    if !found.clips && max.is_finite() {
        lines
            .push(format!("warning: {name} clips no gradient, so that train.max_grad_norm = {max} has no effect; set it to inf"));
    }
    Ok(lines)
}

/// Where completions are sampled, and how it gets versions.
struct Sampling {
    /// Reads prompts that fit.
    reader: Reader,
    generator: Box<dyn Fn() -> Generator<Fleet>>,
    sync: Box<dyn FnOnce(WeightsTx<()>) -> RemoteSync<SamplerWeights>>,
}

impl Sampling {
    /// The server that trains.
    fn by_server(plan: &Plan, mut reader: Reader, service: &TinkerService) -> Self {
        reader.config.max_positions = service.context().unwrap_or(usize::MAX).min(reader.config.max_positions);
        let engine = TinkerEngine::new(service, reader.tokenizer.eos_token_ids().iter().copied());
        let fleet = FleetHandle::new(vec![Arc::new(engine)]);
        let config = FleetConfig { stall_timeout: STALL, vocabulary: reader.config.vocab_size, ..FleetConfig::default() };
        let (handle, tokenizer) = (fleet.clone(), reader.tokenizer.clone());
        let manager = WeightSyncManager { fleet, config: SyncConfig::default(), max_lag: plan.flow.max_staleness };
        let patience = engines::seconds(plan.trainer.lost_timeout);
        // Each version is a sampling session, whose name takes the place of a folder.
        let export = |version: Version, weights: &Arc<SamplerWeights>| -> Result<Update, std::convert::Infallible> {
            Ok(Update::unprobed(version, PathBuf::from(weights.session.as_deref().unwrap_or_default())))
        };
        Sampling {
            generator: Box::new(move || Generator::remote(&handle, config.clone(), &tokenizer)),
            sync: Box::new(move |to| RemoteSync::new(manager, export, to).patience(patience)),
            reader,
        }
    }

    /// The servers of `[engine]`, which load each version as an adapter. `None` if interrupted.
    fn by_engines(plan: &Plan, reader: Reader, service: &TinkerService, folder: &Path, startup: Startup) -> Result<Option<Self>> {
        let folder = engines::servers_folder(&plan.engine, folder)?;
        // To be scored, a version of such a server would take the place of the one that is trained.
        let texts = if service.dialect().sampling_disturbs { Vec::new() } else { engines::probes(plan, &reader)? };
        if texts.is_empty() {
            (startup.report)(&format!("warning: {} can't score its versions, so that [engine] is not verified", service.name()));
        }
        let tolerance = plan.engine.tolerance.unwrap_or(Dtype::Bf16.server_agreement());
        let exporter = TinkerExporter::new(service, &folder.join("versions"), plan.engine.keep, texts, tolerance);
        let exporter = exporter.with_context(|| format!("making {} (engine.folder)", folder.display()))?;
        let Some(engines) = Engines::of_tinker(plan, exporter, startup)? else { return Ok(None) };
        let reader = engines.reader(reader);
        let engines = Arc::new(engines);
        let (generating, of) = (engines.clone(), reader.clone());
        Ok(Some(Sampling {
            generator: Box::new(move || generating.generator(&of)),
            sync: Box::new(move |to| engines.sync(to)),
            reader,
        }))
    }
}

fn components(
    plan: &Plan,
    registry: &Registry,
    service: &TinkerService,
    sampling: Sampling,
    from: Option<&ResumePoint>,
) -> Result<Components<TinkerBackend>> {
    let train = &plan.train;
    let Sampling { reader, generator, sync } = sampling;
    let (publish, synced) = weights();
    let (mut sync, mut evaluator) = (sync(publish), None);
    if let Some(eval) = evaluation::during(plan) {
        let hold = evaluation::hold(plan, eval);
        sync = sync.hold(&hold);
        evaluator = Some(pending(evaluation::evaluator_of_servers(plan, eval, registry, &reader, generator(), &hold)?));
    }
    let distill = plan.teacher.as_ref().map(|teacher| &teacher.distill);
    let schedule = steps::schedule(&train.optimization, train.lr, plan.policy_steps(), train.updates_a_step())?;
    let optimization = &train.optimization;
    let config = TinkerConfig {
        loss: registry.loss_of(train, distill)?,
        off_policy: train.off_policy(),
        adamw: trainers::adamw(optimization),
        schedule,
        max_grad_norm: Some(optimization.max_grad_norm),
        non_finite: optimization.on_nonfinite,
        downloads: plan.engine.is_remote(),
    };
    let timeline = Timeline::of(plan)?;
    Ok(Components {
        prompts: data::training_prompts(plan, &reader, from)?,
        generator: BoxedStage::new(generator_of(plan, &timeline, &reader, generator().weights(synced))?),
        reward: Scoring::of(plan, registry)?,
        scorers: Scorers::served(plan, &reader)?,
        backend: TinkerBackend::new(service, lora(plan)?, config).context("creating the model on the server")?,
        critic: None,
        mixture: None,
        sleep: None,
        sync: BoxedStage::new(sync.log_every(log_every(&timeline))),
        evaluator,
        registry: registry.clone(),
        timeline,
    })
}
