//! Slurm: a batch script that starts or resumes a run, and goes back into the queue when it is drained.

use std::path::Path;

use anyhow::{Context, Result};

use super::job::{AGAIN, Job, URLS, command, shell};

/// The script of `sbatch`, for a run that works in `folder`, which all hosts share. `program` is
/// rollflow there.
pub fn script(job: &Job, folder: &Path, program: &str) -> Result<String> {
    let of = &job.settings;
    let (engines, per_host) = (&of.engines, job.ranks_per_host());
    let nodes = of.hosts + engines.count;
    let folder = folder.to_str().context("the folder's path is not UTF-8")?;
    // Nodes of a job are alike, so each has what the larger of both needs.
    let larger = |rank: usize, engine: usize| (rank * per_host).max(if engines.count > 0 { engine } else { 0 });
    let memory = larger(of.memory, engines.memory);
    let cpus = if engines.count > 0 { of.cpus.max(engines.cpus.div_ceil(per_host)) } else { of.cpus };
    let mut options = vec![
        format!("--job-name={}", job.name),
        format!("--nodes={nodes}"),
        format!("--ntasks-per-node={per_host}"),
        format!("--cpus-per-task={cpus}"),
        format!("--mem={memory}G"),
        format!("--output={}-%j.log", job.name),
        "--open-mode=append".to_owned(),
        "--requeue".to_owned(),
        format!("--signal=B:TERM@{}", of.grace),
    ];
    let gpus = larger(of.gpus, engines.gpus);
    options.extend((gpus > 0).then(|| format!("--gpus-per-node={gpus}")));
    options.extend(of.hours.map(|hours| format!("--time={}", (hours * 60.0).ceil())));
    options.extend(of.slurm.partition.iter().map(|name| format!("--partition={name}")));
    options.extend(of.slurm.account.iter().map(|name| format!("--account={name}")));
    options.extend(of.slurm.flags.iter().cloned());

    let mut text = format!("#!/bin/bash\n# Written by `rollflow deploy slurm`. Submit it: sbatch {}.sbatch\n", job.name);
    options.iter().for_each(|option| text += &format!("#SBATCH {option}\n"));
    // `srun` kills its tasks when it gets SIGTERM, so Slurm's controller signals them.
    text += "\n# The signal reaches this script alone. It drains the trainer; engines serve until the trainer has ended.\n\
             signalled=\n\
             drain() {\n  signalled=1\n  squeue --noheader --steps --jobs=\"$SLURM_JOB_ID\" --format=\"%i %j\" | \
             sed -n \"s/ trainer$//p\" | xargs -r scancel --ctld --signal=TERM\n}\n\
             trap drain TERM\n";
    text += &format!("\ncd {} || exit 2\n", shell([folder])?);
    for (name, value) in job.env() {
        text += &format!("export {name}={}\n", shell([value])?);
    }
    of.slurm.setup.iter().for_each(|line| text += &format!("{line}\n"));
    if of.ranks > 1 || engines.count > 0 {
        text += "mapfile -t hosts < <(scontrol show hostnames \"$SLURM_JOB_NODELIST\")\n";
    }
    if of.ranks > 1 {
        text += "# `srun` numbers the ranks; they meet here.\n\
                 export MASTER_ADDR=${hosts[0]} MASTER_PORT=$((20000 + SLURM_JOB_ID % 40000))\n";
    }
    if engines.count > 0 {
        let (first, count, port) = (of.hosts, engines.count, engines.port);
        text += &format!(
            "\nurls=\nfor host in \"${{hosts[@]:{first}:{count}}}\"; do urls+=\"${{urls:+, }}\\\"http://$host:{port}\\\"\"; done\n\
             export {URLS}=\"[$urls]\"\n\
             srun --nodes={count} --ntasks={count} --ntasks-per-node=1 --relative={first} --kill-on-bad-exit=0 \\\n  {} &\n",
            command(&engines.command)?
        );
    }
    let recipe = job.recipe.to_str().context("the recipe's path is not UTF-8")?;
    let trainer = job.trainer(program, recipe, &job.run(), "127.0.0.1:0");
    let place = if engines.count > 0 { " --relative=0" } else { "" };
    // The first rank that ends drained must not end the others: ranks end each other. `srun` returns the highest exit code.
    let again: Vec<String> = AGAIN.iter().map(u8::to_string).collect();
    let drained = AGAIN[0];
    text += &format!(
        "\n# The signal came before there was a trainer.\n\
         [ -z \"$signalled\" ] || {{ scontrol requeue \"$SLURM_JOB_ID\"; exit {drained}; }}\n\
         srun --job-name=trainer --nodes={} --ntasks={}{place} --cpus-per-task={cpus} --kill-on-bad-exit=0 --wait=60 \\\n  {} &\ntrainer=$!\n\
         # A signal interrupts `wait`.\n\
         while kill -0 \"$trainer\" 2> /dev/null; do wait \"$trainer\"; done\n\
         wait \"$trainer\"; code=$?\n\
         case $code in {}) scontrol requeue \"$SLURM_JOB_ID\" ;; esac\nexit \"$code\"\n",
        of.hosts,
        of.ranks,
        command(&trainer)?,
        again.join("|"),
    );
    Ok(text)
}
