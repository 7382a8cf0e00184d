//! Parameter groups: weight decay and learning-rate scales by tensor.
//!
//! Groups are ranges of the flat buffer, chosen by tensor names. An update stays one
//! pass over the buffer.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{DecayScope, LrScale};
use crate::model::{Layout, Role};

impl LrScale {
    fn of(&self, role: Role) -> f64 {
        match role {
            Role::Embedding => self.embeddings,
            Role::Body => 1.0,
            Role::Head => self.head,
            Role::ScoreHead => self.score_head,
            Role::Adapter => self.adapters,
        }
    }
}

/// Optimizer settings that depend on the tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct ParamGroups {
    pub decay: DecayScope,
    pub lr_scale: LrScale,
}

/// A stretch of the flat buffer that is updated with the same settings.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Slice {
    pub range: Range<usize>,
    pub weight_decay: f64,
    pub lr_scale: f64,
}

impl ParamGroups {
    /// Rejects a factor other than 1 that has no effect.
    pub fn check(&self, layout: &Layout) -> Result<(), String> {
        let has = |role| layout.entries().iter().any(|entry| entry.role() == role);
        let without = if has(Role::Adapter) { "only its adapters are trained" } else { "it has none" };
        let tied = if has(Role::Embedding) { "its head is the embeddings, or a score head" } else { without };
        let factors = [
            ("embeddings", Role::Embedding, without),
            ("head", Role::Head, tied),
            ("adapters", Role::Adapter, "it is trained without adapters"),
            ("score_head", Role::ScoreHead, without),
        ];
        match factors.into_iter().find(|(_, role, _)| self.lr_scale.of(*role) != 1.0 && !has(*role)) {
            Some((key, _, why)) => Err(format!("lr_scale.{key} applies to no trained tensor of this model: {why}; remove it")),
            None => Ok(()),
        }
    }

    /// The buffer's stretches in order, as few as there can be.
    pub fn slices(&self, weight_decay: f64, layout: &Layout) -> Vec<Slice> {
        let mut slices: Vec<Slice> = Vec::new();
        for entry in layout.entries() {
            let is_left_out = ["bias", "norm.weight"].iter().any(|end| entry.name.ends_with(end));
            let decays = self.decay == DecayScope::All || !is_left_out;
            let weight_decay = if decays { weight_decay } else { 0.0 };
            let lr_scale = self.lr_scale.of(entry.role());
            match slices.last_mut() {
                Some(last) if (last.weight_decay, last.lr_scale) == (weight_decay, lr_scale) => {
                    last.range.end = entry.range().end
                }
                _ => slices.push(Slice { range: entry.range(), weight_decay, lr_scale }),
            }
        }
        slices
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Family, Lora, ModelConfig};

    /// Patterns of tensors without decay in transformers' `Trainer.get_decay_parameter_names`
    /// (5.23.0).
    fn transformers_leaves_out(name: &str) -> bool {
        let name = name.to_lowercase();
        let patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"];
        patterns.iter().any(|pattern| regex::Regex::new(pattern).unwrap().is_match(&name))
    }

    fn config(family: Family) -> ModelConfig {
        ModelConfig { family, qkv_bias: true, output_bias: true, tied: false, ..ModelConfig::small_of(32, 16, 2) }
    }

    #[test]
    fn what_decays_is_what_transformers_decays_in_every_family() {
        let folders = std::fs::read_dir("tests/golden/models").unwrap().map(|folder| folder.unwrap().path());
        let golden = folders.filter(|folder| folder.is_dir()).map(|folder| ModelConfig::from_dir(&folder).unwrap());
        for config in Family::ALL.into_iter().map(config).chain(golden) {
            let family = config.family;
            let scoring = config.scoring();
            let adapters = Lora::new(2, 4.0, &[Lora::ALL]).unwrap().layout(&config);
            for layout in [Layout::new(&config), Layout::new(&scoring), adapters] {
                let slices = ParamGroups::default().slices(0.1, &layout);
                for entry in layout.entries() {
                    let slice = slices.iter().find(|slice| slice.range.contains(&entry.offset)).unwrap();
                    let name = &entry.name;
                    assert_eq!(slice.weight_decay == 0.0, transformers_leaves_out(name), "{family:?}: {name}");
                }
            }
        }
    }

    #[test]
    fn a_factor_that_no_tensor_would_see_is_an_error_that_names_it() {
        let untied = config(Family::ALL[0]);
        let tied = ModelConfig { tied: true, ..untied.clone() };
        let low_rank = Lora::new(2, 4.0, &["q_proj"]).unwrap().layout(&untied);
        let [untied, tied] = [untied, tied].map(|config| Layout::new(&config));
        let (head, adapters) = (LrScale { head: 2.0, ..LrScale::default() }, LrScale { adapters: 2.0, ..LrScale::default() });
        let cases = [
            (head, &untied, ""),
            (head, &tied, "lr_scale.head applies to no trained tensor of this model: its head is the embeddings"),
            (head, &low_rank, "only its adapters are trained"),
            (adapters, &untied, "lr_scale.adapters"),
            (adapters, &low_rank, ""),
        ];
        for (lr_scale, layout, expected) in cases {
            let error = ParamGroups { lr_scale, ..ParamGroups::default() }.check(layout).err().unwrap_or_default();
            assert!(error.contains(expected) && error.is_empty() == expected.is_empty(), "{error}");
        }
        let whole = ParamGroups::default().slices(0.0, &untied);
        assert_eq!(whole, [Slice { range: 0..untied.total(), weight_decay: 0.0, lr_scale: 1.0 }], "as few slices as can be");
    }
}
