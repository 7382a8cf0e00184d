//! A live page as a source of the view: a task reads its events, and the newest wait until the screen
//! takes them. A lost connection is opened again.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rollflow::net::{Client, Endpoint, RemoteError, Tasks};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::{sleep, sleep_until};

use super::answers::{Found, Report, Row, Samples, Wanted, choose};
use super::view::{Connection, RunView, ShownSample, line};
use crate::page::{LiveEvent, as_part};

/// Longest wait for an answer.
const LIMIT: Duration = Duration::from_secs(30);
/// Longest time without a byte of the stream of events, which has signs of life every 15 seconds.
const STALL: Duration = Duration::from_secs(40);
/// Time before a lost connection is opened again.
const RETRY: Duration = Duration::from_secs(2);
/// Shortest time between two reports, and how many times longer than reading one it is.
const PAUSE: (Duration, u32) = (Duration::from_secs(2), 10);
/// Shortest time between two events: a page sends two a second.
const EVENT: Duration = Duration::from_millis(20);

/// Errors of a live page.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// The request failed.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The page asks for a token.
    #[error("the live page asks for a token: give it with --token-env NAME or --token-file FILE")]
    Token,
    /// The server is no live page.
    #[error(
        "{route} of the server is not that of a live page: {why}; give the address that `rollflow run --page` or `rollflow dashboard` prints"
    )]
    Foreign {
        /// Route.
        route: String,
        /// Reason.
        why: String,
    },
    /// The page has no runs.
    #[error("the live page has no runs yet")]
    Empty,
    /// No run has this name.
    #[error("the live page has no run {name:?}; it has {}", .listed.join(", "))]
    Unknown {
        /// Name.
        name: String,
        /// Names of its runs.
        listed: Vec<String>,
    },
    /// The page is not that of the run's process.
    #[error(
        "the server at the address of the run's page shows other runs; if the run is on another host, give that page's address"
    )]
    Other,
}

/// Answers that have come and were not shown yet.
#[derive(Default)]
struct Inbox {
    name: Option<String>,
    connection: Connection,
    row: Option<(Row, Instant)>,
    report: Option<Report>,
    live: Option<LiveEvent>,
    /// Results of orders.
    messages: Vec<String>,
}

/// A live page.
pub struct Page {
    shared: Arc<Shared>,
    tasks: Tasks,
    row: Option<(Row, Instant)>,
}

struct Shared {
    client: Client,
    wanted: Wanted,
    inbox: Mutex<Inbox>,
}

impl Page {
    /// Opens the page at `endpoint`.
    ///
    /// # Errors
    /// The address or the machine. A page that does not answer is no error: it is asked again.
    pub fn open(endpoint: Endpoint, wanted: Wanted) -> anyhow::Result<Self> {
        let client = Client::new("live page", endpoint)?;
        let inbox = Mutex::new(Inbox { connection: Connection::Connecting, ..Inbox::default() });
        let (shared, tasks) = (Arc::new(Shared { client, wanted, inbox }), Tasks::new()?);
        Ok(Page { shared, tasks, row: None })
    }

    /// Asks for the wanted run and waits for the answer.
    pub fn find(&self) -> Result<(), PageError> {
        self.tasks.block_on(self.shared.find()).map(drop)
    }

    /// Begins to read.
    pub fn follow(&self) {
        let shared = self.shared.clone();
        self.tasks.spawn(async move {
            loop {
                let Err(error) = shared.session().await;
                shared.inbox.lock().connection = Connection::Lost(line(&error.to_string()));
                sleep(RETRY).await;
            }
        });
    }

    /// Brings the view up to date. Returns results of orders.
    pub fn read(&mut self, view: &mut RunView) -> Vec<String> {
        let (row, report, live, messages);
        {
            let mut inbox = self.shared.inbox.lock();
            view.connection = inbox.connection.clone();
            (row, report, live) = (inbox.row.take(), inbox.report.take(), inbox.live.take());
            messages = std::mem::take(&mut inbox.messages);
        }
        if view.connection != Connection::Connected {
            view.end_live();
        }
        self.row = row.or(self.row.take());
        if let Some((row, read)) = &self.row {
            row.show(*read, view);
        }
        if let Some(report) = report {
            report.show(view);
        }
        if let Some(live) = live {
            view.set_live(live);
        }
        messages
    }

