#!/usr/bin/env bash
# A slime run whose weights are served by a deployment. All of slime's GPUs train: it starts no engine.
#
#   bash run.sh check     what will not work, before a GPU is rented
#   bash run.sh base      the same, and uploads the base checkpoint ahead of the run
#   bash run.sh train     the run; the same line again after a crash goes on
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=env.sh
source "${RECIPE_ENV:-$here/env.sh}"
# shellcheck disable=SC1090
source "$SLIME_DIR/scripts/models/$MODEL.sh"

WEIGHTS=(
    --update-weight-mode delta
    --update-weight-transport disk
    --update-weight-delta-encoding xor
    --update-weight-delta-checksum adler32
    --update-weight-disk-dir "$SYNC_DIR"
    --update-weight-local-checkpoint-dir "$SYNC_DIR-unused"
    --custom-update-weight-post-write-path cwtrain.integrations.slime.hook_without_engines
)
CHECKPOINTS=(
    --hf-checkpoint "$HF_CHECKPOINT"
    --ref-load "$REF_LOAD"
    --load "$SAVE_DIR"
    --save "$SAVE_DIR"
    --save-interval 20
)
ROLLOUTS=(
    --rollout-num-gpus 0
    --rollout-function-path "$ROLLOUT_FUNCTION"
    --prompt-data "$PROMPT_DATA"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
    --num-rollout "${NUM_ROLLOUT:-3000}"
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192
    --rollout-temperature 1
    --rollout-top-p 1.0
    --global-batch-size 256
)
TRAINING=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node "$NUM_GPUS"
    --tensor-model-parallel-size 2
    --sequence-parallel
    --advantage-estimator grpo
    --eps-clip 0.2
    --eps-clip-high 0.28
    --optimizer adam
    --lr 1e-6
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)
# Two more that pay off: importance weights for samples of older weights, and slime's own tracker.
#   --use-tis    --use-wandb --wandb-project P
ARGS=("${MODEL_ARGS[@]}" "${WEIGHTS[@]}" "${CHECKPOINTS[@]}" "${ROLLOUTS[@]}" "${TRAINING[@]}")

case "${1:-}" in
    check) exec cwtrain slime check "${ARGS[@]}" ;;
    base) exec cwtrain slime check --publish-base "${ARGS[@]}" ;;
    train) ;;
    *) echo "usage: bash run.sh check | base | train" >&2; exit 2 ;;
esac

cwtrain slime check "${ARGS[@]}" > /dev/null
export PYTHONPATH="$MEGATRON_DIR${PYTHONPATH:+:$PYTHONPATH}" CUDA_DEVICE_MAX_CONNECTIONS=1 RAY_ADDRESS=auto
# The workers inherit this shell's environment, so the token is in no job description and in no log.
ray start --head --num-gpus "$NUM_GPUS" --disable-usage-stats
trap 'ray stop' EXIT
cd "$SLIME_DIR"
python3 train.py "${ARGS[@]}"
