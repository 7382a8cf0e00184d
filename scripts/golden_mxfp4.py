"""Makes tests/golden/mxfp4: a folder of a small gpt-oss whose experts are in MXFP4, and what transformers makes of them.

    python scripts/golden_mxfp4.py tests/golden

Needs torch and transformers; the committed folder is of transformers 5.23.0.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

torch.manual_seed(5)
folder = Path(sys.argv[1]) / "mxfp4"
folder.mkdir(exist_ok=True)
config = AutoConfig.for_model(
    "gpt_oss", vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    num_local_experts=3, num_experts_per_tok=2, sliding_window=4, max_position_embeddings=128, eos_token_id=383, pad_token_id=381, initializer_range=0.15,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0))
model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
tensors, expected = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}, {}
for name in [name for name in tensors if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj")]:
    experts, input, output = tensors.pop(name).shape
    blocks = torch.randint(0, 256, (experts, output, input // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 127, (experts, output, input // 32), dtype=torch.uint8)
    tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
model.load_state_dict({**tensors, **expected}, strict=False)  # in f32, with these numbers
ids = torch.randint(0, 380, (1, 12))
with torch.no_grad():
    expected |= {"ids": ids, "logits": model(ids).logits[0]}
save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
save_file(expected, folder / "expected.safetensors")
written = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "dtype": "bfloat16"}
written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}
(folder / "config.json").write_text(json.dumps(written, indent=2, default=str))
