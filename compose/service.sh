#!/bin/sh
# Runs one service in a container: baton-service router|prefill-worker|decode-worker [OPTION...]
#
# Options come from the environment, so that compose files can be laid over one another, each adding
# its own: BATON_OPT_LOG_LEVEL=debug is --log-level debug; an empty value leaves the option out.
set -eu

service=$1
shift

for name in $(env | sed -n 's/^\(BATON_OPT_[A-Z0-9_]*\)=..*$/\1/p' | sort); do
    option=$(printf '%s' "${name#BATON_OPT_}" | tr 'A-Z_' 'a-z-')
    eval "value=\${$name}"
    set -- "--$option" "$value" "$@"
done

# Other containers find a worker under its container's name, unless BATON_OPT_ADVERTISE says more.
case $service in
    *-worker) set -- --advertise "$HOSTNAME:7700" "$@" ;;
esac

exec baton "$service" --host 0.0.0.0 --port 7700 "$@"
