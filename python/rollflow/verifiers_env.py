"""Environments of the package verifiers (0.4, `verifiers.v1`): tasks, programs and scores, as agents of a run.

The environment's own harness plays an episode. Its model is the run's address for this rollout, so
that tokens are kept as they were sampled.
"""
import asyncio
import os
import sys
import types

from .loading import Refused, explain

# The harness of this file, by the name under which verifiers imports it.
CHAT = "rollflow_chat"
OVER = 410


class Verifiers:
    """Answers `{"do": "tasks"}` with prompts, and `{"do": "run", "base_url": ...}` with the score of an episode."""

    takes_tokens = False
    takes_groups = False
    needs = ()
    is_async = True

    def __init__(self, name, config, harness):
        try:
            import verifiers.v1 as vf
            from verifiers.v1.configs.agent import agent_config_fields
            from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config
        except ImportError as error:
            raise Refused(f"verifiers can't be imported ({error}); install verifiers 0.4 into this Python, or name another: environment.python")
        self.vf = vf
        sys.modules.setdefault(CHAT, chat_module(vf))
        raw = {**config, "taskset": {**config.get("taskset", {}), "id": name}}
        roles = list(agent_config_fields(env_config_type(name, raw.get("id") or "")()))
        for role in roles:
            # Programs run here unless the recipe says otherwise; verifiers' default is a rented machine.
            seat = {"runtime": {"type": "subprocess"}, **raw.get(role, {})}
            if harness:
                seat["harness"] = {"id": harness, **seat.get("harness", {})}
            raw[role] = seat
        self.env = load_environment(resolve_env_config(raw))
        if not harness:
            self.choose_harness(raw, roles, resolve_env_config, load_environment)
        self.task_class = type(self.env.taskset).task_type()
        self.serving = None

    def choose_harness(self, raw, roles, resolve, load_environment):
        """Plays seats without a harness of their own by the one of this file, or by `null` if tasks have tools."""
        from verifiers.v1.utils.loaders import default_harness_id

        taskset = self.env.taskset
        tools = type(taskset).task_type().toolsets(taskset.config.task) or taskset.toolsets(taskset.config)
        if default_harness_id(taskset.config.id) != "bash":
            return
        for role in roles:
            raw[role] = {"harness": {"id": "null" if tools else CHAT}, **raw[role]}
        self.env = load_environment(resolve(raw))

    async def answer(self, question):
        if question["do"] == "tasks":
            return {"tasks": await asyncio.to_thread(self.tasks, question.get("limit"))}
        if question["do"] == "run":
            return await self.run(question)
        raise Refused(f"unknown question {question['do']!r}")

    def tasks(self, limit):
        taskset = self.env.taskset
        if limit is None and not taskset.bounded:
            raise Refused(f"{taskset.config.id} has no end of tasks; set task.limit")
        found = []
        for task in taskset if limit is None else taskset.take(limit):
            data = task.data
            if data.prompt is None:
                raise Refused(f"task {data.idx} of {taskset.config.id} has no prompt: the user opens its conversation, which rollflow does not pass")
            if data.image or type(task).NEEDS_CONTAINER:
                raise Refused(f"task {data.idx} of {taskset.config.id} needs a container, which rollflow does not start")
            found.append({"messages": opening(data), "task": data.model_dump(mode="json", exclude_none=True)})
        return found

    async def run(self, question):
        vf = self.vf
        if self.serving is None:
            self.serving = asyncio.ensure_future(enter(self.env))
        serving = self.serving
        try:
            await serving
        except BaseException:
            # The next episode starts it again, unless another has done so already.
            if self.serving is serving:
                self.serving = None
            raise
        data = self.task_class.data_type().model_validate(question["metadata"]["task"])
        task = self.task_class(data, self.env.config.taskset.task)
        os.environ.setdefault("ROLLFLOW_AGENT_KEY", "none")
        client = vf.EvalClientConfig(base_url=question["base_url"], api_key_var="ROLLFLOW_AGENT_KEY")
        context = vf.ModelContext(client=client, model=question["model"], sampling=vf.SamplingConfig())
        episode = await self.env.run_episode(task, context)
        return score(episode)


async def enter(env):
    serving = env.serving()
    await serving.__aenter__()
    return serving


def score(episode):
    """Returns reward, verdict and metrics of an episode; raises its error if it is no result."""
    for error in episode.errors:
        raise Refused(f"the episode failed: {error.type}: {error.message}")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if len(traces) != 1:
        raise Refused(f"the episode has {len(traces)} agents to train; rollflow trains one: pin the others to models of their own and make them untrainable")
    trace = traces[0]
    for error in trace.errors:
        # A limit of the run ended the rollout: what was scored counts.
        if error.status_code != OVER:
            raise Refused(f"the rollout failed: {error.type}: {error.message}")
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {"reward": float(trace.reward), "metadata": {"verifiers": {"rewards": rewards, "metrics": metrics, "stop": trace.stop_condition}}}


def opening(data):
    """Returns the messages that a chat harness begins with."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return system + [{"role": "user", "content": data.prompt}]
    messages = [message.model_dump(mode="json", exclude_none=True) for message in data.prompt]
    if any(not isinstance(message.get("content"), str) for message in messages):
        raise Refused("a prompt has other content than text, such as an image, which rollflow does not pass")
    return system + [{"role": message["role"], "content": message["content"]} for message in messages]


def chat_module(vf):
    """Returns a module with a harness that asks the model in this process: for tasks without tools, where a program would only cost time."""
    import httpx
    from verifiers.v1.runtimes import ProgramResult

    class RollflowChatConfig(vf.HarnessConfig):
        pass

    class RollflowChat(vf.Harness[RollflowChatConfig]):
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
            body = {"model": ctx.model, "messages": opening(data)}
            async with httpx.AsyncClient(timeout=None) as client:
                reply = await client.post(f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"})
            if reply.status_code == 200:
                return ProgramResult(exit_code=0, stdout="", stderr="")
            return ProgramResult(exit_code=1, stdout="", stderr=f"the model answered {reply.status_code}: {reply.text[:500]}")

    module = types.ModuleType(CHAT)
    module.RollflowChat, module.__all__ = RollflowChat, ["RollflowChat"]
    return module
