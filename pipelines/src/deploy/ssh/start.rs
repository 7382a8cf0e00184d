//! Starting the processes of a run, each in a detached session that outlives the connection.
//!
//! A process has a folder `runs/NAME` there: `work` (the recipe and its files), `run` (the run folder),
//! `start`, `log`, `pid`, `exit` and `lock`. The lock is held for as long as the process lives.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rollflow::util::causes::full_message;

use super::super::job::{Job, URLS, command, inside, shell};
use super::bundle::Bundle;
use super::host::Host;

/// Line that each start of a process appends to its log.
pub const STARTED: &str = "rollflow deploy: started";

/// One process on one host.
pub struct Task {
    /// Name of the process: the run's for rank 0.
    pub name: String,
    /// Host, by the name that ssh knows.
    pub host: String,
    /// Script that runs it.
    pub script: String,
    /// If true, the process is a server, which outlives the ranks.
    pub is_engine: bool,
}

/// The processes of a run whose ranks are on `hosts`, in turn. `address` resolves a host to the name
/// that other hosts reach it by.
pub fn tasks(job: &Job, hosts: &[&str], address: impl Fn(&str) -> Result<String>) -> Result<Vec<Task>> {
    let of = &job.settings;
    let (ranks, places) = (of.ranks, &of.ssh.engine_hosts);
    let per_host = ranks / hosts.len();
    ensure!(
        ranks % hosts.len() == 0,
        "deploy.ranks is {ranks} for {} hosts: each has as many ranks; choose a multiple",
        hosts.len()
    );
    ensure!(
        hosts.len() == 1 || of.runs.is_absolute(),
        "ranks on several hosts share the run folder; set deploy.runs to an absolute path that all mount"
    );
    ensure!(
        of.engines.count == 0 || !places.is_empty(),
        "deploy.engines.count is {}; name their hosts in deploy.ssh.engine_hosts",
        of.engines.count
    );
    let run = if of.runs.is_absolute() { job.run() } else { PathBuf::from("../run") };
    let recipe = job.recipe.to_str().context("the recipe's path is not UTF-8")?;
    let words = job.trainer("rollflow", recipe, &run, "127.0.0.1:0");
    let place = |at: usize| places[at % places.len()].as_str();
    let mut shared = Vec::new();
    if of.engines.count > 0 {
        let addresses = (0..of.engines.count).map(|at| address(place(at))).collect::<Result<Vec<_>>>()?;
        let distinct: std::collections::BTreeSet<_> = addresses.iter().collect();
        ensure!(
            distinct.len() == addresses.len(),
            "two engines are on one host, and all listen on port {}; name a host for each",
            of.engines.port
        );
        shared.push((URLS, job.urls(addresses)));
    }
    if ranks > 1 {
        let first = if hosts.len() == 1 { "127.0.0.1".to_owned() } else { address(hosts[0])? };
        shared.extend([("WORLD_SIZE", ranks.to_string()), ("LOCAL_WORLD_SIZE", per_host.to_string())]);
        shared.extend([("MASTER_ADDR", first), ("MASTER_PORT", of.ssh.port.to_string())]);
    }
    let mut tasks = Vec::new();
    for at in 0..of.engines.count {
        let name = format!("{}-engine-{at}", job.name);
        let script = script(job, &of.engines.command, &[], None)?;
        tasks.push(Task { name, host: place(at).to_owned(), script, is_engine: true });
    }
    for rank in 0..ranks {
        let mut env = shared.clone();
        if ranks > 1 {
            env.extend([("RANK", rank.to_string()), ("LOCAL_RANK", (rank % per_host).to_string())]);
        }
        let name = if rank == 0 { job.name.clone() } else { format!("{}-rank-{rank}", job.name) };
        let script = script(job, &words, &env, Some(&run))?;
        tasks.push(Task { name, host: hosts[rank / per_host].to_owned(), script, is_engine: false });
    }
    Ok(tasks)
}

/// `start`: runs `words` and keeps how they ended.
fn script(job: &Job, words: &[String], env: &[(&str, String)], run: Option<&Path>) -> Result<String> {
    let mut text = "#!/bin/sh\n# Written by `rollflow deploy ssh`.\ncd -- \"$(dirname -- \"$0\")\" || exit 1\n\
                    exec 9> lock\nflock -n 9 || exit 1\n"
        .to_owned();
    text += &format!("echo '{STARTED}'\n");
    if let Some(run) = run.filter(|run| run.is_absolute()) {
        text += &format!("ln -sfn -- {} run\n", shell([run.to_str().context("deploy.runs is not UTF-8")?])?);
    }
    text += "cd work || exit 1\nexport PATH=\"$PWD/../program/bin:$PATH\"\n";
    for (name, value) in job.env().chain(env.iter().map(|(name, value)| (*name, value.as_str()))) {
        text += &format!("export {name}={}\n", shell([value])?);
    }
    text += &format!(
        "{} 9>&- &\necho $! > ../pid.new && mv ../pid.new ../pid\nwait $!\necho $? > ../exit.new && mv ../exit.new ../exit\n",
        command(words)?
    );
    Ok(text)
}

