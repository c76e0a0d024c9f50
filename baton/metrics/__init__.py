"""What every process measures, and how Prometheus reads it.

`table` is the list of all metrics, `recorder` counts them with prometheus_client, `server` serves
the page. Knows neither routers nor engines.
"""
