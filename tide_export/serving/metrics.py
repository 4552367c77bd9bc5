"""Counts requests, tokens, exits and drafts of the server, in Prometheus' format."""

from collections import Counter as Counts
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tide_export.runtime.handle import RequestHandle
from tide_export.runtime.scheduler import Scheduler
from tide_export.runtime.stats import ExitStats

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Holds the counters and histograms of one server, in a registry of their own."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry}
        self.requests = Counter("tide_requests", "Requests, by path and HTTP status.", ["path", "status"], **own)
        ends = "Generations that ended, by the mode they were decoded in and reason."
        self._ended = Counter("tide_generations", ends, ["mode", "reason"], **own)
        self._prompt = Counter("tide_prompt_tokens", "Tokens of prompts.", **own)
        self._cached = Counter("tide_cached_prompt_tokens", "Tokens of prompts from the prefix cache.", **own)
        self._hits = Counter("tide_prefix_cache_hits", "Requests that began with what was cached.", **own)
        self._tokens = Counter("tide_tokens", "Tokens generated, by the layers they were made after.", ["layer"], **own)
        self._layers = Counter("tide_layer_passes", "Layer passes of generated tokens.", ["kind"], **own)
        self._drafts = Counter("tide_drafts", "Drafts of lossless mode, by source.", ["source", "kind"], **own)
        saved = "Time that drafts of lossless mode saved, by source, estimated from costs; falls where they lose."
        self._saved = Gauge("tide_draft_saved_seconds", saved, ["source"], **own)
        self.first_token = Histogram(
            "tide_first_token_seconds", "From the request to its first token.", buckets=SECONDS, **own
        )
        self._per_token = Histogram("tide_token_seconds", "Time a token after the first.", buckets=SECONDS, **own)
        cache = Gauge("tide_prefix_cache_bytes", "K/V and recurrent states in the prefix cache.", **own)
        cache.set_function(lambda: scheduler.prefix_cache_bytes)
        Gauge("tide_requests_running", "Requests with a slot.", **own).set_function(lambda: scheduler.running)
        Gauge("tide_requests_waiting", "Requests in the queue.", **own).set_function(lambda: scheduler.waiting)

        if scheduler.audit is not None:
            self._registry.register(AuditCollector(scheduler))

    def ended(self, handle: RequestHandle) -> None:
        """Counts a generation that ended."""
        stats, reason = handle.stats, handle.finish_reason or "cancelled"
        self._ended.labels(handle.mode, reason).inc()
        self._read(handle, stats)
        for layer, count in Counts(stats.exit_layer).items():
            self._tokens.labels(str(layer)).inc(count)
        run, total = sum(stats.layers_run), stats.num_layers * stats.total_tokens
        self._layers.labels("run").inc(run)
        self._layers.labels("skipped").inc(max(total - run, 0))
        for source, (drafted, accepted) in stats.drafts.items():
            self._drafts.labels(source, "drafted").inc(drafted)
            self._drafts.labels(source, "accepted").inc(accepted)
            self._saved.labels(source).inc(stats.saved_seconds[source])
        if stats.total_tokens > 1:
            self._per_token.observe(stats.decode_seconds / (stats.total_tokens - 1))

    def read(self, handle: RequestHandle) -> None:
        """Counts the prompt of a generation."""
        self._read(handle, handle.stats)

    def _read(self, handle: RequestHandle, stats: ExitStats) -> None:
        cached = handle.cached_tokens
        self._prompt.inc(stats.prompt_tokens)
        self._cached.inc(cached)
        self._hits.inc(cached > 0)

    def render(self) -> bytes:
        """Returns the text of /metrics."""
        return generate_latest(self._registry)


class AuditCollector(Collector):
    """Collects the counts and bounds of an audit."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        audit = self._scheduler.audit
        assert audit is not None
        yield CounterMetricFamily("tide_audit_tokens", "Tokens of mode exit chosen for the audit.", value=audit.audited)
        checked = "Chosen tokens that had exited and were computed again at full depth."
        yield CounterMetricFamily("tide_audit_checked", checked, value=audit.checked)
        different = "Checked tokens for which full depth chooses another token."
        yield CounterMetricFamily("tide_audit_different", different, value=audit.different)
        raises = "Number of times that thresholds were raised."
        yield CounterMetricFamily("tide_audit_raises", raises, value=audit.raises)
        for side, bound in (("upper", audit.upper_bound), ("lower", audit.lower_bound)):
            about = f"Share of changed tokens of mode exit: {side} bound, since thresholds were raised last."
            yield GaugeMetricFamily(f"tide_audit_changed_tokens_{side}_bound", about, value=bound)
