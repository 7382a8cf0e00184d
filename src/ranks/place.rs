//! This process's place among the ranks of a run, from the variables that launchers set.

use super::RankError;

/// This process's place among the ranks of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of this process, from 0. Rank 0 holds the graph, the ledger and the logs.
    pub rank: usize,
    /// Number of processes, at least 2.
    pub size: usize,
    /// Number of this process on its host: the device that it computes on, where a host has several.
    pub local_rank: usize,
    /// Host of rank 0.
    pub host: String,
    /// Port of the store there.
    pub port: u16,
    /// True if the launcher serves the store, as torchrun does; otherwise rank 0 does.
    pub store_exists: bool,
    /// Differs from one start of a run to the next, so that keys of an earlier start are not read.
    pub attempt: String,
}

/// Port of the store if the launcher names none.
const PORT: u16 = 29_500;

/// Number of ranks of a step in which Slurm sets no `SLURM_STEP_NUM_TASKS`.
const JOB_TASKS: &str = "SLURM_NTASKS";

/// The first of Slurm's numbers of what no `srun` started, such as a batch script or an interactive shell.
const RESERVED_STEPS: u32 = 0xffff_fff0;

/// Variables that differ from one start of a run to the next.
const ATTEMPT: [&str; 5] =
    ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"];

/// Name of a start of a run, by the variables of its processes.
pub(super) fn attempt(variable: impl Fn(&str) -> Option<String>) -> String {
    let given = ATTEMPT.iter().filter_map(|name| variable(name).filter(|value| !value.is_empty()));
    given.collect::<Vec<_>>().join("-")
}

