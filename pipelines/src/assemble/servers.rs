//! Servers that a run starts, monitors and ends.
//!
//! Each server leads its own process group, so that Ctrl-C does not reach it. Ending the group
//! ends all processes of the server. If this process is killed, a guard in each group ends it.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use parking_lot::Mutex;
use rollflow::engine::remote::sync::Carry;
use rollflow::engine::settings::{Engine, Launch};
use rollflow::model::{Dtype, gpu_count, gpu_memory};
use rollflow::recipe::{DeviceName, Lora, MemoryPlan};
use rollflow::util::{atomic_file, causes::full_message};
use rustix::process::{Pid, Signal, kill_process_group};

/// Longest time for a server to end after SIGTERM.
const GOODBYE: Duration = Duration::from_secs(10);

/// Lines of a log that an error shows.
const TAIL: usize = 25;

/// Shell script that executes its arguments in its own process, next to a detached guard. The guard
/// reads a pipe from this process and ends the group when the pipe closes.
const GUARDED: &str =
    "exec 3<&0; ((trap '' TERM; cat <&3; kill -TERM 0; sleep 10; kill -KILL 0) > /dev/null 2>&1 &); exec \"$@\" 3<&- < /dev/null";

/// Interval of health checks.
const LOOK: Duration = Duration::from_millis(250);

/// Messages and interruption of a start.
#[derive(Clone, Copy)]
pub struct Startup<'a> {
    /// Receives progress messages.
    pub report: &'a dyn Fn(&str),
    /// If true, the start is cancelled.
    pub interrupted: &'a dyn Fn() -> bool,
}

/// Command line, environment and port of one server.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerCommand {
    /// Kind of server.
    pub kind: Launch,
    /// Program and arguments.
    pub words: Vec<String>,
    /// Additional environment variables.
    pub env: Vec<(String, String)>,
    /// Port on the loopback interface.
    pub port: u16,
}

