//! Servers that are started here, watched, and ended with all that they started.
//!
//! Each leads a process group of its own, so that Ctrl-C does not reach it, and is ended by that group: nobody else's processes are touched.
//! Where this process is killed, which can end nothing any more, a guard in each group does.

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
use rollflow::engine::settings::{Engine, Launch};
use rollflow::model::{Dtype, GpuMemory, gpu_memory};
use rollflow::recipe::lora::Target;
use rollflow::recipe::model::DeviceName;
use rollflow::recipe::{MemoryPlan, Plan};
use rollflow::util::atomic_file;
use rustix::process::{Pid, Signal, kill_process_group};

/// How long a server may take to end by itself.
const GOODBYE: Duration = Duration::from_secs(10);

/// How much of a log is shown.
const TAIL: usize = 25;

/// Runs its arguments, which keep its process, beside a guard that is nobody's child. The guard holds the end of a pipe whose other end is held here,
/// so that it hears when this process is gone, however that came about, and ends the group.
const GUARDED: &str =
    "exec 3<&0; ((trap '' TERM; cat <&3; kill -TERM 0; sleep 10; kill -KILL 0) > /dev/null 2>&1 &); exec \"$@\" 3<&- < /dev/null";

/// How often a server is looked at.
const LOOK: Duration = Duration::from_millis(250);

/// What starts one server.
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// Which kind.
    pub kind: Launch,
    /// The program and its words.
    pub words: Vec<String>,
    /// What is added to the environment.
    pub env: Vec<(String, String)>,
    /// Where it listens, on this machine.
    pub port: u16,
}

impl Recipe {
    /// Of each server of a plan, that serve the model in `folder`.
    pub fn of(plan: &Plan, folder: &Path) -> Result<Vec<Recipe>> {
        let engine = &plan.engine;
        let program = program(engine)?;
        let devices = devices(plan, gpus())?;
        let of = |at: usize| {
            let port = u16::try_from(engine.port + at).context("engine.port")?;
            let mut words = program.clone();
            words.extend(flags(engine.launch, folder, port, plan.model.precision()));
            words.extend(adapter_flags(plan));
            let device = devices.get(at).copied();
            words.extend(memory_flags(engine.launch, share_of(plan, device)?));
            words.extend(engine.flags.iter().cloned());
            let own = engine.env.iter().filter_map(|pair| pair.split_once('='));
            let adapters = plan.syncs_adapters().then_some(("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1"));
            let env = env(engine.launch).iter().copied().chain(adapters).chain(own);
            let visible = device.map(|device| (VISIBLE.to_owned(), visible(std::env::var(VISIBLE).ok().as_deref(), device)));
            let env = visible.into_iter().chain(env.map(|(name, value)| (name.to_owned(), value.to_owned()))).collect();
            Ok(Recipe { kind: engine.launch, words, env, port })
        };
        (0..engine.replicas).map(of).collect()
    }

