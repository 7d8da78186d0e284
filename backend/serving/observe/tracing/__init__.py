"""Traces of requests, sent to an OpenTelemetry collector (docs/tracing.md). Nothing here is imported unless there is one."""
