"""A guessing game, as a verifiers environment of several turns: the game is the user."""
import random

import verifiers.v1 as vf

__all__ = ["Guessing", "GuessingEnv"]


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    pass


class Guessing(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        seed = 0
        while True:
            yield GuessTask(GuessData(prompt="Guess a number from 1 to 9.", number=random.Random(seed).randint(1, 9)), self.config.task)
            seed += 1


class GuessingConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessingEnv(vf.Env[GuessingConfig]):
    async def run(self, task, agents):
        found = 0.0
        async with agents.player.interaction(task) as game:
            turn = await game.turn()
            for left in (2, 1, 0):
                if turn.terminated:
                    break
                if str(task.data.number) in turn.last_reply:
                    found = 1.0
                    break
                if left:
                    turn = await game.turn("No. Guess again.")
        game.trace.record_reward("found", found, 1.0)
