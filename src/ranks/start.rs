//! Start of a run's ranks: each rank reports its program and host, and rank 0 compares all.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::meeting::address_towards;
use super::member::bye;
use super::watch::ENDED;
use super::{CollectiveError, Place, RankError, Store};

/// A rank's description of itself at the start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub size: usize,
    /// Name of its host in messages. Hosts may have equal names.
    pub host: String,
    /// Identity of its machine, whose GPUs it computes on.
    pub machine: String,
    /// Identity of its network: ranks with the same reach each other over loopback.
    pub network: String,
    pub process: u32,
    pub address: String,
    /// The GPU that it computes on.
    pub gpu: Option<String>,
    /// Type of that GPU, if ranks hold the same part of the state: numbers may differ between types.
    pub gpu_type: Option<String>,
    /// Reason for which it cannot compute there.
    pub trouble: Option<String>,
    /// Version and checksum of the program.
    pub program: String,
    /// Lines of the resolved recipe, without secrets, and the checksum of all of it.
    pub recipe: Vec<String>,
    pub checksum: u32,
    /// Checksums of the models that this host has, by their keys.
    pub models: BTreeMap<String, u32>,
}

/// Outcome of rank 0's comparison of all ranks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Verdict {
    /// Problems, or none.
    pub problems: Vec<String>,
    pub size: usize,
    /// Identity of each rank's network.
    pub networks: Vec<String>,
    pub labels: Vec<String>,
    /// Rank 0's address for the others.
    pub address: String,
}

impl Verdict {
    /// Address of a rank for the others. One on rank 0's host may know that host by a loopback address.
    pub fn address_of<'a>(&'a self, hello: &'a Hello) -> &'a str {
        if self.networks.iter().all(|network| *network == hello.network) {
            "127.0.0.1"
        } else if self.networks.first() == Some(&hello.network) {
            &self.address
        } else {
            &hello.address
        }
    }
}

/// Waits until `until` for the value that a rank leaves under `key`.
///
/// # Errors
/// The launcher has ended the ranks.
fn awaited(store: &Store, key: &str, until: Instant) -> Result<Option<Vec<u8>>, RankError> {
    match store.await_key(key, until, || matches!(store.get(ENDED), Ok(Some(_))))? {
        None => match store.get(ENDED)? {
            Some(reason) => Err(RankError::Ended(String::from_utf8_lossy(&reason).into_owned())),
            None => Ok(None),
        },
        found => Ok(found),
    }
}

/// Rank 0's part of the start: collects the others' reports, compares them, and publishes the outcome.
pub(super) fn lead(store: &Store, place: &Place, own: &Hello, until: Instant, limit: f64) -> Result<Verdict, RankError> {
    let (mut hellos, mut missing, mut problems) = (vec![own.clone()], Vec::new(), Vec::new());
    for rank in 1..place.size {
        match awaited(store, &format!("hello/{rank}"), until)? {
            Some(text) => hellos.push(serde_json::from_slice(&text).map_err(|error| CollectiveError(error.to_string()))?),
            None => missing.push(rank.to_string()),
        }
    }
    if !missing.is_empty() {
        let (missing, size) = (missing.join(", "), place.size);
        problems.push(format!("of {size} ranks, {missing} did not start within {limit} seconds (ranks.start_timeout)"));
    }
    let labels: Vec<String> = hellos.iter().enumerate().map(|(rank, hello)| label(rank, hello)).collect();
    if problems.is_empty() {
        problems.extend(store.get("twice")?.map(|twice| String::from_utf8_lossy(&twice).into_owned()));
        problems.extend(hellos.iter().zip(&labels).skip(1).filter_map(|(hello, label)| difference(own, hello, label)));
        let of = hellos.iter().zip(&labels);
        problems.extend(of.filter_map(|(hello, label)| Some(format!("{label}: {}", hello.trouble.as_ref()?))));
        problems.extend(shared_gpus(&hellos, &labels));
    }
    let elsewhere = hellos.iter().find(|hello| hello.network != own.network);
    let address = elsewhere.and_then(|other| towards(&other.address)).unwrap_or_else(|| place.host.clone());
    let networks = hellos.iter().map(|hello| hello.network.clone()).collect();
    let verdict = Verdict { problems, size: place.size, networks, labels, address };
    let text = serde_json::to_vec(&verdict).map_err(|error| CollectiveError(error.to_string()))?;
    store.set("verdict", &text)?;
    Ok(verdict)
}

