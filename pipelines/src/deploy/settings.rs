//! `[deploy]`: where a run gets its processes, and what each of them gets.

use std::path::{Path, PathBuf};

use rollflow::recipe::RecipeErrors;
use rollflow::util::secrets;
use rollflow_settings::section;
use rollflow_settings::setting::{GIVEN, Limit, POSITIVE_IF_GIVEN, SOME};

use crate::section_file;

section! {
    /// A file of `--deploy`.
    pub struct File {
        /// Processes of a run, and where they run.
        deploy: Deploy = Deploy::default();
    }
}

section! {
    /// Processes of a run, and where they run.
    pub struct Deploy {
        /// Name of the run: lower-case letters, digits and `-`. Left out: the recipe's name,
        /// written so.
        name: Option<String> = None, LABEL;
        /// Ranks of the trainer, one process each.
        ranks: usize = 1, SOME;
        /// Hosts that the ranks are divided among. With `deploy ssh` and on Kubernetes the hosts
        /// follow from the command and from the ranks.
        hosts: usize = 1, SOME;
        /// Cores of each rank.
        cpus: usize = 4, SOME;
        /// Memory of each rank, in GiB.
        memory: usize = 16, SOME;
        /// GPUs of each rank.
        gpus: usize = 0;
        /// Hours after which Slurm and Kubernetes end the run.
        hours: Option<f64> = None, POSITIVE_IF_GIVEN;
        /// Seconds from SIGTERM until the run is killed: time to finish what is in flight and to
        /// save a checkpoint.
        grace: usize = 120, SOME;
        /// Folder of run folders, which all hosts share; relative to the folder that the run works
        /// in.
        runs: PathBuf = "runs".into(), LINE_PATH;
        /// Command of rollflow there. Left out: this program on Slurm, the copied one with
        /// `deploy ssh`, and `rollflow` elsewhere.
        program: Option<String> = None, LINE;
        /// Image of containers.
        image: String = "rollflow:latest".to_owned(), GIVEN;
        /// Environment variables, each as `NAME=value`. A secret is an error here.
        env: Vec<String> = Vec::new(), PAIRS;
        /// Environment variables whose values are secret, by their names. The recipe's `token_env`
        /// of engines is added. Values are never written to a file.
        secrets: Vec<String> = Vec::new(), NAMES;
        /// Files and folders that `deploy ssh` copies with the recipe, relative to where the
        /// command runs.
        files: Vec<PathBuf> = Vec::new();
        /// Port of the metrics in containers and on SkyPilot. On hosts that several runs share, a
        /// free port is taken and printed in the log.
        metrics: usize = 9464, PORT;
        /// Servers that generate.
        engines: Engines = Engines::default();
        /// Slurm.
        slurm: Slurm = Slurm::default();
        /// Kubernetes.
        kubernetes: Kubernetes = Kubernetes::default();
        /// SkyPilot.
        skypilot: SkyPilot = SkyPilot::default();
        /// Hosts that are reached by ssh.
        ssh: Ssh = Ssh::default();
    }
}

section! {
    /// Servers that generate.
    pub struct Engines {
        /// Number of servers, each on a separate host or in a separate container.
        count: usize = 0;
        /// Command that starts a server, one word each. It must listen on `0.0.0.0` and `port`.
        command: Vec<String> = Vec::new();
        /// Port of each server.
        port: usize = 8400, PORT;
        /// Image of their containers. Left out: `deploy.image`.
        image: Option<String> = None;
        /// Cores of each server.
        cpus: usize = 4, SOME;
        /// Memory of each server, in GiB.
        memory: usize = 16, SOME;
        /// GPUs of each server.
        gpus: usize = 0;
    }
}

section! {
    /// Slurm.
    pub struct Slurm {
        /// Partition.
        partition: Option<String> = None, WORD;
        /// Account.
        account: Option<String> = None, WORD;
        /// Further options of sbatch, each as `--name=value`.
        flags: Vec<String> = Vec::new(), FLAGS;
        /// Shell commands that each job runs first, such as `module load cuda`. They are copied as
        /// they are.
        setup: Vec<String> = Vec::new();
    }
}

section! {
    /// Kubernetes.
    pub struct Kubernetes {
        /// Namespace. Left out: that of the context.
        namespace: Option<String> = None, LABEL;
        /// Persistent volume claim that all pods mount as the folder that the run works in. With
        /// several pods its access mode is `ReadWriteMany`.
        claim: String = "rollflow".to_owned(), DOMAIN;
        /// Secret whose keys are `deploy.secrets`.
        secret: String = "rollflow".to_owned(), DOMAIN;
        /// User and group of the processes, which must be able to write to the claim.
        user: usize = 10_001, SOME;
        /// Restarts of a failed pod before the job fails. Drained and evicted pods do not count.
        retries: usize = 6;
    }
}

section! {
    /// SkyPilot.
    pub struct SkyPilot {
        /// Infrastructure, such as `aws/us-east-1` or `k8s`. Left out: the cheapest.
        infra: Option<String> = None;
        /// Accelerators of a host, such as `H200:8`. Needed with `deploy.gpus`.
        accelerators: Option<String> = None;
        /// Accelerators of an engine's host. Needed with `deploy.engines.gpus`.
        engine_accelerators: Option<String> = None;
        /// If true, spot instances.
        spot: bool = false;
        /// Volume of SkyPilot for run folders, mounted at `/runs`. Without one, a run does not
        /// survive its host.
        volume: Option<String> = None;
    }
}

