"""A calculator as an OpenEnv environment of tools (MCP): `python tools_openenv.py PORT`."""
import sys

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Calculator(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("calculator")

        @tools.tool
        def double(number: int) -> int:
            """Doubles a number."""
            return 2 * number

        super().__init__(tools)
        self._state = State(step_count=0)

    def reset(self, seed=None, episode_id=None, **_):
        self._state = State(episode_id=episode_id, step_count=0)
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action, timeout_s=None, **_):
        return Observation(done=True, reward=0.0)

    @property
    def state(self):
        return self._state


app = create_app(Calculator, CallToolAction, CallToolObservation, env_name="calculator", max_concurrent_envs=64)

if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
