//! SkyPilot: a managed job, or a group of two if servers generate for it.

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};

use super::job::{AGAIN, Job, Needs, URLS, command, shell};
use super::settings::RENDEZVOUS;
use super::yaml;
use crate::command::End;

/// The task, or the job group. SkyPilot copies the folder that the command runs in.
pub fn task(job: &Job) -> Result<String> {
    let (of, sky) = (&job.settings, &job.settings.skypilot);
    let needs = [
        ("deploy.gpus", of.gpus, &sky.accelerators, "deploy.skypilot.accelerators"),
        (
            "deploy.engines.gpus",
            of.engines.count * of.engines.gpus,
            &sky.engine_accelerators,
            "deploy.skypilot.engine_accelerators",
        ),
    ];
    if let Some((key, _, _, other)) = needs.iter().find(|(_, gpus, named, _)| *gpus > 0 && named.is_none()) {
        bail!("{key} asks for GPUs, and {other} does not name them; give it a value such as \"H200:8\"");
    }
    let head = format!("# Written by `rollflow deploy skypilot`. Start it: sky jobs launch {}.sky.yaml\n", job.name);
    let trainer = trainer(job)?;
    if of.engines.count == 0 {
        return yaml::documents(&head, &[trainer]);
    }
    // The group ends with the trainer.
    let group = json!({"name": job.name, "execution": "parallel", "primary_tasks": ["trainer"], "termination_delay": "30s"});
    let engines = task_of(
        job,
        "engine",
        of.engines.count,
        resources(job, job.engine_needs(), sky.engine_accelerators.as_ref(), of.engines.image.as_ref()),
        format!("exec {}\n", command(&of.engines.command)?),
    );
    yaml::documents(&head, &[group, trainer, engines])
}

fn trainer(job: &Job) -> Result<Value> {
    let (of, sky, per_host) = (&job.settings, &job.settings.skypilot, job.ranks_per_host());
    let recipe = job.recipe.to_str().context("the recipe's path is not UTF-8")?;
    let run = if sky.volume.is_some() { std::path::Path::new("/runs").join(&job.name) } else { job.run() };
    let command = command(&job.trainer("rollflow", recipe, &run, &format!("127.0.0.1:{}", of.metrics)))?;
    let mut script = String::new();
    if of.engines.count > 0 {
        let urls = job.urls((0..of.engines.count).map(|at| format!("engine-{at}.{}", job.name)));
        script += &format!("export {URLS}={}\n", shell([urls.as_str()])?);
    }
    script += &match of.ranks {
        1 => format!("exec {command}\n"),
        ranks => format!(
            "export MASTER_ADDR=$(printf '%s\\n' \"$SKYPILOT_NODE_IPS\" | head -n 1) MASTER_PORT={RENDEZVOUS} WORLD_SIZE={ranks} LOCAL_WORLD_SIZE={per_host}\n\
             ranks=\n\
             for local in $(seq 0 {last}); do\n  \
               RANK=$((SKYPILOT_NODE_RANK * {per_host} + local)) LOCAL_RANK=$local {command} &\n  ranks=\"$ranks $!\"\n\
             done\n\
             # The ranks end together; the first that fails by itself says how.\n\
             code=0\n\
             for rank in $ranks; do\n  \
               wait \"$rank\" || {{ ended=$?; [ $code -ne 0 ] && [ $code -ne {by_another} ] || code=$ended; }}\n\
             done\n\
             exit $code\n",
            last = per_host - 1,
            by_another = End::BY_ANOTHER,
        ),
    };
    let name = if of.engines.count > 0 { "trainer" } else { &job.name };
    let Needs { cpus, memory, gpus } = job.rank_needs();
    let all = Needs { cpus: cpus * per_host, memory: memory * per_host, gpus: gpus * per_host };
    let mut resources = resources(job, all, sky.accelerators.as_ref(), None);
    resources["job_recovery"] = json!({"max_restarts_on_errors": 3, "recover_on_exit_codes": AGAIN});
    let mut task = task_of(job, name, of.hosts, resources, script);
    if let Some(volume) = &sky.volume {
        task["volumes"] = json!({"/runs": volume});
    }
    Ok(task)
}

fn resources(job: &Job, Needs { cpus, memory, .. }: Needs, accelerators: Option<&String>, image: Option<&String>) -> Value {
    let (of, sky) = (&job.settings, &job.settings.skypilot);
    let image = image.unwrap_or(&of.image);
    let mut resources =
        json!({"cpus": format!("{cpus}+"), "memory": format!("{memory}+"), "image_id": format!("docker:{image}")});
    let given = [("infra", &sky.infra.as_ref()), ("accelerators", &accelerators)];
    for (key, value) in given.into_iter().filter_map(|(key, value)| Some((key, (*value)?))) {
        resources[key] = json!(value);
    }
    if sky.spot {
        resources["use_spot"] = json!(true);
    }
    resources
}

fn task_of(job: &Job, name: &str, nodes: usize, resources: Value, run: String) -> Value {
    let env: Map<String, Value> = job.env().map(|(name, value)| (name.to_owned(), json!(value))).collect();
    let mut task = json!({"name": name, "num_nodes": nodes, "resources": resources, "workdir": ".", "run": run});
    if !env.is_empty() {
        task["envs"] = Value::Object(env);
    }
    if !job.secrets.is_empty() {
        // Without a value, `sky jobs launch --secret NAME` takes that of the shell.
        task["secrets"] = Value::Object(job.secrets.iter().map(|name| (name.clone(), Value::Null)).collect());
    }
    task
}
