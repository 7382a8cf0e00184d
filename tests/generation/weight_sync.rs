//! Weights for engines elsewhere, against engines that load real folders and make the mistakes that servers make. Laws V2 and V4; R260, R262, R265,
//! R266.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rollflow::data::Tokenizer;
use rollflow::engine::EngineError;
use rollflow::engine::remote::sync::{CachePolicy, SyncConfig, WeightSyncManager, sync_weights_to_engines};
use rollflow::engine::remote::{
    Attempt, Ending, Fault, FleetHandle, InferenceEngine, PauseMode, RemoteError, WeightControl, async_trait,
};
use rollflow::model::{Decoder, Dtype, FrozenWeights, Lora, ModelConfig, Packed, Weights, load_adapter, load_hf};
use rollflow::observe::{Metric, Metrics};
use rollflow::stages::sync::{Exporter, probe_texts};
use rollflow::train::Policy;
use tch::{Kind, Tensor};
use tokio::sync::mpsc::Sender;

/// What is wrong with an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fails {
    No,
    /// It reloads the embedding and leaves the head that shares it, as vLLM does.
    KeepsHead,
    /// It says that it loaded, and did not.
    LoadsNothing,
    /// Each load is refused.
    Refuses,
    /// Each load hangs.
    Hangs,
    /// It can't read a folder ahead of its load.
    ReadsNothingAhead,
}

/// An engine that serves a model folder.
struct FolderEngine {
    name: String,
    state: Mutex<State>,
}

struct State {
    fails: Fails,
    config: ModelConfig,
    weights: FrozenWeights,
    head: Option<Tensor>,
    label: Option<String>,
    adapters: BTreeMap<String, FrozenWeights>,
    paused: bool,
    said: Vec<String>,
}

// SAFETY: its tensors are only touched under the mutex.
unsafe impl Sync for FolderEngine {}

impl FolderEngine {
    fn new(name: &str, folder: &Path, fails: Fails) -> Arc<Self> {
        let (config, weights) = load_hf(folder).unwrap();
        let head = (fails == Fails::KeepsHead && config.shares_embedding()).then(|| embedding(&weights));
        let weights = weights.freeze();
        let (label, adapters) = (None, BTreeMap::new());
        let state = State { fails, config, weights, head, label, adapters, paused: false, said: Vec::new() };
        Arc::new(FolderEngine { name: name.to_owned(), state: Mutex::new(state) })
    }

    fn heal(&self) {
        self.state.lock().unwrap().fails = Fails::No;
    }

    fn said(&self) -> Vec<String> {
        self.state.lock().unwrap().said.clone()
    }

    fn note(&self, what: &str) {
        self.state.lock().unwrap().said.push(what.to_owned());
    }
}

fn embedding(weights: &Weights) -> Tensor {
    let entry = weights.layout.find("model.embed_tokens.weight").unwrap();
    weights.flat.narrow(0, entry.offset as i64, entry.len() as i64).copy()
}

#[async_trait]
impl InferenceEngine for FolderEngine {
    fn name(&self) -> String {
        self.name.clone()
    }

    async fn generate(&self, _: &Attempt, _: &Sender<Vec<(u32, f32)>>) -> Result<Ending, RemoteError> {
        Err(RemoteError::new(&self.name, Fault::Unsupported("generating")))
    }

    async fn score(&self, tokens: &[u32], adapter: Option<&str>) -> Result<Vec<f32>, RemoteError> {
        let state = self.state.lock().unwrap();
        if state.paused {
            return Err(RemoteError::new(&self.name, Fault::Busy { status: 503, retry_after: None }));
        }
        let adapted = adapter.map(|name| state.adapters.get(name).expect("it was asked for one that it was given"));
        let (weights, _guard) = (adapted.unwrap_or(&state.weights).read(), tch::no_grad_guard());
        let decoder = Decoder::new(&state.config, weights.layout.clone());
        let views = decoder.views_of(&weights);
        let hidden = decoder.hidden(&views, &Packed::new([tokens]));
        let head = state.head.as_ref().map_or_else(|| views.head.shallow_clone(), |head| head.view_as(&views.head));
        let logits = hidden.narrow(0, 0, tokens.len() as i64 - 1).linear(&head, None::<&Tensor>);
        let targets: Vec<i64> = tokens[1..].iter().map(|&id| i64::from(id)).collect();
        let chosen = logits.log_softmax(-1, Kind::Float).gather(-1, &Tensor::from_slice(&targets).unsqueeze(-1), false);
        Ok(Vec::try_from(chosen.squeeze_dim(-1)).unwrap())
    }

