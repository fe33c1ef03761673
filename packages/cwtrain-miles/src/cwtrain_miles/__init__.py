"""miles adapter for CoreWeave Dedicated Inference."""
