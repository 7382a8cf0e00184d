//! Writing a Hugging Face `config.json`.

use serde_json::{Map, Value, json};

use super::{Family, Head, ModelConfig, RopeScaling};

impl RopeScaling {
    /// As `rope_parameters` says it, without the base.
    fn to_json(self) -> Value {
        match self {
            RopeScaling::Default => json!({"rope_type": "default"}),
            RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeScaling::Llama3 { factor, low, high, original } => json!({"rope_type": "llama3", "factor": factor,
                "low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original as u64}),
            RopeScaling::Dynamic { factor } => json!({"rope_type": "dynamic", "factor": factor}),
            RopeScaling::Yarn { factor, original, fast, slow, amplitude, truncate } => {
                json!({"rope_type": "yarn", "factor": factor,
                "original_max_position_embeddings": original as u64, "beta_fast": fast, "beta_slow": slow,
                "attention_factor": amplitude, "truncate": truncate})
            }
        }
    }
}

impl ModelConfig {
    /// The object of a `config.json` that transformers 4 and 5 load.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut rope = self.rope_scaling.to_json();
        let rope_scaling = if self.rope_scaling == RopeScaling::Default { Value::Null } else { rope.clone() };
        rope["rope_theta"] = self.rope_theta.into();
        if self.family == Family::Olmo3 {
            let plain = json!({"rope_type": "default", "rope_theta": self.rope_theta});
            rope = json!({"full_attention": rope, "sliding_attention": plain});
        }
        let window = self.windows.iter().flatten().next();
        let eos = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [id] => json!(id),
            ids => json!(ids),
        };
        let mut keys = json!({
            "architectures": [self.family.architecture(self.head)],
            "model_type": self.family.model_type(),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers(),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": rope,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope_scaling,
            "tie_word_embeddings": self.tied,
            "initializer_range": self.initializer_range,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
            "dtype": self.dtype.name(),
            "torch_dtype": self.dtype.name(),
        });
        let kind = |window: &Option<usize>| if window.is_some() { "sliding_attention" } else { "full_attention" };
        if self.family.has_layer_types() {
            keys["layer_types"] = self.windows.iter().map(kind).collect();
        }
        match self.family {
            Family::Llama | Family::Granite | Family::Olmo2 => {}
            Family::Mistral | Family::Ministral | Family::Phi3 | Family::Olmo3 => keys["sliding_window"] = json!(window),
            Family::Qwen2 | Family::Qwen3 | Family::SmolLm3 => {
                keys["sliding_window"] = json!(window);
                keys["use_sliding_window"] = window.is_some().into();
            }
            Family::InternLm3 => {
                keys["qkv_bias"] = self.qkv_bias.into();
                keys["bias"] = self.mlp_bias.into();
            }
        }
        if self.family.biases_output() {
            keys["attention_bias"] = self.qkv_bias.into();
        }
        if self.family.may_bias_mlp() {
            keys["mlp_bias"] = self.mlp_bias.into();
        }
        if self.family == Family::SmolLm3 {
            keys["no_rope_layers"] = (0..self.layers()).map(|layer| u8::from(!self.unrotated.contains(&layer))).collect();
        }
        if self.family == Family::Granite {
            keys["embedding_multiplier"] = self.factors.embedding.into();
            keys["residual_multiplier"] = self.factors.residual.into();
            keys["attention_multiplier"] = self.attention_scale().into();
            keys["logits_scaling"] = self.factors.logits.into();
        }
        if self.head == Head::Score {
            keys["id2label"] = json!({"0": "LABEL_0"});
            keys["label2id"] = json!({"LABEL_0": 0});
        }
        let Value::Object(mut keys) = keys else { unreachable!("json! of braces is an object") };
        keys.extend(self.other.clone());
        keys
    }
}