    /// Where it will be.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// How many GPUs this process sees.
fn gpus() -> usize {
    (0..).take_while(|index| gpu_memory(*index).is_some()).count()
}

/// GPUs that the run itself computes on.
fn own_gpus(plan: &Plan) -> Vec<usize> {
    let gpu = |device| match device {
        DeviceName::Cuda(index) => Some(index),
        DeviceName::Cpu => None,
    };
    plan.devices().into_iter().filter_map(|(_, device)| gpu(device)).collect()
}

/// Each server's GPU: as the recipe says, or one each, those first that the run does not compute on. None where there are none, and where the recipe's
/// environment names them itself.
fn devices(plan: &Plan, gpus: usize) -> Result<Vec<usize>> {
    let engine = &plan.engine;
    if !engine.devices.is_empty() {
        return Ok(engine.devices.clone());
    }
    if gpus == 0 || engine.env.iter().any(|pair| pair.starts_with(VISIBLE)) {
        return Ok(Vec::new());
    }
    let own = own_gpus(plan);
    let (shared, free): (Vec<usize>, Vec<usize>) = (0..gpus).partition(|gpu| own.contains(gpu));
    let all: Vec<usize> = free.into_iter().chain(shared).take(engine.replicas).collect();
    if all.len() < engine.replicas {
        bail!(
            "`engine.replicas` is {}, and this machine has {gpus} GPUs: each server takes most of one; lower it, or set CUDA_VISIBLE_DEVICES in `engine.env` \
             and `engine.gpu_memory`",
            engine.replicas
        );
    }
    Ok(all)
}

/// What a server's process must be told so that it sees this GPU alone: of those that this process sees, by their numbers or names.
fn visible(ours: Option<&str>, device: usize) -> String {
    let named = ours.and_then(|ours| ours.split(',').map(str::trim).filter(|name| !name.is_empty()).nth(device));
    named.map_or_else(|| device.to_string(), str::to_owned)
}

/// The share of its GPU's memory that a server takes: the recipe's, or what the run's own plan leaves of a GPU that both use. `None` leaves it to the server.
fn share_of(plan: &Plan, device: Option<usize>) -> Result<Option<f64>> {
    if let Some(share) = plan.engine.gpu_memory {
        return Ok(Some(share));
    }
    let Some(device) = device.filter(|device| own_gpus(plan).contains(device)) else { return Ok(None) };
    let Some(memory) = gpu_memory(device) else { return Ok(None) };
    let name = DeviceName::Cuda(device).word();
    let own = MemoryPlan::of(plan)?.into_iter().find(|of| of.device == name).map_or(0, |of| of.total());
    share_beside(memory, own).map(Some).with_context(|| {
        format!(
            "{} shares {name} with the run; give it another by engine.devices, or a share by engine.gpu_memory",
            plan.engine.launch.word()
        )
    })
}

/// What is left beside a run that takes `own` bytes, less what a process holds before it computes.
fn share_beside(memory: GpuMemory, own: u64) -> Result<f64> {
    const RESERVE: u64 = 2 << 30;
    const LEAST: f64 = 0.05;
    let left = memory.free.saturating_sub(own).saturating_sub(RESERVE) as f64 / memory.total.max(1) as f64;
    if left < LEAST {
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        bail!(
            "{:.1} GiB of its {:.1} GiB are free, and the run's plan takes {:.1}",
            gib(memory.free),
            gib(memory.total),
            gib(own)
        );
    }
    // Rounded down to hundredths.
    Ok((left * 100.0).floor() / 100.0)
}

fn memory_flags(kind: Launch, share: Option<f64>) -> Vec<String> {
    let flag = match kind {
        Launch::Sglang => "--mem-fraction-static",
        _ => "--gpu-memory-utilization",
    };
    share.map(|share| [flag.to_owned(), share.to_string()]).into_iter().flatten().collect()
}

/// Installed by scripts/engines.sh.
fn installed(kind: Launch) -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    let caches = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    let home = variable("ROLLFLOW_CACHE").or_else(|| Some(caches()?.join("rollflow")))?.join("engines");
    Some(home.join(kind.word()).join("serve")).filter(|path| path.is_file())
}

