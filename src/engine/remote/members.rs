//! Engines that join and leave during a run: a file that is watched, or a name that is looked up.
//!
//! An address that appears is probed and joins the fleet, which brings it the newest weights before
//! it gets work. An address that is missing twice in a row leaves: its engine finishes what it has
//! begun for a while, and the rest continues elsewhere. If the file cannot be read or the name not
//! be resolved, the members stay.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::time::timeout;

use super::{Capabilities, FleetHandle, InferenceEngine, parse_address};
use crate::engine::settings::EngineKind;
use crate::net::now;
use crate::util::secrets::masked;

/// Time between two looks at the list.
const LOOK: Duration = Duration::from_secs(2);

/// Time limit of the probe of a new member, and of a lookup.
const PROBE: Duration = Duration::from_secs(5);

/// Looks in a row without an address after which its engine leaves.
const MISSES: u32 = 2;

/// Most bytes of a list that are read.
const LONGEST_LIST: u64 = 1 << 20;

/// List of a fleet's members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberList {
    /// File with an address a line, such as `http://host:port` or `vllm+http://host:port`
    /// ([`parse_address`]). Empty lines and `#` comments are ignored.
    File(PathBuf),
    /// Host and port: each address of the host is a member, by `http`.
    Dns(String, u16),
}

impl FromStr for MemberList {
    type Err = String;

    /// Reads `dns://host:port`, or else a path.
    fn from_str(text: &str) -> Result<Self, String> {
        let Some(name) = text.strip_prefix("dns://") else {
            return match text.split_once("://") {
                Some((scheme, _)) => Err(format!("{scheme}:// is no kind of list; write a file's path or dns://host:port")),
                None if text.is_empty() => Err("it is empty; write a file's path or dns://host:port".to_owned()),
                None => Ok(MemberList::File(text.into())),
            };
        };
        match name.rsplit_once(':').map(|(host, port)| (host, port.parse())) {
            Some((host, Ok(port))) if !host.is_empty() => Ok(MemberList::Dns(host.to_owned(), port)),
            _ => Err("a name needs a port, as in dns://engines.lab:30000".to_owned()),
        }
    }
}

impl MemberList {
    /// Addresses on the list, and what is wrong with the others.
    async fn read(&self) -> io::Result<(BTreeSet<String>, Vec<String>)> {
        match self {
            MemberList::File(path) => {
                let length = tokio::fs::metadata(path).await?.len();
                if length > LONGEST_LIST {
                    return Err(io::Error::other(format!("it has {length} bytes, and at most {LONGEST_LIST} are read")));
                }
                Ok(addresses(&tokio::fs::read_to_string(path).await?))
            }
            MemberList::Dns(host, port) => {
                let late = |_| io::Error::other(format!("no answer within {} s", PROBE.as_secs()));
                let found = timeout(PROBE, tokio::net::lookup_host((host.as_str(), *port))).await.map_err(late)??;
                Ok((found.map(|address| format!("http://{address}")).collect(), Vec::new()))
            }
        }
    }

    /// Addresses on the list now.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, the name not be resolved, or a line is no address.
    pub async fn addresses(&self) -> io::Result<BTreeSet<String>> {
        let (found, wrong) = self.read().await?;
        if wrong.is_empty() { Ok(found) } else { Err(io::Error::other(wrong.join("; "))) }
    }

    fn name(&self) -> String {
        match self {
            MemberList::File(path) => path.display().to_string(),
            MemberList::Dns(host, port) => format!("dns://{host}:{port}"),
        }
    }
}

/// Addresses in a text, one a line, and what is wrong with other lines.
fn addresses(text: &str) -> (BTreeSet<String>, Vec<String>) {
    let (mut found, mut wrong) = (BTreeSet::new(), Vec::new());
    for (at, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim().trim_end_matches('/');
        match parse_address(line, EngineKind::default()) {
            _ if line.is_empty() => {}
            Ok(_) => drop(found.insert(line.to_owned())),
            Err(why) => wrong.push(format!("line {} is {:?}: {why}", at + 1, masked(line))),
        }
    }
    (found, wrong)
}

/// Client of the engine at an address, or the reason why there can be none.
type Connect = Arc<dyn Fn(&str) -> Result<Arc<dyn InferenceEngine>, String> + Send + Sync>;

/// Reason for which an engine with these capabilities cannot be used.
type Accept = Arc<dyn Fn(&dyn InferenceEngine, &Capabilities) -> Result<(), String> + Send + Sync>;

/// Members of a fleet that a list names, in addition to others.
pub struct Members {
    fleet: FleetHandle,
    list: MemberList,
    drain: Duration,
    connect: Connect,
    accept: Accept,
    present: BTreeMap<String, Present>,
    /// Places that leave, and when each is removed.
    leaving: BTreeMap<usize, Instant>,
    /// What was logged last about the list, an entry for the list itself and one for each address.
    logged: BTreeMap<String, String>,
}

/// Engine of an address on the list.
struct Present {
    place: usize,
    /// Looks in a row that did not find it.
    misses: u32,
}

impl Members {
    /// Members of `fleet` that `list` names. `connect` makes the client of an address, and `accept`
    /// rejects an engine that the run can't use. One that leaves may work for `drain` longer.
    pub fn new(
        fleet: &FleetHandle,
        list: MemberList,
        drain: Duration,
        connect: impl Fn(&str) -> Result<Arc<dyn InferenceEngine>, String> + Send + Sync + 'static,
        accept: impl Fn(&dyn InferenceEngine, &Capabilities) -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        Members {
            fleet: fleet.clone(),
            list,
            drain,
            connect: Arc::new(connect),
            accept: Arc::new(accept),
            present: BTreeMap::new(),
            leaving: BTreeMap::new(),
            logged: BTreeMap::new(),
        }
    }

