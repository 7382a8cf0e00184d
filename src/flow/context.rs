//! The run context: what the stages of one flow share.

use std::any::{Any, TypeId, type_name};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Settings that the stages of one flow share: the seed, the run folder, and one value of each other type.
///
/// A stage takes what it needs from here in its `attach`, when it is put on the graph.
#[derive(Clone, Default)]
pub struct RunContext {
    seed: Option<u64>,
    folder: Option<PathBuf>,
    values: BTreeMap<TypeId, Value>,
}

#[derive(Clone)]
struct Value {
    name: &'static str,
    value: Arc<dyn Any + Send + Sync>,
}

impl RunContext {
    /// Seed of the run's randomness, if one was set.
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// Folder that the run writes to, if one was set.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Value of type `T`, if the flow shares one.
    pub fn get<T: Any + Clone>(&self) -> Option<T> {
        self.values.get(&TypeId::of::<T>())?.value.downcast_ref().cloned()
    }

    /// Sets an unset `field` to the shared value of its type.
    pub fn fill<T: Any + Clone>(&self, field: &mut Option<T>) {
        if field.is_none() {
            *field = self.get();
        }
    }

    /// Shares `value` with the stages that are put on the graph afterwards. Replaces the value of the same type.
    pub fn insert<T: Any + Send + Sync>(&mut self, value: T) {
        let value = Value { name: type_name::<T>(), value: Arc::new(value) };
        self.values.insert(TypeId::of::<T>(), value);
    }

    pub(super) fn set_seed(&mut self, seed: u64) {
        self.seed = Some(seed);
    }

    pub(super) fn set_folder(&mut self, folder: PathBuf) {
        self.folder = Some(folder);
    }
}

impl fmt::Debug for RunContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values: Vec<_> = self.values.values().map(|value| value.name).collect();
        f.debug_struct("RunContext").field("seed", &self.seed).field("folder", &self.folder).field("values", &values).finish()
    }
}
