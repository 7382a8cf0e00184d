#!/usr/bin/env python3
"""The other side of scripts/versus_async_trl.sh: TRL's AsyncGRPOTrainer on a CPU, against a vLLM server. Prints one JSON line last.

  python trl_async_side.py save DIR                      writes the starting model
  python trl_async_side.py run DIR URL SITE [STEPS]      trains it, with answers of the server at URL; SITE is the server's site-packages

TRL runs on GPUs alone here, so that two of its parts are replaced: weights travel by NCCL, here by a file that the server is told to read; and
attention is a CUDA kernel, here torch's own of the same rows. A step is 64 answers of up to 16 tokens, weights go out after each, and what is older than
four versions is dropped, which are TRL's own defaults.
"""
import json, os, random, sys, time, types

what, folder = sys.argv[1:3]
if what == "run":
    url, site = sys.argv[3:5]
    steps = int(sys.argv[5]) if len(sys.argv) > 5 else 60
    # TRL asks whether vLLM is there, and imports parts of it.
    sys.path.append(site)

import torch
torch.set_num_threads(1)
torch.cuda.get_device_name = lambda *_: "NVIDIA A100"  # asked for its peak rate, to be logged
from trl_model import SIZES, model, tokenizer

WARM_UP = 10


def reward(completions, **_):
    return [sum(c[0]["content"].count(digit) for digit in "123") / 16 for c in completions]


class ByFile:
    """Weights as files, of which the newest three stay."""

    def __init__(self):
        self.version = 0

    def call(self, path, **more):
        import requests
        requests.post(url + path, **more).raise_for_status()

    def init_weight_transfer(self):
        pass

    def pause(self):
        self.call("/pause", params={"mode": "keep"})

    def send_weights(self, tensors):
        from safetensors.torch import save_file
        self.version += 1
        to = f"{folder}-given/{self.version % 3}"
        os.makedirs(to, exist_ok=True)
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors}, f"{to}/model.safetensors")
        self.call("/collective_rpc", json={"method": "reload_weights", "kwargs": {"weights_path": to}})

    def resume(self):
        self.call("/resume")

    def destroy(self):
        pass


def attention(query, key, value, starts, key_starts, longest, longest_key, softmax_scale=None, **_):
    """Rows end to end, each of which sees the keys of its own path: padded, and then torch's."""
    lengths, key_lengths = (starts[1:] - starts[:-1]).long(), (key_starts[1:] - key_starts[:-1]).long()
    at, key_at = torch.arange(int(longest)), torch.arange(int(longest_key))
    rows, key_rows = at < lengths[:, None], key_at < key_lengths[:, None]

    def padded(flat, places):
        return flat.new_zeros(*places.shape, *flat.shape[1:]).index_put(places.nonzero(as_tuple=True), flat).transpose(1, 2)

    sees = (key_at <= (at[:, None] + (key_lengths - lengths)[:, None, None])) & key_rows[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(padded(query, rows), padded(key, key_rows), padded(value, key_rows),
                                                           attn_mask=sees[:, None], scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)[rows]


def run():
    from datasets import Dataset
    from transformers import TrainerCallback
    import trl.experimental.async_grpo.packing as packing
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=attention)
    tok = tokenizer()
    tok.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tok.response_schema, tok.response_template = {"type": "object", "properties": {"content": {"type": "string"}}}, {}
    rng = random.Random(0)
    sums = [[{"role": "user", "content": f"{a}+{b}="}] for a in range(10) for b in range(10)]
    data = Dataset.from_list([{"prompt": rng.choice(sums)} for _ in range(8 * (steps + 40))])
    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

    config = AsyncGRPOConfig(output_dir=f"{folder}-out", per_device_train_batch_size=64, token_budget=0, num_generations=8, max_completion_length=16,
                             max_steps=steps, learning_rate=1e-6, lr_scheduler_type="constant", logging_steps=10, report_to="none", use_cpu=True,
                             bf16=False, fp16=False, gradient_checkpointing=False, save_strategy="no", max_staleness=4, weight_sync_steps=1,
                             vllm_server_base_url=url, disable_tqdm=True, dtype="float32")
    trainer = AsyncGRPOTrainer(model=folder, reward_funcs=reward, args=config, train_dataset=data, processing_class=tok,
                               callbacks=[Clock()], weight_transfer=ByFile())
    trainer.train()
    print(json.dumps({"what": "async_grpo", "steps_per_s": round((len(ends) - 1 - WARM_UP) / (ends[-1] - ends[WARM_UP]), 3)}))


# The worker of the rollouts is another process, which imports this file.
if __name__ == "__main__":
    if what == "save":
        model(SIZES["tiny"], tied=False).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    else:
        run()
