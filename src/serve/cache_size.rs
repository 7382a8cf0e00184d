//! Size of a server's cache of keys and values where its user names none.

use tch::Device;

use super::ServeConfig;
use crate::model::{Compute, GatedDelta, ModelConfig, PAGE, gpu_memory, stream};
use crate::train::Policy;
use crate::util::memory::machine_memory;

/// Share of a GPU's memory that the cache may take of what is free next to the weights. Steps, prompts and
/// graphs take the rest.
const OF_GPU: f64 = 0.8;

/// The same of the machine's memory that the weights leave, for other processes need some, too.
const OF_MACHINE: f64 = 0.5;

/// Most tokens of the cache, by the memory that is left when the weights are where they are computed;
/// `None` if all slots fit at their longest, or where the memory isn't known. Longer requests than that are
/// refused.
pub(super) fn cache_tokens(placed: &Policy, config: &ServeConfig) -> Option<usize> {
    let (model, compute, flat) = (placed.config(), placed.compute(), placed.weights().flat);
    let free = match compute.device {
        Device::Cuda(index) => {
            // What it took to place the weights.
            stream::give_back_memory(compute.device);
            (gpu_memory(index)?.free as f64, OF_GPU)
        }
        _ => (machine_memory()? as f64 - (flat.numel() * flat.kind().elt_size_in_bytes()) as f64, OF_MACHINE),
    };
    let fit = fitting(free, [model.cached_bytes(compute), state_bytes(model, compute)], config, model.max_positions)?;
    tracing::info!(
        "the cache of keys and values has {fit} tokens, as many as the memory has room for, instead of {} for each of {} slots; \
         --cache-tokens sets another number",
        config.context.unwrap_or(model.max_positions),
        config.slots
    );
    Some(fit)
}

/// Bytes of the states of a sequence, which a model with gated delta nets has.
fn state_bytes(model: &ModelConfig, compute: Compute) -> u64 {
    let of_nets = |nets: &GatedDelta| {
        let [conv, heads] = nets.state_sizes();
        nets.layers.len() * (conv * compute.activations().0.elt_size_in_bytes() + heads * 4)
    };
    model.delta.as_ref().map_or(0, of_nets) as u64
}

/// Tokens that fit a share of what is free next to the states of all sequences, if they are fewer than all
/// slots may take.
fn fitting((free, share): (f64, f64), [of_token, of_state]: [u64; 2], config: &ServeConfig, positions: usize) -> Option<usize> {
    let context = config.context.unwrap_or(positions);
    // One more slot has a prompt whose completions wait.
    let sequences = config.slots + config.prefix_cache + 1;
    let free = (free - sequences as f64 * of_state as f64).max(0.0);
    let fit = (free * share / of_token.max(1) as f64) as usize;
    (fit < sequences.saturating_mul(context)).then(|| fit.max(PAGE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Dtype;

    #[test]
    fn a_cache_has_what_fits_where_not_all_slots_do() {
        let config = |context| ServeConfig { slots: 2, prefix_cache: 1, context, ..super::super::tests::config("here".as_ref()) };
        let fit = |free: f64, of_state, context| fitting((free, 0.5), [10, of_state], &config(context), 1000);
        assert_eq!(fit(80_000.0, 0, None), None, "three slots, and one of a prompt that waits for them");
        assert_eq!(fit(79_998.0, 0, None), Some(3999));
        assert_eq!(fit(79_998.0, 0, Some(500)), None);
        assert_eq!(fit(0.0, 0, None), Some(PAGE));
        assert_eq!(fit(80_000.0, 1000, None), Some(3800), "next to four states");
    }

    #[test]
    fn a_state_has_bytes_in_layers_with_delta_nets_only() {
        let plain = super::super::tests::policy().config().clone();
        let nets = GatedDelta { layers: vec![0, 2], key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 6, kernel: 4 };
        let bytes = |delta| state_bytes(&ModelConfig { delta, ..plain.clone() }, Compute::cpu(Dtype::F32));
        assert_eq!([bytes(None), bytes(Some(nets))], [0, 2 * ((2 * 2 * 8 + 4 * 6) * 3 * 4 + 4 * 8 * 6 * 4)]);
    }
}
