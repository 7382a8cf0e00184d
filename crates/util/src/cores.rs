//! Cores that a process may compute with.

/// How many processes of a job are on this machine, as those who start them say: `torchrun` and `rollflow
/// launch`, Open MPI, other MPIs.
const TOGETHER: [&str; 3] = ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"];

/// Processes of each node of a Slurm step, such as `2(x3),1`, and this node's number in it.
const STEP: [&str; 2] = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"];

/// This process's share: the machine's cores, or what its control group allows, divided among the
/// job's processes on it. A task of Slurm has those that it asked for.
pub fn cores() -> usize {
    share(std::thread::available_parallelism().map_or(1, usize::from), |name| std::env::var(name).ok())
}

fn share(here: usize, variable: impl Fn(&str) -> Option<String>) -> usize {
    let is_task = launched(&variable).is_none() && variable(STEP[0]).is_some();
    // Slurm may have bound the task to its cores already.
    let own = variable("SLURM_CPUS_PER_TASK").filter(|_| is_task).and_then(|own| own.parse::<usize>().ok());
    own.map_or_else(|| here / processes(&variable), |own| own.min(here)).max(1)
}

/// Number of processes of this job on this machine, this one included.
pub fn processes_here() -> usize {
    processes(|name| std::env::var(name).ok())
}

fn processes(variable: impl Fn(&str) -> Option<String>) -> usize {
    let said = launched(&variable).or_else(|| {
        let node = variable(STEP[1]).and_then(|node| node.parse().ok()).unwrap_or(0);
        tasks_of(&variable(STEP[0])?, node)
    });
    said.filter(|processes| *processes > 0).unwrap_or(1)
}

fn launched(variable: impl Fn(&str) -> Option<String>) -> Option<usize> {
    TOGETHER.iter().find_map(|name| variable(name)?.parse().ok())
}

/// Tasks of the node of this number in Slurm's list.
fn tasks_of(list: &str, node: usize) -> Option<usize> {
    let mut nodes = 0_usize;
    list.split(',').find_map(|part| {
        let (tasks, times) = part.trim_end_matches(')').split_once("(x").unwrap_or((part, "1"));
        nodes = nodes.saturating_add(times.parse().ok()?);
        (node < nodes).then(|| tasks.parse().ok())?
    })
}

/// Returns true if the processor multiplies bf16 numbers: AVX512-BF16, which every processor with AMX has,
/// too.
pub fn multiplies_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(test)]
mod tests {
    use super::{processes, share};

    #[test]
    fn ranks_of_a_machine_divide_its_cores() {
        let said = |name: &'static str, value: &'static str| processes(move |asked| (asked == name).then(|| value.to_owned()));
        assert_eq!([said("LOCAL_WORLD_SIZE", "4"), said("MPI_LOCALNRANKS", "2")], [4, 2]);
        assert_eq!([said("LOCAL_WORLD_SIZE", "0"), said("LOCAL_WORLD_SIZE", "four"), processes(|_| None)], [1, 1, 1]);
    }

    #[test]
    fn tasks_of_slurm_have_the_number_of_their_node_and_the_cores_that_they_asked_for() {
        let of = |variables: &'static [(&str, &str)]| {
            move |asked: &str| variables.iter().find(|(name, _)| *name == asked).map(|(_, value)| (*value).to_owned())
        };
        let tasks = |node: &'static str| {
            processes(move |asked| match asked {
                "SLURM_NODEID" => Some(node.to_owned()),
                name => of(&[("SLURM_STEP_TASKS_PER_NODE", "2(x3),1,4")])(name),
            })
        };
        assert_eq!(["0", "2", "3", "4", "9"].map(tasks), [2, 2, 1, 4, 1]);
        let slurm = of(&[("SLURM_STEP_TASKS_PER_NODE", "4"), ("SLURM_CPUS_PER_TASK", "3")]);
        assert_eq!([share(12, slurm), share(2, slurm)], [3, 2]);
        assert_eq!(share(12, of(&[("SLURM_STEP_TASKS_PER_NODE", "4")])), 3);
        let launched = of(&[("LOCAL_WORLD_SIZE", "2"), ("SLURM_STEP_TASKS_PER_NODE", "1"), ("SLURM_CPUS_PER_TASK", "12")]);
        assert_eq!((share(12, launched), processes(launched)), (6, 2));
    }
}