impl ServerCommand {
    /// Commands of the servers of `[engine]`, which serve the model in `folder` in the format `dtype`. They
    /// load `adapters`, if given, of versions up to `max_staleness` old, and return the experts of tokens if
    /// `routes` says so. `own` is what the run's own models take of each device.
    pub fn of(
        engine: &Engine,
        dtype: Dtype,
        (adapters, max_staleness): (Option<&Lora>, u64),
        routes: bool,
        own: &[MemoryPlan],
        folder: &Path,
    ) -> Result<Vec<ServerCommand>> {
        let (program, devices) = (program(engine)?, devices(engine, own, gpu_count())?);
        let lora = adapters.map_or_else(Vec::new, |lora| adapter_flags(engine.launch, lora, max_staleness));
        let routes = routes.then(|| "--enable-return-routed-experts".to_owned());
        let loads = adapters.map(|_| ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1"));
        // In a handle of memory there is nothing but what this program writes.
        let unpickles = (engine.sync.carry == Carry::Ipc).then_some(("VLLM_ALLOW_INSECURE_SERIALIZATION", "1"));
        let of = |at: usize| {
            let port = u16::try_from(engine.port + at).context("engine.port")?;
            let device = devices.get(at).copied();
            let flags = flags(engine.launch, folder, port, dtype);
            let memory = memory_flags(engine, share_of(engine, own, device)?);
            let routes = routes.iter().cloned().collect();
            let transfer = transfer_flags(engine);
            let words = [program.clone(), flags, lora.clone(), routes, memory, transfer, engine.flags.clone()].concat();
            let given = engine.env.iter().filter_map(|pair| pair.split_once('='));
            let env = env(engine.launch).iter().copied().chain(loads).chain(unpickles).chain(given);
            let visible = device.map(|device| (VISIBLE.to_owned(), visible(std::env::var(VISIBLE).ok().as_deref(), device)));
            let env = visible.into_iter().chain(env.map(|(name, value)| (name.to_owned(), value.to_owned()))).collect();
            Ok(ServerCommand { kind: engine.launch, words, env, port })
        };
        (0..engine.replicas).map(of).collect()
    }

    /// Address of the server.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Memory that the run itself takes of this GPU, if it computes there. Servers that sleep meanwhile leave a
/// step their memory.
fn own_memory(own: &[MemoryPlan], gpu: usize, sleep: bool) -> Option<u64> {
    let plan = own.iter().find(|of| of.device == DeviceName::Cuda(gpu).word())?;
    Some(if sleep { plan.between_steps() } else { plan.total() })
}

/// GPU of each server. Empty without GPUs, and if the recipe's environment selects them. The plan of the
/// trainer's device is the first.
fn devices(engine: &Engine, own: &[MemoryPlan], gpus: usize) -> Result<Vec<usize>> {
    let shared: Vec<usize> = own.iter().filter_map(MemoryPlan::gpu).collect();
    let all = engine.gpus(gpus, &shared);
    let trainers = own.first().and_then(MemoryPlan::gpu);
    if let Some(gpu) = trainers.filter(|gpu| engine.sync.carry == Carry::Broadcast && all.contains(gpu)) {
        bail!(
            "`engine.carry` is \"broadcast\", and a server would be on the trainer's GPU, cuda:{gpu}: NCCL joins no two processes on one GPU; \
             give it another by engine.devices, or set engine.carry = \"folder\" (vLLM: \"ipc\")"
        );
    }
    if (1..engine.replicas).contains(&all.len()) {
        bail!(
            "`engine.replicas` is {}, and this machine has {gpus} GPUs: each server takes most of one GPU; lower it, or set CUDA_VISIBLE_DEVICES in `engine.env` \
             and `engine.gpu_memory`",
            engine.replicas
        );
    }
    Ok(all)
}

/// Value of CUDA_VISIBLE_DEVICES for one GPU of those that this process sees.
fn visible(ours: Option<&str>, device: usize) -> String {
    let named = ours.and_then(|ours| ours.split(',').map(str::trim).filter(|name| !name.is_empty()).nth(device));
    named.map_or_else(|| device.to_string(), str::to_owned)
}

/// Share of its GPU's memory for a server: that of the recipe, or what the run's memory plan leaves
/// on a shared GPU. `None` is the server's default.
fn share_of(engine: &Engine, own: &[MemoryPlan], device: Option<usize>) -> Result<Option<f64>> {
    if let Some(share) = engine.gpu_memory {
        return Ok(Some(share));
    }
    let shared = device.and_then(|device| Some((device, own_memory(own, device, engine.sync.sleep)?, gpu_memory(device)?)));
    let Some((device, own, memory)) = shared else { return Ok(None) };
    let (kind, name) = (engine.launch.word(), DeviceName::Cuda(device).word());
    remaining_share(memory.total, memory.free, own).map(Some).with_context(|| {
        format!("{kind} shares {name} with the run; give it another by engine.devices, or a share by engine.gpu_memory")
    })
}

/// Share of memory that a run of `own` bytes leaves, minus a reserve for a process's context.
fn remaining_share(total: u64, free: u64, own: u64) -> Result<f64> {
    const RESERVE: u64 = 2 << 30;
    const LEAST: f64 = 0.05;
    let left = free.saturating_sub(own).saturating_sub(RESERVE) as f64 / total.max(1) as f64;
    if left < LEAST {
        let [free, total, own] = [free, total, own].map(|bytes| bytes as f64 / f64::from(1 << 30));
        bail!("{free:.1} GiB of its {total:.1} GiB are free, and the run's plan takes {own:.1}");
    }
    // Rounded down to hundredths.
    Ok((left * 100.0).floor() / 100.0)
}

/// Flags for a share of a GPU's memory, and for sleep.
fn memory_flags(engine: &Engine, share: Option<f64>) -> Vec<String> {
    let (of_share, of_sleep): (&str, &[&str]) = match engine.launch {
        // Without a copy in the host's memory its weights would be lost.
        Launch::Sglang => ("--mem-fraction-static", &["--enable-memory-saver", "--enable-weights-cpu-backup"]),
        _ => ("--gpu-memory-utilization", &["--enable-sleep-mode"]),
    };
    let share = share.map(|share| [of_share.to_owned(), share.to_string()]).into_iter().flatten();
    let of_sleep = of_sleep.iter().filter(|_| engine.sync.sleep).map(|flag| (*flag).to_owned());
    share.chain(of_sleep).collect()
}

/// Flags of servers that take tensors out of the trainer's memory.
fn transfer_flags(engine: &Engine) -> Vec<String> {
    let backend = match (engine.launch, engine.sync.carry) {
        (Launch::Vllm, Carry::Broadcast) => "nccl",
        (Launch::Vllm, Carry::Ipc) => "ipc",
        _ => return Vec::new(),
    };
    vec!["--weight-transfer-config".to_owned(), format!("{{\"backend\": \"{backend}\"}}")]
}

/// Program that scripts/engines.sh installed.
fn installed(kind: Launch) -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    let caches = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    let home = variable("ROLLFLOW_CACHE").or_else(|| Some(caches()?.join("rollflow")))?.join("engines");
    Some(home.join(kind.word()).join("serve")).filter(|path| path.is_file())
}

/// Program that starts a server: that of the recipe, of scripts/engines.sh, or of the machine.
fn program(engine: &Engine) -> Result<Vec<String>> {
    let kind = engine.launch.word();
    let words: Vec<String> = match (&engine.program, installed(engine.launch)) {
        (Some(program), _) => program.split_whitespace().map(str::to_owned).collect(),
        (None, Some(path)) => vec![path.to_string_lossy().into_owned()],
        (None, None) if engine.launch == Launch::Vllm => vec!["vllm".to_owned(), "serve".to_owned()],
        (None, None) => ["python3", "-m", "sglang.launch_server"].map(str::to_owned).to_vec(),
    };
    let first = words.first().context("engine.program is empty")?;
    let path = if first.contains('/') { ".".into() } else { std::env::var_os("PATH").unwrap_or_default() };
    if !std::env::split_paths(&path).any(|folder| folder.join(first).is_file()) {
        bail!(
            "there is no program {first:?} here to start {kind} with: install it (on a CPU: scripts/engines.sh {kind}), or name another in engine.program"
        );
    }
    Ok(words)
}

fn flags(kind: Launch, folder: &Path, port: u16, dtype: Dtype) -> Vec<String> {
    let (folder, port) = (folder.to_string_lossy(), port.to_string());
    let own = match kind {
        Launch::Sglang => ["--model-path", &*folder, "--skip-server-warmup"].map(str::to_owned).to_vec(),
        // Log-probabilities of the sampled distribution, and the weight version of each token.
        _ => [&*folder, "--logprobs-mode", "processed_logprobs", "--enable-scale-out"].map(str::to_owned).to_vec(),
    };
    let common = ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", &port, "--dtype", dtype.name()];
    own.into_iter().chain(common.map(str::to_owned)).collect()
}

/// Values of vLLM's --max-lora-rank.
const VLLM_RANKS: [usize; 8] = [8, 16, 32, 64, 128, 256, 320, 512];

/// Flags for loading adapters: room for one of each version in flight, and one more.
fn adapter_flags(kind: Launch, lora: &Lora, max_staleness: u64) -> Vec<String> {
    let room = (max_staleness + 2).to_string();
    if kind == Launch::Sglang {
        let targets = lora.target_words().into_iter().map(|word| if word == "all-linear" { "all" } else { word });
        let rank = lora.rank.to_string();
        let flags = ["--enable-lora", "--max-loras-per-batch", &room, "--max-lora-rank", &rank, "--lora-target-modules"];
        return flags.into_iter().chain(targets).map(str::to_owned).collect();
    }
    let rank = VLLM_RANKS.into_iter().find(|rank| *rank >= lora.rank).unwrap_or(lora.rank).to_string();
    ["--enable-lora", "--max-loras", &room, "--max-lora-rank", &rank].map(str::to_owned).to_vec()
}

fn env(kind: Launch) -> &'static [(&'static str, &'static str)] {
    match kind {
        Launch::Vllm => &[("VLLM_SERVER_DEV_MODE", "1"), ("VLLM_NO_USAGE_STATS", "1"), ("HF_HUB_OFFLINE", "1")],
        _ => &[("HF_HUB_OFFLINE", "1"), ("TOKENIZERS_PARALLELISM", "false")],
    }
}

