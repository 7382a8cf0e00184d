//! Server-sent events of one run: `changed` when its files grew, and `live` twice a second while this
//! process runs it, or the run's process has a page.

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
use super::relay::{Relay, Relayed};
use super::runs::{RunState, Runs};
use crate::run::RECORD;
use crate::run::observed::Observed;

/// Time between two `live` events.
const TICK: Duration = Duration::from_millis(500);
/// Ticks between two looks at the files.
const LOOK: u64 = 2;
/// Ticks between two attempts to find the page of a run's process.
const AGAIN: u64 = 10;

/// State of a stream of events.
struct Watch {
    folder: PathBuf,
    source: Source,
    steerable: bool,
    clock: Interval,
    ticks: u64,
    files: Option<RunState>,
    waiting: VecDeque<Event>,
}

/// Where `live` events come from.
enum Source {
    /// This process, with its report at the event before.
    Here(Arc<Observed>, Option<Report>),
    /// The page of the process that works on the run, once it is found.
    There(Arc<Runs>, Option<Relayed>),
}

/// Events of the run in `folder`.
pub(super) fn events(runs: Arc<Runs>, folder: PathBuf) -> Sse<impl Stream<Item = Result<Event, Infallible>> + Send + 'static> {
    let steerable = runs.steerable;
    let source = runs.live(&folder).map_or(Source::There(runs, None), |observed| Source::Here(observed, None));
    let mut clock = interval(TICK);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let watch = Watch { folder, source, steerable, clock, ticks: 0, files: None, waiting: VecDeque::new() };
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
        if let Some(event) = self.live() {
            let json = serde_json::to_string(&event).ok();
            self.waiting.extend(json.map(|json| Event::default().event("live").data(json)));
        }
        if self.ticks.is_multiple_of(LOOK) {
            let folder = self.folder.clone();
            // Opening files may block.
            if let Ok(now) = tokio::task::spawn_blocking(move || RunState::of(&folder)).await {
                let changed = self.files.as_ref().map_or_else(Vec::new, |before| now.changed(before));
                self.find_page(&now, changed.contains(&RECORD)).await;
                if !changed.is_empty() {
                    self.waiting.push_back(Event::default().event("changed").data(json!({ "files": changed }).to_string()));
                }
                self.files = Some(now);
            }
        }
        self.ticks += 1;
    }

    /// The run now, if something is known of it.
    fn live(&mut self) -> Option<LiveEvent> {
        match &mut self.source {
            Source::Here(observed, before) => {
                let report = observed.report()?;
                let event = LiveEvent::of(observed, before.as_ref(), &report, self.steerable);
                *before = Some(report);
                Some(event)
            }
            Source::There(_, relayed) => {
                let event = relayed.as_ref()?.take()?;
                let paused = event.paused.filter(|_| self.steerable);
                Some(LiveEvent { paused, ..event })
            }
        }
    }

    /// Connects to the page of the run's process: at first, when the run begins again, and at times after
    /// the connection was lost.
    async fn find_page(&mut self, run: &RunState, begun: bool) {
        let due = begun || self.ticks.is_multiple_of(AGAIN);
        if let Source::There(runs, relayed) = &mut self.source
            && run.working
            && due
            && relayed.as_ref().is_none_or(Relayed::has_ended)
        {
            let (runs, folder) = (runs.clone(), self.folder.clone());
            // Reading the record may block.
            let found = tokio::task::spawn_blocking(move || runs.elsewhere(&folder)).await;
            *relayed = found.ok().flatten().map(Relay::follow);
        }
    }
}
