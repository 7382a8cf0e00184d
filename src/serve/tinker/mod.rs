//! The Tinker API over the local trainer: `rollflow serve --tinker`.
//!
//! Each model is an adapter over the server's base model, or a copy of it of which all weights are
//! trained, on a separate thread. Its operations are numbered: they are done once and in order, and a
//! journal makes a killed server's models again, to the bit. Sampling sessions are adapters or other
//! weights of the engine that samples, so that requests of several are batched.

mod journal;
mod losses;
mod operation;
mod queue;
mod routes;
mod sampling;
mod saved;
mod trained;
mod updates;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rollflow_tinker::message::LoraConfig;
use tokio::sync::oneshot;

pub use journal::TinkerModel;
pub(super) use routes::routes;

use self::journal::{Journal, ModelRecord, Snapshot};
use self::queue::ModelQueue;
use self::sampling::Samples;
use self::trained::{Ground, Install, check_adapters, is_name};
use super::reply::Refusal;
use super::shared::{LoadedAdapter, Shared};
use super::worker::Command;
use crate::model::FrozenWeights;
use crate::train::Policy;
use crate::util::atomic_file;

/// Settings of the Tinker API.
#[derive(Clone, Debug)]
pub struct TinkerSettings {
    /// Folder of models, saved weights and sampling sessions. A server that starts on it again has
    /// them.
    pub state: PathBuf,
    /// Most models at a time.
    pub max_models: usize,
}

impl TinkerSettings {
    /// Folder of the models in the state `folder`, a [`TinkerModel`] each.
    pub fn models(folder: &Path) -> PathBuf {
        folder.join("models")
    }
}

pub(super) struct Tinker {
    shared: Arc<Shared>,
    ground: Ground,
    max_models: usize,
    models: Mutex<BTreeMap<String, Arc<ModelQueue>>>,
    samples: Mutex<Samples>,
    loaded: Arc<Mutex<Loaded>>,
    /// Time of each session's last heartbeat.
    heard: Mutex<BTreeMap<String, Instant>>,
    started: Instant,
    /// Warning of a lifetime of saved weights, which is ignored.
    lifetime: Once,
    /// Lock of the state's folder.
    _lock: File,
}

/// Time without a heartbeat after which a session's models may be unloaded. Clients send one every
/// ten seconds.
const SILENT: Duration = Duration::from_secs(600);

/// Sampling sessions that the engine has, the one loaded last at the end, and the requests that each
/// answers now. The others are on disk.
#[derive(Default)]
struct Loaded {
    /// Each with the places that it takes.
    order: VecDeque<(Arc<str>, usize)>,
    active: BTreeMap<Arc<str>, usize>,
}

/// Places of sessions that the engine has at a time, in addition to those that answer requests. An
/// adapter takes one.
const LOADED: usize = 16;

/// Places of a session that is no adapter.
const WHOLE: usize = 8;

impl Loaded {
    /// Adds a session, and returns those to unload.
    fn add(&mut self, name: &Arc<str>, places: usize) -> Vec<Arc<str>> {
        self.order.retain(|(other, _)| other != name);
        self.order.push_back((name.clone(), places));
        let mut excess = Vec::new();
        while self.order.iter().map(|(_, places)| places).sum::<usize>() > LOADED {
            let others = self.order.range(..self.order.len() - 1);
            let Some(at) = others.into_iter().position(|(name, _)| !self.active.contains_key(name)) else { break };
            excess.extend(self.order.remove(at).map(|(name, _)| name));
        }
        excess
    }
}

/// Loads a session's weights into the engine, and unloads others if there are too many. Returns the
/// replies to wait for.
fn load(
    shared: &Shared,
    loaded: &Mutex<Loaded>,
    name: &Arc<str>,
    weights: Arc<FrozenWeights>,
    folder: &Path,
) -> Vec<oneshot::Receiver<()>> {
    let mut replies = Vec::new();
    let mut tell = |name: Arc<str>, weights| {
        let (reply, done) = oneshot::channel();
        shared.send(Command::Adapter { name, weights, reply });
        replies.push(done);
    };
    let places = if weights.read().adapter.is_some() { 1 } else { WHOLE };
    for old in loaded.lock().add(name, places) {
        shared.served.lock().adapters.remove(&old);
        tell(old, None);
    }
    tell(name.clone(), Some(weights.clone()));
    shared.served.lock().adapters.insert(name.clone(), LoadedAdapter { folder: folder.to_owned(), weights });
    replies
}

