//! Laws C1, C2 and C3 at every single file operation: a synchronous run that is killed there, or whose disk fails there, ends after a resume
//! with the files of a run that nothing happened to, byte for byte.
//!
//! A small library is preloaded into the command. It counts the operations that change files in the run's folder and lets one of them fail.
//! Which ones are tried: about [`POINTS`] of each kind, others each day. `CRASH_POINTS=all` tries all of them, `CRASH_POINTS=17,40` these.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::crashes::resume;
use crate::fork_server::compile;
use crate::running::{Ended, GRPO, SFT, TINY, TINY_MODEL, plain_run_args, read, rollflow, rollflow_with, run_args, with_sets};
use crate::support::tfevents::{Event, read_events};

/// Points of each kind that a test tries.
const POINTS: usize = 3;

/// How an operation goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// The process is killed before it.
    Kill,
    /// The process is killed in the middle of it.
    Tear,
    /// It fails once for want of space.
    NoSpace,
    /// It fails once for a broken disk.
    Broken,
}

impl Fault {
    fn word(self) -> &'static str {
        match self {
            Fault::Kill => "kill",
            Fault::Tear => "tear",
            Fault::NoSpace => "28",
            Fault::Broken => "5",
        }
    }

    fn kills(self) -> bool {
        matches!(self, Fault::Kill | Fault::Tear)
    }
}

/// A run that faults are tried on, and what it leaves where there are none.
struct Trial<'a> {
    recipe: &'a str,
    sets: Vec<&'a str>,
    folder: tempfile::TempDir,
    library: PathBuf,
    /// Number of ranks, and the one that faults meet.
    ranks: Option<[&'a str; 2]>,
}

impl<'a> Trial<'a> {
    fn new(recipe: &'a str, sets: Vec<&'a str>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("libfile_faults.so");
        compile(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/command/file_faults.c")), &library);
        Trial { recipe, sets, folder, library, ranks: None }
    }

    /// Runs or resumes, with a fault at operation `at`. Gives the operations too.
    fn go(&self, run: &Path, fault: Option<(Fault, usize)>) -> (Ended, Vec<String>) {
        let out = run.to_str().unwrap();
        let args = match self.ranks {
            Some([ranks, _]) => with_sets(&["launch", "--ranks", ranks, "--resume", self.recipe, "--out", out], &self.sets),
            None if run.join("recipe.toml").exists() => resume(run).to_vec(),
            None => plain_run_args(self.recipe, run, &self.sets),
        };
        let log = self.folder.path().join(format!("{}.log", run.file_name().unwrap().to_string_lossy()));
        fs::remove_file(&log).ok();
        let at = fault.map_or(0, |(_, at)| at).to_string();
        let variables = [
            ("LD_PRELOAD", self.library.to_str().unwrap()),
            ("FAULT_FOLDER", run.to_str().unwrap()),
            ("FAULT_LOG", log.to_str().unwrap()),
            ("FAULT_AT", at.as_str()),
            ("FAULT_KIND", fault.map_or("", |(fault, _)| fault.word())),
            ("FAULT_RANK", self.ranks.map_or("", |[_, victim]| victim)),
        ];
        let ended = rollflow_with(&args, &variables);
        (ended, read(&log).lines().map(str::to_owned).collect())
    }

    /// Tries `fault` at many operations. Gives at how many.
    fn try_at_many_points(&self, whole: &Left, operations: usize, fault: Fault) -> usize {
        let points = points(operations);
        for &at in &points {
            self.try_at(whole, fault, at);
        }
        points.len()
    }

    fn try_at(&self, whole: &Left, fault: Fault, at: usize) {
        let run = self.folder.path().join(format!("{}-{at}", fault.word()));
        let (ended, operations) = self.go(&run, Some((fault, at)));
        let met = operations.get(at - 1).cloned().unwrap_or_else(|| "nothing".to_owned());
        let place = format!("{fault:?} at operation {at} of {} ({met})", operations.len());
        println!("{place}");
        if fault.kills() {
            // A launcher outlives its ranks.
            let killed = self.ranks.map(|_| 137);
            assert_eq!(ended.code, if met == "nothing" { Some(0) } else { killed }, "{place}: {}", ended.err);
        } else if met != "nothing" {
            assert_eq!(ended.code, Some(1), "{place}: the run ends with an error: {}", ended.err);
            let error = ended.err.split_once("error: ").map(|(_, error)| error).unwrap_or_default();
            assert!(error.contains(run.to_str().unwrap()), "{place}: the error names the file: {}", ended.err);
        }
        // The resume is killed as well, sooner or later in its work, and then there is another.
        if fault == Fault::Kill {
            self.go(&run, Some((Fault::Kill, 1 + at * 7 % 60)));
        }
        let (ended, _) = self.go(&run, None);
        assert_eq!(ended.code, Some(0), "{place}, and then: {}", ended.err);
        whole.compare(&run, &place);
        fs::remove_dir_all(&run).unwrap();
    }
}

/// The operations that are tried, from 1.
fn points(operations: usize) -> Vec<usize> {
    match std::env::var("CRASH_POINTS").as_deref() {
        Ok("all") => (1..=operations).collect(),
        Ok(points) => points.split(',').map(|point| point.parse().expect("CRASH_POINTS is \"all\" or numbers")).collect(),
        Err(_) => {
            let days = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as usize / 86_400;
            let every = operations.div_ceil(POINTS).max(1);
            (1 + days % every..=operations).step_by(every).collect()
        }
    }
}

/// What a run leaves, by path, as far as it follows from the recipe.
struct Left(BTreeMap<String, Vec<u8>>);

impl Left {
    fn of(run: &Path) -> Self {
        let (mut files, mut events) = (BTreeMap::new(), Vec::new());
        walk(run, run, &mut files);
        let all = std::mem::take(&mut files);
        for (path, content) in all {
            let name = path.rsplit('/').next().unwrap();
            let content = match name {
                // Its sessions are the processes that worked on the run: their times, and how each ended.
                // Its drawing is of the last process: where its time went.
                "run.json" => without(&content, &["sessions", "drawn"]),
                // When it was written.
                "metadata.json" => without(&content, &["timestamp"]),
                // When each was given up.
                "dead_letters.jsonl" => {
                    let lines = content.split_inclusive(|byte| *byte == b'\n');
                    lines.flat_map(|line| without(line, &["time"])).collect()
                }
                // Times again; each step has one row.
                "timings.jsonl" => {
                    let step = |line| serde_json::from_slice::<serde_json::Value>(line).unwrap()["step"].to_string() + "\n";
                    content.split_inclusive(|byte| *byte == b'\n').flat_map(|line| step(line).into_bytes()).collect()
                }
                // Made of the files above, those times among them.
                "report.html" => Vec::new(),
                // Times of the last process, if it had something left to do.
                "profile.json" => continue,
                // Each process begins a file, named by its time and its number, and says there at which step; events
                // carry the times of theirs.
                name if name.starts_with("events.out.tfevents.") => {
                    let of_step = |event: &Event| event.file_version.is_none() && event.session.is_none();
                    let read = read_events(&content).unwrap().into_iter().filter(of_step);
                    events.extend(read.map(|event| (event.step, format!("{:?}", event.scalars))));
                    continue;
                }
                _ => content,
            };
            files.insert(path, content);
        }
        events.sort();
        files.insert("TensorBoard's events".to_owned(), format!("{events:#?}").into_bytes());
        Left(files)
    }