    /// Returns true if there is something to show: a report and, of a running run, an event.
    pub fn is_ready(&self) -> bool {
        let inbox = self.shared.inbox.lock();
        let ended = inbox.row.as_ref().is_some_and(|(row, _)| !row.live);
        let reported = inbox.report.is_some() || matches!(self.shared.wanted, Wanted::Begun { .. });
        matches!(inbox.connection, Connection::Lost(_)) || (reported && (ended || inbox.live.is_some()))
    }

    /// Sends an order; [`Page::read`] has the result.
    pub fn order(&self, order: &'static str) {
        let shared = self.shared.clone();
        self.tasks.spawn(async move {
            let Some(name) = shared.inbox.lock().name.clone() else { return };
            let path = format!("/api/runs/{}/orders/{order}", as_part(&name));
            let message = match shared.client.post(&path, &Value::Null, LIMIT).await {
                Ok(_) => format!("ordered: {order}"),
                Err(error) => line(&error.to_string()),
            };
            shared.inbox.lock().messages.push(message);
        });
    }
}

impl Shared {
    async fn read<T: DeserializeOwned>(&self, route: &str) -> Result<T, PageError> {
        let page = self.client.get_bytes(route, LIMIT).await.map_err(refused)?;
        let foreign = |error: serde_json::Error| PageError::Foreign { route: route.to_owned(), why: error.to_string() };
        serde_json::from_slice(&page).map_err(foreign)
    }

    /// The row of the wanted run.
    async fn find(&self) -> Result<Row, PageError> {
        choose(self.read("/api/runs").await?, &self.wanted)
    }

    /// Samples of the newest groups, the oldest first.
    async fn samples(&self, run: &str) -> Result<Vec<ShownSample>, PageError> {
        let found: Found = self.read(&format!("{run}/samples")).await?;
        let mut samples = Vec::new();
        for key in found.groups().iter().rev() {
            samples.extend(self.read::<Samples>(&format!("{run}/samples/{key}")).await?.shown());
        }
        Ok(samples)
    }

    /// Reads until the connection is lost.
    async fn session(&self) -> Result<Infallible, PageError> {
        // The reader of a folder has all but events from its files.
        let reports = !matches!(self.wanted, Wanted::Begun { .. });
        let row = self.find().await?;
        let path = format!("/api/runs/{}", as_part(&row.name));
        {
            let mut inbox = self.inbox.lock();
            inbox.name = Some(row.name.clone());
            inbox.row = reports.then(|| (row, Instant::now()));
        }
        let mut events = self.client.get_events(&format!("{path}/events"), STALL).await.map_err(refused)?;
        self.inbox.lock().connection = Connection::Connected;
        let (mut due, mut earliest) = (reports.then(tokio::time::Instant::now), tokio::time::Instant::now());
        loop {
            let event = tokio::select! {
                event = events.next() => event?,
                () = sleep_until(due.unwrap_or(earliest)), if due.is_some() => {
                    let began = tokio::time::Instant::now();
                    let row = (self.find().await?, Instant::now());
                    let mut report: Report = self.read(&path).await?;
                    report.samples = self.samples(&path).await?;
                    earliest = began + PAUSE.0.max(began.elapsed() * PAUSE.1);
                    due = None;
                    let mut inbox = self.inbox.lock();
                    (inbox.row, inbox.report) = (Some(row), Some(report));
                    continue;
                }
            };
            let event = event.unwrap_or_default();
            // The other event names the files that have grown.
            match serde_json::from_str::<LiveEvent>(&event) {
                Ok(live) if !live.flow.stages.is_empty() => self.inbox.lock().live = Some(live),
                _ if reports => due = Some(due.unwrap_or(earliest)),
                _ => {}
            }
            sleep(EVENT).await;
        }
    }
}

fn refused(error: RemoteError) -> PageError {
    match error.fault {
        rollflow::net::Fault::Refused { status: 401, .. } => PageError::Token,
        _ => error.into(),
    }
}
