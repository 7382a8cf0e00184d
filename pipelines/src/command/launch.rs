//! `rollflow launch`.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use rollflow::flow::Interrupts;
use rollflow::ranks::Rendezvous;
use rustix::process::{Pid, Signal, kill_process};

use super::plans::load;
use super::run::Run;
use super::{End, out};
use crate::registry::Registry;

/// Time between two looks at the processes.
const LOOK: Duration = Duration::from_millis(50);

/// Time for the other processes to end after one has ended.
const GOODBYE: Duration = Duration::from_secs(20);

/// Run a recipe in several processes of this host that share its training. Each line of output begins
/// with the rank that wrote it. When one process fails, all end.
#[derive(Args)]
#[command(after_help = "\
Examples:\n\
\x20 rollflow launch --ranks 2 pipelines/recipes/grpo.toml\n\
\x20 rollflow launch --ranks 4 mine.toml --set train.threads=1 --out runs/mine --resume\n\n\
Several hosts: torchrun, srun or mpirun start `rollflow run` itself, one process per rank.")]
pub struct Launch {
    /// Number of processes.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    #[command(flatten)]
    run: Run,
}

/// A process of the run.
struct Process {
    child: Child,
    ended: Option<ExitStatus>,
    readers: [JoinHandle<()>; 2],
}

impl Launch {
    pub fn run(self, registry: &Registry) -> Result<()> {
        // So that errors of the recipe are printed once, not by each rank.
        let plan = load(&self.run.recipe(), registry)?;
        plan.ranks.mesh(self.ranks as usize)?;
        let interrupts = Interrupts::listen().context("listening for Ctrl-C")?;
        let rendezvous = Rendezvous::serve()?;
        let mut processes = Vec::new();
        for rank in 0..self.ranks {
            match self.start(rank, rendezvous.port()) {
                Ok(process) => processes.push(process),
                Err(error) => {
                    end_all(&mut processes);
                    return Err(error.context(format!("starting rank {rank}")));
                }
            }
        }
        let code = watch(&mut processes, &rendezvous, &interrupts);
        for process in processes {
            process.readers.into_iter().for_each(|reader| drop(reader.join()));
        }
        if code == 0 { Ok(()) } else { Err(End::Said(code).into()) }
    }

    fn start(&self, rank: u32, port: u16) -> Result<Process> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("run").args(self.run.arguments()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string()).env("WORLD_SIZE", self.ranks.to_string());
        command.env("LOCAL_WORLD_SIZE", self.ranks.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.env("TORCHELASTIC_USE_AGENT_STORE", "True");
        // Ctrl-C reaches this process alone, which passes it on to rank 0.
        command.process_group(0);
        let mut child = command.spawn()?;
        let (output, errors) = (child.stdout.take(), child.stderr.take());
        let shown = reader(rank, output, |line| drop(out::text(line)))?;
        let complained = reader(rank, errors, |line| out::complain(line.trim_end()))?;
        Ok(Process { child, ended: None, readers: [shown, complained] })
    }
}

/// Prints a stream's lines in a thread, each with its rank.
fn reader(rank: u32, from: Option<impl Read + Send + 'static>, print: impl Fn(&str) + Send + 'static) -> Result<JoinHandle<()>> {
    let body = move || {
        let lines = from.into_iter().flat_map(|from| BufReader::new(from).split(b'\n'));
        for line in lines.map_while(Result::ok) {
            print(&format!("[rank {rank}] {}\n", String::from_utf8_lossy(&line)));
        }
    };
    Ok(std::thread::Builder::new().name(format!("output of rank {rank}")).spawn(body)?)
}

/// Exit code of a process: 128 and the number of the signal if one ended it, as in shells.
fn code_of(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// Waits until all processes have ended, and returns the exit code of the whole: that of the rank that
/// failed first, if one failed by itself, and else rank 0's.
fn watch(processes: &mut [Process], rendezvous: &Rendezvous, interrupts: &Interrupts) -> u8 {
    let (mut passed_on, mut code, mut until) = (0, None, None);
    loop {
        for (at, process) in processes.iter_mut().enumerate() {
            if process.ended.is_some() {
                continue;
            }
            let Ok(Some(status)) = process.child.try_wait() else { continue };
            process.ended = Some(status);
            until.get_or_insert_with(|| Instant::now() + GOODBYE);
            let failed = (!status.success()).then(|| code_of(status));
            let killed = status.signal().map(|_| format!("rank {at} ended: {status}"));
            killed.iter().for_each(|reason| out::complain(reason));
            // The others end by rank 0's word, unless it could not say any.
            if code.is_none_or(|code| code == End::BY_ANOTHER) && (failed.is_some() || at == 0) {
                code = Some(failed.unwrap_or(0));
                killed.iter().for_each(|reason| rendezvous.end(reason));
            }
        }
        if processes.iter().all(|process| process.ended.is_some()) {
            return code.unwrap_or(0);
        }
        if until.is_some_and(|until| Instant::now() > until) {
            end_all(processes);
            continue;
        }
        while passed_on < interrupts.presses() {
            // An init system sends SIGTERM to rank 0 as well, which counts the two as one. Each SIGINT counts.
            let signal = if passed_on == 0 { Signal::TERM } else { Signal::INT };
            passed_on += 1;
            if let Some(first) = processes.first().filter(|first| first.ended.is_none()) {
                kill_process(Pid::from_child(&first.child), signal).ok();
            }
        }
        sleep(LOOK);
    }
}

fn end_all(processes: &mut [Process]) {
    for process in processes.iter_mut().filter(|process| process.ended.is_none()) {
        // One that is gone already has been waited for below.
        drop(process.child.kill());
        process.ended = process.child.wait().ok();
    }
}
