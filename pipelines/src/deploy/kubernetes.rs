//! Kubernetes: an indexed Job with a pod per rank, and a StatefulSet of servers, each with a headless
//! service.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::job::{AGAIN, Job, Needs, URLS};
use super::settings::RENDEZVOUS;
use super::yaml;
use crate::command::End;

/// Folder of the recipe in a pod.
const RECIPES: &str = "/etc/rollflow";
/// Folder that a run works in: the volume.
const WORK: &str = "/work";

/// The manifest of all objects.
pub fn manifest(job: &Job) -> Result<String> {
    let mut objects = vec![recipes(job)?, trainer(job)?];
    if job.settings.ranks > 1 {
        objects.insert(1, service(job, &job.name, "rendezvous", RENDEZVOUS));
    }
    if job.settings.engines.count > 0 {
        let name = engines_name(job);
        objects.extend([service(job, &name, "engine", job.settings.engines.port), engines(job), policy(job)]);
    }
    let head = format!(
        "# Written by `rollflow deploy kubernetes`. Start it: kubectl apply -f {0}.yaml; end all of it: kubectl delete -f {0}.yaml\n",
        job.name
    );
    yaml::documents(&head, &objects)
}

fn engines_name(job: &Job) -> String {
    format!("{}-engine", job.name)
}

fn meta(job: &Job, name: &str) -> Value {
    let mut meta = json!({"name": name, "labels": labels(job, name)});
    if let Some(namespace) = &job.settings.kubernetes.namespace {
        meta["namespace"] = json!(namespace);
    }
    meta
}

/// Labels of the pods of `name`, which are the run's trainer or its engines.
fn labels(job: &Job, name: &str) -> Value {
    let component = if name == engines_name(job) { "engine" } else { "trainer" };
    json!({"app.kubernetes.io/name": "rollflow", "app.kubernetes.io/instance": job.name, "app.kubernetes.io/component": component})
}

/// The recipe and its includes, each under a number, since their paths are no keys.
fn recipes(job: &Job) -> Result<Value> {
    let key = |(at, (_, text)): (usize, &(_, String))| (format!("file-{at}"), json!(text));
    let data: serde_json::Map<String, Value> = job.files.iter().enumerate().map(key).collect();
    let size: usize = job.files.iter().map(|(_, text)| text.len()).sum();
    anyhow::ensure!(size < 1 << 20, "the recipe and its includes have {size} bytes; a ConfigMap holds less than 1 MiB");
    Ok(json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta(job, &job.name), "data": data}))
}

/// A headless service: a name of DNS for each pod, also before it is ready.
fn service(job: &Job, name: &str, port_name: &str, port: usize) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": meta(job, name),
        "spec": {
            "clusterIP": "None", "publishNotReadyAddresses": true, "selector": labels(job, name),
            "ports": [{"name": port_name, "port": port}],
        },
    })
}

fn trainer(job: &Job) -> Result<Value> {
    let (of, cluster) = (&job.settings, &job.settings.kubernetes);
    let recipe = Path::new(RECIPES).join(&job.recipe);
    let recipe = recipe.to_str().context("the recipe's path is not UTF-8")?;
    let words = job.trainer("rollflow", recipe, &job.run(), &job.metrics());
    let mut env = Vec::new();
    if of.ranks > 1 {
        let index = json!({"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/job-completion-index']"}});
        let text = |name: &str, value: String| json!({"name": name, "value": value});
        env.extend([
            json!({"name": "RANK", "valueFrom": index}),
            text("WORLD_SIZE", of.ranks.to_string()),
            text("LOCAL_RANK", "0".to_owned()),
            text("MASTER_ADDR", format!("{0}-0.{0}", job.name)),
            text("MASTER_PORT", RENDEZVOUS.to_string()),
        ]);
    }
    if of.engines.count > 0 {
        let name = engines_name(job);
        env.push(json!({"name": URLS, "value": job.urls((0..of.engines.count).map(|at| format!("{name}-{at}.{name}")))}));
    }
    let mut container = container(job, "trainer", &of.image, &words, job.rank_needs(), env);
    container["ports"] = json!([{"name": "metrics", "containerPort": of.metrics}]);
    mounts(&mut container, json!({"name": "recipe", "mountPath": RECIPES, "readOnly": true}));
    let item = |(at, (path, _)): (usize, &(std::path::PathBuf, String))| json!({"key": format!("file-{at}"), "path": path});
    let items: Vec<Value> = job.files.iter().enumerate().map(item).collect();
    let mut pod = pod(job, container);
    pod["restartPolicy"] = json!("Never");
    pod["terminationGracePeriodSeconds"] = json!(of.grace);
    if of.ranks > 1 {
        pod["subdomain"] = json!(job.name);
    }
    if let Some(volumes) = pod["volumes"].as_array_mut() {
        volumes.push(json!({"name": "recipe", "configMap": {"name": job.name, "items": items}}));
    }
    // Kubernetes rejects exit codes that are out of order.
    let uncounted: BTreeSet<u8> = AGAIN.into_iter().chain([End::BY_ANOTHER]).collect();
    let scraped = json!({"prometheus.io/scrape": "true", "prometheus.io/port": of.metrics.to_string()});
    let mut spec = json!({
        "completionMode": "Indexed", "completions": of.ranks, "parallelism": of.ranks, "backoffLimit": cluster.retries,
        // A pod that was drained or evicted resumes without being counted, and so does one that ends because of another,
        // which is counted itself. A wrong recipe is not tried again.
        "podFailurePolicy": {"rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", "onExitCodes": {"containerName": "trainer", "operator": "In", "values": uncounted}},
            {"action": "FailJob", "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [2]}},
        ]},
        "template": {"metadata": {"labels": labels(job, &job.name), "annotations": scraped}, "spec": pod},
    });
    if of.ranks > 1 {
        // Otherwise a pod of another rank that is evicted at the end starts again and waits for rank 0.
        spec["successPolicy"] = json!({"rules": [{"succeededIndexes": "0"}]});
    }
    if let Some(hours) = of.hours {
        spec["activeDeadlineSeconds"] = json!((hours * 3600.0).ceil() as u64);
    }
    Ok(json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta(job, &job.name), "spec": spec}))
}

