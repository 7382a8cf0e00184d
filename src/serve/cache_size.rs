//! Size of a server's cache of keys and values where its user names none.

use tch::Device;

use super::ServeConfig;
use crate::model::{PAGE, gpu_memory, stream};
use crate::train::Policy;
use crate::util::memory::machine_memory;

/// Share of a GPU's memory that the cache may take of what is free next to the weights. Steps, prompts and
/// graphs take the rest.
const OF_GPU: f64 = 0.8;

/// The same of the machine's memory that the weights leave, for other processes need some, too.
const OF_MACHINE: f64 = 0.5;

/// Most tokens of the cache, by the memory that is left when the weights are where they are computed; `None` if all
/// slots fit at their longest, or where the memory isn't known. Longer requests than that are refused.
pub(super) fn cache_tokens(placed: &Policy, config: &ServeConfig) -> Option<usize> {
    let (model, compute, flat) = (placed.config(), placed.compute(), placed.weights().flat);
    let free = match compute.device {
        Device::Cuda(index) => {
            // What it took to place the weights.
            stream::give_back_memory(compute.device);
            gpu_memory(index)?.free as f64 * OF_GPU
        }
        _ => (machine_memory()? as f64 - (flat.numel() * flat.kind().elt_size_in_bytes()) as f64) * OF_MACHINE,
    };
    let fit = fitting(free.max(0.0) as u64, model.cached_bytes(compute), config, model.max_positions)?;
    tracing::info!(
        "the cache of keys and values has {fit} tokens, as many as the memory has room for, instead of {} for each of {} slots; \
         --cache-tokens sets another number",
        config.context.unwrap_or(model.max_positions),
        config.slots
    );
    Some(fit)
}

/// Tokens that fit, if they are fewer than all slots may take.
fn fitting(free: u64, of_token: u64, config: &ServeConfig, positions: usize) -> Option<usize> {
    let context = config.context.unwrap_or(positions);
    // One more slot has a prompt whose completions wait.
    let all = (config.slots + config.prefix_cache + 1).saturating_mul(context);
    let fit = usize::try_from(free / of_token.max(1)).unwrap_or(usize::MAX);
    (fit < all).then(|| fit.max(PAGE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_has_what_fits_where_not_all_slots_do() {
        let config = |context| ServeConfig { slots: 2, prefix_cache: 1, context, ..super::super::tests::config("here".as_ref()) };
        assert_eq!(fitting(4 * 1000 * 10, 10, &config(None), 1000), None, "three slots, and one of a prompt that waits for them");
        assert_eq!(fitting(4 * 1000 * 10 - 1, 10, &config(None), 1000), Some(3999));
        assert_eq!(fitting(4 * 1000 * 10 - 1, 10, &config(Some(500)), 1000), None);
        assert_eq!(fitting(0, 10, &config(None), 1000), Some(PAGE));
    }
}
