//! Start of a run's ranks: each rank reports its program and host, and rank 0 compares all.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::meeting::address_towards;
use super::member::bye;
use super::{CollectiveError, Place, RankError, Store};

/// A rank's description of itself at the start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub size: usize,
    pub host: String,
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
    pub hosts: Vec<String>,
    pub labels: Vec<String>,
    /// Rank 0's address for the others.
    pub address: String,
}

impl Verdict {
    /// Address of a rank for the others. One on rank 0's host may know that host by a loopback address.
    pub fn address_of<'a>(&'a self, hello: &'a Hello) -> &'a str {
        if self.hosts.iter().all(|host| *host == hello.host) {
            // Ranks of one host need no network.
            "127.0.0.1"
        } else if self.hosts.first() == Some(&hello.host) {
            &self.address
        } else {
            &hello.address
        }
    }
}

/// Rank 0's part of the start: collects the others' reports, compares them, and publishes the outcome.
pub(super) fn lead(store: &Store, place: &Place, own: &Hello, until: Instant, limit: f64) -> Result<Verdict, RankError> {
    let (mut hellos, mut missing, mut problems) = (vec![own.clone()], Vec::new(), Vec::new());
    for rank in 1..place.size {
        match store.await_key(&format!("hello/{rank}"), until, || false)? {
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
    let elsewhere = hellos.iter().find(|hello| hello.host != own.host);
    let address = elsewhere.and_then(|other| towards(&other.address)).unwrap_or_else(|| place.host.clone());
    let hosts = hellos.iter().map(|hello| hello.host.clone()).collect();
    let verdict = Verdict { problems, size: place.size, hosts, labels, address };
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
    let text = store.await_key("verdict", Instant::now() + limit, || false)?;
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
        let first = hellos[..at].iter().position(|other| other.host == hello.host && other.gpu.as_ref() == Some(gpu))?;
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

/// This host's address on the way to `host`, if there is one.
pub(super) fn towards(host: &str) -> Option<String> {
    address_towards(host, 9).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_on_the_first_host_give_others_the_address_that_those_reach() {
        let of = |hosts: &[&str], host: &str| {
            let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
            let verdict = Verdict { problems: Vec::new(), size: 3, hosts, labels: Vec::new(), address: "10.0.0.1".to_owned() };
            let hello: Hello = serde_json::from_value(serde_json::json!({
                "size": 3, "host": host, "process": 1, "address": "127.0.1.1", "gpu": null, "trouble": null, "program": "",
                "recipe": [], "checksum": 0, "models": {},
            }))
            .unwrap();
            verdict.address_of(&hello).to_owned()
        };
        assert_eq!((of(&["a", "a", "b"], "a"), of(&["a", "a", "b"], "b")), ("10.0.0.1".to_owned(), "127.0.1.1".to_owned()));
        assert_eq!(of(&["a", "a"], "a"), "127.0.0.1");
    }

    #[test]
    fn copies_of_the_state_on_gpus_of_different_types_are_refused_with_both() {
        let of = |gpu_type: Option<&str>| Hello {
            size: 2,
            host: "a".to_owned(),
            process: 1,
            address: String::new(),
            gpu: None,
            gpu_type: gpu_type.map(str::to_owned),
            trouble: None,
            program: String::new(),
            recipe: Vec::new(),
            checksum: 0,
            models: BTreeMap::new(),
        };
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