    fn compare(&self, run: &Path, place: &str) {
        let other = Left::of(run);
        let names = |left: &Left| left.0.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(self), names(&other), "law C2: {place}: the same files");
        for (path, content) in &self.0 {
            if *content != other.0[path] {
                let [expected, found] = [content, &other.0[path]].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
                panic!("law C2: {place}: {path} differs:\n{expected:.2000}\n{found:.2000}");
            }
        }
    }
}

fn walk(root: &Path, folder: &Path, files: &mut BTreeMap<String, Vec<u8>>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            walk(root, &path, files);
        } else {
            files.insert(path.strip_prefix(root).unwrap().display().to_string(), fs::read(&path).unwrap());
        }
    }
}

fn without(json: &[u8], keys: &[&str]) -> Vec<u8> {
    let mut value: Value = serde_json::from_slice(json).unwrap();
    keys.iter().for_each(|key| drop(value.as_object_mut().unwrap().remove(*key)));
    value.to_string().into_bytes()
}

/// Runs it whole, and then with every fault.
fn survives(recipe: &str, sets: Vec<&str>) {
    survives_all(&Trial::new(recipe, sets), 60, &[Fault::Kill, Fault::Tear, Fault::NoSpace, Fault::Broken]);
}

/// The same. The library counts more than `least` operations.
fn survives_all(trial: &Trial, least: usize, faults: &[Fault]) {
    let (recipe, run) = (trial.recipe, trial.folder.path().join("whole"));
    let (ended, operations) = trial.go(&run, None);
    ended.ok();
    assert!(operations.len() > least, "the library counts: {operations:#?}");
    let whole = Left::of(&run);
    let hidden = |path: &String| path.split('/').any(|name| name.starts_with('.') && name != ".lock");
    let leftovers: Vec<&String> = whole.0.keys().filter(|path| hidden(path)).collect();
    assert!(leftovers.is_empty(), "nothing is left over: {leftovers:?}");
    for &fault in faults {
        let tried = trial.try_at_many_points(&whole, operations.len(), fault);
        println!("{recipe}: {fault:?} at {tried} of {} operations", operations.len());
    }
}

