"""Makes a run's folder as large as a long run's: its rows again and again, with other steps, numbers and texts."""
import json
import random


def enlarge(run, steps, samples):
    """Replaces the line files of the small run in `run`."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    dice = random.Random(0)
    with (run / "metrics.jsonl").open("w") as metrics, (run / "timings.jsonl").open("w") as timings:
        for step in range(1, steps + 1):
            numbers = {key: value * dice.uniform(0.8, 1.2) if isinstance(value, float) else value for key, value in dice.choice(rows).items()}
            metrics.write(json.dumps({**numbers, "step": step, "reward_mean": step / steps + dice.gauss(0, 0.1)}) + "\n")
            since = {"time_seconds": 1e9 + 3 * step, "elapsed_seconds": 3.0 * step, "trained_tokens": 9000.0 * step}
            timings.write(json.dumps({**times[-1], **since, "step": step}) + "\n")
    one = json.loads((run / "rollouts.jsonl").read_text().splitlines()[0])
    words = [dice.choice(["2", "+", "4", "=", "x", "so", "the", "sum", "is"]) for _ in range(400)]
    # Columns by token take the time: a few are shared by all.
    columns = []
    for _ in range(50):
        length = dice.randint(60, 300)
        text = " ".join(dice.choices(words, k=length))[:length]
        given = 12
        tokens = [dice.randint(4, 40) for _ in range(given + length)]
        generator = [0.0] * given + [round(-dice.expovariate(1), 6) for _ in range(length)]
        trainer = [None] * given + [round(value + dice.gauss(0, 0.05), 5) for value in generator[given:]]
        entropy = [None] * given + [round(dice.expovariate(1), 4) for _ in range(length)]
        spans = [[None, given], [5, length // 2], [6, length - length // 2]]
        column = json.dumps({"tokens": tokens, "versions": spans, "log_probs": generator, "trainer_log_probs": trainer, "entropies": entropy}, separators=(",", ":"))
        columns.append((text, column[1:]))
    group_size, every = 8, steps * 8 // samples
    with (run / "rollouts.jsonl").open("w") as rollouts:
        for at in range(samples):
            group, index = divmod(at, group_size)
            text, column = dice.choice(columns)
            text += f" {at}{' needle' if at % 9973 == 0 else ''}"
            reward = dice.random()
            head = {**one, "step": max(1, (group + 1) * every), "group": group, "index": index, "response": text, "reward": reward, "advantage": 4 * reward - 2,
                    "metadata": {"answer": str(at)}}
            for key in ["tokens", "versions", "log_probs", "trainer_log_probs", "entropies"]:
                head.pop(key, None)
            rollouts.write(json.dumps(head, separators=(",", ":"))[:-1] + "," + column + "\n")