/// Names of rank, number of ranks and local rank, by launcher, in order of precedence: torchrun and
/// Kubernetes' PyTorchJob, Slurm's `srun`, Open MPI, MPICH and Intel MPI.
const LAUNCHERS: [(&str, [&str; 3]); 4] = [
    ("torchrun", ["RANK", "WORLD_SIZE", "LOCAL_RANK"]),
    ("srun", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"]),
    ("mpirun", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"]),
    ("mpirun", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"]),
];

impl Place {
    /// Reads the place from variables; `None` in a run of one process. Reports every variable that
    /// is missing, malformed or contradicts another.
    pub fn of(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Place>, RankError> {
        let given = |name: &str| variable(name).filter(|value| !value.is_empty());
        // A batch script and an interactive shell have Slurm's variables of rank 0, too.
        let is_reserved = |id: String| id.parse::<u32>().is_ok_and(|id| id >= RESERVED_STEPS);
        let is_step = |launcher: &str| launcher != "srun" || given("SLURM_STEP_ID").is_some_and(|id| !is_reserved(id));
        let launched =
            |(launcher, names): &&(&str, [&str; 3])| is_step(launcher) && names[..2].iter().any(|name| given(name).is_some());
        let Some((launcher, [rank, size, local])) = LAUNCHERS.iter().find(launched).copied() else { return Ok(None) };
        let size = if launcher == "srun" && given(size).is_none() { JOB_TASKS } else { size };
        let mut wrong = Vec::new();
        let mut number = |name: &str, default: Option<usize>| match given(name).map(|value| (value.trim().parse(), value)) {
            Some((Ok(number), _)) => number,
            Some((Err(_), value)) => {
                wrong.push(format!("{name} is {value:?}; it must be a whole number"));
                0
            }
            None => default.unwrap_or_else(|| {
                wrong.push(format!("{name} is not set, although {launcher} sets it with the others"));
                0
            }),
        };
        let (rank_number, size_number) = (number(rank, None), number(size, None));
        let local_rank = number(local, Some(0));
        let port = number("MASTER_PORT", Some(usize::from(PORT)));
        if wrong.is_empty() && rank_number >= size_number {
            wrong.push(format!("{rank} is {rank_number} and {size} is {size_number}; ranks are numbered from 0"));
        }
        if wrong.is_empty() && size_number == 1 {
            return Ok(None);
        }
        let host = given("MASTER_ADDR").or_else(|| given("SLURM_JOB_NODELIST").and_then(|list| first_host(&list)));
        // All processes of MPI may be on this host; its launcher does not say.
        let host = host.or_else(|| (launcher == "mpirun" && local_rank == rank_number).then(|| "127.0.0.1".to_owned()));
        let port = u16::try_from(port).ok().filter(|port| *port > 0);
        if port.is_none() && !wrong.iter().any(|wrong| wrong.starts_with("MASTER_PORT")) {
            wrong.push("MASTER_PORT is no port; it must be 1 to 65535".into());
        }
        if host.is_none() {
            wrong.push("MASTER_ADDR is not set; give it the name of rank 0's host".into());
        }
        let Some((host, port)) = host.zip(port).filter(|_| wrong.is_empty()) else {
            return Err(RankError::Variables(wrong));
        };
        let store_exists = given("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let attempt = attempt(&variable);
        Ok(Some(Place { rank: rank_number, size: size_number, local_rank, host, port, store_exists, attempt }))
    }

    /// Index of the GPU of this process, if that of the first process of a host is `first`: each has
    /// the next. A launcher may show each process its own GPU alone: `visible`, the value of
    /// `CUDA_VISIBLE_DEVICES`, then names one.
    pub fn gpu(&self, first: usize, visible: Option<&str>) -> usize {
        match visible.is_some_and(|visible| !visible.trim().is_empty() && !visible.contains(',')) {
            true => first,
            false => first + self.local_rank,
        }
    }

    /// GPUs of the other ones of `processes` on this host, if this is the first, by [`Place::gpu`].
    pub fn other_gpus(&self, first: usize, visible: Option<&str>, processes: usize) -> Vec<usize> {
        let gpus = (1..processes).map(|local_rank| Place { local_rank, ..self.clone() }.gpu(first, visible));
        gpus.filter(|gpu| *gpu != first).collect()
    }

    /// [`Place::of`] this process's environment.
    pub fn of_environment() -> Result<Option<Place>, RankError> {
        Place::of(|name| std::env::var(name).ok())
    }
}

/// First host of Slurm's list, such as `node[03-07,9]` or `a1,b2`.
fn first_host(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let number = rest.strip_prefix('[').map(|rest| &rest[..rest.find([',', '-', ']']).unwrap_or(rest.len())]);
    Some(format!("{name}{}", number.unwrap_or_default())).filter(|host| !host.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(variables: &[(&str, &str)]) -> Result<Option<Place>, RankError> {
        Place::of(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn each_launchers_variables_give_the_place_and_no_launcher_none() {
        assert_eq!(place(&[]), Ok(None));
        assert_eq!(place(&[("RANK", "0"), ("WORLD_SIZE", "1")]), Ok(None));
        // A batch script outside `srun`.
        assert_eq!(place(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")]), Ok(None));
        let torchrun = [("RANK", "2"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "1234")];
        let found = place(&[&torchrun[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RUN_ID", "x")]].concat());
        let found = found.unwrap().unwrap();
        assert_eq!((found.rank, found.size, found.local_rank, found.host.as_str(), found.port), (2, 4, 0, "h", 1234));
        assert!(found.store_exists && found.attempt == "x");
        let srun = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("SLURM_LOCALID", "1"), ("SLURM_STEP_ID", "0")];
        for (list, host) in [("node[03-07,9]", "node03"), ("a1,b2", "a1"), ("gpu-7", "gpu-7")] {
            let found = place(&[&srun[..], &[("SLURM_JOB_NODELIST", list)]].concat()).unwrap().unwrap();
            assert_eq!((found.host.as_str(), found.port, found.store_exists), (host, PORT, false));
        }
        let mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_LOCAL_RANK", "1")];
        assert_eq!(place(&mpi).unwrap().unwrap().host, "127.0.0.1");
    }

    #[test]
    fn a_step_of_slurm_has_as_many_ranks_as_it_has_tasks_and_an_interactive_shell_is_no_step() {
        let job = [("SLURM_JOB_ID", "7"), ("SLURM_NTASKS", "8"), ("SLURM_JOB_NODELIST", "a"), ("SLURM_PROCID", "0")];
        let size = |own: &[(&str, &str)]| place(&[&job[..], own].concat()).unwrap().map_or(1, |place| place.size);
        assert_eq!(size(&[("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_TASKS", "2")]), 2);
        assert_eq!(size(&[("SLURM_STEP_ID", "0")]), 8);
        assert_eq!(size(&[("SLURM_STEP_ID", "4294967290"), ("SLURM_STEP_NUM_TASKS", "1")]), 1);
        assert_eq!(size(&[("SLURM_STEP_ID", "4294967290"), ("SLURM_STEP_NUM_TASKS", "2")]), 1);
    }

    #[test]
    fn each_process_of_a_host_has_the_next_gpu_unless_it_sees_one_alone() {
        let variables = [("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "h")];
        let place = place(&variables).unwrap().unwrap();
        assert_eq!((place.gpu(0, None), place.gpu(2, Some("0,1,2,3")), place.gpu(0, Some("5"))), (1, 3, 0));
        assert_eq!((place.other_gpus(1, None, 4), place.other_gpus(1, Some("5"), 4)), (vec![2, 3, 4], vec![]));
    }

    #[test]
    fn all_that_is_wrong_with_the_variables_is_said_together() {
        let wrong = place(&[("RANK", "two"), ("LOCAL_RANK", "-1"), ("MASTER_PORT", "70000")]).unwrap_err().to_string();
        let parts = [
            "RANK is \"two\"",
            "WORLD_SIZE is not set",
            "LOCAL_RANK is \"-1\"",
            "MASTER_PORT is no port",
            "MASTER_ADDR is not set",
        ];
        for part in parts {
            assert!(wrong.contains(part), "{part} is missing: {wrong}");
        }
        let beyond = place(&[("RANK", "4"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "h")]).unwrap_err().to_string();
        assert!(beyond.contains("numbered from 0"), "{beyond}");
    }
}
