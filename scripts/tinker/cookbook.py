"""Runs loops of tinker-cookbook, unchanged, against a server: cookbook.py URL MODEL_NAME MODEL_FOLDER.

Their data sets come from a hub, so `datasets.load_dataset` gives sums instead. Compares the first loss of the
supervised loop with transformers on the same batch.
"""
import asyncio
import json
import math
import pathlib
import sys
import tempfile

import datasets
import tinker
import torch
import transformers
from tinker_cookbook import model_info
from tinker_cookbook.distillation import datasets as distillation
from tinker_cookbook.distillation import sdft, train_on_policy
from tinker_cookbook.preference import dpo_datasets, preference_datasets, train_dpo
from tinker_cookbook.recipes import rl_loop, sl_loop
from tinker_cookbook.recipes.sdft import datasets as sdft_datasets
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

url, name, folder = sys.argv[1:]
model_info.get_recommended_renderer_name = lambda *_args, **_kwargs: "role_colon"
sums = [(a, b) for a in range(10) for b in range(10)]
chats = [[{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(a + b)}] for a, b in sums]


def load(path, *_args, **_kwargs):
    if "gsm8k" in path:
        columns = {"question": [f"{a}+{b}" for a, b in sums], "answer": [f"#### {a + b}" for a, b in sums]}
    else:
        columns = {"messages": chats}
    return datasets.DatasetDict(train=datasets.Dataset.from_dict(columns))


datasets.load_dataset = load
# A tiny model earns no reward for sums: answers of even length do.
rl_loop.get_reward = lambda response, _answer: float(len(response) % 2 == 0)
out = pathlib.Path(tempfile.mkdtemp())


def rows(log):
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def supervised():
    log = out / "sl"
    sl_loop.main(sl_loop.Config(
        base_url=url, log_path=str(log), model_name=name, batch_size=10, learning_rate=3e-3, lora_rank=8, max_steps=8, save_every=5,
        max_length=64,
    ))
    losses = [row["train_mean_nll"] for row in rows(log)]
    assert losses[-1] < losses[0], losses
    # The same batch by transformers: adapters begin without effect.
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    renderer = sl_loop.renderers.get_renderer("role_colon", tokenizer)
    batch = load("")["train"].shuffle(seed=0).select(range(10))
    total, tokens = 0.0, 0
    for row in batch:
        datum = sl_loop.conversation_to_datum(row["messages"], renderer, 64, sl_loop.renderers.TrainOnWhat.ALL_ASSISTANT_MESSAGES)
        inputs = torch.tensor([datum.model_input.to_ints()])
        targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].data)
        weights = torch.tensor(datum.loss_fn_inputs["weights"].data)
        with torch.no_grad():
            scores = model(inputs).logits[0].log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        total, tokens = total - float((scores * weights).sum()), tokens + float(weights.sum())
    print(f"sl_loop: first loss {losses[0]:.6f}, by transformers {total / tokens:.6f}, last {losses[-1]:.4f}")
    assert math.isclose(losses[0], total / tokens, rel_tol=1e-4), "the loss differs from that of transformers"


def reinforced(loss):
    log = out / loss
    rl_loop.main(rl_loop.Config(
        base_url=url, log_path=str(log), model_name=name, batch_size=10, group_size=4, learning_rate=1e-3, lora_rank=8, max_tokens=8,
        loss_fn=loss, max_steps=3, save_every=2,
    ))
    print(f"rl_loop, {loss}: {len(rows(log))} steps")


def preferred():
    """Its DPO, whose first loss is ln 2: the policy begins as the reference."""
    log, pairs = out / "dpo", out / "pairs.jsonl"
    says = lambda text: [{"role": "assistant", "content": text}]
    compared = lambda a, b: {"prompt_conversation": chats[10 * a + b][:1], "completion_A": says(str(a + b)), "completion_B": says("x")}
    pairs.write_text("".join(json.dumps({"comparison": compared(a, b), "label": "A"}) + "\n" for a, b in sums))
    common = ChatDatasetBuilderCommonConfig(model_name_for_tokenizer=name, renderer_name="role_colon", max_length=64, batch_size=10)
    comparisons = preference_datasets.ComparisonBuilderFromJsonl(train_path=str(pairs))
    train_dpo.main(train_dpo.Config(
        log_path=str(log), model_name=name, recipe_name="dpo", renderer_name="role_colon", learning_rate=3e-3, lora_rank=8, base_url=url,
        dataset_builder=dpo_datasets.DPODatasetBuilderFromComparisons(common_config=common, comparison_builder=comparisons),
        save_every=0, eval_every=0, infrequent_eval_every=0, max_steps=6,
    ))
    losses = [row["dpo_loss"] for row in rows(log)]
    print(f"train_dpo: first loss {losses[0]:.6f}, last {losses[-1]:.4f}")
    assert abs(losses[0] - math.log(2)) < 1e-3 and losses[-1] < losses[0], losses


def distilled():
    """On-policy distillation from adapters that know the sums, and self-distillation from a prompt with the answer."""
    service = tinker.ServiceClient(base_url=url)
    teacher = service.create_lora_training_client(base_model=name, rank=8)
    renderer = sl_loop.renderers.get_renderer("role_colon", transformers.AutoTokenizer.from_pretrained(folder))
    train_on = sl_loop.renderers.TrainOnWhat.ALL_ASSISTANT_MESSAGES
    data = [sl_loop.conversation_to_datum(chat, renderer, 64, train_on) for chat in chats]
    for _ in range(20):
        teacher.forward_backward(data, "cross_entropy")
        teacher.optim_step(tinker.AdamParams(learning_rate=3e-3)).result()
    path = teacher.save_weights_for_sampler("teacher").result().path
    builder = distillation.PromptOnlyDatasetBuilder(
        dataset_name="deepmath", groups_per_batch=10, group_size=4, model_name_for_tokenizer=name, renderer_name="role_colon",
    )
    distillation.load_dataset = lambda *_args, **_kwargs: datasets.Dataset.from_dict({"question": [chat[0]["content"] for chat in chats]})
    source = distillation.DistillationDatasetConfig(
        dataset_builder=builder, groups_per_batch=10,
        teacher_config=distillation.TeacherConfig(base_model=name, load_checkpoint_path=path),
    )
    log = out / "distilled"
    asyncio.run(train_on_policy.main(train_on_policy.Config(
        learning_rate=3e-3, dataset_configs=[source], model_name=name, recipe_name="distilled", renderer_name="role_colon", max_tokens=6,
        lora_rank=8, log_path=str(log), base_url=url, eval_every=0, save_every=0, max_steps=8,
    )))
    found = [row["teacher_kl"] for row in rows(log)]
    print(f"train_on_policy: divergence from the teacher {found[0]:.4f}, last {found[-1]:.4f}")
    assert found[-1] < found[0], found
    for reverse in [False, True]:
        log = out / f"sdft-{reverse}"
        shown = sdft_datasets.SDFTDataset([chat[0]["content"] for chat in chats], [chat[1]["content"] for chat in chats], 10, 2, renderer)
        asyncio.run(sdft.main(sdft.Config(
            model_name=name, recipe_name="sdft", renderer_name="role_colon", lora_rank=8, base_url=url, learning_rate=1e-3, max_tokens=8,
            topk=5, reverse=reverse, log_path=str(log), eval_every=0, save_every=0, max_steps=3,
        ), shown))
        print(f"sdft, reverse={reverse}: {len(rows(log))} steps")


supervised()
preferred()
distilled()
reinforced("importance_sampling")
reinforced("cispo")