/// A server's process group.
struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    fn start(command: &ServerCommand, log: &Path) -> Result<Self> {
        Ok(Process { child: Process::spawn(command, log)?, log: log.to_owned() })
    }

    fn spawn(command: &ServerCommand, log: &Path) -> Result<Child> {
        let [program, words @ ..] = &command.words[..] else { bail!("engine.program is empty") };
        // Otherwise the error would appear a minute later in a log, or another server would answer.
        if let Err(error) = TcpListener::bind(("127.0.0.1", command.port)) {
            bail!("port {} is not free ({error}): end what listens there, or set engine.port", command.port);
        }
        let file = OpenOptions::new().create(true).append(true).open(log);
        let file = file.with_context(|| format!("opening {}", log.display()))?;
        let mut shell = Command::new("sh");
        shell.args(["-c", GUARDED, "sh", program]).args(words).envs(command.env.iter().cloned()).process_group(0);
        // The guard's pipe.
        shell.stdin(Stdio::piped()).stdout(file.try_clone()?).stderr(file);
        let child = shell.spawn().with_context(|| format!("starting {program}"))?;
        // For other tools.
        atomic_file::write(&log.with_extension("pid"), format!("{}\n", child.id()))
            .with_context(|| format!("writing next to {}", log.display()))?;
        Ok(child)
    }

    fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    fn group(&self) -> Option<Pid> {
        i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
    }

    /// Path and last lines of the log.
    fn log_end(&self) -> String {
        format!("{}:\n{}", self.log.display(), tail(&self.log).unwrap_or_default())
    }

    /// Sends SIGTERM to a running server.
    fn terminate(&mut self) {
        if let (None, Some(group)) = (self.exited(), self.group()) {
            kill_process_group(group, Signal::TERM).ok();
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let Some(group) = self.group() else { return };
        self.terminate();
        let until = Instant::now() + GOODBYE;
        while Instant::now() < until && self.exited().is_none() {
            std::thread::sleep(Duration::from_millis(50));
        }
        // Its children may outlive the leader.
        kill_process_group(group, Signal::KILL).ok();
        self.child.wait().ok();
        std::fs::remove_file(self.log.with_extension("pid")).ok();
    }
}

