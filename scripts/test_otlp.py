#!/usr/bin/env python3
"""Exports a run to a collector on loopback that decodes OTLP by OpenTelemetry's own messages: argument: rollflow, built with the feature otlp."""
import http.server
import ssl
import subprocess
import sys
import tempfile
import threading

import trustme
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

spans, numbers, services = [], {}, set()


class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                services.update(one.value.string_value for one in resource.resource.attributes if one.key == "service.name")
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
        elif self.path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                    numbers[metric.name] = (metric.sum or metric.gauge) and (metric.sum.data_points or metric.gauge.data_points)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def run(url, steps=12, more=()):
    with tempfile.TemporaryDirectory() as folder:
        sets = ["model.hidden=16", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.intermediate=32", "sft.steps=2", "sft.batch=4",
                "batch.groups=4", "generate.group_size=4", "generate.max_num_seqs=8", 'reward={kind="regex",pattern="[0-9]"}', "filter=[]",
                f"train.steps={steps}", "observe.otlp_every=3", f"observe.otlp={url!r}", *more]
        command = [sys.argv[1], "run", "pipelines/recipes/grpo.toml", "--out", f"{folder}/run"] + [part for of in sets for part in ("--set", of)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=server.serve_forever, daemon=True).start()
ended = run(f"http://127.0.0.1:{server.server_port}")
assert ended.returncode == 0, ended.stderr
roots = [span for span in spans if span.name == "group"]
# 12 steps of 4 groups; every third group is traced.
assert len(roots) == 16, len(roots)
stages = ["generate", "reward", "filter", "batch", "train"]
for root in roots:
    of = sorted((span for span in spans if span.parent_span_id == root.span_id), key=lambda span: span.start_time_unix_nano)
    assert [span.name for span in of] == stages, [span.name for span in of]
    assert all(span.trace_id == root.trace_id for span in of)
    assert all(before.end_time_unix_nano == after.start_time_unix_nano for before, after in zip(of, of[1:]))
    assert (of[0].start_time_unix_nano, of[-1].end_time_unix_nano) == (root.start_time_unix_nano, root.end_time_unix_nano)
    facts = {one.key for one in root.attributes}
    assert {"group", "step", "version", "staleness", "reward_mean", "generated_tokens"} <= facts, facts
assert services == {"rollflow"}, services
assert [point.as_double for point in numbers["rollflow_steps_total"]] == [12.0]
for name in ["rollflow_reward_mean", "rollflow_generated_tokens_total", "rollflow_step_duration_seconds_sum", "rollflow_step_duration_seconds_count"]:
    assert name in numbers, (name, sorted(numbers))
stated = {one.key for point in numbers["rollflow_stage_time_seconds_total"] for one in point.attributes}
assert stated == {"stage", "state"}, stated
print(f"{len(spans)} spans of {len(roots)} groups, {len(numbers)} metrics")
server.shutdown()
# A collector with a certificate of an authority that only net.ca_file names.
authority = trustme.CA()
with authority.cert_pem.tempfile() as ca_file, tempfile.TemporaryDirectory() as folder:
    of_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(of_server)
    secure = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    secure.socket = of_server.wrap_socket(secure.socket, server_side=True)
    threading.Thread(target=secure.serve_forever, daemon=True).start()
    spans.clear()
    url = f"https://127.0.0.1:{secure.server_port}"
    ended = run(url, 3, [f"net.ca_file={ca_file!r}"])
    assert ended.returncode == 0 and spans and "observe.otlp" not in ended.stderr, ended.stderr
    spans.clear()
    refused = run(url, 3)
    assert refused.returncode == 0 and not spans and "observe.otlp" in refused.stderr, refused.stderr
    secure.shutdown()
print("net.ca_file decides which collector is trusted")
# A collector that is gone costs the run nothing.
server.server_close()
gone = run("http://127.0.0.1:9", steps=3)
assert gone.returncode == 0 and "observe.otlp" in gone.stderr, gone.stderr
print("a run without its collector ends well")