fn on_path(name: &str) -> bool {
    if name.contains('/') {
        return Path::new(name).is_file();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
}

/// The program that starts a server: the recipe's, that of scripts/engines.sh, or the machine's.
fn program(engine: &Engine) -> Result<Vec<String>> {
    let kind = engine.launch;
    let words: Vec<String> = match (&engine.program, installed(kind)) {
        (Some(program), _) => program.split_whitespace().map(str::to_owned).collect(),
        (None, Some(path)) => vec![path.to_string_lossy().into_owned()],
        (None, None) if kind == Launch::Vllm => vec!["vllm".to_owned(), "serve".to_owned()],
        (None, None) => ["python3", "-m", "sglang.launch_server"].map(str::to_owned).to_vec(),
    };
    let first = words.first().context("engine.program is empty")?;
    if !on_path(first) {
        bail!(
            "there is no program {first:?} here to start {} with: install it (on a CPU: scripts/engines.sh {}), or name another in engine.program",
            kind.word(),
            kind.word()
        );
    }
    Ok(words)
}

fn flags(kind: Launch, folder: &Path, port: u16, dtype: Dtype) -> Vec<String> {
    let (folder, port) = (folder.to_string_lossy().into_owned(), port.to_string());
    let dtype = dtype.name();
    let common = ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", &port, "--dtype", dtype].map(str::to_owned);
    let own: Vec<String> = match kind {
        Launch::Sglang => vec!["--model-path".to_owned(), folder, "--skip-server-warmup".to_owned()],
        // Behaviour log-probabilities are those of the distribution that was sampled, and tokens are told with the weights that made them.
        _ => [&folder, "--logprobs-mode", "processed_logprobs", "--enable-scale-out"].map(|word| word.to_string()).to_vec(),
    };
    own.into_iter().chain(common).collect()
}

/// Ranks that vLLM knows as the largest of its adapters.
const VLLM_RANKS: [usize; 8] = [8, 16, 32, 64, 128, 256, 320, 512];

/// What a server must be started with to be given adapters: room for those of all versions that answers may be under way with, and one more.
fn adapter_flags(plan: &Plan) -> Vec<String> {
    let Some(lora) = plan.lora.as_ref().filter(|_| plan.syncs_adapters()) else { return Vec::new() };
    let room = (plan.flow.max_staleness + 2).to_string();
    let words = |words: &[&str]| words.iter().map(|word| word.to_string()).collect::<Vec<_>>();
    match plan.engine.launch {
        Launch::Sglang => {
            let (rank, targets) = (lora.rank.to_string(), lora.targets.iter());
            let targets = targets.map(|target| if *target == Target::AllLinear { "all" } else { target.word() });
            let flags = ["--enable-lora", "--max-loras-per-batch", &room, "--max-lora-rank", &rank, "--lora-target-modules"];
            words(&flags.into_iter().chain(targets).collect::<Vec<_>>())
        }
        _ => {
            let rank = VLLM_RANKS.into_iter().find(|rank| *rank >= lora.rank).unwrap_or(lora.rank).to_string();
            words(&["--enable-lora", "--max-loras", &room, "--max-lora-rank", &rank])
        }
    }
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
    fn start(recipe: &Recipe, log: &Path) -> Result<Self> {
        let [program, words @ ..] = &recipe.words[..] else { bail!("engine.program is empty") };
        // A port that is taken would be found out a minute later, in a log; and whoever answers there might be taken for the server.
        if let Err(error) = TcpListener::bind(("127.0.0.1", recipe.port)) {
            bail!("port {} is not free ({error}): end what listens there, or set engine.port", recipe.port);
        }
        let file =
            OpenOptions::new().create(true).append(true).open(log).with_context(|| format!("opening {}", log.display()))?;
        let mut command = Command::new("sh");
        command.args(["-c", GUARDED, "sh", program]).args(words).envs(recipe.env.iter().cloned()).process_group(0);
        // The pipe that the guard holds.
        command.stdin(Stdio::piped()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().with_context(|| format!("starting {program}"))?;
        // For whoever wants to look at it from elsewhere.
        atomic_file::write(&log.with_extension("pid"), format!("{}\n", child.id()))
            .with_context(|| format!("writing beside {}", log.display()))?;
        Ok(Process { child, log: log.to_owned() })
    }

    fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    fn group(&self) -> Option<Pid> {
        i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
    }

    fn tail(&self) -> String {
        tail(&self.log).unwrap_or_default()
    }

    /// Asks it to end, unless it has.
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
        // Also where the leader is gone: what it started may not be.
        kill_process_group(group, Signal::KILL).ok();
        self.child.wait().ok();
        std::fs::remove_file(self.log.with_extension("pid")).ok();
    }
}

/// The last lines of a log.
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

/// Servers that live as long as this, each started anew when it ends before.
pub struct Servers {
    over: Arc<AtomicBool>,
    keepers: Vec<JoinHandle<()>>,
    processes: Vec<Arc<Mutex<Process>>>,
}

impl Servers {
    /// Starts all at once and waits until each is `well`, or has ended, or `limit` is over. Logs go to `logs`, a file each. `None` when it was
    /// `interrupted` meanwhile: then they are ended at once.
    pub fn start(
        recipes: &[Recipe],
        logs: &Path,
        (limit, restarts): (Duration, u32),
        well: impl Fn(&str) -> bool,
        interrupted: impl Fn() -> bool,
    ) -> Result<Option<Self>> {
        std::fs::create_dir_all(logs).with_context(|| format!("making {}", logs.display()))?;
        let mut started = Vec::new();
        for recipe in recipes {
            let log = logs.join(format!("{}-{}.log", recipe.kind.word(), recipe.port));
            started.push((recipe.clone(), Process::start(recipe, &log)?));
        }
        let until = Instant::now() + limit;
        for at in 0..started.len() {
            while !well(&started[at].0.url()) {
                if interrupted() {
                    // All at once, so that they end beside each other.
                    started.iter_mut().for_each(|(_, process)| process.terminate());
                    return Ok(None);
                }
                let (recipe, process) = &mut started[at];
                let (kind, log) = (recipe.kind.word(), process.log.display().to_string());
                if let Some(status) = process.exited() {
                    bail!("{kind} ended while it started ({status}). The end of its log, {log}:\n{}", process.tail());
                }
                if Instant::now() > until {
                    let seconds = limit.as_secs_f64();
                    bail!(
                        "{kind} was not ready after {seconds} s (engine.start_timeout). The end of its log, {log}:\n{}",
                        process.tail()
                    );
                }
                std::thread::sleep(LOOK);
            }
        }
        let over = Arc::new(AtomicBool::new(false));
        let (mut keepers, mut processes) = (Vec::new(), Vec::new());
        for (recipe, process) in started {
            let process = Arc::new(Mutex::new(process));
            processes.push(process.clone());
            let over = over.clone();
            let keep = move || keep(&recipe, &process, &over, restarts);
            keepers.push(std::thread::Builder::new().name("server".into()).spawn(keep).context("watching a server")?);
        }
        Ok(Some(Servers { over, keepers, processes }))
    }

    /// Says which has ended for good, with the end of its log, if one has.
    pub fn ended(&self) -> Option<String> {
        let given_up = |at: usize| self.keepers.get(at).is_none_or(JoinHandle::is_finished);
        self.processes.iter().enumerate().filter(|(at, _)| given_up(*at)).find_map(|(_, process)| {
            let mut process = process.lock();
            let status = process.exited()?;
            Some(format!("a server ended ({status}). The end of its log, {}:\n{}", process.log.display(), process.tail()))
        })
    }

    /// The process groups that they lead.
    pub fn groups(&self) -> Vec<u32> {
        self.processes.iter().map(|process| process.lock().child.id()).collect()
    }
}

/// Starts a server anew when it ends, a few times. It comes back with the weights of its folder, and whoever gives weights finds that out.
fn keep(recipe: &Recipe, process: &Mutex<Process>, over: &AtomicBool, restarts: u32) {
    let mut left = restarts;
    while !over.load(Ordering::Relaxed) {
        std::thread::sleep(LOOK);
        let mut process = process.lock();
        let Some(status) = process.exited() else { continue };
        if left == 0 || over.load(Ordering::Relaxed) {
            return;
        }
        left -= 1;
        tracing::warn!(
            "{} at {} ended ({status}) and is started anew; its log: {}",
            recipe.kind.word(),
            recipe.url(),
            process.log.display()
        );
        // What it left behind may hold its port.
        if let Some(group) = process.group() {
            kill_process_group(group, Signal::KILL).ok();
        }
        let log = process.log.clone();
        match Process::start(recipe, &log) {
            Ok(anew) => *process = anew,
            Err(error) => tracing::warn!("{} at {} can't be started anew: {error:#}", recipe.kind.word(), recipe.url()),
        }
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.keepers.drain(..).for_each(|keeper| drop(keeper.join()));
        // All at once, so that they end beside each other.
        for process in &self.processes {
            process.lock().terminate();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(engine: &str) -> Plan {
        let text = format!(
            "pipeline = 'grpo'\n[model]\nkind = 'tiny'\n[task]\nkind = 'arithmetic'\n[reward]\nkind = 'exact'\n[flow]\nmax_staleness = 1\n[engine]\nlaunch = 'vllm'\n{engine}"
        );
        rollflow::recipe::parse("servers.toml", &text, &[]).unwrap_or_else(|errors| panic!("{errors}"))
    }

    #[test]
    fn each_server_gets_a_gpu_of_its_own_those_first_that_the_run_leaves() {
        let mut two = plan("replicas = 2");
        assert_eq!(devices(&two, 0).unwrap(), [0; 0], "a machine without GPUs");
        assert_eq!(devices(&two, 3).unwrap(), [0, 1]);
        two.model.device = DeviceName::Cuda(0);
        assert_eq!(devices(&two, 3).unwrap(), [1, 2]);
        assert_eq!(devices(&two, 2).unwrap(), [1, 0], "the run's own last");
        let error = devices(&two, 1).unwrap_err().to_string();
        assert!(error.contains("engine.replicas") && error.contains("1 GPUs"), "{error}");
        two.engine.devices = vec![3, 1];
        assert_eq!(devices(&two, 4).unwrap(), [3, 1]);
        assert!(devices(&plan("replicas = 2\nenv = ['CUDA_VISIBLE_DEVICES=0']"), 1).unwrap().is_empty());
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
        let memory = GpuMemory { total: gib(80), free: gib(80) };
        assert_eq!(share_beside(memory, gib(38)).unwrap(), 0.5);
        assert!(share_beside(memory, gib(77)).unwrap_err().to_string().contains("77.0"));
        assert_eq!(memory_flags(Launch::Vllm, Some(0.5)), ["--gpu-memory-utilization", "0.5"]);
        assert_eq!(memory_flags(Launch::Sglang, Some(0.5)), ["--mem-fraction-static", "0.5"]);
        assert!(memory_flags(Launch::Vllm, None).is_empty());
    }
}
