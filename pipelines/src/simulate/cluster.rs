//! `[cluster]`: machines of a simulated run, where a profile has the times of one trainer and one engine.

use std::path::Path;

use rollflow::engine::remote::sync::Carry;
use rollflow::recipe::{Plan, Problem, RecipeErrors};
use rollflow_settings::section;
use rollflow_settings::setting::{NOT_NEGATIVE, POSITIVE_IF_GIVEN, SOME, SOME_IF_GIVEN};

use crate::section_file;

section! {
    /// A file of `--cluster`.
    pub struct File {
        /// Machines of a simulated run.
        cluster: Cluster = Cluster::default();
    }
}

section! {
    /// Machines of a simulated run.
    pub struct Cluster {
        /// Ranks that train.
        ranks: usize = 1, SOME;
        /// Ranks of one host.
        ranks_per_host: usize = 1, SOME;
        /// Devices that all ranks share, such as cores. Left out: one for each rank.
        rank_devices: Option<usize> = None, SOME_IF_GIVEN;
        /// If true, ranks compute on CPUs, whose cores exchanges take as well.
        cpus: bool = false;
        /// Numbers that are trained: the model's, or those of adapters. Required for several ranks.
        parameters: f64 = 0.0, NOT_NEGATIVE;
        /// Layers of the model, which `ranks.shard = "parameters"` gathers one by one.
        layers: usize = 1, SOME;
        /// Bytes per second of a host's network link, in each direction. Left out: no limit.
        link: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Bytes per second between two ranks of one host. Left out: no limit.
        local_link: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Seconds of a message between two ranks, in addition to its bytes.
        latency: f64 = 0.0, NOT_NEGATIVE;
        /// Engines that generate. They share the sequences of `generate.max_num_seqs`.
        engines: usize = 1, SOME;
        /// Engines of one host, which share its link.
        engines_per_host: usize = 1, SOME;
        /// Bytes per second of an engine host's network link. Left out: `link`.
        engine_link: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Devices that all engines share, such as cores. Left out: one for each engine.
        engine_devices: Option<usize> = None, SOME_IF_GIVEN;
        /// Seconds in which the trainer writes a version, before it is sent.
        export: f64 = 0.0, NOT_NEGATIVE;
        /// Bytes of a version of the weights on its way to engines; with deltas, their mean.
        version_bytes: f64 = 0.0, NOT_NEGATIVE;
        /// Bytes per second that a shared folder or a store gives to all its readers together. Left
        /// out: no limit.
        storage: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Seconds that an engine stands still while it loads a version.
        pause: f64 = 0.0, NOT_NEGATIVE;
        /// Failures of one engine per hour.
        failures: f64 = 0.0, NOT_NEGATIVE;
        /// Seconds from the failure of an engine until it generates again.
        absence: f64 = 0.0, NOT_NEGATIVE;
        /// Engines that fail together.
        outages: Vec<Outage> = Vec::new();
    }
}

section! {
    /// Engines that fail together, such as those of a rack.
    pub struct Outage {
        /// Second of the run.
        at: f64 = 0.0, NOT_NEGATIVE;
        /// Number of engines.
        engines: usize = 1, SOME;
        /// Seconds until they generate again.
        seconds: f64 = 0.0, NOT_NEGATIVE;
    }
}

/// Prefix of the keys.
pub const PREFIX: &str = "cluster.";

/// Reads `[cluster]` from `file`, if there is one, under the overrides `sets`, such as
/// `cluster.ranks=4`. Reports every error with its place.
pub fn read(file: Option<&Path>, sets: &[String]) -> Result<Cluster, RecipeErrors> {
    section_file::read("cluster", file, sets, |File { cluster }| cluster.contradictions()).map(|File { cluster }| cluster)
}

impl Cluster {
    fn contradictions(&self) -> Vec<Problem> {
        let unknown = (self.ranks > 1 && self.parameters == 0.0).then(|| {
            let message = format!("`cluster.ranks` is {}, but `cluster.parameters` is left out", self.ranks);
            Problem::of("cluster.ranks", message, "set cluster.parameters: the exchange between ranks depends on it")
        });
        let lost = self.outages.iter().map(|outage| outage.engines).max().filter(|lost| *lost > self.engines).map(|lost| {
            let message = format!("`cluster.outages` loses {lost} engines at a time, but `cluster.engines` is {}", self.engines);
            Problem::of("cluster.outages", message, "lower the outage's engines")
        });
        unknown.into_iter().chain(lost).collect()
    }

    /// Bytes per second that the slowest link of a ring of all ranks carries. A ring that visits host
    /// after host crosses each host's link once.
    pub fn ring(&self) -> f64 {
        let network = self.link.filter(|_| self.ranks > self.ranks_per_host).unwrap_or(f64::INFINITY);
        let local = self.local_link.filter(|_| self.ranks_per_host > 1).unwrap_or(f64::INFINITY);
        network.min(local)
    }

