"""rollflow from Python: rewards, environments, and runs from a script or notebook.

    from rollflow import Flow, run

    def right(completion, answer):
        return float(completion.strip() == answer)

    if __name__ == "__main__":
        for row in run(Flow("grpo.toml", reward=right, set={"train.steps": 50})):
            print(row["step"], row["reward_mean"])

Nothing but Python's standard library is needed, and the program `rollflow` for `run`.
"""
from .running import Flow, Run, RunFailed, reward, run

__all__ = ["Flow", "Run", "RunFailed", "reward", "run"]
__version__ = "0.1.0"
