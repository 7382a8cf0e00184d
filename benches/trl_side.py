#!/usr/bin/env python3
"""The other side of benches/versus_trl.rs: TRL's synchronous GRPOTrainer, or its SFTTrainer, on a CPU. Prints one JSON line last.

  python trl_side.py grpo|sft [--preset tiny|mid] [--threads N] [--steps N] [--out DIR]

--out writes the starting weights and tokenizer as a Hugging Face folder, and for SFT the sequences as data.jsonl in it, so that both sides start from the
same model and read the same data. SFT takes full rows, which is what packing makes of data: 64 of 64 tokens a step, or 16 of 128 (mid). TRL's
own packing would compute all rows as one sequence under a mask here, which on a CPU is many times slower, and no fair measure.
"""
import argparse, json, os, random, time

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=["grpo", "sft"])
parser.add_argument("--preset", choices=["tiny", "mid"], default="tiny")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--steps", type=int, default=63)
parser.add_argument("--out", default="")
args = parser.parse_args()
WARM_UP = min(3, args.steps - 1)

import torch
torch.set_num_threads(args.threads)
from datasets import Dataset
from transformers import TrainerCallback

from trl_model import SIZES, model, tokenizer

SIZE = SIZES[args.preset]

ends, trained = [], []
class Clock(TrainerCallback):
    def on_step_end(self, *_, **__):
        ends.append(time.perf_counter())


tok, policy = tokenizer(SIZE["vocab"]), model(SIZE)
if args.out:
    policy.save_pretrained(args.out)
    tok.save_pretrained(args.out)
same = dict(output_dir=os.path.join(os.environ.get("TMPDIR", "/tmp"), "trl_out"), max_steps=args.steps, lr_scheduler_type="constant",
            warmup_steps=0, logging_steps=1, report_to="none", use_cpu=True, bf16=False, fp16=False, save_strategy="no", seed=0,
            disable_tqdm=True, max_grad_norm=1.0, weight_decay=0.0, optim="adamw_torch")
rng = random.Random(0)
if args.what == "grpo":
    from trl import GRPOConfig, GRPOTrainer
    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    data = Dataset.from_list([rng.choice(sums) for _ in range(8 * (args.steps + 8))])
    def reward(completions, answer, **_):
        # Nearly nothing for every other of the rest: all groups teach.
        return [1.0 if c.strip() == a else (0.1 if c[:1].isdigit() else 0.01 * (i % 2)) for i, (c, a) in enumerate(zip(completions, answer))]
    config = GRPOConfig(per_device_train_batch_size=64, num_generations=8, max_completion_length=SIZE["answer"], temperature=1.0, beta=0.0,
                        loss_type="grpo", learning_rate=1e-4, gradient_checkpointing=False, remove_unused_columns=False, **same)
    trainer = GRPOTrainer(model=policy, reward_funcs=reward, args=config, train_dataset=data, processing_class=tok, callbacks=[Clock()])
else:
    from trl import SFTConfig, SFTTrainer
    length = SIZE["length"]
    def sequence():
        return [rng.randrange(4, SIZE["vocab"]) for _ in range(length)]
    rows = [sequence() for _ in range(SIZE["rows"] * (args.steps + 2))]
    if args.out:
        with open(os.path.join(args.out, "data.jsonl"), "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    config = SFTConfig(per_device_train_batch_size=SIZE["rows"], learning_rate=1e-3, gradient_checkpointing=False, max_length=None,
                       packing=False, **same)
    trainer = SFTTrainer(model=policy, args=config, train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
                         processing_class=tok, callbacks=[Clock()])
    step = trainer.training_step
    def counted(model, inputs, *rest, **more):
        trained.append(int((inputs["labels"][:, 1:] != -100).sum()))
        return step(model, inputs, *rest, **more)
    trainer.training_step = counted
trainer.train()
seconds, steps = ends[-1] - ends[WARM_UP - 1], args.steps - WARM_UP
rate = dict(trained_tokens_per_s=round(sum(trained[WARM_UP:]) / seconds)) if trained else {}
print(json.dumps(dict(what=args.what, preset=args.preset, threads=args.threads, steps_per_s=round(steps / seconds, 3),
                      s_per_step=round(seconds / steps, 4), **rate)))
