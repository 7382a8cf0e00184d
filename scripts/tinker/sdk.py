"""Makes the calls of Tinker's SDK against a server: sdk.py URL MODEL_NAME [PAGE].

Prints a table of the calls and what they do. With PAGE, that page must have each row.
"""
import inspect
import math
import pathlib
import sys

import numpy as np
import tinker
from tinker import types

url, base = sys.argv[1:3]
service = tinker.ServiceClient(base_url=url)
rows = []


def datum(prompt, completion, **more):
    tokens = prompt + completion
    inputs = dict(target_tokens=np.array(tokens[1:]), **more)
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def column(values):
    return np.array([0.0] * 3 + values, dtype=np.float32)


def weighted():
    return [datum([5, 6, 7, 8], [9 + i, 10, 11], weights=column([1.0] * 3)) for i in range(4)]


def call(name, work, expected="yes"):
    try:
        result, told = work(), "yes"
    except Exception as error:  # The table says what happens.
        result, told = None, f"no: {error!r}"
    rows.append(f"| `{name}` | {told if told == 'yes' else 'no'} |")
    assert told == expected or expected == "no" and told.startswith("no"), f"{name}: {told}"
    return result


def losses(client, name, **config):
    old, advantage = column([-2.0] * 3), column([1.0, 1.0, -1.0])
    data = [datum([5, 6, 7, 8], [9, 10, 11], logprobs=old, advantages=advantage)]
    output = client.forward_backward(data, name, **config).result()
    scores = np.array(output.loss_fn_outputs[0]["logprobs"].tolist())
    ratio = np.exp(scores - old)
    clipped = np.clip(ratio, 0.8, 1.2)
    expected = {
        "importance_sampling": -ratio * advantage,
        "ppo": -np.minimum(ratio * advantage, clipped * advantage),
        "cispo": -clipped * scores * advantage,
        "dro": -(scores * advantage - 0.025 * (scores - old) ** 2),
        "gspo": scores,
    }[name].sum()
    assert math.isclose(output.metrics["loss:sum"], expected, rel_tol=1e-4), (name, output.metrics, expected)


client = call("create_lora_training_client", lambda: service.create_lora_training_client(base_model=base, rank=8, seed=1))
client = client.result() if hasattr(client, "result") else client
first = call("forward_backward, cross_entropy", lambda: client.forward_backward(weighted(), "cross_entropy").result())
call("optim_step", lambda: client.optim_step(types.AdamParams(learning_rate=1e-2)).result())
for loss in ["importance_sampling", "ppo", "cispo", "dro"]:
    call(f"forward_backward, {loss}", lambda: losses(client, loss))
call("forward", lambda: client.forward(weighted(), "cross_entropy").result())
client.optim_step(types.AdamParams(learning_rate=0.0)).result()
for _ in range(4):
    passed = client.forward_backward(weighted(), "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    last = passed.result()
assert last.metrics["loss:sum"] < first.metrics["loss:sum"]
try:
    own = lambda data, scores: ((loss := -sum(s[3:].mean() for s in scores)), {"loss": loss.item()})
    call("forward_backward_custom", lambda: client.forward_backward_custom(weighted(), own).result())
    client.optim_step(types.AdamParams(learning_rate=0.0)).result()
except ImportError:
    pass
sampler = call("save_weights_and_get_sampling_client", lambda: client.save_weights_and_get_sampling_client())
sampler = sampler.result() if hasattr(sampler, "result") else sampler
params = types.SamplingParams(max_tokens=5, temperature=1.0, seed=3)
prompt = types.ModelInput.from_ints([5, 6, 7, 8])
sampled = call("sample", lambda: sampler.sample(prompt, num_samples=2, sampling_params=params).result())
again = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
assert [s.tokens for s in sampled.sequences] == [s.tokens for s in again.sequences], "a seed repeats"
call("compute_logprobs", lambda: sampler.compute_logprobs(prompt).result())
scored = sampler.compute_logprobs(prompt).result()


def likeliest():
    top = sampler.sample(prompt, num_samples=1, sampling_params=params, include_prompt_logprobs=True, topk_prompt_logprobs=3).result()
    assert top.topk_prompt_logprobs[0] is None and len(top.topk_prompt_logprobs) == 4
    for place, own in list(zip(top.topk_prompt_logprobs, scored))[1:]:
        assert len(place) == 3 and max(score for _, score in place) >= own - 1e-5, (place, own)


def soft_targets():
    """Each target weighs: the loss is the sum over them, and its slope that of the single losses."""
    tokens, rows = [5, 6, 7, 8, 9], [[6, 1], [7, 2], [8, 3], [9, 4]]
    data = lambda targets, weights: [types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=dict(
        target_tokens=types.TensorData.from_numpy(np.array(targets)), weights=types.TensorData.from_numpy(np.array(weights, dtype=np.float32))))]
    both = client.forward_backward(data(rows, [[0.75, 0.25]] * 4), "cross_entropy").result()
    one = [client.forward(data([row[at] for row in rows], [weight] * 4), "cross_entropy").result() for at, weight in enumerate([0.75, 0.25])]
    client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    expected = sum(of.metrics["loss:sum"] for of in one)
    assert math.isclose(both.metrics["loss:sum"], expected, rel_tol=1e-5), (both.metrics, expected)
    scored = np.array(both.loss_fn_outputs[0]["logprobs"].tolist()).reshape(4, 2)
    forward = client.forward(data(rows, [[0.75, 0.25]] * 4), "cross_entropy").result()
    assert math.isclose(forward.metrics["loss:sum"], expected, rel_tol=1e-5)
    assert np.allclose(np.array(forward.loss_fn_outputs[0]["logprobs"].tolist()).reshape(4, 2), scored, atol=1e-5)


