"""Sums, as a verifiers environment with local data: one turn, a reward and a metric."""
import verifiers.v1 as vf

__all__ = ["Addition"]


class SumConfig(vf.TasksetConfig):
    digits: int = 1


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Addition(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        most = 10**self.config.digits
        for a in range(most):
            for b in range(most):
                yield SumTask(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)
