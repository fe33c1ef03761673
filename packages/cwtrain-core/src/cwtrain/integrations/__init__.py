"""The documented names of the trainers' adapters, each an alias of its own distribution.

    cwtrain.integrations.slime      cwtrain_slime      pip install cwtrain-slime
    cwtrain.integrations.miles      cwtrain_miles      pip install cwtrain-miles
    cwtrain.integrations.nemo_rl    cwtrain_nemo_rl    pip install cwtrain-nemo-rl
    cwtrain.integrations.rollout    cwtrain_rollout    pip install cwtrain-rollout

``python -m cwtrain.integrations.preflight`` checks a trainer's access to its deployment and bucket before a run; it
belongs to core. Adapters of others have their own package and the entry-point group ``cwtrain``, and need no alias.
"""
