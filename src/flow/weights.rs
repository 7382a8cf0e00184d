//! The weights edge: the one feedback of the graph (law F2). Newest wins, publishing never blocks, versions only rise (law V1).

use std::sync::{Arc, OnceLock, Weak};

use super::sync::watch;

/// Joins the ends of one weights edge, so that a graph can draw it: equal for the two ends and their clones.
#[derive(Clone, Debug)]
pub struct WeightsId {
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
    /// Whether any reading end exists.
    pub(crate) fn has_readers(&self) -> bool {
        self.reader.strong_count() > 0
    }

    /// Whether readers have weights, or a publisher that may give them some.
    pub(crate) fn has_weights_or_publisher(&self) -> bool {
        self.edge.get().is_some() || self.publisher.strong_count() > 0
    }
}

impl Eq for WeightsId {}

/// A version was published that is not newer than the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("weights version {offered} was published after version {current}; versions count publishes and are never reused")]
pub struct OutdatedVersion {
    /// What was offered.
    pub offered: u64,
    /// What is current, and stays so.
    pub current: u64,
}

type Slot<W> = Option<(u64, Arc<W>)>;

/// The publisher's end. There is one: the trainer is the only writer of versions.
#[derive(Debug)]
pub struct WeightsTx<W> {
    slot: watch::Sender<Slot<W>>,
    id: WeightsId,
    /// Held by the publishing end.
    _publisher: Arc<()>,
}

/// A reader's end; clone it for every reader.
#[derive(Debug)]
pub struct WeightsRx<W> {
    slot: watch::Receiver<Slot<W>>,
    id: WeightsId,
    /// Held by every reading end.
    reader: Arc<()>,
}

/// A weights edge. Give the ends to the stages and name their ids in the specs ([`publishes`](super::StageSpec::publishes),
/// [`subscribes`](super::StageSpec::subscribes)) to have the edge drawn.
pub fn weights<W: Send + Sync + 'static>() -> (WeightsTx<W>, WeightsRx<W>) {
    let (sender, receiver) = watch::channel(None);
    let (reader, publisher) = (Arc::new(()), Arc::new(()));
    let id = WeightsId { edge: Arc::default(), reader: Arc::downgrade(&reader), publisher: Arc::downgrade(&publisher) };
    (WeightsTx { slot: sender, id: id.clone(), _publisher: publisher }, WeightsRx { slot: receiver, id, reader })
}

/// A weights edge whose ends only stages of one flow hold: it has a reader or a publisher if a stage declares so.
pub(super) fn flow_weights<W: Send + Sync + 'static>() -> (WeightsTx<W>, WeightsRx<W>) {
    let (to, from) = weights();
    (WeightsTx { _publisher: Arc::default(), ..to }, WeightsRx { reader: Arc::default(), ..from })
}

/// An end without a publisher. [`RunContext::subscribe`](super::RunContext::subscribe) replaces it with the flow's edge.
impl<W: Send + Sync + 'static> Default for WeightsRx<W> {
    fn default() -> Self {
        weights().1
    }
}

impl<W> WeightsTx<W> {
    /// Replaces what readers see. Never waits; costs a lock and a wake-up per waiting reader.
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

    /// How many readers' ends there are now.
    pub fn readers(&self) -> usize {
        self.slot.receiver_count()
    }

    /// The edge's identity.
    pub fn id(&self) -> WeightsId {
        self.id.clone()
    }
}

impl<W> WeightsRx<W> {
    /// The newest version, if there is any. Never waits; costs a lock and a reference count.
    pub fn latest(&self) -> Option<(u64, Arc<W>)> {
        self.slot.borrow().clone()
    }

    /// The newest version's number, if there is any.
    pub fn version(&self) -> Option<u64> {
        self.slot.borrow().as_ref().map(|(version, _)| *version)
    }

    /// Whether something newer than `version` was published. Cheap enough to ask between two tokens.
    pub fn has_newer_than(&self, version: u64) -> bool {
        self.version().is_some_and(|newest| newest > version)
    }

    /// The edge's identity.
    pub fn id(&self) -> WeightsId {
        self.id.clone()
    }

    /// Waits for version `at_least` or a newer one; `None` when the publisher went without. Cancel-safe.
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
