"""Makes the small golden folders of tests/golden/models that need no more than this script: one for each family or option given.

    python scripts/golden_models.py tests/golden/models [NAME…]

Needs torch and transformers; the numbers of the committed folders are those of transformers 5.23.0 and torch 2.13.0 on a CPU. The tokenizer is
that of llama_tied, which is there already.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SHAPE = dict(vocab_size=384, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256, rms_norm_eps=1e-6, initializer_range=0.15, eos_token_id=383, pad_token_id=381,
             bos_token_id=None, tie_word_embeddings=True, use_cache=True)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
CASES = {
    "qwen2_yarn": ("qwen2", dict(rope_parameters=YARN)),
    "phi3": ("phi3", dict(sliding_window=6)),
    "granite": ("granite", dict(embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=2.5)),
    "smollm3": ("smollm3", dict(num_hidden_layers=3, no_rope_layers=[1, 0, 1])),
    "internlm3": ("internlm3", dict(head_dim=8, attention_bias=True, mlp_bias=True)),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", dict(num_hidden_layers=3, sliding_window=6, layer_types=["sliding_attention", "full_attention", "sliding_attention"], rope_parameters={
        "full_attention": YARN, "sliding_attention": dict(rope_type="default", rope_theta=10000.0)})),
    "olmo3_rotations": ("olmo3", dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"], rope_parameters={
        "full_attention": dict(rope_type="linear", rope_theta=1000.0, factor=8.0), "sliding_attention": dict(rope_type="linear", rope_theta=5000.0, factor=2.0)})),
    "ministral": ("ministral", dict(sliding_window=6, head_dim=16, layer_types=["sliding_attention", "full_attention"])),
    "gemma": ("gemma", dict(head_dim=8)),
    "gemma2": ("gemma2", dict(head_dim=8, num_hidden_layers=3, sliding_window=6, query_pre_attn_scalar=12, attn_logit_softcapping=1.5, final_logit_softcapping=3.0)),
    "gemma3": ("gemma3_text", dict(head_dim=8, num_hidden_layers=3, sliding_window=6, query_pre_attn_scalar=8, final_logit_softcapping=5.0, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
               rope_parameters={"full_attention": dict(rope_type="linear", rope_theta=1000000.0, factor=8.0), "sliding_attention": dict(rope_type="default", rope_theta=10000.0)})),
    "gemma3_windows": ("gemma3_text", dict(head_dim=8, sliding_window=5, attn_logit_softcapping=2.0, layer_types=["sliding_attention", "full_attention"], rope_parameters={
        "full_attention": YARN, "sliding_attention": dict(rope_type="linear", rope_theta=5000.0, factor=2.0)})),
    "qwen3_moe_sparse": ("qwen3_moe", dict(head_dim=8, num_hidden_layers=3, moe_intermediate_size=12, num_experts=5, num_experts_per_tok=3, mlp_only_layers=[1], norm_topk_prob=False)),
    "olmoe": ("olmoe", dict(num_experts=6, num_experts_per_tok=2)),
    "olmoe_bounded": ("olmoe", dict(num_experts=4, num_experts_per_tok=2, clip_qkv=0.8)),
    "gpt_oss": ("gpt_oss", dict(num_hidden_layers=3, head_dim=8, intermediate_size=20, num_local_experts=5, num_experts_per_tok=2, sliding_window=6, swiglu_limit=0.6, tie_word_embeddings=False,
                rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=32))),
    "gpt_oss_long": ("gpt_oss", dict(head_dim=16, intermediate_size=12, num_local_experts=4, num_experts_per_tok=4, sliding_window=16, attention_bias=False, tie_word_embeddings=False, layer_types=["full_attention", "sliding_attention"],
                     rope_parameters=dict(rope_type="default", rope_theta=10000.0))),
    "gpt_oss_grouped": ("gpt_oss", dict(head_dim=16, num_attention_heads=8, intermediate_size=16, num_local_experts=8, num_experts_per_tok=3, sliding_window=6, tie_word_embeddings=False,
                        rope_parameters=dict(rope_type="default", rope_theta=10000.0))),
    "qwen3_5_long": ("qwen3_5_text", dict(head_dim=16, num_hidden_layers=3, layer_types=["full_attention", "linear_attention", "linear_attention"], linear_num_key_heads=2, linear_num_value_heads=2,
                     linear_key_head_dim=8, linear_value_head_dim=12, linear_conv_kernel_dim=3, rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))),
    "qwen3_5_padded": ("qwen3_5_text", dict(head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=2,
                       linear_key_head_dim=8, linear_value_head_dim=12, linear_conv_kernel_dim=3, rope_parameters=dict(YARN, partial_rotary_factor=0.5))),
    "qwen3_5_moe": ("qwen3_5_moe_text", dict(head_dim=16, num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
                    linear_key_head_dim=8, linear_value_head_dim=8, moe_intermediate_size=16, shared_expert_intermediate_size=20, num_experts=5, num_experts_per_tok=2,
                    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25))),
    "phi3_partial": ("phi3", dict(head_dim=16, rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.75))),
    "phi3_longrope": ("phi3", dict(original_max_position_embeddings=64, rope_parameters=dict(
        rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.3, 1.7], long_factor=[2.0, 4.0, 8.0], original_max_position_embeddings=64))),
    "phi3_stretched": ("phi3", dict(original_max_position_embeddings=4, rope_parameters=dict(
        rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.3, 1.7], long_factor=[2.0, 4.0, 8.0], original_max_position_embeddings=4))),
    "llama_dynamic": ("llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0))),
}
LENGTHS, LONG, STRETCHED, NEW, TEXTS = [8, 5, 2], [70, 9, 3], [8, 6, 5], 24, ["def add(a, b):\n    return a + b", "12+34=46", "naïve café – 東京 😀!"]


def padded(rows, side, pad):
    width = max(map(len, rows))
    left = side == "left"
    fill = lambda row, of: [of] * (width - len(row)) + row if left else row + [of] * (width - len(row))
    mask = [fill([1] * len(row), 0) for row in rows]
    positions = (torch.tensor(mask).cumsum(-1) - 1).clamp(min=0).tolist()
    return dict(input_ids=[fill(row, pad) for row in rows], attention_mask=mask, position_ids=positions)


def forward(model, batch):
    return model(**{key: torch.tensor(batch[key]) for key in ("input_ids", "attention_mask", "position_ids")}).logits


def log_probs(logits, ids, temperature):
    return torch.log_softmax(logits[:, :-1] / temperature, -1).gather(-1, torch.tensor(ids)[:, 1:, None])[..., 0]


def entropy(logits, temperature):
    log_probs = torch.log_softmax(logits / temperature, -1)
    return -(log_probs.exp() * log_probs).sum(-1)


def greedy(model, rows):
    tokens, chosen, margin = [], [], float("inf")
    for row in rows:
        ids, logs = list(row), []
        for _ in range(NEW):
            step = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
            top = step.topk(2).values
            margin = min(margin, float(top[0] - top[1]))
            ids.append(int(step.argmax()))
            logs.append(float(top[0]))
        tokens.append(ids[len(row):])
        chosen.append(logs)
    return dict(max_new_tokens=NEW, tokens=tokens, logprobs=chosen, min_top2_margin=margin)


def three_steps(model, batch, expected):
    labels = [[-100 if mask == 0 or at < 2 else id for at, (id, mask) in enumerate(zip(ids, masks))]
              for ids, masks in zip(batch["input_ids"], batch["attention_mask"])]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    target = torch.tensor(labels)[:, 1:]
    loss_of = lambda: torch.nn.functional.cross_entropy(forward(model, batch)[:, :-1].flatten(0, 1), target.flatten())
    steps = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        norms = {name: float(p.grad.norm()) for name, p in model.named_parameters()}
        if step == 0:
            expected.update({f"grad0.{n}": p.grad.clone() for n, p in model.named_parameters() if "norm" in n or "k_proj" in n})
        steps.append(dict(loss=float(loss), grad_norm=float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
                          grad_norm_per_param=norms))
        optimizer.step()
    expected.update({f"after3.{name}": p.detach().clone() for name, p in model.named_parameters()})
    optimizer_is = dict(name="AdamW", lr=1e-3, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.1, all_params_decayed=True, clip_norm=1.0)
    return dict(labels=labels, optimizer=optimizer_is, steps=steps, loss_after_3_steps=float(loss_of()))


def make(root, name, model_type, options):
    folder = root / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "golden").mkdir(parents=True)
    for seed in range(100):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(model_type, **{**SHAPE, **options})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
        for key, p in model.named_parameters():  # norms and biases that matter
            if p.dim() == 1 or key.endswith("_bias"):
                torch.nn.init.normal_(p, 1.0 if "linear_attn.norm" in key or "norm" in key and not ("gemma" in model_type or "qwen3_5" in model_type) else 0.0, 0.1)
        rows = [torch.randint(0, 380, (length,)).tolist() for length in (LONG if name.endswith("_long") else STRETCHED if name.endswith("_stretched") else LENGTHS)]
        if name.endswith("_padded"):  # the padding token also ends turns
            rows[0][4] = rows[1][2] = config.pad_token_id
        with torch.no_grad():
            answers = greedy(model, rows)
        if answers["min_top2_margin"] > 3e-3:
            break
    expected = {}
    batches = {side: padded(rows, side, config.pad_token_id) for side in ("right", "left")}
    with torch.no_grad():
        for side, batch in batches.items():
            logits = forward(model, batch)
            expected[f"{side}.logits"] = logits
            for temperature in (1.0, 0.7):
                expected[f"{side}.token_logprobs_T{temperature}"] = log_probs(logits, batch["input_ids"], temperature)
                expected[f"{side}.entropy_T{temperature}"] = entropy(logits, temperature)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(root / "llama_tied" / file, folder / file)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [dict(text=text, ids=(ids := tokenizer(text)["input_ids"]), decoded=tokenizer.decode(ids)) for text in TEXTS]
    golden = dict(name=name, model_type=model_type, transformers=transformers.__version__, torch=torch.__version__, attn="eager",
                  dtype="float32", n_params=sum(p.numel() for p in model.parameters()), tied=config.tie_word_embeddings,
                  tolerance=dict(logits=dict(rtol=2e-4, atol=2e-4), after_steps=dict(rtol=1e-3, atol=2e-5)),
                  **batches, greedy=answers, sft=three_steps(model, batches["right"], expected), tokenizer=texts)
    save_file({key: value.contiguous() for key, value in expected.items()}, folder / "golden/expected.safetensors")
    (folder / "golden/golden.json").write_text(json.dumps(golden))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{name}: seed {seed}, margin {answers['min_top2_margin']:.4f}, {size // 1024} KiB")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[2:] or CASES:
        make(Path(sys.argv[1]), case, *CASES[case])
