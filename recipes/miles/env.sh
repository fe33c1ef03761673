# What a run needs from its environment. Copy this file, fill it in, and name the copy in RECIPE_ENV.
# Source it on every node before `ray start`: Ray's workers inherit it, and no secret has to go through Ray.

# The service.
export COREWEAVE_API_TOKEN="${COREWEAVE_API_TOKEN:?the API access token}"
export AWS_ACCESS_KEY_ID="${AWS_ACCESS_KEY_ID:?the key of the bucket}"
export AWS_SECRET_ACCESS_KEY="${AWS_SECRET_ACCESS_KEY:?the secret of the bucket}"
export AWS_REGION="${AWS_REGION:?the zone of the bucket, like US-EAST-04A}"

# The run. The same id after a restart goes on; another id is another run.
export CWTRAIN_HOTLOAD_DEPLOYMENT_ID="${CWTRAIN_HOTLOAD_DEPLOYMENT_ID:?cwtrain --output id deployment get NAME}"
export CWTRAIN_HOTLOAD_RUN_ID="${CWTRAIN_HOTLOAD_RUN_ID:-miles-run-1}"
# A full snapshot every 20 versions, and a mirror on the disk of rank 0 to make it from: the size of the model.
export CWTRAIN_HOTLOAD_FULL_EVERY="${CWTRAIN_HOTLOAD_FULL_EVERY:-20}"
# Delete versions that are published and behind the last full snapshot: miles itself keeps them for ever.
export CWTRAIN_HOTLOAD_CLEANUP="${CWTRAIN_HOTLOAD_CLEANUP:-1}"

# The trainer.
export MILES_DIR="${MILES_DIR:-$HOME/miles}"
export MEGATRON_DIR="${MEGATRON_DIR:-$HOME/Megatron-LM}"
export MODEL="${MODEL:-qwen3-4B}"                    # a file in miles' scripts/models
export HF_CHECKPOINT="${HF_CHECKPOINT:?a local directory: deltas start from its bytes}"
export REF_LOAD="${REF_LOAD:?the same weights in Megatron format}"
export SAVE_DIR="${SAVE_DIR:?where the trainer keeps its checkpoints}"
export SYNC_DIR="${SYNC_DIR:?on a disk that all trainer nodes share; it is erased at every start}"
export PROMPT_DATA="${PROMPT_DATA:?a jsonl file}"
export ROLLOUT_FUNCTION="${ROLLOUT_FUNCTION:?a function that samples from the deployment, as in the README}"
export NUM_GPUS="${NUM_GPUS:-8}"
