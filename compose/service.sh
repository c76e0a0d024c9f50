#!/bin/sh
# Runs one service in a container: baton-service router|prefill-worker|decode-worker [OPTION...]
#
# The program reads options from the environment itself, BATON_OPT_LOG_LEVEL=debug is --log-level
# debug; these are a container's defaults.
set -eu

export BATON_OPT_HOST="${BATON_OPT_HOST:-0.0.0.0}" BATON_OPT_PORT="${BATON_OPT_PORT:-7700}"
# Other containers reach a worker by its container's name.
export BATON_OPT_ADVERTISE="${BATON_OPT_ADVERTISE:-$HOSTNAME:$BATON_OPT_PORT}"

exec baton "$@"
