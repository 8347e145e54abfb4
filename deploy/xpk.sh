#!/usr/bin/env bash
# One run on the hosts of a TPU slice of GKE, as a workload of xpk:
#   CLUSTER=tpus IMAGE=gcr.io/project/podracer:0.2.0 deploy/xpk.sh --tpu-type v5litepod-16
# Needs the xpk storage `podracer`, a file system mounted at /shared in all pods, which the image's
# user 1000 can write: xpk sets no group. The processes find each other. With GPUs (--device-type)
# add flags to the commands: --coordinator "$JAX_COORDINATOR_ADDRESS:1234" --num-processes "$NNODES"
# --process-id "$NODE_RANK".
set -euo pipefail

: "${CLUSTER:?the cluster that xpk created}" "${IMAGE:?the image, in a registry}"
RUN=/shared/run

# One line, which xpk puts into a manifest; it sends signals to the shell, so podracer takes its place.
command="if [ -e $RUN/config.json ]; then exec podracer resume $RUN;"
command+=" else exec podracer train cartpole_ppo --run-dir $RUN --num-envs 4096; fi"

# 75: told to stop, and saved; 77: another process is lost. Killed pods (137, 143) start again anyway.
exec xpk workload create --cluster "$CLUSTER" --workload podracer --docker-image "$IMAGE" \
    --storage podracer --max-restarts 100 --restart-on-exit-codes 75,77 \
    --termination-grace-period-seconds 120 --command "$command" "$@"