    /// Seconds until a version has reached all engines. Versions follow each other: the simulation
    /// does not skip those that a newer one overtakes.
    pub fn carry(&self, plan: &Plan) -> f64 {
        let seconds = |bytes: f64, link: Option<f64>| link.map_or(0.0, |link| bytes / link);
        let (bytes, engines, engine_link) = (self.version_bytes, self.engines as f64, self.engine_link.or(self.link));
        let per_host = self.engines_per_host.min(self.engines);
        match plan.engine.sync.carry {
            Carry::Folder => {}
            // The trainer's host sends it to each engine.
            Carry::Stream | Carry::Broadcast => {
                return self.export + seconds(bytes * engines, self.link).max(seconds(bytes * per_host as f64, engine_link));
            }
            Carry::Ipc => return self.export,
        }
        // It is written once, then read: from a store once by each host, from a folder by each engine.
        let store = plan.store.weights && plan.store.url.is_some();
        let (readers, per_host) = if store { (self.engines.div_ceil(per_host) as f64, 1.0) } else { (engines, per_host as f64) };
        let written = self.export + seconds(bytes, self.link);
        written + seconds(bytes * per_host, engine_link).max(seconds(bytes * readers, self.storage))
    }
}

/// Factor by which `of` processes that share `devices` slow each other down.
pub fn sharing(of: usize, devices: Option<usize>) -> f64 {
    devices.map_or(1.0, |devices| (of as f64 / devices as f64).max(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_is_named_with_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("cluster.toml");
        let text = "[cluster]\nranks = 2\nengine = 4\nlink = 0\noutages = [{ engines = 2, seconds = 60, to = 3 }]\n";
        std::fs::write(&file, text).unwrap();
        let wrong = read(Some(&file), &["cluster.latency=-1".to_owned()]).unwrap_err().to_string();
        for part in [
            "cluster.toml:2:9: `cluster.ranks` is 2, but `cluster.parameters` is left out",
            "cluster.toml:3:1: unknown key `engine`",
            "cluster.toml:4:8: `cluster.link` is 0",
            "cluster.toml:5:41: unknown key `to`",
            "--set cluster.latency",
        ] {
            assert!(wrong.contains(part), "{part} is missing:\n{wrong}");
        }
        let lost = read(None, &["cluster.outages=[{at=1,engines=2}]".to_owned()]).unwrap_err().to_string();
        assert!(lost.contains("loses 2 engines at a time, but `cluster.engines` is 1"), "{lost}");
        assert_eq!(read(None, &["cluster.engines=4".to_owned()]).unwrap().engines, 4);
    }

    #[test]
    fn a_version_takes_the_time_of_the_slowest_link_on_its_way() {
        let cluster = Cluster {
            engines: 16,
            engines_per_host: 4,
            export: 0.5,
            version_bytes: 1e9,
            link: Some(1e9),
            storage: Some(2e9),
            ..Cluster::default()
        };
        let carry = |cluster: &Cluster, set: &str| {
            let text = "pipeline = 'grpo'\nmodel.kind = 'tiny'\ntask.kind = 'arithmetic'\n\
                        engine = { kind = 'rollflow', urls = ['http://127.0.0.1:1'] }\n";
            let plan = rollflow::recipe::parse("carry.toml", text, &[set.to_owned()]).unwrap_or_else(|error| panic!("{error}"));
            cluster.carry(&plan)
        };
        assert_eq!(carry(&cluster, "engine.carry=\"stream\""), 16.5, "one link sends all");
        assert_eq!(carry(&cluster, "engine.carry=\"broadcast\""), 16.5, "each engine has a group of its own");
        assert_eq!(carry(&cluster, "engine.carry=\"folder\""), 1.5 + 8.0, "16 readers of 2 GB/s");
        assert_eq!(carry(&Cluster { storage: None, ..cluster.clone() }, "engine.carry=\"folder\""), 1.5 + 4.0, "4 share a link");
        assert_eq!(carry(&cluster, "store.url=\"file:///store\""), 1.5 + 2.0, "4 hosts of 2 GB/s");
        let slow = Cluster { engine_link: Some(2e8), ..cluster };
        assert_eq!(carry(&slow, "engine.carry=\"stream\""), 20.5, "4 engines of a host share 0.2 GB/s");
        assert_eq!(carry(&slow, "store.url=\"file:///store\""), 1.5 + 5.0);
        assert_eq!(carry(&Cluster::default(), "engine.carry=\"stream\""), 0.0);
    }

    #[test]
    fn the_reference_is_up_to_date() {
        let head = "# Cluster reference\n\nKeys of the file that `rollflow simulate --cluster FILE` reads, which are also given as\n\
                    `--set cluster.ranks=4` and `--vary cluster.ranks=1,2,4`. [Scaling](../explain/scaling.md) has the formulas.\n\
                    The page is generated: `ROLLFLOW_WRITE_DOCS=1 cargo test -p rollflow-pipelines --lib cluster`.\n\n";
        let text = head.to_owned() + &section_file::reference::<File>();
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/cluster.md");
        if std::env::var_os("ROLLFLOW_WRITE_DOCS").is_some() {
            std::fs::write(&page, &text).unwrap();
        }
        assert_eq!(std::fs::read_to_string(page).unwrap_or_default(), text, "run it with ROLLFLOW_WRITE_DOCS=1");
    }
}
