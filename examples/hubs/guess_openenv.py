"""A guessing game as an OpenEnv environment: `python guess_openenv.py PORT`."""
import random, sys
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: str


class Seen(Observation):
    text: str


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(step_count=0)

    def reset(self, seed=None, episode_id=None, **_):
        self.number = random.Random(seed).randint(1, 9)
        self._state = State(episode_id=episode_id, step_count=0)
        return Seen(text="Guess a number from 1 to 9.", done=False, reward=0.0)

    def step(self, action, **_):
        self._state.step_count += 1
        found = str(self.number) in action.guess
        return Seen(text="found" if found else "no", done=found or self._state.step_count == 3, reward=float(found))

    @property
    def state(self):
        return self._state


app = create_app(GuessEnvironment, Guess, Seen, env_name="guess", max_concurrent_envs=64)

if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
