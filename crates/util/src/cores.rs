//! Cores that a process may compute with.

/// How many processes of a job are on this machine, as those who start them say: `torchrun` and `rollflow launch`, Open MPI, other MPIs.
const TOGETHER: [&str; 3] = ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"];

/// This process's share: the machine's cores, or what its control group allows, divided among the
/// job's processes on it.
pub fn cores() -> usize {
    let here = std::thread::available_parallelism().map_or(1, usize::from);
    (here / processes_here()).max(1)
}

/// Number of processes of this job on this machine, this one included.
pub fn processes_here() -> usize {
    processes(|name| std::env::var(name).ok())
}

fn processes(variable: impl Fn(&str) -> Option<String>) -> usize {
    let said = TOGETHER.iter().find_map(|name| variable(name)?.parse().ok());
    said.filter(|processes| *processes > 0).unwrap_or(1)
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
    use super::processes;

    #[test]
    fn ranks_of_a_machine_divide_its_cores() {
        let said = |name: &'static str, value: &'static str| processes(move |asked| (asked == name).then(|| value.to_owned()));
        assert_eq!([said("LOCAL_WORLD_SIZE", "4"), said("MPI_LOCALNRANKS", "2")], [4, 2]);
        assert_eq!([said("LOCAL_WORLD_SIZE", "0"), said("LOCAL_WORLD_SIZE", "four"), processes(|_| None)], [1, 1, 1]);
    }
}
