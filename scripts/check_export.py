"""Loads a folder that rollflow wrote with transformers or PEFT, and holds its logits and token ids against what rollflow says of it.

    python check_export.py FOLDER LOGITS [--tolerance 1e-4]

LOGITS is what `cargo run --example logits -- FOLDER TEXT...` printed: a line of JSON for each text. Exits with 1 at the first difference.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(folder):
    if not (folder / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    from peft import PeftConfig, PeftModel

    base = AutoModelForCausalLM.from_pretrained(PeftConfig.from_pretrained(folder).base_model_name_or_path, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder)
    moved = [name for name, tensor in model.named_parameters() if "lora_B" in name and tensor.abs().max() > 0]
    assert moved, "PEFT found no adapter that has learned anything"
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("logits", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-4)
    args = parser.parse_args()
    tokenizer, model = AutoTokenizer.from_pretrained(args.folder), load(args.folder).eval()
    worst, texts = 0.0, [json.loads(line) for line in args.logits.read_text().splitlines() if line.startswith("{")]
    assert texts, f"{args.logits} says nothing"
    for said in texts:
        ids = tokenizer(said["text"])["input_ids"]
        assert ids == said["ids"], f"{said['text']!r} is {ids} to the tokenizer there, {said['ids']} to rollflow"
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].float()
        worst = max(worst, (logits - torch.tensor(said["logits"])).abs().max().item())
    print(f"{args.folder.name}: {len(texts)} texts, largest difference of a logit {worst:.1e}")
    assert worst < args.tolerance, f"more than {args.tolerance}"


if __name__ == "__main__":
    main()
