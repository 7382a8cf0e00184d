//! The run context: what the stages of one flow share.

use std::any::{Any, TypeId, type_name};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use super::weights::flow_weights;
use super::{WeightsRx, WeightsTx};

/// Settings that the stages of one flow share: the seed, the run folder, and one value of each
/// other type.
///
/// A stage takes what it needs from here in its `attach`, when it is put on the graph.
#[derive(Default)]
pub struct RunContext {
    pub(super) seed: Option<u64>,
    pub(super) folder: Option<PathBuf>,
    /// Values with the names of their types; each weights edge is a [`WeightsEdge`].
    values: BTreeMap<TypeId, (&'static str, Box<dyn Any + Send>)>,
}

/// Ends of a weights edge of the flow. The publishing end is taken by one stage.
type WeightsEdge<W> = (Option<WeightsTx<W>>, WeightsRx<W>);

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
        self.values.get(&TypeId::of::<T>())?.1.downcast_ref().cloned()
    }

    /// Sets an unset `field` to the shared value of its type.
    pub fn fill<T: Any + Clone>(&self, field: &mut Option<T>) {
        if field.is_none() {
            *field = self.get();
        }
    }

    /// Returns true if a value of type `T` is shared.
    pub(super) fn holds<T: Any>(&self) -> bool {
        self.values.contains_key(&TypeId::of::<T>())
    }

    /// Shares `value` with the stages that are put on the graph afterwards. Replaces the value of
    /// the same type.
    pub fn insert<T: Any + Send>(&mut self, value: T) {
        self.values.insert(TypeId::of::<T>(), (type_name::<T>(), Box::new(value)));
    }

    /// Has `reader` read the flow's edge for weights of this type, unless it reads another edge
    /// already.
    pub fn subscribe<W: Send + Sync + 'static>(&mut self, reader: &mut WeightsRx<W>) {
        if !reader.id().has_weights_or_publisher() {
            *reader = self.edge().1.clone();
        }
    }

    /// Publishing end of the flow's edge for weights of this type. It belongs to the first stage
    /// that asks.
    pub fn publisher<W: Send + Sync + 'static>(&mut self) -> Option<WeightsTx<W>> {
        self.edge().0.take()
    }

    fn edge<W: Send + Sync + 'static>(&mut self) -> &mut WeightsEdge<W> {
        let (_, edge) = self.values.entry(TypeId::of::<WeightsEdge<W>>()).or_insert_with(|| {
            let (to, from) = flow_weights::<W>();
            let edge: WeightsEdge<W> = (Some(to), from);
            (type_name::<WeightsEdge<W>>(), Box::new(edge))
        });
        edge.downcast_mut().expect("values are stored by their types")
    }
}

impl fmt::Debug for RunContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values: Vec<_> = self.values.values().map(|(name, _)| name).collect();
        f.debug_struct("RunContext").field("seed", &self.seed).field("folder", &self.folder).field("values", &values).finish()
    }
}
