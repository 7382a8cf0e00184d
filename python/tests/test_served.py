"""Rewards, environments and tools, as a run or a server calls them."""
import asyncio
import http.client as http_client
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import types
import unittest
from http.server import ThreadingHTTPServer

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from rollflow.environments import Environments, outcome  # noqa: E402
from rollflow.loading import Refused, as_json  # noqa: E402
from rollflow.rewards import Reward  # noqa: E402
from rollflow.serve_env import handler, refusal  # noqa: E402
from rollflow.verifiers_env import Verifiers  # noqa: E402
from rollflow.worker import write  # noqa: E402
from test_package import Truth, Wide  # noqa: E402


class Served(unittest.TestCase):
    def test_a_completion_in_messages_begins_with_the_first_turn_of_the_policy(self):
        turn = lambda role, content: {"role": role, "content": content}
        prompt = [turn("user", "hi"), turn("assistant", "old"), turn("user", "2+2?")]
        replies, seen = [turn("assistant", "5"), turn("user", "No."), turn("assistant", "4")], []

        def judge(completions, **columns):
            seen.append(completions[0])
            return [1.0]

        begun = [turn("system", "Count."), turn("user", "2+2?")]
        for conversation in [prompt + replies, prompt[:-1] + [turn("user", "2+2? Think.")] + replies, begun + replies]:
            sample = {"response": "54", "status": "completed", "metadata": {"conversation": conversation}}
            question = {"prompt": "2+2?", "messages": prompt, "samples": [sample]}
            self.assertEqual(asyncio.run(Reward(judge).answer(question)), {"rewards": [1.0]})
        self.assertEqual(seen, [replies] * 3)

    def test_an_answer_is_json_whatever_it_has(self):
        pipe = io.BytesIO()
        write(pipe, {"error": "lone \ud83d, é"})
        self.assertEqual(pipe.getvalue().decode(), '{"error": "lone ?, é"}\n')
        with self.assertRaisesRegex(TypeError, "a value of type object, which JSON does not have"):
            as_json({"metadata": object()})

    def test_a_grade_may_have_values_of_numpy(self):
        class Game:
            def reset(self):
                pass

            def grade(self):
                return {"reward": Wide(0.5), "correct": Truth([1]), "metadata": {"found": Truth([1, 2])}}

        of = Environments(Game)
        begun = {"episode": "e", "seed": 1, "metadata": {}, "messages": [{"role": "user", "content": "go"}]}
        asyncio.run(of.answer({**begun, "do": "reset"}))
        grade = json.loads(as_json(asyncio.run(of.answer({**begun, "do": "grade"}))))
        self.assertEqual(grade, {"reward": 0.5, "correct": True, "metadata": {"found": [1, 2]}})

    def test_environments_wait_for_each_other_only_where_a_method_does_not_wait(self):
        class Waits:
            async def reset(self):
                pass

            @staticmethod
            def tasks():
                yield "1+1="

        self.assertTrue(Environments(Waits).is_async)
        # An environment without a grade is judged by a function, which counts too.
        self.assertFalse(Environments(Waits, reward=lambda completion: 1.0).is_async)
        Waits.close = lambda self: None
        self.assertFalse(Environments(Waits).is_async)

    def test_functions_that_are_not_async_may_run_event_loops_and_use_signals(self):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "functions.py")
            pathlib.Path(file).write_text(
                "import asyncio, signal\n\nasync def later(value):\n    await asyncio.sleep(0)\n    return value\n\n"
                "def reward(completion):\n    signal.signal(signal.SIGALRM, lambda *_: None)\n    return asyncio.run(later(float(completion)))\n\n"
                "def add(a: int, b: int):\n    return asyncio.run(later(a + b))\n\n"
                "async def double(a: int):\n    return await later(2 * a)\n\n"
                "def stops(completion):\n    return next(iter([]))\n"
            )
            samples = [{"response": text, "status": "completed", "metadata": {}} for text in ("1", "2")]
            asked = {"prompt": "", "samples": samples}
            [answer] = worker({"serves": "reward", "file": file, "name": "reward"}, asked)
            self.assertEqual(answer["answer"], {"rewards": [1.0, 2.0]})
            [answer] = worker({"serves": "reward", "file": file, "name": "stops"}, asked)
            self.assertIn("StopIteration", answer["answer"]["rewards"][1]["error"])
            begun = {"episode": "e", "seed": 1, "metadata": {}, "messages": [{"role": "user", "content": "go"}]}
            calls = [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "double", "arguments": {"a": 4}}]
            step = {**begun, "do": "step", "text": "", "calls": calls, "malformed": 0}
            settings = {"serves": "environment", "file": file, "tools": ["add", "double"]}
            results = worker(settings, {**begun, "do": "reset"}, step)[1]["answer"]["results"]
            self.assertEqual([(one["content"], one["success"]) for one in results], [("3", True), ("8", True)])

    def test_a_served_function_may_run_an_event_loop(self):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "functions.py")
            pathlib.Path(file).write_text(
                "import asyncio\n\nasync def later():\n    return 1.0\n\ndef reward(completion):\n    return asyncio.run(later())\n"
            )
            served = [sys.executable, "-m", "rollflow.serve_env", f"{file}:reward"]
            with subprocess.Popen(served, cwd=HERE.parent, stdout=subprocess.PIPE, text=True) as server:
                try:
                    client = http_client.HTTPConnection(server.stdout.readline().strip().partition("://")[2], timeout=60)
                    question = {"prompt": "", "samples": [{"response": "", "status": "completed", "metadata": {}}]}
                    client.request("POST", "/", json.dumps(question))
                    self.assertEqual(json.load(client.getresponse()), {"rewards": [1.0]})
                    client.close()
                finally:
                    server.kill()

    def test_functions_with_any_of_trls_lists_are_called_as_trl_calls_them(self):
        def by_tokens(completion_ids, **kwargs):
            return [float(len(ids)) for ids in completion_ids]

        def by_name(**kwargs):
            return [float(len(text) + len(ids)) for text, ids in zip(kwargs["completions"], kwargs["completion_ids"])]

        def by_prompts(prompts):
            return [float(len(text)) for text in prompts]

        samples = [{"response": "a" * n, "status": "completed", "metadata": {}, "tokens": [1] * n} for n in (1, 2)]
        def by_logs(log_metric, prompt=None, **columns):
            log_metric("seen", 1.0)
            return [4.0] * len(columns["completions"])

        self.assertTrue(Reward(by_logs).takes_groups)
        for function, takes_tokens, rewards in [(by_tokens, True, [1.0, 2.0]), (by_name, True, [2.0, 4.0]), (by_prompts, False, [3.0, 3.0])]:
            reward = Reward(function)
            self.assertEqual((reward.takes_groups, reward.takes_tokens), (True, takes_tokens), function.__name__)
            self.assertEqual(asyncio.run(reward.answer({"prompt": "1+1", "samples": samples})), {"rewards": rewards})

        def by_environments(environments, **kwargs):
            return [float(environment.won) for environment in environments]

        game = types.SimpleNamespace(won=True)
        reward = Reward(by_environments, knows=("environments",))
        self.assertEqual(asyncio.run(reward.answer({"prompt": "", "samples": samples[:1]}, {"environments": [game]})), {"rewards": [1.0]})

    def test_a_function_needs_what_no_record_gives_it_and_gets_the_rest(self):
        def trls(prompts, completions, completion_ids, log_metric, log_extra, level, other=None):
            return [1.0] * len(prompts)

        def verls(data_source, solution_str, ground_truth, extra_info, level):
            return 1.0

        def plain(completion, response, prompt, messages, status, level):
            return 1.0

        question = {"prompt": "1+1", "samples": [{"response": "2", "status": "completed", "metadata": {"level": 3}}]}
        for function in [trls, verls, plain]:
            reward = Reward(function)
            self.assertEqual(reward.needs, {"level"}, function.__name__)
            self.assertEqual(asyncio.run(reward.answer(question)), {"rewards": [1.0]}, function.__name__)
        self.assertEqual(Reward(lambda completion, level: 1.0, knows=("level",)).needs, set())

    def test_a_metric_that_is_logged_several_times_is_its_mean(self):
        def lengths(completions, log_metric):
            for completion in completions:
                log_metric("length", len(completion))
            return [1.0] * len(completions)

        samples = [{"response": "a" * n, "status": "completed", "metadata": {}} for n in (1, 3)]
        rewards = asyncio.run(Reward(lengths).answer({"prompt": "", "samples": samples}))["rewards"]
        self.assertEqual(rewards, [{"reward": 1.0, "parts": {"length": 2.0}}] * 2)

    def test_a_column_has_its_own_value_in_every_signature(self):
        metadata = {"answer": "2", "answer_of_record": 2, "solution": "long", "ground_truth": {"target": ["2"]}}
        question = {"prompt": "1+1", "samples": [{"response": "2", "status": "completed", "metadata": metadata}]}
        own = {"answer": 2, "solution": "long", "ground_truth": {"target": ["2"]}}
        seen = []

        def plain(completion, answer, solution, ground_truth, **others):
            seen.append({"answer": answer, "solution": solution, "ground_truth": ground_truth})
            return float("answer_of_record" not in others)

        def trl(completions, answer, solution, ground_truth):
            seen.append({"answer": answer[0], "solution": solution[0], "ground_truth": ground_truth[0]})
            return [1.0]

        def verl(data_source, solution_str, ground_truth, extra_info):
            seen.append({**extra_info, "ground_truth": ground_truth})
            return 1.0

        class Game:
            def reset(self, prompt, seed, **columns):
                seen.append(columns)

        for function in (plain, trl, verl):
            self.assertEqual(asyncio.run(Reward(function).answer(question)), {"rewards": [1.0]})
        begun = {"episode": "e", "seed": 1, "metadata": metadata, "messages": [{"role": "user", "content": "go"}]}
        asyncio.run(Environments(Game).answer({**begun, "do": "reset"}))
        self.assertEqual(seen, [own] * 4)

    def test_a_result_that_is_no_reward_fails_its_own_completion_and_a_part_that_is_not_finite_is_left_out(self):
        nan = float("nan")

        def graded(completions, log_metric):
            log_metric("entropy", nan)
            return [1.0, nan, {"score": 0.5, "form": nan, "length": 3}]

        question = {"prompt": "", "samples": [{"response": "", "status": "completed", "metadata": {}}] * 3}
        good, bad, parts = asyncio.run(Reward(graded).answer(question))["rewards"]
        self.assertEqual((good, parts), (1.0, {"reward": 0.5, "parts": {"length": 3.0}}))
        self.assertEqual(bad, {"error": "result 1 of the list: the reward function returned nan; a reward must be finite"})

    def test_an_environment_may_answer_with_a_message_and_no_key_is_ignored(self):
        again = [{"role": "user", "content": "again"}]
        self.assertEqual(outcome(again[0]), {"messages": again})
        gym = {"observation": "again", "reward": 0.5, "done": False, "info": {}}
        self.assertEqual(outcome(gym), {"reward": 0.5, "done": False, "messages": again})
        for result, key in [({"obs": "x", "terminated": True}, "obs"), ({"content": "x", "reward": 1.0}, "content")]:
            with self.assertRaisesRegex(Refused, f"step\\(\\) returned a dict with `{key}`; its keys are `observation`, `reward` and `done`"):
                outcome(result)

        class Game:
            def reset(self):
                return "!", {"level": 1}

        begun = {"episode": "e", "seed": 1, "metadata": {}, "messages": [{"role": "user", "content": "go"}]}
        opening = asyncio.run(Environments(Game).answer({**begun, "do": "reset"}))
        self.assertEqual(opening["messages"], [{"role": "user", "content": "go!"}])

    def test_the_reward_of_a_resumed_episode_sees_its_turns_before_that(self):
        class Game:
            turns = 0

            def reset(self):
                pass

            def step(self, text):
                self.turns += 1
                return "next"

            def save(self):
                return self.turns

            def restore(self, state):
                self.turns = state

        def replies(completion, environment):
            return len(completion) * environment.turns

        begun = {"episode": "e", "index": 0, "seed": 1, "metadata": {}, "messages": [{"role": "user", "content": "go"}]}
        asked = lambda of, **question: asyncio.run(of.answer({**begun, **question}))
        turn = {"text": "ab", "calls": [], "malformed": []}
        first = Environments(Game, (), replies)
        asked(first, do="reset")
        state = asked(first, do="step", **turn)["state"]
        # In a new process, the episode is begun again and has what was saved.
        second = Environments(Game, (), replies)
        asked(second, do="reset")
        state = asked(second, do="step", state=state, **turn)["state"]
        third = Environments(Game, (), replies)
        asked(third, do="reset")
        self.assertEqual(asked(third, do="grade", state=state)["reward"], 8.0)

    def test_the_servers_of_an_environment_that_failed_to_start_are_started_again_by_the_next_episode(self):
        class Serving:
            def __init__(self, starts):
                self.starts = starts

            async def __aenter__(self):
                if not self.starts:
                    raise OSError("no port is free")

        class Task:
            def __init__(self, data, config):
                pass

            @staticmethod
            def data_type():
                return types.SimpleNamespace(model_validate=lambda task: task)

        async def run_episode(task, context):
            trace = types.SimpleNamespace(agent=types.SimpleNamespace(trainable=True), errors=[], rewards={}, metrics={}, reward=1, stop_condition=None)
            return types.SimpleNamespace(errors=[], traces=[trace])

        asks = []
        outcomes = iter([False, True])
        config = types.SimpleNamespace(taskset=types.SimpleNamespace(task=None))
        verifiers = object.__new__(Verifiers)
        verifiers.vf = types.SimpleNamespace(EvalClientConfig=dict, ModelContext=dict, SamplingConfig=dict)
        verifiers.env = types.SimpleNamespace(serving=lambda: asks.append(1) or Serving(next(outcomes)), config=config, run_episode=run_episode)
        verifiers.task_class, verifiers.serving = Task, None
        question = {"do": "run", "metadata": {"task": {}}, "base_url": "http://127.0.0.1:1", "model": "policy"}

        async def episodes():
            both = await asyncio.gather(verifiers.answer(question), verifiers.answer(question), return_exceptions=True)
            self.assertEqual([str(error) for error in both], ["no port is free"] * 2)
            self.assertEqual([(await verifiers.answer(question))["reward"] for _ in range(2)], [1.0, 1.0])

        asyncio.run(episodes())
        self.assertEqual(len(asks), 2)

    def test_a_request_without_a_token_or_with_an_unreadable_length_is_refused_unread(self):
        http = ThreadingHTTPServer(("127.0.0.1", 0), handler(Environments(None, [add_one]), asyncio.new_event_loop(), "secret"))
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            for token, length, status in [("no", "-1", 401), ("secret", "-1", 400), ("secret", "x", 400), ("secret", str(1 << 40), 413)]:
                client = http_client.HTTPConnection("127.0.0.1", http.server_port, timeout=10)
                client.putrequest("POST", "/")
                client.putheader("Authorization", f"Bearer {token}")
                client.putheader("Content-Length", length)
                client.endheaders()
                found = client.getresponse()
                self.assertEqual((found.status, found.getheader("Connection")), (status, "close"), length)
                client.close()
        finally:
            http.shutdown()
            http.server_close()

    def test_a_web_page_of_another_site_is_refused_where_there_is_no_token(self):
        http = ThreadingHTTPServer(("127.0.0.1", 0), handler(Environments(None, [add_one]), asyncio.new_event_loop(), None))
        threading.Thread(target=http.serve_forever, daemon=True).start()
        local = f"127.0.0.1:{http.server_port}"
        try:
            for host, origin, status in [
                (local, None, 400),
                (local, f"http://{local}", 400),
                ("localhost", "http://localhost:8888", 400),
                (local, "https://evil.example", 403),
                (local, "http://203.0.113.7", 403),
                (local, "null", 403),
                ("evil.example", None, 403),
                ("", None, 403),
            ]:
                client = http_client.HTTPConnection("127.0.0.1", http.server_port, timeout=10)
                client.putrequest("POST", "/", skip_host=True)
                client.putheader("Host", host)
                if origin:
                    client.putheader("Origin", origin)
                # A request that passes this check gets 400 for its length.
                client.putheader("Content-Length", "x")
                client.endheaders()
                found = client.getresponse()
                self.assertEqual(found.status, status, (host, origin, found.read()))
                client.close()
        finally:
            http.shutdown()
            http.server_close()
        self.assertIsNone(refusal("rewards:9000", None, False))
        self.assertIsNone(refusal("rewards:9000", "http://rewards:9000", False))
        self.assertIn("evil.example", refusal("10.2.3.4:9000", "https://evil.example", False))


def worker(settings, *questions):
    """Returns a process's answers to questions."""
    code = "import os; from rollflow.worker import main; main(os.fdopen(os.dup(0), 'rb'))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=HERE.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        lines = [settings, *({"id": at, **question} for at, question in enumerate(questions))]
        answers = []
        for line in lines:
            process.stdin.write(json.dumps(line).encode() + b"\n")
            process.stdin.flush()
            answers.append(json.loads(process.stdout.readline()))
        process.stdin.close()
    return answers[1:]


def add_one(a: int):
    """Adds one.

    Args:
        a: A number.
    """
    return a + 1


if __name__ == "__main__":
    unittest.main()
