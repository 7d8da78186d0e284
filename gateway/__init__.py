"""An OpenAI-compatible HTTP endpoint in front of the Triton model `everbatch`. It knows Triton by gRPC and nothing else."""
