//! Memory of servers that a run starts on its own GPUs.

use super::{MemoryPart, MemoryPlan, Taken, size};
use crate::engine::settings::Engine;
use crate::recipe::model::DeviceName;

/// Adds servers that the run starts on its own GPUs with a share of their memory, which has the `total` of
/// each. Without `engine.gpu_memory` they get what is left.
pub(super) fn add(engine: &Engine, all: &mut [MemoryPlan], total: &dyn Fn(usize) -> Option<u64>) {
    let Some(share) = engine.gpu_memory else { return };
    let name = |gpu| DeviceName::Cuda(gpu).word();
    let gpus = (0..).take_while(|gpu| total(*gpu).is_some()).count();
    let own: Vec<usize> = all.iter().filter_map(MemoryPlan::gpu).collect();
    for gpu in engine.gpus(gpus, &own) {
        let (Some(total), Some(of)) = (total(gpu), all.iter_mut().find(|of| of.device == name(gpu))) else { continue };
        let taken = if engine.sync.sleep { Taken::BetweenSteps } else { Taken::Always };
        let why = format!("engine.gpu_memory = {share} of {}, for {}", size(total), engine.launch.word());
        of.parts.push(MemoryPart { what: "server", bytes: (share * total as f64) as u64, why, taken });
    }
}

impl MemoryPlan {
    /// Number of the GPU; `None` for the processor.
    pub fn gpu(&self) -> Option<usize> {
        match self.device.parse() {
            Ok(DeviceName::Cuda(index)) => Some(index),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::remote::sync::SyncConfig;
    use crate::engine::settings::Launch;

    /// On a card of 80 GiB, of which the trainer takes 30 always and 30 more in a step.
    #[test]
    fn servers_on_the_trainers_gpu_are_counted_and_those_that_sleep_between_steps_alone() {
        let part = |gib: u64, taken| MemoryPart { what: "part", bytes: gib << 30, why: String::new(), taken };
        let total_with = |sleep| {
            let parts = vec![part(30, Taken::Always), part(30, Taken::InSteps)];
            let mut all = [MemoryPlan { device: "cuda:1".to_owned(), parts, has: Some(80 << 30) }];
            let sync = SyncConfig { sleep, ..SyncConfig::default() };
            let engine = Engine { launch: Launch::Vllm, replicas: 2, gpu_memory: Some(0.5), sync, ..Engine::default() };
            add(&engine, &mut all, &|gpu| (gpu < 2).then_some(80 << 30));
            let [of] = all;
            assert_eq!(of.parts.iter().filter(|part| part.what == "server").count(), 1, "the other GPU is the server's own");
            (of.total() >> 30, of.between_steps() >> 30, of.exceeds())
        };
        assert_eq!((total_with(false), total_with(true)), ((100, 70, true), (70, 70, false)));
    }
}
