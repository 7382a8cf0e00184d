//! Figures of the machine that a run is on: this process, its GPUs and its disk.

use std::path::PathBuf;

#[cfg(target_os = "linux")]
use nvml_wrapper::Nvml;

use super::{Metric, Metrics};

/// Names of the machine's NVIDIA GPUs, each with its memory and the driver's version; none where the
/// driver's library is not installed.
pub fn gpus() -> Vec<String> {
    #[cfg(target_os = "linux")]
    if let Ok(nvml) = Nvml::init() {
        let driver = nvml.sys_driver_version().unwrap_or_default();
        let gpu = |index| {
            let gpu = nvml.device_by_index(index).ok()?;
            let gib = gpu.memory_info().map_or(0, |memory| memory.total >> 30);
            Some(format!("{}, {gib} GiB, driver {driver}", gpu.name().ok()?))
        };
        return (0..nvml.device_count().unwrap_or(0)).filter_map(gpu).collect();
    }
    Vec::new()
}

/// Reads the machine's figures. Those that the machine does not tell are absent.
pub(super) struct MachineSampler {
    /// A folder on the disk.
    folder: Option<PathBuf>,
    /// NVIDIA's library, if it is installed. It is opened when the program runs.
    #[cfg(target_os = "linux")]
    gpus: Option<Nvml>,
}

impl MachineSampler {
    pub fn new(folder: Option<PathBuf>) -> Self {
        MachineSampler {
            folder,
            #[cfg(target_os = "linux")]
            gpus: Nvml::init().ok(),
        }
    }

    /// Brings the figures into `metrics`. Takes less than a millisecond without GPUs.
    #[cfg(target_os = "linux")]
    pub fn export(&self, metrics: &Metrics) {
        drop(process(metrics));
        if let Some(disk) = self.folder.as_ref().and_then(|folder| rustix::fs::statvfs(folder).ok()) {
            metrics.set(Metric::DiskFree, &[], (disk.f_bavail * disk.f_frsize) as f64);
        }
        for (index, nvml) in
            self.gpus.iter().flat_map(|nvml| (0..nvml.device_count().unwrap_or(0)).map(move |index| (index, nvml)))
        {
            let (Ok(gpu), name) = (nvml.device_by_index(index), index.to_string()) else { continue };
            if let Ok(memory) = gpu.memory_info() {
                metrics.set(Metric::GpuMemory, &[&name], memory.used as f64);
                metrics.set(Metric::GpuMemoryTotal, &[&name], memory.total as f64);
            }
            if let Ok(used) = gpu.utilization_rates() {
                metrics.set(Metric::GpuUse, &[&name], f64::from(used.gpu) / 100.0);
            }
        }
    }

    /// Nothing is known of other systems.
    #[cfg(not(target_os = "linux"))]
    pub fn export(&self, _: &Metrics) {}
}

#[cfg(target_os = "linux")]
fn process(metrics: &Metrics) -> procfs::ProcResult<()> {
    let own = procfs::process::Process::myself()?;
    let (stat, second) = (own.stat()?, procfs::ticks_per_second() as f64);
    metrics.absolute(Metric::ProcessCpu, &[], (stat.utime + stat.stime) as f64 / second);
    metrics.set(Metric::ProcessMemory, &[], (stat.rss * procfs::page_size()) as f64);
    metrics.set(Metric::ProcessThreads, &[], stat.num_threads as f64);
    metrics.set(Metric::ProcessStart, &[], procfs::boot_time_secs()? as f64 + stat.starttime as f64 / second);
    metrics.set(Metric::ProcessFiles, &[], own.fd_count()? as f64);
    if let procfs::process::LimitValue::Value(most) = own.limits()?.max_open_files.soft_limit {
        metrics.set(Metric::ProcessFilesLimit, &[], most as f64);
    }
    Ok(())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_process_tells_its_own_figures_and_a_machine_without_gpus_none_of_them() {
        let (metrics, machine) = (Metrics::new(), MachineSampler::new(Some(std::env::temp_dir())));
        let held = vec![1_u8; 64 << 20];
        machine.export(&metrics);
        let of = |metric| metrics.newest(metric, &[]).unwrap();
        assert!(of(Metric::ProcessMemory) >= held.len() as f64 && of(Metric::ProcessThreads) >= 1.0);
        assert!(of(Metric::ProcessFiles) >= 3.0 && of(Metric::ProcessFilesLimit) >= of(Metric::ProcessFiles));
        assert!(of(Metric::DiskFree) > 0.0);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        let age = now - of(Metric::ProcessStart);
        assert!((-2.0..3600.0).contains(&age), "{age}");
        let before = of(Metric::ProcessCpu);
        let busy = std::time::Instant::now();
        while busy.elapsed().as_millis() < 50 {}
        machine.export(&metrics);
        assert!(of(Metric::ProcessCpu) > before);
        if machine.gpus.is_none() {
            assert!(!metrics.render().contains("rollflow_gpu_"));
        }
    }
}