/// Last lines of a log.
fn tail(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(16 << 10)))?;
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    Ok(lines[lines.len().saturating_sub(TAIL)..].join("\n"))
}

/// Running servers, which end with this value. A server that ends before is restarted.
pub struct Servers {
    over: Arc<AtomicBool>,
    keepers: Vec<JoinHandle<()>>,
    processes: Vec<Arc<Mutex<Process>>>,
}

impl Servers {
    /// Starts all servers and waits until each is `healthy`, for `limit` at most. Each writes a log
    /// in `logs`. Returns `None` if `interrupted`, after ending them.
    ///
    /// # Errors
    /// If a server ends or is not healthy in time.
    pub fn start(
        commands: &[ServerCommand],
        logs: &Path,
        limit: Duration,
        restarts: u32,
        healthy: impl Fn(&str) -> bool,
        interrupted: impl Fn() -> bool,
    ) -> Result<Option<Self>> {
        std::fs::create_dir_all(logs).with_context(|| format!("making {}", logs.display()))?;
        let mut started = Vec::new();
        for command in commands {
            let log = logs.join(format!("{}-{}.log", command.kind.word(), command.port));
            started.push((command.clone(), Process::start(command, &log)?));
        }
        let until = Instant::now() + limit;
        for at in 0..started.len() {
            while !healthy(&started[at].0.url()) {
                if interrupted() {
                    // Terminates all first, so that they end in parallel.
                    started.iter_mut().for_each(|(_, process)| process.terminate());
                    return Ok(None);
                }
                let (command, process) = &mut started[at];
                let kind = command.kind.word();
                if let Some(status) = process.exited() {
                    bail!("{kind} ended while it started ({status}). The end of its log, {}", process.log_end());
                }
                if Instant::now() > until {
                    let (seconds, log) = (limit.as_secs_f64(), process.log_end());
                    bail!("{kind} was not ready after {seconds} s (engine.start_timeout). The end of its log, {log}");
                }
                std::thread::sleep(LOOK);
            }
        }
        let over = Arc::new(AtomicBool::new(false));
        let (mut keepers, mut processes) = (Vec::new(), Vec::new());
        for (command, process) in started {
            let process = Arc::new(Mutex::new(process));
            processes.push(process.clone());
            let over = over.clone();
            let keep = move || keep(&command, &process, &over, restarts);
            keepers.push(std::thread::Builder::new().name("server".into()).spawn(keep).context("watching a server")?);
        }
        Ok(Some(Servers { over, keepers, processes }))
    }

