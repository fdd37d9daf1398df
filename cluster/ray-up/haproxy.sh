#!/bin/sh
# Serve starts this in HAProxy's place, and it becomes HAProxy: haproxy.sh ... -f FILE ...
#
# The statistics page, which nothing guards and which Serve opens to every network, stays on the host. -dS: with
# splicing on, HAProxy 2.8 does not see that a client has left whose head and body came apart.
port=${RAY_SERVE_HAPROXY_STATS_PORT:-8404}
for argument in "$@"; do
    [ "$previous" = -f ] && sed -i -E "s/^( *bind +)[*](:$port)\$/\\1127.0.0.1\\2/" "$argument"
    previous=$argument
done
exec "$(cat "$(dirname "$0")/../haproxy")" -dS "$@"
