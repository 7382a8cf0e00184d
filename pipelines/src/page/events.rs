//! Server-sent events of one run: `changed` when its files grew, and `live` twice a second while this
//! process runs it.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use futures_util::Stream;
use futures_util::stream::unfold;
use rollflow::flow::Report;
use serde_json::json;
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::live::LiveEvent;
use super::runs::RunState;
use crate::run::observed::Observed;

/// Time between two `live` events.
const TICK: Duration = Duration::from_millis(500);
/// Ticks between two looks at the files.
const LOOK: u64 = 2;

/// State of a stream of events.
struct Watch {
    folder: PathBuf,
    observed: Option<Arc<Observed>>,
    steerable: bool,
    clock: Interval,
    ticks: u64,
    files: Option<RunState>,
    before: Option<Report>,
    waiting: VecDeque<Event>,
}

/// Events of the run in `folder`, which this process may observe.
pub(super) fn events(
    folder: PathBuf,
    observed: Option<Arc<Observed>>,
    steerable: bool,
) -> Sse<impl Stream<Item = Result<Event, Infallible>> + Send + 'static> {
    let mut clock = interval(TICK);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let watch = Watch { folder, observed, steerable, clock, ticks: 0, files: None, before: None, waiting: VecDeque::new() };
    let events = unfold(watch, |mut watch| async move {
        while watch.waiting.is_empty() {
            watch.clock.tick().await;
            watch.look().await;
        }
        watch.waiting.pop_front().map(|event| (Ok(event), watch))
    });
    Sse::new(events).keep_alive(KeepAlive::default())
}

impl Watch {
    /// Queues what is new.
    async fn look(&mut self) {
        if let Some(observed) = &self.observed
            && let Some(report) = observed.report()
        {
            let event = LiveEvent::of(observed, self.before.as_ref(), &report, self.steerable);
            let json = serde_json::to_string(&event).ok();
            self.waiting.extend(json.map(|json| Event::default().event("live").data(json)));
            self.before = Some(report);
        }
        if self.ticks.is_multiple_of(LOOK) {
            let folder = self.folder.clone();
            // Opening files may block.
            if let Ok(now) = tokio::task::spawn_blocking(move || RunState::of(&folder)).await {
                let changed = self.files.as_ref().map_or_else(Vec::new, |before| now.changed(before));
                if !changed.is_empty() {
                    self.waiting.push_back(Event::default().event("changed").data(json!({ "files": changed }).to_string()));
                }
                self.files = Some(now);
            }
        }
        self.ticks += 1;
    }
}