    fn weights(&self) -> Option<&dyn WeightControl> {
        Some(self)
    }
}

#[async_trait]
impl WeightControl for FolderEngine {
    async fn pause(&self, mode: PauseMode) -> Result<(), RemoteError> {
        self.note(if mode == PauseMode::Abort { "pause abort" } else { "pause" });
        self.state.lock().unwrap().paused = true;
        Ok(())
    }

    async fn prepare(&self, _: &Path, _: &str) -> Result<(), RemoteError> {
        if self.state.lock().unwrap().fails != Fails::ReadsNothingAhead {
            return Ok(());
        }
        let (what, begins) = ("prepare".into(), "the disk is full".into());
        Err(RemoteError::new(&self.name, Fault::Failed { what, status: 500, begins }))
    }

    async fn load(&self, folder: &Path, _: &str) -> Result<(), RemoteError> {
        self.note("load");
        let fails = self.state.lock().unwrap().fails;
        match fails {
            Fails::Refuses => {
                let (what, begins) = ("load (success: false)".into(), "no such tensor".into());
                return Err(RemoteError::new(&self.name, Fault::Failed { what, status: 200, begins }));
            }
            Fails::Hangs => std::future::pending().await,
            Fails::LoadsNothing => {}
            Fails::No | Fails::KeepsHead | Fails::ReadsNothingAhead => {
                self.state.lock().unwrap().weights = load_hf(folder).unwrap().1.freeze()
            }
        }
        Ok(())
    }

    async fn load_adapter(&self, name: &str, folder: &Path) -> Result<(), RemoteError> {
        self.note("load");
        let mut state = self.state.lock().unwrap();
        let base = state.weights.read();
        let adapted = match state.fails {
            Fails::LoadsNothing => base,
            _ => base.under(load_adapter(folder, &state.config).unwrap()),
        };
        state.adapters.insert(name.to_owned(), adapted.freeze());
        Ok(())
    }

    async fn unload_adapter(&self, name: &str) -> Result<(), RemoteError> {
        self.state.lock().unwrap().adapters.remove(name);
        Ok(())
    }

    async fn adapters(&self) -> Result<Vec<String>, RemoteError> {
        Ok(self.state.lock().unwrap().adapters.keys().cloned().collect())
    }

    async fn label(&self, label: &str) -> Result<(), RemoteError> {
        self.note("label");
        self.state.lock().unwrap().label = Some(label.to_owned());
        Ok(())
    }

    async fn served(&self) -> Result<Option<String>, RemoteError> {
        Ok(self.state.lock().unwrap().label.clone())
    }

    async fn checksums(&self) -> Result<Option<BTreeMap<String, String>>, RemoteError> {
        let weights = self.state.lock().unwrap().weights.read();
        let sum = weights.flat.to_kind(Kind::Double).sum(Kind::Double).double_value(&[]);
        Ok(Some(BTreeMap::from([("all".to_owned(), sum.to_string())])))
    }

    async fn flush_cache(&self) -> Result<(), RemoteError> {
        self.note("flush");
        Ok(())
    }

    async fn resume(&self) -> Result<(), RemoteError> {
        self.note("resume");
        self.state.lock().unwrap().paused = false;
        Ok(())
    }
}

/// A policy and what exports its versions, in a folder of its own.
struct Run {
    dir: tempfile::TempDir,
    exporter: Exporter,
}

impl Run {
    fn new(untie: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let tokenizer = Tokenizer::characters("abcdefgh", crate::tiny::VOCAB as usize).unwrap();
        let policy = Policy::new(crate::tiny::model(), crate::tiny::weights(0).freeze(), tokenizer).unwrap();
        let texts = probe_texts(&[vec![2, 3, 4], vec![5]], crate::tiny::VOCAB as usize);
        let exporter = Exporter::new(&policy, &dir.path().join("versions"), 2, texts, 1e-3).unwrap().untie(untie);
        exporter.launch_folder(&dir.path().join("launch")).unwrap();
        Run { dir, exporter }
    }

    fn launch(&self) -> PathBuf {
        self.dir.path().join("launch")
    }

    fn engine(&self, name: &str, fails: Fails) -> Arc<FolderEngine> {
        FolderEngine::new(name, &self.launch(), fails)
    }
}

fn config() -> SyncConfig {
    SyncConfig { retries: 1, load_timeout: 0.3, ..SyncConfig::default() }
}

