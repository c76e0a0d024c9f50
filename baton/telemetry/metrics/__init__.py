"""Metrics of every process, for Prometheus.

`instruments` is the list of all metrics, `recorder` counts them with prometheus_client;
`baton.net.metrics_server` serves them. Knows neither routers nor engines.
"""
