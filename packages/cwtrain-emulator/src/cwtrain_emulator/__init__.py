"""CoreWeave Dedicated Inference on one machine: API, bucket, replicas and endpoint, for tests and for learning."""
