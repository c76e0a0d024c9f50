"""What every process measures, and how Prometheus reads it.

`table` is the list of all metrics, `recorder` counts through OpenTelemetry's SDK, `exposition`
writes it down as text, `server` serves that. Knows neither routers nor engines.
"""