    /// Describes a server that ended after its last restart, with the end of its log.
    pub fn ended(&self) -> Option<String> {
        let given_up = |at: usize| self.keepers.get(at).is_none_or(JoinHandle::is_finished);
        self.processes.iter().enumerate().filter(|(at, _)| given_up(*at)).find_map(|(_, process)| {
            let mut process = process.lock();
            let status = process.exited()?;
            Some(format!("a server ended ({status}). The end of its log, {}", process.log_end()))
        })
    }
}

/// Restarts a server when it ends, a few times. It returns with its start weights, which the weight
/// sync detects.
fn keep(command: &ServerCommand, process: &Mutex<Process>, over: &AtomicBool, restarts: u32) {
    let (mut left, mut next) = (restarts, Instant::now());
    while !over.load(Ordering::Relaxed) {
        std::thread::sleep(LOOK);
        let mut process = process.lock();
        let Some(status) = process.exited().filter(|_| Instant::now() >= next) else { continue };
        if left == 0 || over.load(Ordering::Relaxed) {
            return;
        }
        left -= 1;
        let (kind, url, log) = (command.kind.word(), command.url(), process.log.clone());
        tracing::warn!("{kind} at {url} ended ({status}) and restarts; its log: {}", log.display());
        // Remaining children may hold its port.
        if let Some(group) = process.group() {
            kill_process_group(group, Signal::KILL).ok();
        }
        // Not a new `Process`: the old one's end would remove the new one's number.
        match Process::spawn(command, &log) {
            Ok(child) => process.child = child,
            Err(error) => {
                tracing::warn!("{kind} at {url} cannot restart: {}", full_message(error.as_ref()));
                // What holds its port may need a while to end.
                next = Instant::now() + GOODBYE;
            }
        }
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.keepers.drain(..).for_each(|keeper| drop(keeper.join()));
        // Terminates all first, so that they end in parallel.
        for process in &self.processes {
            process.lock().terminate();
        }
    }
}

#[cfg(test)]
mod tests {
    use rollflow::engine::remote::sync::SyncConfig;
    use rollflow::recipe::{MemoryPart, Taken};

    use super::*;

