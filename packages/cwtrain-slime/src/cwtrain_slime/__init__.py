"""slime adapter for CoreWeave Dedicated Inference."""
