"""What is deployed beside the program: compose files, dashboards, alert rules, and their checks."""