def likeliest_sampled():
    top = sampler.sample(prompt, num_samples=2, sampling_params=params, topk_sample_logprobs=3).result()
    for sequence, same in zip(top.sequences, sampled.sequences):
        assert sequence.tokens == same.tokens and len(sequence.topk_logprobs) == len(sequence.tokens)
        for place, token, own in zip(sequence.topk_logprobs, sequence.tokens, sequence.logprobs):
            assert len(place) == 3 and max(score for _, score in place) >= own - 1e-5, (place, own)
            assert all(math.isclose(score, own, abs_tol=1e-4) for other, score in place if other == token), (place, token, own)


def all_weights():
    """At rank 0 there are no adapters: what is trained, sampled, saved and loaded is a whole model."""
    whole = service.create_lora_training_client(base_model=base, rank=0)
    whole = whole.result() if hasattr(whole, "result") else whole
    before = whole.forward_backward(weighted(), "cross_entropy").result().metrics["loss:sum"]
    whole.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    after = whole.forward(weighted(), "cross_entropy").result().metrics["loss:sum"]
    assert after < before, (before, after)
    assert not whole.get_info().is_lora
    tokens = [5, 6, 7, 8, 9, 10, 11]
    of_trainer = whole.forward([datum(tokens[:4], tokens[4:], weights=column([1.0] * 3))], "cross_entropy").result()
    of_trainer = np.array(of_trainer.loss_fn_outputs[0]["logprobs"].tolist())[3:]
    saved, named = whole.save_state("whole").result(), whole.save_weights_for_sampler("whole").result()
    unnamed = whole.save_weights_and_get_sampling_client()
    unnamed = unnamed.result() if hasattr(unnamed, "result") else unnamed
    for sampler in [unnamed, service.create_sampling_client(model_path=named.path)]:
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
        assert np.allclose(scored[4:], of_trainer, atol=1e-4), (scored, of_trainer)
    again = service.create_training_client_from_state_with_optimizer(saved.path)
    again = again.result() if hasattr(again, "result") else again
    found = again.forward(weighted(), "cross_entropy").result().metrics["loss:sum"]
    assert math.isclose(found, after, rel_tol=1e-6), (found, after)


call("sample, topk_prompt_logprobs", likeliest)
call("sample, topk_sample_logprobs", likeliest_sampled) if "topk_sample_logprobs" in inspect.signature(sampler.sample).parameters else None
call("create_lora_training_client, rank 0: all weights", all_weights)
call("forward_backward, cross_entropy of several targets", soft_targets)
saved = call("save_state", lambda: client.save_state("one").result())
named = call("save_weights_for_sampler", lambda: client.save_weights_for_sampler("one").result())
call("create_sampling_client, model_path", lambda: service.create_sampling_client(model_path=named.path).sample(
    prompt, num_samples=1, sampling_params=params).result())
call("create_sampling_client, base_model", lambda: service.create_sampling_client(base_model=base).sample(
    prompt, num_samples=1, sampling_params=params).result())
after = client.forward(weighted(), "cross_entropy").result().metrics["loss:sum"]
client.forward_backward(weighted(), "cross_entropy").result()
client.optim_step(types.AdamParams(learning_rate=1e-1)).result()


def loaded(name):
    new = getattr(service, name)(saved.path)
    new = new.result() if hasattr(new, "result") else new
    found = new.forward(weighted(), "cross_entropy").result().metrics["loss:sum"]
    assert math.isclose(found, after, rel_tol=1e-6), (found, after)


call("create_training_client_from_state", lambda: loaded("create_training_client_from_state"))
call("create_training_client_from_state_with_optimizer", lambda: loaded("create_training_client_from_state_with_optimizer"))
call("get_info", lambda: client.get_info())


def refused(name):
    """A refused operation takes its number: later ones run."""
    try:
        client.save_state(name).result()
    except Exception as error:
        assert "other characters" in str(error), error
    else:
        raise AssertionError(f"{name!r} was saved")
    client.forward(weighted(), "cross_entropy").result()


def ended():
    """The end of a session unloads its models; their saved weights stay."""
    with tinker.ServiceClient(base_url=url) as other:
        of_session = other.create_lora_training_client(base_model=base, rank=4)
        of_session = of_session.result() if hasattr(of_session, "result") else of_session
        path = of_session.save_state("end").result().path
    again = service.create_training_client_from_state(path)
    again = again.result() if hasattr(again, "result") else again
    again.forward(weighted(), "cross_entropy").result()


refused("run 1/step 3")
call("delete_checkpoint", lambda: service.create_rest_client().delete_checkpoint_from_tinker_path(named.path).result())
if hasattr(tinker.ServiceClient, "__exit__"):
    call("with ServiceClient", ended)
# Last: an SDK may refuse it after it has taken a number, for which the server would wait.
call("forward_backward, gspo", lambda: losses(client, "gspo"), "no")
print("\n".join(rows))
if len(sys.argv) > 3:
    page = pathlib.Path(sys.argv[3]).read_text()
    missing = [row for row in rows if row not in page]
    assert not missing, f"{sys.argv[3]} lacks:\n" + "\n".join(missing)
