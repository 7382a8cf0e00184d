//! Writing a Hugging Face `config.json`.

use serde_json::{Map, Value, json};

use super::{Head, ModelConfig, RopeScaling};

impl RopeScaling {
    /// Value of `rope_parameters`, without the base.
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
        let eos = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [id] => json!(id),
            ids => json!(ids),
        };
        let keys = json!({
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
        let Value::Object(mut keys) = keys else { unreachable!("json! of braces is an object") };
        (self.family.definition().write)(self, &mut keys);
        if self.head == Head::Score {
            keys.insert("id2label".into(), json!({"0": "LABEL_0"}));
            keys.insert("label2id".into(), json!({"LABEL_0": 0}));
        }
        keys.extend(self.other.clone());
        keys
    }
}
