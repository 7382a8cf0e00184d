//! Memory that a process may take.

use std::path::Path;

/// Memory of this process: the machine's, or the limit of its control groups.
pub fn machine_memory() -> Option<u64> {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let meminfo = read(Path::new("/proc/meminfo"))?;
    let kib = |line: &str| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok();
    let total = meminfo.lines().find_map(kib)? * 1024;
    let group = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    let own = group.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or("").to_owned();
    let root = Path::new("/sys/fs/cgroup");
    let levels = Path::new(&own).ancestors().map(|level| root.join(level).join("memory.max"));
    let limits = levels.chain([root.join("memory/memory.limit_in_bytes")]).filter_map(|path| read(&path)?.trim().parse().ok());
    limits.chain([total]).min()
}