/// The other ranks' part of the start. `None` before `until` if the store is that of an earlier start, whose
/// ranks are about to end.
pub(super) fn report(
    store: &Store,
    place: &Place,
    own: &Hello,
    until: Instant,
    limit: Duration,
) -> Result<Option<Verdict>, RankError> {
    let (rank, itself) = (place.rank, label(place.rank, own));
    let started = store.count(&format!("started/{rank}"));
    if started != Ok(1) {
        if Instant::now() < until && !matches!(store.get("verdict"), Ok(None)) {
            return Ok(None);
        }
        started?;
        let problem = format!("{itself} is a second process with this number");
        store.set("twice", problem.as_bytes())?;
        return Err(RankError::Apart(vec![problem]));
    }
    let text = serde_json::to_vec(own).map_err(|error| CollectiveError(error.to_string()))?;
    store.set(&format!("hello/{rank}"), &text)?;
    let silent = || format!("rank 0 said nothing for {} seconds", limit.as_secs());
    let text = awaited(store, "verdict", Instant::now() + limit)?;
    let text = text.ok_or_else(|| RankError::Apart(vec![silent()]))?;
    let mut verdict: Verdict = serde_json::from_slice(&text).map_err(|error| CollectiveError(error.to_string()))?;
    if rank >= verdict.size {
        verdict.problems.push(format!("{itself} was started as one of {} ranks, rank 0 as one of {}", own.size, verdict.size));
    }
    if !verdict.problems.is_empty() {
        store.set(&bye(rank), b"")?;
    }
    Ok(Some(verdict))
}

fn label(rank: usize, hello: &Hello) -> String {
    format!("rank {rank} on {} (process {})", hello.host, hello.process)
}

/// First difference of a rank from rank 0.
fn difference(own: &Hello, other: &Hello, label: &str) -> Option<String> {
    if other.size != own.size {
        return Some(format!("{label} was started as one of {} ranks, rank 0 as one of {}", other.size, own.size));
    }
    if other.program != own.program {
        return Some(format!("{label} runs another program: {}; rank 0 runs {}", other.program, own.program));
    }
    if other.checksum == own.checksum {
        if let (Some(there), Some(own)) = (&other.gpu_type, &own.gpu_type)
            && there != own
        {
            return Some(format!(
                "{label} has {there}, rank 0 has {own}: copies of the state on GPUs of different types would not stay equal; \
                 use one type, or hold one divided copy (ranks.shard = \"optimizer\", ranks.replicas = 1)"
            ));
        }
        let differs = |(key, own)| Some((key, own, other.models.get(key).filter(|there| *there != own)?));
        let (key, own, there) = own.models.iter().find_map(differs)?;
        return Some(format!("{label} has another model at {key}: its checksum is {there:08x}, that of rank 0's is {own:08x}"));
    }
    let mut section = "";
    for (at, line) in own.recipe.iter().enumerate() {
        let there = other.recipe.get(at).map_or("nothing", String::as_str);
        if line != there {
            return Some(format!("{label} has another recipe: {section} {there}; rank 0 has {section} {line}"));
        }
        if line.starts_with('[') {
            section = line;
        }
    }
    Some(format!("{label} has another recipe: it differs in a secret, or at its end"))
}

/// GPUs that two processes of a host would compute on.
fn shared_gpus(hellos: &[Hello], labels: &[String]) -> Vec<String> {
    let shared = |(at, hello): (usize, &Hello)| {
        let gpu = hello.gpu.as_ref()?;
        let first = hellos[..at].iter().position(|other| other.machine == hello.machine && other.gpu.as_ref() == Some(gpu))?;
        let what = "give each process of a host its own number as LOCAL_RANK, from 0";
        Some(format!("{} and {} both compute on the GPU {gpu}; {what}", labels[first], labels[at]))
    };
    hellos.iter().enumerate().filter_map(shared).collect()
}

/// Version and checksum of this program.
pub(super) fn program() -> String {
    let bytes = std::env::current_exe().and_then(std::fs::read);
    let checksum = bytes.map_or_else(|_| "unknown".to_owned(), |bytes| format!("{:08x}", crc32fast::hash(&bytes)));
    format!("{} with checksum {checksum}", env!("CARGO_PKG_VERSION"))
}

pub(super) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    if name.trim().is_empty() { "an unnamed host".to_owned() } else { name.trim().to_owned() }
}

/// Identities of this process's machine and network; `host`, the host's name, if the system gives none.
pub(super) fn identities(host: &str) -> [String; 2] {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
    let boot = boot.map(|id| id.trim().to_owned()).filter(|id| !id.is_empty());
    // Machines number their namespaces alike.
    let namespace = boot.as_ref().zip(std::fs::read_link("/proc/self/ns/net").ok());
    let network = namespace.map(|(boot, namespace)| format!("{boot} {}", namespace.display()));
    [boot, network].map(|identity| identity.unwrap_or_else(|| host.to_owned()))
}