impl Tinker {
    /// Opens the state, and starts the models in it. `policies`: the loaded model, and the served one.
    pub fn open(shared: &Arc<Shared>, policies: [Policy; 2], settings: &TinkerSettings) -> io::Result<Arc<Self>> {
        let (models, samplers) = (TinkerSettings::models(&settings.state), settings.state.join("samplers"));
        atomic_file::create_folder(&settings.state)?;
        let lock = journal::lock(&settings.state)?;
        for folder in [&models, &samplers] {
            atomic_file::create_folder(folder)?;
            atomic_file::remove_leftovers(folder)?;
        }
        let [policy, served] = policies;
        let threads = shared.config.threads_of(policy.config());
        let ground = Ground { policy, served, threads, context: shared.context(), models, samplers };
        let tinker = Arc::new(Tinker {
            shared: shared.clone(),
            ground,
            max_models: settings.max_models,
            models: Mutex::default(),
            samples: Mutex::default(),
            loaded: Arc::default(),
            heard: Mutex::default(),
            started: Instant::now(),
            lifetime: Once::new(),
            _lock: lock,
        });
        for folder in journal::loaded(&tinker.ground.models)? {
            let (journal, journaled) = Journal::open(&folder)?;
            tracing::info!("model {}: {} operations since its snapshot", journal.record.id, journaled.len());
            let queue = ModelQueue::start(tinker.ground.clone(), journal, journaled, tinker.install())?;
            tinker.models.lock().insert(queue.record.id.clone(), Arc::new(queue));
        }
        Ok(tinker)
    }

    /// Gives weights to the engine that samples, and waits until it has them.
    fn install(&self) -> Install {
        let (shared, loaded) = (Arc::downgrade(&self.shared), self.loaded.clone());
        Arc::new(move |name: &str, weights: Arc<FrozenWeights>, folder: &Path| {
            let Some(shared) = shared.upgrade() else { return };
            let _order = shared.changing.blocking_lock();
            for reply in load(&shared, &loaded, &name.into(), weights, folder) {
                // It never comes if the server is stopping.
                reply.blocking_recv().ok();
            }
        })
    }

    /// The model of this name.
    fn model(&self, id: &str) -> Result<Arc<ModelQueue>, Refusal> {
        let found = self.models.lock().get(id).cloned();
        found.ok_or_else(|| Refusal::new(404, format!("there is no model {:?}; it was unloaded, or never created", short(id))))
    }

    /// Creates a model, unless there is one of this name already.
    fn create(&self, id: String, session: String, lora: LoraConfig, begins: Option<(String, bool)>) -> Result<(), Refusal> {
        if !is_name(&id) {
            return Err(Refusal::bad("the session's id is none of this server"));
        }
        let refused = |why: String| Refusal::bad(format!("`lora_config`: {why}"));
        check_adapters(lora, self.ground.served.config()).map_err(refused)?;
        self.hear(&session);
        self.make_room(&id)?;
        let mut models = self.models.lock();
        if models.contains_key(&id) {
            return Ok(());
        }
        if models.len() >= self.max_models {
            // Other sessions may end; a session that has all places waits in vain.
            let status = if models.values().all(|model| model.record.session == session) { 400 } else { 429 };
            let why = format!("there are {} models already (--max-models); end a session that has some", self.max_models);
            return Err(Refusal::new(status, why));
        }
        let seed = lora.seed.or(Some(self.shared.config.seed));
        let lora = LoraConfig { seed, train_unembed: false, ..lora };
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let record = ModelRecord { id: id.clone(), session, lora, begins, base: Snapshot::default(), newest: None, created };
        let failed = |error: io::Error| Refusal::new(500, error.to_string());
        let journal = Journal::create(&self.ground.models.join(&id), record).map_err(failed)?;
        let queue = ModelQueue::start(self.ground.clone(), journal, BTreeMap::new(), self.install()).map_err(failed)?;
        models.insert(id, Arc::new(queue));
        Ok(())
    }

    /// Notes a sign of life of a session.
    fn hear(&self, session: &str) {
        self.heard.lock().insert(session.to_owned(), Instant::now());
    }

    /// Notes a sign of life of a session that has models.
    fn hear_again(&self, session: &str) {
        let owns = |model: &Arc<ModelQueue>| model.record.session == session;
        if self.models.lock().values().any(owns) {
            self.hear(session);
        }
    }

    /// If all places are taken, unloads a model that could not be made. If there is none, the one that was
    /// silent for longest, if its client is gone.
    fn make_room(&self, id: &str) -> Result<(), Refusal> {
        let useless = {
            let (models, heard) = (self.models.lock(), self.heard.lock());
            if models.len() < self.max_models || models.contains_key(id) {
                return Ok(());
            }
            let last = |model: &ModelQueue| heard.get(&model.record.session).copied().unwrap_or(self.started);
            let longest = models.iter().min_by_key(|(_, model)| last(model));
            let silent = longest.filter(|(_, model)| last(model).elapsed() > SILENT);
            let failed = models.iter().find(|(_, model)| model.failed());
            failed.or(silent).map(|(id, _)| id.clone())
        };
        let Some(useless) = useless else { return Ok(()) };
        let silent = SILENT.as_secs();
        tracing::warn!("unloading the model {useless}: it could not be made, or its client has been silent for {silent} s");
        self.unload(&useless)
    }