/// Values of the variables with secrets, as a script that sets them. They reach the host through ssh's
/// standard input and are in no file.
fn secrets(job: &Job) -> Result<String> {
    let each = job.secrets.iter().map(|name| {
        let value = std::env::var(name).with_context(|| format!("the environment has no {name}, which the run needs"))?;
        Ok(format!("export {name}={}\n", shell([value.as_str()])?))
    });
    each.collect()
}

/// Copies what the hosts lack, and then starts `tasks` there. An engine that runs already is kept.
///
/// # Errors
/// A rank that runs already, a host that cannot be reached or lacks tools, and files that cannot be sent:
/// then nothing was started. If a process does not start, the error has the commands that stop the ranks
/// that were started before it.
pub fn start(job: &Job, tasks: &[Task], say: impl Fn(&str)) -> Result<()> {
    let (secrets, mut prepared) = (secrets(job)?, Vec::new());
    for task in tasks {
        let host = Host::of(&task.host, &job.settings.ssh)?;
        if prepare(job, &host, task, &say)? {
            prepared.push((host, task));
        }
    }
    for (at, (host, task)) in prepared.iter().enumerate() {
        launch(host, task, &secrets).map_err(|error| {
            let ranks = prepared[..at].iter().filter(|(_, task)| !task.is_engine);
            let stops =
                ranks.map(|(host, task)| format!("\n  rollflow deploy stop {}:{}", host.name, task.name)).collect::<String>();
            match stops.is_empty() {
                true => error,
                false => {
                    anyhow!("{}\nranks that this command started wait for it; stop them:{stops}", full_message(error.as_ref()))
                }
            }
        })?;
        say(&format!("started {}:{}", host.name, task.name));
    }
    Ok(())
}

/// Copies what `host` lacks for `task`. Returns false if the task is an engine that runs already.
fn prepare(job: &Job, host: &Host<'_>, task: &Task, say: impl Fn(&str)) -> Result<bool> {
    let name = &task.name;
    let lacking = "for tool in tar sha256sum setsid flock tail mktemp; do command -v $tool > /dev/null || echo $tool; done\n";
    let state = host.ask(
        &format!("{lacking}uname -sm >&2\nif [ -e runs/{name}/lock ] && ! flock -n runs/{name}/lock true; then echo runs; fi"),
        "",
    )?;
    match state.lines().collect::<Vec<_>>()[..] {
        [] => {}
        ["runs"] if task.is_engine => {
            say(&format!(
                "{0}:{name} runs already and is kept; to replace it, first: rollflow deploy stop {0}:{name}",
                host.name
            ));
            return Ok(false);
        }
        ["runs"] => bail!(
            "{name} runs on {0} already; look at it: rollflow deploy status {0}:{name}, or stop it: rollflow deploy stop {0}:{name}",
            host.name
        ),
        ref tools => bail!("{} lacks {}; install GNU coreutils, tar and util-linux there", host.name, tools.join(", ")),
    }
    let mut program = String::new();
    if job.settings.program.is_none() {
        let own = Bundle::program()?;
        own.send(host, &say)?;
        program = format!("mkdir -p program/bin\nln -f ../../{}/{} program/bin/rollflow\n", own.folder, own.first());
        if let Some(libraries) = Bundle::libraries(job.settings.gpus > 0)? {
            libraries.send(host, &say)?;
            // The program looks for its libraries in `../lib`.
            program += &format!("ln -sfn ../../../{} program/lib\n", libraries.folder);
        }
        program += "program/bin/rollflow --version > /dev/null\n";
    }
    let own = job.files.iter().map(|(path, _)| Ok(path.clone()));
    let given = job.settings.files.iter().map(|path| inside(path));
    let files = own.chain(given).map(|path| Ok((std::env::current_dir()?, path?))).collect::<Result<Vec<_>>>()?;
    let unpack = format!(
        "set -e\nmkdir -p runs/{name}\ncd runs/{name}\nrm -rf work.new\nmkdir work.new\ntar -x -f - -C work.new\n\
         rm -rf work program\nmv work.new work\n{program}"
    );
    host.send(&files, &unpack).with_context(|| format!("sending the files of {name}"))?;
    let write =
        format!("cat > runs/{name}/start.new && chmod 700 runs/{name}/start.new && mv runs/{name}/start.new runs/{name}/start");
    host.ask(&write, &task.script)?;
    Ok(true)
}

/// Starts `task` on `host`, which has its files.
fn launch(host: &Host<'_>, Task { name, .. }: &Task, secrets: &str) -> Result<()> {
    let launch = format!(
        "cd runs/{name} || exit 1\neval \"$(cat)\"\nrm -f pid exit\nsetsid ./start < /dev/null >> log 2>&1 &\n\
         tries=0\nwhile [ ! -s pid ] && [ ! -s exit ] && [ $tries -lt 200 ]; do sleep 0.1; tries=$((tries + 1)); done\n\
         [ -s pid ] || [ -s exit ] || {{ echo 'it did not start' >&2; tail -n 5 log >&2; exit 1; }}"
    );
    let failed = || format!("{}:{name} did not start", host.name);
    host.ask(&launch, secrets).map(drop).with_context(failed)
}