    #[test]
    fn each_server_gets_a_gpu_of_its_own_those_first_that_the_run_leaves() {
        let mut two = Engine { launch: Launch::Vllm, replicas: 2, ..Engine::default() };
        assert_eq!(devices(&two, &[], 0).unwrap(), [0; 0], "a machine without GPUs");
        assert_eq!(devices(&two, &[], 3).unwrap(), [0, 1]);
        let own = [MemoryPlan { device: "cuda:0".to_owned(), parts: Vec::new(), has: None }];
        assert_eq!(devices(&two, &own, 3).unwrap(), [1, 2]);
        assert_eq!(devices(&two, &own, 2).unwrap(), [1, 0], "the run's own last");
        let by = |carry| Engine { replicas: 1, sync: SyncConfig { carry, ..SyncConfig::default() }, ..two.clone() };
        assert_eq!(devices(&by(Carry::Ipc), &own, 3).unwrap(), [0], "the trainer's, whose memory it maps");
        assert_eq!(devices(&by(Carry::Broadcast), &own, 3).unwrap(), [1]);
        let error = devices(&by(Carry::Broadcast), &own, 1).unwrap_err().to_string();
        assert!(error.contains("the trainer's GPU, cuda:0") && error.contains("engine.devices"), "{error}");
        let error = devices(&two, &own, 1).unwrap_err().to_string();
        assert!(error.contains("engine.replicas") && error.contains("1 GPUs"), "{error}");
        two.devices = vec![3, 1];
        assert_eq!(devices(&two, &own, 4).unwrap(), [3, 1]);
        let env = vec!["CUDA_VISIBLE_DEVICES=0".to_owned()];
        let chosen = Engine { launch: Launch::Vllm, replicas: 2, env, ..Engine::default() };
        assert!(devices(&chosen, &own, 1).unwrap().is_empty());
    }

    #[test]
    fn a_gpu_is_named_as_this_process_sees_it() {
        assert_eq!(visible(None, 1), "1");
        assert_eq!(visible(Some("4, GPU-7ab,6"), 1), "GPU-7ab");
        assert_eq!(visible(Some(""), 0), "0");
    }

    #[test]
    fn a_shared_gpu_is_shared_by_the_plan_and_refused_where_nothing_is_left() {
        let gib = |number: u64| number << 30;
        assert_eq!(remaining_share(gib(80), gib(80), gib(38)).unwrap(), 0.5);
        assert!(remaining_share(gib(80), gib(80), gib(77)).unwrap_err().to_string().contains("77.0"));
        let flags = |launch, sleep, share| {
            let sync = SyncConfig { sleep, ..SyncConfig::default() };
            memory_flags(&Engine { launch, sync, ..Engine::default() }, share)
        };
        assert_eq!(flags(Launch::Vllm, false, Some(0.5)), ["--gpu-memory-utilization", "0.5"]);
        let saver = ["--mem-fraction-static", "0.5", "--enable-memory-saver", "--enable-weights-cpu-backup"];
        assert_eq!(flags(Launch::Sglang, true, Some(0.5)), saver);
        assert_eq!(flags(Launch::Vllm, true, None), ["--enable-sleep-mode"]);
        assert!(flags(Launch::Vllm, false, None).is_empty());
    }

    /// What a step takes comes and goes with the server's sleep.
    #[test]
    fn a_server_that_sleeps_gets_what_is_free_between_steps() {
        let part = |what, gib: u64, taken| MemoryPart { what, bytes: gib << 30, why: String::new(), taken };
        let parts = vec![part("weights", 10, Taken::Always), part("activations", 30, Taken::InSteps)];
        let own = [MemoryPlan { device: "cuda:0".to_owned(), parts, has: None }];
        assert_eq!([false, true].map(|sleep| own_memory(&own, 0, sleep)), [Some(40 << 30), Some(10 << 30)]);
        assert_eq!(own_memory(&own, 1, true), None);
    }
}
