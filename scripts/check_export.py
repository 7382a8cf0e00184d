"""Loads a folder that rollflow wrote with transformers or PEFT, and holds its logits and token ids against what rollflow says of it.

    check_export.py check FOLDER LOGITS     LOGITS is what `cargo run --example logits -- FOLDER TEXT...` printed, a line of JSON for each text
    check_export.py classify ADAPTERS WHOLE holds the adapters of a reward model over their base against the model that they were merged into
    check_export.py adapt FOLDER OUT        puts adapters of PEFT's that change something over some of the model in FOLDER, and writes them to OUT

Exits with 1 at the first difference.
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

TOLERANCE = 1e-4


def whole(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def classifier(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32).eval()


def load(folder):
    if not (folder / "adapter_config.json").exists():
        return folder, whole(folder)
    base = PeftConfig.from_pretrained(folder).base_model_name_or_path
    model = PeftModel.from_pretrained(whole(base), folder)
    moved = [name for name, tensor in model.named_parameters() if "lora_B" in name and tensor.abs().max() > 0]
    assert moved, "PEFT found no adapter that has learned anything"
    return (folder if (folder / "tokenizer.json").exists() else base), model


def check(folder, logits):
    vocabulary, model = load(folder)
    tokenizer, model = AutoTokenizer.from_pretrained(vocabulary), model.eval()
    worst, texts = 0.0, [json.loads(line) for line in logits.read_text().splitlines() if line.startswith("{")]
    assert texts, f"{logits} says nothing"
    for said in texts:
        ids = tokenizer(said["text"])["input_ids"]
        assert ids == said["ids"], f"{said['text']!r} is {ids} to the tokenizer there, {said['ids']} to rollflow"
        with torch.no_grad():
            found = model(torch.tensor([ids])).logits[0, -1].float()
        worst = max(worst, (found - torch.tensor(said["logits"])).abs().max().item())
    print(f"{folder.name}: {len(texts)} texts, largest difference of a logit {worst:.1e}")
    assert worst < TOLERANCE, f"more than {TOLERANCE}"


def classify(adapters, whole):
    base = PeftConfig.from_pretrained(adapters).base_model_name_or_path
    ids, untrained = torch.arange(3, 40)[None], classifier(base)
    with torch.no_grad():
        before, expected = untrained(ids).logits.item(), classifier(whole)(ids).logits.item()
        found = PeftModel.from_pretrained(untrained, adapters).eval()(ids).logits.item()
    print(f"{adapters.name}: scores {found:.4f}, merged {expected:.4f}, untrained {before:.4f}")
    assert abs(found - expected) < TOLERANCE < abs(found - before), f"more than {TOLERANCE}, or nothing was learned"


def adapt(folder, out):
    torch.manual_seed(0)
    scores = "SequenceClassification" in (folder / "config.json").read_text()
    model = classifier(folder) if scores else whole(folder)
    some = ["v_proj", "q_proj", "gate_proj", "down_proj"]
    if model.config.model_type == "phi3":
        some = ["qkv_proj", "gate_up_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=12, target_modules=some, task_type="SEQ_CLS" if scores else "CAUSAL_LM")
    model = get_peft_model(model, config)
    for name, tensor in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(tensor, std=0.1)
    model.save_pretrained(out)


if __name__ == "__main__":
    {"check": check, "classify": classify, "adapt": adapt}[sys.argv[1]](*map(Path, sys.argv[2:]))
