//! Docker compose: a service per rank and per server, on one machine.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::process::{getegid, geteuid};
use serde_json::{Map, Value, json};

use super::job::{Job, Needs, URLS};
use super::settings::RENDEZVOUS;
use super::yaml;

/// The compose file of a run that works in `folder` of the machine.
pub fn file(job: &Job, folder: &Path) -> Result<String> {
    let (of, folder) = (&job.settings, folder.to_str().context("the folder's path is not UTF-8")?);
    let recipe = job.recipe.to_str().context("the recipe's path is not UTF-8")?;
    let words = job.trainer("rollflow", recipe, &job.run(), &job.metrics());
    let engine = |at: usize| format!("engine-{at}");
    let mut services = Map::new();
    for rank in 0..of.ranks {
        let mut env = Map::new();
        if of.ranks > 1 {
            let place = [("RANK", rank), ("WORLD_SIZE", of.ranks), ("LOCAL_RANK", 0), ("MASTER_PORT", RENDEZVOUS)];
            env.extend(place.map(|(name, value)| (name.to_owned(), json!(value.to_string()))));
            env.insert("MASTER_ADDR".to_owned(), json!("trainer-0"));
        }
        if of.engines.count > 0 {
            env.insert(URLS.to_owned(), json!(job.urls((0..of.engines.count).map(engine))));
        }
        let gpus = rank * of.gpus..(rank + 1) * of.gpus;
        let mut service = service((job, folder), &of.image, &words, job.rank_needs(), gpus, env);
        // A run that ends with 2 has a wrong recipe, and ends so each time.
        service["restart"] = json!("on-failure:10");
        service["stop_grace_period"] = json!(format!("{}s", of.grace));
        if rank == 0 {
            service["ports"] = json!([format!("127.0.0.1:{0}:{0}", of.metrics)]);
        }
        services.insert(format!("trainer-{rank}"), service);
    }
    for at in 0..of.engines.count {
        let first = of.ranks * of.gpus + at * of.engines.gpus;
        let (of, image) = (&of.engines, of.engines.image.as_ref().unwrap_or(&of.image));
        let gpus = first..first + of.gpus;
        let mut service = service((job, folder), image, &of.command, job.engine_needs(), gpus, Map::new());
        service["restart"] = json!("unless-stopped");
        services.insert(engine(at), service);
    }
    let head = format!(
        "# Written by `rollflow deploy compose`. Start it: docker compose -f {0}.compose.yaml up -d; stop it: docker compose -f {0}.compose.yaml stop\n",
        job.name
    );
    yaml::documents(&head, &[json!({"name": job.name, "services": services})])
}

/// The service of a process of a job, which works in a folder, on the GPUs of these numbers.
fn service(
    (job, folder): (&Job, &str),
    image: &str,
    words: &[String],
    needs: Needs,
    gpus: Range<usize>,
    own: Map<String, Value>,
) -> Value {
    // Compose fills in `$NAME`; `$$` is a dollar.
    let literal = |text: &str| text.replace('$', "$$");
    let home = [("HOME", "/tmp"), ("USER", "rollflow")];
    let given = home.into_iter().chain(job.env()).map(|(name, value)| (name.to_owned(), json!(literal(value))));
    // Without a value, compose takes that of the shell that starts it.
    let secret = job.secrets.iter().map(|name| (name.clone(), Value::Null));
    let env: Map<String, Value> = given.chain(secret).chain(own).collect();
    let words: Vec<String> = words.iter().map(|word| literal(word)).collect();
    let mut service = json!({
        "image": image, "entrypoint": words, "working_dir": "/work", "environment": env,
        // Shells do not export `UID`, and the run writes into the folder of the user that deploys it.
        "user": format!("{}:{}", geteuid().as_raw(), getegid().as_raw()),
        "volumes": [{"type": "bind", "source": literal(folder), "target": "/work"}],
        // Docker's default is `noexec`. Triton loads the kernels that it compiles from the home folder.
        "tmpfs": ["/tmp:exec"], "read_only": true, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"],
        "cpus": needs.cpus as f64, "mem_limit": format!("{}g", needs.memory),
    });
    if !gpus.is_empty() {
        // A number of GPUs would be the first ones for every container.
        let ids: Vec<String> = gpus.map(|gpu| gpu.to_string()).collect();
        service["deploy"] = json!({"resources": {"reservations": {"devices": [
            {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]},
        ]}}});
    }
    service
}