const SMALL: [&str; 7] = [
    "checkpoint.every=1",
    "checkpoint.keep=2",
    "observe.rollouts_every=1",
    "observe.tensorboard=true",
    "observe.progress=false",
    "generate.max_new_tokens=4",
    "eval={every=2,samples=1,limit=1,max_num_seqs=4}",
];

#[test]
fn a_reinforced_run_survives_a_fault_at_any_file_operation() {
    // One prompt has no ground truth to compare with: its groups become dead letters.
    let data = tempfile::tempdir().unwrap();
    let (prompts, pairs) = (data.path().join("prompts.jsonl"), data.path().join("pairs.jsonl"));
    let answer = |at: u32| if at == 1 { "" } else { ",\"answer\":\"7\"" };
    let lines: Vec<String> = (0..4).map(|at| format!("{{\"prompt\":\"{at}+1=\"{}}}\n", answer(at))).collect();
    fs::write(&prompts, lines.concat()).unwrap();
    fs::write(&pairs, "{\"prompt\":\"3+4=\",\"completion\":\"7\"}\n").unwrap();
    let task = format!("task={{kind=\"data\",data={:?},shuffle=false}}", prompts.display().to_string());
    let pairs = format!("sft.data={}", pairs.display());
    let sets = [
        task.as_str(),
        &pairs,
        "reward={kind=\"regex\",pattern=\"(?s)^(.*)$\",require_end_of_text=false,retries=0}",
        "batch.groups=2",
        "generate.group_size=2",
        "train.steps=3",
        "train.kl_loss={beta=0.1}",
        "reference={kind=\"frozen\"}",
    ];
    survives(GRPO, [&TINY[..], &SMALL[..], &sets[..]].concat());
}

#[test]
fn a_supervised_run_survives_a_fault_at_any_file_operation() {
    let sets = ["sft.steps=3", "sft.batch=4", "sft.schedule.warmup=0"];
    survives(SFT, [TINY_MODEL, &SMALL[..], &sets[..]].concat());
}

#[test]
fn a_run_of_two_parts_survives_a_fault_at_any_file_operation() {
    let sets = ["pipeline=\"sft_then_grpo\"", "batch.groups=2", "generate.group_size=2", "train.steps=2"];
    survives(GRPO, [&TINY[..], &SMALL[..], &sets[..]].concat());
}

/// Each rank writes its part of a checkpoint. Whichever is killed or has a broken disk, the same ranks end with the same files.
#[test]
fn a_run_of_several_ranks_survives_a_fault_of_any_of_them_at_any_file_operation() {
    for (victim, shard, least) in [("0", "ranks.shard=\"optimizer\"", 60), ("1", "ranks.shard=\"parameters\"", 15)] {
        let sets = ["sft.steps=3", "sft.batch=4", "sft.schedule.warmup=0", "sft.micro_batch_tokens=16", "sft.threads=1", shard];
        let trial = Trial::new(SFT, [TINY_MODEL, &SMALL[..5], &sets[..]].concat());
        survives_all(&Trial { ranks: Some(["2", victim]), ..trial }, least, &[Fault::Kill, Fault::Broken]);
    }
}