    /// Follows the list for ever. Cancel-safe.
    pub async fn follow(mut self) {
        loop {
            self.look().await;
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Looks at the list once: new engines join, missing ones leave. What is wrong is logged, once.
    /// Cancel-safe. Takes at most five seconds for a lookup, and five for the probes.
    pub async fn look(&mut self) {
        let (list, name) = (self.list.clone(), self.list.name());
        match list.read().await {
            Ok((listed, wrong)) => {
                self.log(&name, wrong.join("; "));
                self.join(&listed).await;
                self.miss(&listed);
            }
            Err(error) => self.log(&name, error.to_string()),
        }
        let now = now();
        for (place, _) in self.leaving.extract_if(.., |_, until| *until <= now) {
            self.fleet.remove(place);
        }
    }

    /// Number of members on the list.
    pub fn count(&self) -> usize {
        self.present.len()
    }

    /// Last complaint about the list or an address on it, for an error.
    pub fn complaint(&self) -> String {
        self.logged.iter().map(|(what, why)| format!("{what}: {why}")).collect::<Vec<_>>().join("; ")
    }

    /// Lets new servers join. Two members at one address would load weights over each other's.
    async fn join(&mut self, listed: &BTreeSet<String>) {
        let engines = self.fleet.staying().into_iter().filter_map(|place| self.fleet.engine(place));
        let mut taken: BTreeSet<String> = engines.filter_map(|engine| engine.address().map(str::to_owned)).collect();
        let url = |address: &str| parse_address(address, EngineKind::default()).map_or(address, |(_, url)| url).to_owned();
        let new = listed.iter().filter(|address| !self.present.contains_key(*address));
        let (new, twice): (Vec<_>, Vec<_>) = new.partition(|address| taken.insert(url(address)));
        for address in twice {
            let why = "its server is in the fleet already, or on another line; name it once";
            self.log(address, why.to_owned());
        }
        let probes = new.into_iter().map(|address| {
            let (address, connect, accept) = (address.clone(), self.connect.clone(), self.accept.clone());
            async move {
                let engine = probed(&address, &connect, &accept).await;
                (address, engine)
            }
        });
        for (address, engine) in join_all(probes).await {
            match engine {
                Ok(engine) => {
                    tracing::info!("{} joins", engine.name());
                    let place = self.fleet.join(engine);
                    self.logged.remove(&address);
                    self.present.insert(address, Present { place, misses: 0 });
                }
                Err(why) => self.log(&address, why),
            }
        }
        let list = self.list.name();
        self.logged.retain(|what, _| *what == list || listed.contains(what));
    }

    fn miss(&mut self, listed: &BTreeSet<String>) {
        for (address, present) in &mut self.present {
            present.misses = if listed.contains(address) { 0 } else { present.misses + 1 };
        }
        let until = now() + self.drain;
        for (_, Present { place, .. }) in self.present.extract_if(.., |_, present| present.misses >= MISSES) {
            tracing::info!("{} leaves", self.fleet.name(place));
            self.fleet.leave(place);
            self.leaving.insert(place, until);
        }
    }

    /// Logs what is wrong with the list or an address, if it has changed.
    fn log(&mut self, what: &str, why: String) {
        if why.is_empty() {
            self.logged.remove(what);
        } else if self.logged.get(what) != Some(&why) {
            tracing::warn!("members of the fleet: {}: {why}", masked(what));
            self.logged.insert(what.to_owned(), why);
        }
    }
}

/// An engine that answers and can be used.
async fn probed(address: &str, connect: &Connect, accept: &Accept) -> Result<Arc<dyn InferenceEngine>, String> {
    let engine = connect(address)?;
    let late = |_| format!("no answer within {} s", PROBE.as_secs());
    let found = timeout(PROBE, engine.probe()).await.map_err(late)?.map_err(|error| error.to_string())?;
    accept(engine.as_ref(), &found)?;
    Ok(engine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_a_file_or_a_name_with_a_port() {
        let of = |text: &str| text.parse::<MemberList>();
        assert_eq!(of("members.txt"), Ok(MemberList::File("members.txt".into())));
        assert_eq!(of("dns://engines.default.svc:30000"), Ok(MemberList::Dns("engines.default.svc".into(), 30000)));
        for wrong in ["", "dns://", "dns://host", "dns://:1", "dns://host:x", "dns://host:70000", "etcd://host:1"] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn lines_are_addresses_or_told_with_their_number() {
        let (found, wrong) = addresses("# two\n\nhttp://a:1/ \n vllm+http://b:2 # the second\nftp://c:3\nhttp://a:1\n");
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["http://a:1", "vllm+http://b:2"]);
        assert!(wrong.len() == 1 && wrong[0].starts_with("line 5 is"), "{wrong:?}");
    }

    #[tokio::test]
    async fn a_server_that_the_fleet_has_does_not_join_once_more_under_another_name() {
        let connect = |address: &str| {
            let (kind, url) = parse_address(address, EngineKind::Rollflow)?;
            crate::engine::remote::connect(kind, url, None).map_err(|error| error.to_string())
        };
        let fleet = FleetHandle::new(vec![connect("http://127.0.0.1:9/").unwrap()]);
        let list = MemberList::File("members.txt".into());
        let mut members = Members::new(&fleet, list, Duration::ZERO, connect, |_, _| Ok(()));
        let listed = ["http://127.0.0.1:9", "vllm+http://127.0.0.1:9"].map(str::to_owned).into();
        members.join(&listed).await;
        assert_eq!((fleet.places().len(), members.count()), (1, 0));
        assert_eq!(members.complaint().matches("in the fleet already").count(), 2, "{}", members.complaint());
    }
}
