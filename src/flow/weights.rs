//! Weights edge: the one feedback of the graph (law F2). The newest version wins, publishing never
//! blocks, versions only rise (law V1).

use std::sync::{Arc, OnceLock, Weak};

use super::sync::watch;

/// Identity of a weights edge: equal for its two ends and their clones.
#[derive(Clone, Debug)]
pub(crate) struct WeightsId {
    /// Set once weights were published.
    edge: Arc<OnceLock<()>>,
    reader: Weak<()>,
    publisher: Weak<()>,
}

impl PartialEq for WeightsId {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.edge, &other.edge)
    }
}

impl WeightsId {
    /// Returns true if a reading end exists.
    pub(crate) fn has_readers(&self) -> bool {
        self.reader.strong_count() > 0
    }

    /// Returns true if weights were published, or a publishing end exists.
    pub(crate) fn has_weights_or_publisher(&self) -> bool {
        self.edge.get().is_some() || self.publisher.strong_count() > 0
    }
}

/// Error of a publish: the version is not newer than the present one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("weights version {offered} was published after version {current}; versions count publishes and are never reused")]
pub struct OutdatedVersion {
    /// Version that was offered.
    pub offered: u64,
    /// Present version, which stays.
    pub current: u64,
}

type Slot<W> = Option<(u64, Arc<W>)>;

/// Publishing end. There is one, because versions have one writer.
#[derive(Debug)]
pub struct WeightsTx<W> {
    slot: watch::Sender<Slot<W>>,
    id: WeightsId,
    /// Held by the publishing end.
    _publisher: Arc<()>,
}

/// Reading end; clone it for every reader.
#[derive(Debug)]
pub struct WeightsRx<W> {
    slot: watch::Receiver<Slot<W>>,
    id: WeightsId,
    /// Held by every reading end.
    reader: Arc<()>,
}

/// Returns the ends of a new weights edge.
///
/// Stages declare their ends in their specifications ([`publishes`](super::StageSpec::publishes),
/// [`subscribes`](super::StageSpec::subscribes)), for checks and drawings.
pub fn weights<W: Send + Sync + 'static>() -> (WeightsTx<W>, WeightsRx<W>) {
    let (sender, receiver) = watch::channel(None);
    let (reader, publisher) = (Arc::new(()), Arc::new(()));
    let id = WeightsId { edge: Arc::default(), reader: Arc::downgrade(&reader), publisher: Arc::downgrade(&publisher) };
    (WeightsTx { slot: sender, id: id.clone(), _publisher: publisher }, WeightsRx { slot: receiver, id, reader })
}

/// Returns a weights edge of a flow: it has a reader or a publisher only if a stage declares so.
pub(super) fn flow_weights<W: Send + Sync + 'static>() -> (WeightsTx<W>, WeightsRx<W>) {
    let (to, from) = weights();
    (WeightsTx { _publisher: Arc::default(), ..to }, WeightsRx { reader: Arc::default(), ..from })
}

/// Reading end without a publisher. [`RunContext::subscribe`](super::RunContext::subscribe)
/// replaces it with the flow's edge.
impl<W: Send + Sync + 'static> Default for WeightsRx<W> {
    fn default() -> Self {
        weights().1
    }
}

impl<W> WeightsTx<W> {
    /// Replaces the weights that readers get. Never waits; costs a lock and a wake-up per waiting
    /// reader.
    pub fn publish(&self, version: u64, weights: Arc<W>) -> Result<(), OutdatedVersion> {
        let mut outdated = None;
        self.slot.send_if_modified(|slot| {
            outdated = slot.as_ref().map(|(current, _)| *current).filter(|current| *current >= version);
            if outdated.is_none() {
                *slot = Some((version, weights));
            }
            outdated.is_none()
        });
        self.id.edge.get_or_init(|| ());
        outdated.map_or(Ok(()), |current| Err(OutdatedVersion { offered: version, current }))
    }

    /// Number of reading ends.
    pub fn readers(&self) -> usize {
        self.slot.receiver_count()
    }

    pub(crate) fn id(&self) -> &WeightsId {
        &self.id
    }
}

impl<W> WeightsRx<W> {
    /// Returns the newest version, if there is one. Never waits; costs a lock and a reference
    /// count.
    pub fn latest(&self) -> Option<(u64, Arc<W>)> {
        self.slot.borrow().clone()
    }

    /// Number of the newest version, if there is one.
    pub fn version(&self) -> Option<u64> {
        self.slot.borrow().as_ref().map(|(version, _)| *version)
    }

    /// Returns true if a version newer than `version` was published. Cheap enough for a call
    /// between two tokens.
    pub fn has_newer_than(&self, version: u64) -> bool {
        self.version().is_some_and(|newest| newest > version)
    }

    pub(crate) fn id(&self) -> &WeightsId {
        &self.id
    }

    /// Waits for version `at_least` or newer; `None` when the publisher ends before. Cancel-safe.
    pub(crate) async fn reach(&mut self, at_least: u64) -> Option<(u64, Arc<W>)> {
        let reached = |slot: &Slot<W>| slot.as_ref().is_some_and(|(version, _)| *version >= at_least);
        self.slot.wait_for(reached).await.ok().and_then(|slot| slot.clone())
    }
}

impl<W> Clone for WeightsRx<W> {
    fn clone(&self) -> Self {
        WeightsRx { slot: self.slot.clone(), id: self.id.clone(), reader: Arc::clone(&self.reader) }
    }
}