fn manager(engines: &[Arc<FolderEngine>], config: SyncConfig) -> WeightSyncManager {
    let engines = engines.iter().map(|engine| engine.clone() as Arc<dyn InferenceEngine>).collect();
    WeightSyncManager { fleet: FleetHandle::new(engines), config, max_lag: 0 }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_is_loaded_named_checked_and_probed_in_this_order() {
    let run = Run::new(false);
    let engine = run.engine("one", Fails::No);
    let manager = manager(std::slice::from_ref(&engine), SyncConfig { cache: CachePolicy::Flush, ..config() });
    let metrics = Metrics::new();
    manager.fleet.observe(&metrics);
    for version in 1..=3 {
        let weights = crate::tiny::weights(version).freeze();
        let report = manager.sync(run.exporter.export(version, &weights).unwrap()).await.unwrap();
        assert_eq!((report.version, report.held()), (version, 1));
        assert_eq!(manager.fleet.served(0).unwrap().version, version);
    }
    assert_eq!(engine.said()[..5], ["pause", "load", "label", "flush", "resume"]);
    let timed = |phase| metrics.newest(Metric::EngineSync, &["one", phase]).is_some();
    assert!(["pause", "load", "label", "check", "flush", "resume", "probe"].into_iter().all(timed) && !timed("send"));
    let kept = std::fs::read_dir(run.dir.path().join("versions")).unwrap().count();
    assert_eq!(kept, 2, "of three versions two are kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_keeps_the_old_head_is_caught_by_name_and_an_untied_export_is_exact() {
    let run = Run::new(false);
    let engine = run.engine("vLLM", Fails::KeepsHead);
    let manager_of_tied = manager(std::slice::from_ref(&engine), config());
    let update = run.exporter.export(1, &crate::tiny::weights(1).freeze()).unwrap();
    let Err(EngineError::NoneHolds { failures, .. }) = manager_of_tied.sync(update).await else { panic!("it must be caught") };
    let told = failures[0].to_string();
    assert!(told.contains("vLLM failed to probe") && told.contains("engine.untie = true"), "{told}");
    assert_eq!(engine.said(), ["pause", "load", "label", "resume", "pause abort"], "no retry, and its work does not go on");
    assert_eq!(manager_of_tied.fleet.behind(), [0]);

    let run = Run::new(true);
    let (config_there, _) = load_hf(&run.launch()).unwrap();
    assert!(!config_there.tied);
    let engine = run.engine("vLLM", Fails::KeepsHead);
    let update = run.exporter.export(1, &crate::tiny::weights(1).freeze()).unwrap();
    assert_eq!(manager(&[engine], config()).sync(update).await.unwrap().held(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_in_another_format_than_the_folders_are_probed_by_the_rounded_numbers() {
    let Run { dir, exporter } = Run::new(false);
    let run = Run { dir, exporter: exporter.dtype(Dtype::Bf16) };
    let engine = run.engine("one", Fails::No);
    let update = run.exporter.export(1, &crate::tiny::weights(1).freeze()).unwrap();
    let (config_there, _) = load_hf(&update.folder).unwrap();
    assert_eq!(config_there.dtype, Dtype::Bf16);
    let stored = std::fs::metadata(update.folder.join("model.safetensors")).unwrap().len();
    let launched = std::fs::metadata(run.launch().join("model.safetensors")).unwrap().len();
    assert!(stored < launched * 6 / 10, "{stored} of {launched} bytes");
    assert_eq!(manager(&[engine], config()).sync(update).await.unwrap().held(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_failure_isolates_one_engine_and_it_comes_back_by_a_later_sync() {
    let run = Run::new(false);
    let kinds = [Fails::Refuses, Fails::No, Fails::Hangs, Fails::LoadsNothing];
    let engines: Vec<_> = kinds.iter().enumerate().map(|(at, fails)| run.engine(&format!("engine {at}"), *fails)).collect();
    let manager = manager(&engines, config());
    let first = crate::tiny::weights(1).freeze();
    let report = manager.sync(run.exporter.export(1, &first).unwrap()).await.unwrap();
    assert_eq!(report.engines.iter().map(Result::is_ok).collect::<Vec<_>>(), [false, true, false, false], "in their order");
    let told: Vec<String> = report.isolated().map(ToString::to_string).collect();
    assert!(told[0].contains("engine 0 failed to load") && told[0].contains("no such tensor"), "{told:?}");
    assert!(told[1].contains("engine 2 failed to load") && told[1].contains("0.3 s"), "{told:?}");
    assert!(told[2].contains("engine 3 failed to probe"), "{told:?}");
    assert!(manager.fleet.behind() == [0, 2, 3] && manager.fleet.is_serving(1));
    let whole = ["pause", "load", "label", "resume"];
    assert_eq!(engines[0].said(), ["pause", "load", "load", "pause abort"], "one retry, where it failed");
    assert_eq!(engines[1].said(), whole);
    assert_eq!(engines[3].said(), [&whole[..], &whole, &["pause abort"]].concat(), "wrong weights are loaded again");

    engines.iter().for_each(|engine| engine.heal());
    let report = manager.catch_up().await.unwrap();
    assert_eq!((report.held(), report.engines.len()), (3, 3));
    assert!((0..4).all(|place| manager.fleet.served(place).unwrap().version == 1));
    assert!(manager.catch_up().await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_keeps_failing_rests_for_a_while_and_is_given_each_new_version() {
    let run = Run::new(false);
    let engines = [run.engine("fails", Fails::Refuses), run.engine("works", Fails::No)];
    let manager = manager(&engines, SyncConfig { retries: 0, ..config() });
    let export = |version: u64| run.exporter.export(version, &crate::tiny::weights(version).freeze()).unwrap();
    assert_eq!(manager.sync(export(1)).await.unwrap().held(), 1);
    for _ in 0..2 {
        assert_eq!(manager.catch_up().await.unwrap().held(), 0);
    }
    assert!(manager.catch_up().await.is_none(), "it has failed three times in a row");
    engines[0].heal();
    assert_eq!(manager.sync(export(2)).await.unwrap().held(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_whose_sync_fails_before_its_pause_works_under_its_version() {
    let run = Run::new(false);
    let engines = [run.engine("fails", Fails::No), run.engine("works", Fails::No)];
    let manager = WeightSyncManager { max_lag: 1, ..manager(&engines, SyncConfig { retries: 0, ..config() }) };
    let export = |version: u64| run.exporter.export(version, &crate::tiny::weights(version).freeze()).unwrap();
    assert_eq!(manager.sync(export(1)).await.unwrap().held(), 2);
    engines[0].state.lock().unwrap().fails = Fails::ReadsNothingAhead;
    let report = manager.sync(export(2)).await.unwrap();
    assert!(report.isolated().next().unwrap().to_string().contains("fails failed to prepare"));
    assert_eq!((manager.fleet.is_serving(0), manager.fleet.served(0).unwrap().version), (true, 1));
    assert_eq!(engines[0].said(), ["pause", "load", "label", "resume"], "of version 1 alone: its work is not ended");
    engines[0].heal();
    assert_eq!(manager.catch_up().await.unwrap().held(), 1);
    assert_eq!(manager.fleet.served(0).unwrap().version, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_was_started_anew_is_found_and_brought_back() {
    let run = Run::new(false);
    let engine = run.engine("one", Fails::No);
    let manager = manager(std::slice::from_ref(&engine), config());
    // Its checksums are those of before it restarted, though the second version changed the weights.
    for version in 1..=2 {
        let update = run.exporter.export(version, &crate::tiny::weights(version).freeze()).unwrap();
        assert_eq!(update.changed, version == 2);
        manager.sync(update).await.unwrap();
    }
    {
        let mut state = engine.state.lock().unwrap();
        (state.weights, state.label) = (load_hf(&run.launch()).unwrap().1.freeze(), None);
    }
    assert_eq!(manager.catch_up().await.unwrap().held(), 1);
    assert!(manager.fleet.is_serving(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn r262_by_hand_results_stand_in_engine_order_and_one_must_hold() {
    let run = Run::new(false);
    let folder = run.exporter.export(7, &crate::tiny::weights(7).freeze()).unwrap().folder;
    let engines = |kinds: &[Fails]| -> Vec<Arc<dyn InferenceEngine>> {
        kinds.iter().map(|fails| run.engine(&format!("{fails:?}"), *fails) as Arc<dyn InferenceEngine>).collect()
    };
    let some = engines(&[Fails::Refuses, Fails::No]);
    let results = sync_weights_to_engines(some.clone(), &*folder, &config()).await.unwrap().engines;
    assert!(results[0].as_ref().is_err_and(|isolated| isolated.engine == "Refuses") && results[1].is_ok());
    assert_eq!(some[1].weights().unwrap().served().await.unwrap().as_deref(), Some("7"));
    let told = sync_weights_to_engines(engines(&[Fails::Refuses]), &*folder, &config()).await.unwrap_err().to_string();
    assert!(told.contains("no engine holds version 7") && told.contains("Refuses failed to load"), "{told}");
    assert!(matches!(sync_weights_to_engines(Vec::new(), &*folder, &config()).await, Err(EngineError::NoEngines)));
}

/// Adapters of queries and values that have learned something.
fn adapted(seed: u64) -> FrozenWeights {
    let lora = Lora::new(2, 4.0, &["q_proj", "v_proj"]).unwrap();
    let mut weights = crate::tiny::weights(0).adapted(&crate::tiny::model(), lora, 7);
    let flat = weights.trained_mut();
    *flat = &*flat + crate::tiny::noise(flat, seed) * 0.5;
    weights.freeze()
}

#[tokio::test(flavor = "multi_thread")]
async fn adapters_are_given_beside_each_other_without_a_pause_and_forgotten_when_nobody_names_them() {
    let run = Run::new(false);
    let engine = run.engine("one", Fails::No);
    let manager = manager(std::slice::from_ref(&engine), config());
    let mut named_by_a_request = None;
    for version in 1..=4 {
        let report = manager.sync(run.exporter.export(version, &adapted(version)).unwrap()).await.unwrap();
        let adapter = manager.fleet.served(0).unwrap();
        assert_eq!((report.held(), adapter.version, adapter.adapter), (1, version, true), "{:?}", report.engines);
        if version == 2 {
            named_by_a_request = Some(adapter);
        }
    }
    let has = async |names: &[&str]| {
        manager.catch_up().await;
        let until = std::time::Instant::now() + Duration::from_secs(30);
        while engine.adapters().await.unwrap() != names {
            assert!(std::time::Instant::now() < until, "{:?} in the place of {names:?}", engine.adapters().await);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    has(&["adapter-2", "adapter-4"]).await;
    assert!(named_by_a_request.as_ref().unwrap().folder.exists(), "who loads it once more must find it");
    drop(named_by_a_request);
    has(&["adapter-4"]).await;
    assert_eq!(engine.said(), ["load"; 4], "no pause, no label");
    // One that was started anew has none.
    engine.state.lock().unwrap().adapters.clear();
    assert_eq!(manager.catch_up().await.unwrap().held(), 1);
    has(&["adapter-4"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_answers_without_its_adapter_is_caught_and_not_disturbed() {
    let run = Run::new(false);
    let engine = run.engine("one", Fails::LoadsNothing);
    let manager = manager(std::slice::from_ref(&engine), config());
    let Err(EngineError::NoneHolds { failures, .. }) = manager.sync(run.exporter.export(1, &adapted(1)).unwrap()).await else {
        panic!("it must be caught")
    };
    let told = failures[0].to_string();
    assert!(told.contains("one failed to probe") && told.contains("differ from the trainer's"), "{told}");
    assert_eq!(engine.said(), ["load"; 2], "tried twice, and never paused");
    assert!(manager.fleet.served(0).is_none());
}

/// What changed is written; the rest is the file of the version before.
#[test]
fn a_version_shares_the_tensors_that_did_not_change_with_the_one_before_to_the_bit() {
    use std::os::unix::fs::MetadataExt;
    let run = Run::new(false);
    let files = |folder: &Path| -> BTreeMap<u64, u64> {
        let listed = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
        let weights = listed.filter(|entry| entry.path().extension().is_some_and(|ends| ends == "safetensors"));
        weights.map(|entry| entry.metadata().unwrap()).map(|file| (file.ino(), file.len())).collect()
    };
    let mut before: BTreeMap<u64, u64> = BTreeMap::new();
    for version in 1..=4 {
        let merged = adapted(version).read().merged();
        let update = run.exporter.export(version, &merged.freeze()).unwrap();
        assert_eq!(update.changed, version > 1);
        let folder = &*update.folder;
        let (_, found) = load_hf(folder).unwrap();
        assert!(found.flat == merged.flat, "version {version} is whole");
        let now = files(folder);
        let shared: u64 = now.iter().filter(|(file, _)| before.contains_key(file)).map(|(_, len)| len).sum();
        let all: u64 = now.values().sum();
        match version {
            1 => assert_eq!(now.len(), 1, "all in one file"),
            // What stays is told from what changes, and written once more.
            2 => assert_eq!((now.len(), shared), (2, 0)),
            _ => assert!(now.len() == 2 && 2 * shared > all, "queries and values are {} of {all} bytes", all - shared),
        }
        before = now;
    }
    // Everything changes: one file again. And nothing: the same one.
    let Weights { layout, flat, .. } = crate::tiny::weights(9);
    let whole = Weights::new(layout, flat + 0.5).freeze();
    let folder = run.exporter.export(5, &whole).unwrap().folder;
    let again = run.exporter.export(6, &whole).unwrap();
    assert_eq!((files(&folder).len(), again.changed), (1, false));
    assert_eq!(files(&folder), files(&again.folder));
}