fn engines(job: &Job) -> Value {
    let (of, name) = (&job.settings.engines, engines_name(job));
    let image = of.image.as_ref().unwrap_or(&job.settings.image);
    let mut container = container(job, "engine", image, &of.command, job.engine_needs(), Vec::new());
    container["ports"] = json!([{"name": "engine", "containerPort": of.port}]);
    container["readinessProbe"] = json!({"httpGet": {"path": "/health", "port": "engine"}, "periodSeconds": 5});
    json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta(job, &name),
        "spec": {
            "serviceName": name, "replicas": of.count, "podManagementPolicy": "Parallel", "selector": {"matchLabels": labels(job, &name)},
            "template": {"metadata": {"labels": labels(job, &name)}, "spec": pod(job, container)},
        },
    })
}

/// Lets only this run's trainer reach the servers: a client may replace their weights.
fn policy(job: &Job) -> Value {
    let name = engines_name(job);
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": meta(job, &name),
        "spec": {
            "podSelector": {"matchLabels": labels(job, &name)}, "policyTypes": ["Ingress"],
            "ingress": [{
                "from": [{"podSelector": {"matchLabels": labels(job, &job.name)}}],
                "ports": [{"protocol": "TCP", "port": job.settings.engines.port}],
            }],
        },
    })
}

fn container(job: &Job, name: &str, image: &str, words: &[String], needs: Needs, mut env: Vec<Value>) -> Value {
    // Kubernetes fills in `$(NAME)`; `$$` is a dollar.
    let literal = |text: &str| text.replace('$', "$$");
    env.extend([("HOME", "/tmp"), ("USER", "rollflow")].map(|(name, value)| json!({"name": name, "value": value})));
    env.extend(job.env().map(|(name, value)| json!({"name": name, "value": literal(value)})));
    let secret = &job.settings.kubernetes.secret;
    env.extend(
        job.secrets.iter().map(|name| json!({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}})),
    );
    let memory = format!("{}Gi", needs.memory);
    let mut limits = json!({"memory": memory});
    if needs.gpus > 0 {
        limits["nvidia.com/gpu"] = json!(needs.gpus);
    }
    json!({
        "name": name, "image": image, "command": words.iter().map(|word| literal(word)).collect::<Vec<_>>(), "workingDir": WORK,
        "env": env,
        "resources": {"requests": {"cpu": needs.cpus, "memory": memory}, "limits": limits},
        "securityContext": {"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "work", "mountPath": WORK}, {"name": "tmp", "mountPath": "/tmp"}],
    })
}

fn mounts(container: &mut Value, mount: Value) {
    if let Some(mounts) = container["volumeMounts"].as_array_mut() {
        mounts.push(mount);
    }
}

fn pod(job: &Job, container: Value) -> Value {
    let cluster = &job.settings.kubernetes;
    json!({
        "automountServiceAccountToken": false,
        "securityContext": {
            "runAsNonRoot": true, "runAsUser": cluster.user, "runAsGroup": cluster.user, "fsGroup": cluster.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": cluster.claim}},
            {"name": "tmp", "emptyDir": {}},
        ],
    })
}