/// This host's address on the way to `host`, if there is one.
pub(super) fn towards(host: &str) -> Option<String> {
    address_towards(host, 9).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            size: 2,
            host: "a".to_owned(),
            machine: "machine 1".to_owned(),
            network: "network 1".to_owned(),
            process: 1,
            address: "127.0.1.1".to_owned(),
            gpu: Some("GPU 0".to_owned()),
            gpu_type: None,
            trouble: None,
            program: String::new(),
            recipe: Vec::new(),
            checksum: 0,
            models: BTreeMap::new(),
        }
    }

    fn store() -> Store {
        Store::open("127.0.0.1", 0, true, "test", Duration::from_secs(20)).unwrap()
    }

    fn place(rank: usize) -> Place {
        let (host, attempt) = ("127.0.0.1".to_owned(), String::new());
        Place { rank, size: 2, local_rank: rank, host, port: 1, store_exists: true, attempt }
    }

    /// Verdict of rank 0, which is [`hello`], on itself and `other`.
    fn verdict_on(other: &Hello) -> Verdict {
        let store = store();
        store.set("hello/1", &serde_json::to_vec(other).unwrap()).unwrap();
        lead(&store, &place(0), &hello(), Instant::now() + Duration::from_secs(20), 20.0).unwrap()
    }

    #[test]
    fn ranks_on_the_first_host_give_others_the_address_that_those_reach() {
        let of = |networks: &[&str], network: &str| {
            let networks = networks.iter().map(|network| (*network).to_owned()).collect();
            let (labels, address) = (Vec::new(), "10.0.0.1".to_owned());
            let verdict = Verdict { problems: Vec::new(), size: 3, networks, labels, address };
            verdict.address_of(&Hello { network: network.to_owned(), ..hello() }).to_owned()
        };
        assert_eq!((of(&["a", "a", "b"], "a"), of(&["a", "a", "b"], "b")), ("10.0.0.1".to_owned(), "127.0.1.1".to_owned()));
        assert_eq!(of(&["a", "a"], "a"), "127.0.0.1");
    }

    #[test]
    fn machines_of_equal_names_use_the_network_and_share_no_gpu() {
        let [machine, network] = ["machine 2", "network 2"].map(str::to_owned);
        let other = Hello { machine, network, address: "10.0.0.2".to_owned(), ..hello() };
        let verdict = verdict_on(&other);
        assert_eq!((&verdict.problems, verdict.address_of(&other)), (&Vec::new(), "10.0.0.2"));
    }

    #[test]
    fn containers_of_one_machine_use_the_network_and_may_not_share_a_gpu() {
        let [host, network] = ["b", "network 2"].map(str::to_owned);
        let other = Hello { host, network, address: "10.0.0.2".to_owned(), ..hello() };
        let verdict = verdict_on(&other);
        assert_eq!(verdict.address_of(&other), "10.0.0.2");
        assert!(verdict.problems[0].contains("rank 0 on a (process 1) and rank 1 on b (process 1) both compute"), "{verdict:?}");
    }

    #[test]
    fn a_machine_and_its_network_are_identified_apart_from_the_hosts_name() {
        // Where the system has them.
        if std::path::Path::new("/proc/sys/kernel/random/boot_id").exists() {
            assert_eq!(identities("a"), identities("b"));
        }
    }

    #[test]
    fn ranks_that_wait_for_each_other_give_up_with_the_launchers_reason() {
        let (store, reason, minute) = (store(), "rank 0 ended: signal: 15 (SIGTERM)", Duration::from_secs(60));
        store.set(ENDED, reason.as_bytes()).unwrap();
        let ended = RankError::Ended(reason.to_owned());
        let until = Instant::now() + minute;
        assert_eq!(lead(&store, &place(0), &hello(), until, 60.0).unwrap_err(), ended);
        assert_eq!(report(&store, &place(1), &hello(), until, minute).unwrap_err(), ended);
    }

    #[test]
    fn copies_of_the_state_on_gpus_of_different_types_are_refused_with_both() {
        let of = |gpu_type: Option<&str>| Hello { gpu_type: gpu_type.map(str::to_owned), ..hello() };
        let differs = |own, other| difference(&of(own), &of(other), "rank 1");
        let text = differs(Some("an A100"), Some("an H100")).unwrap();
        assert!(text.contains("rank 1 has an H100, rank 0 has an A100"), "{text}");
        assert_eq!((differs(Some("an A100"), Some("an A100")), differs(None, Some("an A100"))), (None, None));
    }

    #[test]
    fn a_host_is_reached_by_ipv6_too() {
        // Where the machine has it.
        if std::net::UdpSocket::bind("[::1]:0").is_ok() {
            assert_eq!(towards("::1").as_deref(), Some("::1"));
        }
    }
}
