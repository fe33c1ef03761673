"""NeMo-RL adapter for CoreWeave Dedicated Inference."""
