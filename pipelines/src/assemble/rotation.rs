//! Whether servers rotate the positions of a model with LongRoPE as its trainer does.

use rollflow::model::ModelConfig;

/// Rotation of positions in the trainer, where the model has LongRoPE.
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    /// Context of pre-training, in tokens.
    short: usize,
    /// Context of the trainer.
    context: usize,
}

impl Rotation {
    /// The rotation of a trainer of this model; `None` without LongRoPE.
    pub fn of(config: &ModelConfig) -> Option<Self> {
        let (short, _) = config.contexts()?;
        Some(Rotation { short, context: config.max_positions })
    }

    /// How the server of this name, which reads `context` tokens, rotates otherwise.
    pub fn missing(self, name: &str, context: usize, by_context: bool) -> Option<String> {
        let Rotation { short, context: own } = self;
        let is_long = own > short;
        if !by_context && is_long {
            return Some(format!(
                "{name} chooses LongRoPE's factors by each batch, while the trainer takes those for long contexts for all (model.context = {own}): \
                 use vLLM or `rollflow serve`, or leave model.context out"
            ));
        }
        (by_context && is_long != (context > short)).then(|| {
            let (factors, other) = if is_long { ("short", "long") } else { ("long", "short") };
            let instead = if is_long { "leave model.context out" } else { "set model.context to its context" };
            format!(
                "{name} reads {context} tokens, and therefore rotates the positions of all sequences by LongRoPE's factors for {factors} contexts; \
                 the trainer takes those for {other} ones: start it with --max-model-len {own} (rollflow: --context), or {instead}"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// vLLM takes LongRoPE's long factors for all sequences if it may read long ones; SGLang chooses by batch.
    #[test]
    fn a_server_that_rotates_positions_otherwise_than_the_trainer_is_refused() {
        let (short, long) = (Rotation { short: 4096, context: 4096 }, Rotation { short: 4096, context: 32_768 });
        for (rotation, context, by_context, refused) in [
            (short, 4096, true, None),
            (short, 131_072, false, None),
            (short, 131_072, true, Some("--max-model-len 4096")),
            (long, 32_768, true, None),
            (long, 4096, true, Some("--max-model-len 32768")),
            (long, 32_768, false, Some("by each batch")),
        ] {
            let found = rotation.missing("a", context, by_context);
            assert_eq!(found.is_some(), refused.is_some(), "{found:?}");
            assert!(found.unwrap_or_default().contains(refused.unwrap_or_default()));
        }
    }
}