/// A rank whose host does not share the disk: rank 0 writes and reads everything, and says why.
#[test]
fn ranks_that_do_not_see_the_run_s_folder_are_named_and_their_run_resumes() {
    let sets = ["sft.schedule.warmup=0", "sft.batch=4", "sft.micro_batch_tokens=16", "sft.threads=1"];
    let trial = Trial::new(SFT, [TINY_MODEL, &SMALL[..5], &sets[..]].concat());
    // With the stand-in of a GPU, if that is preloaded.
    let preloaded = format!("{} {}", trial.library.display(), std::env::var("LD_PRELOAD").unwrap_or_default());
    let launch = |shard: &str, steps: &str, hidden: &str| {
        let (run, shard) = (trial.folder.path().join(shard), format!("ranks.shard={shard:?}"));
        let sets = [&trial.sets[..], &[shard.as_str(), steps]].concat();
        let args = with_sets(&["launch", "--ranks", "2", "--resume", SFT, "--out", run.to_str().unwrap()], &sets);
        let variables = [("LD_PRELOAD", preloaded.as_str()), ("FAULT_FOLDER", run.to_str().unwrap()), ("HIDDEN_FROM", hidden)];
        rollflow_with(&args, &variables).ok().err
    };
    let files = |shard: &str, step: u64| {
        let checkpoint = trial.folder.path().join(format!("{shard}/checkpoints/step_{step:06}"));
        let files = rollflow::train::checkpoint::verify(&checkpoint).unwrap().files;
        files.into_keys().filter(|name| name.ends_with(".safetensors")).collect::<Vec<_>>()
    };
    let warned = launch("parameters", "sft.steps=2", "1");
    assert!(warned.contains("rank 1 on ") && warned.contains("rank 0 gathers checkpoints in its memory"), "{warned}");
    assert_eq!(files("parameters", 2), ["model.safetensors", "optimizer.safetensors"]);
    assert!(!launch("parameters", "sft.steps=3", "").contains("does not see"));
    assert_eq!(files("parameters", 3).len(), 4, "two parts each: {:?}", files("parameters", 3));
    // Parts that rank 1 wrote are read by rank 0 alone.
    assert!(launch("parameters", "sft.steps=4", "1").contains("does not see"));
    assert_eq!(files("parameters", 4), ["model.safetensors", "optimizer.safetensors"]);
    // Rank 0 has all of it, and sends it to rank 1.
    for steps in ["sft.steps=2", "sft.steps=3"] {
        launch("nothing", steps, "1");
    }
    assert_eq!(files("nothing", 3), ["model.safetensors", "optimizer.safetensors"]);
}

/// Law C1. A file that was edited is none of the checkpoint's either. To begin again would remove the rest.
#[test]
fn a_resume_without_an_intact_checkpoint_ends_and_leaves_all_files() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    rollflow(&run_args(GRPO, &run, &["train.steps=2", "checkpoint.every=1"])).ok();
    for step in ["step_000001", "step_000002"] {
        fs::write(run.join("checkpoints").join(step).join("tokenizer.json"), "{}").unwrap();
    }
    let files = || ["metrics.jsonl", "recipe.toml", "run.json"].map(|file| read(&run.join(file)));
    let before = files();
    let more = [&resume(&run)[..], &["--set", "train.steps=3"]].concat();
    let ended = rollflow(&more);
    assert_eq!(ended.code, Some(1), "{}", ended.err);
    assert!(ended.err.matches("checkpoint left out: ").count() == 2 && ended.err.contains("restore the files"), "{}", ended.err);
    assert_eq!(files(), before, "the run is as it was");
    assert!(run.join("checkpoints/step_000002/model.safetensors").exists());
    let exported = rollflow(&["export", run.to_str().unwrap(), folder.path().join("model").to_str().unwrap()]);
    assert!(exported.err.contains("is intact: ") && exported.err.contains("tokenizer.json"), "{}", exported.err);
}

/// Law C1. What a disk or a permission keeps from being read is not damaged.
#[test]
fn a_resume_does_not_set_a_checkpoint_aside_that_could_not_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    rollflow(&run_args(GRPO, &run, &["train.steps=2", "checkpoint.every=1"])).ok();
    let (metadata, away) = (run.join("checkpoints/step_000002/metadata.json"), folder.path().join("away.json"));
    fs::rename(&metadata, &away).unwrap();
    // Its first byte is mapped to nothing, so that the system reports an input or output error.
    std::os::unix::fs::symlink("/proc/self/mem", &metadata).unwrap();
    let more = [&resume(&run)[..], &["--set", "train.steps=3"]].concat();
    let ended = rollflow(&more);
    assert_eq!(ended.code, Some(1), "{}", ended.err);
    assert!(ended.err.contains("metadata.json") && ended.err.contains("may be intact"), "{}", ended.err);
    fs::rename(&away, &metadata).unwrap();
    assert!(rollflow(&more).ok().err.contains("going on after step 2"));
}

#[test]
fn checkpoints_that_a_resume_set_aside_or_a_kill_half_removed_do_not_stay() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let sets = ["train.steps=4", "checkpoint.every=1", "checkpoint.keep=2"];
    assert_eq!(rollflow(&run_args(GRPO, &run, &sets)).code, Some(0));
    let checkpoints = run.join("checkpoints");
    fs::create_dir(checkpoints.join(".step_000001.removed")).unwrap();
    fs::create_dir(checkpoints.join(".step_000002.undone")).unwrap();
    fs::write(checkpoints.join("step_000004/optimizer.safetensors"), "damaged").unwrap();
    let ended = rollflow(&resume(&run)).ok();
    assert!(ended.err.contains("set aside: ") && ended.err.contains(".step_000004.undone"), "{}", ended.err);
    let mut left: Vec<String> =
        fs::read_dir(&checkpoints).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, ["latest", "step_000003", "step_000004"]);
}
