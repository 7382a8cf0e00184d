//! Upper bound, in floating point, of every product in the memory plan, so that its integers never
//! overflow.

use crate::model::{Layout, ModelConfig, ModelError};
use crate::recipe::plan::Plan;
use crate::recipe::train::Optimization;

/// Largest countable part: 256 PiB, more than any machine has. The sum of dozens of parts fits in
/// 64 bits.
const COUNTABLE: f64 = (1_u64 << 58) as f64;
/// Upper bounds of a prompt's tokens and of a number's bytes, with their overhead.
const PROMPT: f64 = 1024.0;
const BYTES: f64 = 32.0;

/// Rejects a plan whose memory can't be counted in 64 bits, and names its largest setting.
pub(super) fn check(plan: &Plan, model: &ModelConfig) -> Result<(), ModelError> {
    let (sft, pairs) = (plan.sft.as_ref(), plan.reward_model.as_ref());
    let most = |of: fn(&Optimization) -> usize| plan.optimizations().map(|(_, section)| of(section)).max().unwrap_or(1);
    let settings = [
        ("batch.groups", plan.batch.groups),
        ("generate.group_size", plan.generate.group_size),
        ("generate.max_new_tokens", plan.generate.max_new_tokens),
        ("environment.max_turns", plan.environment.as_ref().map_or(1, |environment| environment.limits.max_turns)),
        ("generate.max_num_seqs", plan.most_slots()),
        ("generate.workers", plan.generate.workers),
        ("eval.max_num_seqs", plan.eval.as_ref().map_or(1, |eval| eval.max_num_seqs)),
        ("sft.batch", sft.map_or(1, |sft| sft.batch)),
        ("reward_model.batch", pairs.map_or(1, |of| of.batch)),
        ("train.micro_batch_tokens", most(|of| of.micro_batch_tokens)),
        ("train.threads", most(|of| of.threads)),
    ];
    let [groups, group_size, new_tokens, turns, slots, workers, exam, sft, pairs, micro, threads] =
        settings.map(|(_, value)| value as f64);
    let longest = PROMPT + new_tokens * turns;
    let tokens = (groups * group_size + sft + 2.0 * pairs) * longest + threads * (micro + longest);
    let (q, kv) = ((model.heads * model.head_dim) as f64, (model.kv_heads * model.head_dim) as f64);
    let layer = 8.0 * (model.hidden_size as f64 + model.intermediate_size as f64 + q + kv);
    let (layers, vocabulary) = (model.layers() as f64 + 4.0, model.vocab_size as f64);
    let rows = slots + workers + exam + 2.0;
    let copies = threads + workers + plan.devices().len() as f64 + 8.0;
    let products = [
        tokens * layers * layer * BYTES,
        tokens * group_size * longest,
        rows * longest * layers * kv * BYTES,
        (rows + threads) * vocabulary * BYTES + threads * (1_u64 << 25) as f64 * BYTES,
        copies * Layout::new(model).total() as f64 * BYTES,
    ];
    if products.into_iter().all(|product| product < COUNTABLE) {
        return Ok(());
    }
    let (key, value) = settings.into_iter().max_by_key(|(_, value)| *value).unwrap_or_default();
    Err(ModelError::Uncountable { key, value })
}