section! {
    /// Hosts that are reached by ssh.
    pub struct Ssh {
        /// Further options of ssh, one word each, such as `-p` and `2222`. Names, users and keys
        /// are better kept in `~/.ssh/config`.
        options: Vec<String> = Vec::new();
        /// Folder there, relative to the home folder.
        folder: String = ".rollflow".to_owned(), RELATIVE;
        /// Hosts of the engines, by the names that ssh knows; servers take them in turn.
        engine_hosts: Vec<String> = Vec::new();
        /// Port of the ranks' rendezvous, if they are on several hosts.
        port: usize = RENDEZVOUS, PORT;
    }
}

/// Port of the ranks' rendezvous, unless another is given.
pub const RENDEZVOUS: usize = 29_500;

/// A port.
pub const PORT: Limit<usize> = Limit { text: "1 to 65535", holds: |port| (1..=65_535).contains(port) };

const LABEL: Limit<Option<String>> =
    Limit { text: "lower-case letters, digits and `-`, at most 40", holds: |name| name.as_deref().is_none_or(is_label) };

const DOMAIN: Limit<String> = Limit { text: "lower-case letters, digits and `-`, at most 40", holds: |name| is_label(name) };

const WORD: Limit<Option<String>> =
    Limit { text: "letters, digits and `_.,:@%+=/-`", holds: |word| word.as_deref().is_none_or(is_word) };

const FLAGS: Limit<Vec<String>> = Limit {
    text: "options such as --qos=high, of letters, digits and `_.,:@%+=/-`",
    holds: |flags| flags.iter().all(|flag| flag.starts_with("--") && is_word(flag)),
};

const PAIRS: Limit<Vec<String>> = Limit {
    text: "pairs such as NAME=value, without secrets: name those in deploy.secrets",
    holds: |pairs| pairs.iter().all(|pair| pair.split_once('=').is_some_and(|(name, value)| is_public(name, value))),
};

const NAMES: Limit<Vec<String>> =
    Limit { text: "names of environment variables", holds: |names| names.iter().all(|name| is_variable(name)) };

const LINE: Limit<Option<String>> =
    Limit { text: "not empty, and one line", holds: |text| text.as_deref().is_none_or(|text| !text.is_empty() && is_line(text)) };

const LINE_PATH: Limit<PathBuf> =
    Limit { text: "not empty, and one line", holds: |path| path.to_str().is_some_and(|text| !text.is_empty() && is_line(text)) };

const RELATIVE: Limit<String> = Limit {
    text: "a relative path of letters, digits and `_.-/`, without `..`",
    holds: |path| is_word(path) && !path.starts_with(['/', '-']) && path.split('/').all(|part| part != ".." && !part.is_empty()),
};

/// Returns true for a name that is a label of DNS, with room for what platforms append.
pub fn is_label(name: &str) -> bool {
    let letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    name.len() <= 40
        && name.bytes().all(|byte| letter(byte) || byte == b'-')
        && name.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase())
        && name.bytes().next_back().is_some_and(letter)
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.,:@%+=/-".contains(&byte))
}

fn is_line(text: &str) -> bool {
    !text.chars().any(char::is_control)
}

fn is_variable(name: &str) -> bool {
    !name.is_empty()
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        && !name.starts_with(|first: char| first.is_ascii_digit())
}

fn is_public(name: &str, value: &str) -> bool {
    let secret = secrets::is_secret_name(name) || !secrets::find(&format!("{name}={value}")).is_empty();
    is_variable(name) && is_line(value) && !secret
}

/// Reads `[deploy]` from `file`, if there is one, under the overrides `sets`, such as
/// `deploy.ranks=4`. Reports every error with its place.
pub fn read(file: Option<&Path>, sets: &[String]) -> Result<Deploy, RecipeErrors> {
    section_file::read("deploy", file, sets, |_| Vec::new()).map(|File { deploy }| deploy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_of_the_file_and_of_the_overrides_is_named_with_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("deploy.toml");
        std::fs::write(&file, "[deploy]\nranks = 0\nrank = 2\nname = \"No\\nName\"\n[deploy.slurm]\nflags = [\"--x=a b\"]\n")
            .unwrap();
        let sets = ["deploy.env=[\"HF_TOKEN=hf_x\"]".to_owned(), "deploy.ssh.folder=\"../x\"".to_owned()];
        let wrong = read(Some(&file), &sets).unwrap_err().to_string();
        for part in [
            "deploy.toml:2:9: `deploy.ranks` is 0",
            "deploy.toml:3:1: unknown key `rank`",
            "deploy.toml:4:8: `deploy.name`",
            "deploy.toml:6:9: `deploy.slurm.flags`",
            "--set deploy.env",
            "--set deploy.ssh.folder",
        ] {
            assert!(wrong.contains(part), "{part} is missing:\n{wrong}");
        }
        assert_eq!(read(None, &["deploy.ranks=4".to_owned()]).unwrap().ranks, 4);
    }

    #[test]
    fn the_reference_is_up_to_date() {
        let head = "# Deploy reference\n\nKeys of the file that `rollflow deploy --deploy FILE` reads, which are also given as\n\
                    `--set deploy.ranks=4`. The page is generated:\n`ROLLFLOW_WRITE_DOCS=1 cargo test --lib deploy`.\n\n";
        let text = head.to_owned() + &section_file::reference::<File>();
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/deploy.md");
        if std::env::var_os("ROLLFLOW_WRITE_DOCS").is_some() {
            std::fs::write(&page, &text).unwrap();
        }
        assert_eq!(std::fs::read_to_string(page).unwrap_or_default(), text, "run it with ROLLFLOW_WRITE_DOCS=1");
    }
}