    /// Unloads the models of a session that its client ends.
    fn finish(&self, session: &str) -> Result<(), Refusal> {
        self.heard.lock().remove(session);
        let owns = |(id, model): (&String, &Arc<ModelQueue>)| (model.record.session == session).then(|| id.clone());
        let own: Vec<String> = self.models.lock().iter().filter_map(owns).collect();
        own.iter().try_for_each(|id| self.unload(id))
    }

    /// A model that would load the weights at `path` after a restart.
    fn needs(&self, path: &str) -> Option<String> {
        // Not under the lock: a journal may be waited for.
        let models: Vec<Arc<ModelQueue>> = self.models.lock().values().cloned().collect();
        models.iter().find(|model| model.needs(path)).map(|model| model.record.id.clone())
    }

    /// Unloads a model. Its saved weights and its sampling sessions with names stay.
    fn unload(&self, id: &str) -> Result<(), Refusal> {
        let queue = self.models.lock().remove(id);
        // Clients that wait for answers hold the queue, too.
        if let Some(queue) = queue {
            queue.end();
        }
        let folder = self.ground.models.join(id);
        if folder.join("model.json").exists() {
            let unloaded = journal::unload(&folder).and_then(|()| self.ground.prune_sessions(id, 0));
            unloaded.map_err(|error| Refusal::new(500, error.to_string()))?;
        }
        Ok(())
    }
}

/// The beginning of what a client sent.
fn short(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::operation::Answer;
    use super::*;
    use crate::observe::Metrics;
    use crate::serve::tests::{config, policy};

    #[test]
    fn a_model_that_could_not_be_made_takes_no_place() {
        let (policy, state) = (policy(), tempfile::tempdir().unwrap());
        let (shared, _commands) = Shared::new(&policy, config(state.path()), Metrics::new()).unwrap();
        let settings = TinkerSettings { state: state.path().join("tinker"), max_models: 1 };
        let tinker = Tinker::open(&Arc::new(shared), [policy.clone(), policy], &settings).unwrap();
        let lora = |rank| LoraConfig { rank, ..LoraConfig::WHOLE };
        let create = |session: &str, lora, begins| tinker.create(format!("{session}:train:0"), session.to_owned(), lora, begins);
        let nothing = LoraConfig { train_mlp: false, train_attn: false, ..lora(4) };
        for (lora, why) in [(lora(100_000), "1 to 48, or 0"), (nothing, "set `train_attn`")] {
            let refusal = create("a", lora, None).unwrap_err();
            assert!(refusal.message().contains("`lora_config`") && refusal.message().contains(why), "{refusal:?}");
        }
        assert!(!TinkerModel::is_in(&tinker.ground.models.join("a:train:0")), "a restart does not try again");
        create("b", lora(4), Some(("tinker://a/weights/none".to_owned(), true))).unwrap();
        let failed = tinker.model("b:train:0").unwrap();
        assert!(create("c", lora(4), None).is_err(), "its client has not read why");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let answer = runtime.block_on(failed.answer(0, Duration::from_secs(3600))).unwrap().unwrap();
        assert!(matches!(&*answer, Answer::Failed { why, .. } if why.contains("no weights at")), "{answer:?}");
        create("c", lora(4), None).unwrap();
        assert!(tinker.models.lock().keys().eq(&["c:train:0"]));
        let refusal = create("d", lora(4), None).unwrap_err();
        assert!(refusal.message().contains("--max-models"), "{refusal:?}");
    }

    #[test]
    fn a_session_that_answers_requests_stays_loaded_and_the_oldest_other_goes() {
        let mut loaded = Loaded::default();
        let name = |at: usize| -> Arc<str> { format!("session-{at}").into() };
        loaded.active.insert(name(0), 1);
        let unloaded: Vec<Arc<str>> = (0..LOADED + 2).flat_map(|at| loaded.add(&name(at), 1)).collect();
        assert_eq!(unloaded, [name(1), name(2)]);
        loaded.active.remove(&name(0));
        assert_eq!(loaded.add(&name(3), 1), Vec::<Arc<str>>::new(), "used again, it counts as new");
        assert_eq!(loaded.add(&name(99), 1), [name(0)]);
        assert_eq!(loaded.add(&name(100), WHOLE).len(), WHOLE);
    }
}
